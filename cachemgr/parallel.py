"""The same step for many things at once, in threads that end with the process.

The pools of the standard library wait for their threads when the interpreter exits, so one request that hangs would
keep a finished command from ending.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from cachemgr import threads as quiet

S = TypeVar("S")
T = TypeVar("T")


def side_by_side(step: Callable[[S], T], items: Sequence[S], *, threads: int) -> list[T]:
    """What `step` returns for each item, in their order, by at most so many threads; by ours where there are no others.

    Raises:
        Exception: the first failure of a step; no further one is begun then, and those under way are left behind.
    """
    if min(threads, len(items)) <= 1:
        return [step(item) for item in items]
    return _Work(step, items).done(min(threads, len(items)))


class _Work(Generic[S, T]):
    def __init__(self, step: Callable[[S], T], items: Sequence[S]) -> None:
        self._step, self._pending = step, deque(enumerate(items))
        self._results: dict[int, T] = {}
        self._changed = threading.Condition()
        self._running = 0
        self._failure: BaseException | None = None

    def done(self, threads: int) -> list[T]:
        self._running = threads
        try:
            started = quiet.start_some(self._work, "parallel", threads)
            if not started:
                self._work()
            with self._changed:
                self._running -= threads - max(len(started), 1)
                self._changed.wait_for(lambda: self._failure is not None or self._running == 0)
        finally:
            self._pending.clear()  # an interrupt ends it as well
        if self._failure is not None:
            raise self._failure
        return [result for _number, result in sorted(self._results.items())]

    def _work(self) -> None:
        failure: BaseException | None = None
        try:
            while (taken := self._taken()) is not None:
                number, item = taken
                self._results[number] = self._step(item)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            failure = error
        with self._changed:
            self._failure = self._failure or failure
            self._running -= 1
            self._changed.notify()

    def _taken(self) -> tuple[int, S] | None:
        with suppress(IndexError):
            return self._pending.popleft()
        return None
