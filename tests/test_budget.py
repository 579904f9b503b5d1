"""The byte budget: it counts as `du` does, remembers what did not change, and nothing of ours outgrows it."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from cachemgr import places
from cachemgr.budget import Budget
from tests.conftest import NOW_NS, MakeDisk
from tests.engines import Engines
from tests.machines import Fleet

LONG_AGO = NOW_NS - 3600 * 10**9


def du(*places: Path) -> int:
    done = subprocess.run(["du", "-s", "-B1", "-c", *map(str, places)], capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1].split()[0])


def age(place: Path) -> None:
    """Let every directory look old, so that it may be remembered."""
    for directory, _folders, _files in os.walk(place):
        os.utime(directory, ns=(LONG_AGO, LONG_AGO))


class Count:
    """A budget over some places, and the directories that it listed since it was last asked."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._remembered = tmp_path / "usage"
        self._listed: list[str] = []
        scandir = os.scandir

        def listing(path: str) -> "os._ScandirIterator[str]":
            self._listed.append(Path(path).name)
            return scandir(path)

        monkeypatch.setattr(os, "scandir", listing)

    def __call__(self, *places: Path) -> tuple[int, list[str]]:
        self._listed.clear()
        used = Budget(10**9, map(str, places), self._remembered, lambda: NOW_NS).used()
        return used, sorted(self._listed)


