"""The attendant of a running command: beats, and captures what it compiled once it has come to rest.

A command may run for weeks and end by SIGKILL. What it compiled is captured when nothing has changed for a while; the
capture is complete only if the command had given its ready sign. All of it happens in a thread, because a file system
may hang, and signals must reach the command all the same.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from cachemgr.clock import Clock
from cachemgr.live import Room
from cachemgr.outcome import NOT_PUBLISHED
from cachemgr.publish import Published
from cachemgr.trouble import Trouble
from cachemgr.watch import Rest, Watch, Work

_TICK_SECONDS = 1.0


class Capturing(Protocol):
    """Publishes a piece of work, told whether it is that of a command that was ready."""

    def __call__(self, work: Work, *, ready: bool) -> Published: ...


class Attendant:
    """Looks after one running command once a second, from `start` until `finish`.

    `ready` says whether the command gave its ready sign.
    """

    def __init__(
        self,
        room: Room,
        watch: Watch,
        clock: Clock,
        trouble: Trouble,
        *,
        ready: Callable[[], bool],
        capture: Capturing,
    ) -> None:
        self._room, self._clock, self._trouble = room, clock, trouble
        self._ready, self._capture = ready, capture
        self._rest = Rest(watch)
        self._captured = False
        self.ready_work: Work | None = None
        """What the command had done when it was ready and had come to rest."""
        self.captured = NOT_PUBLISHED
        self._ended = threading.Event()
        # It inherits our blocked signals, so the kernel never gives one to it.
        self._thread = threading.Thread(target=self._attend, name="cachemgr-attendant", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _attend(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            self._trouble.survive("watching", None, self._look_after)

    def _look_after(self) -> None:
        self._room.beat()
        if self.ready_work is not None:
            return
        ready = self._ready()
        if self._captured and not ready:
            return
        work = self._rest.reached(self._clock.monotonic(), ready=ready)
        if work is None:
            return
        self._captured = True
        if ready:
            self.ready_work = work
        self.captured = self._trouble.survive("publishing", NOT_PUBLISHED, lambda: self._capture(work, ready=ready))

    def finish(self, seconds: float) -> None:
        """The command has ended: look no more, and wait so long for a capture that is under way."""
        self._ended.set()
        self._thread.join(seconds)
