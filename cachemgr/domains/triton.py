"""Triton's kernel cache: one directory per kernel, named by the base32 of its key.

Layout and behaviour: triton 3.6-3.9 `runtime/cache.py`, `compiler/compiler.py`; verified on real trees. A directory in
which one file is missing or cut is taken for a hit and kills the engine, so a directory is one unit. `__grp__*.json`
holds absolute paths of its siblings and is relocated.
"""

import re
from collections.abc import Collection

from cachemgr.domains import checks, relocation
from cachemgr.domains.domain import Domain, Relocation

GROUP_PREFIX = "__grp__"
_KEY = re.compile(r"(?:[A-Z0-9]{40,}|[0-9a-f]{32,})/.+")
"""Base32 of a SHA-256, in hexadecimal before Triton 3."""
_GROUP = Relocation(relocation.detach_json, relocation.attach_json)


def travels(path: str) -> bool:
    """Everything below a kernel directory but locks, temporaries (`tmp.pid_<pid>_<uuid>`) and byte-code."""
    name = path.rsplit("/", 1)[-1]
    return (
        "/" in path
        and not any(part.startswith(("tmp.pid_", ".staging_")) or part == "__pycache__" for part in path.split("/"))
        and not name.endswith((".lock", ".tmp"))
        and ".tmp.pid_" not in name
    )


def unit_of(path: str) -> str:
    """The kernel directory."""
    return path.split("/", 1)[0]


def is_named(path: str) -> bool:
    """Whether it lies in a directory that is named by a key."""
    return _KEY.fullmatch(path) is not None


def check_of(path: str) -> checks.Check:
    """JSON must parse, objects must be whole ELF (a cubin is one), the rest must not be empty."""
    if path.endswith(".json"):
        return checks.parsable_json
    if path.endswith((".so", ".cubin", ".hsaco")):
        return checks.whole_elf
    return checks.not_empty


def unit_fault(_unit: str, paths: Collection[str]) -> str | None:
    """A kernel directory needs its binary for each metadata file, and a group file to be found at all."""
    names = {path.rsplit("/", 1)[-1] for path in paths}
    groups = [name for name in names if name.startswith(GROUP_PREFIX)]
    for group in groups:
        kernel = group.removeprefix(GROUP_PREFIX).removesuffix(".json")
        if f"{kernel}.json" in names and not names & {f"{kernel}.cubin", f"{kernel}.hsaco", f"{kernel}.spv"}:
            return f"kernel `{kernel}` has no binary"
    binaries = [name for name in names if name.endswith((".cubin", ".hsaco"))]
    return "has a binary and no group file" if binaries and not groups else None


def relocation_of(path: str) -> Relocation | None:
    """Group files name their siblings by absolute path."""
    name = path.rsplit("/", 1)[-1]
    return _GROUP if name.startswith(GROUP_PREFIX) and name.endswith(".json") else None


TRITON = Domain(
    "triton",
    "TRITON_CACHE_DIR",
    travels=travels,
    unit_of=unit_of,
    check_of=check_of,
    unit_fault=unit_fault,
    relocation_of=relocation_of,
    is_unit=lambda paths: all(map(is_named, paths)),
    content_keyed=True,
    source="triton 3.6-3.9 runtime/cache.py, compiler/compiler.py",
)
