"""A vLLM plugin that keeps the compilation mode of GPUs on a CPU; put this folder on PYTHONPATH.

vLLM's CPU platform turns VLLM_COMPILE into DYNAMO_TRACE_ONCE (0.32 `platforms/cpu.py`, `check_and_update_config`), and
what that mode saves as an AOT artifact is rejected at every later start. With this plugin the graph is split, saved and
loaded as on a GPU: AOT artifacts, ten-hex directories and their index.
"""

import importlib


def register() -> None:
    """What vLLM calls in each of its processes, possibly more than once."""
    platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    settled = platform.check_and_update_config.__func__
    if settled.__module__ == __name__:
        return
    mode = importlib.import_module("vllm.config").CompilationMode.VLLM_COMPILE

    def check_and_update_config(cls, vllm_config) -> None:  # type: ignore[no-untyped-def]
        compilation = vllm_config.compilation_config
        wanted, backend = compilation.mode, compilation.backend
        settled(cls, vllm_config)
        if wanted == mode:
            compilation.mode, compilation.backend = wanted, backend
            compilation.compile_sizes = compilation.compile_sizes or []

    platform.check_and_update_config = classmethod(check_and_update_config)
    leave_functionalized()


def leave_functionalized() -> None:
    """Without the pass that names operators of GPUs only; Inductor has its own pass for the same job."""
    passes = importlib.import_module("vllm.compilation.passes.utility.fix_functionalization")
    passes.FixFunctionalizationPass.__call__ = lambda _self, _graph: None
