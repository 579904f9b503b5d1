"""Pins: artifacts that no prune removes, `pins/<key>.<time>.json` in the store, so that all machines that prune it see
them.

Objects never change, so a new pin of an artifact is another object, for the time in its name; the newest counts, and
those before it go once it is there. Whoever is killed in between leaves the artifact pinned. A newest one that cannot
be read gives way to the one before it.

A pin ends by time (`until`), by successors (`keep_last`: as long as the artifact is among so many newest ones of its
model and device), or never; one that names both ends when both have come. One that cannot be read holds: whoever wrote
it meant something. `rm` refuses what is pinned, too.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping

import msgspec

from cachemgr.clock import epoch, written
from cachemgr.errors import CorruptError, DeniedError, InUseError, NotFoundError
from cachemgr.key import Key
from cachemgr.store import Remote, Store, layout
from cachemgr.store.captures import listing

_MOST = 64 << 10
"""Bytes of a pin that are read."""
_ATTEMPTS = 5
"""Times that pins are listed, where those that were listed are gone when they are read."""


class Pin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why an artifact is kept, and for how long. Times are RFC 3339, UTC."""

    by: str
    """Who pinned it, for people."""
    since: str
    reason: str = ""
    until: str | None = None
    keep_last: int | None = None

    def holds(self, *, now: float, rank: int | None) -> bool:
        """Whether it keeps its artifact still, at `now` (seconds since the epoch). `rank` is how many artifacts of the
        same model and device are newer; None where nobody knows."""
        if self.until is None and self.keep_last is None:
            return True
        lasts = self.until is not None and now < _end(self.until)
        return lasts or (self.keep_last is not None and (rank is None or rank < self.keep_last))

    def __str__(self) -> str:
        """For people, in a sentence."""
        said = f"pinned by {self.by}"
        if self.until is not None:
            said += f" until {self.until}"
        if self.keep_last is not None:
            said += f" while among the last {self.keep_last}"
        return f"{said}: {self.reason}" if self.reason else said


UNREADABLE = Pin(by="somebody", since="?", reason="the pin cannot be read")


def _end(text: str) -> float:
    """A time that cannot be read never comes."""
    try:
        return epoch(text)
    except ValueError:
        return float("inf")


class Placed(msgspec.Struct, frozen=True):
    """The pin of an artifact that counts, and the objects of all its pins."""

    pin: Pin
    names: tuple[str, ...]
    """The oldest first: so they go, for none of them may count again."""
    counts: str
    """The one of them that counts; empty where none can be read."""

    @property
    def before(self) -> tuple[str, ...]:
        """Those before it, which whoever wrote it did not live to remove."""
        return tuple(name for name in self.names if name < self.counts)


def placed(store: Store, among: Collection[Key] | None = None) -> Mapping[Key, Placed]:
    """The pins that count, by key: of all artifacts, or those `among` these. A listing, and a read for each."""
    found: dict[Key, Placed | None] = {}
    for _attempt in range(_ATTEMPTS):
        listed = _listed(store, among)
        found = {key: _newest(store, names) for key, names in listed.items()}
        if None not in found.values():
            break  # else newer ones took their places after we listed them, or they were lifted
    return {key: each for key, each in found.items() if each is not None}


def _listed(store: Store, among: Collection[Key] | None) -> Mapping[Key, tuple[str, ...]]:
    by_key: dict[Key, list[str]] = defaultdict(list)
    for entry in store.scan(layout.PINS):
        key = layout.pinned(entry.name)
        if key is not None and (among is None or key in among):
            by_key[key].append(entry.name)
    return {key: tuple(sorted(names)) for key, names in by_key.items()}


def _newest(store: Store, names: tuple[str, ...]) -> Placed | None:
    """By the newest one that can be read. None where all of them are gone."""
    unreadable = False
    for name in reversed(names):
        try:
            return Placed(msgspec.json.decode(store.read(name, limit=_MOST), type=Pin), names, name)
        except NotFoundError:
            continue
        except (CorruptError, DeniedError, msgspec.MsgspecError, UnicodeDecodeError):
            unreadable = True
    return Placed(UNREADABLE, names, "") if unreadable else None


def pins(store: Store) -> Mapping[Key, Pin]:
    """Every pin that counts, by key."""
    return {key: each.pin for key, each in placed(store).items()}


def pin_of(store: Store, key: Key) -> Pin | None:
    """The pin of an artifact, or None."""
    found = placed(store, {key}).get(key)
    return None if found is None else found.pin


def held(store: Store, among: Collection[Key], *, now: float) -> Mapping[Key, Pin]:
    """The pins of these artifacts that may hold still. `now` in seconds since the epoch."""
    return {key: each.pin for key, each in placed(store, among).items() if each.pin.holds(now=now, rank=None)}


def require_unpinned(store: Store, wanted: Collection[Key], *, now: float) -> None:
    """Refuse to take away what somebody keeps. `now` in seconds since the epoch.

    Raises:
        InUseError: one of these artifacts has a pin that may hold still.
    """
    for key, pin in held(store, wanted, now=now).items():
        where = " --mirror" if isinstance(store, Remote) else ""
        raise InUseError(f"{key} is {pin}", hint=f"cachemgr unpin{where} {key}")


def put(store: Store, key: Key, pin: Pin) -> None:
    """Pin an artifact, instead of how it was pinned before, which goes when the new pin is there.

    Raises:
        StoreError: the pin could not be written; it is pinned as before. Or an older one could not be removed; the new
            one counts.
        ValueError: `pin.since` is no RFC 3339 time.
    """
    layout.ensure_layout(store)
    data, at = msgspec.json.encode(pin, order="sorted"), epoch(pin.since)
    before = _listed(store, {key}).get(key, ())
    if before:  # clocks of machines differ, and this one counts
        at = max(at, epoch(layout.pin_time(before[-1])) + 1)
    while not store.put(name := layout.pin_name(key, written(at)), data):
        if _newest(store, (name,)) == Placed(pin, (name,), name):
            break  # a request that was sent twice
        at += 1
    for older in before:
        store.delete(older)


def keep(store: Store, key: Key, pin: Pin) -> None:
    """Pin an artifact that is there. Whoever removes it looks at pins when its manifests are out of sight, so one that
    is there now is seen by him, or he has begun too early.

    Raises:
        NotFoundError: somebody is removing it. It is not pinned.
        StoreError, ValueError: as `put`.
    """
    put(store, key, pin)
    if not listing(store, layout.artifact_prefix(key)):
        lift(store, key)
        raise NotFoundError(f"no artifact {key} in {store} any more: somebody removed it", hint="cachemgr ls")


def lift(store: Store, key: Key) -> bool:
    """Let an artifact go when its time has come. Whether it was pinned."""
    there = [store.delete(name) for name in _listed(store, {key}).get(key, ())]
    return any(there)
