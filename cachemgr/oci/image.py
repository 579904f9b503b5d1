"""One artifact as one image, composed without a look at the clock: equal captures make equal bytes, on any day.

    layers   ours as they are (tar+zstd), the newest capture's below: where two have the same file, the first one counts
    the top  .cachemgr/layout.json and .cachemgr/artifacts/…, and every directory of the layers: a runtime that makes
             them up gives them modes of its own, and some give 0600. Compressed as well, because skopeo compresses
             what is not, and the image would be another one then

Unpacked by a runtime this is `<domain>/<path>` for every stored file, and a store without its layers in `.cachemgr/`,
a name that no domain can have.
"""

import io
import tarfile
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import zstandard

from cachemgr import digest
from cachemgr.capture import LAYOUT, MAX_MANIFEST_BYTES, Layer
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, UsageError
from cachemgr.key import Key
from cachemgr.layer import LEVEL, WINDOW_LOG
from cachemgr.oci import documents, labels
from cachemgr.oci.documents import Config, Descriptor, History, ImageManifest, RootFs
from cachemgr.store import layout
from cachemgr.store.captures import Capture, packed

PLACE = ".cachemgr/"
"""Where an image has what commits its layers."""
RECOMPRESSED = "whoever copied the image compressed its layers anew: copy it with skopeo or crane instead"
"""What helps where layers are not those that were exported."""
_MOST_LAYERS = 120
"""Runtimes that stack layers by overlayfs take about 125."""
_MOST_MEMBERS = 1_000_000
_TOP_BYTES = 2 * MAX_MANIFEST_BYTES
_WHITEOUT = ".wh."
"""A file whose name begins so means that another is gone (image-spec 1.1, `layer.md`)."""


class Image(msgspec.Struct, frozen=True):
    """An artifact as an image. Its layers lie in the store that it was composed from."""

    key: Key
    captures: tuple[Digest, ...]
    layers: tuple[Layer, ...]
    """The lowest first."""
    top: bytes
    """The top layer, compressed."""
    config: bytes
    manifest: bytes

    @property
    def digest(self) -> Digest:
        """What names the image, everywhere."""
        return digest.of_bytes(self.manifest)

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """Everything but the manifest, in the order in which it is written."""
        top = documents.described(self.top, documents.LAYER_ZSTD)
        return (*map(_described, self.layers), top, documents.described(self.config, documents.CONFIG))

    @property
    def size(self) -> int:
        """Bytes of all blobs and the manifest."""
        return len(self.manifest) + sum(blob.size for blob in self.blobs)

    def made(self, blob: Digest) -> bytes | None:
        """The bytes of a blob that is none of the store's."""
        return next((data for data in (self.top, self.config) if digest.of_bytes(data) == blob), None)


def compose(key: Key, captures: Sequence[Capture], beside: Mapping[str, bytes]) -> Image:
    """The image of an artifact with these captures, the oldest first; `beside` is what goes along with them, by object
    name: signatures, and where they were verified.

    Raises:
        CorruptError: a file has a name that container runtimes take for the removal of another.
        UsageError: it has more layers than container runtimes take.
    """
    layers = _stacked(captures)
    if len(layers) > _MOST_LAYERS:
        raise UsageError(
            f"{key} has {len(layers)} layers, and an image takes {_MOST_LAYERS}",
            hint="cachemgr push, or --store copies",
        )
    tar = _top_tar(captures, layers, beside)
    top = zstandard.ZstdCompressor(LEVEL, write_content_size=True).compress(tar)
    told = labels.labels(key, captures)
    created = labels.created(captures)
    config = documents.encode(
        Config(
            created=created,
            architecture=labels.architecture(captures[0].manifest),
            os="linux",
            config=documents.Settings(told),
            rootfs=RootFs((*(layer.tar_digest for layer in layers), digest.of_bytes(tar))),
            history=tuple(History(created, "cachemgr export") for _layer in (*layers, top)),
        )
    )
    manifest = ImageManifest(
        schema_version=2,
        config=documents.described(config, documents.CONFIG),
        layers=(*map(_described, layers), documents.described(top, documents.LAYER_ZSTD)),
        annotations=told,
    )
    digests = tuple(capture.digest for capture in captures)
    return Image(key, digests, layers, top, config, documents.encode(manifest))


def _stacked(captures: Sequence[Capture]) -> tuple[Layer, ...]:
    """The layers of captures, the lowest first; one that captures share lies where the oldest of them has it."""
    highest = (layer for capture in captures for layer in reversed(capture.manifest.layers))
    return tuple(reversed({layer.digest: layer for layer in highest}.values()))


def _described(layer: Layer) -> Descriptor:
    return Descriptor(documents.LAYER_ZSTD, layer.digest, layer.size)


def _top_tar(captures: Sequence[Capture], layers: Iterable[Layer], beside: Mapping[str, bytes]) -> bytes:
    objects = {"layout.json": msgspec.json.encode(layout.Layout(LAYOUT)), **beside}
    for capture in captures:
        objects[layout.manifest_name(capture.manifest.key, capture.digest)] = packed(capture.manifest)
    files = {f"{PLACE}{name}": data for name, data in objects.items()}
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(_directories([*files, *_paths(layers)])):
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member)
        for name, data in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            tar.addfile(member, io.BytesIO(data))
    return target.getvalue()


def _paths(layers: Iterable[Layer]) -> list[str]:
    found = [
        f"{section.domain}/{file.path}" for layer in layers for section in layer.sections for file in section.files()
    ]
    strange = next((path for path in found if f"/{_WHITEOUT}" in path), None)
    if strange is not None:
        raise CorruptError(f"`{strange}` cannot be in an image: container runtimes take it for a whiteout")
    return found


def _directories(paths: Iterable[str]) -> set[str]:
    """Every directory above these files."""
    found: set[str] = set()
    for path in paths:
        directory = path.rpartition("/")[0]
        while directory and directory not in found:
            found.add(directory)
            directory = directory.rpartition("/")[0]
    return found


def stored_objects(top: bytes, place: str) -> dict[str, bytes]:
    """What lies in `.cachemgr/` of a top layer, by object name. Anything else in it is passed over.

    Raises:
        CorruptError: it is no such layer, has a name twice, or is larger than any of ours.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(_inflated(top, place)), mode="r:") as tar:
            for count, member in enumerate(tar):
                if count >= _MOST_MEMBERS:
                    raise CorruptError(f"{place} has more than {_MOST_MEMBERS} files of manifests")
                name = member.name.removeprefix(PLACE)
                # What a sparse file claims between its pieces takes no room in the layer, and would in memory.
                if not member.isreg() or member.issparse() or name == member.name:
                    continue
                if name in found:
                    raise CorruptError(f"{place} has `{name[:200]}` twice")
                content = tar.extractfile(member)
                assert content is not None, "a regular file has bytes"
                found[name] = content.read()
    except (tarfile.TarError, ValueError, EOFError, OverflowError) as error:
        raise CorruptError(f"{place} has a top layer that cannot be read: {error}") from None
    return found


def _inflated(top: bytes, place: str) -> bytes:
    """Bounded, whatever a frame claims."""
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=1 << WINDOW_LOG).stream_reader(top)
        data = reader.read(_TOP_BYTES + 1)
    except zstandard.ZstdError as error:
        raise CorruptError(
            f"{place} has a top layer that cannot be decompressed: {error}",
            hint=RECOMPRESSED,
        ) from None
    if len(data) > _TOP_BYTES:
        raise CorruptError(f"{place} has a top layer of more than {_TOP_BYTES:,} bytes")
    return data
