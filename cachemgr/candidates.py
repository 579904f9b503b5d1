"""Candidates of a look-up: artifacts compared with what a launch wants, and which of them is the best. Nothing is read
here."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from cachemgr.heads import Head
from cachemgr.key import Broken, Comparison, Factor, Key, Relations, broken, compare, misplaced


class Candidate(msgspec.Struct, frozen=True):
    """One artifact as a look-up sees it from its heads."""

    key: Key
    comparison: Comparison
    complete: bool
    needs: Relations
    """Of its oldest capture, for people."""
    fits: bool
    """Whether the relations of some capture hold here."""
    placed: bool
    """Whether its ranks had the device ordinals that they have here, which torch trees need."""
    newest: str
    place: int = 0
    """Which level has it, in the order in which levels are read."""

    @property
    def near(self) -> bool:
        """Whether something of it can be restored."""
        return self.fits and self.comparison.result != "none"

    @property
    def trees(self) -> bool:
        """Whether torch trees can be."""
        return self.comparison.blind_equal and self.placed

    def faults(self, host: Relations) -> tuple[Broken, ...]:
        """The relations that do not hold here, where none of its captures fits."""
        return () if self.fits else broken(self.needs, host)


def candidate(key: Key, heads: Sequence[Head], factors: Sequence[Factor], host: Relations, *, place: int) -> Candidate:
    """An artifact, of which these are the heads, for a launch with these factors on this host."""
    fitting = [head for head in heads if not broken(head.needs, host)]
    complete = any(head.complete for head in fitting)
    placed = any(not misplaced(head.needs, host) for head in fitting)
    comparison = compare(factors, heads[0].factors)
    return Candidate(key, comparison, complete, heads[0].needs, bool(fitting), placed, heads[-1].created, place)


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The best first: usable at all, then with its torch trees, complete, with the fewest differences, in the first
    level, the newest."""
    return sorted(sorted(candidates, key=lambda each: each.newest, reverse=True), key=_worse)


def _worse(candidate: Candidate) -> tuple[bool, bool, bool, int, int]:
    return (
        not candidate.near,
        not candidate.trees,
        not candidate.complete,
        len(candidate.comparison.differs),
        candidate.place,
    )


def is_exact(heads: Iterable[Head], factors: Sequence[Factor], host: Relations) -> bool:
    """Whether an artifact, of which these are the heads, may be used whole."""
    whole = (
        head for head in heads if head.complete and not broken(head.needs, host) and not misplaced(head.needs, host)
    )
    return any(compare(factors, head.factors).result == "exact" for head in whole)


def among(
    artifacts: Mapping[Key, Sequence[Head]], factors: Sequence[Factor], host: Relations, *, place: int = 0
) -> list[Candidate]:
    """Every one of these artifacts, compared."""
    return [candidate(key, heads, factors, host, place=place) for key, heads in artifacts.items()]
