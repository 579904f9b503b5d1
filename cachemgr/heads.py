"""Heads: what a look-up needs of every capture, remembered so that a near look-up reads only new manifests.

A look-up that finds no exact artifact has to compare factors with all of them. Manifests are immutable and named by
their digest, so what was read once stays true; only the listing decides what exists. This is a cache of ours on this
host: losing it costs time, and the artifact that is chosen is read from the store and checked again.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, DeniedError, NotFoundError, StoreError
from cachemgr.key import Factor, Key, Relations
from cachemgr.places import write_private
from cachemgr.store import Store, layout
from cachemgr.store.captures import Damaged, load, manifests


class Head(msgspec.Struct, frozen=True, array_like=True):
    """One capture, without its files."""

    key: Key
    created: str
    complete: bool
    factors: tuple[Factor, ...]
    needs: Relations


class Heads:
    """The heads of one store, by the name of the manifest, kept in a file that is read when they are asked for."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, Head] = {}
        self._changed = False

    def of(
        self, store: Store, damaged: list[Damaged], *, without: frozenset[Digest] = frozenset()
    ) -> dict[Key, Sequence[Head]]:
        """The heads of every readable capture by artifact, oldest first, leaving out `without`.

        What cannot be used goes to `damaged`.

        Raises:
            StoreError: none can be read at all: then it is the store that fails, and not one of its objects.
        """
        self._recall()
        listed = {name: key for key, name in manifests(store) if layout.capture_of(name) not in without}
        for name in self._known.keys() - listed.keys():
            del self._known[name]
            self._changed = True
        failures = [
            failure
            for name in sorted(listed.keys() - self._known.keys())
            if (failure := self._learn(store, listed[name], name, damaged)) is not None
        ]
        if failures and not self._known:
            raise failures[0]
        self._remember()
        by_key: dict[Key, list[Head]] = defaultdict(list)
        for head in self._known.values():
            by_key[head.key].append(head)
        return {key: sorted(heads, key=lambda head: head.created) for key, heads in by_key.items()}

    def _recall(self) -> None:
        """A missing or torn file is an empty one."""
        if self._path is not None:
            with suppress(OSError, msgspec.MsgspecError, ValueError):
                self._known = msgspec.msgpack.decode(self._path.read_bytes(), type=dict[str, Head])

    def _remember(self) -> None:
        """Failing to is no failure: the next look-up reads the manifests again."""
        if self._path is None or not self._changed:
            return
        with suppress(OSError):
            write_private(self._path, msgspec.msgpack.encode(self._known))

    def _learn(self, store: Store, key: Key, name: str, damaged: list[Damaged]) -> StoreError | None:
        """Remember one manifest. Returns why the store did not give it, if it did not."""
        try:
            manifest = load(store, key, name).manifest
        except NotFoundError:
            return None
        except (CorruptError, StoreError) as error:
            damaged.append(Damaged(key, name, str(error), isinstance(error, CorruptError)))
            return error if isinstance(error, StoreError) and not isinstance(error, DeniedError) else None
        self._known[name] = Head(key, manifest.created, manifest.complete, manifest.factors, manifest.needs)
        self._changed = True
        return None
