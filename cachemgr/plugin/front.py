"""The front process of a launch: it has the one `cachemgr attend` child, and hands on what that says.

The child gets what is known as a file on its standard input, so that no write to it can block, and answers with one
line on its standard output. It leaves the front process at once: an engine that ends kills its children (0.26-0.33
utils/system_utils.py, kill_process_tree), and a program may wait for any child of its own. What is left is its process
group, which is killed when the deadline passes without an answer: then the engine goes on cold.

A process that finds a launch in its environment only joins it. So does a second engine in one process: variables are
per process, and the first engine's are in use.
"""

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import IO

from cachemgr.plugin import switch
from cachemgr.plugin.arguments import described
from cachemgr.plugin.wire import DESK_VARIABLE, WIRE

_NEEDS = ("click", "filelock", "msgspec", "xxhash", "yaml", "zstandard")
"""What the child imports; looked for, never imported here."""

# A working directory is no place to find modules in, and `-m` would look there first.
_START = "import sys; sys.path[:] = [place for place in sys.path if place]; from cachemgr.__main__ import main; main()"

_READ_AT_IMPORT = {
    # torch 2.11-2.13 _inductor/config.py; with a CPU the engine's core may run in this process, or be forked from it
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": ("torch._inductor.config", "cpp_cache_precompile_headers"),
}
"""Switches that a module read when it was imported, which was before the answer came."""

_MOST_BYTES = 1 << 20
_REAP_SECONDS = 2.0


class Child:
    """A `cachemgr attend` that was started and has not answered yet."""

    def __init__(self, process: "subprocess.Popen[bytes]", began: float, seconds: float) -> None:
        self._process, self._end = process, began + seconds
        self.died = False
        """Whether it ended without an answer."""

    @classmethod
    def start(cls, order: Mapping[str, object], seconds: float) -> "Child":
        """Start it with `order`, and give it so many seconds to answer. Raises OSError."""
        began = time.monotonic()
        command, environ = _command()
        launched = {**order, "began": began, "seconds": seconds}
        with _file_of(json.dumps(launched).encode()) as stdin:
            process = subprocess.Popen(
                [*command, "attend"], stdin=stdin, stdout=subprocess.PIPE, env=environ, start_new_session=True
            )
        return cls(process, began, seconds)

    def answer(self) -> dict[str, object] | None:
        """What it says, or None when it says nothing in time; then there is no child any more."""
        line = self._line()
        with suppress(Exception):
            assert self._process.stdout is not None, "it is a pipe"
            self._process.stdout.close()
        if line is None:
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._reap()
        return line

    def _line(self) -> dict[str, object] | None:
        assert self._process.stdout is not None, "it is a pipe"
        pipe, data = self._process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(pipe, select.POLLIN | select.POLLHUP)
        while len(data) < _MOST_BYTES:
            if not poll.poll(max(0.0, self._end - time.monotonic()) * 1000):
                return None
            piece = os.read(pipe, 1 << 16)
            if not piece:
                self.died = True
                return None
            data += piece
            *lines, _rest = data.split(b"\n")
            for line in lines:
                if (answer := _parsed(line)) is not None:
                    return answer
        return None

    def _reap(self) -> None:
        """The process that we started has given way to its own child long ago; a hung one was killed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_SECONDS)


def _parsed(line: bytes) -> dict[str, object] | None:
    """An answer; whatever else a start-up file of that Python prints is none."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "cachemgr" in found else None


