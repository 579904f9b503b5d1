"""Bytes on their way from one place to another, hashed as they pass."""

from collections.abc import Callable
from typing import BinaryIO

from cachemgr import digest
from cachemgr.bounded import Begun
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, StoreError

LARGE_BYTES = 16 << 20
"""Layers that are larger are hashed while they are written, and not before."""


class Checked:
    """The bytes of a layer, hashed as they pass. The last read raises when they were not those of its name."""

    def __init__(self, stream: BinaryIO, name: Digest, size: int, passed: Callable[[int], None]) -> None:
        self._stream, self._name, self._size, self._passed = stream, name, size, passed
        self._running = digest.hasher()
        self._hashing: Begun[None] | None = None
        self.count = 0

    def read(self, size: int, /) -> bytes:
        piece = self._read(size)
        self.count += len(piece)
        if self._size and self.count > self._size:
            raise CorruptError(f"layer {self._name} goes on after its {self._size} bytes")
        if self._hashing is not None:
            self._hashing.result()
        if piece:
            self._hash(piece)
            self._passed(len(piece))
        elif digest.finish(self._running) != self._name:
            raise CorruptError(f"layer {self._name} has other bytes than its name says")
        return piece

    def _hash(self, piece: bytes) -> None:
        """Of a large layer while the piece is written and the next one is read."""
        if self._size <= LARGE_BYTES:
            self._running.update(piece)
        else:
            self._hashing = Begun("hashing", lambda: self._running.update(piece))

    def _read(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except OSError as error:
            raise StoreError(f"cannot read layer {self._name}: {error.strerror or error}") from None
