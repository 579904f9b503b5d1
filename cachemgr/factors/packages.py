"""Installed distributions, read as files: importing torch would take seconds and could run a foreign plugin.

What `import torch` will load is the first `torch/version.py` on the path, so that file decides. A `*.dist-info` counts
only if it lies beside the code that it describes; otherwise (an editable install, a copied tree) nobody vouches for
the code, and its digest is unknown.
"""

import csv
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from cachemgr import digest

_SEPARATORS = re.compile(r"[-_.]+")
_ASSIGNED = re.compile(r"^(\w+)\s*(?::[^=\n]*)?=\s*(?:'([^'\n]*)'|\"([^\"\n]*)\"|(None))\s*$", re.MULTILINE)
_METADATA_VERSION = re.compile(r"^Version:[ \t]*(\S+)", re.MULTILINE)
# One module `triton` under four names: the index of PyTorch publishes its own builds.
_TRITON = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton-xpu", "triton-xpu")
NONE = "none"
"""Value of a factor for something that is known to be absent."""


class Torch(msgspec.Struct, frozen=True):
    """The torch that a Python would import. None is unknown; for `cuda` and `hip` a build without is `none`."""

    version: str | None = None
    code: str | None = None
    cuda: str | None = None
    hip: str | None = None
    site: str | None = None
    """The directory that holds `torch/`."""
    other: str | None = None
    """Devices of neither NVIDIA nor AMD that it is built or extended for, by torch's word for them."""


class Triton(msgspec.Struct, frozen=True):
    """The triton that a Python would import; `none` when it has none."""

    version: str | None = None
    code: str | None = None


def torch(path: Sequence[str], cwd: Path) -> Torch:
    """What the first torch on `path` is."""
    for folder in folders(path, cwd):
        text = text_of(folder / "torch" / "version.py")
        if text is not None:
            assigned = {name: value or quoted for name, value, quoted, _ in _ASSIGNED.findall(text)}
            return Torch(
                version=assigned.get("__version__") or None,
                code=_code(distributions(folder), ("torch",), "torch/"),
                cuda=_runtime(assigned, "cuda"),
                hip=_runtime(assigned, "hip"),
                site=str(folder),
                other=_other(assigned, path, cwd),
            )
    return Torch()


# Modules that bring a device of their own to torch, which loads them by itself since 2.5 (`torch.backends`).
_BACKENDS = {
    "torch_npu": "npu",  # Ascend
    "habana_frameworks": "hpu",  # Gaudi
    "torch_neuronx": "neuron",
    "torch_musa": "musa",  # Moore Threads
    "torch_mlu": "mlu",  # Cambricon
    "torch_gcu": "gcu",  # Enflame
    "torch_rbln": "rbln",  # Rebellions
}


def _other(assigned: dict[str, str], path: Sequence[str], cwd: Path) -> str | None:
    if assigned.get("xpu"):
        return "xpu"
    places = tuple(folders(path, cwd))
    return next((device for name, device in _BACKENDS.items() if any((at / name).is_dir() for at in places)), None)


def _runtime(assigned: dict[str, str], name: str) -> str | None:
    """A runtime of torch's `version.py`: its version, `none` where the file says None, unknown where it is silent."""
    return None if name not in assigned else assigned[name] or NONE


def triton(path: Sequence[str], cwd: Path) -> Triton:
    """What the first triton on `path` is. Triton hashes its own files into its keys, so its code counts."""
    for folder in folders(path, cwd):
        if os.path.isfile(folder / "triton" / "__init__.py"):
            installed = distributions(folder)
            return Triton(_first_version(installed, _TRITON), _code(installed, _TRITON, "triton/"))
    return Triton(NONE, NONE)


def folders(path: Sequence[str], cwd: Path) -> Iterable[Path]:
    """The directories of a module path."""
    # Not resolved: Inductor's compiler command line holds the path as the interpreter spells it.
    return (cwd / entry for entry in path)


def distributions(folder: Path, suffix: str = ".dist-info", metadata: str = "METADATA") -> dict[str, Path]:
    """The `*.dist-info` directories of one folder by normalised name (PEP 503)."""
    found: dict[str, Path] = {}
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return found
    for name in names:
        if name.endswith(suffix) and os.path.isfile(f"{folder}/{name}/{metadata}"):
            project = _SEPARATORS.sub("-", name.removesuffix(suffix).partition("-")[0]).lower()
            found.setdefault(project, folder / name)
    return found


def _first_version(installed: Mapping[str, Path], projects: Iterable[str]) -> str | None:
    return next((version(installed[project]) for project in projects if project in installed), None)


def version(described: Path, metadata: str = "METADATA") -> str | None:
    """The version that a `*.dist-info` directory states."""
    found = _METADATA_VERSION.search(text_of(described / metadata) or "")
    return found[1] if found else None


def _code(installed: Mapping[str, Path], projects: Iterable[str], package: str) -> str | None:
    """Digest of what an installer recorded about the files of `package`, or None when it did not."""
    for project in projects:
        if project in installed:
            record = text_of(installed[project] / "RECORD")
            return None if record is None else recorded(record, package)
    return None


def recorded(record: str, package: str) -> str | None:
    """Digest of the rows of a RECORD, or None when none of them has a hash of a file below `package`."""
    # csv is right and slow; few names are quoted, and 15 000 rows are read in 10 ms.
    rows = (_unquoted(line) if '"' in line else line for line in record.splitlines())
    kept = [named for row in rows if "," in (named := row.rpartition(",")[0]) and named[-1] != ","]
    # What differs between two installations of one wheel does not count: scripts, installer notes, byte code.
    kept = sorted(row for row in kept if ".dist-info/" not in row and ".pyc," not in row and row[:3] != "../")
    if not any(row.startswith(package) for row in kept):
        return None
    return digest.of_bytes("\n".join(kept).encode("utf-8", "surrogateescape"))


def _unquoted(line: str) -> str:
    return ",".join(next(csv.reader([line])))


def text_of(path: Path) -> str | None:
    """What a file says; None when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "surrogateescape")
    except OSError:
        return None
