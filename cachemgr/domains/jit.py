"""Caches of libraries that compile kernels when they are first called: DeepGEMM, CuTe DSL, TileLang, tvm-ffi, and
torch's C++ extensions. The variables that move them are in no hash of vLLM.

* DeepGEMM (2.x `csrc/jit/compiler.hpp`, `kernel_runtime.hpp`): `cache/kernel.<name>.<digest>/{kernel.cu,kernel.cubin}`,
  renamed into place as a whole from `tmp/<uuid>/`. A directory without one of the two fails an assertion of the
  engine, at every start. The key holds the compiler's version, flags and all sources; older releases keep the include
  path in it and miss elsewhere. vLLM 0.26, 0.28, 0.31, 0.32 and 0.33 set `DG_JIT_CACHE_DIR` to
  `$VLLM_CACHE_ROOT/deep_gemm` only when it is unset or empty (`utils/deep_gemm.py`): each of them keeps a pinned one.
* CuTe DSL (nvidia-cutlass-dsl 4.8 `base_dsl/cache_helpers.py`): `cute_dsl_<hash>.mlir`, byte-code and its CRC-32. The
  default lies in the temporary directory. `pyir_class_facts/` is made anew in no time and stays.
* TileLang (tilelang 0.1.15 `cache/kernel_cache.py`, `cache/binary_cache.py`): a directory per 64-hex key, with
  `manifest.json` or `metadata.json`, which list sizes and hashes that TileLang checks when it loads. Older releases
  have no manifest. `autotuner/` holds pickled functions and stays, `py-cache/` is written at each start.
* tvm-ffi (apache-tvm-ffi 0.1.15 `cpp/extension.py`, `_optional_torch_c_dlpack.py`): build directories
  `<name>_<hash>/` of ninja, and `libtorch_c_dlpack_addon_*.so`, which is loaded when it is there.
* torch extensions (torch 2.13 `utils/cpp_extension.py`): build directories `<name>/` of ninja, below
  `py<version>_<accelerator>/` when the variable is unset. Their `lock` is a file that exists: torch waits until
  somebody removes it, so a copied one hangs every start.
"""

import re
from collections.abc import Collection

from cachemgr.domains import checks, ninja
from cachemgr.domains.domain import Domain

# DeepGEMM

_KERNEL = re.compile(r"cache/kernel\.[^/]+/kernel\.[a-z]+")
_NEEDED = ("kernel.cu", "kernel.cubin")


def _kernel_fault(unit: str, paths: Collection[str]) -> str | None:
    missing = next((name for name in _NEEDED if f"{unit}/{name}" not in paths), None)
    return None if missing is None else f"has no `{missing}`"


DEEP_GEMM = Domain(
    "deep_gemm",
    "DG_JIT_CACHE_DIR",
    travels=lambda path: _KERNEL.fullmatch(path) is not None,
    unit_of=lambda path: path.rpartition("/")[0],
    check_of=lambda path: checks.whole_elf if path.endswith(".cubin") else checks.not_empty,
    unit_fault=_kernel_fault,
    content_keyed=True,
    source="DeepGEMM 2.x csrc/jit/compiler.hpp, csrc/jit/kernel_runtime.hpp; vLLM 0.26-0.33 utils/deep_gemm.py",
)

# CuTe DSL

_MODULE = re.compile(r"cute_dsl_\w+\.mlir")

CUTE_DSL = Domain(
    "cute_dsl",
    "CUTE_DSL_CACHE_DIR",
    travels=lambda path: _MODULE.fullmatch(path) is not None,
    unit_of=lambda path: path,
    check_of=lambda _path: checks.ends_with_crc,
    content_keyed=True,
    source="nvidia-cutlass-dsl 4.8 base_dsl/cache_helpers.py",
)

# TileLang

_ENTRY = re.compile(r"(?!autotuner/)(?:[^/.][^/]*/){0,3}[0-9a-f]{64}/[^/.][^/]*")
_LISTS = ("manifest.json", "metadata.json")
_LIBRARIES = (
    frozenset({"kernel_lib.so"}),
    frozenset({"kernel.cubin", "kernel.py"}),
    frozenset({"kernel.py", "launcher_lib.so"}),
)
"""What must be there to call a kernel: of tvm_ffi and cython, of nvrtc, of CuTe (`_get_required_files`)."""


def _tilelang_travels(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return _ENTRY.fullmatch(path) is not None and ".tmp" not in name and not name.endswith(".lock")


def _tilelang_check(path: str) -> checks.Check:
    name = path.rsplit("/", 1)[-1]
    if name in _LISTS:
        return checks.json_object
    if name.endswith(".json"):
        return checks.parsable_json
    return checks.whole_elf if name.endswith((".so", ".cubin")) else checks.not_empty


def _tilelang_fault(_unit: str, paths: Collection[str]) -> str | None:
    names = {path.rsplit("/", 1)[-1] for path in paths}
    if "metadata.json" in names:
        return None if any(name.startswith("kernel.") for name in names) else "has no binary"
    if "params.json" not in names:
        return "has no `params.json`"
    if not any(names >= library for library in _LIBRARIES):
        return "has no library"
    sources = {name.partition(".")[0] for name in names}
    lacks_source = "manifest.json" in names and not sources >= {"device_kernel", "host_kernel"}
    return "has no source" if lacks_source else None


TILELANG = Domain(
    "tilelang",
    "TILELANG_CACHE_DIR",
    travels=_tilelang_travels,
    unit_of=lambda path: path.rpartition("/")[0],
    check_of=_tilelang_check,
    unit_fault=_tilelang_fault,
    content_keyed=True,
    source="tilelang 0.1.15 cache/kernel_cache.py, cache/binary_cache.py, jit/adapter/*/kernel_cache.py",
)

# tvm-ffi and torch extensions

_ADDON = re.compile(r"libtorch_c_dlpack_addon_[^/]+\.so")

TVM_FFI = Domain(
    "tvm_ffi",
    "TVM_FFI_CACHE_DIR",
    usual_base="~/.cache/tvm-ffi",
    travels=lambda path: ninja.belongs(path) and ("/" in path or _ADDON.fullmatch(path) is not None),
    unit_of=lambda path: path.split("/", 1)[0],
    check_of=ninja.check_of,
    relocation_of=ninja.relocation_of,
    is_unit=lambda paths: ninja.is_build(paths) or any(map(_ADDON.fullmatch, paths)),
    content_keyed=False,
    keeps_mtimes=True,
    exact_only=True,
    source="apache-tvm-ffi 0.1.15 cpp/extension.py, _optional_torch_c_dlpack.py",
)

TORCH_EXTENSIONS = Domain(
    "torch_extensions",
    "TORCH_EXTENSIONS_DIR",
    usual_base="~/.cache/torch_extensions",
    travels=lambda path: "/" in path and ninja.belongs(path),
    unit_of=lambda path: path.rpartition("/")[0],
    check_of=ninja.check_of,
    relocation_of=ninja.relocation_of,
    is_unit=ninja.is_build,
    content_keyed=False,
    keeps_mtimes=True,
    exact_only=True,
    waits_for=lambda path: path.endswith("/lock"),
    source="torch 2.13 utils/cpp_extension.py, utils/file_baton.py",
)
