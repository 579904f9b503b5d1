"""Artifacts of a store, local or mirror: what goes by which limit, and the removal that does it."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from cachemgr.capture import Manifest
from cachemgr.clock import moment, written
from cachemgr.errors import CorruptError, NotFoundError, UsageError
from cachemgr.history import LastUses
from cachemgr.key import Key
from cachemgr.prune.limits import Goner, Item, Kept, Limits, Part, choose, ranks
from cachemgr.prune.merging import Merge, merge, merges
from cachemgr.prune.scraps import Scrap, displaced, lapsed, scraps, sweep
from cachemgr.prune.superseded import Looked, still_superseded, superseded
from cachemgr.store import Store, layout, records
from cachemgr.store.captures import GRACE_SECONDS, Judge, Marks, is_torn, no_marks, unasked
from cachemgr.store.leases import Held, leases
from cachemgr.store.outlines import Outline, Outlines
from cachemgr.store.pins import Pin, Placed, placed
from cachemgr.store.removal import Holdings, Removal, holdings, left_of, loose_bytes, plan_removal, remove

Version = tuple[str, str | None, str | None]
"""An engine, its version, and that of torch."""


class Gone(msgspec.Struct, frozen=True):
    """An artifact that goes, and why. `bytes` are what that frees once its layers are old enough."""

    key: Key
    why: str
    bytes: int
    model: str
    device: str
    last_used: str
    """RFC 3339, UTC; when it was made, if no launch tells."""


class Plan(msgspec.Struct, frozen=True):
    """What a prune of a store will do."""

    store: str
    artifacts: tuple[Gone, ...]
    captures: tuple[Goner, ...]
    """Superseded or damaged ones of artifacts that stay."""
    merges: tuple[Merge, ...]
    """Captures that become one each. What that frees is known when they are packed: it is in what was done."""
    kept: tuple[Kept, ...]
    """Artifacts that a limit would take, and what keeps them."""
    scraps: tuple[Scrap, ...]
    removal: Removal
    bytes: int
    """Freed by it."""
    files: int
    """Objects that go."""
    later: int
    """Bytes of layers that nothing refers to any more and that are too young to go: the next prune takes them."""
    notes: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Whether nothing goes."""
        return not (self.files or self.merges)


class Wish(msgspec.Struct, frozen=True):
    """What is asked of a prune beside its limits."""

    limits: Limits
    installed: frozenset[Version] | None = None
    """What is installed here, where artifacts of other versions are to go; None leaves them."""
    forgotten: float | None = None
    """Seconds for which no launch of an engine version may be recorded anywhere, so that its artifacts go; None leaves
    them."""
    compact: bool = True
    """Whether captures go that others cover."""


def plan(
    store: Store,
    wish: Wish,
    *,
    outlines: Outlines,
    uses: LastUses,
    judge: Judge = unasked,
    marks: Marks = no_marks,
    root: Path | None = None,
    free: int = 0,
    held: Holdings | None = None,
    looked: Looked | None = None,
    now: float,
) -> Plan:
    """What goes from a store. Nothing is changed.

    Args:
        outlines: those of this store, as they are remembered.
        uses: what launch records tell.
        judge: who tells what captures are worth.
        marks: what this machine puts beside captures that it merges; nothing where it merges none.
        root: the directory of a store that has one, for its unfinished writes.
        free: bytes that its file system has.
        held: what lies in the store, if that is known.
        looked: artifacts that need not be looked at for superseded captures once more.
        now: seconds since the epoch.

    Raises:
        StoreError: a capture cannot be read, so that nobody knows which layers it needs; nothing may be removed.
    """
    held = holdings(store, outlines) if held is None else held
    items = _items(held, uses, wish, now)
    ranked, pinned = ranks(items), placed(store)
    holding = {key: each.pin for key, each in pinned.items() if each.pin.holds(now=now, rank=ranked.get(key))}
    leased = list(leases(store, now=now))
    used = {each.key: str(each) for each in leased if each.lives}
    items = [_guarded(item, holding, used) for item in items]
    chosen = choose(items, wish.limits, now=now, free=free, going=loose_bytes(held))
    going = {Key(goner.name) for goner in chosen.goners}
    damaged = [
        Goner(each.name, each.reason, 0, 1) for each in held.damaged if each.kind == "damaged" and each.key not in going
    ]
    covered = superseded(store, held, judge, without=going | used.keys(), looked=looked) if wish.compact else []
    single = [*damaged, *covered]
    merged = merges(store, held, judge, marks, without=going | used.keys(), now=now) if wish.compact else []
    removal = plan_removal(store, going, manifests=[goner.name for goner in single], now=now, held=held)
    scrap = scraps(store, held, leased, pinned, pinned.keys() - holding, root=root, now=now)
    return Plan(
        store=str(store),
        artifacts=tuple(_gone(goner, held, uses) for goner in chosen.goners),
        captures=tuple(single),
        merges=tuple(merged),
        kept=chosen.kept,
        scraps=tuple(scrap),
        removal=removal,
        bytes=removal.freed + sum(each.bytes for each in scrap),
        files=removal.objects + len(scrap),
        later=removal.later,
        notes=chosen.notes,
    )


