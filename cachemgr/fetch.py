"""The fetch journey: put one entry where the engine is about to look, by the engine's own name of it.

A look-up by key finds what an equal start made. The engine's name finds what any start made that the engine would take:
its hash decides, and we add what it is blind to. Hints say which artifacts may have an entry of a name; guards,
relations and blind factors are then compared as always.
"""

import os
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from cachemgr.budget import Budget
from cachemgr.digest import Digest
from cachemgr.domains import Target
from cachemgr.key import Factor, Relations, broken, compare, from_folder, misplaced
from cachemgr.level import Level
from cachemgr.store import layout
from cachemgr.store.captures import Capture, Damaged, captures, has_layers
from cachemgr.warm import Restored, restore


class Wanted(msgspec.Struct, frozen=True):
    """One entry that an engine is about to look up."""

    entry: str
    """The engine's name."""
    unit: str
    target: Target
    ranks: frozenset[str]
    """The rank that asks."""


class Fetched(msgspec.Struct, frozen=True):
    """What became of it."""

    restored: Restored | None
    """None: no capture has it that may be used here."""
    captures: tuple[Capture, ...] = ()
    reason: str = ""
    damaged: tuple[Damaged, ...] = ()


def wanted_of(path: str, targets: Sequence[Target]) -> Wanted | None:
    """The entry that `path` lies in; None where it lies in no live directory that has entries."""
    place = os.path.realpath(path)
    for target in targets:
        inner = place.removeprefix(os.path.realpath(target.directory) + "/")
        if inner == place:
            continue
        unit = target.domain.unit_of(inner)
        entry = target.domain.entry_of(unit)
        if entry is not None:
            return Wanted(entry, unit, target, target.domain.ranks_of(unit, [inner]))
    return None


def fetch(
    level: Level,
    wanted: Wanted,
    factors: Sequence[Factor],
    host: Relations,
    *,
    ranks: Collection[str],
    budget: Budget,
    launch: str,
    now_ns: int,
    expired: Callable[[], bool],
    without: frozenset[Digest],
) -> Fetched:
    """Put the entry into its live directory, if some capture of this level has it that may be used here.

    Raises:
        StoreError: its store could not be read.
    """
    store, damaged = level.store, list[Damaged]()
    usable = [
        capture for capture in _having(level, wanted.entry, damaged, without) if _may_serve(capture, factors, host)
    ]
    found = tuple(capture for capture in usable if has_layers(store, capture))
    if not found:
        reason = "no capture that fits here has it" if usable or damaged else "no capture has it"
        return Fetched(None, reason=reason, damaged=tuple(damaged))
    restored = restore(
        store,
        found,
        [wanted.target],
        trees=True,
        ranks=ranks,
        budget=budget,
        launch=launch,
        now_ns=now_ns,
        expired=expired,
        only=lambda unit: unit.name == wanted.unit,
    )
    if level.where == "mirror":
        restored = msgspec.structs.replace(restored, pulled_bytes=restored.read_bytes)
    return Fetched(restored, found, "; ".join(restored.reasons), tuple(damaged))


def _having(level: Level, entry: str, damaged: list[Damaged], without: frozenset[Digest]) -> Iterator[Capture]:
    store, judge = level.store, level.judge
    for hint in store.scan(layout.entry_prefix(entry)):
        key = from_folder(hint.name.rsplit("/", 1)[-1])
        for capture in () if key is None else captures(store, key, damaged, without=without, judge=judge):
            if entry in capture.manifest.entries:
                yield capture


def _may_serve(capture: Capture, factors: Sequence[Factor], host: Relations) -> bool:
    """As for a near artifact with its torch trees: the engine is blind to what is compared here.

    Of a launch that is not done yet, or was killed, an entry is whole if all ranks have theirs (`cachemgr.warm`).
    """
    manifest = capture.manifest
    comparison = compare(factors, manifest.factors)
    fits = comparison.result != "none" and comparison.blind_equal
    return fits and not broken(manifest.needs, host) and not misplaced(manifest.needs, host)
