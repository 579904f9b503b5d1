"""Levels: a look-up goes through the local store and the seeds behind it, and a launch restores from where it found."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from cachemgr.errors import NotFoundError, StoreError
from cachemgr.key import Relations, derive
from cachemgr.level import Level
from cachemgr.lookup import find
from cachemgr.store import Store, layout
from cachemgr.store.local import LocalStore
from tests.machines import Fleet, Machine
from tests.stores import Corrupting, MemoryStore, Recording, Unreadable, contents
from tests.trees import FACTORS, build, changed, draft, publish_trees

T = TypeVar("T")

KEY = derive(FACTORS)


@pytest.fixture
def seed(tmp_path: Path) -> Store:
    """A store with an artifact."""
    store = LocalStore(tmp_path / "seed")
    publish_trees(store, build(tmp_path / "live"))
    return store


def levels(local: Store, *seeds: Store) -> list[Level]:
    return [Level("local", local, "off"), *(Level("seed", seed, "off") for seed in seeds)]


def test_what_only_a_seed_has_is_found_there(store: Store, seed: Store) -> None:
    found = find(levels(store, seed), KEY, FACTORS, Relations())
    assert (found.result, found.artifact, found.where, found.store) == ("exact", KEY, "seed", seed)
    assert contents(store) == {}


def test_a_seed_is_not_asked_for_what_the_local_store_has(tmp_path: Path, store: Store, seed: Store) -> None:
    publish_trees(store, build(tmp_path / "live"))
    recording = Recording(seed)
    found = find(levels(store, recording), KEY, FACTORS, Relations())
    assert (found.result, found.where, found.store) == ("exact", "local", store)
    assert recording.calls == []


def test_the_nearest_of_all_levels_is_taken_and_the_first_level_of_equals(tmp_path: Path, seed: Store) -> None:
    far, near, equal = (MemoryStore(tmp_path / name) for name in ("far", "near", "equal"))
    other = changed("vllm.max_model_len", "16")
    more = changed("speculative.tokens", "5")
    trees = build(tmp_path / "live")
    publish_trees(far, trees, draft(more))
    publish_trees(near, trees, draft(other))
    publish_trees(equal, trees, draft(other))
    found = find(levels(far, near, equal), KEY, FACTORS, Relations())
    assert (found.result, found.artifact, found.where, found.store) == ("near", derive(other), "seed", near)
    assert find(levels(near, far, equal), KEY, FACTORS, Relations()).store is near


def test_a_level_that_fails_is_passed_over_by_those_who_say_so(store: Store, seed: Store) -> None:
    failing = Unreadable(seed, "artifacts/")
    failures: list[str] = []

    def ask(level: Level, step: Callable[[], T], /) -> T | None:
        try:
            return step()
        except StoreError as error:
            failures.append(f"{level}: {error}")
            return None

    found = find(levels(store, failing, seed), KEY, FACTORS, Relations(), ask=ask)
    assert (found.result, found.store) == ("exact", seed)
    assert [failure.split(":")[0] for failure in failures] == [f"seed {seed}"]


def test_a_seed_that_is_not_there_is_said(tmp_path: Path, store: Store) -> None:
    with pytest.raises(NotFoundError, match="there is no store in seed"):
        find(levels(store, LocalStore(tmp_path / "absent")), KEY, FACTORS, Relations())


def test_a_seed_that_fails_midway_counts_for_nothing(store: Store, seed: Store) -> None:
    found = find(levels(store, Corrupting(seed, "artifacts/")), KEY, FACTORS, Relations())
    assert found.result == "none"
    assert len(found.damaged) == 1


@pytest.fixture
def pod(tmp_path: Path) -> tuple[Fleet, Machine]:
    """A machine with a store of its own and the fleet's store as its seed."""
    fleet = Fleet(tmp_path)
    fleet.machine("builder").run(*fleet.command("f", "g"))
    variables = {**fleet.variables, "CACHEMGR_SEED": str(tmp_path / "store"), "CACHEMGR_TRUST": "off"}
    return fleet, Machine(tmp_path / "pod", tmp_path / "own", variables)


def test_a_start_is_warm_from_a_seed_and_writes_nothing_to_it(pod: tuple[Fleet, Machine]) -> None:
    fleet, machine = pod
    before = contents(LocalStore(fleet.directory / "store"))
    warm = machine.run(*fleet.command("f", "g"))
    assert (warm["result"], warm["verdict"], warm["where"], warm["published"]) == ("exact", "used", "seed", None)
    assert "from the seed" in warm["stderr"]
    more = machine.run(*fleet.command("f", "h"))
    assert (more["result"], more["where"], more["verdict"]) == ("near", "seed", "partly used")
    assert machine.run(*fleet.command("f", "h"))["where"] == "local"
    assert contents(LocalStore(fleet.directory / "store")) == before
    assert machine.json("lookup", "--", *fleet.command("f", "g"))["where"] == "seed"


def test_values_that_are_sealed_are_equal_in_every_store(pod: tuple[Fleet, Machine]) -> None:
    fleet, machine = pod
    value = "one that nobody knows"
    fleet.machine("other").run(*fleet.command("f"), TORCHINDUCTOR_SITE_SHAPE=value)
    warm = machine.run(*fleet.command("f"), TORCHINDUCTOR_SITE_SHAPE=value)
    assert (warm["result"], warm["where"]) == ("exact", "seed")


def test_a_damaged_seed_is_not_tried_again_and_its_artifact_is_made_anew(pod: tuple[Fleet, Machine]) -> None:
    fleet, machine = pod
    (layer,) = [Path(each) for each in (fleet.directory / "store" / "layers").rglob("*.zst")]
    layer.write_bytes(b"x" * layer.stat().st_size)
    hurt = machine.run(*fleet.command("f", "g"))
    assert (hurt["verdict"], hurt["published"] is not None) == ("cold", True)
    again = machine.run(*fleet.command("f", "g"))
    assert (again["result"], again["where"], again["errors"]) == ("exact", "local", {})
    assert layer.exists()


def test_an_absent_seed_costs_nothing_but_a_line(pod: tuple[Fleet, Machine], tmp_path: Path) -> None:
    fleet, machine = pod
    seeds = f"{tmp_path}/absent:{fleet.directory}/store"
    warm = machine.run(*fleet.command("f", "g"), CACHEMGR_SEED=seeds)
    assert (warm["result"], warm["where"]) == ("exact", "seed")
    assert "there is no store in seed" in warm["stderr"]
    assert warm["errors"] == {"looking up in the seed": 1}
    assert layout.read_layout(LocalStore(machine.store)) is not None
