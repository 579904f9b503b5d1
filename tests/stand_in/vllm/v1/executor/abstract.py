"""The executor of an engine core: all workers, however many processes they are in."""

import copy
import pickle
import subprocess
import sys

from vllm._version import version
from vllm.config import VllmConfig
from vllm.v1.worker import worker_base


class Executor:
    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config

    def initialize_from_config(self, kv_cache_configs: object) -> str | None:
        return self._compile() if version.startswith("0.26.") else None

    def _compile(self) -> str:
        parallel = self.vllm_config.parallel_config
        if parallel.distributed_executor_backend == "ray":
            from vllm.v1.executor.ray_executor import compile_on_all_nodes

            return compile_on_all_nodes(self)
        if parallel.tensor_parallel_size == 1:
            worker_base.init_worker()
            return worker_base.compile_or_warm_up_model(self.vllm_config)
        workers = []
        for rank in range(parallel.tensor_parallel_size):
            config = copy.deepcopy(self.vllm_config)
            config.parallel_config.rank = rank
            worker = subprocess.Popen(
                [sys.executable, "-m", "vllm.v1.worker.worker_base"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            workers.append((worker, pickle.dumps(config)))
        answers = []
        for worker, config in workers:
            assert worker.stdin is not None
            worker.stdin.write(config)
            worker.stdin.close()
        for worker, _config in workers:
            assert worker.stdout is not None
            output = worker.stdout.read().decode()
            assert worker.wait() == 0, "a worker died"
            for line in output.splitlines():
                if line.startswith("ANSWER "):
                    answers.append(line.removeprefix("ANSWER "))
                else:
                    print(line, flush=True)
        return " ".join(answers)


if not version.startswith("0.26."):

    def _compile_or_warm_up_model(self: Executor) -> str:
        return self._compile()

    _compile_or_warm_up_model.__name__ = "compile_or_warm_up_model"
    Executor.compile_or_warm_up_model = _compile_or_warm_up_model
