"""The directories that vLLM keeps below `VLLM_CACHE_ROOT`.

Layout: vLLM 0.26, 0.28, 0.31, 0.32, 0.33 `compilation/decorators.py` (AOT), `compilation/backends.py` (ten-hex
directories and their index), `model_executor/models/registry.py` (modelinfos), `model_executor/warmup/` (results of
FlashInfer's autotuner), `v1/worker/startup_plan.py`. A unit is what the engine picks as a whole: an AOT directory with
all ranks and its `inductor_cache`, or a ten-hex directory. One launch may have several of each (a draft head, an
encoder). The engine picks by a hash that is blind to some factors, so these trees are not content-keyed.

What lies beside them stays where it is: `gpu_p2p_access_cache_for_<ids>.json` is a fact about one machine that goes by
device numbers only, `dummy_cache/` is empty.
"""

import re
from collections.abc import Collection

from cachemgr.domains import checks, relocation, scrub, torch
from cachemgr.domains.domain import ROOT_VARIABLE, Domain, Relocation

AOT = "torch_aot_compile"
_RANK = re.compile(r"rank_\d+_\d+(?:_dev\d+)?")
"""`rank_<rank>_<dp>`, and with the device's number where it is patched in (vllm-project/vllm#38962)."""
FACTORS_NAME = "cache_key_factors.json"
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


def unit_fault(unit: str, paths: Collection[str]) -> str | None:
    """Triton kernels inside must be whole, an index must lie beside every artifact it is there for, and a rank that has
    something of an AOT directory must have its `model`."""
    return _kernel_fault(paths) or _index_fault(paths) or _model_fault(unit, paths)


def _model_fault(unit: str, paths: Collection[str]) -> str | None:
    if not unit.startswith(AOT + "/"):
        return None
    lacking = sorted(rank for rank in _rank_directories(unit, paths) if f"{unit}/{rank}/model" not in paths)
    return f"`{lacking[0]}` has no `model`" if lacking else None


def ranks_of(unit: str, paths: Collection[str]) -> frozenset[str]:
    """The ranks that have a directory in a unit. Some builds add the device's ordinal to its name."""
    return frozenset(name.partition("_dev")[0] for name in _rank_directories(unit, paths))


def _rank_directories(unit: str, paths: Collection[str]) -> frozenset[str]:
    depth = unit.count("/") + 1
    names = (path.split("/")[depth] for path in paths if path.count("/") > depth)
    return frozenset(name for name in names if _RANK.fullmatch(name))


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
    """The index, Triton's group files inside, and the note with the values of variables."""
    if inner := _inside_inductor(path):
        return torch.relocation_of(inner)
    name = path.rsplit("/", 1)[-1]
    if name == FACTORS_NAME:
        return scrub.FACTORS
    return _INDEX if name == _INDEX_NAME else None


def chooses(path: str) -> bool:
    """Inductor's winners inside."""
    return torch.chooses(_inside_inductor(path))


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
    ROOT_VARIABLE,
    "torch_compile_cache",
    in_place=True,
    travels=travels,
    unit_of=unit_of,
    check_of=check_of,
    unit_fault=unit_fault,
    relocation_of=relocation_of,
    entry_of=entry_of,
    ranks_of=ranks_of,
    chooses=chooses,
    content_keyed=False,
    needs_compile=True,
    source="vLLM 0.26-0.33 compilation/decorators.py, compilation/backends.py, compilation/compiler_interface.py",
)

# One file per model class with the hash of its source in it; anything odd is a miss, and asked of the class again.

MODELINFOS = Domain(
    "modelinfos",
    ROOT_VARIABLE,
    "modelinfos",
    in_place=True,
    travels=lambda path: path.endswith(".json") and "/" not in path,
    unit_of=lambda path: path,
    check_of=lambda _path: checks.parsable_json,
    content_keyed=True,
    source="vLLM 0.26-0.33 model_executor/models/registry.py",
)

# What FlashInfer's autotuner found, one directory per hash of the configuration: one file for all ranks up to 0.31, one
# per rank since 0.32, of which the engine loads all or none. The hash is blind to the device and to libraries. A file
# of other libraries is ignored and never replaced, hence exact matches only.

_TUNED = re.compile(r"(?:[^/]+/){0,2}[0-9a-f]{64}/autotune_configs(?:_dp(\d+)_rank(\d+))?\.json")


def tuned_ranks(_unit: str, paths: Collection[str]) -> frozenset[str]:
    """The ranks that have results of their own, named like their directories elsewhere."""
    found = (_TUNED.fullmatch(path) for path in paths)
    return frozenset(f"rank_{match[2]}_{match[1]}" for match in found if match is not None and match[1] is not None)


AUTOTUNE = Domain(
    "flashinfer_autotune",
    ROOT_VARIABLE,
    "flashinfer_autotune_cache",
    moved_by="VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR",
    in_place=True,
    travels=lambda path: _TUNED.fullmatch(path) is not None,
    unit_of=lambda path: path.rpartition("/")[0],
    check_of=lambda _path: checks.json_object,
    ranks_of=tuned_ranks,
    content_keyed=False,
    exact_only=True,
    source="vLLM 0.26-0.33 model_executor/warmup/flashinfer_autotune_cache.py, model_executor/warmup/kernel_warmup.py",
)

# How much memory the KV cache got. Never by default: a plan of a machine with more free memory runs out of it.

_PLAN = re.compile(r"startup_plan_([0-9a-f]{16})\.json")


def _plan(content: checks.Content) -> str | None:
    if not content.whole:
        return None
    value = checks.parsed_object(content.head)
    if value is None:
        return "is no complete JSON object"
    match = _PLAN.fullmatch(content.name)
    return None if match is not None and value.get("fingerprint") == match[1] else "is no plan of its name"


STARTUP_PLAN = Domain(
    "startup_plan",
    ROOT_VARIABLE,
    "startup_plan",
    in_place=True,
    travels=lambda path: _PLAN.fullmatch(path) is not None,
    unit_of=lambda path: path,
    check_of=lambda _path: _plan,
    content_keyed=False,
    exact_only=True,
    source="vLLM 0.26-0.33 v1/worker/startup_plan.py",
)
