"""A program that torch compiles, started with another tool's cache around it; `programs.py` starts this.

    python compiled.py [--mega-load FILE] [--mega-save FILE] [--b10-load] [--b10-save] --told FILE PROGRAM ARGUMENT...

The tools are called as their documentation says: PyTorch's `load_cache_artifacts` before anything is compiled and
`save_cache_artifacts` at the end (https://docs.pytorch.org/docs/stable/generated/torch.compiler.save_cache_artifacts.html),
b10-transfer's `load_compile_cache` and `save_compile_cache` at the same places
(https://docs.baseten.co/development/model/torch-compile-cache).
"""

import argparse
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec


class Told(msgspec.Struct):
    """What is told as JSON: seconds of each step, and what the tools said."""

    mega_load_seconds: float = 0.0
    mega_save_seconds: float = 0.0
    mega_loaded: dict[str, int] = {}
    """Entries by their kind, in PyTorch's words."""
    b10_load_seconds: float = 0.0
    b10_save_seconds: float = 0.0
    program_seconds: float = 0.0
    load_compile_cache: str = "SUCCESS"
    save_compile_cache: str = "SUCCESS"
    """What the calls of b10-transfer said, where they were made."""


def mega_load(file: Path, told: Told) -> None:
    """PyTorch's own artifacts into its caches."""
    import torch

    found = torch.compiler.load_cache_artifacts(file.read_bytes())
    told.mega_loaded = {} if found is None else {kind: len(keys) for kind, keys in found.artifacts.items()}


def mega_save(file: Path) -> None:
    """PyTorch's artifacts into a file."""
    import torch

    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        raise SystemExit("PyTorch has no cache artifacts to save")
    file.write_bytes(saved[0])


def b10_load(told: Told) -> None:
    """b10-transfer's directory into the Inductor cache."""
    import b10_transfer

    told.load_compile_cache = b10_transfer.load_compile_cache().name


def b10_save(told: Told) -> None:
    """The Inductor cache into b10-transfer's directory."""
    import b10_transfer

    told.save_compile_cache = b10_transfer.save_compile_cache().name


def main() -> None:
    """Load, run, save, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mega-load", type=Path)
    parser.add_argument("--mega-save", type=Path)
    parser.add_argument("--b10-load", action="store_true")
    parser.add_argument("--b10-save", action="store_true")
    parser.add_argument("--told", type=Path, required=True)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    told = Told()
    sys.argv = options.program
    if options.mega_load:
        told.mega_load_seconds = _clocked(lambda: mega_load(options.mega_load, told))
    if options.b10_load:
        told.b10_load_seconds = _clocked(lambda: b10_load(told))
    told.program_seconds = _clocked(lambda: runpy.run_path(options.program[0], run_name="__main__"))
    sys.stdout.flush()
    if options.mega_save:
        told.mega_save_seconds = _clocked(lambda: mega_save(options.mega_save))
    if options.b10_save:
        told.b10_save_seconds = _clocked(lambda: b10_save(told))
    options.told.write_bytes(msgspec.json.encode(told))


def _clocked(step: Callable[[], object]) -> float:
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
