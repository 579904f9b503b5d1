"""What a tapped command writes: the same bytes, the same kinds of files, the same ends, whoever dies or stalls.

`DRIVER` is what a launch does with a tap, and nothing else. What it saw of each stream goes to files of its own.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PYTHON = sys.executable
ROOT = Path(__file__).parent.parent

DRIVER = """
import json, os, sys, time
from pathlib import Path
from cachemgr import pump
from cachemgr.child import Child
from cachemgr.tap import Tap

place, command = Path(sys.argv[1]), sys.argv[2:]
gaps = []

def watched(piece):
    with open(place / piece.name, "ab", buffering=0) as file:
        file.write(piece.data)
    gaps.append(piece.gap)
    time.sleep(float(os.environ.get("SLOW", 0)))

if os.environ.get("PUMP"):
    pump.__file__ = os.environ["PUMP"]
if os.environ.get("EXECUTABLE"):
    sys.executable = os.environ["EXECUTABLE"]
tap = Tap.open(watched)
(place / "pumps.tmp").write_text(json.dumps(sorted(tap.pumps)))
os.replace(place / "pumps.tmp", place / "pumps")
for number in map(int, os.environ.get("STORM", "").split()):
    for pid in tap.pumps:
        os.kill(pid, number)
with tap.ends() as ends:
    child = Child.start(command, os.environ, Path.cwd(), stdout=ends.stdout, stderr=ends.stderr)
ended = child.wait(linger=float(os.environ.get("LINGER", 5)), apart=lambda: set(tap.pumps))
whole = tap.finish(float(os.environ.get("FINISH", 30)))
report = {"code": ended.code, "left": ended.left_behind, "whole": whole, "unseen": tap.unseen, "gap": any(gaps)}
(place / "report.tmp").write_text(json.dumps(report))
os.replace(place / "report.tmp", place / "report")
"""


@dataclass(frozen=True)
class Bench:
    """A place where a tapped command runs."""

    place: Path
    started: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def words(self, *command: str) -> list[str]:
        return [PYTHON, "-c", DRIVER, str(self.place), *command]

    def environ(self, **more: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "PLACE": str(self.place), **more}

    def start(self, *command: str, stdout: Any, stderr: Any = None, fds: tuple[int, ...] = (), **more: str) -> Any:
        process = subprocess.Popen(
            self.words(*command),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=self.environ(**more),
            cwd=self.place,
            pass_fds=fds,
        )
        self.started.append(process)
        return process

    def python(self, code: str) -> list[str]:
        """A command: `code`, with `await_file(name)` and `out`, `err` that write at once."""
        return [PYTHON, "-c", PRELUDE + code]

    def seen(self, name: str = "stdout") -> bytes:
        path = self.place / name
        return path.read_bytes() if path.exists() else b""

    def report(self) -> dict[str, Any]:
        return dict(json.loads((self.place / "report").read_text()))

    def mark(self, name: str) -> None:
        (self.place / name).touch()

    def wait_for(self, name: str) -> None:
        wait_until((self.place / name).exists, name)

    def pump(self) -> int:
        (pid,) = json.loads((self.place / "pumps").read_text())
        return int(pid)


PRELUDE = """
import fcntl, os, signal, stat, struct, subprocess, sys, termios, time

def await_file(name):
    end = time.monotonic() + 120
    while not os.path.exists(os.path.join(os.environ["PLACE"], name)):
        if time.monotonic() > end:
            sys.exit("the test is gone")
        time.sleep(0.01)

def mark(name):
    open(os.path.join(os.environ["PLACE"], name), "w").close()

def put(fd, data):
    data = memoryview(data)
    while data:
        data = data[os.write(fd, data):]

def out(data):
    put(1, data)

def err(data):
    put(2, data)

def size():
    return struct.unpack("HHHH", fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(8)))[:2]

"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for process in bench.started:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.wait(30)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def read_some(fd: int) -> bytes:
    """Nothing at the end of the file."""
    assert select.select([fd], [], [], 30)[0], "neither bytes nor an end"
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # how a terminal says that it has no writers left
        return b""


