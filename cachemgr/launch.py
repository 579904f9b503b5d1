"""One launch: find and restore, start the command with its caches pinned, watch what it used, publish what it made.

The command comes first. Whatever fails in here is counted by name, said in one line and left behind: the command starts
cold, with its own exit code, unless `--strict` asked for the opposite. A store that does not answer costs the deadline
once, and is then left alone for a while. Launches inside a launch step aside: the outermost one owns the caches.
"""

import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec

from cachemgr import heal, live
from cachemgr.cache import Cache
from cachemgr.capture import Launch
from cachemgr.child import Child
from cachemgr.clock import Clock
from cachemgr.digest import Digest
from cachemgr.domains import TORCH_PROGRAM
from cachemgr.factors import Profile, describe
from cachemgr.heads import Heads
from cachemgr.hold import Purpose
from cachemgr.key import Key, derive
from cachemgr.lookup import NOTHING, Found, find
from cachemgr.outcome import NOT_PUBLISHED, Outcome, Ran, Start
from cachemgr.publish import Published
from cachemgr.statcache import StatCache
from cachemgr.store import layout
from cachemgr.store.captures import discard_damaged, quarantine, quarantined, record
from cachemgr.store.lock import held
from cachemgr.trouble import Patience, Trouble
from cachemgr.warm import Restored, restore
from cachemgr.watch import Rest, Watch, Work

T = TypeVar("T")

LINGER_SECONDS = 5.0
"""How long processes that outlive the command are waited for before its capture is made."""
SETTLE_SECONDS = 1.0
"""Where some go on all the same: what does not change for so long is settled."""
_POLL_SECONDS = 0.25
_TICK_SECONDS = 1.0

LAUNCH_VARIABLE = "CACHEMGR_LAUNCH"
KEY_VARIABLE = "CACHEMGR_KEY"
PINNED_VARIABLE = "CACHEMGR_PINNED"

NOT_RESTORED = Restored(0, 0, 0, {}, ())


class Order(msgspec.Struct, frozen=True):
    """What to launch, and how. Everything that the outside world decides is in here."""

    argv: tuple[str, ...]
    environ: dict[str, str]
    cwd: Path
    launch: str
    host: str
    publish: Literal["never", "local"]
    read_only: bool
    strict: bool
    ignored_args: tuple[str, ...]
    deadline: float
    wait: float
    ready_file: Path | None

    @property
    def publishes(self) -> bool:
        return self.publish != "never" and not self.read_only


class Started(msgspec.Struct, frozen=True):
    """What is known when the command is about to start."""

    key: Key
    found: Found
    restored: Restored
    seconds: float
    trouble: tuple[str, ...]


class Finished(msgspec.Struct, frozen=True):
    """What is known when the command has ended and its capture is stored."""

    launch: Launch
    published: Published
    cold_seconds: float | None
    trouble: tuple[str, ...]


class Listener(Protocol):
    """Who tells a person about a launch."""

    def note(self, line: str) -> None: ...
    def started(self, event: Started) -> None: ...
    def finished(self, event: Finished) -> None: ...


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
    launch = _Launch(order, cache, clock, trouble)
    profile = launch.profile()
    warm = None if profile is None else trouble.attempt("preparing", None, lambda: launch.warm(profile))
    if warm is None:
        return _plain(order, trouble, listener)
    in_use = False
    try:
        trouble.survive("telling", None, lambda: listener.started(warm.started))
        ran = launch.execute(warm)
        in_use = ran.ended.left_behind
        finished = trouble.attempt("settling", None, lambda: launch.settle(warm, ran))
    finally:
        warm.room.leave(in_use=in_use)
    if finished is None:
        _tell(trouble, listener)
    else:
        trouble.survive("telling", None, lambda: listener.finished(finished))
    return ran.ended.code


def _plain(order: Order, trouble: Trouble, listener: Listener) -> int:
    """Run the command as if we were not there: nothing is known about it, so there is nothing to say at its end."""
    _tell(trouble, listener)
    return Child.start(order.argv, order.environ, order.cwd).wait(linger=LINGER_SECONDS).code


def _tell(trouble: Trouble, listener: Listener) -> None:
    for line in trouble.lines():
        trouble.survive("telling", None, lambda line=line: listener.note(line))  # type: ignore[misc]


class _Warm:
    """A launch that is ready to start."""

    def __init__(self, started: Started, room: live.Room, outcome: Outcome, constants: dict[str, str]) -> None:
        self.started = started
        self.room = room
        self.outcome = outcome
        self.constants = constants
        self.watch = Watch(room.targets, started.restored.offered)


