"""Heads: what a look-up needs of every capture, remembered so that a near look-up reads only new manifests.

A look-up that finds no exact artifact has to compare factors with all of them. Manifests are immutable and named by
their digest, so what was read once stays true; only the listing decides what exists. This is a cache of ours on this
host: losing it costs time, and the artifact that is chosen is read from the store and checked again.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, DeniedError, NotFoundError, StoreError, UntrustedError
from cachemgr.key import Factor, Key, Relations
from cachemgr.parallel import side_by_side
from cachemgr.remembered import recall, remember
from cachemgr.store import Store, layout
from cachemgr.store.captures import Damaged, Judge, listing, load

_READERS = 8


class Head(msgspec.Struct, frozen=True, array_like=True):
    """One capture, without its files."""

    key: Key
    created: str
    complete: bool
    factors: tuple[Factor, ...]
    needs: Relations


class Heads:
    """The heads of one store, by the name of the manifest, kept in a file that is read when they are asked for."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Head] = {}
        self._changed = False

    def of(
        self,
        store: Store,
        damaged: list[Damaged],
        *,
        without: frozenset[Digest] = frozenset(),
        judge: Judge | None = None,
    ) -> dict[Key, Sequence[Head]]:
        """The heads of every readable capture by artifact, oldest first, leaving out `without`.

        What cannot be used goes to `damaged`. A head that is remembered is not judged again, so who uses the capture
        of one has to.

        Raises:
            StoreError: none can be read at all: then it is the store that fails, and not one of its objects.
        """
        self._recall()
        listed = {name: there for name, there in listing(store).items() if layout.capture_of(name) not in without}
        for name in self._known.keys() - listed.keys():
            del self._known[name]
            self._changed = True
        self._learn_all(store, {name: listed[name] for name in listed.keys() - self._known.keys()}, judge, damaged)
        return _by_key(self._known.values())

    def of_named(
        self, store: Store, damaged: list[Damaged], named: Mapping[str, Key], *, most: int
    ) -> dict[Key, Sequence[Head]]:
        """The heads of these manifests, by their names and keys: those that are remembered, and of the others the
        first `most`. Nothing is listed, so none is judged and none is known to be there still.

        Raises:
            StoreError: none can be read at all.
        """
        self._recall()
        unknown = [name for name in named if name not in self._known][:most]
        self._learn_all(store, {name: (named[name], ()) for name in unknown}, None, damaged)
        return _by_key(self._known[name] for name in named if name in self._known)

    def _learn_all(
        self,
        store: Store,
        listed: Mapping[str, tuple[Key, Collection[str]]],
        judge: Judge | None,
        damaged: list[Damaged],
    ) -> None:
        told = side_by_side(
            lambda name: self._learn(store, name, listed[name], judge, damaged), sorted(listed), threads=_READERS
        )
        failures = [failure for failure in told if failure is not None]
        if failures and not self._known:
            raise failures[0]
        self._remember()

    def _recall(self) -> None:
        if self._path is not None:
            self._known = recall(self._path, dict[str, Head]) or {}

    def _remember(self) -> None:
        if self._path is not None and self._changed:
            remember(self._path, self._known)

    def _learn(
        self, store: Store, name: str, there: tuple[Key, Collection[str]], judge: Judge | None, damaged: list[Damaged]
    ) -> StoreError | None:
        """Remember one manifest. Returns why the store did not give it, if it did not."""
        key, beside = there
        try:
            manifest = load(store, key, name, judge, beside).manifest
        except NotFoundError:
            return None
        except (CorruptError, UntrustedError, StoreError) as error:
            damaged.append(Damaged.of(key, name, error))
            return error if isinstance(error, StoreError) and not isinstance(error, DeniedError) else None
        self._known[name] = Head(key, manifest.created, manifest.complete, manifest.factors, manifest.needs)
        self._changed = True
        return None


def _by_key(heads: Iterable[Head]) -> dict[Key, Sequence[Head]]:
    by_key: dict[Key, list[Head]] = defaultdict(list)
    for head in heads:
        by_key[head.key].append(head)
    return {key: sorted(own, key=lambda head: head.created) for key, own in by_key.items()}
