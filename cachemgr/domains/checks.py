"""Self-checks: what a cache file must look like for its engine not to die on it.

None of these engines checks what it loads: a cut `.py`, `.so` or group file kills the start, and the next one
(shared tree `domains.md`, verified with torch 2.13, Triton 3.7 and vLLM 0.32). Everything here reads bytes and parses
text; nothing is unpickled, imported or executed.
"""

import ast
import json
import sys
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from cachemgr import digest

Check = Callable[["Content"], str | None]
"""What is wrong with a file, as the end of a sentence that starts with its name; None when nothing is."""


@dataclass(frozen=True)
class Content:
    """A file under inspection. `head` is its beginning, or all of it when `whole`."""

    name: str
    head: bytes
    size: int

    @property
    def whole(self) -> bool:
        return len(self.head) == self.size


def not_empty(content: Content) -> str | None:
    """An empty cache file is what a crash or a full disk leaves."""
    return None if content.size else "is empty"


def whole_elf(content: Content) -> str | None:
    """A shared object whose section table lies inside the file: a cut one ends before it."""
    head = content.head
    if head[:4] != b"\x7fELF" or len(head) < 64:
        return "is no ELF file"
    wide, order = head[4] == 2, "little" if head[5] == 1 else "big"
    at, width, counts = (40, 8, 58) if wide else (32, 4, 46)
    offset = int.from_bytes(head[at : at + width], order)  # type: ignore[arg-type]
    entry = int.from_bytes(head[counts : counts + 2], order)  # type: ignore[arg-type]
    count = int.from_bytes(head[counts + 2 : counts + 4], order)  # type: ignore[arg-type]
    return None if offset + entry * count <= content.size else "is cut off"


def named_by_content(content: Content) -> str | None:
    """AOTAutograd and FX graph entries carry the hash of their bytes as name (torch 2.13 `_inductor/codecache.py`)."""
    if not content.whole:
        return None
    return None if digest.base32_name(content.head) == content.name else "has other bytes than its name says"


def named_python(content: Content) -> str | None:
    """Inductor's wrappers are named `c` + hash of their stripped text (torch 2.13 `_inductor/codecache.py`, `write`).

    Some (autotuning templates) mix more into the name, so a mismatch alone proves nothing: then the text must parse.
    """
    if not content.whole or "c" + digest.base32_name(content.head.strip()) == content.name.removesuffix(".py"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a compiler thinks of generated code is nobody's news
            ast.parse(content.head)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "is no complete Python file"
    return None if content.head.strip() else "is empty"


def parsable_json(content: Content) -> str | None:
    """Read with a bare `json.load` by its engine: damage is an exception there."""
    if not content.whole:
        return None
    try:
        json.loads(content.head)
    except (ValueError, RecursionError):
        return "is no complete JSON"
    return None


def parsable_literal(content: Content) -> str | None:
    """Read with `ast.literal_eval` by its engine, outside of any `try`."""
    if not content.size:
        return "is empty"
    if not content.whole:
        return None
    try:
        ast.literal_eval(content.head.decode())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return "is no complete Python literal"
    return None


def ends_as_pickle(content: Content) -> str | None:
    """A pickle ends with its STOP opcode; looked at, never loaded."""
    if not content.size:
        return "is empty"
    return None if not content.whole or content.head.endswith(b".") else "is cut off"


def json_object(content: Content) -> str | None:
    """Its engine reads a JSON object and nothing else."""
    if not content.whole:
        return None
    return "is no complete JSON object" if parsed_object(content.head) is None else None


def parsed_object(data: bytes) -> dict[str, object] | None:
    """The JSON object that these bytes are, or None."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def whole_when_elf(content: Content) -> str | None:
    """Not empty, and not cut off where it is an ELF file."""
    return whole_elf(content) if content.head[:4] == b"\x7fELF" else not_empty(content)


def ends_with_crc(content: Content) -> str | None:
    """The last four bytes are the CRC-32 of those before, in this machine's byte order (nvidia-cutlass-dsl 4.8
    `base_dsl/cache_helpers.py`, `read_bytecode_and_check_crc32`)."""
    if content.size < 4:
        return "is empty" if not content.size else "is cut off"
    if not content.whole:
        return None
    found = int.from_bytes(content.head[-4:], sys.byteorder)
    return None if zlib.crc32(content.head[:-4]) == found else "has other bytes than its checksum says"
