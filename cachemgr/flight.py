"""Single flight: when many machines start cold at once, one of them compiles and the others wait for what it publishes.

A wait ends with what was looked for, with the right to compile, or with its own budget. It never looks at a clock that
another machine has set: an owner is gone when its claim has not changed for `SILENT_SECONDS` by the clock of whoever
watches, or when its process is on this host and is dead.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from cachemgr import threads
from cachemgr.bounded import within
from cachemgr.clock import Clock
from cachemgr.errors import CacheError, StoreError
from cachemgr.key import Key
from cachemgr.process import runs
from cachemgr.store import Store, layout
from cachemgr.store.claims import Claims, Mark, Owner

T = TypeVar("T")

BEAT_SECONDS = 5.0
SILENT_SECONDS = 20.0
"""How long a claim may stay as it is: a few beats, since a store may be slow or throttle. One that is taken over too
early is compiled twice; one that is taken over late keeps a fleet waiting."""
POLL_SECONDS = 0.5
"""How often one who waits lists the claims, which is one request."""
_CAPTURES_SECONDS = 2.0
"""How often it lists the captures as well, while nothing happens to the claims."""
_SUCCEEDED_SECONDS = 3.0
"""How long one who only waits gives others to succeed an owner that is gone."""
TELL_SECONDS = 10.0
MOST_FLIGHTS = 3
"""For how many owners one waits that bring nothing it can use: their command fails, or what they publish is no good
here, and it will be so with the next one."""
_ANSWER_SECONDS = 10.0
"""How long one question about claims may take."""


class Flight:
    """The claim of this launch, which beats until `land`."""

    def __init__(self, claims: Claims, number: int) -> None:
        self._claims, self._number = claims, number
        self._landed = threading.Event()
        self._now = threading.Event()
        self._thread = threads.start(self._beat, "flight")

    def _beat(self) -> None:
        while not self._landed.is_set():
            self._now.wait(BEAT_SECONDS)
            self._now.clear()
            if self._landed.is_set():
                return
            try:
                if not self._claims.beat(self._number):
                    self._landed.set()  # somebody took over and is done; the number may be another's by now
                    return
            except CacheError:
                continue  # the next beat may get through; none that does is what others wait for

    @property
    def landed(self) -> bool:
        """Whether nobody waits any more."""
        return self._landed.is_set()

    def published(self) -> None:
        """Something of what others wait for is there: beat at once, because they look when a claim changes."""
        self._now.set()

    def land(self) -> None:
        """Let others go: what was compiled is published, or will not be. May be called twice.

        Raises:
            CacheError: the claim could not be removed, and ages.
        """
        if self.landed:
            return
        self._landed.set()
        self._now.set()
        # A beat copies an object onto itself in some stores, which must not bring it back after it was deleted.
        self._thread.join(_ANSWER_SECONDS)
        if self._thread.is_alive():
            raise StoreError(f"{self._claims} does not answer, so that our claim stays there until it is old")
        _asked(self._claims, lambda: self._claims.give_up(self._number))


@dataclass(frozen=True)
class Turn(Generic[T]):
    """How a wait ended: with what was looked for, with a claim of our own, or with neither when it was long enough."""

    found: T | None
    flight: Flight | None
    waited_for: str = ""
    """The host that was waited for last."""


def wait_for(
    claims: Claims,
    store: Store,
    key: Key,
    owner: Owner | None,
    look: Callable[[], T | None],
    *,
    seconds: float,
    clock: Clock,
    tell: Callable[[str], None],
) -> Turn[T]:
    """Wait until somebody has compiled `key`, or it is our turn to.

    Args:
        claims: those on `key`.
        store: where its captures are published.
        owner: this launch; None for one that waits while others compile, and whose own work nobody would get.
        look: what the caller waits for, or None. Asked when something was published or the owner has changed; the
            caller has looked once before.
        seconds: how long to wait. It ends before that when MOST_FLIGHTS owners have come and gone for nothing.
        tell: takes a line for people, as soon as somebody is waited for and every 10 s then.

    Raises:
        CacheError: no claim can be written, or who keeps them does not answer.
        DeadlineError: it took too long over one question.
        CorruptError: it is no store of ours.
    """
    _asked(claims, claims.open)
    watch = _Watch(claims, store, key, clock)
    begun = clock.monotonic()
    told = begun - TELL_SECONDS
    while True:
        changed = watch.look()
        found = look() if changed else None
        if found is None and owner is not None and watch.flights < MOST_FLIGHTS and watch.is_free():
            turn = _succession(claims, owner, watch, look)
            if turn is not None:
                return turn
        now = clock.monotonic()
        over = now - begun >= seconds or watch.flights >= MOST_FLIGHTS or (owner is None and watch.is_over())
        if found is not None or over:
            return Turn(found, None, watch.host)
        if watch.host and now - told >= TELL_SECONDS:
            told = now
            tell(f"waiting for {watch.host} to compile {key[:12]} · {now - begun:.0f} s of {seconds:.0f} s")
        clock.sleep(min(POLL_SECONDS, seconds))


def _succession(claims: Claims, owner: Owner, watch: "_Watch", look: Callable[[], T | None]) -> Turn[T] | None:
    """The claim that nobody has, or what was left by who had it; None where another launch was faster."""
    after = 0 if watch.newest is None else watch.newest.number
    try:
        number = _asked(claims, lambda: claims.take(owner, after=after))
    except CacheError:
        found = look()  # all that is waited for is there, if the owner left it before it went
        if found is None:
            raise
        return Turn(found, None, watch.host)
    if number is None:
        return None
    flight = Flight(claims, number)
    found = look()  # somebody may have landed since the last look
    if found is None:
        return Turn(None, flight, watch.host)
    with suppress(CacheError):  # what was waited for is there, and a claim that stays grows old
        flight.land()
    return Turn(found, None, watch.host)


class _Watch:
    """The newest claim on a key and the captures of it, as one who waits sees them change."""

    def __init__(self, claims: Claims, store: Store, key: Key, clock: Clock) -> None:
        self._claims, self._store, self._key, self._clock = claims, store, key, clock
        self._since = clock.monotonic()
        self._published: frozenset[str] | None = None
        self._listed = clock.monotonic()
        """When the captures were listed."""
        self._owner: Owner | None = None
        self.newest: Mark | None = None
        self.flights = 0
        """Owners that have come and gone."""
        self.host = ""
        """Who has the claim, or had the last one."""

    def look(self) -> bool:
        """Look at both. Whether something was published, or the claim has another owner or none, since last."""
        # The claim is looked at first: who gave it up has published before, so what is listed then is there.
        newest = _asked(self._claims, self._claims.newest)
        published = self._captures_now(changed=newest != self.newest)
        before, first = (self.newest and self.newest.number, self._owner), self._published is None
        if newest != self.newest:
            self._since = self._clock.monotonic()
            # Not only when its number is another: numbers begin again when a claim is given up.
            self._owner = (
                None if newest is None else _asked(self._claims, partial(self._claims.owner_of, newest.number))
            )
            self.host = self._host_now()
        moved = before != (newest and newest.number, self._owner)
        self.flights += moved and self.newest is not None
        changed = not first and (moved or published != self._published)
        self.newest, self._published = newest, published
        return changed

    def _host_now(self) -> str:
        return self.host or "an unknown host" if self._owner is None else self._owner.host

    def _captures_now(self, *, changed: bool) -> frozenset[str]:
        now = self._clock.monotonic()
        if self._published is not None and not changed and now - self._listed < _CAPTURES_SECONDS:
            return self._published
        self._listed = now
        return _asked(self._store, self._captures)

    def _captures(self) -> frozenset[str]:
        return frozenset(entry.name for entry in self._store.scan(layout.artifact_prefix(self._key)))

    def is_free(self) -> bool:
        """Whether nobody has the claim, or its owner is gone."""
        if self.newest is None or self._silent() >= SILENT_SECONDS:
            return True
        return self._owner is not None and runs(self._owner.process) is False

    def is_over(self) -> bool:
        """Whether nobody compiles, and nobody succeeds who did: those who may look as often as we do."""
        if self.newest is None:
            return not self.host or self._silent() >= _SUCCEEDED_SECONDS
        return self._silent() >= SILENT_SECONDS + _SUCCEEDED_SECONDS

    def _silent(self) -> float:
        return self._clock.monotonic() - self._since


def _asked(place: object, question: Callable[[], T]) -> T:
    return within(_ANSWER_SECONDS, f"asking {place} for claims", question)
