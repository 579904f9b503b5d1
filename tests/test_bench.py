"""`cachemgr bench`: starts of all kinds side by side, in places of their own."""

import json
import signal
import sys
from pathlib import Path

import pytest

from cachemgr.bench.chart import bars, svg
from cachemgr.bench.starts import Row
from cachemgr.bench.tool import engine_words, measure
from cachemgr.cli import output
from cachemgr.cli.bench import _print_rows
from cachemgr.errors import UsageError
from cachemgr.factors.vllm.flags import Flags
from cachemgr.process import start_time
from tests.engines import ENGINE, Engines, install_vllm
from tests.machines import Fleet


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines.install(tmp_path_factory.mktemp("engines"))


def test_a_program_cold_again_and_restored(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    machine = fleet.machine("lab")
    told = machine.json("bench", "--", *fleet.command("one", "two"))
    assert [(row["kind"], row["verdict"], row["added"]) for row in told["starts"]] == [
        ("cold", "cold", 2),
        ("second", "used", 0),
        ("restored", "used", 0),
    ]
    assert not machine.store.exists(), "its store is its own"
    assert not [path for path in machine.tmp.iterdir() if path.name.startswith("cachemgr-bench")]


def test_an_engine_also_near_with_its_phases(engines: Engines) -> None:
    machine = engines.machine("lab")
    done = machine.cachemgr("bench", "--json", "--chart", "chart.svg", "--", *engines.serve())
    rows = json.loads(done.stdout)["starts"]
    assert [(row["variant"], row["kind"]) for row in rows] == [
        ("as given", "cold"),
        ("as given", "second"),
        ("as given", "restored"),
        ("near", "near"),
    ]
    assert [row["verdict"] for row in rows] == ["cold", "used", "used", "partly used"]
    assert all(row["phases"]["init_engine"] == 1.5 for row in rows)
    assert all(0 < row["ready"] <= row["seconds"] for row in rows)
    assert done.stderr.startswith("4 starts; how long that takes is known when the first has ended")
    assert "the other 3 will take about" in done.stderr
    drawn = (machine.root / "chart.svg").read_text()
    assert drawn.count("<rect") == 4


@pytest.mark.parametrize("shell", [False, True])
def test_settings_that_come_to_the_same_are_marked_and_started_once(engines: Engines, *, shell: bool) -> None:
    machine, words = engines.machine("planner"), engines.serve()
    words = ("sh", "-c", f"exec {' '.join(words)}") if shell else words
    done = machine.cachemgr("bench", "--dry-run", "--json", "--vary", "optimization-level", "--", *words)
    told = json.loads(done.stdout)
    same = {each["name"]: each["same_as"] for each in told["variants"]}
    assert same == {"as given": None, "-O0": None, "-O1": None, "-O2": "as given", "-O3": "as given", "near": None}
    assert "-O3 comes to the same key as as given" in done.stderr
    assert len(told["plan"]) == 3 + 2 + 2 + 1


def test_how_long_it_will_take_is_known_from_what_was_seen(engines: Engines) -> None:
    machine = engines.machine("known", CACHEMGR_STORE=str(engines.directory / "known-store"))
    machine.run(*engines.serve())
    assert "4 starts, about " in machine.cachemgr("bench", "--dry-run", "--", *engines.serve()).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--vary", "optimization-level", "--", "true"), "this command starts no engine of it"),
        (("--", "vllm", "bench", "startup"), "measures cold starts"),
        (("--startup", "--", "true"), "--startup measures what `vllm serve`"),
        (("--chart", "absent/bars.svg", "--", sys.executable, "-c", ""), "no such directory"),
        (("--chart", ".", "--", sys.executable, "-c", ""), "it is a directory"),
        (("--vary", "everything", "--", "true"), "is not one of"),
    ],
)
def test_what_cannot_be_meant(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = Fleet(tmp_path).machine("lab").cachemgr("bench", *words, code=2)
    assert said in done.stderr


def test_a_start_that_fails_is_a_row_that_says_so(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    done = fleet.machine("lab").cachemgr("bench", "--", *fleet.command("one", "exit=3"), code=1)
    assert done.stdout.count("failed") == 3


def test_the_tool_gets_the_flags_of_the_engine_alone() -> None:
    values = {"tensor-parallel-size": "2", "port": "80", "enforce-eager": "true", "enable-prefix-caching": "false"}
    flags = Flags("serve", values, model="/m")
    words = ["--model=/m", "--tensor-parallel-size=2", "--enforce-eager", "--no-enable-prefix-caching"]
    assert engine_words(flags) == words


TOOL = """
import os, subprocess, sys, time
if sys.argv[1:3] == ["bench", "startup"]:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    engines = [
        subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=apart)
        for apart in (False, True)
    ]
    for engine in engines:
        engine.stdout.readline()
    print("tool", os.getpid(), *(engine.pid for engine in engines), flush=True)
    time.sleep(600)
"""
"""vLLM's tool with engines below it that do not end when they are told to, one of them in a session of its own."""


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    directory = tmp_path_factory.mktemp("tooled")
    return Engines(directory, install_vllm(directory, "0.32.0", f"#!{sys.executable}\n{TOOL}{ENGINE}"))


def are_gone(said: str) -> bool:
    """Whether the processes of the tool are: `said` is its line."""
    return not any(start_time(int(number)) for number in said.split()[1:])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_is_told_to_end_ends_the_tool_and_all_that_it_started(tooled: Engines, number: signal.Signals) -> None:
    machine = tooled.machine(number.name)
    process = machine.start("bench", "--startup", "--", *tooled.serve())
    assert process.stderr is not None
    line = ""
    while not line.startswith("tool"):
        line = process.stderr.readline()
        assert line
    process.send_signal(number)
    out, _errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert are_gone(line)
    assert not [path for path in machine.tmp.iterdir() if path.name.startswith("cachemgr-bench")]


def test_a_tool_that_takes_too_long_is_ended_with_its_engines(
    tooled: Engines, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    machine = tooled.machine("slow")
    with pytest.raises(UsageError, match="was not done after 3 s"):
        measure(tooled.serve(), machine.environ, machine.root, tmp_path, seconds=3.0)
    said = capfd.readouterr().out
    assert are_gone(said)


def row(name: str, took: float, *, failed: bool = False) -> Row:
    return Row(name, "cold", int(failed), failed, took, None, {}, "cold", 0, None, None, None, ())


@pytest.mark.parametrize("room", [60, 80, 200])
def test_rows_are_printed_whatever_room_there_is(
    room: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal without room for a bar is no reason to think about it for ever."""
    monkeypatch.setattr(output, "_room", lambda: room)
    phases = dict.fromkeys(("restore", "model_load", "compile", "capture", "init_engine", "ready"), 12.5)
    full = Row("as given", "restored", 0, False, 99.0, 47.1, phases, "used", 0, 1.25, 1_000_000, None, ())
    _print_rows([full, row("c", 5.0)])
    head, first, _second = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "SETTING",
        "START",
        "RESTORE",
        "LOAD",
        "COMPILE",
        "CAPTURE",
        "INIT",
        "READY",
        "TOOK",
        "ADDED",
        "GRAPHS",
        "KV",
        "TOKENS",
    ]
    assert "1.25 GiB  1,000,000" in first
    assert ("█" * 40 in first) is (room == 200)
    _print_rows([row("c", 5.0)])
    assert capsys.readouterr().out.splitlines()[0].split() == ["SETTING", "START", "TOOK", "ADDED"]


def test_bars_are_as_long_as_starts_took() -> None:
    rows = [row("a <b>", 10.0), row("c", 5.0), row("d", 99.0, failed=True)]
    assert [len(bar) for bar in bars(rows)] == [40, 20, 0]
    drawn = svg("t & t", rows)
    assert "a &lt;b&gt;" in drawn
    assert "t &amp; t" in drawn
    assert drawn.count("<rect") == 2
