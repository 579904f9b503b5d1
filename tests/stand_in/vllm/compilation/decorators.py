"""The look-up of an AOT entry, in each worker."""

import base64
import hashlib
import json
import logging
import os
import signal
import time

from vllm.compilation.backends import CompilerManager
from vllm.compilation.counter import compilation_counter
from vllm.config import VllmConfig, cache_root

logger = logging.getLogger("vllm.compilation.decorators")


def _try_load_aot_compiled_fn(model: object, aot_compilation_path: str) -> str | None:
    try:
        with open(aot_compilation_path, "rb") as file:
            data = file.read()
    except OSError:
        return None
    if os.environ.get("STAND_IN") == "reject":
        logger.warning(
            "Compiling model again due to a load failure from %s, reason: %s",
            aot_compilation_path,
            "pickle data was truncated",
        )
        return None
    if os.environ.get("STAND_IN") == "die":
        raise RuntimeError(f"cannot load {aot_compilation_path}")
    if os.environ.get("STAND_IN") == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    compilation_counter.num_aot_artifacts_loaded += 1
    logger.info("Directly load AOT compilation from path %s", aot_compilation_path)
    return data[2:].partition(b"|")[0].decode()


def run(config: VllmConfig) -> str:
    """What one worker does at its first forward; the answer of its graph."""
    name = hashlib.sha256(json.dumps(config.hashed, sort_keys=True).encode()).hexdigest()
    directory = os.path.join(cache_root(), "torch_compile_cache", "torch_aot_compile", name)
    inductor = os.path.join(directory, "inductor_cache")
    os.makedirs(inductor, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = inductor
    rank = f"rank_{config.parallel_config.rank}_{config.parallel_config.data_parallel_index}"
    path = os.path.join(directory, rank, "model")
    found = _try_load_aot_compiled_fn(None, path)
    if found is not None:
        return found
    time.sleep(float(os.environ.get("COMPILE_SECONDS", "0")))
    compilation_counter.num_aot_compiles += 1
    ten_hex = os.path.join(cache_root(), "torch_compile_cache", name[:10], rank, "backbone")
    os.makedirs(ten_hex, exist_ok=True)
    manager = CompilerManager()
    manager.initialize_cache(ten_hex, False, "backbone")
    manager.save_to_file()
    graph = f"graph of {config.blind}"
    write(path, b"\x80\x04" + graph.encode() + b"|" + b"x" * 3000 + b".")
    code = b"def call(): pass"
    folded = base64.b32encode(hashlib.sha256(code).digest())[:51].decode().lower()
    write(f"{inductor}/{folded[:2]}/c{folded}.py", code)
    logger.info("saved AOT compiled function to %s", path)
    return graph


def kernel(name: str) -> None:
    base = os.environ.get("TRITON_CACHE_DIR") or os.path.join(os.environ.get("HOME", "~"), ".triton", "cache")
    folder = os.path.join(base, hashlib.sha256(name.encode()).hexdigest().upper()[:52])
    path = f"{folder}/{name}.source"
    if os.path.exists(path):
        with open(path, "rb") as file:
            file.read()
    else:
        write(path, b"source of " + name.encode())


def write(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    aside = f"{path}.{os.getpid()}.tmp"
    with open(aside, "wb") as file:
        file.write(data)
    os.replace(aside, path)
