"""A command that runs, from its start to the record of how it went."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from cachemgr import blame, heal, live, observed, threads
from cachemgr.answering import Entries
from cachemgr.attendant import Attendant
from cachemgr.before import Before, Warm
from cachemgr.capture import Launch
from cachemgr.child import Child, Ended
from cachemgr.clock import Clock
from cachemgr.desk import DESK_VARIABLE, HEARS_VARIABLE, Desk, Facts
from cachemgr.engine_log import EngineLog
from cachemgr.forwarding import Forwarding
from cachemgr.making_room import make_room
from cachemgr.order import KEY_VARIABLE, LAUNCH_VARIABLE, PINNED_VARIABLE, Companion, Listener, Told, UnderWay
from cachemgr.outcome import NOT_PUBLISHED, Ran
from cachemgr.places import make_directory
from cachemgr.publish import Published
from cachemgr.reporting import Reporting
from cachemgr.seen import Seen
from cachemgr.store.captures import Capture
from cachemgr.tap import Piece, Tap
from cachemgr.trouble import Trouble
from cachemgr.watch import CALM, HURRIED, Work

LINGER_SECONDS = 5.0
"""How long processes that outlive the command are waited for before its capture is made."""
SETTLE_SECONDS = 1.0
"""Where some go on all the same: what does not change for so long is settled."""
_DRAIN_SECONDS = 5.0
"""How long the end of what the command wrote is waited for, where nobody reads it."""
_FAREWELL_SECONDS = 60.0
"""How long a companion may take to notice that its command has ended: an answer that never comes takes so long."""


@contextmanager
def accompanied(pid: int, companion: Companion | None, trouble: Trouble, ready: Callable[[], bool]) -> Iterator[None]:
    """Have a companion go along with a command until the block is left."""
    if companion is None:
        yield
        return
    under_way = UnderWay(pid, threading.Event(), ready)

    def go_along() -> None:
        trouble.survive("going along", None, lambda: companion(under_way))

    thread = trouble.survive("going along", None, lambda: threads.start(go_along, "companion"))
    try:
        yield
    finally:
        under_way.ended.set()
        if thread is not None:
            thread.join(_FAREWELL_SECONDS)


class _Heard:
    """What an engine said, heard by the tap's thread and asked for by others."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._log = EngineLog(clock.monotonic())
        self._lock = threading.Lock()

    def hear(self, piece: Piece) -> None:
        self.hear_bytes(piece.data)

    def hear_bytes(self, data: bytes) -> None:
        with self._lock:
            self._log.feed(data, self._clock.monotonic())

    def close(self) -> None:
        with self._lock:
            self._log.close(self._clock.monotonic())

    def seen(self) -> Seen:
        with self._lock:
            return self._log.seen()


