"""One command, started until a start adds nothing.

Every start finds an empty root and what the starts before it published, as the first start on another machine does. The
fixpoint is a start that adds nothing in any domain; a command that adds something at every start is never called warm.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from cachemgr import launch, sizes
from cachemgr.cache import Cache
from cachemgr.capture import Launch
from cachemgr.clock import Clock
from cachemgr.errors import StoreError, UsageError
from cachemgr.factors import reason_to_leave_alone
from cachemgr.key import Key
from cachemgr.order import Listener, Order, Started, Told, UnderWay
from cachemgr.places import make_directory
from cachemgr.prewarm.exercise import Client, Step, dead, exercise, refusals, wait_until_ready
from cachemgr.prewarm.roots import own_root, sweep
from cachemgr.prewarm.starting import Server, Starting, starting, surroundings
from cachemgr.process import descendants, start_time, tell
from cachemgr.publish import Published

MAX_PASSES = 4
_PATIENCE = 300.0
"""Seconds that looking up, restoring and publishing may take: nobody waits for this start."""
_GRACE = 60.0
"""How long a command may take to end after it was told to."""
_TOLD_TO_END = frozenset({0, 128 + signal.SIGTERM, 128 + signal.SIGINT})
"""How servers end that are told to."""

State = Literal["warm", "grows", "failed", "timed out", "no GPU", "already warm"]


class Pass(msgspec.Struct, frozen=True):
    """One start."""

    number: int
    code: int
    seconds: float
    report: Launch | None
    """None where nothing is known about it."""
    exercised: tuple[Step, ...] = ()
    refused: str = ""
    """Why nothing of it was captured."""

    @property
    def added(self) -> dict[str, int]:
        """Files that it added, by domain."""
        return {} if self.report is None else {name: count for name, count in self.report.added.items() if count}


class Result(msgspec.Struct, frozen=True):
    """What became of one command."""

    name: str
    state: State
    key: Key | None
    """The last start's."""
    reason: str
    """Why it is not warm, or what else a person should know."""
    passes: tuple[Pass, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def warm(self) -> bool:
        return self.state in {"warm", "already warm"}


class Telling(Listener, Protocol):
    """Who tells a person about starts."""

    def passed(self, name: str, each: Pass) -> None: ...


class Options(msgspec.Struct, frozen=True):
    """How a command is prewarmed."""

    max_passes: int = MAX_PASSES
    real_weights: bool = False
    limit: float = 3600.0
    """Seconds for all starts together."""
    if_missing: bool = False
    """Leave out what a look-up finds whole already, whoever made it."""


class Machinery(msgspec.Struct, frozen=True):
    """What every start needs from outside."""

    cache: Cache
    clock: Clock
    telling: Telling
    new_launch: Callable[[], str]
    free_port: Callable[[], int]
    """A port that nobody listens on now."""


def prewarm(name: str, order: Order, machinery: Machinery, options: Options) -> Result:
    """Start the command of `order` until a start adds nothing.

    Raises:
        NoSuchCommandError, CannotExecuteError: it cannot be started at all.
        UsageError: nothing would be published, or the command measures cold starts.
        StoreError: there is no place for the caches of its starts.
    """
    if not order.publishes:
        raise UsageError("prewarm publishes what it compiles, and publishing is off", hint="--publish local")
    reason = reason_to_leave_alone(order.argv, order.environ, order.cwd)
    if reason is not None:
        raise UsageError(reason)
    if swept := sweep(machinery.cache.home, order.host):
        machinery.telling.note(f"removed what {sizes.counted(len(swept), 'start')} left whose prewarm was killed")
    end = machinery.clock.monotonic() + options.limit
    passes: list[Pass] = []
    notes: list[str] = []

    def result(state: State, reason: str) -> Result:
        key = next((each.report.key for each in reversed(passes) if each.report is not None), None)
        return Result(name, state, key, reason, tuple(passes), tuple(dict.fromkeys(notes)))

    while len(passes) < options.max_passes:
        made = starting(
            order.argv, order.environ, order.cwd, port=machinery.free_port(), real_weights=options.real_weights
        )
        if made.note and not notes:
            machinery.telling.note(f"{name} {made.note}")  # before it takes its time, or fails for want of them
        notes += [made.note] if made.note else []
        visit = Visit(made.server, machinery.clock, end)
        each = start(len(passes) + 1, order, made, visit, machinery)
        passes.append(each)
        machinery.telling.passed(name, each)
        notes += [f"refused {refused}" for refused in refusals(each.exercised)]
        verdict = _verdict(each, visit, options.limit)
        if verdict is not None:
            return result(*verdict)
    last = passes[-1]
    told = f"still added {grown(last)}" if last.added else "was the first of its key, and no other was to be made"
    return result("grows", f"start {last.number} {told}")


def grown(each: Pass) -> str:
    """What a start added, for people: how much in which domain, and an example of each."""
    examples = [] if each.report is None else [text for text in each.report.reasons if text.startswith("added ")]
    counts = ", ".join(f"{count} in {domain}" for domain, count in sorted(each.added.items()))
    return " · ".join([counts, *examples])


def _verdict(each: Pass, visit: "Visit", limit: float) -> tuple[State, str] | None:
    """What a start says about the command; None where another one has to be made."""
    if visit.timed_out:
        return "timed out", f"not done after {limit:.0f} s"
    fault = _fault(each, visit)
    if fault:
        return "failed", fault
    assert each.report is not None, "that is a fault"
    if each.added or each.report.result != "exact":
        return None
    return "warm", ""


def _fault(each: Pass, visit: "Visit") -> str:
    """What went wrong in a start that another one would not mend; empty for nothing."""
    serves = visit.server is not None
    report = each.report
    kept = report is not None and (report.published is not None or report.result == "exact")
    idle = report is not None and report.result == "exact" and report.verdict == "inert" and not each.added
    faults = (
        (serves and not visit.asked, f"exit code {each.code} before it was ready"),
        (bool(visit.dead), f"its engine died of {_last(each.exercised)}: {visit.dead}"),
        (visit.failed(each.code), f"exit code {each.code}"),
        (report is None, "nothing is known about its start"),
        (bool(each.added) and not kept, f"nothing of what it compiled was captured: {each.refused}"),
        (not kept, "it compiles nothing that can be kept"),
        (idle, "it uses nothing of what was restored"),
    )
    return next((text for holds, text in faults if holds), "")


def _last(steps: Sequence[Step]) -> str:
    """What was asked last, and what its server said to that."""
    if not steps:
        return "what it was asked"
    return f"{steps[-1].name} ({steps[-1].status or 'no answer'} {steps[-1].said})"


def start(
    number: int,
    order: Order,
    made: Starting,
    visit: "Visit",
    machinery: Machinery,
    *,
    root: Path | None = None,
) -> Pass:
    """One start in a root of its own, which goes with it, or in one that was there and stays.

    Raises:
        NoSuchCommandError, CannotExecuteError: the command cannot be started.
        StoreError: there is no place for its root.
    """
    clock, name = machinery.clock, machinery.new_launch()
    heard = _Heard(machinery.telling)
    begun = clock.monotonic()
    with own_root(machinery.cache.home, name, order.host) if root is None else _kept(root) as place:
        ours = msgspec.structs.replace(
            order,
            executes=made.executes,
            environ=surroundings(order.environ, place),
            launch=name,
            deadline=max(order.deadline, _PATIENCE),
        )
        code = launch.run(ours, machinery.cache, clock, heard, visit)
    told = heard.told
    return Pass(
        number,
        code,
        round(clock.monotonic() - begun, 3),
        None if told is None else told.launch,
        visit.steps,
        "" if told is None else told.published.reason or _refusals(told.published),
    )


@contextmanager
def _kept(root: Path) -> Iterator[Path]:
    """A root of whoever asks for the start."""
    try:
        make_directory(root, 0o700)
    except OSError as error:
        raise StoreError(f"{root} cannot be made: {error.strerror}", hint="set TMPDIR") from None
    yield root


def _refusals(published: Published) -> str:
    return ", ".join(f"{unit.domain} {unit.unit}: {unit.reason}" for unit in published.refused[:3])


class Visit:
    """Goes along with one start: waits until it is ready, asks what users will ask, and tells it to end; tells one
    that takes too long to end as well. `end` is by the monotonic clock; one that asks nothing leaves when it is
    ready."""

    def __init__(self, server: Server | None, clock: Clock, end: float, *, asks: bool = True) -> None:
        self._asks = asks
        self.server = server
        self._clock, self._end = clock, end
        self.steps: tuple[Step, ...] = ()
        self.asked = False
        self.dead = ""
        """What a server said after it was asked, if its engine had died of that."""
        self.timed_out = False
        self._told = False

    def __call__(self, command: UnderWay) -> None:
        identity = start_time(command.pid)
        if self.server is not None:
            client = Client(self.server, self._left)
            if wait_until_ready(client, self._clock, lambda: command.ended.is_set() or self._left() <= 0):
                self.steps = exercise(client) if self._asks else ()
                self.dead = dead(client) if self._asks and self._left() > 0 else ""
                self.asked = True
        else:
            command.ended.wait(max(self._left(), 0.0))
        if command.ended.is_set():
            return
        self._told = True
        self.timed_out = self._left() <= 0
        tell(command.pid, identity, signal.SIGTERM)
        if not command.ended.wait(_GRACE):
            for pid in (command.pid, *descendants(command.pid)):
                tell(pid, start_time(pid), signal.SIGKILL)

    def failed(self, code: int) -> bool:
        """Whether a command that ended with this exit code failed, as far as that tells."""
        if self.server is None:
            return code != 0
        return not (self.asked and self._told and code in _TOLD_TO_END)

    def _left(self) -> float:
        return self._end - self._clock.monotonic()


class _Heard:
    """Hears what a launch came to, and passes everything on."""

    def __init__(self, telling: Telling) -> None:
        self._telling = telling
        self.told: Told | None = None

    def note(self, line: str) -> None:
        self._telling.note(line)

    def started(self, event: Started) -> None:
        self._telling.started(event)

    def ready(self, event: Told) -> None:
        self._telling.ready(event)

    def finished(self, event: Told) -> None:
        self.told = event
        self._telling.finished(event)