def _gone(goner: Goner, held: Holdings, uses: LastUses) -> Gone:
    key = Key(goner.name)
    first = min(held.of(key).values(), key=lambda each: each.created)
    last = uses.artifacts.get(key, first.created)
    return Gone(key, goner.why, goner.bytes, first.model, first.device, last)


def carry_out(
    store: Store, plan: Plan, *, outlines: Outlines, judge: Judge = unasked, marks: Marks = no_marks, now: float
) -> Plan:
    """Do what a plan says, but for artifacts that were pinned or taken into use since, and for captures that are needed
    by now. What was done, as the plan that says only that.

    Args:
        judge, marks: as when it was planned.

    Raises:
        StoreError: something could not be removed. What is left is as good as before, and the next prune goes on.
    """
    return _Deed(store, outlines, judge, marks, now).carry_out(plan)


class _Deed:
    def __init__(self, store: Store, outlines: Outlines, judge: Judge, marks: Marks, now: float) -> None:
        self._store, self._outlines, self._judge, self._marks, self._now = store, outlines, judge, marks, now

    def carry_out(self, plan: Plan) -> Plan:
        planned, pinned, alive = set(plan.scraps), placed(self._store), self._alive()
        keeping = self._keeping(pinned, planned, alive)
        spared = [gone for gone in plan.artifacts if gone.key in keeping]
        used = {held.key for held in alive}
        captures = _still_useless(self._store, plan.captures, used, self._judge)
        done = msgspec.structs.replace(
            plan,
            artifacts=tuple(gone for gone in plan.artifacts if gone.key not in keeping),
            captures=captures,
            merges=tuple(each for each in plan.merges if each.key not in used),
            kept=(*plan.kept, *(Kept(gone.key, gone.why, keeping[gone.key]) for gone in spared)),
            scraps=tuple(_still_scraps(plan.scraps, _removable(pinned, planned), {held.name for held in alive})),
        )
        if spared or captures != plan.captures:
            removal = _without(self._store, plan, {gone.key for gone in spared}, captures, self._outlines)
            done = msgspec.structs.replace(done, removal=removal, later=removal.later)
        done = self._removed(done, planned)
        return self._merged(done) if done.merges else done

    def _alive(self) -> list[Held]:
        return [held for held in leases(self._store, now=self._now) if held.lives]

    def _keeping(
        self, pinned: Mapping[Key, Placed], planned: Collection[Scrap], alive: Iterable[Held]
    ) -> dict[Key, str]:
        """Artifacts that stay whatever was planned, and why: those with a pin that was not `planned` to go, and those
        in use."""
        keeping = {
            key: "pinned since"
            for key, each in pinned.items()
            if each.pin.holds(now=self._now, rank=None) and not set(lapsed(each)).issubset(planned)
        }
        keeping.update((held.key, str(held)) for held in alive)
        return keeping

    def _removed(self, done: Plan, planned: Collection[Scrap]) -> Plan:
        going = {gone.key for gone in done.artifacts}

        def taken() -> Collection[Key]:
            """A pin keeps an artifact, and not what is superseded in it."""
            alive = self._alive()
            return self._keeping(placed(self._store, going), planned, alive).keys()

        back = remove(self._store, done.removal, self._outlines, taken=taken)
        sweep(self._store, done.scraps)
        size, count = left_of(self._store, done.removal, back)
        keys = {layout.key_of(name) for name in back}
        spared = [gone for gone in done.artifacts if gone.key in keys]
        return msgspec.structs.replace(
            done,
            artifacts=tuple(gone for gone in done.artifacts if gone.key not in keys),
            captures=tuple(each for each in done.captures if each.name not in back),
            kept=(*done.kept, *(Kept(gone.key, gone.why, "pinned or taken into use while it went") for gone in spared)),
            bytes=done.removal.freed + sum(scrap.bytes for scrap in done.scraps) - size,
            files=done.removal.objects + len(done.scraps) - count,
        )

    def _merged(self, done: Plan) -> Plan:
        """Captures become one each; the old ones are superseded by it, and go as such."""
        store, made, notes = self._store, dict[Merge, Manifest](), list[str]()
        for each in done.merges:
            try:
                manifest = merge(store, each, self._judge, self._marks, now=self._now)
            except (CorruptError, NotFoundError) as error:
                notes.append(f"captures of {each.key[:12]} were not merged: {error}")
                continue
            if manifest is not None:
                made[each] = manifest
        names = [layout.manifest_name(each.key, capture) for each in made for capture in each.captures]
        useless, held = still_superseded(store, names, self._judge), holdings(store, self._outlines)
        removal = plan_removal(store, (), manifests=useless, now=self._now, held=held)
        back = remove(store, removal, self._outlines, taken=lambda: {lease.key for lease in self._alive()})
        size, count = left_of(store, removal, back)
        added = sum(layer.size for manifest in made.values() for layer in manifest.layers)
        return msgspec.structs.replace(
            done,
            merges=tuple(made),
            bytes=done.bytes + removal.freed - size - added,
            files=done.files + removal.objects - count,
            later=done.later + removal.later,
            notes=(*done.notes, *notes),
        )