class Running:
    """One command under way. `hears_all`: its output is read here, so that nobody need hand its log on; `companion`
    goes along with it."""

    def __init__(
        self,
        before: Before,
        warm: Warm,
        listener: Listener,
        *,
        hears_all: bool = True,
        companion: Companion | None = None,
    ) -> None:
        self._companion = companion
        self._order, self._cache, self._clock, self._trouble = before.order, before.cache, before.clock, before.trouble
        self._before, self._warm, self._listener = before, warm, listener
        self._start = self._clock.monotonic()
        self._forwarding = Forwarding(self._order, self._cache, self._clock, self._trouble)
        self._reporting = Reporting(self._order, self._cache.home)
        self._log = _Heard(self._clock) if warm.profile.engine == "vllm" else None
        self._hears_all = hears_all
        self._engines_ready_at: float | None = None
        self._desk = self._trouble.survive("opening the desk", None, self._open_desk)

    def _open_desk(self) -> Desk | None:
        """Where processes of the engine speak to us, if they have our plugin."""
        if self._log is None:
            return None
        part = self._order.part
        hear = (lambda _data: None) if self._hears_all else self._log.hear_bytes
        desk = Desk.open(hear, "" if part is None else part.desk)
        entries = Entries(self._before, self._warm)
        desk.attend(lambda path: self._trouble.survive("answering the engine", "an error", lambda: entries(path)))
        return desk

    @property
    def connected(self) -> int:
        """Processes of the engine that speak to us now."""
        return 0 if self._desk is None else self._desk.connected

    def see_through(self, go: Callable[[], Ran], *, first: Callable[[], None] = lambda: None) -> Ran:
        """From what has to be done `first` to the record: `go` runs the command. Whatever happens, the launch is left.

        Raises:
            LaunchError: settling failed, and `--strict` is set.
        """
        trouble, listener, in_use = self._trouble, self._listener, False
        try:
            first()
            trouble.survive("telling", None, lambda: listener.started(self._warm.started))
            ran = go()
            in_use = ran.left_behind
            told = trouble.attempt("settling", None, lambda: self.settle(ran))
        finally:
            self._leave(in_use=in_use)
        if told is None:
            trouble.tell(listener.note)
        else:
            trouble.survive("telling", None, lambda: listener.finished(told))
        return ran

    def execute(self) -> Ran:
        """Start the command with its caches pinned, and wait for it; capture it meanwhile when it comes to rest."""
        child, tap = self._started()

        def wait() -> Ended:
            return child.wait(linger=LINGER_SECONDS, apart=self._not_the_commands(tap))

        def drain() -> None:
            if tap is not None:
                tap.finish(_DRAIN_SECONDS)

        with accompanied(child.pid, self._companion, self._trouble, self._is_ready):
            return self.accompany(wait, drain)

    def accompany(self, wait: Callable[[], Ended | None], drain: Callable[[], None] = lambda: None) -> Ran:
        """Look after a command until `wait` returns, which says how it ended where anybody knows; `drain` then hears
        the rest of what it said."""
        attendant = Attendant(
            self._warm.watch,
            self._clock,
            self._trouble,
            beat=self._warm.beat,
            pace=lambda: CALM if self._warm.flight is None else HURRIED,
            ready=self._is_ready,
            entries=self._entries_that_others_wait_for,
            capture=self._capture,
        )
        self._trouble.survive("attending", None, attendant.start)
        self._trouble.survive("sending", None, self._forwarding.resume)
        ended = wait()
        seconds = self._clock.monotonic() - self._start
        drain()
        if self._log is not None:
            self._log.close()
        attendant.finish(self._order.deadline)
        return Ran(ended, seconds, attendant.ready_work, attendant.captured, self._seen(), self._facts())

    def _not_the_commands(self, tap: Tap | None) -> Callable[[], set[int]]:
        pumps = set() if tap is None else set(tap.pumps)
        return lambda: pumps | self._forwarding.senders | self._reporting.senders

    def _started(self) -> tuple[Child, Tap | None]:
        """The command, with its streams tapped where its engine's log tells something."""
        order, log = self._order, self._log
        if log is None:
            return Child.start(order.command, self._environ(), order.cwd), None
        tap = Tap.open(log.hear)
        with tap.ends() as ends:
            return Child.start(order.command, self._environ(), order.cwd, stdout=ends.stdout, stderr=ends.stderr), tap

    def _facts(self) -> Facts | None:
        """What processes of the engine said themselves; None where none did."""
        facts = None if self._desk is None else self._desk.facts()
        if facts is None or not facts.processes:
            return None
        if facts.ready and self._engines_ready_at is None:
            self._engines_ready_at = self._clock.monotonic()
        return facts

    def _seen(self) -> Seen | None:
        """What the engine said so far; None for a command whose log nobody reads."""
        if self._log is None:
            return None
        facts, seen = self._facts(), self._log.seen()
        return seen if facts is None else observed.joined(seen, facts, self._engines_ready_at)

    def _environ(self) -> dict[str, str]:
        return self._order.environ | self.variables()

    def variables(self) -> dict[str, str]:
        """What the command's environment gets from us; directories that it is pinned to are made."""
        warm = self._warm
        for place in warm.profile.pins.values():
            self._trouble.survive("making a pinned directory", None, lambda place=place: make_directory(place, 0o700))  # type: ignore[misc]
        pinned = {**warm.profile.pins, **live.pins(warm.room.targets)}
        ours = {
            LAUNCH_VARIABLE: self._order.launch,
            KEY_VARIABLE: warm.started.key,
            PINNED_VARIABLE: ":".join(sorted(pinned)),
        }
        if self._desk is not None:
            ours[DESK_VARIABLE] = self._desk.name
            ours[HEARS_VARIABLE] = "all" if self._hears_all else "some"
        variables = warm.profile.constants | pinned | ours
        if self._desk is not None:
            factors = [msgspec.to_builtins(factor) for factor in warm.profile.factors if factor.role != "guard"]
            self._desk.hand_out({"variables": variables, "factors": factors, "command": warm.profile.command})
        return variables

    def _is_ready(self) -> bool:
        file = self._order.ready_file
        if file is not None:
            return os.path.exists(file)
        seen = self._seen()
        return seen is not None and seen.ready_at is not None

    def _entries_that_others_wait_for(self) -> int:
        seen = None if self._warm.flight is None else self._seen()
        return 0 if seen is None else sum(entry.saved for entry in seen.aot_entries)

    def _capture(self, work: Work, *, ready: bool) -> Published:
        """Publish what a running command has done, and tell it if the command is ready."""
        seconds = self._clock.monotonic() - self._start
        ran = Ran(None, seconds, work if ready else None, NOT_PUBLISHED, self._seen(), self._facts())
        if ready:
            self._put_in_order(work)
        published = self._trouble.survive("publishing", NOT_PUBLISHED, lambda: self._published(work, ran))
        self._forward(published)
        if ready:
            self._warm.room.compiled()
            self._land()
            told = self._told(ran, work, published, publish_seconds=0.0)
            self._record(told.launch)  # a server may never get to its end, and who is not its parent may not outlive it
            self._listener.ready(told)
        self._trouble.survive("sending", None, self._forwarding.set_off)
        return published

    def _published(self, work: Work, ran: Ran) -> Published:
        """The capture of a piece of work; once more, where room had to be made for it."""
        published = self._warm.outcome.capture(work, ran)
        made = self._trouble.survive("making room", False, lambda: self._make_room(published))  # noqa: FBT003
        return self._warm.outcome.capture(work, ran) if made and published.no_room else published

    def _make_room(self, published: Published) -> bool:
        """Where the budget is nearly full, remove what was not used for the longest time. Whether anything went."""
        order, targets = self._order, self._warm.room.targets
        needed = self._warm.outcome.excess(published) if order.publishes and order.auto_prune else 0
        if needed <= 0:
            return False
        return make_room(order, self._cache, self._clock, self._trouble, targets=targets, needed=needed)

    def _record(self, launch: Launch) -> None:
        """When it is ready and at its end, of which the later one counts."""
        withheld = self._order.withholds(self._warm.profile.model) is not None
        if withheld or self._order.read_only or not self._before.opened:
            return
        if not self._order.publishes and not self._cache.writable:
            return  # a serving pod with the store mounted read-only: nobody expects a record of it
        self._before.patience.ask("recording", None, lambda: self._cache.record(launch), seconds=self._order.deadline)
        self._trouble.survive("sending", None, lambda: self._forwarding.record(launch))
        self._trouble.survive("reporting", None, lambda: self._reporting.record(launch))

    def _put_in_order(self, work: Work) -> None:
        """The engine has looked: note which entries are its own, and put back the others, unless another launch is
        there, whose engine may not have looked."""
        shared = self._warm.shared
        if shared is None:
            return
        shared.vouch(work.units())
        if self._is_alone():
            self._warm.watch.leave_out(shared.put_back())

    def _is_alone(self) -> bool:
        """Whether no other launch uses the shared directories of our root."""
        root, now = self._warm.room.root, self._clock.now_ns() / 1e9
        return root is None or not live.sharers(root, self._order.launch, now=now)

    def _told(self, ran: Ran, work: Work, published: Published, *, publish_seconds: float) -> Told:
        if ran.facts is not None:
            observed.count_lost(self._trouble.errors, ran.facts)
        launch = self._warm.outcome.launch(
            ran,
            work,
            published,
            publish_seconds=publish_seconds,
            pushed_bytes=self._forwarding.pushed_bytes,
            errors=self._trouble.errors,
        )
        advice = () if ran.seen is None else tuple(observed.advice(ran.seen))
        return Told(launch, published, self._warm.cold, self._trouble.lines(), advice)

    def settle(self, ran: Ran) -> Told:
        """What the command used and added, the verdict, the capture and the launch record."""
        work = self._last_work(ran)
        begun = self._clock.monotonic()
        culprit = self._trouble.survive("looking for what it died of", None, lambda: self._blamed(ran))
        if culprit is None:
            published = self._before.patience.ask(
                "publishing", NOT_PUBLISHED, lambda: self._published(work, ran), seconds=self._order.deadline
            )
            self._forward(published)
            self._put_in_order(work)
            self._trouble.survive("looking at rejections", None, lambda: self._avoid_rejected(ran))
        else:
            reason = f"{culprit}; the next start here goes without that capture"
            published = msgspec.structs.replace(NOT_PUBLISHED, reason=reason)
            self._trouble.survive("setting aside what it died of", None, lambda: self._set_aside(culprit))
        self._land()
        told = self._told(ran, work, published, publish_seconds=self._clock.monotonic() - begun)
        self._record(told.launch)
        launch = msgspec.structs.replace(told.launch, errors=dict(self._trouble.errors))
        return msgspec.structs.replace(told, launch=launch, trouble=(*told.trouble, *self._trouble.lines()))

    def _last_work(self, ran: Ran) -> Work:
        work = self._warm.watch.work()
        if ran.ended is None or not ran.ended.left_behind:
            return work
        self._clock.sleep(SETTLE_SECONDS)
        return self._warm.watch.work(settled_since=work)

    def _blamed(self, ran: Ran) -> str | None:
        """Why the engine died of what was restored, if it did."""
        ended = ran.ended or observed.unseen_end(ran.seen)
        if ended is None or ended.code == 0:
            return None
        return blame.blamed(observed.death(ended, ran.seen), self._restored())

    def _restored(self) -> dict[str, frozenset[str]]:
        """What of artifacts lay in each live directory when the engine looked."""
        offered = self._warm.outcome.offered()
        return {target.directory: offered.get(target.domain.name, frozenset()) for target in self._warm.room.targets}

    def _set_aside(self, culprit: str) -> None:
        """What an engine died of is not tried again on this host."""
        if not self._warm.room.shared(self._order.launch, now=self._clock.now_ns() / 1e9):
            for ailing in heal.all_of(self._warm.room.targets, self._warm.outcome.offered(), culprit):
                heal.set_aside(ailing, self._order.launch)
        self._quarantine(culprit, self._warm.outcome.captures())

    def _avoid_rejected(self, ran: Ran) -> None:
        """A capture that the engine does not take is of no use here.

        One that was made here after another was rejected stays: this engine does not take its own entries, and each of
        its starts would make one more capture and reject that.
        """
        reason = None if ran.seen is None else blame.rejected(observed.rejected(ran.seen), self._restored())
        if reason is not None:
            found = self._warm.outcome.captures()
            own = {capture.digest for capture in found if capture.manifest.provenance.host == self._order.host}
            spared = own if self._before.avoids else set()
            self._quarantine(reason, [capture for capture in found if capture.digest not in spared])

    def _quarantine(self, reason: str, captures: Sequence[Capture]) -> None:
        """Also where nothing is published: a start that dies of a capture must not be given it again."""
        reasons = {capture.digest: reason for capture in captures}
        if reasons:
            host, since, writable = self._order.host, self._clock.text(), not self._order.read_only
            self._cache.avoid(reasons, host=host, since=since, writable=writable)

    def _forward(self, published: Published) -> None:
        """Send a capture on to the mirror: at once where other machines wait for it there."""
        key, capture, flight = self._warm.started.key, published.capture, self._warm.flight
        if capture is None:
            return
        if flight is None or flight.landed:
            self._trouble.survive("sending", None, lambda: self._forwarding.hand_over(key, capture))
        else:
            seconds = self._order.deadline
            self._trouble.survive("sending", None, lambda: self._forwarding.deliver(key, capture, seconds=seconds))
            flight.published()

    def _land(self) -> None:
        """Nobody has to wait for what this command compiles any more: it is published, or will not be."""
        flight = self._warm.flight
        if flight is not None:
            self._trouble.survive("single flight", None, flight.land)

    def _leave(self, *, in_use: bool) -> None:
        """The launch is over, however it went."""
        self._land()
        if self._desk is not None:
            self._desk.close()
        shared = self._warm.shared
        if shared is not None and self._is_alone():  # the last to leave puts back what all of them set aside
            self._trouble.survive("putting back", None, lambda: shared.recover(()))
        self._warm.room.leave(in_use=in_use)
        self._trouble.survive("ending the lease", None, self._warm.end_lease)
        self._trouble.survive("sending", None, self._forwarding.set_off)
        self._forwarding.finish(self._order.deadline)
        self._reporting.finish(self._order.deadline)
