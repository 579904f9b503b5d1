"""End to end with a real torch.compile on the CPU: what one machine compiled makes another machine's start warm."""

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.machines import Machine, install_stand_in

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch in this environment"),
]

PROGRAM = str(Path(__file__).parent / "programs" / "several_graphs.py")
SIZE = "48"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of compilers that write down how they are called before they do it."""
    directory = tmp_path_factory.mktemp("tools")
    for name in ("g++", "gcc", "c++", "cc", "clang++", "ld", "as"):
        real = shutil.which(name)
        if real is None:
            continue
        wrapper = directory / name
        wrapper.write_text(f'#!/bin/sh\necho {name} "$@" >>"{directory}/$CALLS"\nexec {real} "$@"\n')
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    return directory


class Lab:
    """Machines that share a store and the watched compilers."""

    def __init__(self, root: Path, tools: Path) -> None:
        self.root, self.tools = root, tools

    def machine(self, name: str, **variables: str) -> Machine:
        path = f"{self.tools}:{os.environ['PATH']}"
        return Machine(self.root / name, self.root / "store", {"PATH": path, "CALLS": f"calls-{name}", **variables})

    def compiles(self, name: str) -> list[str]:
        """Compile and link commands that ran on a machine (asking a compiler what it is does not count)."""
        log = self.tools / f"calls-{name}"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if len(line.split()) > 1 and line.split()[1] not in ("--version", "-v")]


def command(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, PROGRAM, *arguments)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, tools: Path) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"), tools)


@pytest.fixture(scope="module")
def cold(lab: Lab) -> dict[str, Any]:
    """One cold start whose capture the other tests start from."""
    return lab.machine("cold").run(*command(SIZE))


def test_a_cold_start_compiles_and_is_captured(lab: Lab, cold: dict[str, Any]) -> None:
    assert (cold["result"], cold["verdict"]) == ("none", "cold")
    assert cold["published"] is not None
    assert cold["added"]["inductor"] > 20
    assert lab.compiles("cold"), "the watched compilers were used, so that their silence means something later"


def test_a_start_in_a_new_home_root_and_tmpdir_compiles_nothing(lab: Lab, cold: dict[str, Any]) -> None:
    warm = lab.machine("warm").run(*command(SIZE))
    assert (warm["result"], warm["verdict"]) == ("exact", "used")
    assert warm["added"] == {"inductor": 0, "triton": 0, "cute_dsl": 0}
    assert lab.compiles("warm") == []
    assert warm["stdout"] == cold["stdout"]
    assert warm["restored_files"] == cold["added"]["inductor"]
    left = [path for path in lab.machine("warm").tmp.rglob("*") if path.is_file()]
    assert left == [], "nothing was compiled outside of the pinned directories"


def test_another_argument_is_near_and_reuses_what_is_equal(lab: Lab, cold: dict[str, Any]) -> None:
    near = lab.machine("near").run(*command("40"))
    assert (near["result"], near["verdict"]) == ("near", "partly used")
    assert [(each["factor"], each["role"]) for each in near["differs"]] == [("program.args", "match")]
    plain = lab.machine("plain")
    alone = subprocess.run(command("40"), env=plain.environ, capture_output=True, text=True, check=True)
    assert near["stdout"] == alone.stdout, "the same answers as without any cache"
    again = lab.machine("near-again").run(*command("40"))
    assert (again["result"], again["verdict"], again["added"]["inductor"]) == ("exact", "used", 0)
    assert lab.compiles("near-again") == []


def test_a_compile_variable_is_near_and_gives_the_same_answers(lab: Lab, cold: dict[str, Any]) -> None:
    report = lab.machine("variable", TORCHINDUCTOR_COMPREHENSIVE_PADDING="0").run(*command(SIZE))
    assert report["result"] == "near"
    assert [(each["factor"], each["role"]) for each in report["differs"]] == [
        ("env.TORCHINDUCTOR_COMPREHENSIVE_PADDING", "match")
    ]
    assert report["stdout"] == cold["stdout"]


def test_a_launch_of_the_same_key_that_compiles_nothing_is_inert(lab: Lab, cold: dict[str, Any]) -> None:
    options = ("--ignore-arg", "--do-nothing")
    report = lab.machine("inert").run(*command(SIZE, "--do-nothing"), options=options)
    assert (report["result"], report["key"], report["verdict"]) == ("exact", cold["key"], "inert")


def test_another_torch_version_string_matches_nothing(lab: Lab, cold: dict[str, Any], tmp_path: Path) -> None:
    other = install_stand_in(tmp_path, torch="2.13.0+other")
    answer = lab.machine("version", **other).json("lookup", "--", *command(SIZE), code=1)
    assert answer["result"] == "none"
    assert "torch" in {each["factor"] for each in answer["differs"] if each["role"] == "guard"}


def test_another_cpu_feature_matches_nothing(lab: Lab, cold: dict[str, Any], tmp_path: Path) -> None:
    text = Path("/proc/cpuinfo").read_text()
    feature = next(word for word in ("avx2", "sse4_2", "asimd") if word in text)
    weaker = tmp_path / "cpuinfo"
    weaker.write_text(text.replace(f" {feature} ", " "))
    unshare = ["unshare", "--mount", "sh", "-c", f'mount --bind "{weaker}" /proc/cpuinfo && exec "$0" "$@"']
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us show a program another /proc/cpuinfo")
    words = [*unshare, sys.executable, "-m", "cachemgr", "lookup", "--", *command(SIZE)]
    machine = lab.machine("feature")
    answer = subprocess.run(words, env=machine.environ, cwd=machine.root, capture_output=True, text=True, check=False)
    assert answer.returncode == 1, answer.stderr
    assert "result   none" in answer.stdout
    assert "cpu.features" in answer.stdout


def test_two_cold_starts_at_once_leave_an_artifact_that_makes_every_start_warm(lab: Lab, tools: Path) -> None:
    """Two compiles of one key differ in several file names; their captures must serve together."""
    fleet = Lab(lab.root / "race", tools)
    racing = [fleet.machine(name).start("run", "--", *command("24")) for name in ("left", "right")]
    for process in racing:
        _out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
    for name in ("third", "fourth"):
        later = fleet.machine(f"race-{name}").run(*command("24"))
        assert (later["result"], later["verdict"], later["added"]["inductor"]) == ("exact", "used", 0)
        assert fleet.compiles(f"race-{name}") == []


def test_the_artifact_can_be_looked_at(lab: Lab, cold: dict[str, Any]) -> None:
    machine = lab.machine("look")
    listed = machine.json("ls")["artifacts"]
    ours = next(artifact for artifact in listed if artifact["key"] == cold["key"])
    assert ours["engine"] == "torch"
    assert ours["model"] == "several_graphs.py"
    assert ours["cold_seconds"] == cold["phases"]["run"]
    shown = machine.cachemgr("show", cold["key"][:12], "--files").stdout
    assert "torch.code" in shown
    assert ".so" in shown
