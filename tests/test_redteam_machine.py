"""Hostile surroundings: the working directory, the home, the live root and the stores of a launch belong to somebody
else, or were prepared by him. Real processes; the engine is a stand-in.

`test_redteam.py` has what a store may hold, `test_trust.py` what a signature may be.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from cachemgr import digest
from cachemgr.observe import STAGE_PREFIX
from cachemgr.store import records
from cachemgr.store.local import LocalStore
from tests.machines import Fleet, Machine

pytestmark = pytest.mark.slow

STRANGER = 4321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """A fleet with one capture in its store, which nobody has signed."""
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    cold = made.machine("one").run(*made.command("f"))
    assert cold["published"]
    return made


@pytest.fixture
def machine(fleet: Fleet, tmp_path: Path) -> Machine:
    """A new machine with a store of its own in its home."""
    found = Machine(tmp_path / "machine", tmp_path / "unused", fleet.variables)
    found.make_places()
    return found


def on(machine: Machine, fleet: Fleet, **more: str) -> dict[str, Any]:
    """A launch without CACHEMGR_STORE: the store is where the home says."""
    return replace(machine, variables={**machine.variables, "CACHEMGR_STORE": "", **more}).run(*fleet.command("f"))


def planted(fleet: Fleet, place: Path) -> Path:
    """The fleet's store, copied to where somebody hopes that it is read."""
    shutil.copytree(fleet.directory / "store", place)
    return place


def given_away(*paths: Path) -> None:
    for path in paths:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def test_settings_in_the_working_directory_have_no_say(machine: Machine, fleet: Fleet) -> None:
    store = planted(fleet, machine.root / "planted")
    text = f'store = "{store}"\ntrust = "off"\nseed = ["{store}"]\n'
    for name in (
        "cachemgr.toml",
        ".cachemgr.toml",
        "config.toml",
        ".config/cachemgr/config.toml",
        "cachemgr/config.toml",
    ):
        (machine.root / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.root / name).write_text(text)
    (machine.root / ".env").write_text(f"CACHEMGR_STORE={store}\nCACHEMGR_TRUST=off\n")
    (machine.root / "pyproject.toml").write_text(f"[tool.cachemgr]\n{text}")
    report = on(machine, fleet)
    assert (report["result"], report["restored_files"], report["where"]) == ("none", 0, None)


def test_a_seed_that_nobody_signed_is_not_read(machine: Machine, fleet: Fleet) -> None:
    report = on(machine, fleet, CACHEMGR_SEED=str(planted(fleet, machine.root / "seed")))
    assert (report["result"], report["verdict"]) == ("none", "cold")
    assert "no trusted key; set CACHEMGR_TRUSTED_KEYS, or, accepting" in report["stderr"]


def test_a_home_that_everybody_can_write_is_not_used_and_neither_is_the_store_in_it(
    machine: Machine, fleet: Fleet
) -> None:
    home = machine.root / "shared"
    planted(fleet, home / "store")
    home.chmod(0o777)
    (home / "store").chmod(0o777)
    report = on(machine, fleet, CACHEMGR_HOME=str(home))
    assert (report["result"], report["restored_files"]) == ("none", 0)
    assert f"{home} can be written by everybody, so {home}/cachemgr-{os.geteuid()} is used" in report["stderr"]
    again = on(machine, fleet, CACHEMGR_HOME=str(home))
    assert again["result"] == "exact", "what is in the private directory serves"


@as_root
def test_a_home_that_somebody_else_made_is_not_used(machine: Machine, fleet: Fleet) -> None:
    home = machine.root / "squatted"
    planted(fleet, home / "store")
    given_away(home, home / "store")
    report = on(machine, fleet, CACHEMGR_HOME=str(home))
    assert (report["result"], report["restored_files"]) == ("none", 0)
    assert f"{home} belongs to user {STRANGER}" in report["stderr"]


