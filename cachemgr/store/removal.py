"""Removing: what has to go so that artifacts and captures are gone and nothing else is hurt, first as a plan.

Deleting runs backwards: hints, manifests with what lies beside them, layers. A layer goes only when no manifest refers
to it and when it has been older than the grace time in two listings, one of them right before it goes: a publisher
that finds it there refreshes it before it refers to it. So any number may remove at once, beside any number who
publish, and be killed anywhere.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from cachemgr.capture import MAX_MANIFEST_BYTES
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, DeniedError, NotFoundError, StoreError
from cachemgr.key import Key, from_folder
from cachemgr.parallel import side_by_side
from cachemgr.store import Entry, Remote, Store, captures, layout
from cachemgr.store.captures import Damaged, entry_hints_of
from cachemgr.store.outlines import Outline, Outlines

_DELETERS = 16
"""Objects of a remote store that are deleted at a time."""
_BATCH = 64
"""Manifests that are out of sight at a time until it is asked who wants them."""


class Removal(msgspec.Struct, frozen=True):
    """What removing artifacts and captures takes away, as a plan: names in the order in which they go."""

    keys: tuple[Key, ...]
    hints: tuple[str, ...]
    manifests: tuple[str, ...]
    """And what lies beside them, which goes after them."""
    layers: tuple[str, ...]
    freed: int
    """Bytes that go with the plan."""
    later: int
    """Bytes of layers that nothing refers to any more, and that are too young to be removed safely."""
    before: float
    """Layers that were modified after this time stay, whoever refreshed them since; in seconds since the epoch."""

    @property
    def objects(self) -> int:
        """How many objects go."""
        return len(self.hints) + len(self.manifests) + len(self.layers)


class Holdings(msgspec.Struct, frozen=True):
    """What lies in a store now, from one listing each of its artifacts, its layers and its hints about captures."""

    beside: Mapping[Key, Sequence[Entry]]
    """Per artifact, its manifests and what lies beside them."""
    outlines: Mapping[str, Outline]
    """By the name of the manifest."""
    damaged: Sequence[Damaged]
    """Manifests that cannot be read."""
    layers: Sequence[Entry]
    near: Sequence[Entry]
    """Hints in a mirror."""

    def of(self, key: Key) -> dict[str, Outline]:
        """The readable captures of an artifact."""
        names = (entry.name for entry in self.beside.get(key, ()))
        return {name: self.outlines[name] for name in names if name in self.outlines}


def holdings(store: Store, outlines: Outlines) -> Holdings:
    """Look at a store. Hints and layers are listed first: one that is listed was there before every manifest that is
    not. What is not called like a layer is none."""
    near = list(store.scan(layout.NEAR))
    layers = [entry for entry in store.scan(layout.LAYERS) if _is_layer(entry.name)]
    beside: dict[Key, list[Entry]] = defaultdict(list)
    for entry in store.scan(layout.ARTIFACTS):
        key = from_folder(entry.name.split("/")[1])
        if key is not None:
            beside[key].append(entry)
    listed = {
        entry.name: key for key, own in beside.items() for entry in own if entry.name.endswith(layout.MANIFEST_SUFFIX)
    }
    damaged: list[Damaged] = []
    return Holdings(beside, outlines.of(store, listed, damaged), damaged, layers, near)


def plan_removal(
    store: Store,
    wanted: Iterable[Key],
    *,
    manifests: Collection[str] = (),
    now: float,
    grace: float | None = None,
    held: Holdings | None = None,
    strict: bool = True,
) -> Removal:
    """What has to go so that the artifacts `wanted` and the captures with the names `manifests` are gone.

    Args:
        now, grace: seconds since the epoch; seconds, `cachemgr.store.captures.GRACE_SECONDS` unless told.
        held: what lies in the store, if that is known.
        strict: False for a plan whose layers nobody will remove.

    Raises:
        CorruptError: another capture is damaged, so that nobody knows what it refers to; nothing may be removed.
        StoreError: the same, because it cannot be read.
    """
    held = holdings(store, Outlines()) if held is None else held
    grace = captures.GRACE_SECONDS if grace is None else grace
    goners, single = tuple(sorted(set(wanted))), set(manifests)
    if strict:
        require_readable(each for each in held.damaged if each.key not in goners and each.name not in single)
    going = [entry for key in goners for entry in held.beside.get(key, ())]
    going += [entry for own in held.beside.values() for entry in own if layout.manifest_of(entry.name) in single]
    names = {entry.name: entry.size for entry in going}
    staying = {name: each for name, each in held.outlines.items() if name not in names}
    loose = _loose(held.layers, staying.values())
    old = [entry for entry in loose if now - entry.modified >= grace]
    freed = sum(entry.size for entry in old)
    return Removal(
        goners,
        _hints(held, [held.outlines[name] for name in names if name in held.outlines], staying.values()),
        tuple(sorted(names, key=_manifests_first)),
        tuple(sorted(entry.name for entry in old)),
        freed + sum(names.values()),
        sum(entry.size for entry in loose) - freed,
        now - grace,
    )


def loose_bytes(held: Holdings) -> int:
    """Bytes of layers that no capture refers to already: they go with the next removal, or when they are old enough."""
    return sum(entry.size for entry in _loose(held.layers, held.outlines.values()))


def _loose(there: Iterable[Entry], staying: Iterable[Outline]) -> list[Entry]:
    kept = {layer for each in staying for layer, _size in each.layers}
    return [entry for entry in there if layout.layer_of(entry.name) not in kept]


def _is_layer(name: str) -> bool:
    layer = layout.layer_of(name)
    return layer is not None and layout.layer_name(layer) == name


def _hints(held: Holdings, going: Sequence[Outline], staying: Iterable[Outline]) -> tuple[str, ...]:
    found = {hint for each in going for hint in entry_hints_of(each.key, each.entries)} - _hints_of(staying)
    near = {each.near for each in going}.intersection(entry.name for entry in held.near)
    return tuple(sorted(found | near))


def _hints_of(staying: Iterable[Outline]) -> set[str]:
    return {hint for each in staying for hint in (each.near, *entry_hints_of(each.key, each.entries))}


def _manifests_first(name: str) -> tuple[bool, str]:
    return not name.endswith(layout.MANIFEST_SUFFIX), name


def require_readable(damaged: Iterable[Damaged]) -> None:
    """Refuse to go on where a capture cannot be read.

    Raises:
        CorruptError: it is damaged, so that nobody knows what it refers to; nothing may be removed.
        StoreError: the same, because it cannot be read.
    """
    for each in damaged:
        if each.kind != "damaged":
            raise StoreError(f"{each.reason}; layers that it needs are unknown")
        raise CorruptError(f"{each.reason}; layers that it needs are unknown", hint=f"cachemgr rm {each.key}")


def referenced(store: Store) -> set[Digest]:
    """The layers that captures refer to.

    Raises:
        CorruptError, StoreError: as `require_readable`.
    """
    damaged: list[Damaged] = []
    listed = {name: key for name, (key, _beside) in captures.listing(store).items()}
    known = Outlines().of(store, listed, damaged)
    require_readable(damaged)
    return {layer for each in known.values() for layer, _size in each.layers}


def remove(
    store: Store, plan: Removal, outlines: Outlines | None = None, *, taken: Callable[[], Collection[Key]] | None = None
) -> frozenset[str]:
    """Carry out a plan: hints, manifests, layers. A crash in between leaves no manifest without its layers.

    Layers that somebody has come to need since the plan was made stay, and hints are put back: a person may have looked
    at it for long, and others published meanwhile.

    Args:
        taken: asked for artifacts that somebody uses or keeps by now, when their manifests are out of sight. What is
            wanted is put back before anything else of it goes. A launch that says so later has looked it up before, and
            finds a layer missing at worst, which it takes for a miss; who pins it later looks again (`pins.keep`).

    Returns the manifests that were put back.

    Raises:
        CorruptError: a capture cannot be read, so that nobody knows which layers it needs; they stay.
    """
    delete_all(store, plan.hints)
    back = _take_out_of_sight(
        store, [name for name in plan.manifests if name.endswith(layout.MANIFEST_SUFFIX)], taken or frozenset
    )
    beside = [name for name in plan.manifests if not name.endswith(layout.MANIFEST_SUFFIX)]
    delete_all(store, [name for name in beside if layout.manifest_of(name) not in back])
    listed = captures.listing(store)
    delete_all(store, _bereft(plan, listed))
    damaged: list[Damaged] = []
    left = {name: key for name, (key, _beside) in listed.items()}
    if plan.layers:
        known = (outlines or Outlines()).of(store, left, damaged)
    else:
        about = {layout.key_of(name) for name in plan.manifests}
        known = Outlines().of(store, {name: key for name, key in left.items() if key in about}, damaged)
    for hint in sorted(_hints_of(known.values()).intersection(plan.hints)):
        store.put(hint, b"")
    if plan.layers:
        require_readable(damaged)
        needed = {layer for each in known.values() for layer, _size in each.layers}
        _remove_layers(store, plan.layers, needed, before=plan.before)
    return frozenset(back)


def _take_out_of_sight(store: Store, names: Sequence[str], taken: Callable[[], Collection[Key]]) -> set[str]:
    """Delete these manifests, some artifacts at a time, but for those that are `taken` then: they are put back."""
    back: set[str] = set()
    for batch in _by_artifact(names):
        threads = _DELETERS if isinstance(store, Remote) else 1
        read = side_by_side(lambda name: _bytes_of(store, name), batch, threads=threads)
        delete_all(store, batch)
        wanted = taken()
        for name, data in zip(batch, read, strict=True):
            if data is not None and layout.key_of(name) in wanted:
                store.put(name, data)
                back.add(name)
    return back


def _by_artifact(names: Iterable[str]) -> Iterator[list[str]]:
    """Batches in which all manifests of an artifact are in the same."""
    batch: list[str] = []
    for _key, own in groupby(sorted(names), key=layout.key_of):
        batch += own
        if len(batch) >= _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _bytes_of(store: Store, name: str) -> bytes | None:
    """None for a manifest that is gone, or that nobody could use anyway."""
    try:
        return store.read(name, limit=MAX_MANIFEST_BYTES)
    except (CorruptError, DeniedError, NotFoundError):
        return None


def left_of(store: Store, plan: Removal, manifests: Collection[str]) -> tuple[int, int]:
    """Bytes and number of the objects of a plan that are there still because these `manifests` were put back."""
    if not manifests:
        return 0, 0
    keys = {key for name in manifests if (key := layout.key_of(name)) is not None}
    kept = (
        {name for name in plan.manifests if layout.manifest_of(name) in manifests} | set(plan.layers) | set(plan.hints)
    )
    shelves = {f"{name.rpartition('/')[0]}/" for name in plan.layers}
    places = [*map(layout.artifact_prefix, sorted(keys)), *sorted(shelves)]
    there = [entry.size for place in places for entry in store.scan(place) if entry.name in kept]
    return sum(there), len(there) + sum(store.has(hint) for hint in plan.hints)


def _bereft(plan: Removal, listed: Mapping[str, tuple[Key, Sequence[str]]]) -> list[str]:
    """Manifests that came back while we removed what lies beside them, which their publisher took for his. A capture
    must not forget where it was taken from, so it goes once more."""
    beside = {name for _key, own in listed.values() for name in own}
    lost = {layout.manifest_of(name) for name in plan.manifests if name not in beside and name not in listed}
    return sorted(lost.intersection(listed, plan.manifests))


def _remove_layers(store: Store, names: Collection[str], needed: Collection[Digest], *, before: float) -> None:
    """Remove those of these layers that are not `needed` and that nobody has refreshed since `before`."""
    shelves: dict[str, list[str]] = defaultdict(list)
    for name in set(names).difference(map(layout.layer_name, needed)):
        shelves[name.rpartition("/")[0] + "/"].append(name)
    for shelf, own in sorted(shelves.items()):
        # Publishers refresh a layer before they refer to it, so its age is looked at last.
        old = {entry.name for entry in store.scan(shelf) if entry.modified <= before}
        delete_all(store, sorted(old.intersection(own)))


def delete_all(store: Store, names: Sequence[str]) -> None:
    """Delete these objects, in no order; several at a time where that saves waiting."""
    side_by_side(store.delete, names, threads=_DELETERS if isinstance(store, Remote) else 1)
