"""The composition root: settings in, an opened cache out. Only here is a concrete store chosen."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cachemgr import places
from cachemgr.capture import Launch, Where
from cachemgr.digest import Digest, fingerprint
from cachemgr.errors import StoreError
from cachemgr.key import Key, folder
from cachemgr.level import Level
from cachemgr.machine import Machine
from cachemgr.oci.unpacked import Seed
from cachemgr.outbox import Outbox
from cachemgr.settings import Settings
from cachemgr.store import Remote, Store, records
from cachemgr.store.captures import Judge, quarantined, set_apart
from cachemgr.store.local import LocalStore
from cachemgr.store.outlines import Outlines
from cachemgr.trust import Trust, open_trust, policies_of
from cachemgr.verified import insisting

if TYPE_CHECKING:
    from cachemgr.service import Service

REST_SECONDS = 300.0
"""How long a store that did not answer in time is left alone."""
_SERVICE_SECONDS = 4.0
"""How long a service may be silent that a start waits for."""


@dataclass(frozen=True)
class Cache:
    """The local store, those behind it, and the places of our own state. Nothing is created by opening it."""

    store: Store
    home: Path
    mirror: Remote | None = None
    notes: tuple[str, ...] = ()
    """What had to be done differently than the settings say."""
    seeds: tuple[Store, ...] = ()
    """Stores that only give, in the order in which they are asked."""
    trust: Trust = field(default_factory=lambda: Trust(policies_of((), private=True)))
    places: tuple[Path, ...] = ()
    """Directories of ours that take disk space of this host."""
    verified_only: bool = False
    """Whether only captures are used that have a record of `cachemgr.verified`."""
    service: "Service | None" = None
    """Who keeps claims for machines that may not; None where there is no service, or nothing may be told to it."""
    exposed: str = ""
    """Why the local store is not believed as it would be by default; empty where it is."""

    @property
    def levels(self) -> tuple[Level, ...]:
        """What a look-up reads, in order."""
        seeds = (self.level_of("seed", seed) for seed in self.seeds)
        return (self.local, *seeds, *(() if self.mirror is None else (self.level_of("mirror", self.mirror),)))

    def until(self, deadline: float) -> "Cache":
        """The same cache for a caller who has time until `deadline`, by the monotonic clock."""
        return self if self.mirror is None else replace(self, mirror=self.mirror.until(deadline))

    @property
    def local(self) -> Level:
        """The level of the local store."""
        return self.level_of("local", self.store)

    def level_of(self, where: Where, store: Store) -> Level:
        """How a store is read as a level of this kind."""
        policy = self.trust.policies[where]
        judge = self.judge_of(where)
        return Level(
            where,
            store,
            policy,
            heads=self._heads(store),
            judge=insisting(judge) if self.verified_only else judge,
            because=self.exposed if where == "local" else "",
            closed=self.trust.closed(where, policy),
        )

    def judge_of(self, where: Where) -> Judge:
        """Who decides whose captures of such a level are believed, verified or not."""
        return partial(self.trust.standing, self.trust.policies[where], origins=where != "mirror")

    @property
    def outbox(self) -> Outbox | None:
        """What waits to be sent to the mirror, if there is one."""
        if self.mirror is None:
            return None
        return Outbox(self.home / "outbox" / fingerprint(f"{self.store}\0{self.mirror}".encode()))

    def fleet(self, *, mirrored: bool) -> Level:
        """What the machines of a fleet have in common, and where they agree on who compiles: the mirror where a launch
        publishes to it."""
        return self.local if self.mirror is None or not mirrored else self.level_of("mirror", self.mirror)

    def lock(self, key: Key, purpose: str) -> Path:
        """The lock file that launches of `key` on this host use for `purpose`."""
        return self.home / "locks" / f"{folder(key)}.{purpose}.lock"

    def entry_lock(self, entry: str) -> Path:
        """The lock file of launches on this host that an engine asks for the entry of this name."""
        return self.home / "locks" / f"{entry}.fetch.lock"

    def stat_cache(self, key: Key) -> Path:
        """Where the stat cache of the live directories of `key` is kept."""
        return self.home / "stat" / f"{folder(key)}.msgpack"

    def outlines(self, store: Store) -> Outlines:
        """What is remembered of the captures of a store for those who remove some."""
        return Outlines(self.home / "outlines" / f"{_name(store)}.msgpack")

    def looked(self, store: Store) -> Path:
        """Where a prune by itself remembers what it need not look at once more (`cachemgr.prune.superseded`)."""
        return self.home / "looked" / f"{_name(store)}.msgpack"

    def _heads(self, store: Store) -> Path:
        return self.home / "heads" / f"{_name(store)}.msgpack"

    @property
    def writable(self) -> bool:
        """Whether the store can be written, or made, as far as its directory says."""
        return places.usable(str(self.store))

    @property
    def apart(self) -> Store:
        """Where quarantines are noted that the store itself cannot take: a read-only one, or one that must not be
        written. Without a note an engine that died of a capture would be given it at every start."""
        return LocalStore(self.home / "apart" / _name(self.store))

    def avoided(self, host: str) -> frozenset[Digest]:
        """The captures that `host` does not use."""
        return quarantined(self.store, host) | quarantined(self.apart, host)

    def avoid(
        self,
        reasons: Mapping[Digest, str],
        layers: Iterable[Digest] = (),
        *,
        host: str,
        since: str,
        writable: bool,
    ) -> None:
        """Quarantine these captures on `host`, each with its reason: in the store if it may and can be written.

        Raises:
            StoreError: the note could be written nowhere.
        """
        if writable:
            with suppress(StoreError):
                set_apart(self.store, reasons, layers, host=host, since=since)
                return
        set_apart(self.apart, reasons, (), host=host, since=since)

    def record(self, launch: Launch) -> None:
        """Keep the record of a launch.

        Raises:
            StoreError, CorruptError: as `cachemgr.store.records.record`.
        """
        records.record(self.store, launch)

    def rests(self, store: Store, now: float) -> float:
        """For how many seconds more a store is left alone, because it did not answer a launch in time."""
        try:
            since = (self.home / "rest" / _name(store)).stat().st_mtime
        except OSError:
            return 0.0
        return max(0.0, min(since, now) + REST_SECONDS - now)

    def let_rest(self, store: Store, now: float) -> None:
        """Leave a store alone for a while. Failing to remember that costs the next launch its deadline."""
        path = self.home / "rest" / _name(store)
        with suppress(OSError):
            places.write_private(path, b"")
            os.utime(path, (now, now))


def _name(store: Store) -> str:
    return fingerprint(str(store).encode())


def _is_ours(store: Path) -> bool:
    """Whether a store is there, and only this user or root can have made it."""
    return os.path.isdir(store) and places.exposure(store, way=False) is None


def open_cache(settings: Settings, environ: Mapping[str, str], now: Callable[[], float] = time.time) -> Cache:
    """The cache that these settings describe. `now` tells the seconds since the epoch, by which signatures are judged.

    A home that cannot be written, or that others can write as well, is replaced by a private directory in it or below
    the temporary one; so is a store in it that does not exist yet or that somebody else may have made. One that exists
    can still be read.
    """
    home, notes = settings.home, []
    taken = places.exposure(home, way=False)
    private = places.private_in(home) if taken else None
    if private is not None:
        notes.append(f"{taken}, so {private} is used")
        home = private
    elif taken or not places.usable(home):
        spare = places.spare(environ)
        if spare is not None:
            notes.append(f"{taken or f'{home} cannot be written'}, so {spare} is used")
            home = spare / "home"
        elif taken:
            notes.append(f"{taken}, and no private directory can be had instead: set CACHEMGR_HOME to one of your own")
    moved = home != settings.home and settings.origins["store"] == "default" and not _is_ours(settings.store)
    place = home / "store" if moved else settings.store
    exposed = places.exposure(place, way=False)
    policies = policies_of(settings.trust, private=exposed is None)
    because = ""
    if policies != policies_of(settings.trust, private=True):
        because = f"{exposed}, so its captures need a signature, or set CACHEMGR_TRUST=local=off"
    trust = open_trust(
        settings.trusted_keys,
        settings.revoked,
        policies,
        machine=Machine(home / "machine.key"),
        max_age=settings.max_age,
        now=now,
    )
    seeds = tuple(map(Seed, settings.seed))
    mirror = _mirror(settings, home)
    notes += trust.faults
    verified = settings.require_verified
    service = _service(settings)
    return Cache(LocalStore(place), home, mirror, tuple(notes), seeds, trust, (home, place), verified, service, because)


def _service(settings: Settings) -> "Service | None":
    """The service that this machine may tell something. Nothing is asked of it."""
    if settings.server is None or settings.server_token is None or settings.read_only or settings.offline:
        return None
    from cachemgr.service import Service  # HTTP is loaded where there is somebody to ask

    return Service(settings.server, settings.server_token, seconds=_SERVICE_SECONDS)


def _mirror(settings: Settings, home: Path) -> Remote | None:
    """The mirror, unless there is none or it must be left alone. Nothing is asked of it.

    Raises:
        UsageError: its settings cannot be meant.
    """
    if settings.mirror is None or settings.offline:
        return None
    from cachemgr.store.s3 import Bucket, S3Store
    from cachemgr.store.s3.bucket import check_endpoint, parse

    name, prefix = parse(settings.mirror)
    endpoint = settings.mirror_endpoint
    bucket = Bucket(
        name,
        prefix,
        endpoint=None if endpoint is None else check_endpoint(endpoint),
        region=settings.mirror_region,
        profile=settings.mirror_profile,
        path_style=settings.mirror_path_style,
        # A key means encryption with a key.
        sse=settings.mirror_sse or (None if settings.mirror_kms_key is None else "aws:kms"),
        kms_key=settings.mirror_kms_key,
        requester_pays=settings.mirror_requester_pays,
        anonymous=settings.mirror_anonymous,
    )
    return S3Store(bucket, home / "mirror" / "tmp")