def read_all(fd: int, *, pause: float = 0) -> bytes:
    pieces = []
    while piece := read_some(fd):
        pieces.append(piece)
        time.sleep(pause)
    return b"".join(pieces)


def read_until(fd: int, expected: bytes) -> bytes:
    read = b""
    while expected not in read:
        piece = read_some(fd)
        assert piece, f"{expected!r} not in {read!r}"
        read += piece
    return read


class Terminal:
    """A terminal of the test: `controller` is what a terminal emulator holds."""

    def __init__(self, words: list[str], environ: dict[str, str], place: Path, *, raw: bool = False) -> None:
        self.pid, self.controller = pty.fork()
        if self.pid == 0:
            os.chdir(place)
            if raw:
                tty.setraw(1, termios.TCSANOW)
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
            os.execve(words[0], words, environ)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.controller, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, data: bytes) -> None:
        os.write(self.controller, data)

    def read_until(self, expected: bytes) -> bytes:
        return read_until(self.controller, expected)

    def end(self) -> bytes:
        """Everything until the last writer is gone."""
        rest = read_all(self.controller)
        os.close(self.controller)
        os.waitpid(self.pid, 0)
        return rest


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        for fd in (reading, writing):
            with contextlib.suppress(OSError):
                os.close(fd)


def test_both_streams_arrive_where_they_went_and_are_seen(bench: Bench) -> None:
    code = "out(b'one\\r\\x1b[31mtwo\\0\\xff\\n'); err(b'\\xe2\\x82'); sys.exit(7)"
    done = bench.start(*bench.python(code), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.communicate(timeout=60) == (b"one\r\x1b[31mtwo\0\xff\n", b"\xe2\x82")
    assert (bench.seen(), bench.seen("stderr")) == (b"one\r\x1b[31mtwo\0\xff\n", b"\xe2\x82")
    assert bench.report() == {"code": 7, "left": False, "whole": True, "unseen": {}, "gap": False}


def test_bytes_do_not_wait_for_a_line_or_a_whole_character(bench: Bench) -> None:
    code = "out(b'50 %\\r\\xe2\\x82'); await_file('go'); out(b'\\xac')"
    process = bench.start(*bench.python(code), stdout=subprocess.PIPE)
    read_until(process.stdout.fileno(), b"50 %\r\xe2\x82")
    wait_until(lambda: bench.seen() == b"50 %\r\xe2\x82", "the first bytes")
    bench.mark("go")
    assert process.communicate(timeout=60)[0] == b"\xac"
    assert bench.seen().decode() == "50 %\r€"


BULK = "import hashlib\nblock = bytes(range(256)) * 257\nfor n in range(1600): out(n.to_bytes(4, 'big') + block)"


def bulk() -> str:
    block = bytes(range(256)) * 257
    digest = hashlib.sha256()
    for n in range(1600):
        digest.update(n.to_bytes(4, "big") + block)
    return digest.hexdigest()


@pytest.mark.parametrize("slow", ["0", "0.2"])
def test_100_mb_arrive_byte_for_byte_however_slowly_we_look(bench: Bench, slow: str) -> None:
    process = bench.start(*bench.python(BULK), stdout=subprocess.PIPE, SLOW=slow, FINISH="0.1")
    digest = hashlib.sha256()
    while piece := process.stdout.read(1 << 20):
        digest.update(piece)
    process.communicate(timeout=60)
    assert digest.hexdigest() == bulk()
    assert slow == "0" or bench.report()["whole"] is False


def test_what_we_did_not_take_in_time_is_a_gap(bench: Bench) -> None:
    process = bench.start(*bench.python(BULK), stdout=subprocess.PIPE, SLOW="0.01")
    read_all(process.stdout.fileno())
    process.wait(60)
    assert len(bench.seen()) < 1600 * (4 + 256 * 257)
    assert (bench.report()["gap"], bench.report()["whole"]) == (True, True)


def test_a_pump_that_is_killed_leaves_a_gap_at_the_end(bench: Bench) -> None:
    code = "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\nout(b'one'); await_file('go'); out(b'two')"
    process = bench.start(*bench.python(code), stdout=subprocess.PIPE)
    read_until(process.stdout.fileno(), b"one")
    wait_until(lambda: bench.seen() == b"one", "the first bytes")
    os.kill(bench.pump(), signal.SIGKILL)
    wait_until(lambda: not alive(bench.pump()), "the end of the pump")
    bench.mark("go")
    process.wait(60)
    assert bench.seen() == b"one"
    assert (bench.report()["gap"], bench.report()["code"]) == (True, 128 + signal.SIGPIPE)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare on this machine")
def test_as_pid_1_it_waits_for_the_pump(bench: Bench) -> None:
    """The end of PID 1 is the end of the pump: what the reader has not taken by then is lost.

    The bytes fit into two pipes and the pump, so that the command has ended before anybody reads.
    """
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us make a PID namespace")
    process = subprocess.Popen(
        [*unshare, *bench.words(*bench.python("out(b'x' * 150_000); mark('written')"))],
        env=bench.environ(),
        cwd=bench.place,
        stdout=subprocess.PIPE,
    )
    bench.started.append(process)
    bench.wait_for("written")
    time.sleep(0.5)  # the reader is late
    out, _err = process.communicate(timeout=60)
    assert out == b"x" * 150_000
    assert bench.report()["left"] is False


def test_a_terminal_shows_the_same_with_and_without(bench: Bench) -> None:
    code = (
        "print([os.isatty(fd) for fd in (0, 1, 2)], os.get_terminal_size(), os.get_terminal_size(2))\n"
        "print('\\x1b[32mgreen\\x1b[0m'); print('10 %\\r20 %\\r', end='')\n"
        "print(sorted(os.listdir('/proc/self/fd')), os.ttyname(0) == os.ctermid() or os.getpgrp() == os.tcgetpgrp(0))"
    )
    command = bench.python(code)
    without = Terminal(command, bench.environ(), bench.place).end()
    tapped = Terminal(bench.words(*command), bench.environ(), bench.place).end()
    assert b"[True, True, True] os.terminal_size(columns=77, lines=33)" in without
    assert tapped == without
    assert bench.seen() == without.replace(b"\r\n", b"\n")


def test_many_bytes_pass_a_terminal_unaltered(bench: Bench) -> None:
    code = "block = bytes(range(256)) * 16\nfor n in range(1000): out(n.to_bytes(4, 'big') + block)"
    tapped = Terminal(bench.words(*bench.python(code)), bench.environ(), bench.place, raw=True).end()
    block = bytes(range(256)) * 16
    assert tapped == b"".join(n.to_bytes(4, "big") + block for n in range(1000))


def test_a_new_size_of_the_terminal_is_known_when_the_command_is_told(bench: Bench) -> None:
    code = (
        "signal.signal(signal.SIGWINCH, lambda *_: out(b'size (%d, %d)' % tuple(size())))\nout(b'ready')\n"
        "while not os.path.exists(os.path.join(os.environ['PLACE'], 'go')): time.sleep(0.01)"
    )
    terminal = Terminal(bench.words(*bench.python(code)), bench.environ(), bench.place)
    terminal.read_until(b"ready")
    for rows, columns in ((40, 100), (20, 60), (50, 200)):
        terminal.resize(rows, columns)
        terminal.read_until(b"size (%d, %d)" % (rows, columns))
    bench.mark("go")
    terminal.end()


def test_ctrl_c_reaches_the_command_and_not_the_pump(bench: Bench) -> None:
    code = (
        "seen = []\nsignal.signal(signal.SIGINT, lambda *_: seen.append(1))\nout(b'ready')\n"
        "await_file('go')\nout(b'interrupts %d' % len(seen))"
    )
    terminal = Terminal(bench.words(*bench.python(code)), bench.environ(), bench.place)
    terminal.read_until(b"ready")
    terminal.type(b"\x03")
    terminal.read_until(b"^C")
    bench.mark("go")
    assert b"interrupts 1" in terminal.end()
    assert bench.report()["code"] == 0


def test_a_pump_that_is_just_starting_is_deaf_to_signals(bench: Bench) -> None:
    """Ctrl-C, a hang-up, and a service manager that ends a whole group may come any time."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGUSR1)
    storm = " ".join(str(int(number)) for number in numbers)
    process = bench.start(*bench.python("out(b'still here')"), stdout=subprocess.PIPE, STORM=storm)
    assert process.communicate(timeout=60)[0] == b"still here"
    assert bench.seen() == b"still here"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash, so no job control to try")
def test_ctrl_z_and_fg_work(bench: Bench) -> None:
    words = " ".join(f"'{word}'" for word in bench.words(*bench.python('out(b"ready"); await_file("go"); out(b"on")')))
    bench.place.joinpath("job").write_text(words)
    environ = bench.environ(PS1="$ ", BASH_SILENCE_DEPRECATION_WARNING="1")
    terminal = Terminal([shutil.which("bash") or "", "--norc", "--noprofile", "-i"], environ, bench.place)
    terminal.read_until(b"$ ")
    terminal.type(b". ./job\n")
    terminal.read_until(b"ready")
    terminal.type(b"\x1a")
    terminal.read_until(b"Stopped")
    bench.mark("go")
    terminal.type(b"fg; echo code=$?; exit\n")
    shown = terminal.end()
    assert b"on" in shown
    assert b"code=0" in shown


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_one_file_for_both_streams_keeps_their_order(bench: Bench, kind: str) -> None:
    code = "for n in range(3000): os.write(1 + n % 2, b'%d\\n' % n)"
    expected = b"".join(b"%d\n" % n for n in range(3000))
    if kind == "pipe":
        process = bench.start(*bench.python(code), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.communicate(timeout=60)[0] == expected
    else:
        assert Terminal(bench.words(*bench.python(code)), bench.environ(), bench.place, raw=True).end() == expected
    assert bench.seen() == expected


@pytest.mark.parametrize("kind", ["pipe", "socket", "fifo"])
def test_a_pipe_stays_a_pipe_and_a_socket_a_socket(bench: Bench, kind: str) -> None:
    code = "mode = os.fstat(1).st_mode\nout(b'%d%d' % (stat.S_ISFIFO(mode), stat.S_ISSOCK(mode)))"
    if kind == "socket":
        ours, theirs = socket.socketpair()
        reading, writing = ours.detach(), theirs.detach()
    elif kind == "fifo":
        os.mkfifo(bench.place / "fifo")
        reading = os.open(bench.place / "fifo", os.O_RDONLY | os.O_NONBLOCK)
        writing = os.open(bench.place / "fifo", os.O_WRONLY)
        os.set_blocking(reading, True)
    else:
        reading, writing = os.pipe()
    process = bench.start(*bench.python(code), stdout=writing)
    os.close(writing)
    read = read_all(reading)
    process.wait(60)
    os.close(reading)
    assert read == bench.seen() == (b"01" if kind == "socket" else b"10")


def test_a_fifo_may_change_its_reader(bench: Bench) -> None:
    fifo = bench.place / "fifo"
    os.mkfifo(fifo)
    first = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(fifo, os.O_WRONLY)
    process = bench.start(*bench.python("out(b'one'); await_file('go'); out(b'two')"), stdout=writing)
    os.close(writing)
    os.set_blocking(first, True)
    assert read_until(first, b"one") == b"one"
    os.close(first)
    time.sleep(0.3)  # nobody reads for a while
    second = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(second, True)
    bench.mark("go")
    assert read_until(second, b"two") == b"two"
    os.close(second)
    assert process.wait(60) == 0


@pytest.mark.parametrize("append", [False, True])
def test_a_regular_file_is_the_commands_own(bench: Bench, append: bool) -> None:
    target = bench.place / "target"
    target.write_bytes(b"older, and longer than what is new")
    code = "out(b'%d ' % os.fstat(1).st_ino); err(b'both'); await_file('go'); out(b' more')"
    flags = os.O_WRONLY | (os.O_APPEND if append else 0)
    fd = os.open(target, flags)
    os.lseek(fd, 5, os.SEEK_SET)
    process = bench.start(*bench.python(code), stdout=fd, stderr=fd)
    os.close(fd)
    written = b"%d both more" % target.stat().st_ino
    wait_until(lambda: bench.seen() == written.removesuffix(b" more"), "what was written so far")
    bench.mark("go")
    assert process.wait(60) == 0
    assert bench.seen() == written
    assert json.loads((bench.place / "pumps").read_text()) == []
    old = b"older, and longer than what is new"
    assert target.read_bytes() == (old + written if append else old[:5] + written + old[5 + len(written) :])


@pytest.mark.parametrize("append", [False, True])
def test_a_file_may_be_cut_while_it_is_written(bench: Bench, append: bool) -> None:
    target = bench.place / "target"
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0))
    process = bench.start(*bench.python("out(b'before cut'); await_file('go'); out(b'after')"), stdout=fd)
    os.close(fd)
    wait_until(lambda: bench.seen() == b"before cut", "what was written so far")
    os.truncate(target, 0)
    bench.mark("go")
    assert process.wait(60) == 0
    assert bench.seen() == b"before cutafter"


def test_a_file_and_a_pipe_are_both_seen(bench: Bench) -> None:
    with open(bench.place / "target", "wb") as target:
        process = bench.start(*bench.python("out(b'file'); err(b'pipe')"), stdout=target, stderr=subprocess.PIPE)
    assert process.communicate(timeout=60)[1] == b"pipe"
    assert (bench.seen(), bench.seen("stderr")) == (b"file", b"pipe")


def test_a_full_disk_is_told_to_the_command(bench: Bench) -> None:
    code = "try: out(b'x')\nexcept OSError as error: err(b'%d' % error.errno)"
    with open("/dev/full", "wb") as full:
        process = bench.start(*bench.python(code), stdout=full, stderr=subprocess.PIPE)
    assert process.communicate(timeout=60)[1] == b"28"
    assert list(bench.report()["unseen"]) == ["stdout"]


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_stream_stays_closed(bench: Bench, closed: int) -> None:
    other = 3 - closed
    code = f"try: os.fstat({closed})\nexcept OSError as error: put({other}, b'%d' % error.errno)"
    words = bench.words(*bench.python(code))
    shell = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *words]
    done = subprocess.run(shell, env=bench.environ(), cwd=bench.place, capture_output=True, check=False, timeout=60)
    names = ("stdout", "stderr")
    assert (done.stdout, done.stderr)[other - 1] == b"9"
    assert bench.seen(names[other - 1]) == b"9"
    assert bench.report()["unseen"] == {names[closed - 1]: "it is closed"}


def test_a_reader_that_leaves_ends_the_command(bench: Bench) -> None:
    process = bench.start("yes", stdout=subprocess.PIPE)
    assert process.stdout.read(10) == b"y\n" * 5
    process.stdout.close()
    process.wait(60)
    assert bench.report()["code"] == 128 + signal.SIGPIPE
    assert bench.report()["left"] is False


def test_a_reader_that_has_left_is_noticed_before_the_next_write(bench: Bench) -> None:
    code = (
        "import select\nsignal.signal(signal.SIGPIPE, signal.SIG_DFL)\nout(b'one')\npoll = select.poll()\n"
        "poll.register(1, 0)\npoll.poll()\nout(b'two')"
    )
    process = bench.start(*bench.python(code), stdout=subprocess.PIPE)
    assert process.stdout.read(3) == b"one"
    process.stdout.close()
    process.wait(60)
    assert bench.report()["code"] == 128 + signal.SIGPIPE


def test_a_terminal_that_goes_away_ends_the_writes(bench: Bench) -> None:
    code = (
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nout(b'ready')\nawait_file('go')\n"
        "try:\n  while True: out(b'x'); time.sleep(0.01)\nexcept OSError as error: mark('errno%d' % error.errno)"
    )
    terminal = Terminal(bench.words(*bench.python(code)), bench.environ(), bench.place)
    terminal.read_until(b"ready")
    os.close(terminal.controller)
    bench.mark("go")
    bench.wait_for("errno5")
    os.waitpid(terminal.pid, 0)


def test_a_reader_that_stalls_stalls_the_command_and_only_that_stream(bench: Bench) -> None:
    code = (
        "import threading\nwritten = 0\ndef write():\n  global written\n"
        "  for n in range(400): out(b'%09d\\n' % n * 1000); written += 10000\n"
        "thread = threading.Thread(target=write)\nthread.start()\nbefore = -1\n"
        "while before != written: before = written; time.sleep(0.5)\nerr(b'%d\\n' % written)\nthread.join()"
    )
    process = bench.start(*bench.python(code), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    written = int(process.stderr.readline())
    assert 0 < written < 400_000
    out, _err = process.communicate(timeout=60)
    assert out == b"".join(b"%09d\n" % n * 1000 for n in range(400))


def test_a_reader_that_stalls_at_the_end_does_not_hold_us(bench: Bench) -> None:
    """What the command wrote arrives all the same, from the pump; which nobody takes for something left behind."""
    code = "out(b'x' * 150_000)"
    process = bench.start(*bench.python(code), stdout=subprocess.PIPE, FINISH="0.2", LINGER="60")
    process.wait(30)
    assert bench.report() == {"code": 0, "left": False, "whole": False, "unseen": {}, "gap": False}
    assert process.stdout.read() == b"x" * 150_000


def test_our_death_changes_nothing_for_the_command(bench: Bench) -> None:
    code = "for n in range(20_000):\n  out(b'%d\\n' % n * 20)\n  if n == 5000: mark('middle'); await_file('go')"
    process = bench.start(*bench.python(code), stdout=subprocess.PIPE)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(read_all(process.stdout.fileno())))
    reader.start()
    bench.wait_for("middle")
    process.kill()
    process.wait(30)
    bench.mark("go")
    reader.join()
    assert read == [b"".join(b"%d\n" % n * 20 for n in range(20_000))]
    wait_until(lambda: not alive(bench.pump()), "the end of the pump")


def test_our_death_in_the_midst_of_a_stream_loses_no_byte(bench: Bench) -> None:
    process = bench.start(*bench.python(BULK), stdout=subprocess.PIPE)
    digest = hashlib.sha256(process.stdout.read(1 << 20))
    process.kill()
    while piece := process.stdout.read(1 << 20):
        digest.update(piece)
    process.wait(30)
    assert digest.hexdigest() == bulk()


def test_our_death_leaves_a_terminal_working(bench: Bench) -> None:
    code = (
        "out(b'ready %d\\n' % os.getppid()); await_file('go')\n"
        "end = time.monotonic() + 60\n"  # the new size reaches us when the pump has seen it
        "while size()[0] != 11 and time.monotonic() < end: time.sleep(0.01)\n"
        "out(b'%d rows on' % size()[0]); mark('over')"
    )
    # A shell leads the session: the death of the leader would hang the terminal up.
    shell = ["/bin/sh", "-c", '"$@"; while [ ! -e "$PLACE/over" ]; do sleep 0.05; done', "sh"]
    terminal = Terminal([*shell, *bench.words(*bench.python(code))], bench.environ(), bench.place)
    (driver,) = re.findall(rb"ready (\d+)\r", terminal.read_until(b"\n"))
    os.kill(int(driver), signal.SIGKILL)
    terminal.read_until(b"Killed")
    terminal.resize(11, 22)
    bench.mark("go")
    assert b"11 rows on" in terminal.end()


def test_somebody_left_behind_who_holds_the_stream_does_not_hold_us(bench: Bench) -> None:
    shell = f'("{PYTHON}" -c "$LATER" & echo $! >"$PLACE/pid"); echo first'
    later = PRELUDE + "await_file('go'); out(b'later')"
    process = bench.start("sh", "-c", shell, stdout=subprocess.PIPE, LINGER="0.2", LATER=later)
    process.wait(30)
    assert bench.report()["left"] is True
    assert bench.report()["whole"] is True
    assert bench.seen() == b"first\n"
    assert alive(bench.pump())
    bench.mark("go")
    assert process.stdout.read() == b"first\nlater"
    wait_until(lambda: not alive(bench.pump()), "the end of the pump")


def test_a_chatterbox_left_behind_does_not_hold_us(bench: Bench) -> None:
    process = bench.start("sh", "-c", 'yes & echo $! >"$PLACE/pid"', stdout=subprocess.PIPE, LINGER="0.1")
    # Slower than what it says, so that there is always more.
    reader = threading.Thread(target=read_all, args=(process.stdout.fileno(),), kwargs={"pause": 0.002})
    reader.start()
    process.wait(30)
    assert bench.report()["whole"] is True
    os.kill(int((bench.place / "pid").read_text()), signal.SIGKILL)
    reader.join()


def test_the_pump_holds_nothing_open_but_the_streams(bench: Bench) -> None:
    code = "if not os.fork(): os.close({fd}); await_file('go')"
    with pipe() as (reading, writing):
        words = bench.python(code.format(fd=writing))
        process = bench.start(*words, stdout=subprocess.PIPE, fds=(writing,), LINGER="0.1")
        os.close(writing)
        process.wait(30)
        assert alive(bench.pump())
        assert read_some(reading) == b""
    bench.mark("go")
    assert process.stdout.read() == b""


def test_a_stream_that_the_command_closes_is_closed(bench: Bench) -> None:
    code = "os.close(1); await_file('go'); err(b'on')"
    process = bench.start(*bench.python(code), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    bench.wait_for("pumps")
    # The driver holds the original too, as every parent does; the pump must not.
    wait_until(lambda: "1" not in os.listdir(f"/proc/{bench.pump()}/fd"), "the pump letting go")
    bench.mark("go")
    assert process.communicate(timeout=60) == (b"", b"on")


@pytest.mark.parametrize("broken", ["EXECUTABLE=/nowhere/python", "EXECUTABLE=/bin/false", "PUMP=/nowhere/pump.py"])
def test_without_a_pump_the_command_gets_the_originals(bench: Bench, broken: str) -> None:
    code = "out(b'%d ' % os.fstat(1).st_ino); sys.exit(3)"
    variables: dict[str, Any] = dict([broken.split("=")])
    with pipe() as (reading, writing):
        process = bench.start(*bench.python(code), stdout=writing, stderr=subprocess.PIPE, **variables)
        os.close(writing)
        assert read_all(reading) == b"%d " % os.fstat(reading).st_ino
        process.communicate(timeout=60)
    assert bench.report()["code"] == 3
    assert bench.report()["left"] is False
    assert bench.report()["unseen"].keys() == {"stdout", "stderr"}
    assert bench.seen() == b""


def test_a_command_that_cannot_be_started_leaves_no_pump(bench: Bench) -> None:
    process = bench.start("/nowhere/at/all", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=30)
    assert out == b"", "both streams have come to an end, so that nobody holds them"
    assert b"NoSuchCommandError" in err


def test_a_writer_that_does_not_wait_is_told_to_try_again(bench: Bench) -> None:
    """And an original that does not block is waited for, not spun on or taken for an end."""
    code = "out(b'y' * 300_000)"
    with pipe() as (reading, writing):
        os.set_blocking(writing, False)
        process = bench.start(*bench.python(code), stdout=writing)
        os.close(writing)
        time.sleep(0.3)
        assert read_all(reading) == b"y" * 300_000
        process.wait(30)
    assert bench.report()["code"] == 0
