"""The processes of a command: find its file, ask short questions, start it and pass signals on to it.

A question is bounded in time, cannot read our terminal, and an answer that does not come is no answer.

The child inherits standard streams, working directory and process group, so that a terminal stays a terminal and
Ctrl-C reaches it from the kernel. Only signals that a process sent to *us* are forwarded; those of the terminal have
reached the child already, and a second one would make many servers quit at once.
"""

import contextlib
import errno
import os
import signal
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from cachemgr.errors import CannotExecuteError, NoSuchCommandError

_WATCHED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
    signal.SIGCONT,
    signal.SIGWINCH,
)
_NOT_EXECUTABLE = frozenset({errno.EACCES, errno.ENOEXEC, errno.EPERM, errno.EISDIR, errno.ETXTBSY, errno.EINVAL})


class Ended(msgspec.Struct, frozen=True):
    """How a child ended."""

    code: int
    """Its exit code, or 128+n when signal n ended it."""
    signal: int | None


def ask(argv: Sequence[str], environ: Mapping[str, str], cwd: Path, seconds: float) -> bytes | None:
    """What `argv` prints to stdout, or None when it fails, cannot start or takes longer than `seconds`."""
    try:
        # A session of its own: a shim's grandchildren hold the pipe open after the shim itself is dead.
        process = subprocess.Popen(
            list(argv),
            env=dict(environ),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError):
        return None
    with process:
        try:
            answer, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            return None
    return answer if process.returncode == 0 else None


def resolve(name: str, environ: Mapping[str, str], cwd: Path) -> Path:
    """The file that executing `name` with the child's PATH and directory would run.

    Raises:
        NoSuchCommandError: there is no such file.
        CannotExecuteError: there is one, and it may not be executed.
    """
    if "/" in name:
        candidates = [cwd / name]
    else:
        # A missing PATH means the default path, an empty entry the current directory, as for execvp(3).
        candidates = [cwd / folder / name for folder in environ.get("PATH", os.defpath).split(":")] if name else []
    found = [(path, mode) for path in candidates if (mode := _mode(path)) is not None]
    for path, mode in found:
        if stat.S_ISREG(mode) and os.access(path, os.X_OK):
            return path
    if found:
        raise CannotExecuteError(
            f"`{name}` cannot be executed ({found[0][0]})", hint=f"chmod +x {found[0][0]}, or name an interpreter"
        )
    raise NoSuchCommandError(f"no command `{name}`", hint="check its spelling and PATH; it goes after `--`")


def find(name: str, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """Like `resolve`, and None where it raises."""
    try:
        return resolve(name, environ, cwd)
    except (NoSuchCommandError, CannotExecuteError):
        return None


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return None


class Child:
    """A running command. Signals are watched from `start` until `wait` has returned."""

    def __init__(self, pid: int, mask: set[signal.Signals]) -> None:
        self.pid = pid
        self._mask = mask

    @classmethod
    def start(cls, argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> "Child":
        """Start `argv` with exactly `environ` in our working directory, which is `cwd`.

        Raises:
            NoSuchCommandError, CannotExecuteError: as `resolve`, or the kernel refuses the file.
        """
        path = resolve(argv[0], environ, cwd)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [*_WATCHED, signal.SIGCHLD])
        try:
            # Python ignores SIGPIPE and SIGXFSZ for itself; the command must not inherit that.
            pid = os.posix_spawn(
                path, list(argv), dict(environ), setsigmask=mask, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ]
            )
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if error.errno in _NOT_EXECUTABLE:
                raise CannotExecuteError(f"`{path}` cannot be executed: {error.strerror}") from None
            raise NoSuchCommandError(f"`{path}` cannot be started: {error.strerror}") from None
        return cls(pid, {signal.Signals(number) for number in mask})

    def wait(self) -> Ended:
        """Forward signals until the child has ended."""
        try:
            while (status := self._changed()) is None or os.WIFSTOPPED(status):
                if status is None:
                    self._forward(signal.sigwaitinfo([*_WATCHED, signal.SIGCHLD]))
                else:
                    self._stop_along()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        if os.WIFSIGNALED(status):
            return Ended(128 + os.WTERMSIG(status), os.WTERMSIG(status))
        return Ended(os.WEXITSTATUS(status), None)

    def _changed(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        return status if pid else None

    def _forward(self, received: signal.struct_siginfo) -> None:
        sent_by_a_process = received.si_code <= 0
        if received.si_signo != signal.SIGCHLD and sent_by_a_process:
            os.kill(self.pid, received.si_signo)

    def _stop_along(self) -> None:
        """Ctrl-Z stopped the child: stop too, so that the shell gets its terminal back, and go on together."""
        os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(self.pid, signal.SIGCONT)
