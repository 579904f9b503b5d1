"""Images in a directory, as an OCI image layout has them (image-spec 1.1, `image-layout.md`).

    oci-layout  index.json  blobs/sha256/<digest>

Blobs are immutable, so they are kept as a local store keeps objects. `index.json` lists the images under names, and is
replaced as a whole: of two exports at once, the last one lists its own images and those that were there when it looked.
"""

import io
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from cachemgr import digest
from cachemgr.digest import Digest
from cachemgr.errors import NotFoundError, StoreError
from cachemgr.key import folder
from cachemgr.oci import documents
from cachemgr.oci.documents import NAME, Descriptor, Index
from cachemgr.oci.image import Image
from cachemgr.oci.place import Opened
from cachemgr.store.local import LocalStore

MARKER, MARK = "oci-layout", b'{"imageLayoutVersion":"1.0.0"}'
INDEX = "index.json"


def blob_name(blob: Digest) -> str:
    """Where a blob lies."""
    return f"blobs/sha256/{digest.hex_of(blob)}"


class Directory:
    """An image layout that is read and written."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._objects = LocalStore(root)

    def __str__(self) -> str:
        return str(self._root)

    def index(self) -> bytes:
        try:
            return self._objects.read(INDEX, limit=documents.DOCUMENT_LIMIT)
        except NotFoundError:
            raise NotFoundError(
                f"there is no OCI image layout in {self}", hint="name one, a tar file, or a registry"
            ) from None

    def document(self, wanted: Descriptor) -> bytes:
        return self._objects.read(blob_name(wanted.digest), limit=wanted.size)

    def open(self, blob: Digest) -> BinaryIO:
        return self._objects.open(blob_name(blob))

    def has(self, blob: Descriptor) -> bool:
        try:
            with self._objects.open(blob_name(blob.digest)) as stream:
                return os.fstat(stream.fileno()).st_size == blob.size
        except NotFoundError:
            return False

    def put(self, blob: Descriptor, source: Opened) -> None:
        self._make()
        if not self.has(blob):
            self._objects.delete(blob_name(blob.digest))  # what somebody else left half copied
        with source() as stream:
            self._objects.put_stream(blob_name(blob.digest), stream)

    def publish(self, image: Image) -> None:
        self._make()
        self._objects.put(MARKER, MARK)
        self.put(documents.described(image.manifest, documents.MANIFEST), lambda: io.BytesIO(image.manifest))
        self._replace_index(documents.encode(listed([image], self._listed())))
        for directory in (self._objects.scratch(), self._objects.scratch().parent):
            with suppress(OSError):  # it is of no use to others, and somebody else may be using it
                directory.rmdir()

    def _make(self) -> None:
        """It is for others to read, unlike a store of our own."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot write {self._root}: {error.strerror}", hint="name another directory") from None

    def _listed(self) -> tuple[Descriptor, ...]:
        try:
            return documents.decode(self.index(), Index, str(self)).manifests
        except NotFoundError:
            return ()

    def _replace_index(self, data: bytes) -> None:
        aside = self._objects.scratch() / uuid.uuid4().hex
        try:
            with aside.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.chmod(0o644)
            os.replace(aside, self._root / INDEX)
        except OSError as error:
            raise StoreError(f"cannot write {self._root / INDEX}: {error.strerror}") from None


def listed(images: list[Image], before: tuple[Descriptor, ...] = ()) -> Index:
    """The index of these images and those that were there `before`; the name of one is that of its artifact."""
    new = {folder(image.key): image for image in images}
    kept = [each for each in before if each.annotations.get(NAME) not in new]
    added = [documents.described(image.manifest, documents.MANIFEST, **{NAME: name}) for name, image in new.items()]
    return Index(schema_version=2, manifests=(*kept, *sorted(added, key=lambda each: each.annotations[NAME])))
