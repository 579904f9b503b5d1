"""Engines that a command starts where nobody looks: behind a wrapper that is not understood, in a script, in a program.

Such a command is a program like any other, and the caches of a plain one are all that it gets. Whoever expects a warm
engine has to be told, because what is looked at is warm.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from cachemgr.factors.program import Program
from cachemgr.factors.vllm.files import head

_STARTS = re.compile(
    r"(^|[\s/\"'=;&|(])vllm[\"']?\s+(serve|run-batch|bench\s+(latency|throughput))\b|\bvllm\.entrypoints\."
)
_IMPORTS = re.compile(r"^\s*(from\s+vllm[\s.]|import\s+vllm\b)", re.MULTILINE)
_MOST_BYTES = 1 << 20
_NEITHER = "whose compiled graphs are neither captured nor restored"


def notes(program: Program, argv: Sequence[str], cwd: Path) -> tuple[str, ...]:
    """What a person should know of a command that was not recognised as an engine."""
    if os.path.basename(program.name) == "vllm" or program.name.startswith("vllm."):
        return ()  # it was looked at, and is no engine of ours
    text = program.name if program.kind == "code" else _text(cwd / program.name) if program.kind == "file" else ""
    if _STARTS.search(" ".join(argv)) or (_is_of_shell(program, text) and _STARTS.search(text)):
        behind = os.path.basename(argv[0])
        return (f"{behind} starts vLLM, {_NEITHER}: move `cachemgr run --` directly in front of `vllm`",)
    if _IMPORTS.search(text):
        return (f"{program.label} imports vLLM, {_NEITHER}: start it without `cachemgr run`, with CACHEMGR_ENABLE=1",)
    return ()


def _text(path: Path) -> str:
    read = head(path, _MOST_BYTES)
    return "" if read is None else os.fsdecode(read[0])


def _is_of_shell(program: Program, text: str) -> bool:
    return program.name.endswith(".sh") or re.match(r"#!\s*\S*(sh|env\s+\S*sh)\s", text) is not None
