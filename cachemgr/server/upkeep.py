"""What a replica does beside answering: read the store into the catalogue, into its index, and count what lies there.

One replica at a time does what needs doing once for all; correctness depends on keys, not on that.
"""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from cachemgr.catalogue import past
from cachemgr.catalogue.ingest import refresh
from cachemgr.catalogue.service import forget_changes, take_turn
from cachemgr.clock import written
from cachemgr.errors import CacheError, DatabaseError, StoreError
from cachemgr.server.backend import Backend, Shelves
from cachemgr.store import layout
from cachemgr.store.captures import Damaged
from cachemgr.store.records import roll_up

_KINDS = {
    "layers": layout.LAYERS,
    "artifacts": layout.ARTIFACTS,
    "launches": layout.LAUNCHES,
    "leases": layout.LEASES,
    "quarantines": layout.QUARANTINE,
    "pins": layout.PINS,
}
AUDIT_SECONDS = 365 * 86400.0
MOST_AUDITED = 100_000
"""How long the database keeps lines about changes, and how many; a line is some 200 bytes."""
_TURNS = 3.0
"""For how many intervals a turn lasts: another replica goes on when its owner has died."""
_ROUNDS_TO_ROLL_UP = 20
"""Launch records are merged every so many rounds: what is merged has to be read again."""


class Upkeep:
    """A thread that looks at the store every `interval` seconds until it is stopped, and does `before` each time."""

    def __init__(
        self,
        backend: Backend,
        *,
        interval: float,
        say: Callable[[str], None],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend, self._interval, self._say, self._before = backend, interval, say, before
        self._rounds = 0
        self._seen = False
        """Whether there was a store: an empty directory in its place is a volume that was lost, and no empty store."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cachemgr-upkeep", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """End; wait so long for a round that is under way."""
        self._stopped.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._before()
            self.once()
            self._stopped.wait(self._interval)

    def once(self) -> None:
        """One round. A store or database that fails is told once, and asked again in the next round."""
        backend, condition = self._backend, self._backend.condition
        damaged: list[Damaged] = []
        try:
            self._read(damaged)
        except CacheError as error:
            if condition.trouble != str(error):
                self._say(f"warning: {error}")
            condition.trouble = str(error)
            return
        except Exception as error:  # noqa: BLE001 - the service goes on, and says that it stands still
            condition.trouble = f"reading {backend.store} failed: {type(error).__name__}: {error}"
            self._say(f"warning: {condition.trouble}")
            return
        condition.trouble, condition.ready = "", True
        condition.damaged = tuple(dict.fromkeys(each.reason for each in damaged))

    def _read(self, damaged: list[Damaged]) -> None:
        backend = self._backend
        found = layout.read_layout(backend.store)
        if found is None and self._seen:
            raise StoreError(f"{backend.store} is not there any more", hint="see whether its volume is mounted")
        self._seen = self._seen or found is not None
        backend.index.refresh(damaged)
        if self._is_our_turn():
            self._rounds += 1
            if self._rounds % _ROUNDS_TO_ROLL_UP == 1:
                forget_changes(backend.catalogue, before=written(backend.now - AUDIT_SECONDS), most=MOST_AUDITED)
            if not backend.read_only and self._rounds % _ROUNDS_TO_ROLL_UP == 0:
                with suppress(StoreError):  # who may not delete leaves it to others
                    roll_up(backend.store)
            source = refresh(backend.catalogue, backend.store, backend.name, damaged)
            past.roll_up(backend.catalogue, source, past.day_before(backend.now, backend.settings.launch_age))
        backend.condition.shelves = _counted(backend)

    def _is_our_turn(self) -> bool:
        backend = self._backend
        try:
            return take_turn(
                backend.catalogue, "upkeep", backend.replica, now=backend.now, seconds=_TURNS * self._interval
            )
        except DatabaseError:
            return not backend.condition.ready


def _counted(backend: Backend) -> Shelves:
    objects, sizes = Counter[str](), Counter[str]()
    for kind, prefix in _KINDS.items():
        for entry in backend.store.scan(prefix):
            objects[kind] += 1
            sizes[kind] += entry.size
    return Shelves({kind: objects[kind] for kind in _KINDS}, {kind: sizes[kind] for kind in _KINDS})
