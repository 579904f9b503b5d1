"""Crash-safe at every write of publish, restore and rm: kill -9 at each step proves the order of writes."""

import shutil
import time
from pathlib import Path

import pytest

from cachemgr.domains import TABLE
from cachemgr.store import Store, layout
from cachemgr.store.captures import captures, has_layers, keys
from cachemgr.store.local import LocalStore
from cachemgr.store.records import launches, record
from cachemgr.store.removal import plan_removal, remove
from cachemgr.warm import Restored, restore
from tests import trees
from tests.kills import killed_at_every_step
from tests.test_capture import LAUNCH

pytestmark = pytest.mark.slow

NOW = trees.NOW_NS / 1e9
OLD = 10 * 24 * 3600.0
"""Far enough ahead for every layer to be past its grace time."""


def visible(store: Store) -> list[str]:
    """Every capture that a reader sees; each must be readable and have its layers."""
    found = []
    for key in keys(store):
        damaged: list[object] = []
        for capture in captures(store, key, damaged):  # type: ignore[arg-type]
            assert has_layers(store, capture), "a manifest is visible before its layers, or after them"
            found.append(capture.digest)
        assert not damaged, damaged
    return sorted(found)


def restored_by(store: Store, root: Path, launch: str) -> Restored:
    found = trees.look_up(store)
    now = trees.NOW_NS
    return restore(
        store, found.captures, trees.targets(root), trees=found.trees, launch=launch, now_ns=now, expired=lambda: False
    )


def restored(store: Store, root: Path) -> dict[str, bytes]:
    found = trees.look_up(store)
    assert found.result == "exact"
    outcome = trees.restore_found(store, found, trees.targets(root))
    assert not outcome.reasons
    return trees.read(root)


def whole_units(root: Path, expected: dict[str, bytes]) -> None:
    """Whatever lies in the live directories is part of a unit that is there completely, byte for byte."""
    for domain in TABLE:
        prefix = f"{domain.name}/"
        there = {path.removeprefix(prefix): data for path, data in trees.read(root).items() if path.startswith(prefix)}
        wanted = {path.removeprefix(prefix): data for path, data in expected.items() if path.startswith(prefix)}
        units: dict[str, set[str]] = {}
        for path in wanted:
            units.setdefault(domain.unit_of(path), set()).add(path)
        for path, data in there.items():
            assert data == wanted[path], f"{path} is torn"
            missing = units[domain.unit_of(path)] - there.keys()
            if "/" in path and domain.unit_of(path) == path.rsplit("/", 1)[0]:
                assert not missing, f"{path} is there without {missing}"


def test_a_publish_killed_anywhere_leaves_nothing_visible_or_all_of_it(tmp_path: Path) -> None:
    live = trees.build(tmp_path / "live", trees.FEW)
    expected = None
    for _step in killed_at_every_step(lambda: trees.publish_trees(LocalStore(tmp_path / "store"), live)):
        store = LocalStore(tmp_path / "store")
        if visible(store):
            found = restored(store, tmp_path / "after")
            assert expected in (None, found)
            expected = found
        again = LocalStore(tmp_path / "store")
        trees.publish_trees(again, live)
        assert len(visible(again)) == 1
        shutil.rmtree(tmp_path / "after", ignore_errors=True)
        restored(again, tmp_path / "after")
        shutil.rmtree(tmp_path / "after")
        shutil.rmtree(tmp_path / "store")


def test_a_publish_beside_another_capture_killed_anywhere_hurts_neither(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    trees.triton_kernel(first / "triton", "one")
    trees.triton_kernel(second / "triton", "two")
    store = LocalStore(tmp_path / "store")
    trees.publish_trees(store, trees.live(first))
    (earlier,) = visible(store)
    for _step in killed_at_every_step(lambda: trees.publish_trees(LocalStore(tmp_path / "store"), trees.live(second))):
        assert earlier in visible(store)
    trees.publish_trees(store, trees.live(second))
    assert len(restored(store, tmp_path / "both")) == 16


def test_a_restore_killed_anywhere_leaves_whole_units_and_the_next_one_finishes(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    trees.publish_trees(store, trees.build(tmp_path / "live", trees.FEW))
    room = tmp_path / "room"
    expected = restored(store, room)
    shutil.rmtree(room)
    found = trees.look_up(store)
    for _step in killed_at_every_step(lambda: trees.restore_found(store, found, trees.targets(room))):
        whole_units(room, expected)
        outcome = restored_by(store, room, "the-next")
        assert not outcome.reasons
        left = {path: data for path, data in trees.read(room).items() if ".cachemgr-" not in path}
        assert left == expected
        shutil.rmtree(room)


def test_a_restore_beside_live_units_killed_anywhere_never_touches_them(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    live = tmp_path / "live"
    kept = trees.triton_kernel(live / "triton", "one")
    trees.triton_kernel(live / "triton", "two")
    trees.publish_trees(store, trees.live(live))
    found = trees.look_up(store)
    room = tmp_path / "room"
    for _step in killed_at_every_step(lambda: trees.restore_found(store, found, trees.targets(room))):
        shutil.rmtree(room, ignore_errors=True)
        trees.triton_kernel(room / "triton", "one")
        before = trees.state(room / "triton" / kept)
        trees.restore_found(store, found, trees.targets(room))
        after = trees.state(room / "triton" / kept)
        assert {path: row[1:] for path, row in after.items()} == {path: row[1:] for path, row in before.items()}


def test_a_removal_killed_anywhere_leaves_the_artifact_whole_or_gone(tmp_path: Path) -> None:
    live = trees.build(tmp_path / "live", trees.FEW)
    pristine = tmp_path / "pristine"
    trees.publish_trees(LocalStore(pristine), live)
    place = tmp_path / "store"

    def removal() -> None:
        store = LocalStore(place)
        remove(store, plan_removal(store, keys(store), now=NOW + OLD))

    shutil.copytree(pristine, place)
    for _step in killed_at_every_step(removal):
        store = LocalStore(place)
        if visible(store):
            restored(store, tmp_path / "after")
            shutil.rmtree(tmp_path / "after")
        hints = [entry.name for entry in store.scan("entries/")]
        assert not hints or visible(store), "a hint outlived its manifest"
        removal()
        assert [entry.name for prefix in ("artifacts/", "layers/", "entries/") for entry in store.scan(prefix)] == []
        shutil.rmtree(place)
        shutil.copytree(pristine, place)


def test_a_removal_that_was_planned_too_early_leaves_young_layers(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    trees.publish_trees(store, trees.build(tmp_path / "live", trees.FEW))
    plan = plan_removal(store, keys(store), now=time.time())
    assert plan.later > 0
    remove(store, plan)
    assert visible(store) == []
    assert list(store.scan(layout.LAYERS)), "somebody may be about to refer to them"


def test_a_record_killed_anywhere_is_whole_or_absent(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    for _step in killed_at_every_step(lambda: record(LocalStore(tmp_path / "store"), LAUNCH)):
        assert list(launches(store)) in ([], [LAUNCH])