class _Launch:
    """The stages of one launch, in order: profile, warm, execute, settle."""

    def __init__(self, order: Order, cache: Cache, clock: Clock, trouble: Trouble) -> None:
        self._order, self._cache, self._clock, self._trouble = order, cache, clock, trouble
        self._begun = clock.monotonic()
        self._patience = Patience(cache, clock, trouble)
        self._without: frozenset[Digest] = frozenset()
        self._opened = False
        """Whether the salt that seals values, and so the key, is the store's own."""

    def profile(self) -> Profile | None:
        """What the command will compile; None when that cannot be found out at all."""
        order = self._order
        salt = self._ask("opening the store", None, lambda: store_salt(self._cache, writable=order.publishes))
        self._opened = salt is not None
        return self._trouble.attempt(
            "deriving the key",
            None,
            lambda: describe(
                order.argv, order.environ, cwd=order.cwd, ignored_args=order.ignored_args, salt=salt or ""
            ),
        )

    def warm(self, profile: Profile) -> _Warm:
        """Look up, take the live directories, and restore."""
        key = derive(profile.factors)
        found = self._waited(key, profile, self._found(key, profile))
        room = self._entered(key, purpose="warm" if found.result == "exact" else "compiling")
        with held(self._cache.lock(key, "restore"), wait=self._left() / 2):
            restored = self._ask("restoring", NOT_RESTORED, lambda: self._restored(found, room))
        self._quarantine(found, restored)
        seconds = self._clock.monotonic() - self._begun
        started = Started(key, found, restored, seconds, self._trouble.lines())
        began = self._clock.text()
        start = Start(self._order.launch, self._order.host, began, key, profile, found, restored, seconds)
        refusal = self._no_capture(profile)
        outcome = Outcome(self._cache, self._clock, start, refusal=refusal, without=self._without)
        return _Warm(started, room, outcome, profile.constants)

    def _found(self, key: Key, profile: Profile) -> Found:
        return self._ask("looking up", NOTHING, lambda: self._looked_up(key, profile))

    def _looked_up(self, key: Key, profile: Profile) -> Found:
        store, heads = self._cache.store, Heads(self._cache.heads())
        self._without = quarantined(store, self._order.host)
        return find(store, key, profile.factors, profile.host, heads, without=self._without)

    def _entered(self, key: Key, *, purpose: Purpose) -> live.Room:
        """Take the live directories, whole: what is damaged is set aside, or left to those who use it already."""
        notes: list[str] = []
        room = self._room(key, notes, purpose=purpose)
        remembered = self._cache.stat_cache(key)
        stat_cache = StatCache.load(remembered)
        nothing: list[heal.Ailing] = []
        ailing = self._trouble.attempt(
            "checking the live directories",
            nothing,
            lambda: heal.look(room.targets, stat_cache, now_ns=self._clock.now_ns()),
        )
        stat_cache.save(remembered)
        if ailing and room.shared(self._order.launch, now=self._now()):
            notes.append("the live directory is damaged and in use, so this launch gets one of its own")
            room.leave(in_use=False)
            room = self._room(key, notes, purpose=purpose, alone=True)
        else:
            notes.extend(line for each in ailing for line in heal.set_aside(each, self._order.launch))
        for note in notes:
            self._trouble.say(note)
        return room

    def _room(self, key: Key, notes: list[str], *, purpose: Purpose, alone: bool = False) -> live.Room:
        order = self._order
        return live.enter(
            order.environ, TORCH_PROGRAM, key, order.launch, purpose=purpose, alone=alone, now=self._now(), notes=notes
        )

    def _now(self) -> float:
        return self._clock.now_ns() / 1e9

    def _quarantine(self, found: Found, restored: Restored) -> None:
        """Damaged captures are not tried again on this host, and what they have is published again."""
        reasons = {damage.capture: damage.reason for damage in restored.damaged}
        for broken in found.damaged:
            capture = layout.capture_of(broken.name)
            if capture is not None and broken.corrupt:
                reasons[capture] = broken.reason
        self._without |= reasons.keys()
        if reasons and self._order.publishes:
            layers = {damage.layer for damage in restored.damaged}
            self._ask("quarantining", None, lambda: self._set_apart(reasons, layers))

    def _set_apart(self, reasons: Mapping[Digest, str], layers: Collection[Digest]) -> None:
        store, since = self._cache.store, self._clock.text()
        for capture, reason in reasons.items():
            quarantine(store, capture, host=self._order.host, reason=reason, since=since)
        for layer in layers:
            discard_damaged(store, layer)

    def _waited(self, key: Key, profile: Profile, found: Found) -> Found:
        """Give a launch that compiles the same a while to publish, if the order says so."""
        end = self._clock.monotonic() + self._order.wait
        while found.result != "exact" and self._clock.monotonic() < end:
            if not live.someone_compiles(self._order.environ, key, self._order.launch, now=self._now()):
                return self._found(key, profile)
            self._clock.sleep(_POLL_SECONDS)
        return found

    def _restored(self, found: Found, room: live.Room) -> Restored:
        if found.result == "none":
            return NOT_RESTORED
        return restore(
            self._cache.store,
            found.captures,
            room.targets,
            trees=found.trees,
            launch=self._order.launch,
            now_ns=self._clock.now_ns(),
            expired=lambda: self._left() <= 0,
        )

    def _left(self) -> float:
        """Seconds of the deadline that are left. Waiting for another launch was asked for, and does not count."""
        return self._begun + self._order.deadline + self._order.wait - self._clock.monotonic()

    def _ask(self, name: str, default: T, step: Callable[[], T]) -> T:
        return self._patience.ask(name, default, step, seconds=max(self._left(), 0.0))

    def _no_capture(self, profile: Profile) -> str | None:
        if not self._order.publishes:
            return "publishing is off"
        if not self._opened:
            return "the store could not be opened, so that no start would derive this key"
        unknown = [factor.name for factor in profile.factors if factor.role == "guard" and factor.value is None]
        if unknown:
            return f"{', '.join(unknown)} could not be read, so that no start could use it"
        return None

    def execute(self, warm: _Warm) -> Ran:
        """Start the command with its caches pinned, and wait for it; capture it meanwhile when it comes to rest."""
        pinned = live.pins(warm.room.targets)
        environ = self._order.environ | warm.constants | pinned
        environ[LAUNCH_VARIABLE] = self._order.launch
        environ[KEY_VARIABLE] = warm.started.key
        environ[PINNED_VARIABLE] = ":".join(sorted(pinned))
        start = self._clock.monotonic()
        child = Child.start(self._order.argv, environ, self._order.cwd)
        attendant = _Attendant(self._order, self._clock, self._trouble, warm, start)
        ended = child.wait(linger=LINGER_SECONDS)
        seconds = self._clock.monotonic() - start
        attendant.finish(self._order.deadline)
        return Ran(ended, seconds, attendant.ready_work, attendant.captured)

    def settle(self, warm: _Warm, ran: Ran) -> Finished:
        """What the command used and added, the verdict, the capture and the launch record."""
        work = self._last_work(warm, ran)
        begun = self._clock.monotonic()
        published = self._patience.ask(
            "publishing",
            NOT_PUBLISHED,
            lambda: warm.outcome.capture(
                work, seconds=ran.seconds, complete=ran.ended.code == 0 or ran.ready_work is not None
            ),
            seconds=self._order.deadline,
        )
        seconds = self._clock.monotonic() - begun
        launch = warm.outcome.launch(ran, work, published, publish_seconds=seconds, errors=self._trouble.errors)
        if not self._order.read_only and self._opened:
            self._patience.ask(
                "recording", None, lambda: record(self._cache.store, launch), seconds=self._order.deadline
            )
            launch = msgspec.structs.replace(launch, errors=dict(self._trouble.errors))
        return Finished(launch, published, _cold_seconds(warm.started.found), self._trouble.lines())

    def _last_work(self, warm: _Warm, ran: Ran) -> Work:
        work = warm.watch.work()
        if not ran.ended.left_behind:
            return work
        self._clock.sleep(SETTLE_SECONDS)
        return warm.watch.work(settled_since=work)


