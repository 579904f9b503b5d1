"""Superseded captures: those of which everything is in other captures of the same key, too.

Launches that publish at the same time, or before each other's capture is seen, leave some, and so does a merge
(`cachemgr.prune.merging`). A capture goes only where one other capture has each of its units with all of its files, is
as complete, runs on the same hosts, and has everybody's word that this one has, so that whoever could use this one can
use the other.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from cachemgr import digest
from cachemgr.digest import Digest
from cachemgr.key import Key
from cachemgr.prune.limits import Goner
from cachemgr.remembered import recall, remember
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, Judge, captures, has_layers
from cachemgr.store.removal import Holdings


class Looked:
    """Artifacts with several captures none of which is superseded, by what lies in them, kept in the file `path`: who
    looks often reads only the manifests of those that changed. What quarantine and trust change meanwhile is not
    seen, so a person's prune does without; it only saves work."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: frozenset[str] | None = None

    def news(self, prints: Mapping[Key, str]) -> list[Key]:
        """The artifacts that are not known by this."""
        return [key for key, printed in prints.items() if printed not in self._recalled()]

    def remember(self, prints: Iterable[str]) -> None:
        """Know these from now on, and no others."""
        now = frozenset(prints)
        if now != self._recalled():
            remember(self._path, sorted(now))
        self._known = now

    def _recalled(self) -> frozenset[str]:
        if self._known is None:
            self._known = recall(self._path, frozenset[str]) or frozenset()
        return self._known


def superseded(
    store: Store, held: Holdings, judge: Judge, *, without: Collection[Key], looked: Looked | None
) -> list[Goner]:
    """The captures that others cover, by the name of their manifest, leaving out artifacts of which none may go.
    Manifests of artifacts with several captures are read, of those that were not `looked` at before."""
    several = {
        key: digest.fingerprint_of(entry.name for entry in own)
        for key, own in held.beside.items()
        if key not in without and len(held.of(key)) > 1
    }
    sizes = {entry.name: entry.size for own in held.beside.values() for entry in own}
    found: list[Goner] = []
    changing: set[Key] = set()
    for key, capture in _given_up(store, several if looked is None else looked.news(several), judge):
        own = (layout.manifest_name(key, capture.digest), *capture.beside)
        size = sum(sizes.get(name, 0) for name in own)
        found.append(Goner(own[0], f"everything in it is in later captures of {key[:12]}", size, len(own)))
        changing.add(key)
    if looked is not None:
        looked.remember(printed for key, printed in several.items() if key not in changing)
    return found


def still_superseded(store: Store, names: Collection[str], judge: Judge) -> set[str]:
    """Those of these manifests whose captures others cover now: what covered one may be gone, or in quarantine."""
    keys = {key for name in names if (key := layout.key_of(name)) is not None}
    covered = {layout.manifest_name(key, capture.digest) for key, capture in _given_up(store, keys, judge)}
    return covered.intersection(names)


def _given_up(store: Store, keys: Collection[Key], judge: Judge) -> Iterator[tuple[Key, Capture]]:
    for key, whole in _whole(store, keys, judge):
        for capture in covered(whole):
            yield key, capture


def usable(store: Store, keys: Collection[Key], judge: Judge) -> Iterator[tuple[Key, list[Capture]]]:
    """Per artifact, the captures that have all their layers, that nobody keeps from them, and that no other covers."""
    for key, whole in _whole(store, keys, judge):
        gone = covered(whole)
        yield key, [capture for capture in whole if capture not in gone]


def _whole(store: Store, keys: Collection[Key], judge: Judge) -> Iterator[tuple[Key, list[Capture]]]:
    apart = {entry.name.split("/")[1] for entry in store.scan(layout.QUARANTINE)} if keys else set()
    for key in sorted(keys):
        every = captures(store, key, [], judge=judge)
        whole = [capture for capture in every if digest.hex_of(capture.digest) not in apart]
        yield key, [each for each in whole if has_layers(store, each)]


def covered(found: Sequence[Capture]) -> list[Capture]:
    """Those of the captures of one key that others which stay cover. Of two that are equal, the older one stays: it is
    the one that readers take."""
    staying = list(found)
    gone: list[Capture] = []
    for capture in reversed(found):
        others = [other for other in staying if other is not capture]
        if any(_covers(other, capture) for other in others):
            staying = others
            gone.append(capture)
    return gone


def _covers(other: Capture, capture: Capture) -> bool:
    mine, theirs = capture.manifest, other.manifest
    return (
        (theirs.complete or not mine.complete)
        and (theirs.needs, theirs.ranks, theirs.world) == (mine.needs, mine.ranks, mine.world)
        and _vouched(other) >= _vouched(capture)
        and _answered(other) == _answered(capture)
        and _has_all(_units(other), _units(capture))
        and bool(theirs.timings or not mine.timings)  # the cold start, which savings are told by
    )


def _units(capture: Capture) -> Mapping[tuple[str, str], set[str]]:
    return {
        (section.domain, unit.name): unit.paths
        for _layer, section in capture.manifest.sections()
        for unit in section.units
    }


def _has_all(theirs: Mapping[tuple[str, str], set[str]], mine: Mapping[tuple[str, str], set[str]]) -> bool:
    return all(paths <= theirs.get(unit, set()) for unit, paths in mine.items())


def _vouched(capture: Capture) -> frozenset[str]:
    """The signers and machines that are said to answer for it; where it was not made is one more, against it."""
    return frozenset(_kinds(capture.digest, capture.beside))


def _kinds(capture: Digest, beside: Iterable[str]) -> Iterable[str]:
    for name in beside:
        kind = name.rsplit("/", 1)[-1].removeprefix(digest.hex_of(capture))
        yield layout.signer_of(name) or kind
    if not any(name.endswith(".origin.json") for name in beside):
        yield "made here"


def _answered(capture: Capture) -> str:
    return "" if capture.standing is None else capture.standing.by
