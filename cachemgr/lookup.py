"""The look-up journey: which artifact fits a launch, and how far the nearest one is away.

Looking up compares factors and tests relations; nothing is restored here, and no layer is opened.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from cachemgr.capture import Where
from cachemgr.digest import Digest
from cachemgr.heads import Head, Heads
from cachemgr.key import Broken, Comparison, Difference, Factor, Key, Relations, Result, broken, compare, misplaced
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, Damaged, captures, has_layers


class Found(msgspec.Struct, frozen=True):
    """What a look-up found. For `none`, `artifact` is the nearest one and `differs` says why it cannot be used."""

    result: Result
    artifact: Key | None
    captures: tuple[Capture, ...]
    differs: tuple[Difference, ...]
    relations: tuple[Broken, ...]
    damaged: tuple[Damaged, ...]
    trees: bool
    """Whether domains may be restored in which the engine picks by a key that is blind to some factors."""
    reasons: tuple[str, ...]
    where: Where | None = None


NOTHING = Found("none", None, (), (), (), (), trees=False, reasons=())


class _Candidate(msgspec.Struct, frozen=True):
    key: Key
    comparison: Comparison
    complete: bool
    fits: bool
    """Whether the relations of some capture hold here."""
    placed: bool
    """Whether its ranks had the device ordinals that they have here, which torch trees need."""
    newest: str

    @property
    def near(self) -> bool:
        return self.fits and self.comparison.result != "none"

    @property
    def trees(self) -> bool:
        return self.comparison.blind_equal and self.placed


def _worse(candidate: _Candidate) -> tuple[bool, bool, bool, int]:
    """Sorts the best first: usable at all, then with its torch trees, complete, with the fewest differences."""
    return not candidate.near, not candidate.trees, not candidate.complete, len(candidate.comparison.differs)


def find(
    store: Store,
    key: Key,
    factors: Sequence[Factor],
    host: Relations,
    heads: Heads | None = None,
    *,
    without: frozenset[Digest] = frozenset(),
) -> Found:
    """The artifact for a launch with these factors on this host: exact, else the best near one, else none.

    An exact artifact costs its own manifests only. `heads` remembers what the others are. Captures in `without` do not
    count: they are in quarantine here.

    Raises:
        CorruptError: the store as a whole is not one that can be read.
        StoreError: it could not be read.
    """
    if layout.read_layout(store) is None:
        return NOTHING
    damaged: list[Damaged] = []
    own = _usable(store, key, host, damaged, without)
    complete = tuple(
        capture for capture in own if capture.manifest.complete and not misplaced(capture.manifest.needs, host)
    )
    if complete and compare(factors, complete[0].manifest.factors).result == "exact":
        return Found("exact", key, complete, (), (), tuple(damaged), trees=True, reasons=(), where="local")
    others = (Heads() if heads is None else heads).of(store, damaged, without=without)
    candidates = sorted((_candidate(*item, factors, host) for item in others.items()), key=_newest, reverse=True)
    return _best(
        sorted(candidates, key=_worse),
        others,
        host,
        damaged,
        usable_of=lambda other: _usable(store, other, host, damaged, without),
    )


def _newest(candidate: _Candidate) -> str:
    return candidate.newest


def _candidate(key: Key, heads: Sequence[Head], factors: Sequence[Factor], host: Relations) -> _Candidate:
    fitting = [head for head in heads if not broken(head.needs, host)]
    complete = any(head.complete for head in fitting)
    placed = any(not misplaced(head.needs, host) for head in fitting)
    return _Candidate(key, compare(factors, heads[0].factors), complete, bool(fitting), placed, heads[-1].created)


def _best(
    candidates: Sequence[_Candidate],
    heads: Mapping[Key, Sequence[Head]],
    host: Relations,
    damaged: list[Damaged],
    *,
    usable_of: Callable[[Key], tuple[Capture, ...]],
) -> Found:
    """The first candidate that still has what its head promised; for `none`, the one that is nearest."""
    for candidate in candidates:
        usable = usable_of(candidate.key) if candidate.near else ()
        if usable:
            return _near(candidate, usable, host, damaged)
    if not candidates:
        return msgspec.structs.replace(NOTHING, damaged=tuple(damaged))
    nearest = candidates[0]
    faults = () if nearest.fits else broken(heads[nearest.key][0].needs, host)
    reasons = tuple(f"{fault.relation} {fault.recorded}: {fault.host}" for fault in faults)
    return msgspec.structs.replace(_nothing_but(nearest, damaged), relations=faults, reasons=reasons)


def _near(candidate: _Candidate, usable: tuple[Capture, ...], host: Relations, damaged: Sequence[Damaged]) -> Found:
    """Of a candidate with some captures whose ranks sit where they did, only those; of others everything but trees."""
    elsewhere = [misplaced(capture.manifest.needs, host) for capture in usable]
    if candidate.trees:
        usable = tuple(capture for capture, faults in zip(usable, elsewhere, strict=True) if not faults) or usable
    complete = tuple(capture for capture in usable if capture.manifest.complete)
    reasons = [] if complete else ["only incomplete captures: their launch ended before it was done"]
    faults = () if candidate.placed else next(filter(None, elsewhere), ())
    return msgspec.structs.replace(
        _nothing_but(candidate, damaged),
        result="near",
        captures=complete or usable,
        relations=faults,
        reasons=(*reasons, *(f"{fault.relation} {fault.recorded}: {fault.host} here" for fault in faults)),
        where="local",
    )


def _nothing_but(candidate: _Candidate, damaged: Sequence[Damaged]) -> Found:
    """Nothing to restore, and how far this candidate is away."""
    return msgspec.structs.replace(
        NOTHING,
        artifact=candidate.key,
        differs=candidate.comparison.differs,
        damaged=tuple(dict.fromkeys(damaged)),
        trees=candidate.trees,
    )


def _usable(
    store: Store, key: Key, host: Relations, damaged: list[Damaged], without: frozenset[Digest]
) -> tuple[Capture, ...]:
    return tuple(
        capture
        for capture in captures(store, key, damaged, without=without)
        if not broken(capture.manifest.needs, host) and has_layers(store, capture)
    )


def kept_out(store: Store, key: Key, without: frozenset[Digest]) -> tuple[str, ...]:
    """That captures of this very key are in quarantine here, for people; empty where none is. Nothing but their
    absence would show otherwise.
    """
    names = store.scan(layout.artifact_prefix(key)) if without else ()
    count = sum(layout.capture_of(entry.name) in without for entry in names)
    if not count:
        return ()
    captures = "1 capture" if count == 1 else f"{count} captures"
    return (f"{captures} of this key in quarantine on this host, see `cachemgr show {key[:12]}`",)
