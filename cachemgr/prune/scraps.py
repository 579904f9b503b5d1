"""Scraps of a store: what writers, launches and removals that were killed left there, and what has ended.

    hints without their manifest, what lies beside no manifest, claims and leases that nobody refreshes, pins that have
    ended, unfinished writes

None of it is ever read for anything but to find out that it is a scrap, so what goes is decided by age, which must be
past the grace time, except where its own words say that it has ended.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from cachemgr import process
from cachemgr.errors import CorruptError, DeniedError, NotFoundError
from cachemgr.key import Key
from cachemgr.store import Entry, Store, captures, layout
from cachemgr.store.claims import owner_of
from cachemgr.store.leases import Held
from cachemgr.store.local import scratch_of
from cachemgr.store.pins import Placed
from cachemgr.store.removal import Holdings, delete_all
from cachemgr.store.scratch import abandoned

_MOST = 64 << 10
"""Bytes of a signature, a mark or an origin."""


class Scrap(msgspec.Struct, frozen=True):
    """One object that goes, and why. `path` is that of an unfinished write, which is no object."""

    name: str
    why: str
    bytes: int
    path: str | None = None


def scraps(
    store: Store,
    held: Holdings,
    leases: Iterable[Held],
    pinned: Mapping[Key, Placed],
    ended: Collection[Key],
    *,
    root: Path | None,
    now: float,
) -> list[Scrap]:
    """The scraps of a store. `pinned` are its pins, of which those of `ended` keep nothing any more; `root` is the
    directory of a store that has one."""
    return [
        *_hints(store, held, now),
        *_alone(held, now),
        *_claims(store, now),
        *(Scrap(each.name, f"{each} is gone", each.size) for each in leases if not each.lives),
        *(scrap for key in sorted(ended) for scrap in lapsed(pinned[key])),
        *(scrap for key in sorted(pinned.keys() - ended) for scrap in displaced(pinned[key])),
        *_unfinished(root, now),
    ]


def lapsed(placed: Placed) -> list[Scrap]:
    """A pin that has ended, with those before it, which must not count again. Equal only to that of the same words:
    another pin may have taken its place."""
    return [Scrap(name, f"has ended: {placed.pin}", 0) for name in placed.names]


def displaced(placed: Placed) -> list[Scrap]:
    """The pins before one that counts."""
    return [Scrap(name, "a newer pin has taken its place", 0) for name in placed.before]


def sweep(store: Store, found: Sequence[Scrap]) -> None:
    """Remove scraps. A hint whose manifest has come meanwhile is put back, and so is what lies beside one."""
    beside = [scrap.name for scrap in found if scrap.name.startswith(layout.ARTIFACTS)]
    for name in beside:
        _take_alone(store, name)
    pinned = sorted(scrap.name for scrap in found if scrap.name.startswith(layout.PINS))
    for name in pinned:  # the oldest first, so that none counts again
        store.delete(name)
    others = [scrap.name for scrap in found if scrap.path is None]
    delete_all(store, sorted(set(others).difference(beside, pinned)))
    for scrap in found:
        if scrap.path is not None:
            with suppress(OSError):
                os.unlink(scrap.path)
        elif scrap.name.startswith(layout.ENTRIES) and (key := layout.entry_key(scrap.name)) is not None:
            if any(store.scan(layout.artifact_prefix(key))):
                store.put(scrap.name, b"")
        elif (hinted := layout.hinted_manifest(scrap.name)) is not None and store.has(hinted[1]):
            store.put(scrap.name, b"")


def _take_alone(store: Store, name: str) -> None:
    """Remove what lies beside no manifest. A publisher that finds it there does not write it again."""
    try:
        data = store.read(name, limit=_MOST)
    except (NotFoundError, CorruptError, DeniedError):
        data = None  # gone, or no writing of ours
    manifest = layout.manifest_of(name)
    if not store.has(manifest) and store.delete(name) and data is not None and store.has(manifest):
        store.put(name, data)


def _is_old(entry: Entry, now: float) -> bool:
    return now - entry.modified >= captures.GRACE_SECONDS


def _hints(store: Store, held: Holdings, now: float) -> Iterator[Scrap]:
    for entry in store.scan(layout.ENTRIES):
        key = layout.entry_key(entry.name)
        if key is not None and key not in held.beside and _is_old(entry, now):
            yield Scrap(entry.name, "its artifact is gone", entry.size)
    there = {entry.name for own in held.beside.values() for entry in own}
    for entry in held.near:
        hinted = layout.hinted_manifest(entry.name)
        if hinted is not None and hinted[1] not in there and _is_old(entry, now):
            yield Scrap(entry.name, "its capture is gone", entry.size)


def _alone(held: Holdings, now: float) -> Iterator[Scrap]:
    """Signatures, marks and origins are written before their manifest and removed after it."""
    for own in held.beside.values():
        manifests = {layout.capture_of(entry.name) for entry in own}
        for entry in own:
            about = None if entry.name.endswith(layout.MANIFEST_SUFFIX) else layout.beside(entry.name)
            if about is not None and about not in manifests and _is_old(entry, now):
                yield Scrap(entry.name, "its capture is gone", entry.size)


def _claims(store: Store, now: float) -> Iterator[Scrap]:
    for entry in store.scan(layout.CLAIMS):
        if layout.claim_number(entry.name) is not None and _is_old(entry, now):
            owner = owner_of(store, entry.name)
            if owner is None or not process.runs(owner.process):
                yield Scrap(entry.name, "nobody has refreshed this claim for a day", entry.size)


def _unfinished(root: Path | None, now: float) -> Iterator[Scrap]:
    """Those of other users stay."""
    if root is None:
        return
    for path, size in abandoned(scratch_of(root), now=now):
        yield Scrap(os.path.relpath(path, root), "this write was never finished", size, path)
