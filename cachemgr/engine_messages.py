"""What vLLM prints about its caches and its start: one table, each row with a version range and its source.

A row's `literal` is the part of the message that is the same in the source and in the log; the pattern takes the values
out of the rest. The rows were read in 0.26.0, 0.28.0, 0.31.0, 0.32.0 and 0.33.0, and a test looks every literal up in
those sources. A later version is read with the newest rows: what it renamed shows as missing, not as a wrong value.

Levels, times, file names and process names around a message are not part of a row: people configure them away
(`VLLM_LOGGING_CONFIG_PATH`), other processes tear them apart.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

Version = tuple[int, int]

_OLDEST: Final = (0, 26)
_SECONDS = r"(?P<seconds>\d+(?:\.\d+)?)"
_AOT_MODEL = r"(?P<path>/[^\n]{1,4096}?/rank_\d+_\d+/model)"
_TAG = r"(?:\[(?P<tag>[^\]\s.:/]{1,128})\] )?"
_MODE = r"(?:CUDAGraphMode\.)?"


@dataclass(frozen=True)
class Message:
    """One message of the engine or of a library that it logs through."""

    event: str
    literal: str
    hub: str
    """In every line that matches, and shared by several rows: the first test of a block of lines. Longer is cheaper."""
    text: str
    sources: tuple[str, ...]
    """Files below `vllm/`: in every version of the range, one of them has the literal. `project:file` is not vLLM's."""
    since: Version = _OLDEST
    below: Version | None = None

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """What a line must match. Compiled when a line first may: all of them together take longer than a look-up."""
        return re.compile(self.text)

    def in_range(self, version: Version) -> bool:
        """Whether vLLM `version` (major, minor) prints this."""
        return self.since <= version and (self.below is None or version < self.below)


def _row(
    event: str,
    literal: str,
    pattern: str,
    *sources: str,
    hub: str = "",
    since: Version = _OLDEST,
    below: Version | None = None,
) -> Message:
    return Message(event, literal, hub or literal, pattern, sources, since, below)


_CORE = "v1/engine/core.py"
_BACKENDS = "compilation/backends.py"
_DECORATORS = "compilation/decorators.py"
_COMPILATION = "config/compilation.py"
_CONFIG = "config/vllm.py"
_WARMUP = "model_executor/warmup/kernel_warmup.py"
_AUTOTUNER = "flashinfer:autotuner.py"
_TORCH_CUDA = "torch:c10/cuda/CUDACachingAllocator.cpp"