def _removable(pinned: Mapping[Key, Placed], planned: Collection[Scrap]) -> set[Scrap]:
    """Pins that may go still: those that ended by then and are the same now, and those that a newer one displaced."""
    found: set[Scrap] = set()
    for each in pinned.values():
        ended = lapsed(each)
        found.update(ended if set(ended).issubset(planned) else displaced(each))
    return found


def _still_useless(store: Store, planned: Sequence[Goner], used: Collection[Key], judge: Judge) -> tuple[Goner, ...]:
    """Those that are damaged at a second look, or covered by what is there now; of what a launch uses, none else."""
    torn = {each.name for each in planned if is_torn(store, each.name)}
    sound = [each.name for each in planned if each.name not in torn and layout.key_of(each.name) not in used]
    useless = torn | still_superseded(store, sound, judge)
    return tuple(each for each in planned if each.name in useless)


def _still_scraps(planned: Iterable[Scrap], pinned: Collection[Scrap], alive: Collection[str]) -> Iterator[Scrap]:
    """But for leases that beat again, and for pins, of which only these may go still."""
    for scrap in planned:
        renewed = scrap.name.startswith(layout.PINS) and scrap not in pinned
        if not renewed and scrap.name not in alive:
            yield scrap


def _without(
    store: Store, plan: Plan, spared: Collection[Key], captures: Collection[Goner], outlines: Outlines
) -> Removal:
    """What goes when these artifacts stay, and of the single captures all but these."""
    single = {each.name for each in plan.captures}
    going = {each.name for each in captures}
    names = [
        name
        for name in plan.removal.manifests
        if (name in going if name in single else layout.key_of(name) not in spared)
    ]
    then = plan.removal.before + GRACE_SECONDS
    removal = plan_removal(store, (), manifests=names, now=then, held=holdings(store, outlines))
    return msgspec.structs.replace(removal, keys=tuple(key for key in plan.removal.keys if key not in spared))


