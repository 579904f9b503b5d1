"""Pack a layer: read, hash and compress at once."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import msgspec
import zstandard

from cachemgr import digest, threads
from cachemgr.capture import File, Layer, Section, Unit
from cachemgr.digest import Digest
from cachemgr.hashing import Hashes
from cachemgr.layer.members import CHUNK, END, UNREAD, WINDOW_LOG, is_read, links_in, tar_size, units_in
from cachemgr.ustar import header, padding

LEVEL = 8
_TUNING = {
    "hash_log": 19,
    "chain_log": 19,
    "search_log": 2,
    "ldm_hash_rate_log": 5,
    "ldm_bucket_size_log": 3,
    "ldm_min_match": 96,
    "threads": 2,
    "job_size": 8 << 20,
    "overlap_log": 9,
}
"""Tables that stay in a processor's cache, because distant matches are the long-distance matcher's job; half as many
places looked at for a match as the level has, which is a fifth less work for a fiftieth more bytes; and jobs of a size
that two processors share, with equal sizes, in two thirds of the time of one. All on the real trees, and with an eye on
made ones: a long-distance matcher that takes only matches of 512 bytes is faster still on the real ones, and doubles
20,000 edited copies. How many threads there are says nothing about the bytes, but whether there are any does, so it
does not depend on the machine."""
_PIECES_IN_FLIGHT = 8


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


class Sink(Protocol):
    """Where a packed layer goes."""

    def write(self, data: bytes, /) -> object:
        """Takes all of it, or raises: an unbuffered file, which may take less, is none."""


def pack(sections: Sequence[Section], source: Source, target: Sink) -> Layer:
    """Write `sections` to `target` as one compressed layer and describe it.

    Bytes are read once here, and hashed and compressed beside the reading: the digest of a file is compared with that
    of its row, or found where it is `UNREAD`. Memory stays below the compression window (128 MiB) plus about 100 MiB.

    Raises:
        UnitError: a file is not what its row says, or its source refuses it; nothing of `target` may be used.
    """
    with Hashes() as hashes, _Compressor(target, tar_size(sections), hashes) as out:
        packing = _Packing(source, out.write, hashes)
        for domain, unit in units_in(sections):
            packing.add(domain, unit)
        out.write(END)
    return Layer(out.digest, out.size, out.tar_digest, out.tar_size, tuple(map(packing.packed, sections)))


class _Packing:
    """Units on their way into a tar, and the digests of their files."""

    def __init__(self, source: Source, write: Callable[[bytes], None], hashes: Hashes) -> None:
        self._source, self._write, self._hashes = source, write, hashes
        self._found: dict[tuple[str, str], Digest] = {}

    def add(self, domain: str, unit: Unit) -> None:
        """Write the members of a unit."""
        links = links_in(unit)
        for file in unit.files:
            link = links.get(file.path)
            self._write(header(domain, file, link))
            if link is None:
                self._copy(domain, unit, file)

    def packed(self, section: Section) -> Section:
        """A section with all of its digests, once they are known."""
        return Section(section.domain, tuple(self._packed(section.domain, unit) for unit in section.units))

    def _packed(self, domain: str, unit: Unit) -> Unit:
        if is_read(unit):
            return unit
        packed = Unit(unit.name, tuple(self._read(domain, file) for file in unit.files))
        assert links_in(packed) == links_in(unit), "equal files of a unit were both unread"
        return packed

    def _read(self, domain: str, file: File) -> File:
        if file.digest != UNREAD:
            return file
        return msgspec.structs.replace(file, digest=self._found[domain, file.path])

    def _copy(self, domain: str, unit: Unit, file: File) -> None:
        found = partial(self._keep, domain, unit, file)
        if file.size <= CHUNK:
            body = b"".join(self._pieces(domain, unit, file))
            self._hashes.whole(body, found)
            self._write(body)
        else:
            stream = self._hashes.stream(found)
            for piece in self._pieces(domain, unit, file):
                stream.update(piece)
                self._write(piece)
            stream.end()
        self._write(b"\0" * padding(file.size))

    def _pieces(self, domain: str, unit: Unit, file: File) -> Iterator[bytes]:
        """The bytes of a file, which are as many as its row says."""
        size = 0
        for piece in self._source(domain, file):
            size += len(piece)
            if size > file.size:
                break
            yield piece
        if size != file.size:
            raise UnitError.changed(domain, unit, file)

    def _keep(self, domain: str, unit: Unit, file: File, found: Digest) -> None:
        if file.digest == UNREAD:
            self._found[domain, file.path] = found
        elif file.digest != found:
            raise UnitError.changed(domain, unit, file)


class _Compressor:
    """Compress in a thread of its own: it releases the interpreter lock, so reading and hashing go on beside it."""

    def __init__(self, target: Sink, expected: int, hashes: Hashes) -> None:
        self._target = target
        self._expected = expected
        self._pieces: queue.Queue[bytes | None] = queue.Queue(_PIECES_IN_FLIGHT)
        self._held: list[bytes] = []
        self._held_size = 0
        self._failure: BaseException | None = None
        self._compressed, self._tar = digest.hasher(), hashes.stream(self._keep_tar_digest)
        self.size = self.tar_size = 0
        self.digest = self.tar_digest = Digest("")
        """Known when its block has ended, and that of `hashes`."""
        self._thread: threading.Thread = threads.start(self._run, "compress")

    def __enter__(self) -> "_Compressor":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._flush()
        self._pieces.put(None)
        self._thread.join()
        self._tar.end()
        self.digest = digest.finish(self._compressed)
        if self._failure is not None and error is None:
            raise self._failure

    def write(self, piece: bytes) -> None:
        """The next bytes of the tar. Raises what went wrong with those before them."""
        if self._failure is not None:
            raise self._failure
        self._held.append(piece)
        self._held_size += len(piece)
        if self._held_size >= CHUNK:
            self._flush()

    def _flush(self) -> None:
        piece = b"".join(self._held)
        self._held, self._held_size = [], 0
        self._tar.update(piece)
        self.tar_size += len(piece)
        self._pieces.put(piece)

    def _keep_tar_digest(self, found: Digest) -> None:
        self.tar_digest = found

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
        self._compressed.update(compressed)
        self.size += len(compressed)
        self._target.write(compressed)
