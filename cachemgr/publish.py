"""The publish journey: capture what a launch used or made, and commit it to the store.

Only units that pass their domain's self-check, that did not change while they were read, and that no usable capture of
the key has. Nothing is replaced. Bytes that were read last time and did not change are not read again, and a tree that
is stored already is recognised by its units alone.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import msgspec

from cachemgr.budget import Budget
from cachemgr.capture import LAYOUT, Layer, Manifest, Names
from cachemgr.digest import Digest
from cachemgr.examine import Tree, units_of
from cachemgr.key import Relations, broken, misplaced
from cachemgr.packing import OverBudgetError, Packing, Refused
from cachemgr.statcache import StatCache
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, Judge, Marks, captures, commit, has_layers, no_marks


class Published(msgspec.Struct, frozen=True):
    """What a publish did."""

    capture: Digest | None
    files: int
    bytes: int
    stored_bytes: int
    """Bytes of the layers that were packed."""
    refused: tuple[Refused, ...]
    reason: str
    """Why there is no capture, or nothing."""
    no_room: bool = False
    """Whether that is because the budget leaves too little."""


def publish(
    store: Store,
    draft: Manifest,
    trees: Sequence[Tree],
    cache: StatCache,
    *,
    near: Sequence[Capture],
    ranks: Collection[str] = (),
    budget: Budget | None = None,
    now_ns: int,
    without: frozenset[Digest] = frozenset(),
    judge: Judge | None = None,
    marks: Marks = no_marks,
) -> Published:
    """Commit what `trees` hold that no complete capture of the key has, of those that this host could use.

    Args:
        draft: the manifest without layers and entries.
        cache: what unchanged files were last time; updated.
        near: captures of another key whose layers may be the same.
        ranks: names of the ranks that ran here. Of a launch that did not get ready, a unit that has ranks is captured
            with all of these or not at all.
        budget: what the store may still take; None for as much as there is.
        now_ns: the time, for the stat cache and the grace of layers.
        without: captures that are in quarantine here: what they have is published again.
        judge: what it refuses is published again as well.
        marks: what to put beside the manifest.

    Raises:
        StoreError: the store could not be written; nothing is visible then.
        CorruptError: the store is not one of ours, or of a newer layout; it is left alone.
    """
    layout.ensure_layout(store)
    there = captures(store, draft.key, [], without=without, judge=judge)
    own = [capture for capture in there if has_layers(store, capture)]
    have = _stored_units([capture for capture in own if _serves(capture, draft.needs)])
    packing = Packing(store, trees, [*own, *near], cache, budget, now_ns=now_ns)
    try:
        for tree in trees:
            _add_new_units(packing, tree, have[tree.domain.name], () if draft.complete else ranks)
        made, refused = packing.layer(), tuple(packing.refused)
        if made is None:
            return Published(None, 0, 0, 0, refused, "nothing new to capture")
        manifest = msgspec.structs.replace(draft, layout=LAYOUT, layers=(made,), entries=_entries(made, trees))
        capture = commit(store, manifest, packing.paths, now=now_ns / 1e9, marks=marks)
    except OverBudgetError as over:
        return Published(None, 0, 0, 0, tuple(packing.refused), str(over), no_room=True)
    finally:
        packing.discard()
    files = list(made.files())
    stored = made.size if made.digest in packing.paths else 0
    return Published(capture, len(files), sum(file.size for file in files), stored, refused, "")


def _serves(capture: Capture, host: Relations) -> bool:
    """Whether a host like this one may use a capture: what it may not use would keep it cold for ever."""
    return not broken(capture.manifest.needs, host) and not misplaced(capture.manifest.needs, host)


def _stored_units(own: Sequence[Capture]) -> dict[str, dict[str, list[set[str]]]]:
    """Per domain and unit, the sets of paths that complete captures have."""
    have: dict[str, dict[str, list[set[str]]]] = defaultdict(lambda: defaultdict(list))
    for capture in own:
        for _layer, section in capture.manifest.sections() if capture.manifest.complete else ():
            for unit in section.units:
                have[section.domain][unit.name].append(unit.paths)
    return have


def _add_new_units(packing: Packing, tree: Tree, have: Mapping[str, list[set[str]]], ranks: Collection[str]) -> None:
    """Add what was touched and no capture has, unless it lacks a rank."""
    names = Names()
    for name, paths in units_of(tree.domain, tree.seen).items():
        if tree.touched.isdisjoint(paths) or any(stored.issuperset(paths) for stored in have.get(name, ())):
            continue
        ranked = tree.domain.ranks_of(name, paths)
        if ranked and (missing := sorted(set(ranks) - ranked)):
            packing.refuse(tree, name, f"has nothing of {', '.join(missing)}")
            continue
        packing.add(tree, name, paths, names)


def _entries(made: Layer, trees: Sequence[Tree]) -> tuple[str, ...]:
    domains = {tree.domain.name: tree.domain for tree in trees}
    names = {domains[section.domain].entry_of(unit.name) for section in made.sections for unit in section.units}
    return tuple(sorted(name for name in names if name is not None))
