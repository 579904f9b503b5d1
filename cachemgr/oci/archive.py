"""Images in one tar file, for sites that nothing else reaches: an OCI image layout as skopeo's `oci-archive` has it.

It is written from front to back, to a file beside the one that it becomes, and is the same whenever it is written from
equal captures. A reader looks for members once and then goes to their places; names, links, sparse files and
repetitions in it mean nothing.
"""

import io
import os
import stat
import tarfile
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, NotFoundError, StoreError
from cachemgr.oci import documents
from cachemgr.oci.directory import INDEX, MARK, MARKER, blob_name, listed
from cachemgr.oci.documents import Descriptor
from cachemgr.oci.image import Image
from cachemgr.oci.place import Opened
from cachemgr.places import is_special
from cachemgr.store import Source

_MOST_MEMBERS = 1_000_000
_BUFFER = 1 << 20


class Archive:
    """A tar file that is read.

    Raises:
        NotFoundError, StoreError: there is none, or it cannot be read.
        CorruptError: it is no tar, or has a member twice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[str, tuple[int, int]] = {}
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise CorruptError(f"{path} is no tar file of images: it is no file")
            with tarfile.open(path, mode="r:") as tar:
                for count, member in enumerate(tar):
                    if count >= _MOST_MEMBERS:
                        raise CorruptError(f"{path} has more than {_MOST_MEMBERS} members")
                    if member.isreg() and not member.issparse():
                        self._add(member)
        except FileNotFoundError:
            raise NotFoundError(f"there is no {path}", hint="name an image layout, a tar file, or a registry") from None
        except (tarfile.TarError, ValueError, EOFError, OverflowError) as error:
            raise CorruptError(f"{path} is no tar file of images: {error}") from None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from None

    def __str__(self) -> str:
        return str(self._path)

    def index(self) -> bytes:
        if INDEX not in self._places:
            raise CorruptError(f"{self} has no {INDEX}", hint="cachemgr export --tar makes one")
        return self._read(INDEX)

    def document(self, wanted: Descriptor) -> bytes:
        return self._read(blob_name(wanted.digest))

    def open(self, blob: Digest) -> BinaryIO:
        return self._open(blob_name(blob))

    def _add(self, member: tarfile.TarInfo) -> None:
        name = member.name.removeprefix("./")
        if name in self._places:
            raise CorruptError(f"{self} has `{name[:200]}` twice")
        self._places[name] = (member.offset_data, member.size)

    def _read(self, name: str) -> bytes:
        with self._open(name) as stream:
            data = stream.read(documents.DOCUMENT_LIMIT + 1)
        if len(data) > documents.DOCUMENT_LIMIT:
            raise CorruptError(f"`{name}` in {self} has more than {documents.DOCUMENT_LIMIT} bytes")
        return data

    def _open(self, name: str) -> BinaryIO:
        if name not in self._places:
            raise NotFoundError(f"no `{name}` in {self}")
        try:
            return io.BufferedReader(_Part(self._path, *self._places[name]), _BUFFER)
        except OSError as error:
            raise StoreError(f"cannot read {self._path}: {error.strerror}") from None


class _Part(io.RawIOBase):
    """So many bytes of a file from a place on."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._file.seek(start)
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview | bytearray", /) -> int:  # type: ignore[override]
        count = self._file.readinto(memoryview(buffer)[: self._left])
        self._left -= count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class NewArchive:
    """A tar file that is written; it gets its name when everything is in it, and is nothing if that fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = Path(os.path.realpath(path))
        self._aside = self._place.with_name(f".{self._place.name}.{uuid.uuid4().hex}.tmp")
        self._held: set[Digest] = set()
        self._images: list[Image] = []

    def __str__(self) -> str:
        return str(self._path)

    def __enter__(self) -> "NewArchive":
        if is_special(self._path):  # a device would be lost for everybody
            raise StoreError(f"cannot write {self._path}: it is no file", hint="name another file")
        try:
            self._file = self._aside.open("xb")
        except OSError as error:
            raise StoreError(f"cannot write {self._path}: {error.strerror}", hint="name another file") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as failure:
            raise self._failed(failure) from None
        finally:
            with suppress(OSError):  # what is still buffered is of no use without what failed
                self._file.close()
            with suppress(OSError):
                self._aside.unlink()

    def has(self, blob: Descriptor) -> bool:
        return blob.digest in self._held

    def put(self, blob: Descriptor, source: Opened) -> None:
        with source() as stream:
            self._member(blob_name(blob.digest), blob.size, stream)
        self._held.add(blob.digest)

    def publish(self, image: Image) -> None:
        self._member(blob_name(image.digest), len(image.manifest), io.BytesIO(image.manifest))
        self._images.append(image)

    def _finish(self) -> None:
        for name, data in ((MARKER, MARK), (INDEX, documents.encode(listed(self._images)))):
            self._member(name, len(data), io.BytesIO(data))
        self._file.write(b"\0" * (2 * tarfile.BLOCKSIZE))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._aside, self._place)

    def _member(self, name: str, size: int, source: Source) -> None:
        member = tarfile.TarInfo(name)
        member.size = size
        count = 0
        try:
            self._file.write(member.tobuf(tarfile.PAX_FORMAT))
            while piece := source.read(_BUFFER):
                self._file.write(piece)
                count += len(piece)
            self._file.write(b"\0" * (-count % tarfile.BLOCKSIZE))
        except OSError as error:
            raise self._failed(error) from None
        if count != size:
            raise CorruptError(f"`{name}` has {count} bytes, and should have {size}")

    def _failed(self, error: OSError) -> StoreError:
        return StoreError(
            f"cannot write {self._path}: {error.strerror or error}", hint="free space there, or name another file"
        )
