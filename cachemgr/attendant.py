"""The attendant of a running command: beats, and captures what it compiled once it has come to rest.

A command may run for weeks and end by SIGKILL. What it compiled is captured when nothing has changed for a while; the
capture is complete only if the command had given its ready sign. All of it happens in a thread, because a file system
may hang, and signals must reach the command all the same.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from cachemgr import threads
from cachemgr.clock import Clock
from cachemgr.outcome import NOT_PUBLISHED
from cachemgr.publish import Published
from cachemgr.trouble import Trouble
from cachemgr.watch import Pace, Rest, Watch, Work

_TICK_SECONDS = 1.0


class Capturing(Protocol):
    """Publishes a piece of work, told whether it is that of a command that was ready."""

    def __call__(self, work: Work, *, ready: bool) -> Published: ...


class Attendant:
    """Looks after one running command once a second, from `start` until `finish`.

    Args:
        beat: shows others that the launch is alive.
        pace: how soon it is taken to rest, as of now.
        ready: whether the command gave its ready sign.
        entries: how many of its own entries the engine says that it has saved, where others wait for them: they are
            captured as they appear, before the command is ready.
        capture: publishes a piece of work.
    """

    def __init__(
        self,
        watch: Watch,
        clock: Clock,
        trouble: Trouble,
        *,
        beat: Callable[[], None],
        pace: Callable[[], Pace],
        ready: Callable[[], bool],
        entries: Callable[[], int],
        capture: Capturing,
    ) -> None:
        self._beat, self._clock, self._trouble = beat, clock, trouble
        self._ready, self._entries, self._capture = ready, entries, capture
        self._watch, self._rest = watch, Rest(watch, pace)
        self._captured = False
        self._seen_entries = 0
        self._fresh: Work | None = None
        """What there was when an entry had just appeared."""
        self.ready_work: Work | None = None
        """What the command had done when it was ready and had come to rest."""
        self.captured = NOT_PUBLISHED
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin."""
        self._thread = threads.start(self._attend, "attendant")

    def _attend(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            self._trouble.survive("watching", None, self._look_after)

    def _look_after(self) -> None:
        self._beat()
        if self.ready_work is not None:
            return
        ready = self._ready()
        if not ready:
            self._capture_entries()
        if self._captured and not ready:
            return
        work = self._rest.reached(self._clock.monotonic(), ready=ready)
        if work is None:
            return
        self._captured = True
        if ready:
            self.ready_work = work
        self.captured = self._trouble.survive("publishing", NOT_PUBLISHED, lambda: self._capture(work, ready=ready))

    def _capture_entries(self) -> None:
        """Publish what the engine has just compiled, but for units in which something changes still."""
        if self._fresh is not None:
            work, self._fresh = self._watch.work(settled_since=self._fresh), None
            self.captured = self._trouble.survive("publishing", NOT_PUBLISHED, lambda: self._capture(work, ready=False))
        count = self._entries()
        if count > self._seen_entries:
            self._seen_entries, self._fresh = count, self._watch.work()

    def finish(self, seconds: float) -> None:
        """The command has ended: look no more, and wait so long for a capture that is under way."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(seconds)
