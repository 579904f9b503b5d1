"""`cachemgr run` as a process: what passes through it, what it captures and restores, what it says."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.machines import Fleet, install_stand_in, launches_in

PYTHON = sys.executable


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_a_start_on_a_second_machine_is_used_and_adds_nothing(fleet: Fleet) -> None:
    cold = fleet.machine("one").run(*fleet.command("f", "g"))
    warm = fleet.machine("two").run(*fleet.command("f", "g"))
    assert (cold["result"], cold["verdict"], cold["added"]) == (
        "none",
        "cold",
        {"inductor": 2, "triton": 0, "cute_dsl": 0},
    )
    assert (warm["result"], warm["verdict"], warm["added"]) == (
        "exact",
        "used",
        {"inductor": 0, "triton": 0, "cute_dsl": 0},
    )
    assert warm["restored_files"] == 2
    assert warm["key"] == cold["key"] == warm["artifact"]
    assert warm["published"] is None
    assert "compiled" not in warm["stderr"]
    assert warm["stdout"] == cold["stdout"]


def test_a_second_start_in_the_same_place_finds_everything_in_place(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    machine.run(*fleet.command("f"))
    again = machine.run(*fleet.command("f"))
    assert (again["verdict"], again["restored_files"], again["present_files"]) == ("used", 0, 1)


def test_other_arguments_are_near_and_what_was_used_is_captured_with_what_was_made(fleet: Fleet) -> None:
    fleet.machine("one").run(*fleet.command("f", "g"))
    near = fleet.machine("two").run(*fleet.command("f", "h"))
    assert (near["result"], near["verdict"], near["added"]["inductor"]) == ("near", "partly used", 1)
    assert [each["factor"] for each in near["differs"]] == ["program.args"]
    exact = fleet.machine("three").run(*fleet.command("f", "h"))
    assert (exact["result"], exact["verdict"]) == ("exact", "used")
    assert exact["restored_files"] == 2, "f was used and h was made; g was neither"


def test_what_an_exact_start_added_is_named(fleet: Fleet) -> None:
    first = fleet.machine("one").run(*fleet.command("f", "--also=g"), CACHEMGR_IGNORE_ARG="--also")
    more = fleet.machine("two").run(*fleet.command("f", "--also=h"), CACHEMGR_IGNORE_ARG="--also")
    assert (more["result"], more["verdict"], more["added"]["inductor"]) == ("exact", "partly used", 1)
    (named,) = [reason for reason in more["reasons"] if reason.startswith("added ")]
    assert named.startswith("added inductor/")
    assert not [reason for reason in first["reasons"] if reason.startswith("added ")], "a cold start adds everything"


def test_a_unit_that_was_only_listed_is_captured_too(fleet: Fleet) -> None:
    fleet.machine("one").run(*fleet.command("f", "g", "h"))
    near = fleet.machine("two").run(*fleet.command("list=f", "g"))
    assert (near["result"], near["verdict"]) == ("near", "used")
    exact = fleet.machine("three").run(*fleet.command("list=f", "g"))
    assert (exact["result"], exact["verdict"], exact["restored_files"]) == ("exact", "used", 2)


def test_a_launch_that_reads_nothing_is_inert(fleet: Fleet) -> None:
    fleet.machine("one").run(*fleet.command("idle", "f"))
    machine = fleet.machine("two")
    (Path(machine.environ["TMPDIR"]) / "idle").touch()
    assert machine.run(*fleet.command("idle", "f"))["verdict"] == "inert"


def test_another_torch_is_none_and_says_which_factor(fleet: Fleet) -> None:
    fleet.machine("one").run(*fleet.command("f"))
    other = fleet.machine("two", **install_stand_in(fleet.directory, torch="2.14.0+cpu"))
    report = other.run(*fleet.command("f"))
    assert (report["result"], report["verdict"]) == ("none", "cold")
    assert {"factor": "torch", "wanted": "2.14.0+cpu", "stored": "2.13.0+cpu", "role": "guard"} in report["differs"]
    assert "torch 2.14.0+cpu≠2.13.0+cpu (guard)" in report["stderr"]


def test_a_blind_difference_keeps_the_torch_tree_out(fleet: Fleet) -> None:
    fleet.machine("one").run(*fleet.command("f"))
    report = fleet.machine("two", CPATH="/opt/include").run(*fleet.command("f"))
    assert (report["result"], report["verdict"], report["restored_files"]) == ("near", "cold", 0)
    assert any("inductor left out" in reason for reason in report["reasons"])


def test_without_torch_nothing_is_captured_and_the_reason_is_said(fleet: Fleet) -> None:
    report = fleet.machine("one", PYTHONPATH="").run(*fleet.command("f"))
    if report["engine_version"] is not None:
        pytest.skip("this interpreter has a real torch")
    assert report["published"] is None
    assert any("torch" in reason and "could not be read" in reason for reason in report["reasons"])


def test_a_failed_program_is_captured_as_incomplete_and_never_exact(fleet: Fleet) -> None:
    failed = fleet.machine("one").run(*fleet.command("f", "exit=3"), code=3)
    assert failed["published"] is not None
    again = fleet.machine("two").run(*fleet.command("f", "exit=3"), code=3)
    assert again["result"] == "near"
    assert any("incomplete" in reason for reason in again["reasons"])


def test_two_cold_starts_at_once_leave_one_warm_artifact(fleet: Fleet) -> None:
    machine = fleet.machine("one", NOISE="1")
    command = ("run", "--", *fleet.command("sleep=0.5", "f", "g", "sleep=0.5"))
    racing = [machine.start(*command) for _each in range(3)]
    for process in racing:
        _out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    later = fleet.machine("two", NOISE="1").run(*fleet.command("sleep=0.5", "f", "g", "sleep=0.5"))
    assert (later["result"], later["verdict"], later["added"]["inductor"]) == ("exact", "used", 0)
    live = Path(machine.cachemgr("dir", "--live").stdout.strip())
    assert [entry.name for entry in live.iterdir() if "." in entry.name] == [], "private directories are removed"


def test_streams_arguments_and_exit_code_pass_through(fleet: Fleet) -> None:
    code = "import sys; print(sys.stdin.read().upper(), sys.argv[1:]); print('warn', file=sys.stderr); sys.exit(7)"
    process = fleet.machine("one").start("run", "--", PYTHON, "-c", code, "-x", "--report", "--", "y")
    out, err = process.communicate("hello", timeout=60)
    assert process.returncode == 7
    assert out == "HELLO ['-x', '--report', '--', 'y']\n"
    assert "warn\n" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_sent_to_the_launch_reaches_the_command(fleet: Fleet, number: signal.Signals) -> None:
    code = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(42))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    process = fleet.machine("one").start("run", "--", PYTHON, "-c", code)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 42


def test_death_by_a_signal_is_reported_as_a_shell_would(fleet: Fleet) -> None:
    report = fleet.machine("one").run(*fleet.command("f", "kill=9"), code=137)
    assert report["exit_code"] == 137


def test_a_stopped_command_stops_the_launch_and_goes_on_with_it(fleet: Fleet) -> None:
    code = "import os, signal; print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP); print('on')"
    process = fleet.machine("one").start("run", "--", PYTHON, "-c", code, group=True)
    assert process.stdout is not None
    process.stdout.readline()
    for _attempt in range(200):
        state = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state == "T":
            break
        time.sleep(0.05)
    assert state == "T"
    process.send_signal(signal.SIGCONT)
    out, _err = process.communicate(timeout=30)
    assert out == "on\n"


def test_what_cannot_be_executed_inside_another_launch_is_126_too(fleet: Fleet, tmp_path: Path) -> None:
    script = tmp_path / "no-first-line"
    script.write_text("echo hi\n")
    script.chmod(0o755)
    done = fleet.machine("a").cachemgr("run", "--", str(script), code=126, CACHEMGR_LAUNCH="another")
    assert "cannot be executed: Exec format error" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_inside_another_launch_dies_of_a_pipe_that_nobody_reads(fleet: Fleet) -> None:
    done = fleet.machine("a").cachemgr("run", "--", "grep", "SigIgn", "/proc/self/status", CACHEMGR_LAUNCH="another")
    assert not int(done.stdout.split()[1], 16) & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))


def test_a_missing_command_is_127_and_a_directory_126(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    missing = machine.cachemgr("run", "--", "no-such-command-here", code=127)
    assert missing.stderr.startswith("error: no command `no-such-command-here`")
    plain = fleet.directory / "plain"
    plain.write_text("not a program")
    refused = machine.cachemgr("run", "--", str(plain), code=126)
    assert f"`{plain}` cannot be executed" in refused.stderr


def test_a_launch_inside_a_launch_steps_aside(fleet: Fleet) -> None:
    inner = (PYTHON, "-m", "cachemgr", "run", "--", *fleet.command("f"))
    shell = ("sh", "-c", 'exec "$0" "$@"', *inner)
    report = fleet.machine("one").run(*shell)
    assert report["added"]["inductor"] == 1
    assert report["stderr"].count("cachemgr:") == 2, "one launch, two lines"


def test_the_child_is_told_about_its_launch(fleet: Fleet) -> None:
    code = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('CACHEMGR_')}))"
    report = fleet.machine("one").run(PYTHON, "-c", code)
    told = json.loads(report["stdout"])
    assert told["CACHEMGR_LAUNCH"] == report["launch"]
    assert told["CACHEMGR_KEY"] == report["key"]
    assert told["CACHEMGR_PINNED"] == "CUTE_DSL_CACHE_DIR:TORCHINDUCTOR_CACHE_DIR:TRITON_CACHE_DIR"


def test_a_directory_that_the_user_chose_is_respected_and_filled(fleet: Fleet) -> None:
    fleet.machine("one").run(*fleet.command("f"))
    chosen = fleet.directory / "chosen"
    report = fleet.machine("two", TORCHINDUCTOR_CACHE_DIR=str(chosen)).run(*fleet.command("f"))
    assert (report["result"], report["verdict"]) == ("exact", "used")
    assert [path.name for path in chosen.iterdir()] == ["aotautograd"]


def test_read_only_and_never_write_nothing(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    machine.run(*fleet.command("f"), options=("--read-only",))
    assert not machine.store.exists()
    machine.run(*fleet.command("f"), options=("--publish", "never"))
    assert list((machine.store / "artifacts").glob("*")) == []
    assert len(list((machine.store / "launches").glob("*/*.json"))) == 1, "the launch itself is recorded"


@pytest.mark.parametrize("variable", [{"CACHEMGR_PUBLISH": "never"}, {"CACHEMGR_READ_ONLY": "1"}])
def test_options_have_variables_as_twins(fleet: Fleet, variable: dict[str, str]) -> None:
    report = fleet.machine("one", **variable).run(*fleet.command("f"))
    assert report["published"] is None


def test_an_ignored_argument_does_not_change_the_key(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    ignore = ("--ignore-arg", "--port")
    first = machine.run(*fleet.command("f", "--port=1"), options=ignore)
    second = machine.run(*fleet.command("f", "--port=2"), options=ignore)
    third = machine.run(*fleet.command("f", "--port=2"), CACHEMGR_IGNORE_ARG="--port")
    assert first["key"] == second["key"] == third["key"]
    assert machine.run(*fleet.command("f", "--port=2"))["key"] != first["key"]


def test_a_store_that_cannot_be_used_does_not_stop_the_command(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    machine.store.parent.mkdir(exist_ok=True)
    machine.store.write_text("a file, not a directory")
    report = machine.run(*fleet.command("f"))
    assert report["exit_code"] == 0
    assert report["errors"]
    strict = machine.cachemgr("run", "--strict", "--", *fleet.command("f"), code=125)
    assert "compiled" not in strict.stderr, "strict stops before the command starts"
    assert strict.stderr.startswith("error: ")


def test_a_foreign_store_is_said_and_left_alone(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    machine.store.mkdir(parents=True)
    (machine.store / "layout.json").write_text('{"layout": 2, "salt": "x"}')
    report = machine.run(*fleet.command("f"))
    assert "upgrade cachemgr" in machine.cachemgr("ls", code=12).stderr
    assert report["published"] is None
    assert sorted(path.name for path in machine.store.iterdir()) == ["layout.json"]


def test_a_closed_stderr_does_not_stop_the_command(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    words = [PYTHON, "-m", "cachemgr", "run", "--", PYTHON, "-c", "print('on')"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *words], env=machine.environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "on\n")


def test_a_reader_that_has_left_does_not_change_the_exit_code(fleet: Fleet) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [PYTHON, "-m", "cachemgr", "run", "--", "sh", "-c", "exit 3"]
    done = subprocess.run(words, env=fleet.machine("one").environ, stderr=write, check=False)
    os.close(write)
    assert done.returncode == 3


def test_a_report_leaves_a_link_one(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    machine.make_places()
    place, report = machine.root / "place", machine.root / "report.json"
    place.symlink_to(report)
    machine.cachemgr("run", "--report", str(place), "--", *fleet.command("f"))
    assert json.loads(report.read_bytes())["verdict"] == "cold"
    assert place.is_symlink()


def test_a_working_directory_that_was_deleted_is_no_obstacle(fleet: Fleet) -> None:
    healthy = fleet.machine("healthy").run(*fleet.command("f"))
    machine = fleet.machine("one")
    (machine.tmp / "gone").mkdir(parents=True)
    gone = ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(machine.tmp / "gone"), PYTHON, "-m", "cachemgr"]

    def there(*words: str) -> "subprocess.CompletedProcess[str]":
        machine.make_places()
        (machine.tmp / "gone").mkdir(exist_ok=True)
        return subprocess.run([*gone, *words], env=machine.environ, capture_output=True, text=True, check=False)

    done = there("run", "--", *fleet.command("f"))
    assert (done.returncode, "used · 1 file" in done.stderr) == (0, True), done.stderr
    asked = there("lookup", "--", *fleet.command("f"))
    assert (asked.returncode, str(healthy["key"]) in asked.stdout) == (0, True), asked.stderr
    baked = there("prewarm", "--bake", "relative", "--", *fleet.command("f"))
    assert (baked.returncode, "Traceback" in baked.stderr) == (13, False), baked.stderr
    done = there("run", "--report", "relative.json", "--", *fleet.command("f", "exit=3"))
    assert (done.returncode, "the report cannot be written" in done.stderr) == (3, True), done.stderr


@pytest.mark.parametrize("name", ["click", "msgspec"])
def test_what_the_command_finds_by_pythonpath_is_not_for_us(fleet: Fleet, name: str) -> None:
    other = fleet.directory / "modules of another Python"
    (other / name).mkdir(parents=True)
    (other / name / "__init__.py").write_text("raise ImportError('another Python')\n")
    path = f"{other}:{fleet.variables['PYTHONPATH']}"
    report = fleet.machine("one", PYTHONPATH=path).run(*fleet.command("f"))
    assert (report["verdict"], report["engine_version"]) == ("cold", "2.13.0+cpu")


@pytest.mark.parametrize("home", ["a file", "a broken link"])
def test_a_home_that_cannot_be_one_does_not_stop_the_command(fleet: Fleet, home: str) -> None:
    place = fleet.directory / "odd"
    place.write_text("") if home == "a file" else place.symlink_to("/nowhere/at/all")
    machine = fleet.machine("one", CACHEMGR_HOME=str(place))
    report = machine.run(*fleet.command("f"))
    assert report["exit_code"] == 0
    assert "compiled f" in report["stderr"]


def test_a_terminal_stays_a_terminal(fleet: Fleet) -> None:
    import pty

    machine = fleet.machine("one")
    controller, terminal = pty.openpty()
    code = "import sys; print(sys.stdin.isatty(), sys.stdout.isatty())"
    process = subprocess.Popen(
        [PYTHON, "-m", "cachemgr", "run", "--", PYTHON, "-c", code],
        env=machine.environ,
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.DEVNULL,
    )
    os.close(terminal)
    assert process.wait(60) == 0
    assert os.read(controller, 100).decode().strip() == "True True"
    os.close(controller)


def test_a_report_goes_into_a_pipe_and_not_into_its_place(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    machine.make_places()
    pipe = machine.root / "pipe"
    os.mkfifo(pipe)
    alone = machine.cachemgr("run", "--report", str(pipe), "--", *fleet.command("f"))
    assert "the report cannot be written" in alone.stderr, "nobody reads it, and nobody waits for that"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        machine.cachemgr("run", "--report", str(pipe), "--", *fleet.command("f"))
        assert json.loads(os.read(reader, 1 << 20))["verdict"] == "used"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    done = machine.cachemgr("run", "--report", "/dev/stdout", "--", *fleet.command("f"))
    assert json.loads(done.stdout.splitlines()[-1])["verdict"] == "used"


@pytest.mark.parametrize("streams", ["2>/dev/full", ">/dev/full 2>&1", "2>&-", "<&- >&- 2>&-"])
def test_the_exit_code_is_the_commands_also_where_nothing_can_be_written(fleet: Fleet, streams: str) -> None:
    """It was 120, by which Python tells that it could not write."""
    machine = fleet.machine("one")
    words = shlex.join([PYTHON, "-m", "cachemgr", "run", "--", "sh", "-c", "exit 7"])
    done = subprocess.run(["sh", "-c", f"{words} {streams}"], env=machine.environ, cwd=machine.root, check=False)
    assert done.returncode == 7
    assert [launch["exit_code"] for launch in launches_in(machine.store)] == [7]
