"""A real Ray cluster of two nodes with node-local disks only: each restores and publishes its own ranks.

Nodes are mount namespaces of this machine with raylets of their own. All paths are equal on both, as in a cluster of
equal images, and lead to different disks. The engine is the stand-in, with the copying rules of vLLM's two executors.
"""

import ast
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tests.machines import launches_in
from tests.plugged import Plugged
from tests.pods import can_run_pods, install_cachemgr

ROOT = Path(__file__).parent.parent
PYTHON = os.environ.get("CACHEMGR_RAY_PYTHON", "")
SOURCES = os.environ.get("CACHEMGR_VLLM_SOURCES", "")

pytestmark = pytest.mark.ray
needs_ray = pytest.mark.skipif(not (PYTHON and can_run_pods()), reason="needs CACHEMGR_RAY_PYTHON and mount namespaces")


class Node:
    """One node: a mount namespace that has its own disk at `place`, and a raylet in it."""

    def __init__(self, directory: Path, name: str, place: Path, environ: dict[str, str], raylet: list[str]) -> None:
        self.disk = directory / name
        (self.disk / "home").mkdir(parents=True)
        self._place, self.environ = place, environ
        self._log = (directory / f"{name}.log").open("wb")
        self._raylet = self._start([PYTHON, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats",
                                    "--object-store-memory=80000000", "--num-cpus=2", *raylet])  # fmt: skip

    def _start(self, command: list[str], **more: Any) -> "subprocess.Popen[bytes]":
        script = 'set -e; mount --make-rprivate /; mount --bind "$1" "$2"; shift 2; exec "$@"'
        words = ["unshare", "--mount", "sh", "-c", script, "sh", str(self.disk), str(self._place), *command]
        streams = {"stdout": self._log, "stderr": subprocess.STDOUT, **more}
        return subprocess.Popen(words, env=self.environ, cwd="/", start_new_session=True, **streams)

    def run(
        self, command: list[str], variables: dict[str, str], output: BinaryIO | None = None
    ) -> "subprocess.Popen[bytes]":
        """A driver on this node, in the namespace of its raylet; what it prints goes to `output`, or to the log."""
        words = ["nsenter", f"--target={self._raylet.pid}", "--mount", *command]
        environ = {**self.environ, **variables}
        return subprocess.Popen(words, env=environ, cwd="/", stdout=output or self._log, stderr=self._log)

    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def records(self) -> list[dict[str, Any]]:
        """Launch records in the store of this node, the oldest first."""
        return launches_in(self.disk / "store")

    def wait_for_records(self, count: int) -> None:
        """A launch is recorded when its workers are ready and at rest, or when they have ended."""
        _wait(lambda: len(self.records()) == count, self)

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for group in {self._raylet.pid, *_session_of(self._raylet.pid)}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(group, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._raylet.wait(3)
        self._log.close()


def _session_of(leader: int) -> list[int]:
    """Processes that a raylet started: they stay in its session."""
    done = subprocess.run(["ps", "-o", "pid=", "-s", str(leader)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()]


class Cluster:
    """Two nodes. On the first the plugin is on by a variable, on the second by a file only."""

    def __init__(self, directory: Path) -> None:
        self.directory, place = directory, directory / "disk"
        place.mkdir()
        fleet = Plugged.install(directory / "fleet", python=PYTHON)
        install_cachemgr(fleet.site)
        self.model, self.fleet = fleet.model, fleet
        tool = directory / "cachemgr"
        tool.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m cachemgr "$@"\n')
        tool.chmod(0o755)
        environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{fleet.site}:{ROOT}",
            "HOME": str(place / "home"),
            "TMPDIR": str(directory / "tmp"),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        (directory / "tmp").mkdir()
        port = _free_port()
        address = f"127.0.0.1:{port}"
        self.variables = {"CACHEMGR_STORE": str(place / "store"), "CACHEMGR_BIN": str(tool), "RAY_ADDRESS": address}
        head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={directory / 'ray'}",
                "--node-ip-address=127.0.0.1"]  # fmt: skip
        self.first = Node(directory, "first", place, environ, head)
        _wait(lambda: "--block" in self.first.log() or "Ray runtime started" in self.first.log(), self.first)
        self.second = Node(directory, "second", place, environ, [f"--address={address}", "--node-ip-address=127.0.0.2"])
        _wait(lambda: "Ray runtime started" in self.second.log(), self.second)
        # Of these nodes each has room for two ranks, so that a rank is where it was at the next start.
        config = self.second.disk / "home" / ".config" / "cachemgr" / "config.toml"
        config.parent.mkdir(parents=True)
        config.write_text(f'enable = true\nbin = "{tool}"\nstore = "{place / "store"}"\n')

    def start(self, *, v2: bool) -> "subprocess.Popen[bytes]":
        """An offline engine of four ranks on the first node."""
        program = self.directory / f"program-{v2}.py"
        program.write_text(
            "import sys, time\nfrom vllm import LLM\n\nif __name__ == '__main__':\n"
            f"    engine = LLM(model={self.model!r}, max_model_len={64 + v2}, tensor_parallel_size=4,\n"
            "                 distributed_executor_backend='ray')\n"
            "    print('ANSWER', engine.generate(), flush=True)\n    time.sleep(15)\n"
        )
        variables = {**self.variables, "CACHEMGR_ENABLE": "1", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": str(int(v2))}
        return self.first.run([PYTHON, str(program)], variables)

    def forget_live_caches(self) -> None:
        for node in (self.first, self.second):
            shutil.rmtree(node.disk / "home" / ".cache" / "vllm")

    def stop(self) -> None:
        self.second.stop()
        self.first.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(condition: Any, node: Node) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, node.log()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = Path(tmp_path_factory.mktemp("r", numbered=True))
    made = Cluster(directory)
    yield made
    made.stop()


def ranks_on(node: Node) -> set[str]:
    return {path.name for path in node.disk.glob("home/.cache/vllm/torch_compile_cache/torch_aot_compile/*/rank_*")}


@needs_ray
@pytest.mark.parametrize("v2", [True, False], ids=["all variables travel", "some variables travel"])
def test_each_node_restores_and_publishes_its_own_ranks(cluster: Cluster, v2: bool) -> None:
    nodes = (cluster.first, cluster.second)
    before = [len(node.records()) for node in nodes]
    for start in (1, 2):
        process = cluster.start(v2=v2)
        assert process.wait(180) == 0, cluster.first.log()
        for node, known in zip(nodes, before, strict=True):
            node.wait_for_records(known + start)
        assert [ranks_on(node) for node in nodes] == [{"rank_0_0", "rank_1_0"}, {"rank_2_0", "rank_3_0"}]
        cluster.forget_live_caches()
    here, there = (node.records()[known:] for node, known in zip(nodes, before, strict=True))
    for first, second in (here, there):
        assert first["verdict"] != "used"
        assert first["published"] is not None
        assert (second["result"], second["verdict"], second["published"]) == ("exact", "used", None)
    assert {each["key"] for each in (*here, *there)} == {here[0]["key"]}, "equal guards, equal keys"
    assert all(each["launch"].startswith(other["launch"]) for each, other in zip(there, here, strict=True))


@pytest.mark.skipif(not SOURCES, reason="needs vLLM's sources in CACHEMGR_VLLM_SOURCES")
@pytest.mark.parametrize("version", sorted(os.listdir(SOURCES)) if SOURCES else [])
def test_the_copying_rules_are_those_of_vllm(version: str) -> None:
    stand_in = _sets(ROOT / "tests/stand_in/vllm/v1/executor/ray_executor.py")
    real = _sets(Path(SOURCES) / version / "vllm/ray/ray_env.py")
    assert stand_in["PREFIXES"] - {"FLASH_ATTENTION_"} == real["DEFAULT_ENV_VAR_PREFIXES"] - {"FLASH_ATTENTION_"}
    assert real["DEFAULT_EXTRA_ENV_VARS"] <= stand_in["NAMES"]


def _sets(path: Path) -> dict[str, set[str]]:
    """The sets of texts that a module assigns at its top."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        if isinstance(target, ast.Name) and isinstance(getattr(node, "value", None), ast.Set):
            found[target.id] = set(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    return found
