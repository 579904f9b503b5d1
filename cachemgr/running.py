"""A command that runs, from its start to the record of how it went."""

import threading
from collections.abc import Sequence

import msgspec

from cachemgr import blame, heal, live, observed
from cachemgr.attendant import Attendant
from cachemgr.before import Before, Warm
from cachemgr.child import Child
from cachemgr.clock import Clock
from cachemgr.engine_log import EngineLog, Seen
from cachemgr.order import KEY_VARIABLE, LAUNCH_VARIABLE, PINNED_VARIABLE, Listener, Told
from cachemgr.outcome import NOT_PUBLISHED, Ran
from cachemgr.places import make_directory
from cachemgr.publish import Published
from cachemgr.store.captures import Capture, record
from cachemgr.tap import Piece, Tap
from cachemgr.watch import Work

LINGER_SECONDS = 5.0
"""How long processes that outlive the command are waited for before its capture is made."""
SETTLE_SECONDS = 1.0
"""Where some go on all the same: what does not change for so long is settled."""
_DRAIN_SECONDS = 5.0
"""How long the end of what the command wrote is waited for, where nobody reads it."""


class _Heard:
    """What an engine said, heard by the tap's thread and asked for by others."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._log = EngineLog(clock.monotonic())
        self._lock = threading.Lock()

    def hear(self, piece: Piece) -> None:
        with self._lock:
            self._log.feed(piece.data, self._clock.monotonic())

    def close(self) -> None:
        with self._lock:
            self._log.close(self._clock.monotonic())

    def seen(self) -> Seen:
        with self._lock:
            return self._log.seen()


class Running:
    """One command under way."""

    def __init__(self, before: Before, warm: Warm, listener: Listener) -> None:
        self._order, self._cache, self._clock, self._trouble = before.order, before.cache, before.clock, before.trouble
        self._before, self._warm, self._listener = before, warm, listener
        self._start = self._clock.monotonic()
        self._log = _Heard(self._clock) if warm.profile.engine == "vllm" else None

    def execute(self) -> Ran:
        """Start the command with its caches pinned, and wait for it; capture it meanwhile when it comes to rest."""
        child, tap = self._started()
        attendant = Attendant(
            self._warm.room,
            self._warm.watch,
            self._clock,
            self._trouble,
            ready=self._is_ready,
            capture=self._capture,
        )
        attendant.start()
        ended = child.wait(linger=LINGER_SECONDS, apart=() if tap is None else tap.pumps)
        seconds = self._clock.monotonic() - self._start
        if tap is not None and self._log is not None:
            tap.finish(_DRAIN_SECONDS)
            self._log.close()
        attendant.finish(self._order.deadline)
        return Ran(ended, seconds, attendant.ready_work, attendant.captured, self._seen())

    def _started(self) -> tuple[Child, Tap | None]:
        """The command, with its streams tapped where its engine's log tells something."""
        order, log = self._order, self._log
        if log is None:
            return Child.start(order.argv, self._environ(), order.cwd), None
        tap = Tap.open(log.hear)
        with tap.ends() as ends:
            return Child.start(order.argv, self._environ(), order.cwd, stdout=ends.stdout, stderr=ends.stderr), tap

    def _seen(self) -> Seen | None:
        """What the engine said so far; None for a command whose log nobody reads."""
        return None if self._log is None else self._log.seen()

    def _environ(self) -> dict[str, str]:
        warm = self._warm
        for place in warm.profile.pins.values():
            self._trouble.survive("making a pinned directory", None, lambda place=place: make_directory(place, 0o700))  # type: ignore[misc]
        pinned = {**warm.profile.pins, **live.pins(warm.room.targets)}
        ours = {
            LAUNCH_VARIABLE: self._order.launch,
            KEY_VARIABLE: warm.started.key,
            PINNED_VARIABLE: ":".join(sorted(pinned)),
        }
        return self._order.environ | warm.profile.constants | pinned | ours

    def _is_ready(self) -> bool:
        file = self._order.ready_file
        if file is not None:
            return file.exists()
        seen = self._seen()
        return seen is not None and seen.ready_at is not None

    def _capture(self, work: Work, *, ready: bool) -> Published:
        """Publish what a running command has done, and tell it if the command is ready."""
        seconds = self._clock.monotonic() - self._start
        ran = Ran(None, seconds, work if ready else None, NOT_PUBLISHED, self._seen())
        if ready:
            self._put_in_order(work)
        published = self._trouble.survive("publishing", NOT_PUBLISHED, lambda: self._warm.outcome.capture(work, ran))
        if ready:
            self._warm.room.compiled()
            self._listener.ready(self._told(ran, work, published, publish_seconds=0.0))
        return published

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
        launch = self._warm.outcome.launch(
            ran, work, published, publish_seconds=publish_seconds, errors=self._trouble.errors
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
                "publishing", NOT_PUBLISHED, lambda: self._warm.outcome.capture(work, ran), seconds=self._order.deadline
            )
            self._put_in_order(work)
            self._trouble.survive("looking at rejections", None, lambda: self._avoid_rejected(ran))
        else:
            reason = f"{culprit}; the next start here goes without that capture"
            published = msgspec.structs.replace(NOT_PUBLISHED, reason=reason)
            self._trouble.survive("setting aside what it died of", None, lambda: self._set_aside(culprit))
        told = self._told(ran, work, published, publish_seconds=self._clock.monotonic() - begun)
        if self._order.read_only or not self._before.opened:
            return told
        self._before.patience.ask(
            "recording", None, lambda: record(self._cache.store, told.launch), seconds=self._order.deadline
        )
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
        if ran.ended is None or ran.ended.code == 0:
            return None
        return blame.blamed(observed.death(ran.ended, ran.seen), self._restored())

    def _restored(self) -> dict[str, frozenset[str]]:
        """What of the artifact lay in each live directory when the engine started."""
        offered = self._warm.started.restored.offered
        return {target.directory: offered.get(target.domain.name, frozenset()) for target in self._warm.room.targets}

    def _set_aside(self, culprit: str) -> None:
        """What an engine died of is not tried again on this host."""
        if not self._warm.room.shared(self._order.launch, now=self._clock.now_ns() / 1e9):
            for ailing in heal.all_of(self._warm.room.targets, self._warm.started.restored.offered, culprit):
                heal.set_aside(ailing, self._order.launch)
        self._quarantine(culprit, self._warm.started.found.captures)

    def _avoid_rejected(self, ran: Ran) -> None:
        """A capture that the engine does not take is of no use here.

        One that was made here after another was rejected stays: this engine does not take its own entries, and each of
        its starts would make one more capture and reject that.
        """
        reason = None if ran.seen is None else blame.rejected(observed.rejected(ran.seen), self._restored())
        if reason is not None:
            found = self._warm.started.found.captures
            own = {capture.digest for capture in found if capture.manifest.provenance.host == self._order.host}
            spared = own if self._before.avoids else set()
            self._quarantine(reason, [capture for capture in found if capture.digest not in spared])

    def _quarantine(self, reason: str, captures: Sequence[Capture]) -> None:
        """Also where nothing is published: a start that dies of a capture must not be given it again."""
        reasons = {capture.digest: reason for capture in captures}
        if reasons:
            host, since, writable = self._order.host, self._clock.text(), not self._order.read_only
            self._cache.avoid(reasons, host=host, since=since, writable=writable)

    def leave(self, *, in_use: bool) -> None:
        """The launch is over, however it went."""
        shared = self._warm.shared
        if shared is not None and self._is_alone():  # the last to leave puts back what all of them set aside
            self._trouble.survive("putting back", None, lambda: shared.recover(()))
        self._warm.room.leave(in_use=in_use)
