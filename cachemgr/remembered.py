"""What is remembered on this host to save work: a value in a file of our own state.

Losing it costs time and nothing else, so a file that is missing, torn or no file of ours is nothing remembered, and one
that cannot be written is no failure.
"""

from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from cachemgr.beneath import read_plain
from cachemgr.places import write_private

T = TypeVar("T")

_LIMIT = 256 << 20


def recall(path: Path, kind: type[T]) -> T | None:
    """What is in a file, or None."""
    with suppress(OSError, msgspec.MsgspecError, ValueError):
        return msgspec.msgpack.decode(read_plain(path, limit=_LIMIT), type=kind)
    return None


def remember(path: Path, what: object) -> None:
    """Keep something in a file."""
    with suppress(OSError):
        write_private(path, msgspec.msgpack.encode(what))
