"""The ranks that a command runs on this node, the device of each, and whether the command compiles at all.

vLLM names the directories of its torch trees `rank_<r>_<d>`: r counts tensor, pipeline and prefill-context ranks of one
replica, d is its data-parallel index (0.26 to 0.33 `compilation/decorators.py`, `config/parallel.py`).
"""

from collections.abc import Collection, Mapping

import msgspec

from cachemgr.factors.vllm.facts import Facts
from cachemgr.factors.vllm.flags import Flags

_RAY = frozenset({"ray"})
_NO_MODE = frozenset({"0", "NONE"})


class World(msgspec.Struct, frozen=True):
    """What runs on this node."""

    ranks: tuple[str, ...]
    """Names of rank directories that this node writes. Empty where others decide (Ray, an external launcher, a custom
    executor) and where the node runs no engine."""
    ordinals: dict[str, int]
    """Ordinal among the visible devices of each rank. Empty where it is not known."""
    size: int
    """Ranks of the whole world, on all nodes."""


class _Shape(msgspec.Struct, frozen=True):
    """The numbers that a world is made of."""

    replica: int
    """Ranks of one replica."""
    replicas: int
    nodes: int
    node: int
    first: int
    """Data-parallel index of the first replica of this node."""
    local: int
    """Replicas that this node runs, or has a part of."""
    first_local: int
    """How many replicas of this node come before it on the devices: not 0 only for offline data parallelism."""
    spanned: int
    """How many nodes one replica spans."""


def world(flags: Flags, environ: Mapping[str, str]) -> World:
    """The world of a command (`engine/arg_utils.py`, create_engine_config; `v1/executor/multiproc_executor.py`)."""
    shape = _shape(flags, environ)
    size = shape.replica * shape.replicas
    backend = flags.values.get("distributed-executor-backend", "mp")
    if backend not in {"mp", "uni"} or flags.values.get("data-parallel-backend") in _RAY:
        return World((), {}, size)
    part = shape.replica // shape.spanned
    start = part * (shape.node % shape.spanned)
    placed: dict[str, int] = {}
    for replica in range(shape.local):
        # A worker adds its replica's share of devices, unless the replica spans nodes (v1/worker/gpu_worker.py,
        # init_device; 0.33 config/parallel.py, get_local_gpu_index).
        shift = 0 if shape.spanned > 1 else (shape.first_local + replica) * shape.replica
        for rank in range(part):
            placed[f"rank_{start + rank}_{shape.first + replica}"] = rank + shift
    return World(tuple(placed), _on_devices(placed, flags.values.get("device-ids")), size)


def in_charge_of(flags: Flags, environ: Mapping[str, str]) -> int | None:
    """How many ranks wait for the start that this command is in charge of, so that each of a world is counted on one
    node: where a replica spans several, on that of its first rank, whose log has its times. None where somebody else
    starts one process a rank."""
    shape = _shape(flags, environ)
    if flags.values.get("data-parallel-backend") in _RAY:
        return shape.replica * shape.replicas
    if flags.values.get("distributed-executor-backend", "mp") not in {"mp", "uni", *_RAY}:
        return None
    return shape.replica * shape.local if shape.node % shape.spanned == 0 else 0


def compile_expected(
    flags: Flags, environ: Mapping[str, str], facts: Facts, architectures: Collection[str]
) -> tuple[bool, str]:
    """Whether the command writes or reads a torch tree, and why not.

    `architectures` are those of the model's configuration, where they are known. The reasons are those of
    `config/vllm.py` (0.26 to 0.33) in its order.
    """
    for held, reason in (
        (flags.on("enforce-eager"), "--enforce-eager"),
        (environ.get("TORCH_COMPILE_DISABLE") == "1", "TORCH_COMPILE_DISABLE=1"),
        (environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH") == "1", "VLLM_USE_BREAKABLE_CUDAGRAPH=1"),
        (_is_breakable(environ, facts, architectures), "this model runs with breakable CUDA graphs by default"),
        (_mode_is_none(flags), "compilation mode NONE"),
        (_cache_is_off(environ), "VLLM_DISABLE_COMPILE_CACHE"),
    ):
        if held:
            return False, reason
    return True, ""


def _shape(flags: Flags, environ: Mapping[str, str]) -> _Shape:
    replica = 1
    for name in ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size"):
        replica *= max(flags.integer(name, 1), 1)
    replicas = max(flags.integer("data-parallel-size", 1), 1)
    nodes, node = max(flags.integer("nnodes", 1), 1), flags.integer("node-rank", 0)
    if replicas == 1 and environ.get("VLLM_DP_SIZE", "1") not in {"0", "1"}:
        return _offline(replica, environ, nodes, node)
    on_node = max(replica * replicas // nodes, 1)
    inferred = node * on_node // replica if nodes > 1 else 0
    local = flags.integer("data-parallel-size-local", max(on_node // replica, 1) if nodes > 1 else replicas)
    first = flags.integer("data-parallel-start-rank", inferred)
    if flags.on("data-parallel-multi-port-external-lb"):
        # A supervisor starts one server per local replica (dp_supervisor.py), with its share of the devices.
        first = flags.integer("data-parallel-start-rank", node * local)
    elif flags.on("data-parallel-external-lb") or "data-parallel-rank" in flags.values:
        first, local = flags.integer("data-parallel-rank", inferred), 1
    spanned = max(nodes * local // replicas, 1) if nodes > 1 and local else 1
    return _Shape(replica, replicas, nodes, node, first, max(local, 0), 0, spanned)


def _offline(replica: int, environ: Mapping[str, str], nodes: int, node: int) -> _Shape:
    """One replica per process, told by variables (`config/parallel.py`, the case of offline SPMD)."""
    rank = _number(environ.get("VLLM_DP_RANK"), 0)
    local = _number(environ.get("VLLM_DP_RANK_LOCAL"), rank)
    return _Shape(replica, _number(environ.get("VLLM_DP_SIZE"), 1), nodes, node, rank, 1, local, 1)


def _number(text: str | None, default: int) -> int:
    try:
        return int(text or "")
    except ValueError:
        return default


def _on_devices(placed: Mapping[str, int], device_ids: str | None) -> dict[str, int]:
    """Visible ordinals of local device numbers: the same, or through `--device-ids` (indices of visible devices)."""
    if device_ids is None:
        return dict(placed)
    ids = [part.strip() for part in device_ids.split(",")]
    if not all(part.isdigit() for part in ids) or max(placed.values(), default=-1) >= len(ids):
        return {}
    return {rank: int(ids[at]) for rank, at in placed.items()}


def _mode_is_none(flags: Flags) -> bool:
    """A mode in the compilation config wins over the level, and level 0 stands for mode NONE."""
    mode = flags.keys("compilation-config").get("mode")
    if mode is None:
        return flags.values.get("optimization-level") == "0"
    return str(mode).upper() in _NO_MODE


def _is_breakable(environ: Mapping[str, str], facts: Facts, architectures: Collection[str]) -> bool:
    """ROCm keeps compiling most of these (`default_breakable_cudagraph_architectures`); there the tree comes as a
    surprise, and is captured all the same."""
    return "VLLM_USE_BREAKABLE_CUDAGRAPH" not in environ and not facts.breakable.isdisjoint(architectures)


def _cache_is_off(environ: Mapping[str, str]) -> bool:
    return _number(environ.get("VLLM_DISABLE_COMPILE_CACHE"), 0) != 0
