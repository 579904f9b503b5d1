"""One launch: find and restore, start the command with its caches pinned, watch what it used, publish what it made.

The command comes first. Whatever fails in here is counted by name, said in one line and left behind: the command starts
cold, with its own exit code, unless `--strict` asked for the opposite. A store that does not answer costs the deadline
once, and is then left alone for a while. Launches inside a launch step aside: the outermost one owns the caches.
"""

from collections.abc import Mapping

from cachemgr.before import Before
from cachemgr.cache import Cache
from cachemgr.child import Child, Ended
from cachemgr.clock import Clock
from cachemgr.factors import reason_to_leave_alone
from cachemgr.order import LAUNCH_VARIABLE, Companion, Listener, Order
from cachemgr.running import LINGER_SECONDS, Running, accompanied
from cachemgr.trouble import Trouble


def is_nested(environ: Mapping[str, str]) -> bool:
    """Whether another launch is in charge of this process already."""
    return bool(environ.get(LAUNCH_VARIABLE))


def run(order: Order, cache: Cache, clock: Clock, listener: Listener, companion: Companion | None = None) -> int:
    """Launch a command and return its exit code. `companion` goes along with it.

    Raises:
        NoSuchCommandError, CannotExecuteError: the command cannot be started.
        NoProcessError: it cannot be started beside us.
        LaunchError: the cache failed and `order.strict` is set; before the command starts if it failed before.
        KeyboardInterrupt: it has a companion, so that it is one of many, and somebody told us to end.
    """
    trouble = Trouble(strict=order.strict)
    for note in cache.notes:
        trouble.say(note)
    reason = reason_to_leave_alone(order.argv, order.environ, order.cwd)
    if reason is not None:
        trouble.say(reason)
        return _plain(order, trouble, listener, companion)
    before = Before(order, cache, clock, trouble, listener)
    profile = before.profile()
    warm = None if profile is None else trouble.attempt("preparing", None, lambda: before.warm(profile))
    if warm is None:
        return _plain(order, trouble, listener, companion)
    running = Running(before, warm, listener, companion=companion)
    ended = running.see_through(running.execute).ended
    assert ended is not None, "we waited for it"
    return _code(ended, companion)


def _plain(order: Order, trouble: Trouble, listener: Listener, companion: Companion | None) -> int:
    """Run the command as if we were not there: nothing is known about it, so there is nothing to say at its end."""
    trouble.tell(listener.note)
    child = Child.start(order.command, order.environ, order.cwd)
    with accompanied(child.pid, companion, trouble, lambda: False):
        ended = child.wait(linger=LINGER_SECONDS)
    return _code(ended, companion)


def _code(ended: Ended, companion: Companion | None) -> int:
    if companion is not None and ended.told:
        raise KeyboardInterrupt
    return ended.code
