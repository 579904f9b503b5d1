"""The verify journey: whether a store and live directories are what their manifests say, both ways; and the repair.

    manifest → bytes      every layer is there, has its size, and with its bytes read its digest; deep, every file in it
    bytes → manifest      layers that nothing refers to, hints and pins of nothing
    manifest → hints      what an engine's entry and a near look-up are found by
    catalogue → store     what it tells of manifests that it has read, against these manifests. Keys of artifacts that
                          are not there (any more) are a note: others remove, too, and the next `ls` sees it
    live tree → manifest  damaged units; units that no artifact has are a note, not damage

Others publish, push, pull and prune meanwhile: what looks wrong is looked at again before it is said, and what is too
young to judge is left alone. The repair is a plan; what it removes is of no use to anybody.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from cachemgr import heal
from cachemgr import layer as layers
from cachemgr.capture import Layer
from cachemgr.digest import Digest, fingerprint_of
from cachemgr.domains import Target
from cachemgr.errors import CorruptError, DeniedError, NotFoundError
from cachemgr.examine import seen_in, units_of
from cachemgr.heal import Ailing
from cachemgr.inventory import Indexed, contradictions
from cachemgr.key import Key
from cachemgr.parallel import side_by_side
from cachemgr.statcache import StatCache
from cachemgr.store import Entry, Remote, Store, captures, layout
from cachemgr.store.captures import Capture, Damaged, discard_damaged, entry_hints, near_hint
from cachemgr.store.outlines import Outlines
from cachemgr.store.removal import Removal, delete_all, holdings, plan_removal, remove

_READERS = 8
_SETTLED_SECONDS = 3600.0
"""How old a manifest must be for its hints to be missed: a publisher may be about to write them."""

Depth = Literal["sizes", "digests", "deep"]
"""What of a layer is looked at: its size in a listing, its bytes, or every file in it."""


class Fault(msgspec.Struct, frozen=True):
    """One thing that is not as it should be. `damage` costs somebody a warm start; a `note` costs space at most."""

    severity: Literal["damage", "note"]
    name: str
    """An object of the store, or a path."""
    what: str
    key: Key | None = None


class Report(msgspec.Struct, frozen=True):
    """What was looked at, and what is wrong with it."""

    store: str
    captures: int
    layers: int
    bytes: int
    """Of layers that were read."""
    faults: tuple[Fault, ...]

    @property
    def damaged(self) -> bool:
        """Whether anything is damaged."""
        return any(fault.severity == "damage" for fault in self.faults)


class Repair(msgspec.Struct, frozen=True):
    """What mending a store and live directories takes, as a plan."""

    manifests: tuple[str, ...]
    """Of captures that cannot be used: they go, with their hints, and a launch publishes again what they had."""
    layers: tuple[Digest, ...]
    """Whose bytes are not those of their name: they go, so that the next publish can write them."""
    hints: tuple[str, ...]
    """That are missing: they are written."""
    dangling: tuple[str, ...]
    """Hints of what is gone: they go."""
    indexed: tuple[Key, ...]
    """Of which the catalogue tells what is not so, and would go on telling it: it is made anew from the store, by those
    who have it (`cachemgr.cli.verify`)."""
    aside: tuple[Ailing, ...]
    """Damaged live units, which are moved out of the sight of engines."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.manifests or self.layers or self.hints or self.dangling or self.indexed or self.aside)


class Verified(msgspec.Struct, frozen=True):
    """A report, and the plan that mends what can be mended."""

    report: Report
    repair: Repair


def verify(
    store: Store,
    wanted: Collection[Key] | None = None,
    *,
    depth: Depth = "digests",
    known: Mapping[Key, Indexed] = {},
    live: Sequence[Target] = (),
    read: Callable[[int], None] = lambda _count: None,
    now: float,
) -> Verified:
    """Look at a store, or at the artifacts `wanted` of it. Nothing is changed.

    Args:
        known: what a catalogue has of the store.
        live: live directories to look at.
        read: told how many bytes more were read, from several threads.
        now: seconds since the epoch.

    Raises:
        StoreError: the store itself cannot be read.
    """
    return _Verifying(store, depth, read, now).verified(wanted, known, live)


