"""Leases: which artifacts launches use now, `leases/<key>/<launch>.json` in the local store.

A lease only keeps a prune away. It says which process holds it, with boot and container, so that neither a later
process of the same number nor another container's is taken for it; whoever cannot look at that process goes by the
heartbeat, which is the modification time of the lease. Leases of the dead are debris.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from cachemgr import process
from cachemgr.errors import CacheError, CorruptError, DeniedError, NotFoundError
from cachemgr.key import Key, from_folder
from cachemgr.process import Process, this_process
from cachemgr.store import Entry, Store, layout

BEAT_SECONDS = 60.0
STALE_SECONDS = 1800.0
"""How long a lease counts after its last beat whose holder cannot be looked at: many beats, and more than the clocks of
two hosts on one file server differ."""
_MOST = 64 << 10


class Holder(msgspec.Struct, frozen=True):
    """Who uses an artifact: a launch, its host and its process there. `process.namespace` tells its container."""

    launch: str
    host: str
    process: Process


class Held(msgspec.Struct, frozen=True):
    """A lease as it lies in a store."""

    name: str
    key: Key
    holder: Holder | None
    """None when it cannot be read."""
    lives: bool
    size: int

    def __str__(self) -> str:
        """Who that is, for people."""
        if self.holder is None:
            return "a lease that cannot be read"
        return f"launch {self.holder.launch} on {self.holder.host} (process {self.holder.process.pid})"


class Lease:
    """The leases of one launch, from `take` until `end`. Beat them at least every BEAT_SECONDS."""

    def __init__(self, store: Store, names: tuple[str, ...], data: bytes) -> None:
        self._store, self._names, self._data = store, names, data
        self._beaten = time.monotonic()

    @classmethod
    def take(cls, store: Store, keys: set[Key], launch: str, host: str) -> "Lease":
        """Say that a launch uses these artifacts. Raises StoreError."""
        data = msgspec.json.encode(Holder(launch, host, this_process()), order="sorted")
        names = tuple(layout.lease_name(key, launch) for key in sorted(keys))
        for name in names:
            store.put(name, data)
        return cls(store, names, data)

    def beat(self) -> None:
        """Show that we are alive, when it is time to. Whoever slept for long (a suspended host, a stopped container)
        may have been taken for dead, and takes the lease again."""
        now = time.monotonic()
        if now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            for name in self._names:
                with suppress(CacheError):
                    if not self._store.refresh(name):
                        self._store.put(name, self._data)

    def end(self) -> None:
        """We do not use the artifacts any more."""
        for name in self._names:
            with suppress(CacheError):
                self._store.delete(name)


def leases(store: Store, *, now: float) -> Iterator[Held]:
    """Every lease of a store; `now` is in seconds since the epoch."""
    for entry in store.scan(layout.LEASES):
        key = from_folder(entry.name.split("/")[1])
        if key is not None:
            holder = _holder(store, entry.name)
            yield Held(entry.name, key, holder, _lives(entry, holder, now), entry.size)


def in_use(store: Store, *, now: float) -> dict[Key, list[Held]]:
    """The artifacts that somebody uses, and who."""
    found: dict[Key, list[Held]] = defaultdict(list)
    for held in leases(store, now=now):
        if held.lives:
            found[held.key].append(held)
    return found


def _holder(store: Store, name: str) -> Holder | None:
    try:
        return msgspec.json.decode(store.read(name, limit=_MOST), type=Holder)
    except (NotFoundError, CorruptError, DeniedError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _lives(entry: Entry, holder: Holder | None, now: float) -> bool:
    runs = None if holder is None else process.runs(holder.process)
    return now - entry.modified < STALE_SECONDS if runs is None else runs
