"""The engine core."""

import logging
import os
import pickle
import subprocess
import sys
import time

from vllm.config import VllmConfig

logger = logging.getLogger("vllm.v1.engine.core")


class EngineCore:
    def __init__(self, config: VllmConfig) -> None:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        from vllm._version import version
        from vllm.v1.executor.abstract import Executor

        logger.info("Initializing a V1 LLM engine (v%s) with config: model=%r", version, config.hashed["model"])
        executor = Executor(config)
        first = executor.initialize_from_config([])
        self.answer = first if version.startswith("0.26.") else executor.compile_or_warm_up_model()
        logger.info("init engine (profile, create kv cache, warmup model) took 1.50 s (compilation: 0.50 s)")


class CoreProcess:
    """The engine core in a process of its own, until `close`."""

    def __init__(self, config: VllmConfig) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.v1.engine.core"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(pickle.dumps(config))
        self.process.stdin.flush()
        self.answer = ""
        for line in self.process.stdout:
            text = line.decode().rstrip("\n")
            if text.startswith("ANSWER "):
                self.answer = text.removeprefix("ANSWER ")
                return
            print(text, flush=True)
        failed = {"EngineCore_DP0": self.process.wait()}
        raise RuntimeError(f"Engine core initialization failed. Failed core proc(s): {failed}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def make(config: VllmConfig) -> "EngineCore | CoreProcess":
    """As `VLLM_ENABLE_V1_MULTIPROCESSING` says."""
    return CoreProcess(config) if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "1" else EngineCore(config)


if __name__ == "__main__":
    core = EngineCore(pickle.load(sys.stdin.buffer))
    print("ANSWER " + core.answer, flush=True)
    while sys.stdin.buffer.read(1):
        time.sleep(0.01)
