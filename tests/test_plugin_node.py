"""Workers on another machine than the front process, without Ray (`test_ray.py` has a real cluster), and faults there.

Another machine is another mount namespace with a home of its own.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machines import Machine, launches_in, wait_for
from tests.plugged import Plugged
from tests.pods import can_run_pods

SECRET = "hunter2"
PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.skipif(not can_run_pods(), reason="this user cannot make mount namespaces")


class Launch:
    """A front process on one machine, and workers on another."""

    def __init__(self, fleet: Plugged, directory: Path) -> None:
        self._fleet, self._config = fleet, directory / "config.pickle"
        self.here, self.there = fleet.machine("here"), fleet.machine("there")
        self.here = Machine(self.here.root, directory / "store-here", self.here.variables)
        self.there = Machine(self.there.root, directory / "store-there", self.there.variables)
        self._running: list[subprocess.Popen[str]] = []

    def front(self) -> "subprocess.Popen[str]":
        self._config.unlink(missing_ok=True)
        words = [self._fleet.python, str(PROGRAMS / "node_front.py"), self._fleet.model, str(self._config)]
        words += ["--api-key", SECRET]
        process = self._start(self.here, words)
        wait_for(self._config.exists)
        left = self._config.read_bytes()
        assert b"_cachemgr_launch" in left
        assert SECRET.encode() not in left
        return process

    def workers(self, *ranks: int, **more: str) -> "list[subprocess.Popen[str]]":
        """Workers on the other machine, all at once."""
        program = [self._fleet.python, str(PROGRAMS / "node_worker.py"), str(self._config)]
        inside = ["nsenter", f"--target={self._namespace().pid}", "--mount"]
        return [self._start(self.there, [*inside, *program, str(rank)], **more) for rank in ranks]

    def _namespace(self) -> "subprocess.Popen[str]":
        """Somebody who keeps a mount namespace for us."""
        keeper = self._start(self.there, ["unshare", "--mount", "sh", "-c", "echo in; exec cat"])
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "in\n"
        return keeper

    def _start(self, machine: Machine, words: list[str], **more: str) -> "subprocess.Popen[str]":
        machine.make_places()
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            words, env={**machine.environ, **more}, cwd=machine.root, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        self._running.append(process)
        return process

    def records(self) -> list[dict[str, Any]]:
        """Launch records on the other machine."""
        return launches_in(self.there.store)

    def stop(self) -> None:
        for process in self._running:
            process.kill()
            process.communicate()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    made = Launch(Plugged.install(tmp_path / "fleet"), tmp_path)
    yield made
    made.stop()


def answer(worker: "subprocess.Popen[str]") -> str:
    """What a worker says once it is warm; the rest of its life is up to us."""
    assert worker.stdout is not None
    return next(line for line in worker.stdout if line.startswith("ANSWER"))


def end(*processes: "subprocess.Popen[str]") -> str:
    """End processes and what attends them; what they said on standard error."""
    return "".join(process.communicate(timeout=120)[1] for process in processes)


@pytest.mark.slow
def test_workers_of_one_node_share_one_attendant_that_knows_the_launch(launch: Launch) -> None:
    front = launch.front()
    workers = launch.workers(2, 3)
    assert [answer(worker) for worker in workers] == ["ANSWER graph of None\n"] * 2
    wait_for(lambda: len(launch.records()) == 1)  # it is written when both have warmed up and are at rest
    (record,) = launch.records()
    assert record["published"] is not None
    said = end(*workers)
    assert said.count("no artifact yet") == 1, said
    assert f"no artifact yet for {record['key'][:12]}" in end(front)
    (artifact,) = launch.there.json("ls")["artifacts"]
    assert (artifact["key"], artifact["complete"]) == (record["key"], False), "it has two of four ranks"


def test_a_node_where_the_plugin_is_off_is_left_alone(launch: Launch) -> None:
    launch.front()
    (worker,) = launch.workers(2, CACHEMGR_ENABLE="0")
    assert answer(worker)
    assert "cachemgr" not in end(worker)
    assert not launch.there.store.exists()
    assert not list(launch.there.home.glob(".cache/cachemgr*"))


@pytest.mark.parametrize("script", ["exit 1", "exec sleep 1000", "echo '{}'"])
def test_workers_go_on_without_an_attendant(launch: Launch, tmp_path: Path, script: str) -> None:
    tool = tmp_path / "cachemgr"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    launch.front()
    workers = launch.workers(2, 3, CACHEMGR_BIN=str(tool), CACHEMGR_DEADLINE="2")
    assert [answer(worker) for worker in workers] == ["ANSWER graph of None\n"] * 2
    assert "gave no answer" in end(*workers)
    assert launch.records() == []


def test_a_node_whose_cachemgr_is_not_there_says_so(launch: Launch) -> None:
    launch.front()
    (worker,) = launch.workers(2, CACHEMGR_BIN="/nowhere/cachemgr", CACHEMGR_DEADLINE="2")
    assert answer(worker)
    assert "`cachemgr attend` cannot be started" in end(worker)
