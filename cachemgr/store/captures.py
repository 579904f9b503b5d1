"""What the objects of a store mean: captures with their layers and hints, in one order of writes.

Layers first, then the manifest, then hints: the manifest is the commit point, and a crash anywhere leaves only bytes
that nothing refers to. Deleting runs backwards. Reading trusts nothing: a manifest must have the digest that its name
says, and the key of the artifact that it lies in.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import zstandard

from cachemgr import digest
from cachemgr.capture import MAX_MANIFEST_BYTES, Manifest, decode_manifest
from cachemgr.capture import encode_manifest as encode
from cachemgr.digest import Digest
from cachemgr.errors import CacheError, CorruptError, DeniedError, NotFoundError, UntrustedError
from cachemgr.key import Key, from_folder, guard_print
from cachemgr.parallel import side_by_side
from cachemgr.store import Remote, Store, layout

GRACE_SECONDS = 24 * 3600.0
"""How long an unreferenced layer is left alone: a publisher may be about to refer to it."""
_READERS = 16
"""Manifests of a remote store that are read at a time."""


class Standing(msgspec.Struct, frozen=True):
    """What a capture is worth to those who may use it."""

    by: str = ""
    """Who says that it is sound, for people; empty where nobody was asked, or nobody does."""
    doubt: str = ""
    """Why it should not be used, where that is said and no reason to refuse it."""


UNASKED = Standing()


class Judge(Protocol):
    """Who decides whether a capture may be used, before its manifest is read."""

    def __call__(self, store: Store, key: Key, capture: Digest, beside: Collection[str], /) -> Standing:
        """`beside` are the names of the objects beside the manifest. Raises UntrustedError for a capture that must not
        be used."""


def unasked(_store: Store, _key: Key, _capture: Digest, _beside: Collection[str], /) -> Standing:
    """The judge of a store of which nothing is asked."""
    return UNASKED


class Capture(msgspec.Struct, frozen=True):
    """A manifest and the digest that names it."""

    digest: Digest
    manifest: Manifest
    stored: int
    """Bytes of the compressed manifest in the store."""
    standing: Standing | None = None
    """None: nobody was asked, because it was read to be looked at. Such a capture is not restored."""
    beside: tuple[str, ...] = ()
    """Names of the objects beside the manifest."""


class Damaged(msgspec.Struct, frozen=True):
    """A capture that is there and cannot be used."""

    key: Key
    name: str
    reason: str
    kind: Literal["damaged", "unreadable", "untrusted", "absent"] = "damaged"
    """Of an unreadable one the bytes may be right, and this user cannot read them; of an untrusted one they are not
    looked into, because nobody who is trusted says that they are right; of an absent one a layer is not there, or not
    yet."""

    @classmethod
    def of(cls, key: Key, name: str, error: CacheError) -> "Damaged":
        """What is wrong with the manifest `name` after it failed with `error`."""
        if isinstance(error, UntrustedError):
            return cls(key, name, str(error), "untrusted")
        return cls(key, name, str(error), "damaged" if isinstance(error, CorruptError) else "unreadable")


def listing(store: Store, prefix: str = layout.ARTIFACTS) -> dict[str, tuple[Key, list[str]]]:
    """Every manifest below `prefix`, with the key that it lies under and the objects beside it; nothing is read."""
    found: dict[str, tuple[Key, list[str]]] = {}
    others: list[str] = []
    for entry in store.scan(prefix):
        key = from_folder(entry.name.split("/")[1])
        if key is not None and entry.name.endswith(layout.MANIFEST_SUFFIX):
            found[entry.name] = (key, [])
        else:
            others.append(entry.name)
    for name in others:
        manifest = found.get(layout.manifest_of(name))
        if manifest is not None:
            manifest[1].append(name)
    return found


def keys(store: Store) -> list[Key]:
    """The keys of all artifacts, sorted."""
    return sorted({key for key, _beside in listing(store).values()})


def captures(
    store: Store,
    key: Key,
    damaged: list[Damaged],
    *,
    without: frozenset[Digest] = frozenset(),
    judge: Judge | None = None,
    left_out: set[Digest] | None = None,
) -> tuple[Capture, ...]:
    """The captures of a key that can be read and used, oldest first, leaving out `without`. The others go to
    `damaged`, and those of `without` that are there to `left_out`. Without a `judge` they are for looking at only."""
    listed = listing(store, layout.artifact_prefix(key))
    apart = {layout.capture_of(name) for name in listed} & without
    if left_out is not None:
        left_out.update(capture for capture in apart if capture is not None)
    kept = {name: there for name, there in listed.items() if layout.capture_of(name) not in apart}
    return tuple(sorted(_read_all(store, kept, damaged, judge), key=_oldest))


def load(store: Store, key: Key, name: str, judge: Judge | None = None, beside: Collection[str] = ()) -> Capture:
    """Read and check the manifest with the object name `name`, which lies under `key`; `beside` are the names of the
    objects beside it. Of one that is not trusted, nothing is read.

    Raises:
        NotFoundError: it vanished.
        CorruptError: it is torn, swapped, hostile, or belongs to another key.
        UntrustedError: `judge` refuses it.
    """
    capture = layout.capture_of(name)
    short = layout.short(name)
    if capture is None:
        raise CorruptError(f"capture {short} has a name that is no digest")
    standing = None if judge is None else judge(store, key, capture, beside)
    data, stored = manifest_bytes(store, name)
    manifest = decode_manifest(data, name=short)
    if manifest.key != key:
        raise CorruptError(f"capture {short} belongs to {manifest.key} and lies under {key}")
    return Capture(capture, manifest, stored, standing, tuple(beside))


def manifest_bytes(store: Store, name: str) -> tuple[bytes, int]:
    """The uncompressed bytes of the manifest with the object name `name`, which are those of its digest, and how many
    bytes it has in the store. What they say is not looked at.

    Raises:
        NotFoundError: it vanished.
        CorruptError: it is torn or swapped.
    """
    short = layout.short(name)
    packed = store.read(name, limit=MAX_MANIFEST_BYTES)
    data = _inflate(packed, short)
    if digest.of_bytes(data) != layout.capture_of(name):
        raise CorruptError(f"capture {short} has other bytes than its name says")
    return data, len(packed)


def is_torn(store: Store, name: str) -> bool:
    """Whether a manifest is there with other bytes than its name says: then nobody can use it, whatever they know."""
    try:
        manifest_bytes(store, name)
    except CorruptError:
        return True
    except (NotFoundError, DeniedError):
        return False
    return False


def all_captures(store: Store, damaged: list[Damaged]) -> dict[Key, tuple[Capture, ...]]:
    """The captures of every artifact that can be read, oldest first. One listing, and a read for each."""
    return listed_captures(store, listing(store), damaged)


def listed_captures(
    store: Store, listed: Mapping[str, tuple[Key, Collection[str]]], damaged: list[Damaged]
) -> dict[Key, tuple[Capture, ...]]:
    """The captures with these manifests that can be read, by key and oldest first."""
    found: dict[Key, list[Capture]] = defaultdict(list)
    for capture in _read_all(store, listed, damaged):
        found[capture.manifest.key].append(capture)
    return {key: tuple(sorted(own, key=_oldest)) for key, own in found.items()}


def _read_all(
    store: Store,
    listed: Mapping[str, tuple[Key, Collection[str]]],
    damaged: list[Damaged],
    judge: Judge | None = None,
) -> list[Capture]:
    """The captures with these manifests that can be used; several are read at once where that saves waiting."""

    def read(name: str) -> Capture | None:
        key, beside = listed[name]
        try:
            return load(store, key, name, judge, beside)
        except NotFoundError:
            return None
        except (CorruptError, DeniedError, UntrustedError) as error:
            damaged.append(Damaged.of(key, name, error))
            return None

    found = side_by_side(read, list(listed), threads=_READERS if isinstance(store, Remote) else 1)
    return [capture for capture in found if capture is not None]


def _oldest(capture: Capture) -> tuple[str, Digest]:
    return capture.manifest.created, capture.digest


def units_in(found: Iterable[Capture]) -> frozenset[tuple[str, str]]:
    """Domain and name of every unit that these captures have."""
    return frozenset(
        (section.domain, unit.name)
        for capture in found
        for _layer, section in capture.manifest.sections()
        for unit in section.units
    )


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


Marks = Callable[[Key, Digest], Mapping[str, bytes]]
"""What to put beside the manifest of a capture, by object name."""


def no_marks(_key: Key, _capture: Digest) -> Mapping[str, bytes]:
    """Nothing."""
    return {}


def commit(
    store: Store, manifest: Manifest, layers: Mapping[Digest, Path], *, now: float, marks: Marks = no_marks
) -> Digest:
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
    return enter(store, manifest, marks)


def enter(store: Store, manifest: Manifest, marks: Marks) -> Digest:
    """Make a capture visible whose layers are there. What belongs beside the manifest is there before it: a crash in
    between must not leave a capture that has forgotten where it was taken from.

    Raises:
        StoreError: something could not be written. Then the capture is not visible.
    """
    data = encode(manifest)
    capture = digest.of_bytes(data)
    for name, mark in marks(manifest.key, capture).items():
        store.put(name, mark)
    store.put(layout.manifest_name(manifest.key, capture), packed(manifest))
    for hint in entry_hints(manifest):
        store.put(hint, b"")
    near = near_hint(manifest, capture) if isinstance(store, Remote) else None
    if near is not None:
        store.put(near, b"")
    return capture


def entry_hints(manifest: Manifest) -> tuple[str, ...]:
    """The hints that the engine's entries in a capture are in its artifact."""
    return entry_hints_of(manifest.key, manifest.entries)


