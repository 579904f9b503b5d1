"""kill -9 at every step: a child process does the work and dies right before its n-th change of a file system.

Python raises an audit event before each call that opens, makes, renames, links or removes something
(`sys.addaudithook`), so no line of the product knows about this, and no step can be forgotten. Bytes are written
between these events: a file that was just created is empty or whole when the next event kills.
"""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator

_CHANGES = frozenset(
    {"os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.utime", "os.chmod", "os.symlink", "os.truncate"}
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _is_change(event: str, arguments: tuple[object, ...]) -> bool:
    if event == "open":
        flags = arguments[2]
        return isinstance(flags, int) and bool(flags & _WRITES)
    return event in _CHANGES


def killed_at_every_step(work: Callable[[], object]) -> Iterator[int]:
    """Run `work` in a child that is killed at its first change, then in one killed at its second, and so on.

    Yields after each kill the number of the step, until `work` gets through; what it left is for the caller to judge.
    """
    step = 0
    while not _survives(work, step):
        yield step
        step += 1
    assert step, "the work changed nothing"


def _survives(work: Callable[[], object], step: int) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads; the child starts its own
        pid = os.fork()
    if pid == 0:
        _die_at(step)
        try:
            work()
        except BaseException:  # noqa: BLE001
            import traceback

            traceback.print_exc()
            os._exit(99)
        os._exit(0)
    _pid, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, "the work failed by itself"
    return True


def _die_at(step: int) -> None:
    left = [step]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if _is_change(event, arguments):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    sys.addaudithook(hook)
