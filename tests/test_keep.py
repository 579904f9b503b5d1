"""`prune`, `pin` and `unpin` as people type them: plans, questions, exit codes and JSON."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from cachemgr.process import descendants
from cachemgr.prune.merging import FEWEST
from cachemgr.store import layout
from tests.machines import Fleet, Machine
from tests.test_merging import Place


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Fleet(tmp_path).machine("one")


def compiled(machine: Machine, *graphs: str) -> list[str]:
    """Keys of artifacts, one a graph."""
    program = str(machine.root.parent / "engine.py")
    return [machine.run(sys.executable, program, graph)["key"] for graph in graphs]


def settle(machine: Machine, days: float = 2) -> None:
    """Let the bytes of the store look old."""
    for path in machine.store.rglob("*.zst"):
        os.utime(path, (time.time() - days * 86400,) * 2)


def test_a_prune_shows_its_plan_asks_and_does_it(machine: Machine) -> None:
    first, second = compiled(machine, "one", "two")
    settle(machine)
    shown = machine.cachemgr("prune", "--keep-last", "1", "--dry-run")
    assert "would free" in shown.stderr
    plan = machine.json("prune", "--max-size", "0", "--dry-run")["plan"]
    assert {gone["key"] for gone in plan["artifacts"]} == {first, second}
    assert len(machine.json("ls")["artifacts"]) == 2
    refused = machine.cachemgr("prune", "--max-size", "0", code=2)
    assert "needs a yes" in refused.stderr
    document = machine.json("prune", "--max-size", "0", "-y")
    assert document["done"]["bytes"] == plan["bytes"] > 0
    assert machine.json("ls")["artifacts"] == []
    assert not list((machine.store / "layers").rglob("*.zst"))
    nothing = machine.cachemgr("prune", "--max-size", "0")
    assert "nothing to prune" in nothing.stderr


def test_pins_keep_what_a_prune_would_take_and_say_why(machine: Machine) -> None:
    first, second = compiled(machine, "one", "two")
    settle(machine)
    said = machine.cachemgr("pin", first[:12], "--keep-days", "3", "--reason", "release 7").stderr
    assert said.startswith(f"pinned {first}: pinned by ")
    assert said.rstrip().endswith(": release 7")
    done = machine.cachemgr("prune", "--max-size", "1kB", "-y")
    assert "release 7" in done.stderr
    assert "note: " in done.stderr
    assert "and what is left is kept" in done.stderr
    assert machine.cachemgr("ls", "-q").stdout.split() == [first]
    assert machine.json("ls")["artifacts"][0]["pinned"] is True
    for words in (["-y"], ["--dry-run"], ["-y", "--json"]):
        refused = machine.cachemgr("rm", first, *words, code=11)
        assert "release 7" in refused.stderr
        assert f"hint: cachemgr unpin {first}" in refused.stderr
        assert refused.stdout == ""
    assert machine.cachemgr("ls", "-q").stdout.split() == [first]
    assert machine.json("unpin", first)["unpinned"][first]["reason"] == "release 7"
    assert "is not pinned" in machine.cachemgr("unpin", first, code=1).stderr
    assert machine.cachemgr("prune", "--max-size", "1kB", "-y").returncode == 0
    assert machine.cachemgr("ls", "-q").stdout == ""
    assert second not in machine.cachemgr("pin", second, code=10).stdout


def test_many_captures_of_an_artifact_become_one(machine: Machine) -> None:
    machine.make_places()
    place = Place(machine.store.parent, machine.home / ".cache" / "cachemgr")
    key = place.grow(FEWEST)
    settle(machine)
    shown = machine.cachemgr("prune", "--dry-run")
    assert f"{FEWEST} captures (" in shown.stdout
    assert f"and what merging {FEWEST} captures into 1 frees" in shown.stderr
    assert machine.json("ls")["artifacts"][0]["captures"] == FEWEST
    done = machine.json("prune", "-y")["done"]
    assert [each["key"] for each in done["merges"]] == [key]
    assert done["bytes"] > 0
    assert machine.json("ls")["artifacts"][0]["captures"] == 1
    assert "nothing to prune" in machine.cachemgr("prune").stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--keep-days", "99999999999"), "is not in the range 1<=x<=99999"),
        (("--reason", "r" * 1001), "too long"),
        (("--reason", "a\nline"), "cannot be printed"),
    ],
)
def test_a_pin_that_nobody_could_read_is_refused(machine: Machine, words: tuple[str, ...], said: str) -> None:
    assert said in machine.cachemgr("pin", "k1:ab", *words, code=2).stderr


def test_a_pin_of_what_is_gone_can_be_lifted(machine: Machine) -> None:
    (key,) = compiled(machine, "one")
    machine.cachemgr("pin", key)
    shutil.rmtree(machine.store / "artifacts")
    assert "pins an artifact that is not there; `cachemgr unpin` lifts it" in machine.cachemgr("verify").stdout
    assert f"unpinned {key}" in machine.cachemgr("unpin", key[:12]).stderr
    assert list(machine.store.glob("pins/*")) == []
    assert "no artifact" in machine.cachemgr("unpin", key, code=10).stderr


def test_a_dry_run_of_a_pin_pins_nothing(machine: Machine) -> None:
    (key,) = compiled(machine, "one")
    assert machine.json("pin", "--dry-run", key)["pinned"] == [key]
    assert machine.json("ls")["artifacts"][0]["pinned"] is False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-size", "much"), "`much` is no size"),
        (("--unused-for", "long"), "`long` is no age"),
        (("--unused-for", "30"), "`30` is no age: it needs a unit"),
        (("--keep-last", "0"), "0 is not in the range"),
        (("--env", "."), "--env goes with --old-versions"),
        (("--live", "--env", "."), "--live goes without"),
    ],
)
def test_what_cannot_be_meant_is_said(machine: Machine, words: tuple[str, ...], said: str) -> None:
    machine.make_places()
    assert said in machine.cachemgr("prune", *words, code=2).stderr


@pytest.mark.slow  # several commands: 3 s
def test_versions_that_are_not_installed_any_more_go(tmp_path: Path) -> None:
    from tests.machines import install_stand_in

    machine = Fleet(tmp_path).machine("one")
    (old,) = compiled(machine, "one")
    settle(machine)
    # PATH must lead to a Python that has the torch of these machines.
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python").symlink_to(sys.executable)
    path = f"{tools}:{os.environ['PATH']}"
    assert machine.json("prune", "--old-versions", "--dry-run", PATH=path)["plan"]["artifacts"] == []
    newer = install_stand_in(tmp_path, torch="2.14.0+cpu")
    (gone,) = machine.json("prune", "--old-versions", "-y", PATH=path, PYTHONPATH=newer["PYTHONPATH"])["done"][
        "artifacts"
    ]
    assert gone["key"] == old
    assert "is not installed here any more" in gone["why"]
    nowhere = machine.cachemgr("prune", "--old-versions", code=2, PATH=str(tmp_path / "empty"))
    assert "nobody knows which versions are old" in nowhere.stderr


def test_a_launch_that_runs_keeps_its_artifact(machine: Machine) -> None:
    (key,) = compiled(machine, "one")
    settle(machine)
    program = str(machine.root.parent / "engine.py")
    running = machine.start("run", "--", sys.executable, program, "one", "sleep=60")
    try:
        assert running.stdout is not None
        while "sleeping" not in running.stdout.readline():
            pass
        plan = machine.json("prune", "--max-size", "0", "-y")["plan"]
        assert plan["artifacts"] == []
        assert "in use by launch" in plan["kept"][0]["kept"]
        assert list((machine.store / layout.LEASES).rglob("*.json"))
    finally:
        for pid in (running.pid, *descendants(running.pid)):
            os.kill(pid, signal.SIGKILL)
        running.communicate()
    done = machine.json("prune", "--max-size", "0", "-y")["done"]
    assert [gone["key"] for gone in done["artifacts"]] == [key]
    assert any("is gone" in scrap["why"] for scrap in done["scraps"]), "the lease of a launch that was killed"
