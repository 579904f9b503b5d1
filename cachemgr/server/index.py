"""Look-ups out of memory: the factors of all artifacts of the store, so that thousands of nodes can ask at once.

It is made from the heads of captures (`cachemgr.heads`) and made anew when the listing of the store has changed. What a
node then restores it reads from the store and checks itself.
"""

import threading
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import msgspec

from cachemgr.candidates import Candidate, among, is_exact, ranked
from cachemgr.capture import Where
from cachemgr.errors import UsageError
from cachemgr.heads import Head, Heads
from cachemgr.key import Factor, Key, Relations, Result, derive, guard_print, misplaced
from cachemgr.level import Level
from cachemgr.server.contract import Looked
from cachemgr.store.captures import Damaged, listing

_MOST_COMPARED = 64
"""Near artifacts that one look-up compares: the newest ones with equal guards, of the same model first."""
_SUBJECTS = ("model", "model.config", "program")
"""Factors that say what is started."""

Heads_ = Mapping[Key, Sequence[Head]]


class _Artifacts(msgspec.Struct, frozen=True):
    """All artifacts, and how they are found."""

    names: frozenset[str] = frozenset()
    heads: dict[Key, tuple[Head, ...]] = {}
    by_guards: dict[tuple[str, str | None], tuple[Key, ...]] = {}
    by_subject: dict[str, tuple[Key, ...]] = {}
    newest: tuple[Key, ...] = ()


class Index:
    """The artifacts of one level."""

    def __init__(self, level: Level) -> None:
        self._level = level
        self._lock = threading.Lock()
        self._artifacts = _Artifacts()

    def __len__(self) -> int:
        return len(self._artifacts.heads)

    def refresh(self, damaged: list[Damaged]) -> None:
        """Learn what the store has now. What cannot be used goes to `damaged`.

        Raises:
            StoreError: the store failed; what was known is known still.
        """
        with self._lock:
            listed = frozenset(listing(self._level.store))
            if listed == self._artifacts.names:
                return
            heads = Heads(self._level.heads).of(self._level.store, damaged, judge=self._level.judge)
            self._artifacts = _arranged(listed, heads)

    def look_up(self, factors: Sequence[Factor], host: Relations) -> Looked:
        """What there is for a launch of these factors on this host.

        Raises:
            UsageError: two factors have one name.
        """
        key, known = derive(factors), self._artifacts
        heads = known.heads.get(key)
        if heads is not None and is_exact(heads, factors, host):
            return self._answer("exact", key, key)
        candidates = ranked(among(self._some(known, key, factors), factors, host))
        if not candidates:
            return self._answer("none", key, None)
        best = candidates[0]
        return self._answer("near" if best.near else "none", key, best.key, best, host)

    def factors_of(self, key: Key) -> tuple[Factor, ...]:
        """What an artifact was made of; empty where it is not known."""
        heads = self._artifacts.heads.get(key)
        return heads[0].factors if heads else ()

    def _answer(
        self,
        result: Result,
        key: Key,
        artifact: Key | None,
        best: Candidate | None = None,
        host: Relations | None = None,
    ) -> Looked:
        where: Where = self._level.where
        relations = () if best is None or host is None else best.faults(host)
        if best is not None and host is not None and best.fits and not best.placed:
            relations = misplaced(best.needs, host)
        return Looked(
            result=result,
            key=key,
            artifact=artifact,
            differs=() if best is None else best.comparison.differs,
            relations=relations,
            where=None if result == "none" else where,
        )

    def _some(self, known: _Artifacts, key: Key, factors: Sequence[Factor]) -> Heads_:
        """The artifacts that are worth comparing."""
        guards, subject = guard_print(factors), _subject(factors)
        ways: list[Collection[Key]] = []
        if guards:
            ways += [known.by_guards.get((guards, subject), ()), known.by_guards.get((guards, None), ())]
        ways += [known.by_subject.get(subject, ()), known.newest]
        chosen = next((keys for keys in ways if keys), ())
        own = (key,) if key in known.heads else ()
        return {each: known.heads[each] for each in dict.fromkeys((*own, *tuple(chosen)[:_MOST_COMPARED]))}


def _subject(factors: Sequence[Factor]) -> str:
    values = {factor.name: factor.value for factor in factors if factor.name in _SUBJECTS}
    return "\0".join(f"{name}={values[name]}" for name in _SUBJECTS if name in values)


def _arranged(names: frozenset[str], found: Heads_) -> _Artifacts:
    """Equal factors are kept once: artifacts differ in few."""
    pool: dict[Factor, Factor] = {}
    heads = {key: tuple(_pooled(head, pool) for head in own) for key, own in found.items()}
    newest = sorted(heads, key=lambda key: (heads[key][-1].created, key), reverse=True)
    by_guards: dict[tuple[str, str | None], list[Key]] = defaultdict(list)
    by_subject: dict[str, list[Key]] = defaultdict(list)
    for key in newest:
        factors = heads[key][0].factors
        guards, subject = guard_print(factors), _subject(factors)
        for each in (subject, None):
            by_guards[guards, each].append(key)
        by_subject[subject].append(key)
    return _Artifacts(
        names,
        heads,
        {each: tuple(keys) for each, keys in by_guards.items()},
        {each: tuple(keys) for each, keys in by_subject.items()},
        tuple(newest),
    )


def _pooled(head: Head, pool: dict[Factor, Factor]) -> Head:
    factors = tuple(pool.setdefault(factor, factor) for factor in head.factors)
    return msgspec.structs.replace(head, factors=factors)


def require_factors(factors: Sequence[Factor]) -> None:
    """Refuse a look-up of nothing.

    Raises:
        UsageError: there are no factors.
    """
    if not factors:
        raise UsageError("a look-up needs the factors of a launch", hint="cachemgr --server URL lookup -- CMD")
