"""The export journey: artifacts of a store become images in a directory, a tar file or a registry.

Which blobs are missing there is a plan, and carrying it out writes them: layers, then what commits them, and then what
makes the image visible. Every layer is hashed on its way.
"""

import io
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import msgspec

from cachemgr.digest import Digest
from cachemgr.errors import CacheError, CorruptError, DeniedError, NotFoundError
from cachemgr.key import Key
from cachemgr.oci.documents import Descriptor
from cachemgr.oci.image import Image, compose
from cachemgr.oci.place import Opened, Target
from cachemgr.store import Source, Store, layout
from cachemgr.store.captures import Damaged, Judge, captures
from cachemgr.store.checked import Checked
from cachemgr.store.transfer import BESIDE_LIMIT


class Exported(msgspec.Struct, frozen=True):
    """One artifact as an image. Sizes in bytes."""

    key: Key
    digest: Digest
    """What names the image."""
    captures: tuple[Digest, ...]
    bytes: int
    missing: tuple[Descriptor, ...]
    """What is not at the target; a blob that images share is listed with the first of them."""


class Plan(msgspec.Struct, frozen=True):
    """What an export writes."""

    source: str
    target: str
    images: tuple[Exported, ...]
    objects: int
    bytes: int
    skipped_objects: int
    """Blobs that are there."""
    skipped_bytes: int
    damaged: tuple[Damaged, ...]
    """Captures that cannot be used here, and stay."""


class Export:
    """Writes artifacts of `source` to `target`.

    Args:
        judge: who decides which captures may leave: those that may be used here.
        moved: told how many bytes have been written.
    """

    def __init__(
        self, source: Store, target: Target, *, judge: Judge, moved: Callable[[int], None] = lambda _count: None
    ) -> None:
        self._source, self._target, self._judge, self._moved = source, target, judge, moved
        self._images: dict[Digest, Image] = {}

    def plan(self, keys: Collection[Key]) -> Plan:
        """What has to be written so that the target has these artifacts.

        One that cannot be exported keeps no other one here; it is among the `damaged`.

        Raises:
            NotFoundError: none of them has a capture that can be used, with its layers.
            CorruptError, UsageError: as `cachemgr.oci.image.compose`.
            StoreError: the store cannot be read, or the target not be asked.
        """
        damaged: list[Damaged] = []
        images: list[Image] = []
        failures: list[CacheError] = []
        for key in sorted(set(keys)):
            own: list[Damaged] = []
            try:
                images.append(self._composed(key, own))
                damaged += own
            except NotFoundError as error:
                failures.append(error)
                damaged.append(Damaged(key, layout.artifact_prefix(key), str(error), "absent"))
            except (CorruptError, DeniedError) as error:
                failures.append(error)
                damaged.append(Damaged.of(key, layout.artifact_prefix(key), error))
        if failures and not images:
            raise failures[0]
        self._images = {image.digest: image for image in images}
        known: set[Digest] = set()
        skipped: dict[Digest, int] = {}
        planned = []
        for image in images:
            new = [blob for blob in image.blobs if blob.digest not in known]
            known.update(blob.digest for blob in new)
            there = {blob.digest for blob in new if self._target.has(blob)}
            skipped.update((blob.digest, blob.size) for blob in new if blob.digest in there)
            missing = tuple(blob for blob in new if blob.digest not in there)
            planned.append(Exported(image.key, image.digest, image.captures, image.size, missing))
        blobs = [blob for each in planned for blob in each.missing]
        return Plan(
            str(self._source),
            str(self._target),
            tuple(planned),
            objects=len(blobs) + len(images),
            bytes=sum(blob.size for blob in blobs) + sum(len(image.manifest) for image in images),
            skipped_objects=len(skipped),
            skipped_bytes=sum(skipped.values()),
            damaged=tuple(damaged),
        )

    def carry(self, plan: Plan) -> None:
        """Do what a plan of this export says.

        Raises:
            CorruptError: a layer has other bytes than its name says.
            NotFoundError, StoreError: a layer cannot be read, or something not be written. What is there by then is
                used by the next export.
        """
        for planned in plan.images:
            image = self._images[planned.digest]
            for blob in planned.missing:
                self._target.put(blob, self._bytes_of(image, blob))
            self._target.publish(image)
            self._moved(len(image.manifest))

    def _composed(self, key: Key, damaged: list[Damaged]) -> Image:
        held = captures(self._source, key, damaged, judge=self._judge)
        if not held:
            reason = f": {damaged[-1].reason}" if damaged else ""
            raise NotFoundError(f"{key} has no capture that can be exported{reason}", hint=f"cachemgr show {key}")
        beside = [name for capture in held for name in capture.beside if layout.goes_along(name)]
        image = compose(key, held, {name: self._source.read(name, limit=BESIDE_LIMIT) for name in beside})
        for layer in image.layers:
            if not self._source.has(layout.layer_name(layer.digest)):
                raise NotFoundError(
                    f"{key} cannot be exported: layer {layer.digest} is not there",
                    hint="cachemgr pull, or cachemgr verify --repair",
                )
        return image

    def _bytes_of(self, image: Image, blob: Descriptor) -> Opened:
        made = image.made(blob.digest)

        @contextmanager
        def opened() -> Iterator[Source]:
            with io.BytesIO(made) if made is not None else self._source.open(layout.layer_name(blob.digest)) as stream:
                yield Checked(stream, blob.digest, blob.size, self._moved)

        return opened
