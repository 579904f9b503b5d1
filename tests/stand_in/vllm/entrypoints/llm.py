"""Offline inference."""

from vllm.engine.arg_utils import EngineArgs


class LLM:
    def __init__(self, model: str, **kwargs: object) -> None:
        from vllm.v1.engine.core import make

        args = EngineArgs(model=model, disable_log_stats=True, **kwargs)
        self.core = make(args.create_engine_config(usage_context="LLM_CLASS"))

    def generate(self) -> str:
        return self.core.answer
