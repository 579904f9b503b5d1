"""Large objects in pieces: read ahead while earlier ones are used, and written while later ones are read.

Every piece is a request of its own, bounded and repeated by itself, so that a connection that breaks costs one piece.
"""

import io
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cachemgr.bounded import Begun
from cachemgr.store import Source

PIECE_BYTES = 8 << 20
_SETTLE_SECONDS = 5.0
AHEAD = 4
"""How many pieces of one object are under way at once."""


class Piece(NamedTuple):
    """Bytes of an object, and how many it has altogether."""

    data: bytes
    total: int


Fetch = Callable[[int], Piece]
"""The piece that starts at this byte: `PIECE_BYTES` of them, or fewer at the end of the object."""


class Reader(io.BufferedIOBase):
    """An object as a file, beginning with its first piece, which is there already. It has no buffer of its own: parts
    of a piece are copied once, for whoever reads them."""

    def __init__(self, first: Piece, fetch: Fetch, what: str) -> None:
        super().__init__()
        self._total = first.total
        self._fetch, self._what = fetch, what
        self._position = 0
        self._at, self._piece = 0, first.data
        self._under_way: dict[int, Begun[Piece]] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._total}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        missing = self._total if size is None or size < 0 else size
        parts = []
        while missing and (part := self._next(missing)):
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _next(self, most: int) -> bytes:
        """What one piece has of the next bytes, none at the end."""
        if self._position >= self._total:
            return b""
        start = self._position - self._position % PIECE_BYTES
        if start != self._at:
            self._at, self._piece = start, self._arrived(start)
        begin = self._position - start
        taken = self._piece[begin : begin + most]
        self._position += len(taken)
        return taken

    def close(self) -> None:
        self._under_way.clear()
        super().close()

    def _arrived(self, start: int) -> bytes:
        """The piece at `start`, while the next ones are fetched."""
        wanted = range(start, min(start + AHEAD * PIECE_BYTES, self._total), PIECE_BYTES)
        for each in wanted:
            if each not in self._under_way:
                self._under_way[each] = Begun(self._what, lambda each=each: self._fetch(each))  # type: ignore[misc]
        self._under_way = {each: begun for each, begun in self._under_way.items() if each in wanted}
        return self._under_way.pop(start).result().data


def pieces(source: Source) -> Iterator[bytes]:
    """The bytes of `source` in pieces of `PIECE_BYTES`, the last one shorter. There is at least one, maybe empty."""
    kept = _filled(source)
    while len(kept) == PIECE_BYTES:
        following = _filled(source)
        if not following:
            break
        yield kept
        kept = following
    yield kept


def _filled(source: Source) -> bytes:
    """The next `PIECE_BYTES`, or what there is."""
    parts, missing = [], PIECE_BYTES
    while missing and (part := source.read(missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def in_flight(work: Iterator[Callable[[], str]], what: str) -> list[str]:
    """The results of all of `work`, in order, of which a few are under way at once. When one fails the others are
    waited for, if not for long: what is cleaned up next should not be written to any more."""
    running: deque[Begun[str]] = deque()
    results = []
    try:
        for step in work:
            if len(running) == AHEAD:
                results.append(running.popleft().result())
            running.append(Begun(what, step))
        while running:
            results.append(running.popleft().result())
    finally:
        for begun in running:
            begun.settle(_SETTLE_SECONDS)
    return results
