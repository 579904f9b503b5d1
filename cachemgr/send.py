"""The sending journey: what waits in the outbox goes to the mirror."""

import random
from collections.abc import Callable, Collection, Sequence

import msgspec

from cachemgr.clock import Clock
from cachemgr.digest import Digest
from cachemgr.errors import CacheError, CorruptError, DeniedError, NotFoundError, StoreError
from cachemgr.key import Key
from cachemgr.outbox import Outbox, Trouble
from cachemgr.store import Store, layout, records
from cachemgr.store.captures import listing
from cachemgr.store.incoming import Incoming
from cachemgr.store.transfer import Plan, Transfer
from cachemgr.trust import Trust

_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0
_PASSING = frozenset(
    {"throttled", "unreachable", "unresolved", "stalled", "truncated", "server error", "conflict", "deadline"}
)
"""What is likely to be over in a while. Whatever else a mirror answers it will answer this process again, while another
may have other credentials."""
_HOPELESS = (CorruptError, NotFoundError)
"""What no later attempt mends: the capture cannot be read here any more."""


class Way(msgspec.Struct, frozen=True):
    """Where some captures go."""

    target: Store
    only: frozenset[Digest] | None
    """Which; None for all."""
    hints: bool
    """Whether look-ups find them there by hints."""


Ways = Callable[[Collection[Key]], Sequence[Way]]
"""Where the captures of these artifacts go."""


def straight(mirror: Store) -> Ways:
    """All to the mirror."""
    return lambda _keys: (Way(mirror, None, hints=True),)


def by_signature(local: Store, mirror: Store, trust: Trust) -> Ways:
    """To the mirror what a trusted key has signed; what nobody answers for waits there for somebody who does."""

    def ways(keys: Collection[Key]) -> Sequence[Way]:
        signed, waiting = set[Digest](), set[Digest]()
        for name, (key, beside) in listing(local).items():
            capture = layout.capture_of(name)
            if capture is not None and key in keys:
                (signed if trust.is_signed(local, key, capture, beside) else waiting).add(capture)
        found = (
            Way(mirror, frozenset(signed), hints=True),
            Way(Incoming(mirror), frozenset(waiting), hints=False),
        )
        return [way for way in found if way.only]

    return ways


class Sent(msgspec.Struct, frozen=True):
    """What a sending did."""

    captures: int
    objects: int
    bytes: int
    dropped: tuple[str, ...]
    """Why some captures will never be sent."""
    records: int = 0
    """Launch records."""


def send(
    outbox: Outbox,
    local: Store,
    mirror: Store,
    *,
    clock: Clock,
    patience: float,
    ways: Ways | None = None,
    chance: Callable[[], float] = random.random,
) -> Sent:
    """Send what waits, until nothing does. A mirror that fails for a while is asked again for `patience` seconds, with
    pauses that grow and differ from host to host.

    Raises:
        CacheError: what the mirror answered in the end; it is noted in the outbox, and what was not sent waits there.
    """
    begun, pause, total = clock.monotonic(), _FIRST_PAUSE, Sent(0, 0, 0, ())
    while True:
        try:
            total = _sent(outbox, local, ways or straight(mirror), total, clock)
            total = msgspec.structs.replace(total, records=total.records + _records_sent(outbox, mirror))
        except CacheError as error:
            outbox.fail(Trouble(error.word, str(error), clock.text()))
            if error.word not in _PASSING or clock.monotonic() - begun + pause > patience:
                raise
            clock.sleep(pause * (0.5 + chance()))
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            outbox.recover()
            return total


def _records_sent(outbox: Outbox, mirror: Store) -> int:
    """A machine that may write captures and no records keeps them, and is none the worse for it."""
    try:
        return records.send(mirror, outbox.records)
    except DeniedError:
        return 0


def send_one(local: Store, mirror: Store, key: Key, capture: Digest, *, now: float) -> int:
    """Send one capture; the bytes that moved.

    Raises:
        CacheError: it is not sent.
    """
    transfer = Transfer(local, mirror, hints=True)
    plan = transfer.plan([key], now=now, only=frozenset((capture,)))
    moved = transfer.carry(plan)
    for unread in plan.damaged:
        raise CorruptError(unread.reason)
    for failure in moved.failures:
        raise failure.error
    return moved.bytes


def _sent(outbox: Outbox, local: Store, ways: Ways, total: Sent, clock: Clock) -> Sent:
    """Send until nothing waits; what is added meanwhile is sent as well."""
    while waiting := outbox.waiting():
        only = frozenset[Digest]().union(*waiting.values())
        failed: dict[Digest, CacheError] = {}
        for way in ways(waiting):
            transfer = Transfer(local, way.target, hints=way.hints)
            chosen = only if way.only is None else only & way.only
            plan = transfer.plan(waiting, now=clock.now_ns() / 1e9, only=chosen)
            moved = transfer.carry(plan)
            failed |= _unread(plan) | {failure.capture: failure.error for failure in moved.failures}
            total = msgspec.structs.replace(
                total,
                captures=total.captures + len(moved.captures),
                objects=total.objects + moved.objects,
                bytes=total.bytes + moved.bytes,
            )
        for key, captures in waiting.items():
            for capture in captures:
                if isinstance(failed.get(capture), (type(None), *_HOPELESS)):
                    outbox.sent(key, capture)
        dropped = [str(error) for error in failed.values() if isinstance(error, _HOPELESS)]
        total = msgspec.structs.replace(total, dropped=(*total.dropped, *dropped))
        for error in failed.values():
            if not isinstance(error, _HOPELESS):
                raise error
    return total


def _unread(plan: Plan) -> dict[Digest, CacheError]:
    """Captures that could not be read: a damaged one will never be sent, another one perhaps another time."""
    found: dict[Digest, CacheError] = {}
    for each in plan.damaged:
        capture = layout.capture_of(each.name)
        if capture is not None:
            found[capture] = (StoreError if each.kind == "unreadable" else CorruptError)(each.reason)
    return found
