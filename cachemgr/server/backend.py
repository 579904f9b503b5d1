"""What the operations of the service work on: one store, the catalogue of it, and what this replica knows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cachemgr.cache import Cache
from cachemgr.catalogue.opened import Catalogue
from cachemgr.clock import Clock
from cachemgr.server.index import Index
from cachemgr.server.problems import RefusedError
from cachemgr.server.reports import Reports
from cachemgr.settings import Settings
from cachemgr.store import Store


@dataclass(frozen=True)
class Shelves:
    """What lies in the store, counted."""

    objects: Mapping[str, int] = field(default_factory=dict)
    """By kind: layers, manifests, launches, leases, quarantines, claims, pins."""
    bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Condition:
    """How this replica is; `upkeep` writes it."""

    ready: bool = False
    """Whether the store was read once."""
    trouble: str = ""
    """Why it could not be read the last time; empty where it could."""
    shelves: Shelves = field(default_factory=Shelves)
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Backend:
    """Everything that outlives a request."""

    settings: Settings
    cache: Cache
    store: Store
    mirrored: bool
    """Whether the store is the mirror."""
    name: str
    """How the catalogue knows the store."""
    catalogue: Catalogue
    source: int
    """The number of the store in the catalogue."""
    index: Index
    reports: Reports
    condition: Condition
    clock: Clock
    environ: Mapping[str, str]
    host: str
    replica: str
    """A name of this process that no other one has."""
    read_only: bool

    @property
    def now(self) -> float:
        """Seconds since the epoch."""
        return self.clock.now_ns() / 1e9

    def require_writable(self) -> None:
        """Raises RefusedError where nothing may be changed."""
        if self.read_only:
            raise RefusedError(403, "this server changes nothing", hint="cachemgr serve without --read-only")