MESSAGES: Final = (
    _row(
        "engine",
        "Initializing a V1 LLM engine (v",
        r"Initializing a V1 LLM engine \(v(?P<version>[^)\s]{1,100})\) with config: (?P<config>[^\n]*)",
        _CORE,
    ),
    _row(
        "ranks",
        "world_size=",
        r"world_size=(?P<world>\d{1,7}) rank=(?P<rank>\d{1,7}) local_rank=",
        "distributed/parallel_state.py",
    ),
    _row(
        "model_runner",
        "Using V2 Model Runner",
        r"Using (?P<value>V2) Model Runner",
        "v1/worker/gpu_worker.py",
        hub="Model Runner",
    ),
    _row(
        "model_runner",
        "Model Runner V2 requires Triton; using the V1 model runner instead",
        r"the (?P<value>V1) model runner instead",
        _CONFIG,
        hub="Model Runner",
    ),
    _row(
        "attention_backend",
        "backend out of potential backends: ",
        r"Using (?P<value>\w+) (?:attention )?backend out of potential backends: ",
        "platforms/cuda.py",
        "platforms/rocm.py",
        hub=" backend",
    ),
    _row(
        "attention_backend",
        " backend.",
        r"Using (?:AttentionBackendEnum\.)?(?P<value>[A-Z][A-Z0-9_]+) backend\.",
        "platforms/cuda.py",
        hub=" backend",
    ),
    _row(
        "attention_backend",
        " backend (selected via --attention-backend)",
        r"Using (?:AttentionBackendEnum\.)?(?P<value>\w+) backend \(selected via",
        "platforms/rocm.py",
        hub=" backend",
    ),
    _row(
        "flash_attention",
        "Using FlashAttention version ",
        r"Using FlashAttention version (?P<value>\d+)",
        "v1/attention/backends/flash_attn.py",
        hub="Flash",
    ),
    _row(
        "graph_mode",
        "; setting cudagraph_mode=",
        r"CUDAGraphMode\.(?P<old>[A-Z_]+) is not supported[^\n]{0,400}?; setting cudagraph_mode=(?P<new>[A-Z_]+)",
        _COMPILATION,
        hub="dagraph",
    ),
    _row(
        "graph_mode",
        "Overriding cudagraph_mode",
        r"Overriding cudagraph_mode (?:(?:from )?(?P<old>[A-Z_]+) )?to (?P<new>[A-Z_]+)",
        _CONFIG,
        "platforms/rocm.py",
        hub="dagraph",
    ),
    _row(
        "graph_mode",
        "is not compatible with compilation mode",
        rf"Cudagraph mode {_MODE}(?P<old>[A-Z_]+) is not compatible with compilation mode "
        rf"[^\n]{{1,100}}?Overriding to {_MODE}(?P<new>[A-Z_]+)",
        _CONFIG,
        hub="dagraph",
    ),
    _row(
        "graph_mode",
        "requires piecewise capture, but the loaded",
        rf"Cudagraph mode {_MODE}(?P<old>[A-Z_]+) requires piecewise capture, but the loaded "
        rf"[^\n]{{1,200}}?Overriding to {_MODE}(?P<new>[A-Z_]+)",
        _COMPILATION,
        since=(0, 31),
        hub="dagraph",
    ),
    _row(
        "compile_directory",
        "Using cache directory: ",
        rf"{_TAG}Using cache directory: (?P<path>/[^\n]{{1,4096}}?) for vLLM's torch\.compile",
        _BACKENDS,
        hub="ompil",
    ),
    _row(
        "compile_cache_disabled",
        "vLLM's torch.compile cache is disabled",
        r"vLLM's torch\.compile cache is disabled",
        _BACKENDS,
        hub="ompil",
    ),
    _row(
        "dynamo",
        "Dynamo bytecode transform time: ",
        rf"Dynamo bytecode transform time: {_SECONDS} s",
        _BACKENDS,
    ),
    _row(
        "compile_range",
        "Compiling a graph for compile range ",
        rf"Compiling a graph for compile range (?P<range>[^\n]{{1,100}}?) takes {_SECONDS} s",
        _BACKENDS,
        hub="ompil",
    ),
    _row(
        "graphs_loaded",
        "Directly load the compiled graph(s) for compile",
        rf"load the compiled graph\(s\) for compile range (?P<range>[^\n]{{1,100}}?) from the cache, took {_SECONDS} s",
        _BACKENDS,
        hub="ompil",
    ),
    _row(
        "aot_loaded",
        "Directly load AOT compilation from path ",
        rf"{_TAG}Directly load AOT compilation from path {_AOT_MODEL}",
        _DECORATORS,
        hub="ompil",
    ),
    _row(
        "aot_rejected",
        "Compiling model again due to a load failure from ",
        rf"{_TAG}Compiling model again due to a load failure from {_AOT_MODEL}, reason: (?P<reason>[^\n]*)",
        _DECORATORS,
        hub="ompil",
    ),
    _row(
        "aot_saved",
        "saved AOT compiled function to ",
        rf"{_TAG}saved AOT compiled function to {_AOT_MODEL}",
        _DECORATORS,
        hub="ompil",
    ),
    _row(
        "aot_not_saved",
        "unable to save AOT compiled function to ",
        rf"{_TAG}unable to save AOT compiled function to {_AOT_MODEL}: (?P<reason>[^\n]*)",
        _DECORATORS,
        hub="ompil",
    ),
    _row(
        "compile_total",
        "torch.compile took ",
        rf"torch\.compile took {_SECONDS} s",
        "compilation/monitor.py",
        hub=" took ",
    ),
    _row(
        "warmup",
        "Initial profiling/warmup run took ",
        rf"Initial profiling/warmup run took {_SECONDS} s",
        "compilation/monitor.py",
        hub=" took ",
    ),
    _row(
        "capture",
        "Graph capturing finished in ",
        rf"Graph capturing finished in {_SECONDS} secs, took (?P<gib>-?\d+(?:\.\d+)?) GiB",
        "v1/worker/gpu_model_runner.py",
        "v1/worker/gpu/model_runner.py",
        hub=" took ",
    ),
    _row(
        "model_load",
        "Model loading took ",
        rf"Model loading took (?P<gib>\d+(?:\.\d+)?) GiB (?:memory )?and {_SECONDS} seconds",
        "v1/worker/gpu_model_runner.py",
        "v1/worker/gpu/model_runner.py",
        hub=" took ",
    ),
    _row(
        "weights",
        "Loading weights took ",
        rf"Loading weights took {_SECONDS} seconds",
        "model_executor/model_loader/default_loader.py",
        hub=" took ",
    ),
    _row(
        "model_init",
        "Initializing model took ",
        rf"Initializing model took {_SECONDS} seconds",
        "model_executor/model_loader/base_loader.py",
        since=(0, 32),
        hub=" took ",
    ),
    _row(
        "init_engine",
        "init engine (profile, create kv cache, warmup model) took",
        rf"init engine \(profile, create kv cache, warmup model\) took {_SECONDS} s"
        r"(?: \(compilation: (?P<compilation>\d+(?:\.\d+)?) s)?",
        _CORE,
        hub=" took ",
    ),
    _row(
        "kernel_warmup",
        "JIT kernel warmup finished in ",
        rf"JIT kernel warmup finished in {_SECONDS}s",
        _WARMUP,
        since=(0, 31),
    ),
    _row(
        "warming_up",
        "Warming up FlashInfer attention",
        r"Warming up (?P<value>FlashInfer attention)",
        _WARMUP,
        hub="Flash",
    ),
    _row(
        "warming_up",
        "Warming up ll_bf16 router GEMM kernels",
        r"Warming up (?P<value>ll_bf16 router GEMM kernels)",
        _WARMUP,
    ),
    _row(
        "warming_up",
        "DeepGEMM warmup",
        r"(?P<value>DeepGEMM) warmup",
        "model_executor/warmup/deep_gemm_warmup.py",
    ),
    _row(
        "autotune_file",
        "Using FlashInfer autotune cache file: ",
        r"Using FlashInfer autotune cache file: (?P<path>/[^\n]{1,4096}?\.json)",
        _WARMUP,
        hub="Flash",
    ),
    _row(
        "autotune_file",
        "Using FlashInfer managed autotune cache (root=",
        r"Using FlashInfer managed autotune cache \(root=(?P<path>[^\n)]{1,4096})\)",
        _WARMUP,
        since=(0, 33),
        hub="Flash",
    ),
    _row(
        "autotune_running",
        "Running FlashInfer autotune with ",
        r"Running FlashInfer autotune with ",
        _WARMUP,
        since=(0, 31),
        hub="Flash",
    ),
    _row(
        "autotune_disabled",
        "Skipping FlashInfer autotune because it is disabled",
        r"Skipping FlashInfer autotune because it is disabled",
        _WARMUP,
        hub="Flash",
    ),
    _row("autotune_tuning", "[AutoTuner]: Tuning ", r"\[AutoTuner\]: Tuning ", _AUTOTUNER),
    _row(
        "autotune_loaded",
        "[Autotuner]: Loaded ",
        r"\[Autotuner\]: Loaded (?P<count>\d+) configs from (?P<path>/[^\n]{1,4096}?\.json)",
        _AUTOTUNER,
    ),
    _row(
        "kv_tokens",
        "KV cache size: ",
        r"KV cache size: (?P<tokens>[\d,]{1,20}) tokens",
        "v1/core/kv_cache_utils.py",
    ),
    _row(
        "kv_memory",
        "Available KV cache memory: ",
        r"Available KV cache memory: (?P<gib>-?\d+(?:\.\d+)?) GiB",
        "v1/worker/gpu_worker.py",
        hub="emory",
    ),
    _row(
        "gpu_memory",
        "Desired GPU memory utilization is ",
        r"Free memory on device \((?P<free>\d+(?:\.\d+)?)/(?P<total>\d+(?:\.\d+)?) GiB\) on startup\. "
        r"Desired GPU memory utilization is ",
        "v1/worker/gpu_worker.py",
        hub="emory",
    ),
    _row(
        "graph_pool",
        "CUDA graph pool memory: ",
        r"CUDA graph pool memory: (?P<gib>-?\d+(?:\.\d+)?) GiB \(actual\)",
        "v1/worker/gpu_worker.py",
        hub="emory",
    ),
    _row(
        "server_ready",
        "Application startup complete",
        r"Application startup complete",
        "uvicorn:lifespan/on.py",
    ),
    _row(
        "stopping",
        "[shutdown] EngineCore: trigger received signal=",
        r"\[shutdown\] EngineCore: trigger received signal=",
        _CORE,
    ),
    _row(
        "jit_monitor",
        "Kernel JIT monitor activated",
        r"Kernel JIT monitor activated; monitored JIT compilations during ",
        "utils/jit_monitor.py",
        hub="ompil",
    ),
    _row(
        "jit_compiled",
        "This causes a latency spike",
        r"(?P<value>(?<![\w.])[\w.]{1,100} [\w ]{0,60}during inference: [^\n]{1,1000}?)\. This causes a latency spike",
        "utils/jit_monitor.py",
    ),
    _row("out_of_memory", "OutOfMemoryError", r"\bOutOfMemoryError\b[^\n]*", "torch:__init__.py", hub="emory"),
    _row(
        "out_of_memory", "CUDA out of memory", r"CUDA out of memory[^\n]*", "v1/worker/gpu_model_runner.py", hub="emory"
    ),
    _row("out_of_memory", "HIP out of memory", r"HIP out of memory[^\n]*", _TORCH_CUDA, hub="emory"),
    _row("out_of_memory", "Cannot allocate memory", r"Cannot allocate memory[^\n]*", "libc:errno 12", hub="emory"),
    _row("out_of_memory", "MemoryError", r"(?:^| )MemoryError\b[^\n]*", "cpython:MemoryError", hub="emory"),
    _row(
        "out_of_memory",
        "No available memory for the cache blocks",
        r"No available memory for the cache blocks[^\n]*",
        "v1/core/kv_cache_utils.py",
        below=(0, 33),
        hub="emory",
    ),
    _row(
        "out_of_memory",
        "No available memory for the cache blocks",
        r"No available memory for the cache blocks[^\n]*",
        "v1/core/kv_cache_planning.py",
        since=(0, 33),
        hub="emory",
    ),
    _row(
        "out_of_memory",
        "is less than desired GPU memory utilization",
        r"Free memory on device [^\n]{1,200}? is less than desired GPU memory utilization[^\n]*",
        "v1/worker/utils.py",
        hub="emory",
    ),
    _row(
        "out_of_memory",
        "died unexpectedly",
        r"(?<!\S)\S{1,300} died unexpectedly \(exit code: -9\)",
        "v1/executor/multiproc_executor.py",
    ),
    _row(
        "process_died",
        "died unexpectedly",
        r"(?<!\S)\S{1,300} died unexpectedly \(exit code: -(?P<value>(?!9\))\d{1,2})\)",
        "v1/executor/multiproc_executor.py",
    ),
    _row(
        "process_died",
        "Failed core proc(s): ",
        r"Failed core proc\(s\): \{[^}\n]{0,300}: -(?P<value>(?!9\b)\d{1,2})\b",
        "v1/engine/utils.py",
    ),
    _row("out_of_memory", "Killed", r"(?:^|: line \d{1,9}: +\d{1,9} )Killed\b[^\n]*", "bash:jobs.c"),
)
"""In the order of a start, where order matters at all."""