def _command() -> tuple[list[str], dict[str, str]]:
    """The words that start cachemgr, and the environment for it."""
    environ = dict(os.environ)
    chosen = switch.setting("bin", environ)
    if chosen:
        # It lives in another environment, and must not find this one's modules.
        return [chosen], {name: value for name, value in environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    return [sys.executable, "-c", _START], environ


def _file_of(data: bytes) -> IO[bytes]:
    """A file that nobody can find, at its beginning."""
    try:
        file: IO[bytes] = os.fdopen(os.memfd_create("cachemgr-order"), "w+b")
    except (AttributeError, OSError):
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(data)
    file.seek(0)
    return file


@dataclass
class _State:
    """What this process knows of its launch."""

    child: Child | None = None
    tried: bool = False
    patience: float = 0.0
    waiting: float = 0.0
    engines: int = 0
    """Engines that it has begun to make."""


_state = _State()


def patience() -> float:
    """Seconds that a process of the engine waits for an answer."""
    return _state.patience


def waiting() -> float:
    """Seconds more that it waits for an entry which another machine compiles, if somebody asked for that."""
    return _state.waiting


def arrive() -> bool:
    """This process loads plugins. Whether hooks have anything to do here."""
    _state.patience = switch.deadline(os.environ)
    _state.waiting = switch.single_flight(os.environ)
    if os.environ.get(switch.LAUNCH_VARIABLE):
        return bool(os.environ.get(DESK_VARIABLE))
    if switch.starts_engine(sys.argv):
        _start(None)
    return True


def configure(engine_args: object) -> None:
    """An engine is about to be configured: from here on its launch must be in charge, or not at all."""
    _state.engines += 1
    if os.environ.get(switch.LAUNCH_VARIABLE):
        WIRE.tell(again=_state.engines > 1)
        return
    if not _state.tried:
        _start(engine_args)
    child, _state.child = _state.child, None
    answer = None if child is None else child.answer()
    if child is not None and answer is None:
        why = "ended without an answer" if child.died else f"did not answer in {_state.patience:.0f} s"
        say(f"`cachemgr attend` {why}, so this start goes on without it")
    use(answer)


def answer_to(order: Mapping[str, object], seconds: float) -> dict[str, object] | None:
    """What a new child answers to `order`, waited for; None when it does not."""
    try:
        answer = Child.start(order, seconds).answer()
    except Exception as error:  # noqa: BLE001 - whatever it is, the engine starts without us
        say(f"`cachemgr attend` cannot be started: {error}")
        return None
    if answer is None:
        say("`cachemgr attend` gave no answer, so this node goes on without it")
    return answer


def can_start() -> bool:
    """Whether there is a child to start; said where there is not."""
    from importlib.util import find_spec

    if switch.setting("bin", os.environ):
        return True
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing or not sys.executable:
        why = f"{', '.join(missing) or 'a Python to start it with'} is not installed here"
        say(f"the plugin stays off: {why}; install cachemgr with its dependencies, or set CACHEMGR_BIN")
        return False
    return True


def _start(engine_args: object | None) -> None:
    _state.tried = True
    if not can_start():
        return
    order = {
        "argv": [sys.executable, *sys.orig_argv[1:]],
        "environ": _original(),
        "now": dict(os.environ),
        "cwd": working_directory(),
        "pid": os.getpid(),
        "engine_args": None if engine_args is None else described(engine_args),
    }
    try:
        _state.child = Child.start(order, _state.patience)
    except Exception as error:  # noqa: BLE001 - whatever it is, the engine starts without us
        say(f"`cachemgr attend` cannot be started: {error}")


def use(answer: Mapping[str, object] | None) -> None:
    """Put what the child says into the environment; what it does not say is no launch of ours."""
    variables = None if answer is None else answer.get("variables")
    if not isinstance(variables, dict):
        # Nobody else in this start tries again.
        os.environ[switch.LAUNCH_VARIABLE] = f"off-{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        return
    for name, value in variables.items():
        if isinstance(name, str) and isinstance(value, str):
            os.environ[name] = value
            _make_effective(name, value)
    WIRE.renew()
    WIRE.tell(again=False)


def _make_effective(name: str, value: str) -> None:
    """Also where a module has read the variable already."""
    module_name, attribute = _READ_AT_IMPORT.get(name, ("", ""))
    module = sys.modules.get(module_name)
    if module is not None and hasattr(module, attribute):
        setattr(module, attribute, value == "1")


def working_directory() -> str:
    """As `cachemgr.places` has it: of a deleted one, a name that leads there."""
    try:
        return os.getcwd()
    except OSError:
        return "/proc/self/cwd"


def _original(path: str = "/proc/self/environ") -> dict[str, str]:
    """The environment that this process began with: importing vLLM changes `os.environ`, and the key must be the one
    that `cachemgr run` derives. Where somebody has overwritten that memory (setproctitle does), what there is now."""
    try:
        with open(path, "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return dict(os.environ)
    words = [word for word in words if word]
    if not words or not all(b"=" in word[1:] for word in words):
        return dict(os.environ)
    return dict(os.fsdecode(word).split("=", 1) for word in words)


def say(line: str) -> None:
    """One line for people."""
    with suppress(Exception):
        sys.stderr.write(f"cachemgr: {line}\n")
        sys.stderr.flush()
