"""Requests to a bucket: bounded in time, made again where that helps, and told apart when they fail.

Every attempt runs in a thread that can be left behind. Time-outs of a socket do not bound an answer: a server that
sends one byte now and then keeps every read of every client waiting for ever.
"""

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from cachemgr.bounded import within
from cachemgr.errors import DeadlineError
from cachemgr.store.s3 import faults
from cachemgr.store.s3.bucket import Bucket
from cachemgr.store.s3.connect import Client, connect

T = TypeVar("T")

_ATTEMPT_SECONDS = 20.0
_MOST_ATTEMPTS = 12
"""Of one request, however it fails in between; `faults` says how often in each way."""
_SLOWEST = 64 << 10
"""Bytes per second below which an answer counts as stalled."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0


class Link:
    """The client of a bucket, made by the first request and shared by all threads and deadlines."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.conditional: bool | None = None
        """Whether the server creates objects conditionally; None while that is unknown."""
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._made = 0.0

    def client(self) -> Client:
        """The client.

        Raises:
            MirrorError: there are no credentials.
        """
        with self._lock:
            if self._client is None:
                self._client, self._made = connect(self.bucket), time.monotonic()
            return self._client

    def renewed(self, begun: float) -> bool:
        """Let the next request ask for credentials again: botocore reads a file of them once, and what runs for long
        outlives them. Whether that helps: not where the client was made after `begun` (`time.monotonic()`)."""
        with self._lock:
            old = self._made < begun
            if old:
                self._client = None
            return old


class Answered(Exception):  # noqa: N818 - an answer and no error: the caller expects it
    """The server answered with an error code that the caller knows what to do about."""

    def __init__(self, code: str, *, repeated: bool) -> None:
        super().__init__(code)
        self.code = code
        self.repeated = repeated
        """Whether an earlier attempt failed, which may have been carried out all the same."""


class Requests:
    """Makes requests through a link for a caller who has until `deadline` (`time.monotonic()`), or for ever."""

    def __init__(self, link: Link, deadline: float | None = None) -> None:
        self.link = link
        self.deadline = deadline

    @property
    def bucket(self) -> Bucket:
        """The bucket that is asked."""
        return self.link.bucket

    def make(
        self,
        verb: str,
        name: str,
        step: Callable[[Client], T],
        *,
        expected: frozenset[str] = frozenset(),
        size: int = 0,
    ) -> T:
        """What `step` returns. `size` is how many bytes it may move.

        Raises:
            Answered: the server answered with a code in `expected`.
            MirrorError: it failed, for good or too often.
            DeadlineError: the caller's time is over.
        """
        seconds = _ATTEMPT_SECONDS + size / _SLOWEST
        failed: Counter[str] = Counter()
        for attempt in itertools.count(1):
            left, begun = self._left(verb, name), time.monotonic()
            try:
                return within(min(seconds, left), f"to {verb} `{name}`", lambda: step(self.link.client()))
            except Exception as error:  # noqa: BLE001 - botocore's, urllib3's and those of sockets
                failure = error
            if faults.code_of(failure) in expected:
                raise Answered(faults.code_of(failure), repeated=attempt > 1)
            if isinstance(failure, DeadlineError):
                self._left(verb, name)
            fault = faults.fault_of(failure)
            if fault is None:
                raise failure
            failed[fault.word] += 1  # a throttled request that is cut short once is still a throttled one
            over = failed[fault.word] >= fault.attempts or attempt >= _MOST_ATTEMPTS
            if over and attempt < _MOST_ATTEMPTS and faults.for_want_of_new_credentials(failure):
                over = not self.link.renewed(begun)
            if over or not self._paused(attempt):
                raise faults.told(fault, verb, name, self.bucket, failure)
        raise AssertionError  # counting has no end

    def _left(self, verb: str, name: str) -> float:
        """How many seconds the caller still has."""
        if self.deadline is None:
            return float("inf")
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"no time is left to {verb} `{name}` in {self.bucket}")
        return left

    def _paused(self, attempt: int) -> bool:
        """Wait before the next attempt, a random time so that a fleet does not come back all at once. Whether the
        caller has the time for that."""
        pause = random.uniform(0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt))  # noqa: S311 - no secret
        if self.deadline is not None and time.monotonic() + pause >= self.deadline:
            return False
        time.sleep(pause)
        return True
