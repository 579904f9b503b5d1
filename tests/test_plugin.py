"""Starts of a stand-in vLLM (`tests/plugged.py`) with our plugin and no wrapper: warm, and never the worse for it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.machines import Machine, launches_in, wait_for
from tests.plugged import Plugged, Run, finish, ours, run, start
from tests.preload import misbehaving

pytestmark = pytest.mark.slow

LENGTH = "--max-model-len=4096"
SIZES = "max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=256"
SERVED_SIZES = (LENGTH, "--max-num-seqs=8", "--max-num-batched-tokens=256")


@pytest.fixture
def fleet(tmp_path: Path) -> Plugged:
    return Plugged.install(tmp_path)


def launches(fleet: Plugged) -> list[dict[str, Any]]:
    return launches_in(fleet.directory / "store")


# A plain start is warm.


def test_a_plain_server_is_warm_on_a_second_machine_and_says_two_lines(fleet: Plugged) -> None:
    cold = run(fleet.machine("one"), fleet.serve(LENGTH))
    warm = run(fleet.machine("two"), fleet.serve(LENGTH))
    assert cold.told == ("none", "cold", 6)
    assert warm.told == ("exact", "used", 0)
    assert (cold.entries, warm.entries) == (["compiled"], ["loaded"])
    assert warm.answer == cold.answer
    assert [len(done.said) for done in (cold, warm)] == [2, 2]
    assert "cachemgr" not in warm.stdout
    assert not (fleet.machine("two").home / ".triton").exists(), "the pins came before the first kernel"
    assert warm.report is not None
    assert (warm.report["exit_code"], warm.report["observed"]["processes"]) == (0, 2)
    assert warm.report["observed"]["counters"]["num_aot_artifacts_loaded"] == 1
    assert len(launches(fleet)) == 2


def test_of_two_that_start_cold_at_once_one_compiles_and_the_other_waits_where_it_looks(fleet: Plugged) -> None:
    asked = {"CACHEMGR_SINGLE_FLIGHT": "90", "COMPILE_SECONDS": "4", "CACHEMGR_DEADLINE": "20"}
    machines = [fleet.machine(name) for name in ("one", "two")]
    for machine in machines:
        machine.make_places()
    begun = [start(machine, fleet.serve(LENGTH), **asked) for machine in machines]
    done = [finish(machine, process) for machine, process in zip(machines, begun, strict=True)]
    assert [each.code for each in done] == [0, 0], done
    assert sorted(each.entries[0] for each in done) == ["compiled", "loaded"], [each.stderr for each in done]
    assert len({each.answer for each in done}) == 1
    alone = run(fleet.machine("three"), fleet.serve(), COMPILE_SECONDS="0", CACHEMGR_SINGLE_FLIGHT="90")
    assert alone.entries == ["compiled"], "nobody compiles that, so nobody is waited for"


def test_the_key_is_that_of_a_wrapper_and_both_together_are_one_launch(fleet: Plugged) -> None:
    plain = run(fleet.machine("one"), fleet.serve(LENGTH))
    assert plain.report is not None
    machine = fleet.machine("two")
    assert machine.json("lookup", "--", *fleet.serve(LENGTH))["key"] == plain.report["key"]
    wrapped = machine.run(*fleet.serve(LENGTH))
    assert (wrapped["key"], wrapped["result"], wrapped["verdict"]) == (plain.report["key"], "exact", "used")
    assert wrapped["observed"]["processes"] == 2, "the hooks spoke to the wrapper"
    assert [entry["verdict"] for entry in wrapped["observed"]["entries"]] == ["loaded"]
    assert wrapped["stdout"].count("Initializing a V1 LLM engine") == 1
    assert len(launches(fleet)) == 2


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_program_is_warm_with_its_engine_in_its_own_process_or_beside_it(fleet: Plugged, processes: str) -> None:
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": processes}
    program = fleet.program("offline", SIZES)
    cold = run(fleet.machine("one", **variables), program)
    warm = run(fleet.machine("two", **variables), program)
    assert cold.told == ("none", "cold", 6)
    assert warm.told == ("exact", "used", 0)
    assert warm.answer == cold.answer


def test_a_program_shares_the_artifact_of_a_server_with_the_same_arguments(fleet: Plugged) -> None:
    served = run(fleet.machine("one"), fleet.serve(*SERVED_SIZES))
    warm = run(fleet.machine("two"), fleet.program("offline", SIZES))
    assert warm.told == ("near", "used", 0)
    assert warm.entries == ["loaded"]
    assert warm.answer == served.answer
    assert warm.report is not None
    assert [each["factor"] for each in warm.report["differs"]] == ["program"]


def test_variables_that_a_program_sets_count_and_those_that_vllm_sets_do_not(fleet: Plugged) -> None:
    one = run(fleet.machine("one"), fleet.program("offline", SIZES))
    program = fleet.program("offline", SIZES)
    path = Path(program[1])
    settings = (
        'import os\nos.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "1"\nos.environ["TRITON_CACHE_AUTOTUNING"] = "1"\n'
    )
    path.write_text(path.read_text().replace("from vllm", f"{settings}from vllm", 1))
    two = run(fleet.machine("two"), program)
    assert one.report is not None
    assert two.report is not None
    factors = {each["factor"] for each in two.report["differs"]}
    assert factors == {"env.VLLM_USE_FLASHINFER_SAMPLER", "program"}


def test_workers_in_processes_of_their_own_all_load_what_was_restored(fleet: Plugged) -> None:
    command = fleet.serve(LENGTH, "--tensor-parallel-size=2")
    cold = run(fleet.machine("one"), command)
    warm = run(fleet.machine("two"), command)
    assert cold.entries == ["compiled", "compiled"]
    assert warm.told == ("exact", "used", 0)
    assert warm.entries == ["loaded", "loaded"]
    assert warm.answer == cold.answer
    assert warm.report is not None
    assert warm.report["observed"]["processes"] == 4


# The engine asks for the entry that it looks up.


def made_elsewhere(fleet: Plugged, arguments: str) -> None:
    """Artifacts of other programs: one has the entry that `arguments` need, a later one looks nearer and has not."""
    run(fleet.machine("one", VLLM_USE_FLASHINFER_SAMPLER="1"), fleet.program("first", arguments))
    run(fleet.machine("two"), fleet.program("third", "max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=256"))


def test_the_entry_that_an_engine_asks_for_comes_from_whatever_artifact_has_it(fleet: Plugged) -> None:
    made_elsewhere(fleet, SIZES)
    third = run(fleet.machine("three"), fleet.program("third", SIZES))
    assert third.report is not None
    assert [each["factor"] for each in third.report["differs"]] == ["flags.max-model-len"], "the nearest has not got it"
    assert third.entries == ["loaded"]
    assert any("an entry that the engine asked for came from" in reason for reason in third.report["reasons"])
    assert third.told == ("near", "used", 0)
    again = run(fleet.machine("four"), fleet.program("third", SIZES))
    assert again.told == ("exact", "used", 0), "what was fetched and used is captured under this key"


def test_no_entry_crosses_what_the_engine_is_blind_to(fleet: Plugged) -> None:
    made_elsewhere(fleet, f"{SIZES}, speculative_config={{'num_speculative_tokens': 3}}")
    third = run(fleet.machine("three"), fleet.program("third", SIZES))
    assert third.entries == ["compiled"]
    assert third.answer == "ANSWER graph of None"


def test_two_workers_ask_for_one_entry_and_both_get_their_part(fleet: Plugged) -> None:
    made_elsewhere(fleet, f"{SIZES}, tensor_parallel_size=2")
    third = run(fleet.machine("three"), fleet.program("third", f"{SIZES}, tensor_parallel_size=2"))
    assert third.entries == ["loaded", "loaded"]


# Versions, and engines that say nothing.


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_the_ready_sign_is_exact_where_nothing_is_logged(tmp_path: Path, version: str) -> None:
    fleet = Plugged.install(tmp_path, version)
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR"}
    cold = run(fleet.machine("one", **quiet), fleet.serve(LENGTH))
    assert "init engine" not in cold.stdout
    warm = run(fleet.machine("two", **quiet), fleet.serve(LENGTH))
    assert warm.told == ("exact", "used", 0), "the capture is complete, so the engine was known to be ready"
    assert warm.entries == ["loaded"]


def test_a_vllm_without_a_place_for_a_hook_is_named_and_starts_warm_all_the_same(fleet: Plugged) -> None:
    path = fleet.site / "vllm" / "compilation" / "decorators.py"
    path.write_text(path.read_text().replace("_try_load_aot_compiled_fn", "_load_it"))
    run(fleet.machine("one"), fleet.serve(LENGTH))
    warm = run(fleet.machine("two"), fleet.serve(LENGTH))
    assert warm.told == ("exact", "used", 0)
    assert warm.report is not None
    assert any("no place for the hook `look-up of AOT entries`" in reason for reason in warm.report["reasons"])


# Nothing where nobody asked for it.


@pytest.mark.parametrize("off", ["0", ""])
def test_a_plugin_that_is_off_leaves_no_trace(fleet: Plugged, off: str) -> None:
    done = run(fleet.machine("one", CACHEMGR_ENABLE=off), fleet.serve(LENGTH))
    assert (done.said, done.report) == ([], None)
    assert not (fleet.directory / "store").exists()
    assert (fleet.machine("one").home / ".triton").exists(), "and nothing is pinned"


def test_what_measures_cold_starts_or_only_asks_is_left_alone(fleet: Plugged) -> None:
    vllm = fleet.serve()[0]
    run(fleet.machine("one"), fleet.serve(LENGTH))
    for words in (("bench", "startup", fleet.model), ("--help",)):
        done = run(fleet.machine("two"), (vllm, *words))
        assert (done.said, done.report) == ([], None)
    assert len(launches(fleet)) == 1


def test_a_client_that_loads_plugins_starts_no_child(fleet: Plugged) -> None:
    path = fleet.directory / "client.py"
    path.write_text("from vllm.engine.arg_utils import AsyncEngineArgs\nAsyncEngineArgs.add_cli_args(None)\n")
    done = run(fleet.machine("one"), (sys.executable, str(path)))
    assert (done.said, done.report) == ([], None)


# Whatever happens to the child, the engine starts.


def test_a_child_that_is_missing_hangs_or_dies_costs_a_line_and_at_most_the_deadline(
    fleet: Plugged, tmp_path: Path
) -> None:
    warm = run(fleet.machine("one"), fleet.serve(LENGTH))
    for name, body in {
        "hangs": "sleep 600",
        "dies": "kill -9 $$",
        "fails": "exit 3",
        "babbles": "echo hello; exit 0",
        "stops": "kill -STOP $$",
    }.items():
        child = tmp_path / f"child-{name}"
        child.write_text(f"#!/bin/sh\n{body}\n")
        child.chmod(0o755)
        begun = time.monotonic()
        done = run(fleet.machine(name, CACHEMGR_BIN=str(child), CACHEMGR_DEADLINE="2"), fleet.serve(LENGTH))
        assert done.answer == warm.answer
        assert len(done.said) == 1, done.stderr
        assert "goes on without it" in done.said[0]
        assert ours(fleet.machine(name)) == []
        assert time.monotonic() - begun < 30
    done = run(fleet.machine("missing", CACHEMGR_BIN=str(tmp_path / "nothing")), fleet.serve(LENGTH))
    assert done.answer == warm.answer
    assert "cannot be started" in done.said[0]
    assert (
        subprocess.run(["pgrep", "-f", str(tmp_path / "child-hangs")], capture_output=True, check=False).stdout == b""
    )


def test_settings_that_make_no_sense_are_said_and_the_engine_starts(fleet: Plugged) -> None:
    done = run(fleet.machine("one", CACHEMGR_PUBLISH="sometimes"), fleet.serve(LENGTH))
    assert done.answer == "ANSWER graph of None"
    assert len(done.said) == 1
    assert "`publish`" in done.said[0]
    done = run(fleet.machine("two", CACHEMGR_DEADLINE="soon"), fleet.serve(LENGTH))
    assert done.answer == "ANSWER graph of None"


def test_an_engine_in_a_directory_that_was_deleted_is_warm(fleet: Plugged) -> None:
    run(fleet.machine("one"), fleet.serve(LENGTH))
    machine = fleet.machine("two")
    machine.make_places()
    gone = machine.tmp / "gone"
    gone.mkdir()
    there = ("sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(gone), *fleet.serve(LENGTH))
    done = run(machine, there)
    assert done.told == ("exact", "used", 0), done.stderr


def test_what_the_engine_finds_by_pythonpath_is_not_for_us(fleet: Plugged) -> None:
    other = fleet.directory / "modules of another Python"
    other.mkdir()
    (other / "click.py").write_text("raise ImportError('another Python')\n")
    done = run(fleet.machine("one", PYTHONPATH=f"{other}:{fleet.site}"), fleet.serve(LENGTH))
    assert done.told == ("none", "cold", 6), done.stderr


def test_a_store_that_does_not_answer_costs_the_deadline(fleet: Plugged, tmp_path: Path) -> None:
    run(fleet.machine("one"), fleet.serve(LENGTH))
    hanging = {**misbehaving("opens hang", tmp_path), "HANGING_PATH": str(fleet.directory / "store")}
    machine = fleet.machine("two", CACHEMGR_DEADLINE="3", **hanging)
    begun = time.monotonic()
    done = run(machine, fleet.serve(LENGTH))
    assert done.answer == "ANSWER graph of None"
    assert time.monotonic() - begun < 40
    assert any("longer than" in line or "without it" in line for line in done.said), done.stderr


def test_a_store_that_cannot_be_read_is_a_cold_start(fleet: Plugged) -> None:
    (fleet.directory / "store").write_text("no directory")
    done = run(fleet.machine("one"), fleet.serve(LENGTH))
    assert done.answer == "ANSWER graph of None"
    assert done.entries == ["compiled"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_child_that_dies_or_stops_while_the_engine_compiles_is_not_missed(fleet: Plugged, number: int) -> None:
    machine = fleet.machine("one", COMPILE_SECONDS="2", CACHEMGR_DEADLINE="5")
    machine.make_places()
    process = start(machine, fleet.serve(LENGTH))
    wait_for(lambda: (machine.home / ".cache/vllm/torch_compile_cache").exists() and ours(machine))
    for pid in ours(machine):
        os.kill(pid, number)
    begun = time.monotonic()
    if number == signal.SIGSTOP:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert "ANSWER graph of None\n" in lines
        assert time.monotonic() - begun < 60, "who is stopped is not waited for"
        for pid in ours(machine):
            os.kill(pid, signal.SIGKILL)
        assert process.communicate(timeout=60)
        assert process.returncode == 0
    else:
        assert finish(machine, process).answer == "ANSWER graph of None"


def test_an_engine_that_is_killed_leaves_no_child_behind(fleet: Plugged) -> None:
    machine = fleet.machine("one", COMPILE_SECONDS="5")
    machine.make_places()
    process = start(machine, fleet.serve(LENGTH))
    wait_for(lambda: (machine.home / ".cache/vllm/torch_compile_cache").exists() and ours(machine))
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not ours(machine))


def test_an_exception_of_the_engine_passes_through_as_it_is(fleet: Plugged) -> None:
    done = run(fleet.machine("one", STAND_IN="refuse"), fleet.serve(LENGTH), code=1)
    assert "ValueError: no such model" in done.stderr
    assert done.answer == ""


@pytest.mark.parametrize("death", ["die", "segfault"])
def test_an_engine_that_dies_of_what_was_restored_starts_without_it_the_next_time(fleet: Plugged, death: str) -> None:
    run(fleet.machine("one"), fleet.serve(LENGTH))
    machine = fleet.machine("two")
    died = run(machine, fleet.serve(LENGTH), code=1, STAND_IN=death)
    assert any("the next start here goes without that capture" in line for line in died.said), died.stderr
    again = run(machine, fleet.serve(LENGTH), STAND_IN=death)
    assert again.answer == "ANSWER graph of None"
    assert again.entries == ["compiled"]


# Many at once, and more than one.


def test_a_second_engine_of_a_process_uses_the_directories_of_the_first(fleet: Plugged) -> None:
    done = run(fleet.machine("one"), fleet.program("twice", SIZES, engines=2))
    assert done.stdout.count("ANSWER graph of None") == 2
    assert done.report is not None
    assert any("1 more engines" in reason for reason in done.report["reasons"])
    assert len(launches(fleet)) == 1


@pytest.mark.slow
def test_a_job_of_sixty_four_engines_on_one_host_is_no_mess(fleet: Plugged) -> None:
    machine = fleet.machine("one")
    machine.make_places()
    program = fleet.program("trainer", SIZES)
    patient = {"CACHEMGR_DEADLINE": "300"}  # as many attendants start at once, on however few cores
    reports = [str(machine.root / f"{number}.json") for number in range(64)]
    running = [start(machine, program, CACHEMGR_REPORT=report, **patient) for report in reports]
    done: list[Run] = [finish(machine, process) for process in running]
    assert {each.code for each in done} == {0}
    assert {each.answer for each in done} == {"ANSWER graph of None"}
    assert len(launches(fleet)) == 64
    assert ours(machine) == []
    warm = run(fleet.machine("two"), program)
    assert warm.told == ("exact", "used", 0)


# Installed without dependencies.


def bare(tmp_path: Path) -> Plugged:
    """A fleet whose Python has the shim and nothing that cachemgr needs."""
    import shutil

    fleet = Plugged.install(tmp_path, python=str(Path(sys.executable).resolve()))
    source = Path(__file__).parent.parent / "cachemgr"
    shutil.copytree(source, fleet.site / "cachemgr", ignore=shutil.ignore_patterns("__pycache__"))
    info = fleet.site / "cachemgr-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cachemgr\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ncachemgr = cachemgr.plugin:register\n")
    return fleet


def test_the_shim_alone_works_with_a_cachemgr_in_another_environment(tmp_path: Path) -> None:
    fleet = bare(tmp_path)
    script = Path(sys.executable).parent / "cachemgr"
    variables = {"CACHEMGR_BIN": str(script)}
    cold = run(fleet.machine("one", **variables), fleet.serve(LENGTH))
    warm = run(fleet.machine("two", **variables), fleet.serve(LENGTH))
    assert (cold.told, warm.told) == (("none", "cold", 6), ("exact", "used", 0))


def test_the_shim_alone_says_once_what_is_missing(tmp_path: Path) -> None:
    fleet = bare(tmp_path)
    done = run(fleet.machine("one"), fleet.serve(LENGTH, "--tensor-parallel-size=2"))
    assert done.answer == "ANSWER graph of None graph of None"
    assert len(done.said) == 1
    assert "CACHEMGR_BIN" in done.said[0]


def machines(fleet: Plugged, count: int) -> list[Machine]:
    return [fleet.machine(f"m{number}") for number in range(count)]


def test_twenty_rolling_starts_are_all_warm_and_say_the_same(fleet: Plugged) -> None:
    cold = run(fleet.machine("cold"), fleet.serve(LENGTH))
    done = [run(machine, fleet.serve(LENGTH)) for machine in machines(fleet, 20)]
    assert {each.told for each in done} == {("exact", "used", 0)}
    assert {each.answer for each in done} == {cold.answer}
