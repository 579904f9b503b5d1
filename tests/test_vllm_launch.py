"""Launches of a stand-in vLLM (`tests/engines.py`): what is restored, used, set aside, captured and blamed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engines import Engines
from tests.machines import Machine

SPECULATIVE = '--speculative-config={"method":"ngram","num_speculative_tokens":%d}'


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    return Engines.install(tmp_path)


def told(report: dict[str, Any]) -> tuple[str, str, int]:
    return report["result"], report["verdict"], sum(report["added"].values())


def entries(machine: Machine) -> list[str]:
    """The AOT entries in the engine's own root."""
    root = machine.home / ".cache/vllm/torch_compile_cache/torch_aot_compile"
    return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


def test_a_start_on_a_second_machine_loads_everything_and_adds_nothing(engines: Engines) -> None:
    cold = engines.machine("one").run(*engines.serve())
    warm = engines.machine("two").run(*engines.serve())
    assert told(cold) == ("none", "cold", 6)
    assert told(warm) == ("exact", "used", 0)
    assert (warm["engine"], warm["engine_version"], warm["model"]) == ("vllm", "0.32.0", "model")
    assert [entry["verdict"] for entry in cold["observed"]["entries"]] == ["compiled"]
    assert [entry["verdict"] for entry in warm["observed"]["entries"]] == ["loaded"]
    assert warm["phases"]["init_engine"] == 1.5
    assert "init engine 1.50 s (cold 1.50 s) · 0 added" in warm["stderr"]


def test_compiled_code_lies_where_vllm_puts_it_and_kernels_in_a_directory_of_the_key(engines: Engines) -> None:
    machine = engines.machine("one")
    report = machine.run(*engines.serve())
    root = machine.home / ".cache/vllm"
    assert len(entries(machine)) == 1
    assert (root / "modelinfos/vllm-model.json").is_file()
    assert len(list((root / "cachemgr" / report["key"].replace(":", "-") / "triton").iterdir())) == 2
    assert not (machine.home / ".triton").exists()


def test_an_engine_that_writes_the_same_bytes_again_adds_nothing(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve())
    warm = engines.machine("two").run(*engines.serve(), STAND_IN="unpack")
    assert told(warm) == ("exact", "used", 0)
    assert told(engines.machine("two").run(*engines.serve(), STAND_IN="unpack")) == ("exact", "used", 0)


def test_another_length_is_near_and_reuses_the_kernels(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve("--max-model-len=4096"))
    near = engines.machine("two").run(*engines.serve("--max-model-len=8192"))
    assert told(near) == ("near", "partly used", 4)
    assert [difference["factor"] for difference in near["differs"]] == ["flags.max-model-len"]
    again = engines.machine("three").run(*engines.serve("--max-model-len=8192"))
    assert told(again) == ("exact", "used", 0)


def test_spellings_of_one_command_share_an_artifact(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve("--max-model-len=4096", "--port=8000"))
    same = engines.machine("two").run(*engines.serve("--max_model_len=4k", "--port=9000"), code=0)
    assert same["result"] == "exact" or same["differs"][0]["factor"] == "flags.max-model-len"


def test_no_torch_tree_crosses_what_the_engine_is_blind_to(engines: Engines) -> None:
    three = engines.machine("one").run(*engines.serve(SPECULATIVE % 3))
    five = engines.machine("two").run(*engines.serve(SPECULATIVE % 5))
    assert "num_speculative_tokens" in three["stderr"]
    assert 'num_speculative_tokens":5' in five["stderr"], "the engine would have taken the graph for three"
    assert told(five)[0] == "near"
    assert "torch_compile left out: the engine is blind to what differs" in five["reasons"]


def test_a_live_entry_of_another_sight_is_set_aside_while_the_engine_looks(engines: Engines) -> None:
    machine = engines.machine("one")
    machine.run(*engines.serve(SPECULATIVE % 3))
    five = machine.run(*engines.serve(SPECULATIVE % 5))
    assert 'num_speculative_tokens":5' in five["stderr"]
    assert "set aside until the engine has looked" in five["stderr"]
    three = machine.run(*engines.serve(SPECULATIVE % 3))
    assert 'num_speculative_tokens":3' in three["stderr"]
    assert told(three) == ("exact", "used", 0)


def test_entries_of_other_models_come_back_when_the_engine_has_looked(engines: Engines) -> None:
    machine = engines.machine("one")
    bare = subprocess.run(
        [*engines.serve("--max-model-len=1024")], env=machine.environ, cwd=machine.root, check=True, capture_output=True
    )
    assert b"saved AOT" in bare.stdout
    before = entries(machine)
    report = machine.run(*engines.serve("--max-model-len=4096"))
    assert told(report) == ("none", "cold", 5), "what came back was not made by this launch"
    assert set(before) < set(entries(machine))
    assert not (machine.home / ".cache/vllm/cachemgr/.aside").exists()


def test_what_a_killed_launch_set_aside_comes_back_at_the_next(engines: Engines) -> None:
    machine = engines.machine("one")
    subprocess.run([*engines.serve("--max-model-len=1024")], env=machine.environ, cwd=machine.root, check=True)
    before = entries(machine)
    process = machine.start("run", "--", *engines.serve("--max-model-len=4096"), COMPILE_SECONDS="30")
    wait_for(lambda: entries(machine) != before)
    process.kill()
    process.communicate()
    subprocess.run(["pkill", "-f", str(engines.directory / "bin" / "vllm")], check=False)
    assert not set(before) & set(entries(machine))
    machine.run(*engines.serve("--max-model-len=2048"))
    assert set(before) < set(entries(machine))


