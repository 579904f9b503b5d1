"""An attached launch: the engine is there already, and we are its child (`cachemgr.plugin`), not its parent.

It is `cachemgr.launch` without a command to start. What the engine needs from us is handed over in one answer, before
the deadline; then we attend until the process that asked for us has ended and those that it started have hung up. We
may not outlive it (as PID 1 of a container it takes everybody along), so what matters is done when it is ready.
"""

import os
import select
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from cachemgr.before import Before
from cachemgr.cache import Cache
from cachemgr.child import Ended
from cachemgr.clock import Clock
from cachemgr.factors import reason_to_leave_alone
from cachemgr.order import Listener, Order
from cachemgr.process import exit_status, start_time
from cachemgr.running import LINGER_SECONDS, Running
from cachemgr.trouble import Trouble

_STEP_SECONDS = 0.1
_LOOK_SECONDS = 0.5


class Answer(msgspec.Struct, frozen=True):
    """What the engine's process is told."""

    variables: Mapping[str, str] | None
    """What to put into its environment; None when there is no launch."""
    reason: str = ""


class Process:
    """The process that asked for us, which is no child of ours."""

    def __init__(self, pid: int) -> None:
        self._pid, self._started = pid, start_time(pid)
        self._descriptor: int | None = None
        with suppress(
            OSError, AttributeError
        ):  # it is gone, or the kernel has no such thing (Linux before 5.3, gVisor)
            self._descriptor = os.pidfd_open(pid)

    def wait(self, clock: Clock) -> Ended | None:
        """Wait for its end, and say how that was where anybody can know: its parent may have asked already."""
        if self._descriptor is None:
            while self._started is not None and start_time(self._pid) == self._started:
                clock.sleep(_LOOK_SECONDS)
        else:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            poll.poll()
            os.close(self._descriptor)
        status = exit_status(self._pid)
        return None if status is None else Ended.of_status(status, left_behind=False)


def attend(
    order: Order,
    cache: Cache,
    clock: Clock,
    listener: Listener,
    *,
    process: Process,
    answer: Callable[[Answer], None],
) -> None:
    """Prepare a start, answer, and look after it until it has ended. The engine is never the worse for it."""
    trouble = Trouble(strict=False)
    for note in cache.notes:
        trouble.say(note)
    reason = reason_to_leave_alone(order.argv, order.environ, order.cwd)
    if reason is not None:
        answer(Answer(None, reason))
        return
    before = Before(order, cache, clock, trouble, listener)
    profile = before.profile()
    warm = None if profile is None else trouble.attempt("preparing", None, lambda: before.warm(profile))
    if warm is None:
        answer(Answer(None, "nothing could be prepared"))
        trouble.tell(listener.note)
        return
    running = Running(before, warm, listener, hears_all=False)
    running.see_through(
        lambda: running.accompany(lambda: _ended(process, running, clock)),
        first=lambda: answer(Answer(running.variables())),  # the engine waits for it
    )


def _ended(process: Process, running: Running, clock: Clock) -> Ended | None:
    """Wait for the process, and then a while for those that it started and that speak to us."""
    ended = process.wait(clock)
    end = clock.monotonic() + LINGER_SECONDS
    while running.connected and clock.monotonic() < end:
        clock.sleep(_STEP_SECONDS)
    left_behind = running.connected > 0
    return ended if ended is None else msgspec.structs.replace(ended, left_behind=left_behind)
