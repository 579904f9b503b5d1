"""Steps that may hang (a store on a dead file server) get so many seconds and no more."""

from collections.abc import Callable
from typing import Generic, TypeVar

from cachemgr import threads
from cachemgr.errors import DeadlineError

T = TypeVar("T")


class Begun(Generic[T]):
    """A step that runs in a thread of its own."""

    _value: T
    _error: BaseException | None = None

    def __init__(self, what: str, step: Callable[[], T]) -> None:
        self._what = what
        self._thread = threads.start(lambda: self._work(step), what)

    def _work(self, step: Callable[[], T]) -> None:
        try:
            self._value = step()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._error = error

    def result(self, seconds: float | None = None) -> T:
        """What the step returns or raises.

        Raises:
            DeadlineError: it needs more than so many seconds from now.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise DeadlineError(f"{self._what} took longer than {seconds:.0f} s")
        if self._error is not None:
            raise self._error
        return self._value

    def settle(self, seconds: float) -> None:
        """Wait for so many seconds until the step has ended, however it ends."""
        self._thread.join(seconds)


def within(seconds: float, what: str, step: Callable[[], T]) -> T:
    """What `step` returns, if it does so in time. One that does not is left behind in its thread, which ends with the
    process; it must not do harm when it wakes up.

    Raises:
        DeadlineError: it took longer; `what` says who.
    """
    return Begun(what, step).result(seconds)