@as_root
def test_a_spare_directory_that_somebody_else_made_is_not_used(machine: Machine, fleet: Fleet) -> None:
    spare = machine.tmp / f"cachemgr-{os.geteuid()}"
    planted(fleet, spare / "home" / "store")
    given_away(spare)
    report = on(machine, fleet, CACHEMGR_HOME="/proc/none", VLLM_CACHE_ROOT="/proc/none")
    assert report["restored_files"] == 0
    assert sorted(os.listdir(spare)) == ["home"]


@as_root
def test_a_live_directory_that_somebody_else_made_is_left_alone(machine: Machine, fleet: Fleet) -> None:
    root = machine.root / "root"
    (root / "cachemgr").mkdir(parents=True)
    given_away(root / "cachemgr")
    report = machine.run(*fleet.command("f"), CACHEMGR_STORE=str(fleet.directory / "store"), VLLM_CACHE_ROOT=str(root))
    assert (report["result"], report["verdict"]) == ("exact", "used")
    assert f"{root}/cachemgr belongs to user {STRANGER}" in report["stderr"]
    assert list((root / "cachemgr").rglob("*")) == []


@as_root
def test_a_live_directory_of_this_key_that_leads_to_somebody_elses_is_left_alone(
    machine: Machine, fleet: Fleet
) -> None:
    store = str(fleet.directory / "store")
    key = machine.cachemgr("ls", "-q", CACHEMGR_STORE=store).stdout.strip()
    root, theirs = machine.root / "root", machine.root / "theirs"
    (root / "cachemgr").mkdir(parents=True)
    theirs.mkdir()
    own = root / "cachemgr" / key.replace(":", "-")
    own.symlink_to(theirs)
    given_away(own, theirs)
    report = machine.run(*fleet.command("f"), CACHEMGR_STORE=store, VLLM_CACHE_ROOT=str(root))
    assert report["verdict"] == "used"
    assert f"{own} belongs to user {STRANGER}" in report["stderr"]
    assert list(theirs.iterdir()) == []


def test_under_require_a_root_that_others_can_write_is_not_used(machine: Machine, fleet: Fleet) -> None:
    root = machine.root / "root"
    root.mkdir()
    root.chmod(0o777)
    cold = on(machine, fleet, CACHEMGR_TRUST="require", VLLM_CACHE_ROOT=str(root))
    assert f"{root} is not used: {root} can be written by everybody" in cold["stderr"]
    assert list(root.iterdir()) == []
    warm = on(machine, fleet, CACHEMGR_TRUST="require", VLLM_CACHE_ROOT=str(root))
    assert (warm["result"], warm["verdict"]) == ("exact", "used"), "what this machine made serves, elsewhere"


def test_under_require_a_directory_that_others_can_write_gets_nothing(machine: Machine, fleet: Fleet) -> None:
    on(machine, fleet, CACHEMGR_TRUST="require")
    place = machine.root / "open"
    place.mkdir()
    place.chmod(0o777)
    for policy, said, restored in (("require", "inductor not restored", 0), ("warn", "inductor is open to others", 1)):
        report = on(machine, fleet, CACHEMGR_TRUST=policy, TORCHINDUCTOR_CACHE_DIR=str(place), CACHEMGR_PUBLISH="never")
        assert f"{said}: {place} can be written by everybody" in report["stderr"]
        assert report["restored_files"] == restored
        shutil.rmtree(place)
        place.mkdir()
        place.chmod(0o777)


