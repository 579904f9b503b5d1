"""The worker of a rank."""

from vllm.config import VllmConfig


class Worker:
    def __init__(self, vllm_config: VllmConfig, rank: int) -> None:
        self.vllm_config, self.rank = vllm_config, rank

    def init_device(self) -> None:
        self.vllm_config.parallel_config.rank = self.rank

    def compile_or_warm_up_model(self) -> str:
        from vllm.v1.worker import worker_base

        return worker_base.compile_or_warm_up_model(self.vllm_config)
