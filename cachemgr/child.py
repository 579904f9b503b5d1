"""Start a command as a child, pass signals on to it, and report how it ended.

The child inherits standard streams, working directory and process group, so that a terminal stays a terminal and
Ctrl-C reaches it from the kernel. Only signals that a process sent to *us* are forwarded; those of the terminal have
reached the child already, and a second one would make many servers quit at once.
"""

import errno
import os
import shutil
import signal
from collections.abc import Mapping, Sequence

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


def resolve(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """The file that `argv[0]` names in the child's PATH.

    Raises:
        NoSuchCommandError: nothing of that name.
        CannotExecuteError: something that cannot be executed.
    """
    name = argv[0]
    found = shutil.which(name, path=environ.get("PATH", os.defpath))
    if found is not None:
        return found
    if "/" in name and os.path.exists(name):
        raise CannotExecuteError(f"`{name}` cannot be executed", hint=f"chmod +x {name}, or name an interpreter")
    raise NoSuchCommandError(f"no command `{name}`", hint="give it after `--`, as in `cachemgr run -- python x.py`")


class Child:
    """A running command. Signals are watched from `start` until `wait` has returned."""

    def __init__(self, pid: int, mask: set[signal.Signals]) -> None:
        self.pid = pid
        self._mask = mask

    @classmethod
    def start(cls, argv: Sequence[str], environ: Mapping[str, str]) -> "Child":
        """Start `argv` with exactly `environ`.

        Raises:
            NoSuchCommandError, CannotExecuteError: as `resolve`, or the kernel refuses the file.
        """
        path = resolve(argv, environ)
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
