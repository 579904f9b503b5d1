"""Images as a store that is only read: transfers, filters and trust work with it as with any other.

Nothing of an image is believed. A blob is what its digest says or an error, a manifest is judged and read as in every
store, and a layer is the blob of the digest that our manifest names, whatever the image says about its layers.
"""

import io
from collections.abc import Iterator, Mapping
from typing import BinaryIO, Protocol

from cachemgr import digest
from cachemgr.capture import LAYOUT, MAX_MANIFEST_BYTES, is_safe_path
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, NotFoundError
from cachemgr.oci import documents, labels
from cachemgr.oci.documents import Descriptor, ImageManifest, Index
from cachemgr.oci.image import RECOMPRESSED, stored_objects
from cachemgr.oci.readonly import ReadOnly
from cachemgr.store import Entry, layout

_MOST_IMAGES = 10_000
_MOST_BYTES = 4 * MAX_MANIFEST_BYTES
"""Of manifests and what lies beside them, in all images together: they are kept in memory."""


class Blobs(Protocol):
    """Where images lie: a directory, a tar file, a registry."""

    def index(self) -> bytes:
        """The document that says which images there are, or the manifest of the only one.

        Raises:
            NotFoundError: there is none.
            StoreError: the place cannot be read.
        """

    def document(self, wanted: Descriptor) -> bytes:
        """The bytes of a manifest; no more than its size says. Raises as `index`."""

    def open(self, blob: Digest) -> BinaryIO:
        """A reader of a blob; the caller closes it. Raises as `index`."""

    def __str__(self) -> str:
        """How a person names this place."""


class ImageStore(ReadOnly):
    """The artifacts in the images of a place.

    Raises:
        NotFoundError: there is nothing.
        CorruptError: what is there is no image of ours, or not what its digests say.
        StoreError: the place cannot be read.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._objects: dict[str, bytes] = {}
        self._layers: dict[str, Descriptor] = {}
        self._room = _MOST_BYTES
        for manifest in _manifests(blobs):
            self._add(manifest)

    def __str__(self) -> str:
        return str(self._blobs)

    def has(self, name: str) -> bool:
        return name in self._objects or name in self._layers

    def open(self, name: str) -> BinaryIO:
        if name in self._objects:
            return io.BytesIO(self._objects[name])
        if name not in self._layers:
            raise NotFoundError(f"no `{name}` in {self}", hint=RECOMPRESSED)
        return self._blobs.open(self._layers[name].digest)

    def scan(self, prefix: str) -> Iterator[Entry]:
        for name, data in self._objects.items():
            if name.startswith(prefix):
                yield Entry(name, len(data), 0.0)
        for name, blob in self._layers.items():
            if name.startswith(prefix):
                yield Entry(name, blob.size, 0.0)

    def _add(self, manifest: ImageManifest) -> None:
        if any(not digest.is_digest(blob.digest) or blob.size < 0 for blob in manifest.layers) or not manifest.layers:
            raise CorruptError(f"{self} has an image with malformed layers")
        *layers, top = manifest.layers
        self._layers.update((layout.layer_name(blob.digest), blob) for blob in layers)
        objects = self._read_top(top)
        self._room -= sum(map(len, objects.values()))
        if self._room < 0:
            raise CorruptError(
                f"{self} has more than {_MOST_BYTES:,} bytes of manifests", hint="import its images one by one"
            )
        self._objects.update(objects)

    def _read_top(self, blob: Descriptor) -> Mapping[str, bytes]:
        if blob.size > MAX_MANIFEST_BYTES:
            raise CorruptError(f"{self} claims {blob.size:,} bytes of manifests")
        with self._blobs.open(blob.digest) as stream:
            data = stream.read(blob.size + 1)
        objects = stored_objects(_are(data, blob, str(self)), str(self))
        return {name: each for name, each in objects.items() if is_safe_path(name)}


def _manifests(blobs: Blobs) -> list[ImageManifest]:
    """The images of ours. An index may list others beside them, and the signatures of tools that keep them there."""
    place = str(blobs)
    top = blobs.index()
    if len(top) > documents.DOCUMENT_LIMIT:
        raise CorruptError(f"{place} has an index of more than {documents.DOCUMENT_LIMIT} bytes")
    if not documents.is_index(top, place):
        found = [documents.decode(top, ImageManifest, place)]
    else:
        listed = documents.decode(top, Index, place).manifests
        if len(listed) > _MOST_IMAGES:
            raise CorruptError(f"{place} lists more than {_MOST_IMAGES} images")
        distinct = {each.digest: each for each in listed if each.media_type == documents.MANIFEST}
        found = [_read(blobs, each, place) for each in distinct.values()]
    ours = [manifest for manifest in found if labels.LAYOUT_LABEL in manifest.annotations]
    if not ours:
        raise CorruptError(f"{place} has no image that cachemgr made", hint="cachemgr export makes them")
    newer = next((each.annotations[labels.LAYOUT_LABEL] for each in ours if not _is_known(each)), None)
    if newer is not None:
        said = f"{place} has layout {newer[:20]}, this cachemgr reads layout {LAYOUT}"
        raise CorruptError(said, hint="upgrade cachemgr")
    return ours


def _is_known(manifest: ImageManifest) -> bool:
    return manifest.annotations[labels.LAYOUT_LABEL] == str(LAYOUT)


def _read(blobs: Blobs, wanted: Descriptor, place: str) -> ImageManifest:
    if not digest.is_digest(wanted.digest) or not 0 < wanted.size <= documents.DOCUMENT_LIMIT:
        raise CorruptError(f"{place} lists an image with a malformed descriptor")
    return documents.decode(_are(blobs.document(wanted), wanted, place), ImageManifest, place)


def _are(data: bytes, wanted: Descriptor, place: str) -> bytes:
    """The same bytes, which are those that a descriptor names."""
    if len(data) != wanted.size or digest.of_bytes(data) != wanted.digest:
        raise CorruptError(f"{place} has other bytes under {wanted.digest} than that says")
    return data
