"""Verified: a start of exactly these captures was watched, it added nothing, and no compiler ran.

The record lies beside each manifest that the start used, as an object of its own. It is a record and no signature:
whoever can write the store can write one. It guards against mistakes, such as an image that was built and never tried,
and not against people; those are the affair of `cachemgr.trust`, which is asked as well and first.
"""

from collections.abc import Collection, Iterable

import msgspec

from cachemgr.digest import Digest
from cachemgr.errors import CacheError, UntrustedError
from cachemgr.key import Key
from cachemgr.store import Store, layout
from cachemgr.store.captures import Judge, Standing

SCHEMA = 1
_LIMIT = 64 << 10


class Verified(msgspec.Struct, frozen=True):
    """What was seen of one start."""

    schema: int
    key: Key
    captures: tuple[Digest, ...]
    """What the start was given; another capture of the key may have been made since."""
    device: str
    """The name of the GPU, or `cpu`."""
    host: str
    at: str
    """RFC 3339, UTC."""
    engine: str
    engine_version: str | None
    added: int
    """Files that the start added; always 0, or there would be no record."""
    compilers: int
    """How often it ran a compiler that is found by PATH; always 0."""
    network: str
    """How it was kept from the network."""
    cachemgr: str

    def __str__(self) -> str:
        return f"verified on {self.device}, {self.added} added, {self.at}"


def note(store: Store, record: Verified) -> None:
    """Keep a record beside each of its captures.

    Raises:
        StoreError: it cannot be written.
    """
    data = msgspec.json.encode(record, order="sorted")
    for capture in record.captures:
        store.put(layout.verified_name(record.key, capture, record.at), data)


def records_of(store: Store, key: Key, capture: Digest, beside: Iterable[str]) -> list[Verified]:
    """The records of a capture, the newest last; what is none is passed over."""
    found = []
    for name in sorted(beside):
        if layout.is_verified(name) and layout.beside(name) == capture:
            record = _read(store, name)
            if record is not None and record.key == key and capture in record.captures:
                found.append(record)
    return found


def _read(store: Store, name: str) -> Verified | None:
    try:
        record = msgspec.json.decode(store.read(name, limit=_LIMIT), type=Verified)
    except (CacheError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return record if (record.schema, record.added, record.compilers) == (SCHEMA, 0, 0) else None


def insisting(judge: Judge) -> Judge:
    """A judge who, beyond what `judge` asks, lets through only what has a record."""

    def judged(store: Store, key: Key, capture: Digest, beside: Collection[str], /) -> Standing:
        standing = judge(store, key, capture, beside)
        if not records_of(store, key, capture, beside):
            raise UntrustedError(f"capture {capture[:19]} was never verified, and `require_verified` is set")
        return standing

    return judged
