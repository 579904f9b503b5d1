"""Pack and unpack one layer: a deterministic tar inside zstd, written for any tool and read only against its manifest.

The tar is canonical: members in manifest order, owner 0:0, mode 0644 or 0755, mtime 0 unless the manifest keeps one,
equal files stored once with hard links after. `tar -xf` and OCI tools open it.

Reading never parses a tar header. The manifest says which files follow in which order and how long each is, so the
offset of every byte is known beforehand; the digests say whether the bytes are right. A hostile archive therefore has
no member names, links, devices or lengths for us to be fooled by, and the reader is a third of the cost of `tarfile`.
"""

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO, Protocol

import msgspec
import zstandard

from cachemgr import digest
from cachemgr.capture import File, Layer, Section, Unit
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError
from cachemgr.ustar import BLOCK, header, header_size, padding

CHUNK = 1 << 20
WINDOW_LOG = 27
LEVEL = 8
_TUNING = {
    "hash_log": 19,
    "chain_log": 19,
    "ldm_hash_rate_log": 5,
    "ldm_bucket_size_log": 4,
    "ldm_min_match": 96,
    "threads": 2,
    "job_size": 8 << 20,
    "overlap_log": 9,
}
"""Tables that stay in a processor's cache, because distant matches are the long-distance matcher's job, and jobs of a
size that two processors share: two thirds of the time of one, for a fifth more of their work and equal sizes, on the
real trees. How many threads there are says nothing about the bytes, but whether there are any does, so it does not
depend on the machine."""
END = b"\0" * (2 * BLOCK)
_PIECES_IN_FLIGHT = 8


UNREAD = Digest("")
"""The digest of a file that nobody has read yet. `pack` finds it while it copies the bytes, so that they are read once.

Files of one unit that may have equal bytes must not both be unread: which is a link to which is known before."""


class Source(Protocol):
    """Where the stored bytes of a file come from while a layer is packed.

    Raises UnitError when its unit cannot be packed after all.
    """

    def __call__(self, domain: str, file: File) -> Iterator[bytes]: ...


class UnitError(Exception):
    """A unit that cannot be packed. `str()` is the reason."""

    def __init__(self, domain: str, unit: Unit, reason: str) -> None:
        super().__init__(reason)
        self.domain = domain
        self.unit = unit

    @classmethod
    def changed(cls, domain: str, unit: Unit, file: File) -> "UnitError":
        """A file's bytes are not those of its row: it was written to in the meantime."""
        return cls(domain, unit, f"{file.path} changed while it was read")


def links_in(unit: Unit) -> dict[str, str]:
    """Which members of a unit are stored as a hard link to an earlier one: path to path.

    Equal bytes with equal mode and mtime, in member order. Only inside one unit, so that each unit can be unpacked
    without its neighbours (across units the compression window does the same). Relocated files are never linked,
    because they are equal only until they are placed.
    """
    if len({file.digest for file in unit.files}) == len(unit.files):
        return {}
    first: dict[tuple[Digest, int, int | None], str] = {}
    links: dict[str, str] = {}
    for file in unit.files:
        if file.relocated or file.size == 0 or file.digest == UNREAD:
            continue
        original = first.setdefault((file.digest, file.mode, file.mtime_ns), file.path)
        if original != file.path:
            links[file.path] = original
    return links


class Sink(Protocol):
    """Where a packed layer goes."""

    def write(self, data: bytes, /) -> object:
        """Takes all of it, or raises: an unbuffered file, which may take less, is none."""


def pack(sections: Sequence[Section], source: Source, target: Sink) -> Layer:
    """Write `sections` to `target` as one compressed layer and describe it.

    Bytes are read once here, hashed, and compressed beside the reading: the digest of a file is compared with that of
    its row, or found where it is `UNREAD`. Memory stays below the compression window (128 MiB) plus about 90 MiB.

    Raises:
        UnitError: a file is not what its row says, or its source refuses it; nothing of `target` may be used.
    """
    with _Compressor(target, tar_size(sections)) as out:
        packed = tuple(
            Section(each.domain, tuple(_unit_in(each.domain, unit, source, out.write) for unit in each.units))
            for each in sections
        )
        out.write(END)
    return Layer(out.digest, out.size, out.tar_digest, out.tar_size, packed)


def _units(sections: Sequence[Section]) -> Iterator[tuple[str, Unit]]:
    for section in sections:
        for unit in section.units:
            yield section.domain, unit


def _unit_in(domain: str, unit: Unit, source: Source, write: Callable[[bytes], None]) -> Unit:
    """Write the members of a unit; the unit with all of its digests."""
    links = links_in(unit)
    files = []
    for file in unit.files:
        link = links.get(file.path)
        write(header(domain, file, link))
        files.append(_copy_in(domain, unit, file, source, write) if link is None else file)
    packed = Unit(unit.name, tuple(files))
    assert links_in(packed) == links, "equal files of a unit were both unread"
    return packed


def _copy_in(domain: str, unit: Unit, file: File, source: Source, write: Callable[[bytes], None]) -> File:
    running = digest.hasher()
    size = 0
    for piece in source(domain, file):
        running.update(piece)
        size += len(piece)
        if size > file.size:
            raise UnitError.changed(domain, unit, file)
        write(piece)
    found = digest.finish(running)
    if size != file.size or file.digest not in (found, UNREAD):
        raise UnitError.changed(domain, unit, file)
    write(b"\0" * padding(file.size))
    return file if file.digest == found else msgspec.structs.replace(file, digest=found)


def tar_size(sections: Sequence[Section]) -> int:
    """Bytes of the tar that `pack` makes of these sections."""
    size = len(END)
    for domain, unit in _units(sections):
        links = links_in(unit)
        for file in unit.files:
            link = links.get(file.path)
            size += header_size(domain, file, link) + (file.size + padding(file.size) if link is None else 0)
    return size


