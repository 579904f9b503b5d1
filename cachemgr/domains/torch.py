"""Inductor's cache directory: generated code, host kernels, FX graph and AOTAutograd entries, Triton kernels inside.

Layout: torch 2.13 `_inductor/codecache.py` (names and writes), `_inductor/runtime/autotune_cache.py` (`.best_config`),
`_inductor/runtime/triton_heuristics.py` (`triton/<device>/`). Everything is looked up by a hash of graph, configuration
and compiler command line; what a compiler reads behind that command line (`CPATH`, say) is blind, so these trees do not
cross a blind difference. Precompiled headers (130 to 154 MB per flag set) and locks stay where they are.
"""

import re
from collections.abc import Collection

from cachemgr.domains import checks, scrub, triton
from cachemgr.domains.domain import Domain, Relocation

_STAYS = frozenset({"locks", "precompiled_headers", "tmp"})
_HASH_LENGTH = 51
"""A name that is a hash may begin like a temporary (`tmpab12cd34`)."""
_TRITON_DEPTH = 2
"""`triton/<device>/<kernel directory>`: the kernels start below two levels."""

_NAMED = re.compile(
    r"[a-z2-7]{2}/[a-z0-9]{40,}.*"  # generated code, by its hash
    r"|(?:fxgraph/[a-z2-7]{2}|aotautograd)/[a-z0-9]{40,}/.+"
    r"|cache/[0-9a-f]{8,}"
)


def travels(path: str) -> bool:
    """Not locks, temporaries (`.<pid>.<tid>.tmp`), precompiled headers or byte-code."""
    parts = path.split("/")
    if inner := _inside_triton(parts):
        return triton.travels(inner)
    name = parts[-1]
    return (
        parts[0] not in _STAYS
        and "__pycache__" not in parts
        and "/." not in path
        and not path.startswith(".")
        and not (name.startswith("tmp") and len(name) < _HASH_LENGTH)
        and not name.endswith((".lock", ".tmp", ".pyc", ".gch", ".pch"))
    )


def unit_of(path: str) -> str:
    """A Triton kernel directory, one FX graph or AOTAutograd key, or all files of one generated name."""
    parts = path.split("/")
    if inner := _inside_triton(parts):
        return "/".join([*parts[:_TRITON_DEPTH], triton.unit_of(inner)])
    if parts[0] == "fxgraph" and len(parts) > 3:
        return "/".join(parts[:3])
    if parts[0] == "aotautograd" and len(parts) > 2:
        return "/".join(parts[:2])
    return "/".join([*parts[:-1], parts[-1].split(".", 1)[0]])


def is_named(path: str) -> bool:
    """Whether a name says by itself that Inductor has written it, or Triton inside."""
    inner = _inside_triton(path.split("/"))
    return triton.is_named(inner) if inner else _NAMED.fullmatch(path) is not None


def check_of(path: str) -> checks.Check:
    """Names that are content hashes are compared; objects must be whole ELF; JSON must parse."""
    parts = path.split("/")
    if inner := _inside_triton(parts):
        return triton.check_of(inner)
    if parts[0] in ("fxgraph", "aotautograd"):
        return checks.named_by_content
    if path.endswith(".py"):
        return checks.named_python
    if path.endswith(".so"):
        return checks.whole_elf
    if path.endswith((".best_config", ".json")) or parts[0] == "cache":
        return checks.parsable_json
    return checks.not_empty


def unit_fault(unit: str, paths: Collection[str]) -> str | None:
    """Only Triton kernels inside depend on each other's presence."""
    inner = _inside_triton(f"{unit}/x".split("/"))
    return triton.unit_fault(unit, paths) if inner else None


def relocation_of(path: str) -> Relocation | None:
    """Triton's group files name their directory, and a tuning's winner says how long it took."""
    if inner := _inside_triton(path.split("/")):
        return triton.relocation_of(inner)
    return scrub.WINNER if path.endswith(".best_config") else None


def chooses(path: str) -> bool:
    """A tuning's winner.

    Its name is a hash of the kernel's source, which its candidates are made from, and of torch's own (torch 2.11-2.13
    `_inductor/runtime/autotune_cache.py`, `_prepare_key`); each candidate that was compiled is a kernel of Triton's.
    One kernel may be tuned several times in a cold start, and each artifact of a graph brings the winner that it saw,
    to be written out at every load (`AutotuneCacheArtifact.populate_cache`). So whichever came last lies there: after a
    second start of vLLM 0.26 on two H200s, 2 of 16 winners were others, of kernels that were all there.
    """
    return path.endswith(".best_config") and not _inside_triton(path.split("/"))


def _inside_triton(parts: list[str]) -> str:
    """The path below `triton/<device>/`, or nothing when it does not lie there."""
    return "/".join(parts[_TRITON_DEPTH:]) if parts[0] == "triton" and len(parts) > _TRITON_DEPTH + 1 else ""


INDUCTOR = Domain(
    "inductor",
    "TORCHINDUCTOR_CACHE_DIR",
    travels=travels,
    unit_of=unit_of,
    check_of=check_of,
    unit_fault=unit_fault,
    relocation_of=relocation_of,
    chooses=chooses,
    is_unit=lambda paths: all(map(is_named, paths)),
    content_keyed=False,
    source="torch 2.13 _inductor/codecache.py, _inductor/runtime/autotune_cache.py",
)