PHASES: Final = {
    "dynamo": "dynamo",
    "compile_range": "compile_graphs",
    "graphs_loaded": "graphs_load",
    "compile_total": "compile",
    "warmup": "warmup",
    "capture": "capture",
    "model_load": "model_load",
    "weights": "weights",
    "model_init": "model_init",
    "init_engine": "init_engine",
    "kernel_warmup": "kernel_warmup",
}
"""Event to phase, for the events that carry seconds. `aot_load` and `ready` are derived."""


@dataclass(frozen=True)
class Expected:
    """Events of which one shows in every complete start of a kind."""

    events: tuple[str, ...]
    when: str = "always"
    """`always`, `compiled` (mode VLLM_COMPILE), `captured` (effective graph mode not NONE), `cuda`."""


EXPECTED: Final = (
    Expected(("engine",)),
    Expected(("ranks",)),
    Expected(("compile_directory", "aot_loaded", "compile_cache_disabled"), "compiled"),
    Expected(("compile_total",), "compiled"),
    Expected(("warmup",), "compiled"),
    Expected(("attention_backend",), "cuda"),
    Expected(("model_load",), "cuda"),
    Expected(("capture",), "captured"),
    Expected(("kv_tokens",)),
    Expected(("init_engine",)),
)


def expected_of(version: Version, holds: frozenset[str]) -> tuple[Expected, ...]:
    """What a complete start of vLLM `version` prints; `holds` are the conditions that hold for it, `always` besides."""
    printed = {row.event for row in MESSAGES if row.in_range(version)}
    return tuple(
        each
        for each in EXPECTED
        if (each.when == "always" or each.when in holds) and not printed.isdisjoint(each.events)
    )


