"""The directories that vLLM keeps below `VLLM_CACHE_ROOT`.

Layout: vLLM 0.26, 0.28, 0.31, 0.32 `compilation/decorators.py` (AOT), `compilation/backends.py` (ten-hex directories
and their index), `model_executor/models/registry.py` (modelinfos). A unit is what the engine picks as a whole: an AOT
directory with all ranks and its `inductor_cache`, or a ten-hex directory. The engine picks by a hash that is blind to
some factors, so these trees are not content-keyed.
"""

import re
from collections.abc import Collection

from cachemgr.domains import checks, relocation, torch
from cachemgr.domains.domain import Domain, Relocation

AOT = "torch_aot_compile"
_TEN_HEX = re.compile(r"[0-9a-f]{10}")
_AOT_NAME = re.compile(r"[0-9a-f]{64}")
_INDEX_NAME = "vllm_compile_cache.py"
_INDEX = Relocation(relocation.detach_literal, relocation.attach_literal, needs_all=True)


def travels(path: str) -> bool:
    """Files of AOT and ten-hex directories, except locks and temporaries (`model.<pid>.tmp`)."""
    if entry_of(unit_of(path)) is None:
        return False
    inner = _inside_inductor(path)
    name = path.rsplit("/", 1)[-1]
    if inner:
        return torch.travels(inner)
    return "__pycache__" not in path and not name.endswith((".tmp", ".lock")) and not name.startswith("tmp")


def unit_of(path: str) -> str:
    """The AOT directory or the ten-hex directory."""
    parts = path.split("/")
    return "/".join(parts[: 2 if parts[0] == AOT else 1])


def entry_of(unit: str) -> str | None:
    """vLLM's own name of a unit: 64 hex of an AOT directory, or ten hex."""
    name = unit.removeprefix(AOT + "/")
    known = (_AOT_NAME if name != unit else _TEN_HEX).fullmatch(name)
    return name if known else None


def check_of(path: str) -> checks.Check:
    """Inductor's own checks inside, a finished pickle for `model`, and for the rest what its kind allows."""
    if inner := _inside_inductor(path):
        return torch.check_of(inner)
    name = path.rsplit("/", 1)[-1]
    if name == "model":
        return checks.ends_as_pickle
    if name.endswith(".json"):
        return checks.parsable_json
    if name == _INDEX_NAME:
        return checks.parsable_literal
    return checks.not_empty


def unit_fault(_unit: str, paths: Collection[str]) -> str | None:
    """Triton kernels inside must be whole, and an index must lie beside every artifact it is there for."""
    return _kernel_fault(paths) or _index_fault(paths)


def _kernel_fault(paths: Collection[str]) -> str | None:
    kernels: dict[str, list[str]] = {}
    for path in paths:
        inner = _inside_inductor(path)
        if inner.startswith("triton/"):
            kernels.setdefault(path.rpartition("/")[0], []).append(inner)
    faults = (torch.unit_fault(torch.unit_of(inside[0]), inside) for inside in kernels.values())
    return next((fault for fault in faults if fault), None)


def _index_fault(paths: Collection[str]) -> str | None:
    directories = {path[: path.index("/artifact_")] for path in paths if "/artifact_" in path}
    indexed = {path.rsplit("/", 1)[0] for path in paths if path.endswith("/" + _INDEX_NAME)}
    missing = {directory for directory in directories if not _covered(directory, indexed)}
    return f"`{min(missing)}` has artifacts and no index" if missing else None


def _covered(directory: str, indexed: Collection[str]) -> bool:
    """An index lies beside its artifacts or above them."""
    while directory:
        if directory in indexed:
            return True
        directory = directory.rpartition("/")[0]
    return False


def relocation_of(path: str) -> Relocation | None:
    """The index, and Triton's group files inside."""
    if inner := _inside_inductor(path):
        return torch.relocation_of(inner)
    return _INDEX if path.rsplit("/", 1)[-1] == _INDEX_NAME else None


def _inside_inductor(path: str) -> str:
    """The path as it would be in an Inductor directory, or nothing when it does not lie in one.

    Such are `torch_aot_compile/<64hex>/inductor_cache`, an unpacked `artifact_*`, and what vLLM makes in a ten-hex
    directory without standalone compilation: `<rank>/inductor_cache` and `<rank>/triton_cache`.
    """
    parts = path.split("/")
    for at, part in enumerate(parts[:-2], start=1):
        if part == "inductor_cache" or part.startswith("artifact_"):
            return "/".join(parts[at:])
        if part == "triton_cache":
            return "/".join(["triton", "0", *parts[at:]])
    return ""


TORCH_COMPILE = Domain(
    "torch_compile",
    "VLLM_CACHE_ROOT",
    "torch_compile_cache",
    travels=travels,
    unit_of=unit_of,
    check_of=check_of,
    unit_fault=unit_fault,
    relocation_of=relocation_of,
    entry_of=entry_of,
    content_keyed=False,
)

MODELINFOS = Domain(
    "modelinfos",
    "VLLM_CACHE_ROOT",
    "modelinfos",
    travels=lambda path: path.endswith(".json") and "/" not in path,
    unit_of=lambda path: path,
    check_of=lambda _path: checks.parsable_json,
    unit_fault=lambda _unit, _paths: None,
    relocation_of=lambda _path: None,
    content_keyed=True,
)
