"""The look-up journey: which artifact fits a launch, and how far the nearest one is away.

Looking up compares factors and tests relations; nothing is restored here, and no layer is opened.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec

from cachemgr import sizes
from cachemgr.candidates import Candidate, among, ranked
from cachemgr.capture import Where
from cachemgr.digest import Digest
from cachemgr.errors import NotFoundError
from cachemgr.heads import Heads
from cachemgr.key import (
    Broken,
    Difference,
    Factor,
    Key,
    Relations,
    Result,
    broken,
    compare,
    guard_print,
    misplaced,
)
from cachemgr.level import Level
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, Damaged, captures, has_layers, near

T = TypeVar("T")

_NEW_MANIFESTS = 16
"""How many manifests of a mirror one look-up reads to learn what they are."""
_REMOTE_CANDIDATES = 4
"""How many near artifacts of a mirror are asked for their captures."""


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
    """The level that has the captures."""
    store: Store | None = None
    """The store of that level, whose layers are to be opened."""
    ignored: tuple[str, ...] = ()
    """The levels that are not read at all, each with the reason."""
    apart: int = 0
    """How many captures of this very key are in quarantine here. Nothing but their absence would show otherwise."""

    @property
    def untrusted(self) -> tuple[Damaged, ...]:
        """The captures that were left out because nobody who is trusted answers for them."""
        return self._left_out("untrusted")

    @property
    def unreadable(self) -> tuple[Damaged, ...]:
        """The captures that are there and that we may not read, of this key or another one: no miss."""
        return self._left_out("unreadable")

    @property
    def broken(self) -> tuple[Damaged, ...]:
        """The captures with other bytes than they should have."""
        return self._left_out("damaged")

    def _left_out(self, kind: str) -> tuple[Damaged, ...]:
        return tuple(each for each in self.damaged if each.kind == kind)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why captures that are used should not be."""
        return tuple(dict.fromkeys(doubt for each in self.captures if each.standing and (doubt := each.standing.doubt)))


_UNREADABLE = "none of its captures can be read"
NOTHING = Found("none", None, (), (), (), (), trees=False, reasons=())


class Ask(Protocol):
    """How a level is asked: within some time, with its failures counted. None is the answer of one that failed."""

    def __call__(self, level: Level, step: Callable[[], T], /) -> T | None: ...


def plainly(_level: Level, step: Callable[[], T], /) -> T | None:
    """A failure of a level is one of the look-up."""
    return step()


def find(
    levels: Sequence[Level],
    key: Key,
    factors: Sequence[Factor],
    host: Relations,
    *,
    model: str = "",
    without: frozenset[Digest] = frozenset(),
    ask: Ask = plainly,
) -> Found:
    """The artifact for a launch with these factors on this host: exact in the first level that has it, else the best
    near one of all levels, else none.

    An exact artifact costs its own manifests only. Otherwise, of a mirror, which may hold ten thousand artifacts, only
    some of those are looked at whose guards are equal, and first those of the same `model`. Captures in `without` do
    not count: they are in quarantine here. A level that fails when it is asked is passed over, and so is one that is
    closed.

    Raises:
        CorruptError, StoreError: a level is none that can be read, and `ask` raises it.
    """
    query = _Query(key, host, model, without)
    searches = [_Search(place, level, query) for place, level in enumerate(levels) if level.closed is None]
    ignored = tuple(f"{level} ignored: {level.closed}" for level in levels if level.closed is not None)
    asked: list[_Search] = []
    for search in searches:
        answer = ask(search.level, lambda search=search: search.exact(factors))  # type: ignore[misc]
        if answer is None:
            continue
        asked.append(search)
        if answer:
            return msgspec.structs.replace(
                NOTHING,
                result="exact",
                artifact=key,
                captures=answer,
                trees=True,
                ignored=ignored,
                **_of(asked, search),
            )
    candidates = [
        candidate
        for search in asked
        for candidate in ask(search.level, lambda search=search: search.candidates(factors)) or ()  # type: ignore[misc]
    ]
    candidates = ranked(candidates)
    found = next(_near(candidates, searches, host, ask), None) or _nearest(candidates, host)
    return msgspec.structs.replace(found, ignored=ignored, **_of(asked, None))


def _of(asked: Sequence["_Search"], search: "_Search | None") -> dict[str, object]:
    """What all levels that were asked add to an answer, and the one that gave it."""
    damaged = tuple(dict.fromkeys(each for one in asked for each in one.explained()))
    told: dict[str, object] = {"damaged": damaged, "apart": sum(one.apart for one in asked)}
    if search is not None:
        told |= {"where": search.level.where, "store": search.level.store}
    return told


class _Query(msgspec.Struct, frozen=True):
    """What every level is asked."""

    key: Key
    host: Relations
    model: str
    without: frozenset[Digest]


