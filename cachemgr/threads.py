"""Threads of ours. Signals are for the thread that waits for the command, so none of these is ever given one."""

import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from cachemgr.errors import NoThreadError

_ALL = signal.valid_signals()


def start(work: Callable[[], None], name: str) -> threading.Thread:
    """Do `work` in a thread that ends with the process at the latest, under our name and this one.

    Raises:
        NoThreadError: a limit on processes or memory of this user or container is reached.
    """
    thread = threading.Thread(target=work, name=f"cachemgr-{name}", daemon=True)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)  # which the thread inherits
    try:
        thread.start()
    except RuntimeError as error:
        hint = "raise the limit on processes: `ulimit -u`, or `pids.max` of the container"
        raise NoThreadError("no further thread can be started", hint=hint) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return thread


def start_some(work: Callable[[], None], name: str, count: int) -> list[threading.Thread]:
    """As many threads that do `work`, or as many as the kernel gives; it may give none."""
    started: list[threading.Thread] = []
    with suppress(NoThreadError):
        for number in range(count):
            started.append(start(work, f"{name}-{number}"))  # noqa: PERF401 - kept also where a later one is refused
    return started