def test_pipes_in_the_place_of_our_own_files_keep_nobody_waiting(machine: Machine, fleet: Fleet) -> None:
    store = str(fleet.directory / "store")
    root = machine.root / "root"
    first = machine.run(*fleet.command("f"), CACHEMGR_STORE=store, VLLM_CACHE_ROOT=str(root))
    own = root / "cachemgr" / first["key"].replace(":", "-")
    (own / f"{STAGE_PREFIX}held").mkdir(exist_ok=True)
    os.mkfifo(own / f"{STAGE_PREFIX}held" / "other.json")
    near = ("f", "g")
    machine.run(*fleet.command(*near), CACHEMGR_STORE=store, VLLM_CACHE_ROOT=str(root), CACHEMGR_READ_ONLY="1")
    home = machine.home / ".cache" / "cachemgr"
    (heads,) = (home / "heads").iterdir()
    heads.unlink()
    (home / "stat").mkdir(exist_ok=True)
    for state in (heads, home / "stat" / f"{own.name}.msgpack"):
        os.mkfifo(state)
    report = machine.run(*fleet.command(*near), CACHEMGR_STORE=store, VLLM_CACHE_ROOT=str(root), CACHEMGR_READ_ONLY="1")
    assert report["result"] == "near"
    again = machine.run(*fleet.command("f"), CACHEMGR_STORE=store, VLLM_CACHE_ROOT=str(root), CACHEMGR_READ_ONLY="1")
    assert again["verdict"] == "used"


PAINT = "\x1b]0;owned\x07\x1b[2J\x1b[31m\u202egnol\nerror: second line"


def _painted_manifest(store: Path) -> None:
    (manifest,) = (store / "artifacts").rglob("*.json.zst")
    value = json.loads(zstandard.ZstdDecompressor().decompress(manifest.read_bytes()))
    for name in ("model", "device", "engine_version", "created", "launch"):
        value[name] = f"{value[name]}{PAINT}"
    value["provenance"] = {**value["provenance"], "host": PAINT, "command": [PAINT]}
    data = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    manifest.unlink()
    manifest.with_name(f"{digest.hex_of(digest.of_bytes(data))}.json.zst").write_bytes(zstandard.compress(data))
    apart = store / "quarantine" / digest.hex_of(digest.of_bytes(data))
    apart.mkdir(parents=True)
    (apart / "elsewhere.json").write_bytes(msgspec.json.encode({"reason": PAINT, "since": PAINT}))


def _painted_field(store: Path) -> None:
    (manifest,) = (store / "artifacts").rglob("*.json.zst")
    data = zstandard.ZstdDecompressor().decompress(manifest.read_bytes())
    data = data[:-1] + msgspec.json.encode({PAINT: 1})[1:-1].join([b",", b"}"])
    manifest.unlink()
    manifest.with_name(f"{digest.hex_of(digest.of_bytes(data))}.json.zst").write_bytes(zstandard.compress(data))


def _painted_launches(store: Path) -> None:
    found = list(records.launches(LocalStore(store)))
    assert found
    for file in (store / "launches").rglob("*.*"):
        file.unlink()  # rolled up or not
    for launch in found:
        painted = msgspec.structs.replace(launch, host=PAINT, model=PAINT, reasons=(PAINT,), errors={PAINT: 1})
        records.record(LocalStore(store), painted)


@pytest.mark.parametrize("paint", [_painted_manifest, _painted_field, _painted_launches])
def test_what_a_store_says_does_not_reach_a_terminal(
    machine: Machine, fleet: Fleet, paint: Callable[[Path], None]
) -> None:
    store = planted(fleet, machine.root / "painted")
    key = machine.cachemgr("ls", "-q", CACHEMGR_STORE=str(store)).stdout.strip()
    paint(store)
    said = ""
    for words in (
        ("ls",),
        ("show", key, "--files"),
        ("show", key, "--json"),
        ("lookup", "--", *fleet.command("f")),
        ("size",),
        ("rm", key, "-y"),
    ):
        done = machine.cachemgr(*words, code=None, CACHEMGR_STORE=str(store))
        assert "Traceback" not in done.stderr
        said += done.stdout + done.stderr
    assert "owned" in said or paint is _painted_launches
    assert [line for line in said.splitlines() if not line.isprintable()] == []
    assert not any(line.startswith("error: second") for line in said.splitlines())