def wait_for(holds: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def test_a_server_is_captured_when_it_is_ready_and_the_verdict_is_told_then(engines: Engines) -> None:
    machine = engines.machine("one")
    report = machine.root / "report.json"
    process = machine.start("run", "--report", str(report), "--", *engines.serve(), SERVE_SECONDS="60")
    wait_for(report.exists, seconds=40)
    early = json.loads(report.read_text())
    assert (early["exit_code"], early["verdict"]) == (None, "cold")
    assert early["published"] is not None
    assert told(engines.machine("two").run(*engines.serve())) == ("exact", "used", 0)
    process.send_signal(signal.SIGTERM)
    _out, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert errors.count("cold ·") == 1, "one verdict a launch"
    assert json.loads(report.read_text())["exit_code"] == 0


def test_a_server_that_ends_soon_after_it_was_ready_is_complete(engines: Engines) -> None:
    machine = engines.machine("one")
    process = machine.start("run", "--", *engines.serve(), SERVE_SECONDS="60")
    assert process.stdout is not None
    while "startup complete" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert told(engines.machine("two").run(*engines.serve())) == ("exact", "used", 0)


@pytest.mark.parametrize(("behaviour", "code"), [("die", 1), ("segfault", 128 + signal.SIGSEGV)])
def test_an_engine_that_dies_of_what_was_restored_starts_without_it_the_next_time(
    engines: Engines, behaviour: str, code: int
) -> None:
    engines.machine("one").run(*engines.serve())
    machine = engines.machine("two")
    died = machine.run(*engines.serve(), code=code, STAND_IN=behaviour)
    assert died["result"] == "exact"
    assert any("nothing published: the engine" in reason for reason in died["reasons"])
    assert died["published"] is None
    after = machine.run(*engines.serve(), STAND_IN=behaviour)
    assert told(after) == ("none", "cold", 6)
    assert told(machine.run(*engines.serve())) == ("exact", "used", 0)


def test_running_out_of_memory_is_not_the_fault_of_a_cache(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve())
    machine = engines.machine("two")
    code = f"import sys; print('torch.OutOfMemoryError: CUDA out of memory.'); sys.exit(1)  # {engines.model}"
    program = engines.directory / "bin" / "vllm"
    text = program.read_text()
    program.write_text(f"#!{sys.executable}\n{code}\n")
    machine.run(*engines.serve(), code=1)
    program.write_text(text)
    assert told(machine.run(*engines.serve())) == ("exact", "used", 0)


def test_a_rejected_entry_is_explained(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve())
    rejected = engines.machine("two").run(*engines.serve(), STAND_IN="reject")
    assert rejected["verdict"] == "partly used"
    assert rejected["observed"]["entries"][0]["reason"] == "pickle data was truncated"
    assert any("pickle data was truncated" in reason for reason in rejected["reasons"])


def test_without_compilation_no_torch_tree_is_restored_or_missed(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve())
    eager = engines.machine("two").run(*engines.serve("--enforce-eager"))
    assert (eager["result"], eager["verdict"]) == ("near", "used")
    assert eager["restored_files"] == 3
    assert "no torch tree is expected: --enforce-eager" in eager["reasons"]


def test_a_benchmark_of_cold_starts_is_left_alone(engines: Engines) -> None:
    program = str(engines.directory / "bin" / "vllm")
    done = engines.machine("one").cachemgr("run", "--", program, "bench", "startup", code=None)
    assert "measures cold starts" in done.stderr
    assert "no artifact" not in done.stderr


def test_launches_that_differ_in_what_the_engine_is_blind_to_never_share_a_root(engines: Engines) -> None:
    machine = engines.machine("one")
    first = machine.start("run", "--", *engines.serve(SPECULATIVE % 3), COMPILE_SECONDS="3")
    wait_for(lambda: entries(machine))
    second = machine.run(*engines.serve(SPECULATIVE % 5))
    assert 'num_speculative_tokens":5' in second["stderr"]
    _out, errors = first.communicate(timeout=30)
    assert 'num_speculative_tokens":3' in errors
    assert len(entries(machine)) == 1, "the second had a root of its own"
    assert not [name for name in os.listdir(machine.home / ".cache/vllm/cachemgr") if "." in name.strip(".")]


def test_two_engines_of_one_key_do_not_disturb_each_other(engines: Engines) -> None:
    machine = engines.machine("one")
    machine.make_places()
    both = [machine.start("run", "--", *engines.serve(), COMPILE_SECONDS="1") for _ in range(2)]
    for process in both:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert told(engines.machine("two").run(*engines.serve())) == ("exact", "used", 0)


def test_a_root_that_cannot_be_written_is_replaced_for_the_engine_too(engines: Engines) -> None:
    machine = engines.machine("one", VLLM_CACHE_ROOT="/dev/null/root")
    report = machine.run(*engines.serve())
    assert told(report) == ("none", "cold", 6)
    assert "/dev/null/root cannot be written" in report["stderr"]
