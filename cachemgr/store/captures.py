"""What the objects of a store mean: captures with their layers, hints and launch records, in one order of writes.

Layers first, then the manifest, then hints: the manifest is the commit point, and a crash anywhere leaves only bytes
that nothing refers to. Deleting runs backwards. Reading trusts nothing: a manifest must have the digest that its name
says, and the key of the artifact that it lies in.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import zstandard

from cachemgr import digest
from cachemgr.capture import MAX_MANIFEST_BYTES, Launch, Manifest, decode_launch, decode_manifest, encode_launch
from cachemgr.capture import encode_manifest as encode
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, DeniedError, NotFoundError, StoreError
from cachemgr.key import Key, from_folder
from cachemgr.store import Store, layout

GRACE_SECONDS = 24 * 3600.0
"""How long an unreferenced layer is left alone: a publisher may be about to refer to it."""

_LAUNCH_LIMIT = 4 << 20


class Capture(msgspec.Struct, frozen=True):
    """A manifest and the digest that names it."""

    digest: Digest
    manifest: Manifest
    stored: int
    """Bytes of the compressed manifest in the store."""


class Damaged(msgspec.Struct, frozen=True):
    """A capture that is there and cannot be used."""

    key: Key
    name: str
    reason: str
    corrupt: bool = True
    """False where its bytes may be right, and this user cannot read them."""


def manifests(store: Store) -> Iterator[tuple[Key, str]]:
    """Every manifest by the key that it lies under and its object name, in no order; nothing is read."""
    for entry in store.scan(layout.ARTIFACTS):
        key = from_folder(entry.name.split("/")[1])
        if key is not None and entry.name.endswith(layout.MANIFEST_SUFFIX):
            yield key, entry.name


def keys(store: Store) -> list[Key]:
    """The keys of all artifacts, sorted."""
    return sorted({key for key, _name in manifests(store)})


def captures(
    store: Store, key: Key, damaged: list[Damaged], *, without: frozenset[Digest] = frozenset()
) -> tuple[Capture, ...]:
    """The readable captures of a key, oldest first, leaving out `without`. What cannot be used goes to `damaged`."""
    found = []
    for entry in store.scan(layout.artifact_prefix(key)):
        if not entry.name.endswith(layout.MANIFEST_SUFFIX) or layout.capture_of(entry.name) in without:
            continue
        try:
            found.append(load(store, key, entry.name))
        except NotFoundError:
            continue
        except (CorruptError, DeniedError) as error:
            damaged.append(Damaged(key, entry.name, str(error), isinstance(error, CorruptError)))
    return tuple(sorted(found, key=lambda capture: (capture.manifest.created, capture.digest)))


def load(store: Store, key: Key, name: str) -> Capture:
    """Read and check the manifest with the object name `name`, which lies under `key`.

    Raises:
        NotFoundError: it vanished.
        CorruptError: it is torn, swapped, hostile, or belongs to another key.
    """
    capture = layout.capture_of(name)
    short = name.rsplit("/", 1)[-1][:12]
    packed = store.read(name, limit=MAX_MANIFEST_BYTES)
    data = _inflate(packed, short)
    if capture is None or digest.of_bytes(data) != capture:
        raise CorruptError(f"capture {short} has other bytes than its name says")
    manifest = decode_manifest(data, name=short)
    if manifest.key != key:
        raise CorruptError(f"capture {short} belongs to {manifest.key} and lies under {key}")
    return Capture(capture, manifest, len(packed))


def has_layers(store: Store, capture: Capture) -> bool:
    """Whether every layer of a capture is there."""
    return all(store.has(layout.layer_name(layer.digest)) for layer in capture.manifest.layers)


def _inflate(data: bytes, name: str) -> bytes:
    """Bounded: no frame makes us allocate more than a manifest may have."""
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if size > MAX_MANIFEST_BYTES:
            raise CorruptError(f"capture {name} claims to be larger than a manifest may be")
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError(f"capture {name} cannot be decompressed: {error}") from None


def commit(store: Store, manifest: Manifest, layers: Mapping[Digest, Path], *, now: float) -> Digest:
    """Publish a capture whose packed layers lie in the store's scratch directory.

    A layer that is there already is not written again; one that is older than half the grace time is refreshed, so that
    a prune which listed before this does not take it away.

    Raises:
        StoreError: something could not be written. Then the capture is not visible.
    """
    layout.ensure_layout(store)
    for name, path in layers.items():
        if not store.put_file(layout.layer_name(name), path):
            _keep(store, name, now)
    data = encode(manifest)
    capture = digest.of_bytes(data)
    packed = zstandard.ZstdCompressor(level=10, write_content_size=True).compress(data)
    store.put(layout.manifest_name(manifest.key, capture), packed)
    for entry in manifest.entries:
        store.put(layout.entry_name(entry, manifest.key), b"")
    return capture


def _keep(store: Store, name: Digest, now: float) -> None:
    target = layout.layer_name(name)
    ages = (now - entry.modified for entry in store.scan(target.rsplit("/", 1)[0] + "/") if entry.name == target)
    if next(ages, 0.0) > GRACE_SECONDS / 2:
        store.refresh(target)


class Removal(msgspec.Struct, frozen=True):
    """What removing artifacts takes away, as a plan: names in the order in which they go."""

    keys: tuple[Key, ...]
    hints: tuple[str, ...]
    manifests: tuple[str, ...]
    layers: tuple[str, ...]
    freed: int
    """Bytes that go with the plan."""
    later: int
    """Bytes of layers that nothing refers to any more, and that are too young to be removed safely."""
    before: float
    """Layers that were modified after this time stay, whoever refreshed them since; in seconds since the epoch."""


def plan_removal(store: Store, wanted: Iterable[Key], *, now: float, grace: float = GRACE_SECONDS) -> Removal:
    """What has to go so that the artifacts `wanted` are gone, and nothing else is hurt."""
    goners = tuple(sorted(set(wanted)))
    hints: list[str] = []
    manifests: list[str] = []
    freed = 0
    for key in goners:
        for capture in captures(store, key, []):
            hints.extend(layout.entry_name(entry, key) for entry in capture.manifest.entries)
        for entry in store.scan(layout.artifact_prefix(key)):
            manifests.append(entry.name)
            freed += entry.size
    kept = {layout.layer_name(layer) for layer in referenced(store, without=set(goners))}
    loose = [entry for entry in store.scan(layout.LAYERS) if entry.name not in kept]
    old = [entry for entry in loose if now - entry.modified >= grace]
    freed += sum(entry.size for entry in old)
    later = sum(entry.size for entry in loose) - sum(entry.size for entry in old)
    names = tuple(sorted(entry.name for entry in old))
    return Removal(goners, tuple(sorted(set(hints))), tuple(sorted(manifests)), names, freed, later, now - grace)


def referenced(store: Store, *, without: set[Key]) -> set[Digest]:
    """The layers that readable captures refer to, leaving out the artifacts `without`.

    Raises:
        CorruptError: a capture is damaged, so that nobody knows what it refers to; nothing may be removed.
        StoreError: the same, because it cannot be read.
    """
    found: set[Digest] = set()
    for key in keys(store):
        if key in without:
            continue
        damaged: list[Damaged] = []
        for capture in captures(store, key, damaged):
            found.update(layer.digest for layer in capture.manifest.layers)
        if damaged and not damaged[0].corrupt:
            raise StoreError(f"{damaged[0].reason}; layers that it needs are unknown")
        if damaged:
            raise CorruptError(f"{damaged[0].reason}; layers that it needs are unknown", hint=f"cachemgr rm {key}")
    return found


def remove(store: Store, plan: Removal) -> None:
    """Carry out a plan: hints, manifests, layers. A crash in between leaves no manifest without its layers.

    Layers that somebody has come to need since the plan was made stay: a person may have looked at it for long.

    Raises:
        CorruptError: a capture cannot be read, so that nobody knows which layers it needs; they stay.
    """
    for name in (*plan.hints, *plan.manifests):
        store.delete(name)
    if not plan.layers:
        return
    needed = {layout.layer_name(layer) for layer in referenced(store, without=set())}
    # Publishers refresh a layer before they refer to it, so its age is looked at last.
    old = {entry.name for entry in store.scan(layout.LAYERS) if entry.modified <= plan.before}
    for name in sorted(old.intersection(plan.layers) - needed):
        store.delete(name)


def quarantine(store: Store, capture: Digest, *, host: str, reason: str, since: str) -> None:
    """Keep this host from using a capture again. The capture itself stays, as evidence and for other hosts."""
    report = msgspec.json.encode({"reason": reason, "since": since}, order="sorted")
    store.put(layout.quarantine_name(capture, host), report)


def set_apart(store: Store, reasons: Mapping[Digest, str], layers: Iterable[Digest], *, host: str, since: str) -> None:
    """Quarantine these captures, each with its reason, and discard those of `layers` that are damaged."""
    for capture, reason in reasons.items():
        quarantine(store, capture, host=host, reason=reason, since=since)
    for layer in layers:
        discard_damaged(store, layer)


def quarantined(store: Store, host: str) -> frozenset[Digest]:
    """The captures that `host` does not use."""
    found = set()
    for entry in store.scan(layout.QUARANTINE):
        capture = digest.from_hex(entry.name.split("/")[1])
        if capture is not None and entry.name == layout.quarantine_name(capture, host):
            found.add(capture)
    return frozenset(found)


def discard_damaged(store: Store, layer: Digest) -> bool:
    """Remove a layer whose bytes are not those of its name, so that the next publish can write it. Whether it was."""
    name = layout.layer_name(layer)
    running = digest.hasher()
    try:
        with store.open(name) as stream:
            while piece := stream.read(1 << 20):
                running.update(piece)
    except NotFoundError:
        return False
    return digest.finish(running) != layer and store.delete(name)


def record(store: Store, launch: Launch) -> None:
    """Keep a launch record.

    Raises:
        CorruptError: the store is not one of ours, or of a newer layout; it is left alone.
    """
    layout.ensure_layout(store)
    store.put(layout.launch_name(launch.started[:10], launch.launch), encode_launch(launch))


def launches(store: Store) -> Iterator[Launch]:
    """All readable launch records, in no order."""
    for entry in store.scan(layout.LAUNCHES):
        # A record is a statistic: a torn or vanished one must not hide the others.
        with suppress(CorruptError, NotFoundError):
            yield decode_launch(store.read(entry.name, limit=_LAUNCH_LIMIT))
