"""Unpack a layer, or check it: decompress, hash and place at once."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import BinaryIO, Protocol

import zstandard

from cachemgr import digest, threads
from cachemgr.capture import File, Layer, Unit
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError
from cachemgr.hashing import Hashes, Stream
from cachemgr.layer.members import CHUNK, END, WINDOW_LOG, links_in, units_in
from cachemgr.ustar import header_size, padding

_PIECES_IN_FLIGHT = 8


class _Pieces:
    """The bytes of a layer's tar in order, decompressed by a thread that stays a few MiB ahead."""

    def __init__(self, layer: Layer, compressed: BinaryIO, *, plain: bool) -> None:
        """`plain`: nothing is compressed after all."""
        self._layer = layer
        self._compressed, self._plain = compressed, plain
        self._pieces: queue.Queue[bytes | BaseException | None] = queue.Queue(_PIECES_IN_FLIGHT)
        self._closed = threading.Event()
        self._left = layer.tar_size
        self._buffer = memoryview(b"")
        self._thread: threading.Thread = threads.start(self._run, "decompress")

    def take(self, size: int) -> memoryview:
        """The next `size` bytes (at most a few MiB: the caller asks for larger files in parts)."""
        while len(self._buffer) < size:
            piece = self._next()
            if piece is None:
                raise CorruptError(f"layer {self._layer.digest} ends early")
            self._buffer = memoryview(b"".join((self._buffer, piece))) if self._buffer else memoryview(piece)
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def skip(self, size: int) -> None:
        """Pass over `size` bytes."""
        while size:
            size -= len(self.take(min(size, CHUNK)))

    def finish(self) -> None:
        """Check that the layer ends here. Raises CorruptError when it does not."""
        if bytes(self.take(len(END))) != END or self._buffer or self._next() is not None or self._left:
            raise CorruptError(f"layer {self._layer.digest} does not end where its manifest says")

    def close(self) -> None:
        """Stop the thread, whatever it was doing."""
        self._closed.set()
        self._thread.join()

    def _next(self) -> bytes | None:
        piece = self._pieces.get()
        if isinstance(piece, BaseException):
            raise piece
        return piece

    def _run(self) -> None:
        try:
            self._decompress()
        except zstandard.ZstdError as error:
            self._put(CorruptError(f"layer {self._layer.digest} cannot be decompressed: {error}"))
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread by _next
            self._put(error)

    def _decompress(self) -> None:
        """No more than the manifest's size and one byte is ever produced, whatever the frame claims."""
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << WINDOW_LOG)
        framed = decompressor.stream_reader(self._compressed, read_across_frames=False)
        read: Callable[[int], bytes] = self._compressed.read if self._plain else framed.read
        while self._left >= 0 and not self._closed.is_set() and (piece := read(min(CHUNK, self._left + 1))):
            self._left -= len(piece)
            self._put(piece)
        self._put(None)

    def _put(self, piece: bytes | BaseException | None) -> None:
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._pieces.put(piece, timeout=0.1)
                return


class Placer(Protocol):
    """Where unpacked files go. What it was given may turn out to be corrupt until `unpack` returns."""

    def whole(self, file: File, data: memoryview) -> None:
        """A small file."""

    def parts(self, file: File, parts: Iterator[memoryview]) -> None:
        """A large file in order."""

    def link(self, file: File, original: str) -> None:
        """A file with the bytes of one of the same unit that was handed over before."""


def unpack(layer: Layer, compressed: BinaryIO, placer_of: Callable[[str, Unit], Placer | None]) -> None:
    """Hand the files of every unit for which `placer_of` its domain gives a placer to that in tar order; check them.

    The compressed bytes are checked first, so that no byte of a swapped layer reaches the decompressor; what comes out
    is checked file by file while it is placed. Where a store has the layer unpacked (`cachemgr.oci.unpacked`),
    `compressed` may be the tar itself, which the manifest names as well. The caller must not publish what was placed
    unless this returns.

    Raises:
        CorruptError: the layer is torn, longer than its manifest, or has other bytes.
    """
    plain = verify_bytes(layer, compressed) == layer.tar_digest
    with Hashes() as hashes:
        pieces = _Pieces(layer, compressed, plain=plain)
        try:
            _unpack(layer, pieces, placer_of, hashes)
            pieces.finish()
        finally:
            pieces.close()


def _unpack(layer: Layer, pieces: _Pieces, placer_of: Callable[[str, Unit], Placer | None], hashes: Hashes) -> None:
    gap = 0
    for domain, unit in units_in(layer.sections):
        links = links_in(unit)
        placer = placer_of(domain, unit)
        for file in unit.files:
            link = links.get(file.path)
            gap += header_size(domain, file, link)
            if link is None and placer is not None:
                pieces.skip(gap)
                _unpack_file(pieces, file, placer, hashes)
                gap = padding(file.size)
            elif link is None:
                gap += file.size + padding(file.size)
            elif placer is not None:
                placer.link(file, link)
    pieces.skip(gap)


class _Nowhere:
    """Takes files, and leaves them."""

    def whole(self, file: File, data: memoryview) -> None: ...
    def parts(self, file: File, parts: Iterator[memoryview]) -> None: ...
    def link(self, file: File, original: str) -> None: ...


def verify(layer: Layer, compressed: BinaryIO) -> None:
    """Check a layer to its last file. Raises CorruptError, as `unpack`."""
    nowhere = _Nowhere()
    unpack(layer, compressed, lambda _domain, _unit: nowhere)


def verify_bytes(layer: Layer, compressed: BinaryIO) -> Digest:
    """Check the bytes of a layer, and go back to their beginning: the digest that they have, which is the layer's, or
    that of its tar where a store has it unpacked.

    Raises:
        CorruptError: they have neither.
    """
    running = digest.hasher()
    while piece := compressed.read(CHUNK):
        running.update(piece)
    found = digest.finish(running)
    if found not in {layer.digest, layer.tar_digest}:
        raise CorruptError(f"layer {layer.digest} has other bytes than its name says")
    compressed.seek(0)
    return found


def _unpack_file(pieces: _Pieces, file: File, placer: Placer, hashes: Hashes) -> None:
    expected = partial(_expect, file)
    if file.size <= CHUNK:
        data = pieces.take(file.size)
        hashes.whole(data, expected)
        placer.whole(file, data)
    else:
        parts = _parts(pieces, file, hashes.stream(expected))
        placer.parts(file, parts)
        for _left_over in parts:
            pass  # a placer that gave up in the middle must not shift what follows


def _parts(pieces: _Pieces, file: File, stream: Stream) -> Iterator[memoryview]:
    left = file.size
    while left:
        part = pieces.take(min(left, CHUNK))
        stream.update(part)
        left -= len(part)
        yield part
    stream.end()


def _expect(file: File, found: Digest) -> None:
    if found != file.digest:
        raise CorruptError(f"`{file.path}` has other bytes than its manifest says")
