"""What waits for a signature in a store: the objects below `incoming/`, as a store of their own.

Serving pods hold no signing key and need permission to write here only. Nothing that launches read looks in here;
`cachemgr sign` moves captures out of it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from cachemgr.store import Entry, Source, Store, layout


class Incoming:
    """The waiting part of `store`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __str__(self) -> str:
        return f"{self._store}/{layout.INCOMING.removesuffix('/')}"

    def read(self, name: str, *, limit: int) -> bytes:
        return self._store.read(layout.INCOMING + name, limit=limit)

    def has(self, name: str) -> bool:
        return self._store.has(layout.INCOMING + name)

    def open(self, name: str) -> BinaryIO:
        return self._store.open(layout.INCOMING + name)

    def slice(self, name: str, start: int, size: int) -> bytes:
        return self._store.slice(layout.INCOMING + name, start, size)

    def put(self, name: str, data: bytes) -> bool:
        return self._store.put(layout.INCOMING + name, data)

    def put_file(self, name: str, path: Path) -> bool:
        return self._store.put_file(layout.INCOMING + name, path)

    def put_stream(self, name: str, source: Source) -> bool:
        return self._store.put_stream(layout.INCOMING + name, source)

    def refresh(self, name: str) -> bool:
        return self._store.refresh(layout.INCOMING + name)

    def delete(self, name: str) -> bool:
        return self._store.delete(layout.INCOMING + name)

    def scan(self, prefix: str) -> Iterator[Entry]:
        for entry in self._store.scan(layout.INCOMING + prefix):
            yield msgspec.structs.replace(entry, name=entry.name.removeprefix(layout.INCOMING))

    def scratch(self) -> Path:
        return self._store.scratch()
