"""kill -9 in each phase of a prune: what is visible is whole, and the next one ends where an undisturbed one would."""

import shutil
from pathlib import Path

import msgspec
import pytest

from cachemgr.prune.limits import Limits
from cachemgr.prune.merging import FEWEST
from cachemgr.store import layout, pins
from cachemgr.store.captures import captures
from cachemgr.store.local import LocalStore, scratch_of
from cachemgr.store.pins import Pin
from tests import trees
from tests.kills import killed_at_every_step
from tests.pruning import DAY, add, factors_of, key_of, pruned, settle
from tests.stores import contents
from tests.test_crash import visible
from tests.test_merging import Place

pytestmark = pytest.mark.slow


def filled(place: Path, live: Path) -> LocalStore:
    """Artifacts that share layers, go, stay, are pinned, are damaged, and scraps of every kind."""
    store = LocalStore(place)
    add(store, live, "old", kernels=["same"], age=60)
    add(store, live, "young", kernels=["same"], age=5)
    add(store, live, "pinned", age=70)
    damaged = add(store, live, "damaged", age=5)
    pins.put(store, key_of("pinned"), Pin("me", "2026-01-01T00:00:00Z"))
    pins.put(store, key_of("old"), Pin("me", "2026-01-01T00:00:00Z", until="2026-01-01T00:00:00Z"))
    (manifest,) = store.scan(layout.artifact_prefix(damaged))
    (place / manifest.name).write_bytes(b"torn")
    store.put(layout.entry_name("5e" * 32, key_of("gone")), b"")
    (scratch_of(place) / "unfinished").write_bytes(b"half")
    settle(place)
    return store


def test_a_prune_killed_anywhere_leaves_only_whole_artifacts_and_the_next_one_finishes(tmp_path: Path) -> None:
    pristine, place = tmp_path / "pristine", tmp_path / "store"
    filled(pristine, tmp_path / "live")
    limits = Limits(older_than=30 * DAY)

    def fresh() -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(pristine, place)

    fresh()
    pruned(LocalStore(place), limits)
    expected = contents(LocalStore(place))
    assert len([name for name in expected if name.startswith(layout.ARTIFACTS)]) == 2
    fresh()
    for _step in killed_at_every_step(lambda: pruned(LocalStore(place), limits)):
        store = LocalStore(place)
        (place / next(iter(_damaged(place)), "none")).unlink(missing_ok=True)
        visible(store)
        assert trees.look_up(store, factors_of("young")).result == "exact"
        pruned(store, limits)
        assert contents(store) == expected
        assert not (scratch_of(place) / "unfinished").exists()
        fresh()


def _damaged(place: Path) -> list[Path]:
    return [path.relative_to(place) for path in (place / "artifacts").rglob("*.zst") if path.read_bytes() == b"torn"]


def test_a_pin_killed_anywhere_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    key, old, new = key_of("a"), Pin("me", "2026-01-01T00:00:00Z", "old"), Pin("me", "2026-01-01T00:00:00Z", "new")
    store = LocalStore(tmp_path / "store")
    pins.put(store, key, old)
    for _step in killed_at_every_step(lambda: pins.put(LocalStore(tmp_path / "store"), key, new)):
        assert pins.pin_of(store, key) in (old, new)
        pins.put(store, key, old)
        assert pins.pins(store) == {key: old}
        assert len(list(store.scan(layout.PINS))) == 1, "what a killed one left goes with the next"


def test_an_unpin_killed_anywhere_leaves_no_older_pin_that_counts(tmp_path: Path) -> None:
    key, old, new = key_of("a"), Pin("me", "2026-01-01T00:00:00Z", "old"), Pin("me", "2026-01-02T00:00:00Z", "new")
    store = LocalStore(tmp_path / "store")

    def fresh() -> None:
        for pin in (old, new):
            store.put(layout.pin_name(key, pin.since), msgspec.json.encode(pin))

    fresh()
    for _step in killed_at_every_step(lambda: pins.lift(LocalStore(tmp_path / "store"), key)):
        assert pins.pin_of(store, key) in (new, None)
        fresh()


def test_a_merge_killed_anywhere_loses_nothing_and_the_next_one_finishes(tmp_path: Path) -> None:
    pristine = tmp_path / "pristine"
    place = Place(tmp_path)
    key = place.grow(FEWEST)
    shutil.copytree(place.root, pristine)
    before = place.restored("a", "before")

    def fresh() -> None:
        shutil.rmtree(place.root)
        shutil.copytree(pristine, place.root)

    for step in killed_at_every_step(place.prune):
        visible(place.store)
        assert trees.look_up(place.store, factors_of("a")).result == "exact"
        settle(place.root)
        place.prune()
        assert len(captures(place.store, key, [])) == 1
        assert place.restored("a", f"after-{step}") == before
        assert not list(place.store.scan(layout.LAYERS))[1:], "the layers of the old ones went"
        fresh()
