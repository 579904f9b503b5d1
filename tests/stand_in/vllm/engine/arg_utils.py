"""What an engine is asked for."""

import dataclasses
import json
import logging
import os
from dataclasses import dataclass, field

from vllm.config import CompilationConfig, ParallelConfig, VllmConfig, cache_root
from vllm.plugins import load_general_plugins

logger = logging.getLogger("vllm.engine.arg_utils")


@dataclass
class EngineArgs:
    model: str = "Qwen/Qwen3-0.6B"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    dtype: str = "auto"
    seed: int = 0
    enforce_eager: bool = False
    hf_token: str | None = None
    disable_log_stats: bool = False
    speculative_config: dict | None = None
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)

    def __post_init__(self) -> None:
        load_general_plugins()

    @staticmethod
    def add_cli_args(parser: object) -> object:
        load_general_plugins()
        return parser

    def create_engine_config(self, usage_context: object = None, headless: bool = False) -> VllmConfig:
        if os.environ.get("STAND_IN") == "refuse":
            raise ValueError("no such model")
        inspect_model()
        hashed = dataclasses.asdict(self)
        for name in ("speculative_config", "seed", "hf_token", "disable_log_stats"):
            hashed.pop(name)
        parallel = ParallelConfig(self.tensor_parallel_size, self.data_parallel_size, self.data_parallel_size)
        parallel.distributed_executor_backend = self.distributed_executor_backend
        return VllmConfig(hashed, self.speculative_config, parallel, self.enforce_eager)


class AsyncEngineArgs(EngineArgs):
    pass


def inspect_model() -> None:
    """What vLLM remembers of a model class, else asks a child for that imports it."""
    import subprocess
    import sys

    path = os.path.join(cache_root(), "modelinfos", "vllm-model.json")
    if os.path.exists(path):
        with open(path) as file:
            json.load(file)
        return
    subprocess.run([sys.executable, "-m", "vllm.model_executor.models.registry"], check=True)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".tmp", "w") as file:
        json.dump({"class": "Llama"}, file)
    os.replace(path + ".tmp", path)
