"""Before a command starts: what it will compile, which artifact fits, and its files where the engine will look.

Whatever fails in here leaves a cold start. All of it together is bounded by the deadline.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import msgspec

from cachemgr import live, places
from cachemgr.budget import Budget
from cachemgr.cache import Cache
from cachemgr.clock import Clock
from cachemgr.digest import Digest
from cachemgr.domains import Domain, Target, of_engine
from cachemgr.errors import CacheError
from cachemgr.factors import describe
from cachemgr.factors.profile import Profile
from cachemgr.flight import Flight
from cachemgr.hold import Purpose
from cachemgr.key import Key, derive, sight
from cachemgr.level import Level
from cachemgr.live import Claim
from cachemgr.lookup import Found, find, kept_out
from cachemgr.order import Listener, Order, Part, Started
from cachemgr.outcome import Outcome, Start
from cachemgr.prepare import Preparation, Prepared
from cachemgr.pull import Pulled, pull
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, Damaged, quarantined
from cachemgr.store.leases import Lease
from cachemgr.store.lock import held
from cachemgr.trouble import Patience, Trouble
from cachemgr.trust import Policy
from cachemgr.turns import Turns
from cachemgr.warm import Damage, Restored, restore, sources
from cachemgr.watch import Watch

T = TypeVar("T")

NOT_RESTORED = Restored(0, 0, 0, {}, ())
_POLL_SECONDS = 0.25


class Warm:
    """A launch that is ready to start."""

    def __init__(
        self,
        started: Started,
        prepared: Prepared,
        outcome: Outcome,
        profile: Profile,
        *,
        flight: Flight | None,
        lease: Lease | None,
    ) -> None:
        self.started = started
        self._lease = lease
        self.flight = flight
        """The claim on this key, where others wait for what this launch compiles; taken before the command starts, or
        when its engine asks for an entry that nobody has."""
        self.room, self.shared = prepared.room, prepared.shared
        self.outcome = outcome
        self.profile = profile
        restored = started.restored
        self.watch = Watch(self.room.targets, restored.offered, restored.digests, prepared.made_elsewhere)

    def beat(self) -> None:
        """Show others that this launch is alive."""
        self.room.beat()
        if self._lease is not None:
            self._lease.beat()

    def end_lease(self) -> None:
        """A prune may take the artifacts of this launch."""
        if self._lease is not None:
            self._lease.end()

    @property
    def cold(self) -> dict[str, float]:
        """Seconds per phase of a cold start of the same."""
        found = [capture.manifest.timings for capture in self.started.found.captures if capture.manifest.timings]
        return found[0] if found else {}


class Before:
    """What happens before a command starts: its profile, the look-up, the live directories, the restore."""

    def __init__(self, order: Order, cache: Cache, clock: Clock, trouble: Trouble, listener: Listener) -> None:
        self._listener = listener
        self.order, self.cache, self.clock, self.trouble = order, cache, clock, trouble
        self._begun = clock.monotonic()
        self._waiting = 0.0
        self.patience = Patience(cache, clock, trouble)
        self._without: frozenset[Digest] = frozenset()
        self._kept_out: tuple[str, ...] = ()
        self._turns = Turns(order, cache, clock, trouble=trouble, patience=self.patience, tell=self._tell)
        self._lease: Lease | None = None
        self.opened = False
        """Whether the local store is there and one of ours; a start leaves it alone otherwise."""

    @property
    def avoids(self) -> bool:
        """Whether captures of this very key are in quarantine here."""
        return bool(self._kept_out)

    @property
    def without(self) -> frozenset[Digest]:
        """Captures that this host does not use."""
        return self._without

    def profile(self) -> Profile | None:
        """What the command will compile; None when that cannot be found out at all."""
        order = self.order
        self.opened = self._ask("opening the store", None, self._open) is not None
        profile = self.trouble.attempt(
            "deriving the key",
            None,
            lambda: describe(
                order.argv,
                order.environ,
                cwd=order.cwd,
                ignored_args=order.ignored_args,
                engine_args=order.engine_args,
            ),
        )
        return profile if profile is None or order.part is None else of_part(profile, order.part)

    def _open(self) -> Store:
        """A store that is new gets its layout here if it may be written."""
        store = self.cache.store
        if self.order.publishes:
            layout.ensure_layout(store)
        else:
            layout.read_layout(store)
        return store

    def warm(self, profile: Profile) -> Warm:
        """Look up, take the live directories, and restore."""
        key = derive(profile.factors)
        with ExitStack() as undo:  # on an interrupt as well
            undo.callback(self._turns.land)
            found = self._in_turn(key, profile, self._waited(key, profile, self._found(key, profile)))
            self._tell_distrust(found)
            self._lease = self._leased(key, profile, found)
            undo.callback(self._end_lease)
            prepared = self._prepared(key, profile, found)
            undo.callback(prepared.leave)
            warm = self._filled(key, profile, found, prepared)
            undo.pop_all()
            return warm

    def _filled(self, key: Key, profile: Profile, found: Found, prepared: Prepared) -> Warm:
        """With what the artifact has in the live directories."""
        room = prepared.room
        budget = self.budget(room)
        with held(self.cache.lock(key, "restore"), wait=max(self._left(), 0.0) / 2):
            restored = self.patience.ask(
                "restoring",
                msgspec.structs.replace(NOT_RESTORED, pulled_bytes=None if found.where == "mirror" else 0),
                lambda: self._restored(found, profile, room, budget),
                seconds=max(self._left(), 0.0),
                store=found.store,
            )
        if prepared.shared is not None:
            prepared.shared.vouch(units_offered(room.targets, restored.offered))
        self.set_apart(found.damaged, restored.damaged, seconds=max(self._left(), 0.0))
        seconds = self.clock.monotonic() - self._begun
        notes = (*profile.notes, *(() if found.result == "exact" else self._kept_out))
        started = Started(key, found, restored, seconds, self.trouble.lines(), notes)
        began = self.clock.text()
        start = Start(self.order.launch, self.order.host, began, key, profile, found, restored, seconds)
        refusal = self._no_capture(profile)
        outcome = Outcome(self.cache, self.clock, start, refusal=refusal, without=self._without, budget=budget)
        return Warm(started, prepared, outcome, profile, flight=self.flight, lease=self._lease)

    def _leased(self, key: Key, profile: Profile, found: Found) -> Lease | None:
        """Where it may write to the local store, a launch says which artifacts no prune should take from it now."""
        order, store = self.order, self.cache.store
        if not self.opened or order.read_only or not self.cache.writable:
            return None
        if order.withholds(profile.model) is not None:
            return None
        keys = {key} if found.artifact is None else {key, found.artifact}
        return self._ask("leasing", None, lambda: Lease.take(store, keys, order.launch, order.host))

    def _end_lease(self) -> None:
        if self._lease is not None:
            self.trouble.survive("ending the lease", None, self._lease.end)

    def _found(self, key: Key, profile: Profile) -> Found:
        self._without = self._avoided()
        found = find(
            self.cache.until(self.clock.monotonic() + self._left()).levels,
            key,
            profile.factors,
            profile.host,
            model=profile.model,
            without=self._without,
            ask=self._look_in,
        )
        self._kept_out = kept_out(found, key)
        return found

    def _tell_distrust(self, found: Found) -> None:
        """Counted under names of their own: untrusted is neither damaged nor absent, and neither is unreadable."""
        for line in found.ignored:
            self.trouble.say(line)
        for name, count in (
            ("levels ignored", len(found.ignored)),
            ("untrusted", len(found.untrusted)),
            ("unreadable", len(found.unreadable)),
            ("used untrusted", len(found.doubts)),
        ):
            if count:
                self.trouble.errors[name] += count

    def _avoided(self) -> frozenset[Digest]:
        """What is noted in our home counts also where the store cannot tell: an engine may have died of it."""
        cache, host = self.cache, self.order.host
        apart = frozenset[Digest]()
        apart = self.trouble.attempt("looking up", apart, lambda: quarantined(cache.apart, host))
        return self._ask("looking up", apart, lambda: cache.avoided(host))

    def _look_in(self, level: Level, step: Callable[[], T], /) -> T | None:
        name = "looking up" if level.where == "local" else f"looking up in the {level.where}"
        worded = partial(self._worded, step) if level.where == "mirror" else step
        return self.patience.ask(name, None, worded, seconds=max(self._left(), 0.0), store=level.store)

    def _worded(self, step: Callable[[], T]) -> T:
        """Failures of the mirror are counted by what they are: denied is not throttled, and neither is absent."""
        try:
            return step()
        except CacheError as error:
            self.trouble.errors[f"mirror {error.word}"] += 1
            raise

    def _pulled(self, found: Found, needed: tuple[Capture, ...], budget: Budget) -> Pulled:
        """Where what was found is restored from: of a mirror by way of the local store, if that can be written, so that
        the next start here finds it there."""
        assert found.store is not None, "it was found"
        if found.where != "mirror" or self.order.read_only or not self.opened:
            return Pulled(found.store, needed, mirrored=found.where == "mirror")
        pulled = pull(
            found.store,
            self.cache.store,
            needed,
            since=self.clock.text(),
            now=self._now(),
            left=budget.left(),
            expired=lambda: self._left() <= 0,
        )
        if pulled.note:
            self.trouble.say(pulled.note)
        for failure in pulled.failures:
            self.trouble.errors[f"mirror {failure.error.word}"] += 1
        return pulled

    def _prepared(self, key: Key, profile: Profile, found: Found) -> Prepared:
        """Take the live directories, whole and without strange entries."""
        order, notes = self.order, list[str]()
        purpose: Purpose = "warm" if found.result == "exact" else "compiling"
        claim = Claim(key, order.launch, purpose, sight(profile.factors, profile.host.ordinals))
        preparation = Preparation(
            order.environ,
            of_engine(profile.engine, order.also),
            claim,
            closed=self._policy == "require",
            now_ns=self.clock.now_ns,
            notes=notes,
        )
        prepared = preparation.enter()
        try:
            healed = self.trouble.attempt(
                "checking the live directories",
                prepared,
                lambda: preparation.heal(prepared, self.cache.stat_cache(key), lambda: self._left() <= 0),
            )
        except BaseException:
            prepared.leave()
            raise
        for note in notes:
            self.trouble.say(note)
        return healed

    def _now(self) -> float:
        return self.clock.now_ns() / 1e9

    def set_apart(self, unread: Sequence[Damaged], unpacked: Sequence[Damage], *, seconds: float) -> None:
        """Damaged captures, found when they were read or unpacked, are not tried again on this host, and what they have
        is published again."""
        reasons = {damage.capture: damage.reason for damage in unpacked}
        for broken in unread:
            capture = layout.capture_of(broken.name)
            if capture is not None and broken.kind == "damaged":
                reasons[capture] = broken.reason
        self._without |= reasons.keys()
        if reasons:
            layers = {damage.layer for damage in unpacked}
            host, since, writable = self.order.host, self.clock.text(), self.order.publishes
            self.patience.ask(
                "quarantining",
                None,
                lambda: self.cache.avoid(reasons, layers, host=host, since=since, writable=writable),
                seconds=seconds,
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

    def _in_turn(self, key: Key, profile: Profile, found: Found) -> Found:
        """What is found when it is our turn: now, unless the order says to wait here for others."""
        if self.order.waits_at_lookup or found.result == "exact":
            return found
        latest = [found]

        def look() -> Found | None:
            latest.append(self._found(key, profile))
            return latest[-1] if latest[-1].result == "exact" else None

        self.take_turn(key, profile, look)
        return latest[-1]

    @property
    def flight(self) -> Flight | None:
        """The claim of this launch, if it compiles for others."""
        return self._turns.flight

    def take_turn(self, key: Key, profile: Profile, look: Callable[[], T | None]) -> T | None:
        """Wait for the machine that compiles this key for all, or be it, if the order says so; what `look` found."""
        return self._turns.take(key, look, useless=self._no_capture_of(profile), unpublished=self._no_capture(profile))

    def _tell(self, line: str) -> None:
        self.trouble.survive("telling", None, lambda: self._listener.note(line))

    def budget(self, room: live.Room) -> Budget:
        """What is left for our state, the store and the live directories together."""
        live_ones = [target.directory for target in room.targets]
        if room.root is not None:
            live_ones.append(f"{room.root}/cachemgr")
        counted = [*map(str, self.cache.places), *live_ones]
        return Budget(self.order.budget, counted, self.cache.home / "usage", self.clock.now_ns)

    def _restored(self, found: Found, profile: Profile, room: live.Room, budget: Budget) -> Restored:
        if found.store is None:
            return NOT_RESTORED
        targets = self._closed([target for target in room.targets if _may_have(target.domain, found, profile)])
        needed = sources(found.captures, [target.domain for target in targets], profile.ranks)
        pulled = self._pulled(found, needed, budget)
        restored = restore(
            pulled.store,
            pulled.captures,
            targets,
            trees=found.trees,
            ranks=profile.ranks or (() if self.order.part is None else self.order.part.ranks),
            budget=budget,
            launch=self.order.launch,
            now_ns=self.clock.now_ns(),
            expired=lambda: self._left() <= 0,
        )
        return pulled.added_to(restored)

    @property
    def _policy(self) -> Policy:
        """What is asked of this host's own directories."""
        return self.cache.levels[0].policy

    def _closed(self, targets: Sequence[Target]) -> list[Target]:
        """Without directories that another user could write to, where the policy is to require; said unless it is off.

        What is verified before it is placed there can be exchanged before the engine reads it.
        """
        if self._policy == "off":
            return list(targets)
        faults = {target.domain.name: places.exposure(target.directory) for target in targets}
        for name, fault in faults.items():
            if fault is not None:
                self.trouble.say(
                    f"{name} {'not restored' if self._policy == 'require' else 'is open to others'}: {fault}"
                )
        return [target for target in targets if self._policy == "warn" or faults[target.domain.name] is None]

    def _left(self) -> float:
        """Seconds of the deadline that are left. Waiting for another launch was asked for, and does not count."""
        given = self.order.deadline if self.order.left is None else self.order.left
        return self._begun + given + self._waiting + self._turns.waited - self.clock.monotonic()

    def _ask(self, name: str, default: T, step: Callable[[], T]) -> T:
        return self.patience.ask(name, default, step, seconds=max(self._left(), 0.0))

    def _no_capture(self, profile: Profile) -> str | None:
        """Why nothing that this launch compiles is published, or None."""
        if not self.order.publishes:
            return "publishing is off"
        refusal = self._no_capture_of(profile)
        if refusal is None and not self.opened:
            return "the store could not be opened"
        return refusal

    def _no_capture_of(self, profile: Profile) -> str | None:
        """Why no start would use a capture of this, whoever has made it, or None."""
        pattern = self.order.withholds(profile.model)
        if pattern is not None:
            return f"`never_publish` has {pattern}"
        if unknown := profile.unknown_guards:
            return f"{', '.join(unknown)} could not be read, so that no start could use it"
        return None


def of_part(profile: Profile, part: Part) -> Profile:
    """What another machine asked for, on this one."""
    guards = [factor for factor in profile.factors if factor.role == "guard"]
    asked = [factor for factor in part.factors if factor.role != "guard"]
    factors = tuple(sorted([*guards, *asked], key=lambda factor: factor.name))
    return msgspec.structs.replace(profile, factors=factors, gpus=0)  # the launch itself counts all of its ranks


def _may_have(domain: Domain, found: Found, profile: Profile) -> bool:
    """Whether a launch may be given this domain at all."""
    return (profile.compiles or not domain.needs_compile) and (found.result == "exact" or not domain.exact_only)


def units_offered(targets: Sequence[Target], offered: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """The units by domain that the restored files make up."""
    return {
        target.domain.name: frozenset(map(target.domain.unit_of, offered.get(target.domain.name, ())))
        for target in targets
    }