@dataclass(frozen=True)
class KnownReason:
    """A reason for which the engine rejects a cache entry or dies of it, in words that help."""

    text: str
    explanation: str
    fix: str
    source: str
    """`vllm/` file, or `project:file`, where the words of the pattern come from."""
    of_entry: bool = True
    """Whether the entry is to blame, so that another one may do better; not the engine's build or this machine."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """What the engine's words must match."""
        return re.compile(self.text)


def _reason(pattern: str, explanation: str, fix: str, source: str, *, of_entry: bool = True) -> KnownReason:
    return KnownReason(pattern, explanation, fix, source, of_entry)


_SAME_IMAGE = "Use the same image where caches are made and where they are used."

KNOWN_REASONS: Final = (
    _reason(
        r"'function' object has no attribute 'finalize_loading'",
        "The CPU build compiles without vLLM's own backend and rejects its AOT file at every start.",
        "Set VLLM_USE_AOT_COMPILE=0: a second start is then about three times faster, from Inductor's own cache.",
        "vllm/compilation/decorators.py",
        of_entry=False,
    ),
    _reason(
        r"Source code has changed since the last compilation",
        "The installed code is not the code that was compiled, under the same version; the entry is overwritten.",
        f"{_SAME_IMAGE} Give patched builds a VLLM_CACHE_ROOT of their own.",
        "vllm/compilation/decorators.py",
    ),
    _reason(
        r"pickle data was truncated|Compile cache file corrupted|Ran out of input|invalid load key",
        "The AOT file is damaged; the engine compiles again and replaces it.",
        "Nothing, if this start ends well. If it comes back, look for a full disk or a copy that was cut short.",
        "vllm/compilation/decorators.py",
    ),
    _reason(
        r"\[Errno 30\]|Read-only file system",
        "The cache root is read-only; vLLM makes directories and locks there even on a full hit.",
        "Point VLLM_CACHE_ROOT at a writable directory; copy or overlay a read-only cache.",
        "libc:errno 30",
        of_entry=False,
    ),
    _reason(
        r"\[Errno (?:28|122)\]|No space left on device|Disk quota exceeded",
        "The file system of the cache is full, or the quota of this user is.",
        "Free space, or point VLLM_CACHE_ROOT at a larger file system.",
        "libc:errno 28",
        of_entry=False,
    ),
    _reason(
        r"\[Errno 13\]|Permission denied",
        "This user may not read or write the entry; torch writes AOT files with mode 0600.",
        "Start as the user who made the cache, or give that user's files to this one.",
        "libc:errno 13",
        of_entry=False,
    ),
    _reason(
        r"\[Errno 116\]|Stale file handle",
        "The cache lies on a network file system, and the file was replaced or removed by another machine.",
        "Point VLLM_CACHE_ROOT at a local file system; share a store instead of a live directory.",
        "libc:errno 116",
        of_entry=False,
    ),
    _reason(
        r"Compile package was created with a different Python version",
        "The entry was made by another Python; even the patch release counts.",
        _SAME_IMAGE,
        "torch:_dynamo/package.py",
    ),
    _reason(
        r"Compile package was created with a different PyTorch version",
        "The entry was made by another torch; even the local version (+cu130) counts.",
        _SAME_IMAGE,
        "torch:_dynamo/package.py",
    ),
    _reason(
        r"Compile package was created with a different (?:toolkit|Triton) version",
        "The entry was made with another CUDA toolkit or Triton.",
        _SAME_IMAGE,
        "torch:_dynamo/package.py",
    ),
    _reason(
        r"Compile package was created with different GPU",
        "The entry was made on a GPU with another name; torch compares names, not capabilities.",
        "Make a cache on each GPU model that serves.",
        "torch:_dynamo/package.py",
    ),
    _reason(
        r"^(?:cuda|xpu) is not available",
        "The entry was made for a GPU and this process sees none.",
        "Look at CUDA_VISIBLE_DEVICES, the driver and the container's devices.",
        "torch:_dynamo/package.py",
        of_entry=False,
    ),
    _reason(
        r"\[Errno 2\] No such file or directory",
        "The entry names a file that is not there: it was made under another root, or is incomplete.",
        "Restore it with cachemgr, which rewrites paths, or keep VLLM_CACHE_ROOT the same everywhere.",
        "libc:errno 2",
    ),
    _reason(
        r"\.so: (?:cannot read file data|file too short|invalid ELF header|undefined symbol)",
        "A compiled library in the cache is damaged or was built for another installation; every start will meet it.",
        "Delete the inductor_cache that holds it; the engine never does.",
        "libc:dlopen",
    ),
    _reason(
        r"\.so[.\d]*: cannot open shared object file",
        "A compiled library in the cache needs a library that is not here, such as another CUDA major version.",
        f"Delete the entry that holds it. {_SAME_IMAGE}",
        "libc:dlopen",
    ),
    _reason(
        r"no kernel image is available|device kernel image is invalid",
        "The entry holds machine code for another GPU, or of a compiler that is newer than the driver.",
        "Make a cache on each GPU model that serves, and keep drivers as new as where it is made.",
        "cuda:cudaErrorNoKernelImageForDevice, cudaErrorInvalidKernelImage",
    ),
    _reason(
        r"compiled with an unsupported toolchain",
        "The entry was compiled for a newer driver than this machine has.",
        "Update the driver, or make the cache where the oldest driver is.",
        "cuda:cudaErrorUnsupportedPtxVersion",
    ),
    _reason(
        r"SyntaxError: [^\n]*\(<unknown>, line \d+\)",
        "The index of a ten-hex directory (vllm_compile_cache.py) is damaged; every start will die of it.",
        "Delete that ten-hex directory; the engine never does.",
        "vllm/compilation/backends.py",
    ),
    _reason(
        r"^(?:KeyError: )?'[A-Za-z_][\w.]*'$",
        "A module that was traced when the entry was made is not loaded in this process.",
        f"{_SAME_IMAGE} Use the same plugins (VLLM_PLUGINS).",
        "vllm/compilation/decorators.py",
    ),
    _reason(
        r"No module named '",
        "The entry needs a package that is not installed here; files written with dill need dill.",
        _SAME_IMAGE,
        "cpython:ModuleNotFoundError",
    ),
)


def known_reason(reason: str) -> KnownReason | None:
    """The first known reason that the engine's words `reason` match."""
    return next((known for known in KNOWN_REASONS if known.pattern.search(reason)), None)
