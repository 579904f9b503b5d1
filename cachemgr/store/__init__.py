"""Stores: where captures live. A narrow interface over named, immutable objects, the same for a directory and a bucket.

`Store` is what every implementation offers and what `tests/store_contract.py` holds it to. What the objects *mean*
(layers, manifests, hints, records; their order of writes) is `cachemgr.store.captures`, written once above it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

import msgspec


class Entry(msgspec.Struct, frozen=True):
    """One object in a listing: size in bytes, modification time in seconds since the epoch."""

    name: str
    size: int
    modified: float


class Source(Protocol):
    """Bytes that are read once, from the first to the last."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""


class Store(Protocol):
    """Named objects. Names are relative paths with `/`; objects appear whole or not at all.

    Every method raises StoreError when the store itself fails (permissions, a full disk, a network), and never reports
    such a failure as an absent object; DeniedError when it is this one object that may not be read.
    """

    def read(self, name: str, *, limit: int) -> bytes:
        """The bytes of an object. Raises NotFoundError, or CorruptError when it has more than `limit` bytes."""

    def has(self, name: str) -> bool:
        """Whether an object is there."""

    def open(self, name: str) -> BinaryIO:
        """A reader of an object; the caller closes it. Raises NotFoundError."""

    def slice(self, name: str, start: int, size: int) -> bytes:
        """At most `size` bytes from `start` on; fewer only where the object ends. Raises NotFoundError."""

    def put(self, name: str, data: bytes) -> bool:
        """Create an object, durable when this returns; an existing one is left alone. Whether it was created."""

    def put_file(self, name: str, path: Path) -> bool:
        """Like `put`, taking the bytes of the file `path`, which may be moved and must not be used afterwards."""

    def put_stream(self, name: str, source: Source) -> bool:
        """Like `put`, taking bytes from `source` until it has no more. What reading it raises is passed on as it is,
        and nothing is visible then: so a source that checks its bytes decides whether there is an object."""

    def refresh(self, name: str) -> bool:
        """Make an object look new to a prune's grace time. Whether the object exists."""

    def delete(self, name: str) -> bool:
        """Remove an object. Whether it existed."""

    def scan(self, prefix: str) -> Iterator[Entry]:
        """All objects below the directory `prefix` (with its trailing `/`), in no order; vanishing ones are skipped."""

    def scratch(self) -> Path:
        """A directory on this host for files that `put_file` will take; created when needed."""

    def __str__(self) -> str:
        """How a person names this store: a path or a URL."""


@runtime_checkable
class Remote(Store, Protocol):
    """A store behind a network, every request of which may take long."""

    def until(self, deadline: float) -> "Remote":
        """The same store for a caller who has time until `deadline` (`time.monotonic()`). Everything may raise
        DeadlineError then."""

    def conditional(self) -> bool:
        """Whether the first writer of a name wins, as far as is known; the first small `put` finds it out. Where it
        does not, the last one wins, which is safe for objects that are named by their bytes."""
