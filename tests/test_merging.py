"""Many captures of one artifact that this machine made become one, from which a restore places the same files."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from cachemgr.capture import Manifest
from cachemgr.clock import written
from cachemgr.examine import Tree
from cachemgr.key import Key
from cachemgr.machine import Machine
from cachemgr.prune.artifacts import Plan, Wish, carry_out, plan
from cachemgr.prune.limits import Limits
from cachemgr.prune.merging import FEWEST
from cachemgr.publish import publish
from cachemgr.statcache import StatCache
from cachemgr.store import layout
from cachemgr.store.captures import captures, enter
from cachemgr.store.leases import Lease
from cachemgr.store.local import LocalStore, scratch_of
from cachemgr.store.outlines import Outlines
from cachemgr.trust import HERE, Trust, policies_of
from tests import trees
from tests.conftest import NOW, NOW_NS
from tests.pruning import DAY, factors_of, key_of, settle, uses
from tests.stores import contents


class Place:
    """A store of a machine, with an artifact that grew by a capture a day."""

    def __init__(self, root: Path, home: Path | None = None) -> None:
        self.root, self.live = root / "store", root / "live"
        self.store = LocalStore(self.root)
        self.trust = Trust(policies_of((), private=True), Machine((home or root) / "machine.key"))
        self.marks = self.trust.marks((), None, None)

    def grow(self, count: int, name: str = "a", *, first: Sequence[str] = (), **changed: object) -> Key:
        """Publish so many captures, each with one kernel more; the first one has trees of these domains, too."""
        place = self.live / name
        trees.build(place, first)
        for number in range(count):
            trees.triton_kernel(place / "triton", f"{name}-{number}")
            self.publish(trees.live(place), self.draft(name, number, **changed))
        settle(self.root)
        return key_of(name)

    @staticmethod
    def draft(name: str, number: int, **changed: object) -> Manifest:
        draft = trees.draft(
            factors_of(name), created=written(NOW - (40 - number) * DAY), launch=f"made-{name}-{number}"
        )
        return msgspec.structs.replace(draft, **{"timings": {} if number else {"run": 45.0}, **changed})

    def publish(self, found: list[Tree], draft: Manifest) -> None:
        made = publish(self.store, draft, found, StatCache({}), near=(), now_ns=NOW_NS, marks=self.marks)
        assert made.capture is not None, made.reason

    def planned(self) -> Plan:
        return plan(
            self.store,
            Wish(Limits()),
            outlines=Outlines(),
            uses=uses(self.store),
            judge=self.trust.opinion,
            marks=self.marks,
            root=self.root,
            now=NOW,
        )

    def prune(self, planned: Plan | None = None) -> Plan:
        found = self.planned() if planned is None else planned
        judge = self.trust.opinion
        return carry_out(self.store, found, outlines=Outlines(), judge=judge, marks=self.marks, now=NOW)

    def restored(self, name: str, to: str) -> dict[str, bytes]:
        """The files that a start would be given, as they are stored but for where they lie."""
        found = trees.look_up(self.store, factors_of(name))
        assert found.result == "exact"
        target = self.root.parent / to
        assert trees.restore_found(self.store, found, trees.targets(target)).files
        return {path: data.replace(str(target).encode(), b"@") for path, data in trees.read(target).items()}

    def bytes(self) -> int:
        return sum(entry.size for prefix in (layout.ARTIFACTS, layout.LAYERS) for entry in self.store.scan(prefix))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_captures_of_this_machine_become_one_that_restores_the_same(place: Place) -> None:
    key = place.grow(FEWEST + 1, first=("inductor", "torch_compile"))
    before, size = place.restored("a", "before"), place.bytes()
    planned = place.planned()
    (merge,) = planned.merges
    assert (merge.key, len(merge.captures)) == (key, FEWEST + 1)
    assert not planned.empty
    done = place.prune(planned)
    assert done.merges == planned.merges
    (capture,) = captures(place.store, key, [], judge=place.trust.opinion)
    assert capture.standing is not None
    assert capture.standing.by == HERE
    assert (capture.manifest.timings, capture.manifest.created) == ({"run": 45.0}, written(NOW - 40 * DAY))
    assert place.restored("a", "after") == before
    assert place.bytes() < size
    made = sum(entry.size for entry in place.store.scan(layout.artifact_prefix(key)))
    assert size - place.bytes() == done.bytes - made, "the new manifest is not counted as freed"
    assert not list(scratch_of(place.root).iterdir()), "nothing is left aside"
    assert place.planned().empty


def _signed(place: Place, key: Key) -> None:
    first = captures(place.store, key, [])[0].digest
    place.store.put(layout.signature_name(key, first, "5" * 32, "2026-01-01T00:00:00Z"), b"{}")


def _taken(place: Place, key: Key) -> None:
    place.store.put(layout.origin_name(key, captures(place.store, key, [])[0].digest), b"{}")


def _apart(place: Place, key: Key) -> None:
    place.store.put(layout.quarantine_name(captures(place.store, key, [])[0].digest, "host"), b"{}")


def _elsewhere(place: Place, key: Key) -> None:
    first = captures(place.store, key, [])[0]
    (mark,) = first.beside
    place.store.delete(mark)
    for name, mac in Machine(place.root.parent / "another.key").mark(key, first.digest).items():
        place.store.put(name, mac)


def _forged(place: Place, key: Key) -> None:
    (mark,) = captures(place.store, key, [])[0].beside
    (place.root / mark).write_bytes(b"0" * 64)


def _young(place: Place, key: Key) -> None:
    layer = captures(place.store, key, [])[0].manifest.layers[0].digest
    os.utime(place.root / layout.layer_name(layer), (NOW - 60, NOW - 60))


def _in_use(place: Place, key: Key) -> None:
    Lease.take(place.store, {key}, "launch-9", "host")


def _shared(place: Place, key: Key) -> None:
    """Another artifact needs a layer, too: merging would only add to it."""
    first = captures(place.store, key, [])[0].manifest
    other = msgspec.structs.replace(place.draft("b", 0), layers=first.layers, entries=first.entries)
    enter(place.store, other, place.marks)


@pytest.mark.parametrize("change", [_signed, _taken, _apart, _elsewhere, _forged, _young, _in_use, _shared])
def test_what_others_answer_for_or_need_is_never_merged(place: Place, change: Callable[[Place, Key], None]) -> None:
    change(place, place.grow(FEWEST))
    assert place.planned().merges == ()


@pytest.mark.parametrize("change", [_signed, _taken, _apart, _in_use])
def test_what_changes_after_the_plan_is_looked_at_again(place: Place, change: Callable[[Place, Key], None]) -> None:
    key = place.grow(FEWEST)
    planned = place.planned()
    assert len(planned.merges) == 1
    change(place, key)
    before = contents(place.store)
    done = place.prune(planned)
    assert (done.merges, done.bytes, done.files) == ((), 0, 0)
    assert contents(place.store) == before


def test_few_captures_and_such_of_unfinished_launches_are_left(place: Place) -> None:
    place.grow(FEWEST - 1)
    assert place.planned().merges == ()
    place.grow(FEWEST, "b", complete=False)
    assert place.planned().merges == ()


def test_a_machine_without_a_key_merges_nothing(place: Place) -> None:
    place.grow(FEWEST)
    place.marks = Trust(policies_of((), private=True)).marks((), None, None)
    assert place.planned().merges == ()


def test_a_damaged_layer_is_said_and_nothing_goes(place: Place) -> None:
    key = place.grow(FEWEST)
    layer = captures(place.store, key, [])[2].manifest.layers[0].digest
    path = place.root / layout.layer_name(layer)
    planned = place.planned()
    path.write_bytes(b"x" * path.stat().st_size)
    before = contents(place.store)
    done = place.prune(planned)
    assert done.merges == ()
    assert done.notes[0].startswith(f"captures of {key[:12]} were not merged: layer ")
    assert contents(place.store) == before
    assert not list(scratch_of(place.root).iterdir())