@pytest.fixture
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(tmp_path, monkeypatch)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Directories a, b and b/c with files of several sizes."""
    root = tmp_path / "tree"
    for at, name in enumerate(("a/1", "a/2", "b/1", "b/c/1", "b/c/2")):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * (5000 * at + 1))
    age(root)
    return root


def test_it_counts_as_du_does(tree: Path, count: Count) -> None:
    (tree / "link").symlink_to("/etc")
    assert du(tree) <= count(tree)[0] < du(tree) + 100


def test_only_what_changed_is_read_again(tree: Path, count: Count) -> None:
    assert len(count(tree)[1]) == 4
    assert count(tree) == (count(tree)[0], [])
    (tree / "b/c/3").write_bytes(b"x" * 100_000)
    os.utime(tree / "b/c", ns=(LONG_AGO + 1, LONG_AGO + 1))
    used, listed = count(tree)
    assert len(listed) == 1
    assert du(tree) <= used < du(tree) + 100
    (tree / "b/c/3").unlink()
    (tree / "b/c/1").unlink()
    assert du(tree) <= count(tree)[0] < du(tree) + 100
    (tree / "b").rename(tree / "z")
    assert du(tree) <= count(tree)[0] < du(tree) + 100


def test_a_directory_that_changed_just_now_is_read_again(tree: Path, count: Count) -> None:
    os.utime(tree / "a", ns=(NOW_NS - 10**9, NOW_NS - 10**9))
    first = count(tree)[0]
    (tree / "a/3").write_bytes(b"x" * 100_000)
    os.utime(tree / "a", ns=(NOW_NS - 10**9, NOW_NS - 10**9))
    used, listed = count(tree)
    assert used >= first + 100_000
    assert len(listed) == 1


def test_a_torn_memory_is_none(tree: Path, count: Count, tmp_path: Path) -> None:
    used = count(tree)[0]
    for file in (tmp_path / "usage").iterdir():
        file.write_bytes(file.read_bytes()[:-7])
    assert count(tree)[0] == used


def test_places_in_each_other_count_once_and_missing_ones_not_at_all(tree: Path, count: Count, tmp_path: Path) -> None:
    used = count(tree)[0]
    (tmp_path / "tree2").mkdir()
    assert count(tree, tree / "b", tree, tree / "b/c", tmp_path / "missing")[0] == used
    assert count(tree, tmp_path / "tree2")[0] == used + du(tmp_path / "tree2")


def test_network_file_systems_do_not_count(tree: Path, count: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    used = count(tree)[0]
    monkeypatch.setattr(places, "network_file_system", lambda place: "nfs" if str(place).endswith("/b") else None)
    assert count(tree / "a", tree / "b")[0] == count(tree / "a")[0] < used


def test_what_is_mounted_read_only_does_not_count(tree: Path, count: Count, small_disk: MakeDisk) -> None:
    seed = small_disk(1 << 20)
    (seed / "file").write_bytes(b"x" * 10_000)
    assert count(tree, seed)[0] > count(tree)[0] + 10_000
    subprocess.run(["mount", "-o", "remount,ro", str(seed)], check=True)
    assert count(tree, seed)[0] == count(tree)[0]


def test_no_limit_is_not_counted(tree: Path, tmp_path: Path) -> None:
    assert Budget(0, [str(tree)], tmp_path / "usage", time.time_ns).left() is None
    assert not (tmp_path / "usage").exists()


@pytest.mark.slow
def test_publishing_stops_short_of_the_budget_and_says_so(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    machine = fleet.machine("one", CACHEMGR_BUDGET="400kB", NOISE="1")
    ours = (machine.store, machine.home / ".cache/cachemgr", machine.home / ".cache/vllm")
    told = []
    for at in range(3):
        told.append(machine.run(*fleet.command(*graphs_of(at))))
        assert told[-1]["published"] is None or du(*ours) <= 400_000
    assert told[0]["published"] is not None
    assert told[-1]["published"] is None
    (said,) = [reason for reason in told[-1]["reasons"] if reason.startswith("nothing published")]
    assert said == "nothing published: the budget of 400 kB leaves 0 B, too little (CACHEMGR_BUDGET)"
    assert f"not captured: {said.partition(': ')[2]}" in told[-1]["stderr"]
    assert machine.json("doctor")["healthy"]
    (found,) = [each for each in machine.json("doctor")["findings"] if each["about"] == "budget"]
    assert found["severity"] == "warning"
    assert not any((machine.store / "tmp").glob("*/*")), "nothing half-written stays"
    roomy = machine.run(*fleet.command(*graphs_of(2)), CACHEMGR_BUDGET="0")
    assert roomy["published"] is not None


def graphs_of(at: int) -> list[str]:
    return [f"graph-{at}-{number}" for number in range(20)]


@pytest.mark.slow
def test_a_restore_takes_what_fits_and_the_engine_starts_anyhow(tmp_path: Path) -> None:
    engines = Engines.install(tmp_path)
    command = engines.serve("--max-model-len=64")
    assert engines.machine("one").run(*command)["published"] is not None
    held = du(tmp_path / "store")
    small = engines.machine("two").run(*command, CACHEMGR_BUDGET=str(held + 60_000), CACHEMGR_PUBLISH="never")
    assert small["result"] == "exact"
    left_out = [reason for reason in small["reasons"] if "not restored: the budget of" in reason]
    assert left_out
    tiny = engines.machine("three").run(*command, CACHEMGR_BUDGET="1kB", CACHEMGR_PUBLISH="never")
    assert (tiny["restored_files"], tiny["verdict"]) == (0, "cold")
    full = engines.machine("four").run(*command, CACHEMGR_BUDGET=str(held + 10_000_000))
    assert full["verdict"] == "used"
    assert small["restored_files"] < full["restored_files"]


@pytest.mark.slow
def test_the_budget_holds_where_the_file_system_shows_more(tmp_path: Path, small_disk: MakeDisk) -> None:
    """A volume with a size limit: the file system has 100 MB, of which 500 kB are ours."""
    engines = Engines.install(tmp_path)
    volume = small_disk(100_000_000)
    places = {
        "CACHEMGR_HOME": str(volume / "home"),
        "CACHEMGR_STORE": str(volume / "store"),
        "VLLM_CACHE_ROOT": str(volume / "vllm"),
        "CACHEMGR_BUDGET": "500kB",
    }
    machine = engines.machine("one", **places)
    told = [machine.run(*engines.serve(f"--max-model-len={length}")) for length in range(64, 64 * 5, 64)]
    assert all(each["exit_code"] == 0 for each in told)
    assert du(volume) <= 500_000
