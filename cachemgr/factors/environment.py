"""Which variables of a command count.

A variable counts if a configuration of torch or triton reads it, or may read it in the next release (hence prefixes).
It is left out only with a proof, written beside it, that it is in no key of the engine and changes no compiled byte.
Facts are of torch 2.13.0 and triton 3.5; keys of Inductor hold its whole configuration (`_inductor/config.py`) but
for `_cache_config_ignore_prefix`, keys of AOTAutograd hold `_functorch/config.py`.
"""

import re
from collections.abc import Mapping

from cachemgr import digest
from cachemgr.factors.text import encodable, told
from cachemgr.key import Factor, Role
from cachemgr.sensitive import is_secret

_PREFIXES = (
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "INDUCTOR_",
    "TORCHDYNAMO_",
    "TORCH_",
    "PYTORCH_",
    "FUNCTORCH_",
    "AOT_",
    "AOTI_",
    "AOTINDUCTOR_",
    "PARTITIONER_MEMORY_BUDGET_",  # _functorch/config.py
    "CUTLASS_",
    "CUTEDSL_",
    "TRITON_",
    # Read by LLVM and MLIR inside triton, and in its own keys: include/triton/Tools/Sys/GetEnv.hpp,
    # CACHE_INVALIDATING_ENV_VARS.
    "AMDGCN_",
    "LLVM_",
    "MLIR_",
    "NVPTX_",
)

_NAMES = frozenset(
    {
        "CXX",  # _inductor/config.py, cpp.cxx
        "OMP_PREFIX",  # _inductor/cpp_builder.py, include and library directories
        "FAKE_ALLOW_META",  # _functorch/config.py
        "LOG_TLPARSE",  # _inductor/config.py
        "LOG_AUTOTUNE_RESULTS",
        "ENABLE_PERSISTENT_TMA_MATMUL",
        "ENABLE_TEMPLATE_TMA_STORE",
        "ENABLE_TMA_LOAD_FOR_TEMPLATE_EPILOGUE",
        "UNSAFE_SKIP_FSDP_MODULE_GUARDS",  # _dynamo/config.py
        "TENSORIFY_PYTHON_SCALARS",  # _dynamo/utils.py
        "LIBRARY_PATH",  # where the compiler finds libraries: other directories, same names inside the result
        "CUBLAS_WORKSPACE_CONFIG",  # _inductor/fx_passes/numeric_utils.py
        # triton, as above
        "ALLOW_LHS_TMEM_LAYOUT_CONVERSION",
        "DISABLE_FAST_REDUCTION",
        "DISABLE_LLVM_OPT",
        "DISABLE_MMA_V3",
        "DISABLE_MMA_V5",
        "DISABLE_PTXAS_OPT",
        "ENABLE_LHS_TO_TMEM",
        "STORE_TMEM_TO_GLOBAL_BYPASS_SMEM",
        "USE_IR_LOC",
        "USE_TTGIR_LOC",
        "PYTHONOPTIMIZE",  # drops asserts as -O does
    }
)

# torch.get_num_threads() is in the key of C++ kernels (_inductor/codecache.py, cpp_runtime_thread_count).
_CPU_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_")
# -I and -L of generated code and where to find nvcc (torch/utils/cpp_extension.py), the compiler of triton's launchers
# (triton runtime/build.py): read for device code only.
_GPU_NAMES = frozenset({"CC", "CUDA_HOME", "CUDA_PATH", "CUDACXX", "ROCM_HOME", "ROCM_PATH"})

# Shape machine code, and no key of the engine holds them. The vector width of generated C++ is chosen by the first
# (_inductor/cpu_vec_isa.py, pick_vec_isa) when a graph is lowered, which a hit on the graph skips; the others are
# read by the compiler itself and never appear on its command line (GCC manual, "Environment Variables").
_BLIND = frozenset(
    {
        "ATEN_CPU_CAPABILITY",
        "CPATH",
        "CPLUS_INCLUDE_PATH",
        "C_INCLUDE_PATH",
        "COMPILER_PATH",
        "GCC_EXEC_PREFIX",
    }
)

