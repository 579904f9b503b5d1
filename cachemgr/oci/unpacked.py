"""An image that a container runtime has unpacked, as a seed: in Kubernetes a volume of the kind `image`.

The files of a layer lie in it as they were packed, and our manifest says in which order and with which headers they
made the tar whose digest it has. So the tar is written again while it is read, and a restore checks it as any other:
its digest, and that of each file.
"""

import io
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from cachemgr import beneath
from cachemgr.capture import File, Layer
from cachemgr.errors import CacheError, CorruptError, NotFoundError, StoreError
from cachemgr.layer import CHUNK, END, links_in, open_quietly
from cachemgr.oci.image import PLACE
from cachemgr.oci.readonly import ReadOnly
from cachemgr.store import Entry, Store, layout
from cachemgr.store.captures import all_captures
from cachemgr.store.local import LocalStore
from cachemgr.ustar import header, padding


class Seed(ReadOnly):
    """A directory that only gives: a store, or the unpacked image of one. Which it is shows when it is first asked,
    because the disk of a seed may hang, and opening a cache must not."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def has(self, name: str) -> bool:
        return self._store.has(name)

    def open(self, name: str) -> BinaryIO:
        return self._store.open(name)

    def scan(self, prefix: str) -> Iterator[Entry]:
        return self._store.scan(prefix)

    @cached_property
    def _store(self) -> Store:
        return UnpackedStore(self._root) if os.path.isdir(self._root / PLACE) else LocalStore(self._root)


class UnpackedStore(ReadOnly):
    """The artifacts of an image that lies unpacked at `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._committed = LocalStore(root / PLACE)
        self._layers: dict[str, Layer] | None = None

    def __str__(self) -> str:
        return str(self._root)

    def has(self, name: str) -> bool:
        if not name.startswith(layout.LAYERS):
            return self._committed.has(name)
        layer = self._known().get(name)
        return layer is not None and all(
            (self._root / section.domain / file.path).is_file()
            for section in layer.sections
            for file in section.files()
        )

    def open(self, name: str) -> BinaryIO:
        if not name.startswith(layout.LAYERS):
            return self._committed.open(name)
        layer = self._known().get(name)
        if layer is None:
            raise NotFoundError(f"no `{name}` in {self}")
        return io.BufferedReader(_Tar(self._root, layer), CHUNK)

    def scan(self, prefix: str) -> Iterator[Entry]:
        yield from self._committed.scan(prefix)
        if prefix in {"", layout.LAYERS}:
            for name, layer in self._known().items():
                yield Entry(name, layer.size, 0.0)

    def _known(self) -> dict[str, Layer]:
        """The layers by object name. Manifests are only read here: whether one may be used is asked elsewhere."""
        if self._layers is None:
            found = (capture for held in all_captures(self._committed, []).values() for capture in held)
            self._layers = {
                layout.layer_name(layer.digest): layer for capture in found for layer in capture.manifest.layers
            }
        return self._layers


class _Tar(io.RawIOBase):
    """The tar of a layer, read from the first byte to the last, as often as it is rewound."""

    def __init__(self, root: Path, layer: Layer) -> None:
        self._root, self._layer = root, layer
        self._position = 0
        self._pieces = self._written()
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_SET and offset == 0:
            self._position, self._pieces, self._rest = 0, self._written(), memoryview(b"")
        elif whence != os.SEEK_CUR or offset:
            raise io.UnsupportedOperation("a layer is read from its beginning")
        return self._position

    def readinto(self, buffer: "memoryview | bytearray", /) -> int:  # type: ignore[override]
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        self._position += count
        return count

    def _written(self) -> Iterator[bytes]:
        root = beneath.enter(self._root)
        try:
            for section in self._layer.sections:
                for unit in section.units:
                    yield from self._unit(root, section.domain, unit.files, links_in(unit))
        finally:
            os.close(root)
        yield END

    def _unit(self, root: int, domain: str, files: "Sequence[File]", links: dict[str, str]) -> Iterator[bytes]:
        for file in files:
            link = links.get(file.path)
            yield header(domain, file, link)
            if link is None:
                yield from self._content(root, f"{domain}/{file.path}", file.size)
                yield b"\0" * padding(file.size)

    def _content(self, root: int, path: str, size: int) -> Iterator[bytes]:
        """Exactly so many bytes, or the offsets of what follows would be wrong."""
        directory, _slash, base = path.rpartition("/")
        try:
            with beneath.inside(root, directory) as above:
                descriptor = open_quietly(base, above)
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                while size:
                    piece = file.read(min(size, CHUNK))
                    if not piece:
                        raise CorruptError(f"`{path}` in {self._root} is shorter than its manifest says")
                    size -= len(piece)
                    yield piece
        except OSError as error:
            raise self._failed(path, error) from None

    def _failed(self, path: str, error: OSError) -> CacheError:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return NotFoundError(f"no `{path}` in {self._root}")
        return StoreError(f"cannot read `{path}` in {self._root}: {error.strerror or error}")
