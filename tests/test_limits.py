"""A host that gives no more threads, or no more processes: the command runs all the same, and what went wrong is said.

`REFUSED` says which requests of a process of ours the kernel refuses, by their number (`tests.preload`).
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import plugged, preload
from tests.machines import Fleet, Machine
from tests.plugged import Plugged

pytestmark = pytest.mark.slow

MOST = 99
LENGTH = "--max-model-len=4096"
Which = Callable[[int], dict[str, str]]


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def only_the(number: int) -> dict[str, str]:
    return {"REFUSED": f"{number}-{number}"}


def all_from_the(number: int) -> dict[str, str]:
    return {"REFUSED": f"{number}-{MOST}"}


def started(machine: Machine, words: tuple[str, ...]) -> str:
    """What a start says where threads are refused: its output and its exit code are those of the command."""
    report = machine.run(*words, code=3)
    said: str = report["stderr"]
    assert report["stdout"].split("machine code of ")[1:] == ["f.............\n", "g.............\n"], said
    assert report["exit_code"] == 3
    assert "Traceback" not in said
    assert "differs in \n" not in said
    return said


@pytest.mark.parametrize("which", [only_the, all_from_the])
def test_whichever_thread_is_refused_the_command_runs(fleet: Fleet, which: Which) -> None:
    refusing = preload.misbehaving("no threads", fleet.directory)
    words = fleet.command("f", "g", "exit=3")
    cold = started(fleet.machine("cold", **refusing, **which(0)), words)
    assert "no further thread can be started" in cold
    fleet.machine("healthy").run(*words, code=3)
    said = [started(fleet.machine(f"warm-{number}", **refusing, **which(number)), words) for number in range(12)]
    assert any("no further thread can be started" in each for each in said)
    after = fleet.machine("after").run(*words, code=3)
    assert (after["verdict"], after["added"]["inductor"], after["errors"]) == ("used", 0, {})


@pytest.mark.parametrize("number", [0, 3, 6, 9, 12, 15, 18])
@pytest.mark.parametrize("wrapped", [True, False])
def test_whichever_thread_is_refused_the_engine_answers(tmp_path: Path, number: int, wrapped: bool) -> None:
    fleet = Plugged.install(tmp_path)
    answer = plugged.run(fleet.machine("one"), fleet.serve(LENGTH)).answer
    refusing = preload.misbehaving("no threads", tmp_path)
    machine = fleet.machine("two", **refusing, **all_from_the(number))
    if wrapped:
        done = machine.run(*fleet.serve(LENGTH))
        said, stdout = done["stderr"], done["stdout"]
    else:
        run = plugged.run(machine, fleet.serve(LENGTH))
        said, stdout = run.stderr, run.stdout
    assert answer in stdout
    assert "Traceback" not in said


@pytest.mark.parametrize("which", [only_the, all_from_the])
@pytest.mark.parametrize("number", [0, 1])
def test_what_is_done_side_by_side_is_done_by_whoever_is_there(fleet: Fleet, which: Which, number: int) -> None:
    machine = fleet.machine("one")
    for graph in ("f", "g", "h"):
        machine.run(*fleet.command(graph))
    expected = machine.json("verify")
    refusing = preload.misbehaving("no threads", fleet.directory)
    assert fleet.machine("one", **refusing, **which(number)).json("verify") == expected


def test_without_a_process_beside_it_the_command_gets_ours(fleet: Fleet) -> None:
    refusing = preload.misbehaving("no processes", fleet.directory)
    machine = fleet.machine("one", **refusing, **all_from_the(0))
    done = machine.cachemgr("run", "--", *fleet.command("f", "exit=3"), code=3)
    assert "machine code of f" in done.stdout
    assert "no process" in done.stderr
    assert "the command gets this one, without us" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_strict_launch_without_a_process_for_its_command_fails(fleet: Fleet) -> None:
    refusing = preload.misbehaving("no processes", fleet.directory)
    machine = fleet.machine("one", **refusing, **all_from_the(0))
    done = machine.cachemgr("run", "--strict", "--", *fleet.command("f"), code=125)
    assert done.stdout == ""
    assert "no process" in done.stderr