class _Verifying:
    def __init__(self, store: Store, depth: Depth, read: Callable[[int], None], now: float) -> None:
        self._store, self._depth, self._read, self._now = store, depth, read, now
        self._faults: list[Fault] = []
        self._manifests: dict[str, None] = {}
        self._layers: dict[Digest, None] = {}
        self._hints: list[str] = []
        self._dangling: list[str] = []
        self._bytes = 0

    def verified(
        self, wanted: Collection[Key] | None, known: Mapping[Key, Indexed], live: Sequence[Target]
    ) -> Verified:
        damaged: list[Damaged] = []
        # The listing comes first: a manifest that was there then, and whose hints were written an hour ago.
        written = {entry.name: entry.modified for entry in self._store.scan(layout.ARTIFACTS)}
        found = captures.all_captures(self._store, damaged)
        held = {key: own for key, own in found.items() if wanted is None or key in wanted}
        every = [capture for own in held.values() for capture in own]
        self._unreadable(each for each in damaged if wanted is None or each.key in wanted)
        there = {entry.name: entry for entry in self._store.scan(layout.LAYERS)}
        checked = self._check_layers(every, there)
        self._check_hints(every, written)
        if wanted is None:
            self._check_rest(there, whole=not damaged)
        contradicted = self._check_catalogue(known, found)
        aside = self._check_live(live, found)
        report = Report(str(self._store), len(every), checked, self._bytes, tuple(self._faults))
        repair = Repair(
            manifests=tuple(self._manifests),
            layers=tuple(self._layers),
            hints=tuple(self._hints),
            dangling=tuple(self._dangling),
            indexed=contradicted,
            aside=tuple(aside),
        )
        return Verified(report, repair)

    def _say(self, severity: Literal["damage", "note"], name: str, what: str, key: Key | None = None) -> None:
        self._faults.append(Fault(severity, name, what, key))

    def _unreadable(self, damaged: Iterable[Damaged]) -> None:
        for each in sorted(damaged, key=lambda each: each.name):
            if each.kind != "damaged":
                self._say("damage", each.name, each.reason, each.key)
            elif self._store.has(each.name):
                self._say("damage", each.name, each.reason, each.key)
                if captures.is_torn(self._store, each.name):
                    self._manifests[each.name] = None

    def _check_layers(self, every: Sequence[Capture], there: Mapping[str, Entry]) -> int:
        """How many layers were looked at; each once, however many captures say the same of it."""
        needed: dict[bytes, tuple[Layer, list[Capture]]] = {}
        for capture in every:
            for layer in capture.manifest.layers:
                said = layer.digest.encode() + (msgspec.msgpack.encode(layer) if self._depth == "deep" else b"")
                needed.setdefault(said, (layer, []))[1].append(capture)

        def look(each: tuple[Layer, list[Capture]]) -> str | None:
            return self._fault_of(each[0], there.get(layout.layer_name(each[0].digest)))

        wanted = list(needed.values())
        threads = _READERS if isinstance(self._store, Remote) else 1
        for (layer, by), fault in zip(wanted, side_by_side(look, wanted, threads=threads), strict=True):
            if fault is not None:
                self._tell_layer(layer.digest, fault, by)
        return len({layer.digest for layer, _by in wanted})

    def _tell_layer(self, name: Digest, fault: str, needed_by: Sequence[Capture]) -> None:
        manifests = {layout.manifest_name(each.manifest.key, each.digest): each.manifest.key for each in needed_by}
        standing = {manifest: key for manifest, key in manifests.items() if self._store.has(manifest)}
        for manifest, key in standing.items():  # of the others nobody needs it any more
            self._say("damage", layout.layer_name(name), f"{fault}, and capture {layout.short(manifest)} needs it", key)
            if not fault.startswith("cannot be read"):
                self._manifests[manifest] = None
                self._layers[name] = None

    def _fault_of(self, layer: Layer, entry: Entry | None) -> str | None:
        name = layout.layer_name(layer.digest)
        try:
            if entry is None and not self._store.has(name):
                return "is missing"
            if entry is not None and entry.size != layer.size:
                return f"has {entry.size} bytes and not {layer.size}"
            if self._depth != "sizes":
                self._read_layer(layer, name)
        except NotFoundError:
            return "is missing"
        except CorruptError as error:
            return f"is damaged: {error}"
        except DeniedError as error:
            return f"cannot be read: {error}"
        return None

    def _read_layer(self, layer: Layer, name: str) -> None:
        with self._store.open(name) as stream:
            if self._depth == "deep":
                layers.verify(layer, stream)
            else:
                layers.verify_bytes(layer, stream)
        self._bytes += layer.size
        self._read(layer.size)

    def _check_hints(self, every: Sequence[Capture], written: Mapping[str, float]) -> None:
        entries = {entry.name for entry in self._store.scan(layout.ENTRIES)}
        near = {entry.name for entry in self._store.scan(layout.NEAR)} if isinstance(self._store, Remote) else None
        for capture in every:
            manifest = layout.manifest_name(capture.manifest.key, capture.digest)
            if self._now - written.get(manifest, self._now) < _SETTLED_SECONDS or not self._store.has(manifest):
                continue
            missing = [hint for hint in entry_hints(capture.manifest) if hint not in entries]
            hint = near_hint(capture.manifest, capture.digest)
            if near is not None and hint is not None and hint not in near:
                missing.append(hint)
            for name in missing:
                self._say(
                    "damage",
                    name,
                    f"is missing, so capture {layout.short(manifest)} is not found",
                    capture.manifest.key,
                )
                self._hints.append(name)

    def _check_rest(self, there: Mapping[str, Entry], *, whole: bool) -> None:
        """What nothing refers to, as far as all manifests could be read. `prune` removes it; here it is only said."""
        held = holdings(self._store, Outlines())
        needed = {layout.layer_name(layer) for each in held.outlines.values() for layer, _size in each.layers}
        loose = [each for each in held.layers if whole and each.name in there and each.name not in needed]
        old = [entry for entry in loose if self._now - entry.modified >= captures.GRACE_SECONDS]
        for entry in sorted(old, key=lambda entry: entry.name):
            self._say("note", entry.name, f"{entry.size} bytes that nothing refers to; `cachemgr prune` removes them")
        for entry in self._store.scan(layout.ENTRIES):
            self._check_dangling(entry, layout.entry_key(entry.name), held.beside)
        for entry in held.near:
            hinted = layout.hinted_manifest(entry.name)
            self._check_dangling(entry, None if hinted is None else hinted[0], held.beside)
        for entry in self._store.scan(layout.PINS):
            key = layout.pinned(entry.name)
            if key is not None and key not in held.beside:
                self._say("note", entry.name, "pins an artifact that is not there; `cachemgr unpin` lifts it", key)

    def _check_dangling(self, entry: Entry, key: Key | None, beside: Mapping[Key, object]) -> None:
        if key is not None and key not in beside and self._now - entry.modified >= captures.GRACE_SECONDS:
            self._say("note", entry.name, "is a hint of an artifact that is gone", key)
            self._dangling.append(entry.name)

    def _check_catalogue(self, known: Mapping[Key, Indexed], found: Mapping[Key, Sequence[Capture]]) -> tuple[Key, ...]:
        """The artifacts of which the catalogue tells what is not so. One that is behind reads what is new by itself;
        of what it has read, it believes itself for ever."""
        wrong: list[Key] = []
        for key, told in sorted(known.items()):
            place, held = layout.artifact_prefix(key), found.get(key, ())
            if not held and not any(self._store.scan(place)):
                self._say("note", place, "is in the catalogue, and not in the store, as the next `ls` will find", key)
            elif held and told.manifests == fingerprint_of(layout.manifest_name(key, each.digest) for each in held):
                others = contradictions(told.summary, held)
                if others:
                    self._say("damage", place, f"the catalogue tells other things of it: {', '.join(others)}", key)
                    wrong.append(key)
        return tuple(wrong)

    def _check_live(self, live: Sequence[Target], found: Mapping[Key, Sequence[Capture]]) -> list[Ailing]:
        if not live:
            return []
        now_ns = int(self._now * 1e9)
        have = captures.units_in(capture for own in found.values() for capture in own)
        for target in live:
            units = units_of(target.domain, seen_in(target))
            uncovered = [unit for unit in units if (target.domain.name, unit) not in have]
            if uncovered:
                said = f"{len(uncovered)} of {len(units)} units are in no artifact, such as {uncovered[0]}"
                self._say("note", target.directory, said)
        ailing = heal.look(live, StatCache({}), now_ns=now_ns, left_overs=False)
        for each in ailing:
            for fault in each.faults:
                self._say("damage", f"{each.target.directory}/{fault.unit}", fault.reason)
        return ailing


