"""A store that only gives."""

from pathlib import Path
from typing import BinaryIO

from cachemgr.errors import CorruptError, StoreError
from cachemgr.store import Source


class ReadOnly:
    """What stores have in common that nobody can write: `open` says what is there."""

    def open(self, name: str) -> BinaryIO:
        raise NotImplementedError

    def read(self, name: str, *, limit: int) -> bytes:
        with self.open(name) as stream:
            data = stream.read(limit + 1)
        if len(data) > limit:
            raise CorruptError(f"`{name}` in {self} has more than {limit} bytes")
        return data

    def slice(self, name: str, start: int, size: int) -> bytes:
        with self.open(name) as stream:
            while start:
                skipped = len(stream.read(min(start, 1 << 20)))
                start = start - skipped if skipped else 0
            return stream.read(size)

    def put(self, name: str, data: bytes) -> bool:  # noqa: ARG002 - of the interface
        raise self._refusal(name)

    def put_file(self, name: str, path: Path) -> bool:  # noqa: ARG002 - of the interface
        raise self._refusal(name)

    def put_stream(self, name: str, source: Source) -> bool:  # noqa: ARG002 - of the interface
        raise self._refusal(name)

    def refresh(self, name: str) -> bool:
        raise self._refusal(name)

    def delete(self, name: str) -> bool:
        raise self._refusal(name)

    def scratch(self) -> Path:
        raise self._refusal("tmp")

    def _refusal(self, name: str) -> StoreError:
        return StoreError(
            f"cannot write `{name}` in {self}: it is only read",
            hint="cachemgr import takes images into the local store",
        )
