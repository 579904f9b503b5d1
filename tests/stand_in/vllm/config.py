"""Configurations, as far as the stand-in needs them."""

import os
from dataclasses import dataclass, field


@dataclass
class CompilationConfig:
    mode: int | None = None
    cudagraph_mode: str | None = None
    pass_config: dict = field(default_factory=dict)


@dataclass
class ParallelConfig:
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_size_local: int = 1
    distributed_executor_backend: str | None = None
    rank: int = 0
    data_parallel_index: int = 0


@dataclass
class VllmConfig:
    hashed: dict
    blind: object
    parallel_config: ParallelConfig
    enforce_eager: bool = False


def cache_root() -> str:
    """`envs.VLLM_CACHE_ROOT`, read anew at each use."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", "~"), ".cache")
    return os.path.expanduser(os.environ.get("VLLM_CACHE_ROOT") or os.path.join(caches, "vllm"))