def mend(store: Store, repair: Repair, *, launch: str, now: float) -> None:
    """Carry out a repair. It can be killed anywhere: what is left is found by the next verify.

    Args:
        launch: names the directories that damaged live units are moved to.

    Raises:
        StoreError: something could not be written.
    """
    # Against the usual order: a killed repair must leave a capture that shows what is wrong, and no damaged layer that
    # the next publish would take for its own.
    for name in repair.layers:
        discard_damaged(store, name)
    broken = [name for name in repair.manifests if _is_broken(store, name)]
    if broken:
        remove(store, _removal(store, broken, now))
    for hint in repair.hints:
        store.put(hint, b"")
    delete_all(store, repair.dangling)
    for ailing in repair.aside:
        heal.set_aside(ailing, launch)


def _is_broken(store: Store, name: str) -> bool:
    """Whether nobody can use a capture, at a second look: a person may have thought for long, and others mend and
    publish meanwhile."""
    key = layout.key_of(name)
    if key is None or captures.is_torn(store, name):
        return key is not None
    try:
        for layer in captures.load(store, key, name).manifest.layers:
            with store.open(layout.layer_name(layer.digest)) as stream:
                layers.verify(layer, stream)
    except (NotFoundError, CorruptError):
        return True
    except DeniedError:
        return False
    return False


def _removal(store: Store, manifests: Sequence[str], now: float) -> Removal:
    """Of these captures; layers are left to a prune, which knows their grace."""
    plan = plan_removal(store, [], manifests=manifests, now=now, strict=False)
    return msgspec.structs.replace(plan, layers=())
