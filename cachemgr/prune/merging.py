"""Merging: many captures of one artifact that this machine made become one, which says all that they say.

A launch publishes what it added, so an artifact grows by captures, each with a manifest to read and to believe, and
with a layer that was compressed without a look at the others. Merged they are one of each. Their units are packed
again, because a capture has a domain in one layer only; the old captures are superseded then, and go by the usual rule.

We answer for the new capture with our mark, so only captures go into it that have our mark and nothing else beside
them: what others have signed, taken elsewhere or reported is left as it is. Layers that other artifacts need as well
are left, too, since merging would only add to them, and so are young ones: their artifact still grows. A mirror's
captures are never merged: whoever has pulled them would pull all of it once more.
"""

import os
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import BinaryIO

import msgspec

from cachemgr import layer as layers
from cachemgr.capture import MAX_MANIFEST_BYTES, File, Layer, Manifest, Section, Unit, decode_manifest, encode_manifest
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, DeniedError, NotFoundError, StoreError
from cachemgr.key import Key
from cachemgr.prune.superseded import usable
from cachemgr.store import Store, layout, scratch
from cachemgr.store.captures import GRACE_SECONDS, Capture, Judge, Marks, commit
from cachemgr.store.removal import Holdings

FEWEST = 5
"""Captures that are worth packing: with so many a restore takes a tenth longer than from one (docs/pruning.md)."""


class Merge(msgspec.Struct, frozen=True):
    """Captures of an artifact that become one."""

    key: Key
    captures: tuple[Digest, ...]
    """The oldest first."""
    bytes: int
    """Of their layers."""


def merges(
    store: Store, held: Holdings, judge: Judge, marks: Marks, *, without: Collection[Key], now: float
) -> list[Merge]:
    """What is worth merging, leaving out artifacts of which nothing may be touched.

    Args:
        marks: of this machine. One that marks nothing has nothing to merge.
        now: seconds since the epoch.
    """
    many = [key for key in held.beside if key not in without and len(held.of(key)) >= FEWEST]
    if not many:
        return []
    needed = Counter(layer for each in held.outlines.values() for layer, _size in each.layers)
    old = {layout.layer_of(entry.name) for entry in held.layers if now - entry.modified >= GRACE_SECONDS}
    alone = {layer for layer, count in needed.items() if count == 1 and layer in old}
    return [
        Merge(key, tuple(each.digest for each in group), sum(layer.size for layer in _layers(group)))
        for key, staying in usable(store, sorted(many), judge)
        for group in _groups(store, staying, marks)
        if len(group) >= FEWEST and alone.issuperset(layer.digest for layer in _layers(group))
    ]


def _groups(store: Store, staying: Iterable[Capture], marks: Marks) -> Iterator[list[Capture]]:
    """Captures of this machine that say the same of where they run."""
    found: dict[bytes, list[Capture]] = {}
    for capture in staying:
        manifest = capture.manifest
        if manifest.complete and _is_ours(store, capture, marks):
            hosts = msgspec.json.encode((manifest.needs, manifest.ranks, manifest.world), order="sorted")
            found.setdefault(hosts, []).append(capture)
    yield from found.values()


def _is_ours(store: Store, capture: Capture, marks: Marks) -> bool:
    if not capture.beside:
        return False
    own = marks(capture.manifest.key, capture.digest)
    if set(own) != set(capture.beside):
        return False
    try:
        return all(store.read(name, limit=len(mark)) == mark for name, mark in own.items())
    except (CorruptError, DeniedError, NotFoundError):
        return False


def _layers(group: Iterable[Capture]) -> Iterator[Layer]:
    for capture in group:
        yield from capture.manifest.layers


