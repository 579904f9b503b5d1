"""One launch: find and restore, start the command with its caches pinned, watch what it used, publish what it made.

The command comes first. Whatever fails in here is counted by name, said in one line and left behind: the command starts
cold, with its own exit code, unless `--strict` asked for the opposite. A store that does not answer costs the deadline
once, and is then left alone for a while. Launches inside a launch step aside: the outermost one owns the caches.
"""

from collections.abc import Mapping

from cachemgr.before import Before
from cachemgr.cache import Cache
from cachemgr.child import Child
from cachemgr.clock import Clock
from cachemgr.factors import reason_to_leave_alone
from cachemgr.order import LAUNCH_VARIABLE, Listener, Order
from cachemgr.running import LINGER_SECONDS, Running
from cachemgr.trouble import Trouble


def is_nested(environ: Mapping[str, str]) -> bool:
    """Whether another launch is in charge of this process already."""
    return bool(environ.get(LAUNCH_VARIABLE))


def run(order: Order, cache: Cache, clock: Clock, listener: Listener) -> int:
    """Launch a command and return its exit code.

    Raises:
        NoSuchCommandError, CannotExecuteError: the command cannot be started.
        LaunchError: the cache failed and `order.strict` is set; before the command starts if it failed before.
    """
    trouble = Trouble(strict=order.strict)
    for note in cache.notes:
        trouble.say(note)
    reason = reason_to_leave_alone(order.argv, order.environ, order.cwd)
    if reason is not None:
        trouble.say(reason)
        return _plain(order, trouble, listener)
    before = Before(order, cache, clock, trouble)
    profile = before.profile()
    warm = None if profile is None else trouble.attempt("preparing", None, lambda: before.warm(profile))
    if warm is None:
        return _plain(order, trouble, listener)
    running = Running(before, warm, listener)
    in_use = False
    try:
        trouble.survive("telling", None, lambda: listener.started(warm.started))
        ran = running.execute()
        in_use = ran.left_behind
        told = trouble.attempt("settling", None, lambda: running.settle(ran))
    finally:
        running.leave(in_use=in_use)
    if told is None:
        _tell(trouble, listener)
    else:
        trouble.survive("telling", None, lambda: listener.finished(told))
    return ran.code


def _plain(order: Order, trouble: Trouble, listener: Listener) -> int:
    """Run the command as if we were not there: nothing is known about it, so there is nothing to say at its end."""
    _tell(trouble, listener)
    return Child.start(order.argv, order.environ, order.cwd).wait(linger=LINGER_SECONDS).code


def _tell(trouble: Trouble, listener: Listener) -> None:
    for line in trouble.lines():
        trouble.survive("telling", None, lambda line=line: listener.note(line))  # type: ignore[misc]
