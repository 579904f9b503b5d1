"""A worker, in the engine core's process or in one of its own."""

import pickle
import sys

from vllm.config import VllmConfig


def init_worker() -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()


class WorkerWrapperBase:
    """What Ray and multiprocessing make; the worker comes when its node and device are known."""

    def __init__(self, rpc_rank: int) -> None:
        self.rpc_rank = rpc_rank

    def init_worker(self, all_kwargs: list) -> None:
        kwargs = all_kwargs[self.rpc_rank]
        self.vllm_config = kwargs["vllm_config"]
        init_worker()
        from vllm.v1.worker.gpu_worker import Worker

        self.worker = Worker(**kwargs)

    def init_device(self) -> None:
        self.worker.init_device()

    def __getattr__(self, name: str) -> object:
        return getattr(self.worker, name)


def compile_or_warm_up_model(config: VllmConfig) -> str:
    from vllm.compilation.decorators import kernel, run

    kernel("rms_norm")
    answer = "eager" if config.enforce_eager else run(config)
    kernel("attention")
    return answer


if __name__ == "__main__":
    init_worker()
    sys.stdout.write("ANSWER " + compile_or_warm_up_model(pickle.load(sys.stdin.buffer)) + "\n")