def merge(store: Store, planned: Merge, judge: Judge, marks: Marks, *, now: float) -> Manifest | None:
    """Add the capture that has all that the planned ones have. None where they are not what they were: nothing is done.

    Raises:
        StoreError: it could not be written; nothing is visible then.
        CorruptError, NotFoundError: a layer is damaged, or gone; or they cannot lie in one capture.
    """
    groups = (
        group for _key, staying in usable(store, [planned.key], judge) for group in _groups(store, staying, marks)
    )
    group = next((each for each in groups if tuple(capture.digest for capture in each) == planned.captures), None)
    if group is None:
        return None
    wanted, sections = _chosen(group)
    spool, packed = (store.scratch() / uuid.uuid4().hex for _file in range(2))
    try:
        with scratch.create(spool) as stored:
            spooled = _Spooled(stored)
            for layer, units in wanted:
                with store.open(layout.layer_name(layer.digest)) as compressed:
                    layers.unpack(layer, compressed, spooled.taking(units))
            with scratch.create(packed) as target:
                made = layers.pack(sections, spooled, target)
        manifest = _united(group, made)
        _require_readable(manifest)
        commit(store, manifest, {made.digest: packed}, now=now, marks=marks)
    except OSError as error:
        said = f"cannot merge captures of {planned.key} in {store}: {error.strerror or error}"
        raise StoreError(said, hint="free space there") from None
    finally:
        for path in (spool, packed):
            path.unlink(missing_ok=True)
    return manifest


Units = frozenset[tuple[str, str]]
"""By domain and name."""


def _chosen(group: Sequence[Capture]) -> tuple[list[tuple[Layer, Units]], tuple[Section, ...]]:
    """The units to take from each layer, and all of them: as a reader takes them (`cachemgr.warm.choose`), the oldest
    that has all files of the others."""
    chosen: dict[tuple[str, str], tuple[int, Unit]] = {}
    found = list(_layers(group))
    for number, layer in enumerate(found):
        for section in layer.sections:
            for unit in section.units:
                _number, taken = chosen.get((section.domain, unit.name), (None, None))
                if unit.outdoes(taken):
                    chosen[section.domain, unit.name] = (number, unit)
    by_layer = [
        (layer, frozenset(name for name, (taken, _unit) in chosen.items() if taken == number))
        for number, layer in enumerate(found)
    ]
    by_domain: dict[str, list[Unit]] = {}
    for (domain, _name), (_number, unit) in sorted(chosen.items(), key=lambda each: each[0]):
        by_domain.setdefault(domain, []).append(unit)
    return [each for each in by_layer if each[1]], tuple(
        Section(domain, tuple(units)) for domain, units in by_domain.items()
    )


def _united(group: Sequence[Capture], made: Layer) -> Manifest:
    """It speaks as the oldest does, whose start was the cold one, and was timed."""
    first, *others = (capture.manifest for capture in group)
    timed = next((each.timings for each in (first, *others) if each.timings), {})
    entries = {entry for each in (first, *others) for entry in each.entries}
    return msgspec.structs.replace(first, layers=(made,), timings=timed, entries=tuple(sorted(entries)))


def _require_readable(manifest: Manifest) -> None:
    """Raises CorruptError where no reader would take it: captures may each have names that do not go together."""
    data = encode_manifest(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptError(f"captures of {manifest.key} make a manifest of {len(data)} bytes")
    decode_manifest(data, name=f"of {manifest.key}")


class _Spooled:
    """Stored bytes of units in one file: a `cachemgr.layer.Placer` that leaves them there, a `Source` that has them."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._size = stream, 0
        self._places: dict[tuple[str, str], int] = {}
        self._domain = ""

    def taking(self, wanted: Units) -> "_Taking":
        """Which units of a layer are placed."""
        return _Taking(self, wanted)

    def of(self, domain: str) -> "_Spooled":
        """This file, for units of a domain from now on."""
        self._domain = domain
        return self

    def whole(self, file: File, data: memoryview) -> None:
        self.parts(file, iter((data,)))

    def parts(self, file: File, parts: Iterator[memoryview]) -> None:
        self._places[self._domain, file.path] = self._size
        for part in parts:
            self._stream.write(part)
            self._size += len(part)

    def link(self, file: File, original: str) -> None:
        self._places[self._domain, file.path] = self._places[self._domain, original]

    def __call__(self, domain: str, file: File) -> Iterator[bytes]:
        """The bytes of a file, in pieces."""
        self._stream.flush()
        at, left = self._places[domain, file.path], file.size
        while left:
            piece = os.pread(self._stream.fileno(), min(left, layers.CHUNK), at)
            at, left = at + len(piece), left - len(piece)
            yield piece


class _Taking:
    def __init__(self, spooled: _Spooled, wanted: Units) -> None:
        self._spooled, self._wanted = spooled, wanted

    def __call__(self, domain: str, unit: Unit) -> layers.Placer | None:
        return self._spooled.of(domain) if (domain, unit.name) in self._wanted else None
