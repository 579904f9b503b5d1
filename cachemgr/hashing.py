"""Digests of many files, found beside what is done with their bytes.

Where the processor has no instructions for SHA-256, it is two thirds of the work of a restore (benchmarks/README.md).
It runs without the interpreter's lock, so threads share it.
"""

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from cachemgr import digest, threads
from cachemgr.digest import Digest
from cachemgr.errors import NoThreadError

_MOST_THREADS = 4
_PIECES_WAITING = 2
"""For each thread: what is written waits for what is hashed before memory fills."""
_HANDED_OVER = 256 << 10
"""Bytes of small files that a thread is given at once: to give them one by one takes longer than to hash them."""
_LEAST = 1 << 10
"""What a file counts for at least, so that not all of a million empty ones wait for the end."""

Found = Callable[[Digest], None]
"""What becomes of a digest. It is called by a thread of ours; what it raises ends everything, and is raised again."""


class Hashes:
    """Hashes what it is given as long as its block lasts. After that, every `Found` was called.

    The block ends with what a `Found` raised, also where something else went wrong after that: bytes that are not what
    they should be explain the rest.
    """

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._small: list[tuple[bytes | memoryview, Found]] = []
        self._small_size = 0

    def __enter__(self) -> "Hashes":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        told = error is None or isinstance(error, Exception)
        if told and self._small:
            self._hand_over()
        for worker in self._workers:
            worker.end()
        if told:
            self._raise_failure()

    def whole(self, data: bytes | memoryview, found: Found) -> None:
        """Hash all bytes of a file."""
        self._small.append((data, found))
        self._small_size += max(len(data), _LEAST)
        if self._small_size >= _HANDED_OVER:
            self._raise_failure()
            self._hand_over()

    def stream(self, found: Found) -> "Stream":
        """Hash a file that comes in pieces."""
        self._raise_failure()
        return Stream(self._least_busy(), found)

    def _hand_over(self) -> None:
        self._least_busy().do(partial(_hash_all, self._small))
        self._small, self._small_size = [], 0

    def _least_busy(self) -> "_Worker":
        if not self._workers:
            self._start_workers(min(_MOST_THREADS, len(os.sched_getaffinity(0))))
        return min(self._workers, key=lambda worker: worker.waiting)

    def _start_workers(self, count: int) -> None:
        """One at least: the bytes wait for the digests, so a thread of its own must find them."""
        self._workers.append(_Worker())
        with suppress(NoThreadError):
            while len(self._workers) < count:
                self._workers.append(_Worker())

    def _raise_failure(self) -> None:
        for worker in self._workers:
            if worker.failure is not None:
                raise worker.failure


class Stream:
    """One file in pieces."""

    def __init__(self, worker: "_Worker", found: Found) -> None:
        self._worker, self._found = worker, found
        self._running = digest.hasher()

    def update(self, piece: bytes | memoryview) -> None:
        """The next bytes; they must not change any more."""
        self._worker.do(partial(self._running.update, piece))

    def end(self) -> None:
        """There are no more."""
        self._worker.do(lambda: self._found(digest.finish(self._running)))


class _Worker:
    """A thread that does one thing after the other, until one fails."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(_PIECES_WAITING)
        self._thread: threading.Thread = threads.start(self._run, "hash")

    @property
    def waiting(self) -> int:
        """What it was given and has not done."""
        return self._jobs.unfinished_tasks

    def do(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def end(self) -> None:
        """Wait until everything is done."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        for job in iter(self._jobs.get, None):
            if self.failure is None:
                try:
                    job()
                except BaseException as failure:  # noqa: BLE001 - raised by `Hashes` in the caller's thread
                    self.failure = failure
            self._jobs.task_done()


def _hash_all(small: list[tuple[bytes | memoryview, Found]]) -> None:
    for data, found in small:
        found(digest.of_bytes(data))
