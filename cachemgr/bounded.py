"""Steps that may hang (a store on a dead file server) get so many seconds and no more."""

import signal
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from cachemgr.errors import DeadlineError

T = TypeVar("T")


class _Outcome(Generic[T]):
    value: T
    error: BaseException | None = None


def within(seconds: float, what: str, step: Callable[[], T]) -> T:
    """What `step` returns, if it does so in time. One that does not is left behind in its thread, which ends with the
    process; it must not do harm when it wakes up.

    Raises:
        DeadlineError: it took longer; `what` says who.
    """
    outcome: _Outcome[T] = _Outcome()

    def work() -> None:
        # A thread that is left behind must not be the one that the kernel gives our signals to.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            outcome.value = step()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            outcome.error = error

    thread = threading.Thread(target=work, name=f"cachemgr-{what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise DeadlineError(f"{what} took longer than {seconds:.0f} s")
    if outcome.error is not None:
        raise outcome.error
    return outcome.value
