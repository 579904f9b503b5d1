"""Launches of a stand-in vLLM (`tests/engines.py`): what is restored, used, set aside, captured and blamed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from cachemgr import launch
from cachemgr.cache import Cache
from cachemgr.capture import Launch
from cachemgr.cli.session import WallClock
from cachemgr.errors import LaunchError
from cachemgr.heal import Ailing
from cachemgr.order import Order, Started, Told
from cachemgr.store.captures import Capture
from cachemgr.store.local import LocalStore
from tests.engines import Engines
from tests.machines import Machine, wait_for

pytestmark = pytest.mark.slow

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


def test_a_tuning_with_another_winner_adds_nothing(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve())
    warm = engines.machine("two").run(*engines.serve(), STAND_IN="unpack,retune")
    assert told(warm) == ("exact", "used", 0)
    assert warm["published"] is None
    assert told(engines.machine("two").run(*engines.serve(), STAND_IN="unpack,retune")) == ("exact", "used", 0)


def test_another_length_is_near_and_reuses_the_kernels(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve("--max-model-len=4096"))
    near = engines.machine("two").run(*engines.serve("--max-model-len=8192"))
    assert told(near) == ("near", "partly used", 4)
    assert [difference["factor"] for difference in near["differs"]] == ["flags.max-model-len"]
    again = engines.machine("three").run(*engines.serve("--max-model-len=8192"))
    assert told(again) == ("exact", "used", 0)


def test_spellings_of_one_command_share_an_artifact(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve("--max-model-len=4096", "--port=8000"))
    same = engines.machine("two").run(*engines.serve("--max_model_len=4K", "--port=9000"))
    assert same["result"] == "exact"


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
    process = machine.start("run", "--", *engines.serve("--max-model-len=4096"), group=True, COMPILE_SECONDS="30")
    wait_for(lambda: entries(machine) != before)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not set(before) & set(entries(machine))
    machine.run(*engines.serve("--max-model-len=2048"))
    assert set(before) < set(entries(machine))


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


@pytest.mark.parametrize(("behaviour", "code"), [("die", 1), ("segfault", 128 + signal.SIGSEGV), ("core-segfault", 1)])
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


def ours(report: dict[str, Any]) -> list[str]:
    """The lines that a person reads."""
    return [line for line in report["stderr"].splitlines() if line.startswith("cachemgr: ")]


def test_what_was_assumed_about_a_command_is_said_before_it_starts(tmp_path: Path) -> None:
    engines = Engines.install(tmp_path, version="0.99.0")
    machine = engines.machine("one")
    command = (*engines.serve("--max-modle-len=sesame"), "--config", "/no/such/engine.yaml")
    started, _ended = ours(machine.run(*command))
    told = machine.cachemgr("lookup", "--", *command).stdout
    for text in (
        "vLLM 0.99.0 is read with the facts of",
        "knows no --max-modle-len",
        "--config cannot be read: engine.yaml: no file that can be read",
    ):
        assert text in started
        assert text in told
    assert "sesame" not in started + told, "what nobody knows may be a secret"


def test_an_engine_that_died_of_a_restored_file_is_told_shortly_and_looked_up_truly(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve())
    machine = engines.machine("two")
    died = machine.run(*engines.serve(), code=1, STAND_IN="die")
    _started, ended = ours(died)
    assert "exit code 1" in ended
    assert "the next start here goes without that capture" in ended
    assert "rank_0_0/model" in ended
    assert len(ended) < 400
    told = machine.cachemgr("lookup", "--", *engines.serve(), code=1).stdout
    assert "1 capture of this key in quarantine on this host" in told
    assert f"in quarantine on {os.uname().nodename}" in machine.cachemgr("show", died["key"]).stdout
    cold, _ended = ours(machine.run(*engines.serve()))
    assert "1 capture of this key in quarantine on this host" in cold
    exact, _ended = ours(machine.run(*engines.serve()))
    assert "quarantine" not in exact, "what was captured instead is as good"


def test_a_rejection_is_told_once_with_its_entry_and_the_way_out(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve())
    rejected = engines.machine("two").run(*engines.serve(), STAND_IN="reject", SERVE_SECONDS="0")
    (line,) = [line for line in ours(rejected) if "rejected" in line]
    assert "rank_0_0/model. The AOT file is damaged" in line
    assert "To do: " in line


def test_lookup_and_env_leave_a_benchmark_of_cold_starts_alone(engines: Engines) -> None:
    command = (str(engines.directory / "bin" / "vllm"), "bench", "startup")
    for words, code in (("lookup", 1), ("env", 0)):
        done = engines.machine("one").cachemgr(words, "--", *command, code=code)
        assert done.stdout == ""
        assert "measures cold starts" in done.stderr
        assert engines.machine("one").json(words, "--", *command, code=code)["key"] is None


def test_between_two_engines_only_that_differs(engines: Engines) -> None:
    machine = engines.machine("one")
    machine.run(str(engines.directory / "bin" / "vllm"), "serve", "--help")
    started = ours(machine.run(*engines.serve()))[-2]
    assert started.endswith("differs in engine vllm≠torch (guard)")
    told = machine.cachemgr("lookup", "--", str(engines.directory / "bin" / "vllm"), "serve", "/other", code=1).stdout
    assert "package." not in told


def test_a_second_start_in_place_says_so_and_publishing_that_is_off_only_where_it_matters(engines: Engines) -> None:
    machine = engines.machine("one")
    machine.run(*engines.serve())
    started, ended = ours(machine.run(*engines.serve(), options=("--read-only",)))
    assert "6 files in place, checked in" in started
    assert "not captured" not in ended


def test_show_names_absent_packages_in_one_place(engines: Engines) -> None:
    machine = engines.machine("one")
    key = machine.run(*engines.serve())["key"]
    lines = machine.cachemgr("show", key).stdout.splitlines()
    (absent,) = [line for line in lines if line.startswith("  not installed")]
    assert "flashinfer-python" in absent
    assert not [line for line in lines if "package." in line and line.endswith(" none")]


def bare(engines: Engines, machine: Machine, *options: str) -> None:
    """A start that knows nothing of us."""
    subprocess.run([*engines.serve(*options)], env=machine.environ, cwd=machine.root, check=True, capture_output=True)


def test_a_deadline_that_is_spent_waits_for_no_lock(engines: Engines) -> None:
    machine = engines.machine("one")
    key = machine.run(*engines.serve())["key"]
    lock = machine.home / ".cache/cachemgr/locks" / f"{key.replace(':', '-')}.restore.lock"
    with FileLock(lock):
        machine.run(*engines.serve(), options=("--deadline", "0.001"))


def test_nothing_comes_back_while_an_engine_beside_has_not_looked(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve("--max-model-len=4096"))
    machine = engines.machine("two")
    bare(engines, machine, "--max-model-len=1024")
    before = entries(machine)
    first = machine.start("run", "--", *engines.serve("--max-model-len=4096"), SERVE_SECONDS="3")
    wait_for(lambda: set(entries(machine)) - set(before))
    second = machine.run(*engines.serve("--max-model-len=1024"), LOOK_SECONDS="5")
    assert first.wait(timeout=30) == 0
    first.communicate()
    assert [entry["verdict"] for entry in second["observed"]["entries"]] == ["compiled"]


def test_a_launch_that_waits_gets_what_a_server_compiled(engines: Engines) -> None:
    machine = engines.machine("one")
    server = machine.start("run", "--", *engines.serve(), COMPILE_SECONDS="2", SERVE_SECONDS="200")
    wait_for(lambda: entries(machine))
    second = machine.run(*engines.serve(), options=("--wait", "60"))
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=30)
    assert told(second) == ("exact", "used", 0)


def test_an_engine_that_ends_well_before_it_was_ready_is_not_complete(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve(), STAND_IN="quit")
    assert engines.machine("two").run(*engines.serve())["result"] == "near"


def test_an_engine_that_takes_no_entries_at_all_does_not_fill_the_store(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve())
    machine = engines.machine("two")
    for _ in range(6):
        last = machine.run(*engines.serve(), STAND_IN="reject")
    assert last["result"] == "exact"
    folder = engines.directory / "store/artifacts" / last["key"].replace(":", "-")
    assert len(list(folder.glob("*.json.zst"))) == 2


def test_who_publishes_nothing_does_not_die_of_the_same_file_again(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve())
    machine = engines.machine("two")
    off = ("--publish", "never")
    machine.run(*engines.serve(), code=1, options=off, STAND_IN="die")
    assert told(machine.run(*engines.serve(), options=off, STAND_IN="die")) == ("none", "cold", 6)


@pytest.mark.parametrize("how", ["setting", "file"])
def test_a_store_that_cannot_be_written_does_not_kill_the_engine_again_and_again(engines: Engines, how: str) -> None:
    engines.machine("one").run(*engines.serve())
    machine = engines.machine("two")
    if how == "file":  # as a read-only mount would: no directory of that name can be made
        (machine.store / "quarantine").write_text("")
    options = ("--read-only",) if how == "setting" else ()
    died = machine.run(*engines.serve(), code=1, options=options, STAND_IN="die")
    again = machine.run(*engines.serve(), options=options, STAND_IN="die")
    assert told(again) == ("none", "cold", 6)
    assert "in quarantine on" in machine.cachemgr("show", again["artifact"] or died["artifact"]).stdout
    assert engines.machine("three").json("lookup", "--", *engines.serve())["result"] == "exact"


def test_a_store_that_fails_under_a_server_keeps_neither_its_verdict_nor_what_was_set_aside(engines: Engines) -> None:
    machine = engines.machine("one")
    bare(engines, machine, "--max-model-len=1024")
    before = entries(machine)
    report = machine.root / "report.json"
    process = machine.start("run", "--report", str(report), "--", *engines.serve(), SERVE_SECONDS="60")
    wait_for(lambda: set(entries(machine)) - set(before))
    shutil.rmtree(machine.store)
    machine.store.write_text("no directory")
    wait_for(report.exists, seconds=40)
    assert json.loads(report.read_text())["errors"] == {"publishing": 1}
    assert set(before) < set(entries(machine))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)


def test_what_another_launch_uses_is_not_taken_from_it(engines: Engines) -> None:
    machine = engines.machine("one")
    machine.run(*engines.serve())
    server = machine.start("run", "--", *engines.serve(), SERVE_SECONDS="60")
    assert server.stdout is not None
    while "startup complete" not in server.stdout.readline():
        pass
    root = machine.home / ".cache/vllm"
    before = sorted(root.rglob("model"))
    died = machine.run(*engines.serve(), code=1, STAND_IN="die")
    assert died["result"] == "exact"
    assert sorted(root.rglob("model")) == before
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=30)


def test_what_a_launch_beside_restores_is_not_added_by_this_one(engines: Engines) -> None:
    lengths = ("--max-model-len=1024", "--max-model-len=4096")
    for name, length in zip(("one", "two"), lengths, strict=True):
        engines.machine(name).run(*engines.serve(length))
    machine = engines.machine("three")
    report = machine.root / "server.json"
    machine.make_places()
    server = machine.start("run", "--report", str(report), "--", *engines.serve(lengths[0]), SERVE_SECONDS="60")
    assert server.stdout is not None
    while "startup complete" not in server.stdout.readline():
        pass
    assert told(machine.run(*engines.serve(lengths[1]))) == ("exact", "used", 0)
    assert len(entries(machine)) == 2, "they share a root"
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=30)
    first = json.loads(report.read_text())
    assert (told(first), first["published"]) == (("exact", "used", 0), None)


def test_what_a_launch_beside_compiles_is_not_added_by_this_one(engines: Engines) -> None:
    engines.machine("one").run(*engines.serve("--max-model-len=1024"))
    machine = engines.machine("two")
    report = machine.root / "server.json"
    machine.make_places()
    server = machine.start(
        "run", "--report", str(report), "--", *engines.serve("--max-model-len=1024"), SERVE_SECONDS="60"
    )
    assert server.stdout is not None
    while "startup complete" not in server.stdout.readline():
        pass
    beside = machine.start("run", "--", *engines.serve("--max-model-len=4096"), SERVE_SECONDS="60")
    wait_for(lambda: len(list((machine.home / ".cache/vllm/torch_compile_cache").rglob("model"))) == 2)
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=30)
    beside.send_signal(signal.SIGTERM)
    beside.communicate(timeout=30)
    first = json.loads(report.read_text())
    assert (told(first), first["published"]) == (("exact", "used", 0), None)


@pytest.mark.parametrize("failing", ["restore", "Watch"])
def test_a_launch_that_fails_before_its_command_starts_leaves_no_trace(
    engines: Engines, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = engines.machine("one")
    engines.machine("two").run(*engines.serve())
    bare(engines, machine, "--max-model-len=1024")
    before = entries(machine)

    def fails(*_args: object, **_more: object) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr("cachemgr.before." + failing, fails)
    order = order_on(machine, engines, strict=True)
    with pytest.raises(LaunchError, match="on purpose"):
        launch.run(order, Cache(LocalStore(machine.store), machine.home / "state"), WallClock(), Reader())
    assert set(before) <= set(entries(machine))
    assert not list(machine.home.rglob("launch.json"))
    assert not (machine.home / ".cache/vllm/cachemgr/.aside").exists()


def order_on(
    machine: Machine, engines: Engines, *, strict: bool = False, deadline: float = 30.0, wait: float = 0.0
) -> Order:
    return Order(
        argv=engines.serve(),
        environ=machine.environ,
        cwd=machine.root,
        launch="launch",
        host="one",
        publish="local",
        read_only=False,
        strict=strict,
        ignored_args=(),
        deadline=deadline,
        wait=wait,
        ready_file=None,
    )


class Reader:
    """Keeps the record of the launch."""

    def __init__(self) -> None:
        self.launch: Launch | None = None

    def note(self, line: str) -> None: ...
    def started(self, event: Started) -> None: ...
    def ready(self, event: Told) -> None: ...
    def finished(self, event: Told) -> None:
        self.launch = event.launch


@pytest.mark.usefixtures("in_process")
def test_readiness_to_wait_for_a_launch_is_no_patience_with_a_store(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = engines.machine("one")

    def slow(*_args: object, **_more: object) -> tuple[Capture, ...]:
        time.sleep(3)
        return ()

    monkeypatch.setattr("cachemgr.lookup.captures", slow)
    reader, cache = Reader(), Cache(LocalStore(machine.store), machine.home / "state")
    assert launch.run(order_on(machine, engines, deadline=2.0, wait=100.0), cache, WallClock(), reader) == 0
    assert reader.launch is not None
    assert reader.launch.errors["looking up"] == 1


@pytest.mark.usefixtures("in_process")
def test_a_store_is_not_left_alone_for_the_time_that_others_took(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.machine("two").run(*engines.serve())
    machine = engines.machine("one")

    def slow(*_args: object, **_more: object) -> list[Ailing]:
        time.sleep(3)
        return []

    monkeypatch.setattr("cachemgr.heal.look", slow)
    reader, cache = Reader(), Cache(LocalStore(machine.store), machine.home / "state")
    assert launch.run(order_on(machine, engines, deadline=3.0), cache, WallClock(), reader) == 0
    assert reader.launch is not None
    assert reader.launch.errors == {"restoring": 1, "deadline": 1}
    assert cache.rests(cache.store, time.time()) == 0
