"""Entries that an engine must not find: set aside, put back, and never lost without need."""

from pathlib import Path

import pytest

from cachemgr.domains.domain import Target
from cachemgr.domains.vllm import AOT, AUTOTUNE, TORCH_COMPILE
from cachemgr.origins import Shared

NAME = "a" * 64
UNIT = f"{AOT}/{NAME}"


def target_in(root: Path) -> Target:
    return Target(TORCH_COMPILE, str(root / "torch_compile_cache"), ours=False)


def shared_in(root: Path, launch: str, sight: str = "three") -> Shared:
    return Shared(str(root), [target_in(root)], sight, launch)


def model_in(root: Path) -> Path:
    return root / "torch_compile_cache" / UNIT / "rank_0_0" / "model"


def plant(root: Path, data: bytes) -> None:
    path = model_in(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def set_all_aside(shared: Shared) -> None:
    strange = shared.strange()
    assert strange
    assert shared.set_aside(strange) == []


def kept(root: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((root / "cachemgr/.aside").rglob("model"))]


def test_an_entry_of_unknown_origin_stays_when_a_launch_vouches_for_its_own_of_that_name(tmp_path: Path) -> None:
    plant(tmp_path, b"of nobody")
    shared = shared_in(tmp_path, "one")
    set_all_aside(shared)
    plant(tmp_path, b"ours")
    shared.vouch({"torch_compile": {UNIT}})
    assert shared.put_back() == {"torch_compile": frozenset()}
    assert kept(tmp_path) == [b"of nobody"], "it may be the only copy"


def test_an_entry_of_known_origin_goes_when_its_place_is_taken(tmp_path: Path) -> None:
    plant(tmp_path, b"for three")
    shared_in(tmp_path, "one").vouch({"torch_compile": {UNIT}})
    shared = shared_in(tmp_path, "two", sight="five")
    set_all_aside(shared)
    plant(tmp_path, b"for five")
    shared.vouch({"torch_compile": {UNIT}})
    shared.put_back()
    assert kept(tmp_path) == []
    assert not (tmp_path / "cachemgr/.aside").exists()
    assert shared.strange() == []


def test_what_comes_back_is_still_vouched_for(tmp_path: Path) -> None:
    plant(tmp_path, b"for three")
    three = shared_in(tmp_path, "one")
    three.vouch({"torch_compile": {UNIT}})
    five = shared_in(tmp_path, "two", sight="five")
    set_all_aside(five)
    assert five.put_back() == {"torch_compile": frozenset({UNIT})}
    assert three.strange() == []


def test_launches_that_are_killed_again_and_again_leave_one_copy_aside(tmp_path: Path) -> None:
    for attempt in range(4):
        plant(tmp_path, b"attempt %d" % attempt)
        shared = shared_in(tmp_path, f"launch-{attempt}")
        shared.recover(set())
        set_all_aside(shared)
    plant(tmp_path, b"the last")
    shared_in(tmp_path, "next").recover(set())
    assert kept(tmp_path) == [b"attempt 0"]


def test_the_empty_directory_of_an_engine_that_died_early_is_no_entry(tmp_path: Path) -> None:
    plant(tmp_path, b"of nobody")
    shared = shared_in(tmp_path, "one")
    set_all_aside(shared)
    (tmp_path / "torch_compile_cache" / UNIT / "inductor_cache").mkdir(parents=True)
    assert shared.put_back() == {"torch_compile": frozenset({UNIT})}
    assert model_in(tmp_path).read_bytes() == b"of nobody"


def test_a_directory_that_the_user_named_is_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "mine"
    config = elsewhere / NAME / "autotune_configs.json"
    config.parent.mkdir(parents=True)
    config.write_text("{}")
    shared = Shared(str(tmp_path / "root"), [Target(AUTOTUNE, str(elsewhere), ours=False)], "three", "one")
    assert shared.strange() == []


@pytest.mark.parametrize("sight", ["", "three"])
def test_without_a_note_everything_is_strange(tmp_path: Path, sight: str) -> None:
    plant(tmp_path, b"of nobody")
    assert [unit for _target, unit in shared_in(tmp_path, "one", sight).strange()] == [UNIT]
