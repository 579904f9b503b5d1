"""Threads of ours. Signals are for the thread that waits for the command, so none of these is ever given one."""

import signal
import threading
from collections.abc import Callable

_ALL = signal.valid_signals()


def start(work: Callable[[], None], name: str) -> threading.Thread:
    """Do `work` in a thread that ends with the process at the latest, under our name and this one."""

    def quietly() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)
        work()

    thread = threading.Thread(target=quietly, name=f"cachemgr-{name}", daemon=True)
    thread.start()
    return thread
