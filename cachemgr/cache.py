"""The composition root: settings in, an opened cache out. Only here is a concrete store chosen."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cachemgr import places
from cachemgr.digest import Digest, fingerprint
from cachemgr.errors import StoreError
from cachemgr.key import Key, folder
from cachemgr.settings import Settings
from cachemgr.store import Store, layout
from cachemgr.store.captures import quarantined, set_apart
from cachemgr.store.local import LocalStore

REST_SECONDS = 300.0
"""How long a store that did not answer in time is left alone."""


@dataclass(frozen=True)
class Cache:
    """The local store and the places of our own state. Nothing is created by opening it."""

    store: Store
    home: Path
    notes: tuple[str, ...] = ()
    """What had to be done differently than the settings say."""

    def lock(self, key: Key, purpose: str) -> Path:
        """The lock file that launches of `key` on this host use for `purpose`."""
        return self.home / "locks" / f"{folder(key)}.{purpose}.lock"

    def stat_cache(self, key: Key) -> Path:
        """Where the stat cache of the live directories of `key` is kept."""
        return self.home / "stat" / f"{folder(key)}.msgpack"

    def heads(self) -> Path:
        """Where the heads of the store's captures are remembered."""
        return self.home / "heads" / f"{self._store_name()}.msgpack"

    def salt(self, *, writable: bool) -> str:
        """The salt of the local store; a store that does not exist yet gets one if it may be written.

        Raises:
            StoreError, CorruptError: as `cachemgr.store.layout`.
        """
        if writable:
            return layout.ensure_layout(self.store).salt
        found = layout.read_layout(self.store)
        return found.salt if found else ""

    @property
    def apart(self) -> Store:
        """Where quarantines are noted that the store itself cannot take: a read-only one, or one that must not be
        written. Without a note an engine that died of a capture would be given it at every start."""
        return LocalStore(self.home / "apart" / self._store_name())

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

    def rests(self, now: float) -> float:
        """For how many seconds more the store is left alone, because it did not answer a launch in time."""
        try:
            since = (self.home / "rest" / self._store_name()).stat().st_mtime
        except OSError:
            return 0.0
        return max(0.0, min(since, now) + REST_SECONDS - now)

    def let_rest(self, now: float) -> None:
        """Leave the store alone for a while. Failing to remember that costs the next launch its deadline."""
        path = self.home / "rest" / self._store_name()
        with suppress(OSError):
            places.write_private(path, b"")
            os.utime(path, (now, now))

    def _store_name(self) -> str:
        return fingerprint(str(self.store).encode())


def open_cache(settings: Settings, environ: Mapping[str, str]) -> Cache:
    """The cache that these settings describe.

    A home that cannot be written is replaced by a private directory below the temporary one; so is a store in it that
    does not exist yet. One that exists can still be read.
    """
    home, notes = settings.home, []
    if not places.usable(home):
        spare = places.spare(environ)
        if spare is not None:
            notes.append(f"{home} cannot be written, so {spare} is used")
            home = spare / "home"
    moved = home != settings.home and settings.origins["store"] == "default" and not settings.store.is_dir()
    return Cache(LocalStore(home / "store" if moved else settings.store), home, tuple(notes))