def entry_hints_of(key: Key, entries: Iterable[str]) -> tuple[str, ...]:
    """The hints that these entries of an engine are in the artifact of `key`."""
    return tuple(layout.entry_name(entry, key) for entry in entries)


def near_hint(manifest: Manifest, capture: Digest) -> str | None:
    """The hint by which a mirror is asked for captures with equal guards; None where a guard is unknown."""
    guards = guard_print(manifest.factors)
    return layout.near_name(manifest.key, capture, guards, manifest.model) if guards else None


def near(store: Store, guards: str, model: str | None = None) -> list[tuple[Key, str]]:
    """The manifests of captures with this print of their guards (`cachemgr.key.guard_print`), by key, the newest first;
    of a `model`, or of all. Hints say so: whether they are right, or there at all, only the manifests tell."""
    entries = sorted(store.scan(layout.near_prefix(guards, model)), key=lambda entry: entry.modified, reverse=True)
    named = (layout.hinted_manifest(entry.name) for entry in entries)
    return [found for found in named if found is not None]


def put_manifest(store: Store, capture: Capture) -> bool:
    """Commit a capture whose layers are in the store. Whether it was not there."""
    return store.put(layout.manifest_name(capture.manifest.key, capture.digest), packed(capture.manifest))


def packed(manifest: Manifest) -> bytes:
    """A manifest as it lies in a store."""
    data = encode(manifest)
    return zstandard.ZstdCompressor(level=10, write_content_size=True).compress(data)


def _keep(store: Store, name: Digest, now: float) -> None:
    target = layout.layer_name(name)
    ages = (now - entry.modified for entry in store.scan(target.rsplit("/", 1)[0] + "/") if entry.name == target)
    if next(ages, 0.0) > GRACE_SECONDS / 2:
        store.refresh(target)


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
    """Remove a layer whose bytes are not those of its name, or what is there in its place and no object, as a link, so
    that the next publish can write it. Whether it was.

    Raises:
        StoreError: it cannot be removed, as a directory.
    """
    name = layout.layer_name(layer)
    if not store.has(name):
        return store.delete(name)
    running = digest.hasher()
    try:
        with store.open(name) as stream:
            while piece := stream.read(1 << 20):
                running.update(piece)
    except NotFoundError:
        return False
    return digest.finish(running) != layer and store.delete(name)