_UNCOUNTED: dict[str, str] = {
    "TORCH_LOGS": "what is printed; _logging/_internal.py only",
    "TORCH_LOGS_OUT": "where it is printed; _logging/_internal.py only",
    "TORCH_LOGS_FORMAT": "how it is printed; _logging/_internal.py only",
    "TORCH_TRACE": "where traces go; _logging/_internal.py only",
    "TORCH_CPP_LOG_LEVEL": "what is printed; libc10 only",
    "TORCH_SHOW_CPP_STACKTRACES": "what exceptions say; c10/util/Exception.h",
    "TORCH_DISABLE_ADDR2LINE": "what exceptions say; libtorch only",
    "TORCHDYNAMO_VERBOSE": "what exceptions say; @compile_ignored in _dynamo/config.py",
    "TORCHINDUCTOR_CACHE_DIR": "a place; runtime/cache_dir_utils.py. We set it ourselves",
    "TRITON_CACHE_DIR": "a place; triton knobs.py. We set it ourselves",
    "TRITON_HOME": "a place; triton knobs.py",
    "TORCH_HOME": "where hub downloads weights to; hub.py only",
    "TORCH_EXTENSIONS_DIR": "a place; utils/cpp_extension.py only",
    "TORCH_COMPILE_DEBUG_DIR": "a place; _dynamo/config.py debug_dir_root, which is in no key",
    "TORCHINDUCTOR_COMPILE_THREADS": "how many kernels are compiled at once; in _cache_config_ignore_prefix",
    "TORCHINDUCTOR_WORKER_START": "how compile workers start; in _cache_config_ignore_prefix",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "how is_available() asks; cuda/__init__.py only",
    "PYTORCH_ALLOC_CONF": "the allocator; read by neither _dynamo, _functorch nor _inductor",
    "PYTORCH_CUDA_ALLOC_CONF": "the allocator, old name",
}
# Read by c10d's process groups (ProcessGroupNCCL.hpp) at run time only; torchrun sets one of them for its children.
_UNCOUNTED_PREFIXES = ("TORCH_NCCL_",)

# Words, flags, directories and back-end lists: worth reading in a difference, and no place for a secret.
_CLEAR = _BLIND | frozenset(
    {
        "CC",
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_HOME",
        "CUDA_PATH",
        "CXX",
        "LIBRARY_PATH",
        "TORCHINDUCTOR_CPP_MARCH",
        "TORCHINDUCTOR_CPP_GEMM_THREAD_FACTORS",
        "TORCHINDUCTOR_CUTLASS_ENABLED_OPS",
        "TORCHINDUCTOR_DISABLED_PASSES",
        "TORCHINDUCTOR_MAX_AUTOTUNE_CONV_BACKENDS",
        "TORCHINDUCTOR_MAX_AUTOTUNE_FLEX_SEARCH_SPACE",
        "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS",
        "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_SEARCH_SPACE",
        "TORCH_COMPILE_CACHE_KEY_TAG",
        "TORCH_COMPILE_DYNAMIC_SOURCES",
        "TORCH_CUDA_ARCH_LIST",
        "TRITON_DEFAULT_FP_FUSION",
        "TRITON_OVERRIDE_ARCH",
    }
)
_SWITCH = re.compile(r"|[+-]?\d{1,6}|true|false|yes|no|on|off|none", re.IGNORECASE)

# Set by the kubelet for every service of the namespace; one named `torch-serve` would be TORCH_SERVE_SERVICE_HOST.
_SERVICE_LINK = re.compile(r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?")
_SERVICE_VALUE = re.compile(r"(tcp|udp|sctp)://")


def without_ours(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that the user set: not our settings, and not what an outer cachemgr pinned for this process."""
    pinned = frozenset(re.split(r"[:,\s]+", environ.get("CACHEMGR_PINNED", "")))
    return {name: value for name, value in environ.items() if name not in pinned and not name.startswith("CACHEMGR_")}


def factors(environ: Mapping[str, str], *, device: str | None) -> tuple[Factor, ...]:
    """The variables of `environ` that count on `device`, as factors `env.NAME`."""
    found = [
        Factor(f"env.{encodable(name)}", _value(name, environ[name]), _role(name))
        for name in sorted(environ)
        if _counts(name, environ[name], device)
    ]
    if environ.get("CI"):
        # bool(os.getenv("CI")) in _functorch/config.py (error_on_custom_op_aliasing): which word it is does not matter.
        found.append(Factor("env.CI", "set", "match"))
    return tuple(found)


def _counts(name: str, value: str, device: str | None) -> bool:
    if name in _UNCOUNTED or name.startswith(_UNCOUNTED_PREFIXES) or is_secret(name) or is_service_link(name, value):
        return False
    if name in _NAMES or name in _BLIND or name.startswith(_PREFIXES):
        return True
    return name.startswith(_CPU_PREFIXES) if device == "cpu" else name in _GPU_NAMES


def is_service_link(name: str, value: str) -> bool:
    """Whether the kubelet set a variable, for a service of the namespace."""
    if _SERVICE_LINK.fullmatch(name):
        return True
    return name.endswith("_PORT") and _SERVICE_VALUE.match(value) is not None


def is_switch(text: str) -> bool:
    """Whether a value is a word or number that says on, off or how many: no place for a secret."""
    return _SWITCH.fullmatch(text) is not None


def _role(name: str) -> Role:
    return "blind" if name in _BLIND else "match"


def _value(name: str, value: str) -> str:
    text = encodable(value)
    if name in _CLEAR or name.startswith(_CPU_PREFIXES) or is_switch(text):
        return told(text)
    return digest.sealed(text)
