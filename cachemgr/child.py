"""Start a command as a child, pass signals on to it, and report how it ended.

The child inherits standard streams, working directory and process group, so that a terminal stays a terminal and
Ctrl-C reaches it from the kernel. Only signals that a process sent to *us* are forwarded; those of the terminal have
reached the child already, and a second one would make many servers quit at once.

Whatever the child leaves behind becomes our child too: as PID 1 of a container anyway, elsewhere because we ask to be
the subreaper. So nothing stays a zombie, and we know whether somebody still writes into the caches. Our own death does
not take the child along.
"""

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from cachemgr.errors import CannotExecuteError, NoProcessError, NoSuchCommandError
from cachemgr.executables import resolve
from cachemgr.process import children

_OURS = {
    *(signal.SIGKILL, signal.SIGSTOP),  # nobody can catch these
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS, signal.SIGABRT),
    *(signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTIN, signal.SIGTTOU),  # answers to what we do ourselves
}
"""Every other signal is for the command: a container may be stopped by any, a batch system warns by some."""
_WATCHED = tuple(signal.valid_signals() - _OURS)
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_NOT_EXECUTABLE = frozenset({errno.EACCES, errno.ENOEXEC, errno.EPERM, errno.EISDIR, errno.ETXTBSY, errno.EINVAL})
_NO_PROCESS = frozenset({errno.EAGAIN, errno.ENOMEM})
_PR_SET_CHILD_SUBREAPER = 36
_LINGER_STEP_SECONDS = 0.05


class Ended(msgspec.Struct, frozen=True):
    """How a child ended."""

    code: int
    """Its exit code, or 128+n when signal n ended it."""
    signal: int | None
    left_behind: bool
    """Whether processes that it started were still running when we stopped waiting for them."""
    told: bool = False
    """Whether somebody told us to end meanwhile, by a signal or at the keyboard."""

    @classmethod
    def of_status(cls, status: int, *, left_behind: bool, told: bool = False) -> "Ended":
        """By the status that waitpid(2) gives."""
        if os.WIFSIGNALED(status):
            return cls(128 + os.WTERMSIG(status), os.WTERMSIG(status), left_behind, told)
        return cls(os.WEXITSTATUS(status), None, left_behind, told)


class Child:
    """A running command. Signals are watched from `start` until `wait` has returned."""

    def __init__(self, pid: int, mask: Collection[int]) -> None:
        self.pid = pid
        self._mask = mask
        self._status: int | None = None
        self._alone = False
        self._told = False
        self._apart: Callable[[], set[int]] = set
        self._reaped: set[int] = set()

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        environ: Mapping[str, str],
        cwd: Path,
        *,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> "Child":
        """Start `argv` with exactly `environ` in our working directory, which is `cwd`.

        `stdout` and `stderr` are descriptors above 2 that it gets in place of ours.

        Raises:
            NoSuchCommandError, CannotExecuteError: as `resolve`, or the kernel refuses the file.
            NoProcessError: it refuses another process.
        """
        path = resolve(argv[0], environ, cwd)
        _be_subreaper(1)
        # A parent that ignores SIGCHLD hands that down, and then the kernel keeps no exit status for us.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        replaced = [(os.POSIX_SPAWN_DUP2, fd, number) for fd, number in ((stdout, 1), (stderr, 2)) if fd is not None]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        try:
            # Python ignores SIGPIPE and SIGXFSZ for itself; the command must not inherit that.
            pid = os.posix_spawn(
                path,
                list(argv),
                dict(environ),
                file_actions=replaced,
                setsigmask=mask,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if error.errno in _NO_PROCESS:
                _be_subreaper(0)
                raise NoProcessError(f"no process for `{path}` can be started: {error.strerror}") from None
            if error.errno in _NOT_EXECUTABLE:
                raise CannotExecuteError(f"`{path}` cannot be executed: {error.strerror}") from None
            raise NoSuchCommandError(f"`{path}` cannot be started: {error.strerror}") from None
        return cls(pid, mask)

    def wait(self, *, linger: float, apart: Callable[[], set[int]] = set) -> Ended:
        """Forward signals until the child has ended, then wait `linger` seconds for what it left behind.

        `apart` says which children of ours are not the command's: they are reaped and never waited for.
        Nothing else happens here: whoever signals us must not wait for a file system.
        """
        self._apart = apart
        try:
            while self._status is None:
                self._reap()
                if self._status is None:
                    self._forward(signal.sigwaitinfo(_WATCHED))
            status = self._status
            self._told = _forget_the_keyboard() or self._told
            end = time.monotonic() + linger
            while not self._alone and time.monotonic() < end:
                signal.sigtimedwait([signal.SIGCHLD], _LINGER_STEP_SECONDS)
                self._reap()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        return Ended.of_status(status, left_behind=not self._alone, told=self._told)

    def _reap(self) -> None:
        """Collect everything that has ended; ours may have stopped instead."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                self._alone = True
                return
            if pid == 0:
                # While the child runs nobody asks, and the answer takes a look at every process.
                apart = self._apart() - self._reaped
                self._alone = self._status is not None and bool(apart) and children(os.getpid()) <= apart
                return
            if pid in self._apart() and not os.WIFSTOPPED(status):
                self._reaped.add(pid)  # its number may be given to a process of the command
            if pid == self.pid and os.WIFSTOPPED(status):
                self._stop_along()
            elif pid == self.pid:
                self._status = status

    def _forward(self, received: signal.struct_siginfo) -> None:
        sent_by_a_process = received.si_code <= 0
        self._told = self._told or received.si_signo in _ENDING
        if received.si_signo != signal.SIGCHLD and sent_by_a_process:
            with suppress(ProcessLookupError):
                os.kill(self.pid, received.si_signo)

    def _stop_along(self) -> None:
        """Ctrl-Z stopped the child: stop too, so that the shell gets its terminal back, and go on together.

        A session without job control (PID 1, a container) has nobody who would wake us, and the kernel would not stop
        PID 1 at all: then whoever stopped the child wakes it.
        """
        if os.getpid() == 1:
            return
        os.kill(os.getpid(), signal.SIGSTOP)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)


def _be_subreaper(whether: int) -> None:
    """Linux 3.4 and newer; where it is refused, orphans go to init as they always did."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, whether, 0, 0, 0)


def _forget_the_keyboard() -> bool:
    """Ctrl-C or Ctrl-\\ that came before we waited, when the command has ended since: it was meant for the command.
    Whether there was one."""
    pressed = False
    for number in (signal.SIGINT, signal.SIGQUIT):
        received = signal.sigtimedwait([number], 0)
        if received is not None and received.si_code <= 0:
            os.kill(os.getpid(), number)  # that one was for us
        pressed = pressed or (received is not None and received.si_code > 0)
    return pressed
