"""The JSON documents of an image: descriptors, manifests, indexes (image-spec 1.1).

What is written is canonical, so that equal images have equal digests. What is read was written by anybody: sizes are
bounded before it is parsed, and only what we need is looked at.
"""

from typing import Literal, TypeVar

import msgspec

from cachemgr import digest
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER_ZSTD = "application/vnd.oci.image.layer.v1.tar+zstd"

DOCUMENT_LIMIT = 4 << 20
"""Bytes of a manifest or index; registries take no larger ones (distribution-spec 1.1, "Pushing Manifests")."""

NAME = "org.opencontainers.image.ref.name"
"""The annotation that names an image in an index."""

T = TypeVar("T")


class Descriptor(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What names a blob: its type, digest and size in bytes."""

    media_type: str
    digest: Digest
    size: int
    annotations: dict[str, str] = {}


class ImageManifest(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """One image. `layers` begin with the lowest."""

    schema_version: Literal[2]
    media_type: str = MANIFEST
    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: dict[str, str] = {}


class Index(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Several images."""

    schema_version: Literal[2]
    media_type: str = INDEX
    manifests: tuple[Descriptor, ...]


class RootFs(msgspec.Struct, frozen=True):
    """The layers of an image by the digests of their tars."""

    diff_ids: tuple[Digest, ...]
    type: str = "layers"


class Settings(msgspec.Struct, frozen=True):
    """What a config says about running the image; ours are not run."""

    labels: dict[str, str] = msgspec.field(name="Labels", default_factory=dict)


class History(msgspec.Struct, frozen=True):
    """How a layer came about."""

    created: str
    created_by: str


class Config(msgspec.Struct, frozen=True):
    """The config of an image."""

    created: str
    architecture: str
    os: str
    config: Settings
    rootfs: RootFs
    history: tuple[History, ...]


def encode(document: msgspec.Struct) -> bytes:
    """The canonical bytes of a document."""
    return msgspec.json.encode(document, order="sorted")


def described(data: bytes, media_type: str, **annotations: str) -> Descriptor:
    """What names these bytes."""
    return Descriptor(media_type, digest.of_bytes(data), len(data), annotations)


def decode(data: bytes, kind: type[T], place: str) -> T:
    """Read a document that `place` gave.

    Raises:
        CorruptError: it is no document of this kind.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(f"{place} is no OCI image: {error}", hint="name an image that cachemgr exported") from None


def is_index(data: bytes, place: str) -> bool:
    """Whether a document lists images, and is none itself.

    Raises:
        CorruptError: it is no document at all.
    """
    return bool(decode(data, _Typed, place).manifests)


class _Typed(msgspec.Struct):
    manifests: msgspec.Raw = msgspec.Raw()
