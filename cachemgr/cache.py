"""The composition root: settings in, an opened cache out. Only here is a concrete store chosen."""

from dataclasses import dataclass
from pathlib import Path

from cachemgr.digest import fingerprint
from cachemgr.key import Key, folder
from cachemgr.settings import Settings
from cachemgr.store import Store
from cachemgr.store.local import LocalStore


@dataclass(frozen=True)
class Cache:
    """The local store and the places of our own state. Nothing is created by opening it."""

    store: Store
    home: Path

    def lock(self, key: Key, purpose: str) -> Path:
        """The lock file that launches of `key` on this host use for `purpose`."""
        return self.home / "locks" / f"{folder(key)}.{purpose}.lock"

    def stat_cache(self, key: Key) -> Path:
        """Where the stat cache of the live directories of `key` is kept."""
        return self.home / "stat" / f"{folder(key)}.msgpack"

    def heads(self) -> Path:
        """Where the heads of the store's captures are remembered."""
        return self.home / "heads" / f"{fingerprint(str(self.store).encode())}.msgpack"


def open_cache(settings: Settings) -> Cache:
    """The cache that these settings describe."""
    return Cache(LocalStore(settings.store), settings.home)