def _items(store: Holdings, uses: LastUses, wish: Wish, now: float) -> list[Item]:
    sizes = {entry.name: entry.size for entry in store.layers}
    found = []
    for key, own in store.beside.items():
        outlines = store.of(key).values()
        if outlines:
            created = [each.created for each in outlines]
            layers = {layer for each in outlines for layer, _size in each.layers}
            names = sorted(map(layout.layer_name, layers))
            parts = [Part(name, sizes[name], 1) for name in names if name in sizes]
            found.append(
                Item(
                    key,
                    group=_group(outlines),
                    created=max(map(moment, created)),
                    used=max(moment(text) for text in (*created, uses.artifacts.get(key, ""))),
                    parts=(Part(key, sum(entry.size for entry in own), len(own)), *parts),
                    unfit=_unfit(outlines, wish, uses.versions, now),
                )
            )
    return found


def _group(outlines: Collection[Outline]) -> str:
    first = next(iter(outlines))
    return f"{first.model} on {first.device}"


def _unfit(
    outlines: Collection[Outline], wish: Wish, launched: Mapping[tuple[str, str | None], str], now: float
) -> str:
    """Of a version that nobody knows, nobody knows whether it is old."""
    first = next(iter(outlines))
    installed = wish.installed
    if installed is not None and not any(_may_be_in(installed, each) for each in outlines):
        return f"{first.engine} {first.engine_version} with torch {first.torch} is not installed here any more"
    if wish.forgotten is not None:
        told = [launched[each.engine, each.engine_version] for each in outlines if _launch_of(each) in launched]
        last = max([moment(text) for text in told] + [moment(each.created) for each in outlines])
        if now - last > wish.forgotten:
            engine = f"{first.engine} {first.engine_version or 'of an unknown version'}"
            return f"{engine} was last launched on {written(last)[:10]}"
    return ""


def _may_be_in(installed: Collection[Version], outline: Outline) -> bool:
    version = _version(outline)
    return None in version or version in installed


def _version(outline: Outline) -> Version:
    return outline.engine, outline.engine_version, outline.torch


def _launch_of(outline: Outline) -> tuple[str, str | None]:
    return outline.engine, outline.engine_version


def _guarded(item: Item, holding: Mapping[Key, Pin], used: Mapping[Key, str]) -> Item:
    pin = holding.get(Key(item.name))
    kept = str(pin) if pin is not None else (f"in use by {used[Key(item.name)]}" if item.name in used else "")
    return msgspec.structs.replace(item, kept=kept) if kept else item


def require_records(store: Store, seconds: float, *, now: float) -> None:
    """Refuse to judge by launch records that do not cover the last `seconds`: what nobody recorded was not unused.

    They cover it where some are as old as that, and no half of it is without any.

    Raises:
        UsageError: they do not.
    """
    days = [moment(f"{day}T00:00:00Z") for day in records.days(store)]
    begin = now - seconds
    if not days or days[0] > begin:
        since = f"begin on {written(days[0])[:10]}" if days else "are missing"
        raise UsageError(
            f"launch records in {store} {since}, so nobody knows what was used in the last {seconds / 86400:.0f} days",
            hint="--older-than asks for no records; launches with CACHEMGR_PUBLISH=mirror leave some",
        )
    marks = [begin, *(day for day in days if day > begin), now]
    gap, start = max((after - before, before) for before, after in pairwise(marks))
    if gap > seconds / 2 + 86400:
        raise UsageError(
            f"there are no launch records in {store} for the {gap / 86400:.0f} days after {written(start)[:10]}, so "
            "nobody knows what was used then",
            hint="--older-than asks for no records",
        )
