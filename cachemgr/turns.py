"""Whose turn it is to compile: where a launch claims its key, and where it waits for whoever has the claim.

Where it publishes, others look for what it compiles, so that is where it claims: in the mirror or the local store. A
machine that may not write claims to the mirror has the service of the fleet keep them (`cachemgr.service_claims`). One
that only reads the mirror waits for those that compile for it, and claims nothing there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cachemgr.cache import Cache
from cachemgr.clock import Clock
from cachemgr.flight import Flight, Turn, wait_for
from cachemgr.key import Key
from cachemgr.level import Level
from cachemgr.order import Order
from cachemgr.process import this_process
from cachemgr.store import Store
from cachemgr.store.claims import Claims, InStore, Owner
from cachemgr.trouble import Patience, Trouble

T = TypeVar("T")

_WHAT = "single flight"


@dataclass(frozen=True)
class _Wish(Generic[T]):
    """What a launch waits for, and until when by the monotonic clock."""

    key: Key
    look: Callable[[], T | None]
    until: float


class Turns:
    """The waiting and the claim of one launch."""

    def __init__(
        self,
        order: Order,
        cache: Cache,
        clock: Clock,
        *,
        trouble: Trouble,
        patience: Patience,
        tell: Callable[[str], None],
    ) -> None:
        self._order, self._cache, self._clock = order, cache, clock
        self._trouble, self._patience, self._tell = trouble, patience, tell
        self.flight: Flight | None = None
        """The claim of this launch, if it compiles for others."""
        self.waited = 0.0
        """Seconds that were waited for others so far."""

    def take(self, key: Key, look: Callable[[], T | None], *, useless: str | None, unpublished: str | None) -> T | None:
        """Wait for the machine that compiles this key for all, or be it, if the order says so; what `look` found.

        Args:
            useless: why this start could not use what another one compiles, or None.
            unpublished: why nobody would get what this one compiles, or None.
        """
        if not self._order.single_flight:
            return None
        begun, before = self._clock.monotonic(), self.waited

        def looked() -> T | None:
            self.waited = before + self._clock.monotonic() - begun
            return look()

        found = self._taken(_Wish(key, looked, begun + self._order.single_flight), useless, unpublished)
        self.waited = before + self._clock.monotonic() - begun
        return found

    def land(self) -> None:
        """Let others go, if they wait for this launch."""
        if self.flight is not None:
            self._trouble.survive(_WHAT, None, self.flight.land)

    def _taken(self, wish: "_Wish[T]", useless: str | None, unpublished: str | None) -> T | None:
        mirror = self._cache.fleet(mirrored=True)
        elsewhere = self._cache.mirror is None or self._order.sender is not None
        if elsewhere or useless is not None or _closed(mirror) is not None:
            return self._claimed(wish, useless or unpublished)
        turn = self._waited(mirror.store, wish, owner=None)
        if turn is not None and turn.found is not None:
            return turn.found
        if unpublished is None:  # on this host, and where it shares its store, others look there
            return self._claimed(wish, None)
        self._tell_end(wish, turn)
        return None

    def _claimed(self, wish: "_Wish[T]", refusal: str | None) -> T | None:
        """Wait where this machine publishes, or claim there."""
        fleet = self._cache.fleet(mirrored=self._order.sender is not None)
        refusal = refusal or _closed(fleet)
        if refusal is not None:
            self._trouble.say(f"{_WHAT} is off: {refusal}")
            return None
        turn = self._waited(fleet.store, wish, owner=Owner(self._order.launch, self._order.host, this_process()))
        self._tell_end(wish, turn)
        self.flight = None if turn is None else turn.flight
        return None if turn is None else turn.found

    def _waited(self, store: Store, wish: "_Wish[T]", *, owner: Owner | None) -> Turn[T] | None:
        """How waiting for the claims on a store ended; None where it failed, or the store is left alone."""
        claims, seconds = self._claims(store, wish), self._left(wish)
        return self._patience.ask(
            _WHAT,
            None,
            lambda: wait_for(
                claims, store, wish.key, owner, wish.look, seconds=seconds, clock=self._clock, tell=self._tell
            ),
            seconds=seconds + self._order.deadline,
            store=store,
        )

    def _claims(self, store: Store, wish: "_Wish[T]") -> Claims:
        kept, service = InStore(store, wish.key), self._cache.service
        if service is None:
            return kept
        from cachemgr.service_claims import ByService, WithService  # HTTP, where there is somebody to ask

        return WithService(kept, ByService(service, wish.key, self._order.launch, self._clock, until=wish.until))

    def _left(self, wish: "_Wish[T]") -> float:
        return max(0.0, wish.until - self._clock.monotonic())

    def _tell_end(self, wish: "_Wish[T]", turn: Turn[T] | None) -> None:
        """A word to people where nothing came of it."""
        if turn is None:
            self._trouble.say(f"{_WHAT} is off for this start")
        elif turn.flight is None and turn.found is None and turn.waited_for:
            waited = self._order.single_flight - self._left(wish)
            self._trouble.say(f"waited {waited:.0f} s for {turn.waited_for}, and starts without what it compiles")


def _closed(fleet: Level) -> str | None:
    """Why nobody should wait for what others publish there now, or None."""
    if fleet.closed is not None:
        return f"{fleet} is not read: {fleet.closed}"
    if fleet.policy == "require":
        return f"{fleet} requires signatures, and what is compiled now has none yet"
    return None