class _Search:
    """One level as a look-up sees it."""

    def __init__(self, place: int, level: Level, query: _Query) -> None:
        self.place, self.level, self._query = place, level, query
        self._remote = level.where == "mirror"
        """Whether each question costs a request: then what is missing shows when it is fetched."""
        self.damaged: list[Damaged] = []
        self._left_out: set[Digest] = set()
        self._new = False
        """Whether nothing was stored there yet."""

    def exact(self, factors: Sequence[Factor]) -> tuple[Capture, ...]:
        """The captures of the very key of this launch that may be used whole."""
        store = self.level.store
        if not self._remote and layout.read_layout(store) is None:
            if self.level.where == "seed":
                raise NotFoundError(f"there is no store in seed {store}", hint="correct the setting `seed`")
            self._new = True
            return ()
        complete = tuple(
            capture
            for capture in self.usable(self._query.key)
            if capture.manifest.complete and not misplaced(capture.manifest.needs, self._query.host)
        )
        exact = complete and compare(factors, complete[0].manifest.factors).result == "exact"
        return complete if exact else ()

    @property
    def apart(self) -> int:
        """How many captures of this very key are in quarantine."""
        return len(self._left_out)

    def explained(self) -> list[Damaged]:
        """What cannot be used of this level."""
        because = self.level.because
        return [
            msgspec.structs.replace(each, reason=f"{each.reason}; {because}")
            if because and each.kind == "untrusted"
            else each
            for each in self.damaged
        ]

    def candidates(self, factors: Sequence[Factor]) -> list[Candidate]:
        """Every artifact of the level that may be looked at, compared."""
        if self._new:
            return []
        if self._remote:
            return self._hinted(factors)
        level = self.level
        others = Heads(level.heads).of(level.store, self.damaged, without=self._query.without, judge=level.judge)
        return among(others, factors, self._query.host, place=self.place)

    def _hinted(self, factors: Sequence[Factor]) -> list[Candidate]:
        """The best of those whose guards are equal. Two listings at most, and a request for each new manifest."""
        guards, level = guard_print(factors), self.level
        if not guards:
            return []
        named = near(level.store, guards, self._query.model) or near(level.store, guards)
        allowed = {name: key for key, name in named if layout.capture_of(name) not in self._query.without}
        others = Heads(level.heads).of_named(level.store, self.damaged, allowed, most=_NEW_MANIFESTS)
        return ranked(among(others, factors, self._query.host, place=self.place))[:_REMOTE_CANDIDATES]

    def usable(self, key: Key) -> tuple[Capture, ...]:
        """The captures of a key that this host can use."""
        store = self.level.store
        left_out = self._left_out if key == self._query.key else None
        found = captures(
            store, key, self.damaged, without=self._query.without, judge=self.level.judge, left_out=left_out
        )
        fitting = [capture for capture in found if not broken(capture.manifest.needs, self._query.host)]
        whole = [capture for capture in fitting if self._remote or has_layers(store, capture)]
        for capture in fitting:
            if capture not in whole:
                name = layout.manifest_name(key, capture.digest)
                reason = f"capture {layout.short(name)} has a layer that is not in the store"
                self.damaged.append(Damaged(key, name, reason, "absent"))
        return tuple(whole)


def _near(candidates: Sequence[Candidate], searches: Sequence["_Search"], host: Relations, ask: Ask) -> Iterator[Found]:
    """The candidates that still have what their heads promised, the best first."""
    by_place = {search.place: search for search in searches}
    for candidate in candidates:
        if not candidate.near:
            return
        search = by_place[candidate.place]
        usable = ask(search.level, lambda key=candidate.key, search=search: search.usable(key))  # type: ignore[misc]
        if usable:
            yield _of_candidate(candidate, search, usable, host)


def _nearest(candidates: Sequence[Candidate], host: Relations) -> Found:
    """Nothing to restore, and how far the nearest artifact is away."""
    if not candidates:
        return NOTHING
    nearest = candidates[0]
    faults = nearest.faults(host)
    reasons = tuple(map(str, faults)) or (() if nearest.comparison.differs else (_UNREADABLE,))
    return msgspec.structs.replace(_nothing_but(nearest), relations=faults, reasons=reasons)


def _of_candidate(candidate: Candidate, search: "_Search", usable: tuple[Capture, ...], host: Relations) -> Found:
    """Of a candidate with some captures whose ranks sit where they did, only those; of others everything but trees."""
    elsewhere = [misplaced(capture.manifest.needs, host) for capture in usable]
    if candidate.trees:
        usable = tuple(capture for capture, faults in zip(usable, elsewhere, strict=True) if not faults) or usable
    complete = tuple(capture for capture in usable if capture.manifest.complete)
    reasons = [] if complete else ["only incomplete captures: their launch ended before it was done"]
    faults = () if candidate.placed else next(filter(None, elsewhere), ())
    return msgspec.structs.replace(
        _nothing_but(candidate),
        result="near",
        captures=complete or usable,
        relations=faults,
        reasons=(*reasons, *(f"{fault} here" for fault in faults)),
        where=search.level.where,
        store=search.level.store,
    )


def _nothing_but(candidate: Candidate) -> Found:
    """How far this candidate is away."""
    return msgspec.structs.replace(
        NOTHING, artifact=candidate.key, differs=candidate.comparison.differs, trees=candidate.trees
    )


def kept_out(found: Found, key: Key) -> tuple[str, ...]:
    """That captures of this very key are in quarantine here, for people; empty where none is."""
    if not found.apart:
        return ()
    some = sizes.counted(found.apart, "capture")
    return (f"{some} of this key in quarantine on this host, see `cachemgr show {key[:12]}`",)
