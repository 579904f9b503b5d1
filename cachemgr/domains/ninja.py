"""What every cache has in common that ninja keeps: FlashInfer's modules, tvm-ffi's, torch's C++ extensions.

Their engines run ninja at each load, even when the library is there. It builds nothing only if the absolute paths, the
modification times, `.ninja_log` and `.ninja_deps` are as it left them, and no source is newer (seen with ninja 1.13).
So these units travel with their times and between identical images only. Elsewhere ninja builds again: slow, never
wrong. Ninja does not look into what it built: a library that is cut off but has its time kills every start.
"""

from collections.abc import Collection

from cachemgr.domains import checks
from cachemgr.domains.domain import Relocation
from cachemgr.domains.relocation import CannotTravelError, unchanged

RULES = "build.ninja"
_LOGS = {".ninja_log": b"# ninja log v", ".ninja_deps": b"# ninjadeps\n"}
_LOCKS = frozenset({"lock", ".ninja_lock"})
_BUILT = (".so", ".o")


def belongs(path: str) -> bool:
    """Whether a file of a build directory travels: no lock (torch waits for `lock` for ever), no half-written file."""
    name = path.rsplit("/", 1)[-1]
    return (
        name not in _LOCKS
        and not name.endswith((".lock", ".tmp", ".pyc"))
        and ".tmp." not in name
        and not name.startswith("tmp")
        and "__pycache__" not in path.split("/")
    )


def is_build(paths: Collection[str]) -> bool:
    """Whether ninja's rules are among them."""
    return any(path.rsplit("/", 1)[-1] == RULES for path in paths)


def check_of(path: str) -> checks.Check:
    """Objects must be whole ELF, ninja's logs must begin as such, the rest must not be empty."""
    name = path.rsplit("/", 1)[-1]
    if name.endswith((*_BUILT, ".cubin")):
        return checks.whole_elf
    return _log if name in _LOGS else checks.not_empty


def _log(content: checks.Content) -> str | None:
    return None if content.head.startswith(_LOGS[content.name]) else "is no log of ninja"


def relocation_of(path: str) -> Relocation | None:
    """The rules are stored as they are, and only beside what they have built."""
    return _FINISHED if path.rsplit("/", 1)[-1] == RULES else None


def _finished(data: bytes, siblings: Collection[str]) -> bytes:
    """The rules of a build that is done.

    A build that stopped is no damage, since ninja goes on with it; but it is of no use to others.

    Raises:
        CannotTravelError: what makes ninja leave a build alone is not beside them.
    """
    missing = sorted(name for name in _LOGS if name not in siblings)
    if missing:
        raise CannotTravelError(f"has no `{missing[0]}` beside it, so that ninja would build again")
    if not any(name.endswith(_BUILT) for name in siblings):
        raise CannotTravelError("has nothing beside it that was built")
    return data


_FINISHED = Relocation(_finished, unchanged)
