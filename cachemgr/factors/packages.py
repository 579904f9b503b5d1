"""Installed distributions, read as files: importing torch would take seconds and could run a foreign plugin.

What `import torch` will load is the first `torch/version.py` on the path, so that file decides. A `*.dist-info` counts
only if it lies beside the code that it describes; otherwise (an editable install, a copied tree) nobody vouches for
the code, and its digest is unknown.
"""

import csv
import os
import re
from collections.abc import Iterable, Sequence
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


class Triton(msgspec.Struct, frozen=True):
    """The triton that a Python would import; `none` when it has none."""

    version: str | None = None
    code: str | None = None


def torch(path: Sequence[str], cwd: Path) -> Torch:
    """What the first torch on `path` is."""
    for folder in _folders(path, cwd):
        text = _read(folder / "torch" / "version.py")
        if text is not None:
            assigned = {name: value or quoted for name, value, quoted, _ in _ASSIGNED.findall(text)}
            return Torch(
                version=assigned.get("__version__") or None,
                code=_code(_distributions(folder), ("torch",), "torch/"),
                cuda=_runtime(assigned, "cuda"),
                hip=_runtime(assigned, "hip"),
                site=str(folder),
            )
    return Torch()


def _runtime(assigned: dict[str, str], name: str) -> str | None:
    """A runtime of torch's `version.py`: its version, `none` where the file says None, unknown where it is silent."""
    return None if name not in assigned else assigned[name] or NONE


def triton(path: Sequence[str], cwd: Path) -> Triton:
    """What the first triton on `path` is. Triton hashes its own files into its keys, so its code counts."""
    for folder in _folders(path, cwd):
        if (folder / "triton" / "__init__.py").is_file():
            installed = _distributions(folder)
            return Triton(_version(installed, _TRITON), _code(installed, _TRITON, "triton/"))
    return Triton(NONE, NONE)


def _folders(path: Sequence[str], cwd: Path) -> Iterable[Path]:
    # Not resolved: Inductor's compiler command line holds the path as the interpreter spells it.
    return (cwd / entry for entry in path)


def _distributions(folder: Path) -> dict[str, Path]:
    """The `*.dist-info` directories of one folder by normalised name (PEP 503)."""
    found: dict[str, Path] = {}
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return found
    for name in names:
        if name.endswith(".dist-info") and (folder / name / "METADATA").is_file():
            project = _SEPARATORS.sub("-", name.partition("-")[0]).lower()
            found.setdefault(project, folder / name)
    return found


def _version(installed: dict[str, Path], projects: Iterable[str]) -> str | None:
    for project in projects:
        if project in installed:
            found = _METADATA_VERSION.search(_read(installed[project] / "METADATA") or "")
            return found[1] if found else None
    return None


def _code(installed: dict[str, Path], projects: Iterable[str], package: str) -> str | None:
    """Digest of what an installer recorded about the files of `package`, or None when it did not."""
    for project in projects:
        if project in installed:
            record = _read(installed[project] / "RECORD")
            return None if record is None else _digest_of_rows(record, package)
    return None


def _digest_of_rows(record: str, package: str) -> str | None:
    # csv is right and slow; no wheel of torch quotes a name, and 15 000 rows are split in 10 ms.
    lines = record.splitlines()
    rows = csv.reader(lines) if '"' in record else (line.rsplit(",", 2) for line in lines)
    kept = sorted(f"{row[0]},{row[1]}" for row in rows if len(row) == 3 and row[1] and not _incidental(row[0]))
    if not any(row.startswith(package) for row in kept):
        return None
    return digest.of_bytes("\n".join(kept).encode("utf-8", "surrogateescape"))


def _incidental(name: str) -> bool:
    """Whether a row differs between two installations of one wheel: scripts, installer notes, byte code."""
    return name.endswith(".pyc") or name.startswith("../") or ".dist-info/" in name


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return None
