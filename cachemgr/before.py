"""Before a command starts: what it will compile, which artifact fits, and its files where the engine will look.

Whatever fails in here leaves a cold start. All of it together is bounded by the deadline.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from cachemgr import live
from cachemgr.cache import Cache
from cachemgr.clock import Clock
from cachemgr.digest import Digest
from cachemgr.domains import Domain, Target, of_engine
from cachemgr.factors import describe
from cachemgr.factors.profile import Profile
from cachemgr.heads import Heads
from cachemgr.hold import Purpose
from cachemgr.key import Key, derive, sight
from cachemgr.live import Claim
from cachemgr.lookup import NOTHING, Found, find, kept_out
from cachemgr.order import Order, Started
from cachemgr.outcome import Outcome, Start
from cachemgr.prepare import Preparation, Prepared
from cachemgr.store import layout
from cachemgr.store.lock import held
from cachemgr.trouble import Patience, Trouble
from cachemgr.warm import Restored, restore
from cachemgr.watch import Watch

T = TypeVar("T")

NOT_RESTORED = Restored(0, 0, 0, {}, ())
_POLL_SECONDS = 0.25


class Warm:
    """A launch that is ready to start."""

    def __init__(self, started: Started, prepared: Prepared, outcome: Outcome, profile: Profile) -> None:
        self.started = started
        self.room, self.shared = prepared.room, prepared.shared
        self.outcome = outcome
        self.profile = profile
        restored = started.restored
        self.watch = Watch(self.room.targets, restored.offered, restored.digests, prepared.made_elsewhere)

    @property
    def cold(self) -> dict[str, float]:
        """Seconds per phase of a cold start of the same."""
        found = [capture.manifest.timings for capture in self.started.found.captures if capture.manifest.timings]
        return found[0] if found else {}


class Before:
    """What happens before a command starts: its profile, the look-up, the live directories, the restore."""

    def __init__(self, order: Order, cache: Cache, clock: Clock, trouble: Trouble) -> None:
        self.order, self.cache, self.clock, self.trouble = order, cache, clock, trouble
        self._begun = clock.monotonic()
        self._waiting = 0.0
        self.patience = Patience(cache, clock, trouble)
        self._without: frozenset[Digest] = frozenset()
        self._kept_out: tuple[str, ...] = ()
        self.opened = False
        """Whether the salt that seals values, and so the key, is the store's own."""

    @property
    def avoids(self) -> bool:
        """Whether captures of this very key are in quarantine here."""
        return bool(self._kept_out)

    def profile(self) -> Profile | None:
        """What the command will compile; None when that cannot be found out at all."""
        order = self.order
        salt = self._ask("opening the store", None, lambda: self.cache.salt(writable=order.publishes))
        self.opened = salt is not None
        return self.trouble.attempt(
            "deriving the key",
            None,
            lambda: describe(
                order.argv, order.environ, cwd=order.cwd, ignored_args=order.ignored_args, salt=salt or ""
            ),
        )

    def warm(self, profile: Profile) -> Warm:
        """Look up, take the live directories, and restore."""
        key = derive(profile.factors)
        found = self._waited(key, profile, self._found(key, profile))
        prepared = self._prepared(key, profile, found)
        try:
            return self._filled(key, profile, found, prepared)
        except BaseException:  # an interrupt as well
            prepared.leave()
            raise

    def _filled(self, key: Key, profile: Profile, found: Found, prepared: Prepared) -> Warm:
        """With what the artifact has in the live directories."""
        room = prepared.room
        with held(self.cache.lock(key, "restore"), wait=max(self._left(), 0.0) / 2):
            restored = self._ask("restoring", NOT_RESTORED, lambda: self._restored(found, profile, room))
        if prepared.shared is not None:
            prepared.shared.vouch(units_offered(room.targets, restored.offered))
        self._quarantine(found, restored)
        seconds = self.clock.monotonic() - self._begun
        notes = (*profile.notes, *(() if found.result == "exact" else self._kept_out))
        started = Started(key, found, restored, seconds, self.trouble.lines(), notes)
        began = self.clock.text()
        start = Start(self.order.launch, self.order.host, began, key, profile, found, restored, seconds)
        refusal = self._no_capture(profile)
        outcome = Outcome(self.cache, self.clock, start, refusal=refusal, without=self._without)
        return Warm(started, prepared, outcome, profile)

    def _found(self, key: Key, profile: Profile) -> Found:
        return self._ask("looking up", NOTHING, lambda: self._looked_up(key, profile))

    def _looked_up(self, key: Key, profile: Profile) -> Found:
        store, heads = self.cache.store, Heads(self.cache.heads())
        self._without = self.cache.avoided(self.order.host)
        self._kept_out = kept_out(store, key, self._without)
        return find(store, key, profile.factors, profile.host, heads, without=self._without)

    def _prepared(self, key: Key, profile: Profile, found: Found) -> Prepared:
        """Take the live directories, whole and without strange entries."""
        order, notes = self.order, list[str]()
        purpose: Purpose = "warm" if found.result == "exact" else "compiling"
        claim = Claim(key, order.launch, purpose, sight(profile.factors, profile.host.ordinals))
        preparation = Preparation(
            order.environ, of_engine(profile.engine, order.also), claim, now_ns=self.clock.now_ns, notes=notes
        )
        prepared = preparation.enter()
        try:
            healed = self.trouble.attempt(
                "checking the live directories",
                prepared,
                lambda: preparation.heal(prepared, self.cache.stat_cache(key)),
            )
        except BaseException:
            prepared.leave()
            raise
        for note in notes:
            self.trouble.say(note)
        return healed

    def _now(self) -> float:
        return self.clock.now_ns() / 1e9

    def _quarantine(self, found: Found, restored: Restored) -> None:
        """Damaged captures are not tried again on this host, and what they have is published again."""
        reasons = {damage.capture: damage.reason for damage in restored.damaged}
        for broken in found.damaged:
            capture = layout.capture_of(broken.name)
            if capture is not None and broken.corrupt:
                reasons[capture] = broken.reason
        self._without |= reasons.keys()
        if reasons:
            layers = {damage.layer for damage in restored.damaged}
            host, since, writable = self.order.host, self.clock.text(), self.order.publishes
            self._ask(
                "quarantining",
                None,
                lambda: self.cache.avoid(reasons, layers, host=host, since=since, writable=writable),
            )

    def _waited(self, key: Key, profile: Profile, found: Found) -> Found:
        """Give a launch that compiles the same a while to publish, if the order says so."""
        begun, last = self.clock.monotonic(), self.clock.monotonic()
        while found.result != "exact" and last < begun + self.order.wait:
            if not live.someone_compiles(self.order.environ, key, self.order.launch, now=self._now()):
                return self._found(key, profile)
            self.clock.sleep(_POLL_SECONDS)
            last = self.clock.monotonic()
            self._waiting = last - begun
        return found

    def _restored(self, found: Found, profile: Profile, room: live.Room) -> Restored:
        if found.result == "none":
            return NOT_RESTORED
        return restore(
            self.cache.store,
            found.captures,
            [target for target in room.targets if _may_have(target.domain, found, profile)],
            trees=found.trees,
            ranks=profile.ranks,
            launch=self.order.launch,
            now_ns=self.clock.now_ns(),
            expired=lambda: self._left() <= 0,
        )

    def _left(self) -> float:
        """Seconds of the deadline that are left. Waiting for another launch was asked for, and does not count."""
        return self._begun + self.order.deadline + self._waiting - self.clock.monotonic()

    def _ask(self, name: str, default: T, step: Callable[[], T]) -> T:
        return self.patience.ask(name, default, step, seconds=max(self._left(), 0.0))

    def _no_capture(self, profile: Profile) -> str | None:
        if not self.order.publishes:
            return "publishing is off"
        if not self.opened:
            return "the store could not be opened, so that no start would derive this key"
        unknown = [factor.name for factor in profile.factors if factor.role == "guard" and factor.value is None]
        if unknown:
            return f"{', '.join(unknown)} could not be read, so that no start could use it"
        return None


def _may_have(domain: Domain, found: Found, profile: Profile) -> bool:
    """Whether a launch may be given this domain at all."""
    return (profile.compiles or not domain.needs_compile) and (found.result == "exact" or not domain.exact_only)


def units_offered(targets: Sequence[Target], offered: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """The units by domain that the restored files make up."""
    return {
        target.domain.name: frozenset(map(target.domain.unit_of, offered.get(target.domain.name, ())))
        for target in targets
    }