class _Attendant:
    """Looks after a running command once a second: beats, and captures it when it has come to rest.

    A command may run for weeks and end by SIGKILL. What it compiled is captured when nothing has changed for a while;
    the capture is complete only if the command had given its ready sign. All of it happens in a thread, because a file
    system may hang, and signals must reach the command all the same.
    """

    def __init__(self, order: Order, clock: Clock, trouble: Trouble, warm: _Warm, start: float) -> None:
        self._order, self._clock, self._trouble, self._warm, self._start = order, clock, trouble, warm, start
        self._rest = Rest(warm.watch)
        self._captured = False
        self.ready_work: Work | None = None
        self.captured = NOT_PUBLISHED
        self._ended = threading.Event()
        # It inherits our blocked signals, so the kernel never gives one to it.
        self._thread = threading.Thread(target=self._attend, name="cachemgr-attendant", daemon=True)
        self._thread.start()

    def _attend(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            self._trouble.survive("watching", None, self._look_after)

    def _look_after(self) -> None:
        self._warm.room.beat()
        ready = self._order.ready_file is not None and self._order.ready_file.exists()
        if self.ready_work is not None or (self._captured and not ready):
            return
        now = self._clock.monotonic()
        work = self._rest.reached(now, ready=ready)
        if work is None:
            return
        self._captured = True
        if ready:
            self.ready_work = work
        self.captured = self._trouble.survive(
            "publishing",
            NOT_PUBLISHED,
            lambda: self._warm.outcome.capture(work, seconds=now - self._start, complete=ready),
        )

    def finish(self, seconds: float) -> None:
        """The command has ended: look no more, and wait so long for a capture that is under way."""
        self._ended.set()
        self._thread.join(seconds)


def _cold_seconds(found: Found) -> float | None:
    seconds = [capture.manifest.timings["run"] for capture in found.captures if "run" in capture.manifest.timings]
    return seconds[0] if seconds else None


def store_salt(cache: Cache, *, writable: bool) -> str:
    """The salt of the local store; a store that does not exist yet gets one if it may be written."""
    if writable:
        return layout.ensure_layout(cache.store).salt
    found = layout.read_layout(cache.store)
    return found.salt if found else ""
