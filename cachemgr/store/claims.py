"""Claims: which launch of a fleet compiles a key, without a coordinator and without comparing clocks.

The claims of a key are numbered objects, `claims/<key>/<number>.json`; the newest one counts. A claim is taken by
creating the next number, which a store lets only one do, so that it needs no replacing of objects. Its owner refreshes
it while it lives. Whoever watches takes over by creating the number after one that does not change any more: who is
right about that costs at most a second compile, never a wrong result, because publishing is idempotent.
"""

from typing import Final, Protocol

import msgspec

from cachemgr.errors import CorruptError, NotFoundError
from cachemgr.key import Key
from cachemgr.process import Process
from cachemgr.store import Store, layout

_MOST: Final = 64 << 10
"""Bytes of a claim that are read."""


class Owner(msgspec.Struct, frozen=True):
    """Who compiles: a launch, its host and its process there."""

    launch: str
    host: str
    process: Process


class Mark(msgspec.Struct, frozen=True):
    """The claim that counts, as one who watches sees it: it changes with every beat."""

    number: int
    modified: float
    """In seconds since the epoch of whoever keeps it, so that it is only compared with itself."""


class Claims(Protocol):
    """The claims on one key, wherever they are kept."""

    def open(self) -> None:
        """See that claims can be kept there at all. Raises CacheError; so does everything else here."""

    def newest(self) -> Mark | None:
        """The claim that counts, or None when nobody compiles. One request."""

    def owner_of(self, number: int) -> Owner | None:
        """Who has a claim; None when it is gone or cannot be understood."""

    def take(self, owner: Owner, *, after: int) -> int | None:
        """Take the claim after this one (0: the first); its number, or None when somebody else has it."""

    def beat(self, number: int) -> bool:
        """Show that the owner of a claim lives. Whether the claim is still there."""

    def give_up(self, number: int) -> None:
        """Let others have the key. Claims before this one go first: none of them may count again."""


class InStore:
    """The claims on a key in a store."""

    def __init__(self, store: Store, key: Key) -> None:
        self._store, self._key = store, key

    def __str__(self) -> str:
        return str(self._store)

    def open(self) -> None:
        """See that it is a store of ours, which a new one becomes.

        Raises:
            StoreError: it cannot be read, or is new and cannot be written.
            CorruptError: it is none of ours.
        """
        layout.ensure_layout(self._store)

    def newest(self) -> Mark | None:
        """The claim that counts. One listing."""
        listed = self._store.scan(layout.claim_prefix(self._key))
        numbered = ((layout.claim_number(entry.name), entry.modified) for entry in listed)
        marks = (Mark(number, modified) for number, modified in numbered if number is not None)
        return max(marks, key=lambda mark: mark.number, default=None)

    def owner_of(self, number: int) -> Owner | None:
        """Who has this claim; None when it is gone or cannot be understood."""
        return owner_of(self._store, self._name(number))

    def take(self, owner: Owner, *, after: int) -> int | None:
        """Take the claim after this one; its number, or None when somebody else has it."""
        number = after + 1
        self._store.put(self._name(number), msgspec.json.encode(owner, order="sorted"))
        # Read back whatever `put` said: a request that was sent twice finds its own object in the way, and a server
        # without conditional writes lets the last one win.
        return number if self.owner_of(number) == owner else None

    def beat(self, number: int) -> bool:
        """Refresh this claim. Whether it is still there."""
        return self._store.refresh(self._name(number))

    def give_up(self, number: int) -> None:
        """Delete this claim, and those before it first: none of them may count again."""
        name = self._name(number)
        older = (entry.name for entry in self._store.scan(layout.claim_prefix(self._key)) if entry.name < name)
        for each in sorted(older):
            self._store.delete(each)
        self._store.delete(name)

    def _name(self, number: int) -> str:
        return layout.claim_name(self._key, number)


def owner_of(store: Store, name: str) -> Owner | None:
    """Who has the claim of this object name; None when it is gone or cannot be understood."""
    try:
        return msgspec.json.decode(store.read(name, limit=_MOST), type=Owner)
    except (NotFoundError, CorruptError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