class _Compressor:
    """Compress in a thread of its own: it releases the interpreter lock, so reading and hashing go on beside it."""

    def __init__(self, target: Sink, expected: int) -> None:
        self._target = target
        self._expected = expected
        self._pieces: queue.Queue[bytes | None] = queue.Queue(_PIECES_IN_FLIGHT)
        self._held: list[bytes] = []
        self._held_size = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="cachemgr-compress", daemon=True)
        self._outer, self._inner = digest.hasher(), digest.hasher()
        self.size = self.tar_size = 0
        self.digest = self.tar_digest = Digest("")

    def __enter__(self) -> "_Compressor":
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._flush()
        self._pieces.put(None)
        self._thread.join()
        self.digest, self.tar_digest = digest.finish(self._outer), digest.finish(self._inner)
        if self._failure is not None and error is None:
            raise self._failure

    def write(self, piece: bytes) -> None:
        self._held.append(piece)
        self._held_size += len(piece)
        if self._held_size >= CHUNK:
            self._flush()

    def _flush(self) -> None:
        piece = b"".join(self._held)
        self._held, self._held_size = [], 0
        self._inner.update(piece)
        self.tar_size += len(piece)
        self._pieces.put(piece)

    def _run(self) -> None:
        pieces = iter(self._pieces.get, None)
        try:
            self._compress(pieces)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread by __exit__
            self._failure = error
            # The writer must not wait for room; where the end was taken already, this iterator is over.
            for _piece in pieces:
                pass

    def _compress(self, pieces: Iterator[bytes]) -> None:
        parameters = zstandard.ZstdCompressionParameters.from_level(
            LEVEL,
            source_size=self._expected,
            window_log=WINDOW_LOG,
            enable_ldm=True,
            write_content_size=True,
            **_TUNING,
        )
        stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=self._expected)
        for piece in pieces:
            self._emit(stream.compress(piece))
        self._emit(stream.flush())

    def _emit(self, compressed: bytes) -> None:
        self._outer.update(compressed)
        self.size += len(compressed)
        self._target.write(compressed)


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
        self._thread = threading.Thread(target=self._run, name="cachemgr-decompress", daemon=True)
        self._thread.start()

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
    """Where unpacked files go."""

    def whole(self, file: File, data: memoryview) -> None:
        """A small file, already verified."""

    def parts(self, file: File, parts: Iterator[memoryview]) -> None:
        """A large file in order; the iterator raises CorruptError at its end when the bytes were wrong."""

    def link(self, file: File, original: str) -> None:
        """A file with the bytes of one of the same unit that was handed over before."""


def unpack(layer: Layer, compressed: BinaryIO, placer_of: Callable[[str, Unit], Placer | None]) -> None:
    """Hand the files of every unit for which `placer_of` its domain gives a placer to that, verified, in tar order.

    The compressed bytes are checked first, so that no byte of a swapped layer reaches the decompressor; what comes out
    is checked file by file. Where a store has the layer unpacked (`cachemgr.oci.unpacked`), `compressed` may be the tar
    itself, which the manifest names as well. The caller must not publish what was placed unless this returns.

    Raises:
        CorruptError: the layer is torn, longer than its manifest, or has other bytes.
    """
    plain = verify_bytes(layer, compressed) == layer.tar_digest
    pieces = _Pieces(layer, compressed, plain=plain)
    gap = 0
    try:
        for domain, unit in _units(layer.sections):
            links = links_in(unit)
            placer = placer_of(domain, unit)
            for file in unit.files:
                link = links.get(file.path)
                gap += header_size(domain, file, link)
                if link is None and placer is not None:
                    pieces.skip(gap)
                    _unpack_file(pieces, file, placer)
                    gap = padding(file.size)
                elif link is None:
                    gap += file.size + padding(file.size)
                elif placer is not None:
                    placer.link(file, link)
        pieces.skip(gap)
        pieces.finish()
    finally:
        pieces.close()


class _Nowhere:
    """Takes files that have been verified, and leaves them."""

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


def _unpack_file(pieces: _Pieces, file: File, placer: Placer) -> None:
    if file.size <= CHUNK:
        data = pieces.take(file.size)
        _expect(digest.of_bytes(data), file)
        placer.whole(file, data)
    else:
        parts = _verified_parts(pieces, file)
        placer.parts(file, parts)
        for _left_over in parts:
            pass  # a placer that gave up in the middle must not shift what follows


def _verified_parts(pieces: _Pieces, file: File) -> Iterator[memoryview]:
    running = digest.hasher()
    left = file.size
    while left:
        part = pieces.take(min(left, CHUNK))
        running.update(part)
        left -= len(part)
        yield part
    _expect(digest.finish(running), file)


def _expect(found: Digest, file: File) -> None:
    if found != file.digest:
        raise CorruptError(f"`{file.path}` has other bytes than its manifest says")


def read_file(path: str) -> Iterator[bytes]:
    """The bytes of a live file in pieces, without moving its access time where the kernel allows it."""
    descriptor = open_quietly(path)
    try:
        # A buffer of the file's own size: allocating 1 MiB for each small file would cost more than reading it.
        wanted = min(CHUNK, os.fstat(descriptor).st_size + 1)
        while piece := os.read(descriptor, wanted):
            yield piece
    finally:
        os.close(descriptor)


def open_quietly(path: str, directory: int | None = None) -> int:
    """Open a file for reading, never through a symbolic link, without touching its access time if we own it."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags | os.O_NOATIME, dir_fd=directory)
    except PermissionError:
        return os.open(path, flags, dir_fd=directory)
