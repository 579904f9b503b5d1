"""The processes of a launch: orphans, PID 1, terminals, and what survives whose death."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.machines import Machine, install_program, install_stand_in

PYTHON = sys.executable
RUN = (PYTHON, "-m", "cachemgr", "run", "--")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "one", tmp_path / "store", install_stand_in(tmp_path))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: "os.PathLike[str]", seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not os.path.exists(condition):
        assert time.monotonic() < end, f"{condition} did not appear"
        time.sleep(0.02)


def test_a_process_that_outlives_the_command_is_waited_for_and_its_work_captured(
    machine: Machine, tmp_path: Path
) -> None:
    program = install_program(tmp_path)
    shell = f'("{PYTHON}" "{program}" sleep=0.7 late >/dev/null 2>&1 &) ; exit 0'
    report = machine.run("sh", "-c", shell)
    assert report["added"]["inductor"] == 1, "the grandchild compiled after its parent had ended"
    assert report["exit_code"] == 0


def test_an_orphan_that_never_ends_does_not_hold_the_launch(machine: Machine) -> None:
    begun = time.monotonic()
    report = machine.run("sh", "-c", "(sleep 300 >/dev/null 2>&1 & echo $! >pid); exit 3", code=3)
    assert time.monotonic() - begun < 30
    assert any("still running" in reason for reason in report["reasons"])
    orphan = int((machine.root / "pid").read_text())
    assert alive(orphan), "it is nobody's business to kill it"
    os.kill(orphan, signal.SIGKILL)


def test_what_an_orphan_still_writes_is_left_out_and_the_rest_captured(machine: Machine, tmp_path: Path) -> None:
    program = install_program(tmp_path)
    writer = 'while :; do date +%N >>"$TORCHINDUCTOR_CACHE_DIR/ab/cmoving.txt"; sleep 0.1; done'
    shell = (
        f'mkdir -p "$TORCHINDUCTOR_CACHE_DIR/ab"; ({writer}) >/dev/null 2>&1 & echo $! >pid; "{PYTHON}" "{program}" f'
    )
    report = machine.run("sh", "-c", shell)
    os.kill(int((machine.root / "pid").read_text()), signal.SIGKILL)
    assert any("still running" in reason for reason in report["reasons"])
    (capture,) = machine.json("show", report["key"])["captures"]
    (section,) = capture["layers"][0]["sections"]
    assert [unit["name"].split("/")[0] for unit in section["units"]] == ["aotautograd"]


def test_orphans_do_not_stay_zombies(machine: Machine) -> None:
    shell = "for i in 1 2 3; do (sh -c 'sleep 0.1 & echo $! >>pids' >/dev/null 2>&1 &); done; sleep 1; cat pids"
    process = machine.start("run", "--", "sh", "-c", f"{shell}; sleep 3")
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _each in range(3)]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    process.communicate(timeout=30)


@pytest.mark.parametrize("by_terminal", [True, False])
def test_ctrl_c_for_a_command_that_has_ended_before_we_waited_is_not_for_us(by_terminal: bool) -> None:
    code = (
        "import os, pathlib, signal, sys, time\nfrom cachemgr.child import Child\n"
        "child = Child.start(['cat'], os.environ, pathlib.Path.cwd())\nprint('ready', flush=True)\n"
        "os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)\n"
        f"{'' if by_terminal else 'os.kill(os.getpid(), signal.SIGINT)'}\n"
        "try: print('ended by', child.wait(linger=0).signal)\nexcept KeyboardInterrupt: print('interrupted')"
    )
    pid, controller = pty.fork()
    if pid == 0:
        os.execve(PYTHON, [PYTHON, "-c", code], {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)})
    printed = b""
    while b"ready" not in printed:
        printed += os.read(controller, 1000)
    os.write(controller, b"\x03" if by_terminal else b"\x04")
    try:
        while piece := os.read(controller, 1000):
            printed += piece
    except OSError:
        pass
    os.waitpid(pid, 0)
    os.close(controller)
    assert (b"ended by 2" if by_terminal else b"interrupted") in printed


@pytest.mark.parametrize("shell", ["exit 5", "sleep 300 >/dev/null & echo $! >pid; exit 5"])
def test_children_of_ours_that_are_set_apart_are_nobodys_leftovers(tmp_path: Path, shell: str) -> None:
    code = (
        "import os, pathlib, signal, sys\nfrom cachemgr.child import Child\n"
        "apart = os.posix_spawnp('sleep', ['sleep', '300'], os.environ)\n"
        "short = os.posix_spawnp('true', ['true'], os.environ)\n"
        "child = Child.start(['sh', '-c', sys.argv[1]], os.environ, pathlib.Path.cwd())\n"
        "ended = child.wait(linger=float(sys.argv[2]), apart=lambda: {apart, short})\n"
        "print(ended.code, ended.left_behind, os.waitpid(apart, os.WNOHANG))\n"
        "os.kill(apart, signal.SIGKILL)"
    )
    leaves = "sleep" in shell
    # A wait of a minute would be cut off: whoever is alone does not wait.
    words = [PYTHON, "-c", code, shell, "0.2" if leaves else "60"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(words, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, check=False, timeout=30)
    if leaves:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert done.stdout == f"5 {leaves} (0, 0)\n".encode()


def test_the_death_of_the_launch_does_not_take_the_command_along(machine: Machine, tmp_path: Path) -> None:
    done = tmp_path / "done"
    process = machine.start("run", "--", "sh", "-c", f'echo $$; sleep 1; touch "{done}"')
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait(10)
    wait_until(done)
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGUSR1, signal.SIGALRM, signal.SIGPWR, signal.SIGRTMIN + 3])
def test_more_signals_are_handed_on(machine: Machine, number: int) -> None:
    code = (
        "import signal, sys, time\n"
        f"signal.signal({number:d}, lambda *_: sys.exit(40))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    process = machine.start("run", "--", PYTHON, "-c", code)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 40


def test_a_stop_sent_to_the_launch_stops_the_command_and_continue_wakes_both(machine: Machine) -> None:
    code = "import os, time\nprint(os.getpid(), flush=True)\nfor _ in range(400): time.sleep(0.05)\nprint('on')"
    # A group of its own below this process: the kernel does not stop a group that nobody could wake.
    process = machine.start("run", "--", PYTHON, "-c", code, group=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())

    def state(of: int) -> str:
        return Path(f"/proc/{of}/stat").read_text().rsplit(")", 1)[1].split()[0]

    process.send_signal(signal.SIGTSTP)
    end = time.monotonic() + 10
    while (state(pid), state(process.pid)) != ("T", "T"):
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGCONT)
    out, _err = process.communicate(timeout=60)
    assert out == "on\n"


def test_ctrl_c_reaches_the_command_once(machine: Machine) -> None:
    """The terminal signals the whole group; a launch that forwards it would make it two."""
    code = (
        "import signal, time\nseen = []\nsignal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "print('ready', flush=True)\nend = time.time() + 1.5\n"
        "while time.time() < end: time.sleep(0.05)\nprint('interrupts', len(seen), flush=True)"
    )
    pid, controller = pty.fork()
    if pid == 0:
        os.chdir(machine.root.parent)
        os.execve(PYTHON, [*RUN, PYTHON, "-c", code], machine.environ)
    printed = b""
    while b"ready" not in printed:
        printed += os.read(controller, 1000)
    os.write(controller, b"\x03")
    try:
        while piece := os.read(controller, 1000):
            printed += piece
    except OSError:
        pass
    _pid, status = os.waitpid(pid, 0)
    os.close(controller)
    assert b"interrupts 1" in printed
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare on this machine")
def test_as_pid_1_it_reaps_forwards_and_ends_with_the_command(machine: Machine) -> None:
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us make a PID namespace")
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(44))\n"
        "subprocess.Popen(['sh', '-c', '(sleep 0.1 &) ; exit 0']).wait()\n"
        "time.sleep(0.8)\n"
        "zombies = [p for p in os.listdir('/proc') if p.isdigit() and ') Z ' in open(f'/proc/{p}/stat').read()]\n"
        "print(os.getppid(), zombies, flush=True)\n"
        "os.kill(1, signal.SIGTERM)\ntime.sleep(30)"
    )
    done = subprocess.run(
        [*unshare, *RUN, PYTHON, "-c", code],
        env=machine.environ,
        cwd=machine.root,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "1 []\n", done.stderr
    assert done.returncode == 44


def test_a_parent_that_blocks_every_signal_changes_nothing(machine: Machine) -> None:
    code = (
        "import os, signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    words = ["-m", "cachemgr", "run", "--", "sh", "-c", "exit 3"]
    machine.make_places()
    done = subprocess.run(
        [PYTHON, "-c", code, *words], env=machine.environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, "Traceback" in done.stderr) == (3, False), done.stderr


def test_a_parent_that_ignores_child_signals_changes_nothing(machine: Machine) -> None:
    words = [*RUN, "sh", "-c", "exit 9"]
    ignoring = "import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    code = f"{ignoring}; os.execv({PYTHON!r}, {words!r})"
    done = subprocess.run([PYTHON, "-c", code], env=machine.environ, cwd=machine.home, check=False, timeout=60)
    assert done.returncode == 9


def test_open_descriptors_reach_the_command(machine: Machine) -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [*RUN, PYTHON, "-c", f"import os; os.write({writing}, b'hello')"],
        env=machine.environ,
        pass_fds=[writing],
        cwd=machine.home,
    )
    os.close(writing)
    assert process.wait(60) == 0
    assert os.read(reading, 100) == b"hello"
    os.close(reading)


def test_a_command_killed_while_it_compiles_is_captured_as_incomplete(machine: Machine, tmp_path: Path) -> None:
    program = install_program(tmp_path)
    process = machine.start("run", "--report", "r.json", "--", PYTHON, program, "f", "sleep=60", "g")
    assert process.stdout is not None
    while process.stdout.readline() != "sleeping\n":
        pass
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    report = json.loads((machine.root / "r.json").read_text())
    (artifact,) = machine.json("ls")["artifacts"]
    assert (report["published"] is not None, artifact["complete"]) == (True, False)
