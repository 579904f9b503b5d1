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
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from cachemgr.errors import CannotExecuteError, NoSuchCommandError
from cachemgr.executables import resolve

_FORWARDED = (
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
_WATCHED = (*_FORWARDED, signal.SIGCHLD)
_NOT_EXECUTABLE = frozenset({errno.EACCES, errno.ENOEXEC, errno.EPERM, errno.EISDIR, errno.ETXTBSY, errno.EINVAL})
_PR_SET_CHILD_SUBREAPER = 36
_LINGER_STEP_SECONDS = 0.05


class Ended(msgspec.Struct, frozen=True):
    """How a child ended."""

    code: int
    """Its exit code, or 128+n when signal n ended it."""
    signal: int | None
    left_behind: bool
    """Whether processes that it started were still running when we stopped waiting for them."""


class Child:
    """A running command. Signals are watched from `start` until `wait` has returned."""

    def __init__(self, pid: int, mask: set[signal.Signals]) -> None:
        self.pid = pid
        self._mask = mask
        self._status: int | None = None
        self._alone = False
        self._apart: set[int] = set()

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
        """
        path = resolve(argv[0], environ, cwd)
        _become_subreaper()
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
            if error.errno in _NOT_EXECUTABLE:
                raise CannotExecuteError(f"`{path}` cannot be executed: {error.strerror}") from None
            raise NoSuchCommandError(f"`{path}` cannot be started: {error.strerror}") from None
        return cls(pid, {signal.Signals(number) for number in mask})

    def wait(self, *, linger: float, apart: Collection[int] = ()) -> Ended:
        """Forward signals until the child has ended, then wait `linger` seconds for what it left behind.

        `apart` are children of ours that are not the command's: they are reaped and never waited for.
        Nothing else happens here: whoever signals us must not wait for a file system.
        """
        self._apart.update(apart)
        try:
            while self._status is None:
                self._reap()
                if self._status is None:
                    self._forward(signal.sigwaitinfo(_WATCHED))
            status = self._status
            _forget_the_keyboard()
            end = time.monotonic() + linger
            while not self._alone and time.monotonic() < end:
                signal.sigtimedwait([signal.SIGCHLD], _LINGER_STEP_SECONDS)
                self._reap()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        if os.WIFSIGNALED(status):
            return Ended(128 + os.WTERMSIG(status), os.WTERMSIG(status), not self._alone)
        return Ended(os.WEXITSTATUS(status), None, not self._alone)

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
                self._alone = self._status is not None and bool(self._apart) and _children() <= self._apart
                return
            self._apart.discard(pid)
            if pid == self.pid and os.WIFSTOPPED(status):
                self._stop_along()
            elif pid == self.pid:
                self._status = status

    def _forward(self, received: signal.struct_siginfo) -> None:
        sent_by_a_process = received.si_code <= 0
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


def _become_subreaper() -> None:
    """Linux 3.4 and newer; where it is refused, orphans go to init as they always did."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _forget_the_keyboard() -> None:
    """Ctrl-C or Ctrl-\\ that came before we waited, when the command has ended since: it was meant for the command."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        received = signal.sigtimedwait([number], 0)
        if received is not None and received.si_code <= 0:
            os.kill(os.getpid(), number)  # that one was for us


def _children() -> set[int]:
    """Our children by the process table; ourselves where it cannot be read, so that it never looks empty.

    `/proc/PID/task/TID/children` would be one look, and many kernels are built without it. A child stays in the table
    until we reap it, so an orphan that becomes ours meanwhile cannot hide: its parent, ours too, is still there.
    """
    ours = os.getpid()
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return {ours}
    return {pid for pid in pids if _parent(pid) == ours}


def _parent(pid: int) -> int | None:
    """None when it is gone. The name in the second field may hold anything, parentheses too."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[1])
    except OSError:
        return None
