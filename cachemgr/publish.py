"""The publish journey: capture what a launch used or made, and commit it to the store.

Only units that pass their domain's self-check, that did not change while they were read, and that no usable capture of
the key has. Nothing is replaced. Bytes that were read last time and did not change are not read again, and a tree that
is stored already is recognised by its units alone.
"""

import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from cachemgr import layer
from cachemgr.capture import LAYOUT, File, Layer, Manifest, Unit
from cachemgr.digest import Digest
from cachemgr.domains.relocation import CannotTravelError
from cachemgr.errors import StoreError
from cachemgr.examine import Tree, UnfitError, examine, siblings_of, units_of
from cachemgr.statcache import StatCache
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, captures, commit, has_layers


class Refused(msgspec.Struct, frozen=True):
    """A unit that was left out, and why."""

    domain: str
    unit: str
    reason: str


class Published(msgspec.Struct, frozen=True):
    """What a publish did."""

    capture: Digest | None
    files: int
    bytes: int
    stored_bytes: int
    """Bytes of the layers that were packed."""
    refused: tuple[Refused, ...]
    reason: str
    """Why there is no capture, or nothing."""


def publish(
    store: Store,
    draft: Manifest,
    trees: Sequence[Tree],
    cache: StatCache,
    *,
    near: Sequence[Capture],
    now_ns: int,
    without: frozenset[Digest] = frozenset(),
) -> Published:
    """Commit what `trees` hold that no complete capture of the key has.

    Args:
        draft: the manifest without layers and entries.
        cache: what unchanged files were last time; updated.
        near: captures of another key whose layers may be the same.
        now_ns: the time, for the stat cache and the grace of layers.
        without: captures that are in quarantine here: what they have is published again.

    Raises:
        StoreError: the store could not be written; nothing is visible then.
        CorruptError: the store is not one of ours, or of a newer layout; it is left alone.
    """
    layout.ensure_layout(store)
    own = [capture for capture in captures(store, draft.key, [], without=without) if has_layers(store, capture)]
    have = _stored_units(own)
    refused: list[Refused] = []
    wanted = [(tree, _new_units(tree, have[tree.domain.name], cache, refused, now_ns=now_ns)) for tree in trees]
    packed = _Packed(store, [*own, *near])
    try:
        for tree, units in wanted:
            packed.add(tree, units, refused)
        if not packed.layers:
            return Published(None, 0, 0, 0, tuple(refused), "nothing new to capture")
        manifest = msgspec.structs.replace(
            draft, layout=LAYOUT, layers=tuple(packed.layers), entries=_entries(packed.layers, trees)
        )
        capture = commit(store, manifest, packed.paths, now=now_ns / 1e9)
    finally:
        packed.discard()
    files = [file for packed_layer in packed.layers for file in packed_layer.files()]
    stored = sum(packed_layer.size for packed_layer in packed.layers if packed_layer.digest in packed.paths)
    return Published(capture, len(files), sum(file.size for file in files), stored, tuple(refused), "")


def _stored_units(own: Sequence[Capture]) -> dict[str, dict[str, list[set[str]]]]:
    """Per domain and unit, the sets of paths that complete captures have."""
    have: dict[str, dict[str, list[set[str]]]] = defaultdict(lambda: defaultdict(list))
    for capture in own:
        for stored in capture.manifest.layers if capture.manifest.complete else ():
            for unit in stored.units:
                have[stored.domain][unit.name].append({file.path for file in unit.files})
    return have


def _new_units(
    tree: Tree, have: Mapping[str, list[set[str]]], cache: StatCache, refused: list[Refused], *, now_ns: int
) -> list[Unit]:
    found = []
    for name, paths in units_of(tree.domain, tree.seen).items():
        if tree.touched.isdisjoint(paths) or any(stored.issuperset(paths) for stored in have.get(name, ())):
            continue
        try:
            found.append(examine(tree, name, paths, cache, now_ns=now_ns))
        except UnfitError as fault:
            refused.append(Refused(tree.domain.name, name, str(fault)))
    return found


class _Packed:
    """Layers packed into the store's scratch directory until they are committed."""

    def __init__(self, store: Store, near: Sequence[Capture]) -> None:
        self._store = store
        self._known = {
            (known.domain, known.units): known
            for capture in near
            if has_layers(store, capture)
            for known in capture.manifest.layers
        }
        self.layers: list[Layer] = []
        self.paths: dict[Digest, Path] = {}

    def add(self, tree: Tree, units: Sequence[Unit], refused: list[Refused]) -> None:
        """Pack the units of one domain, or find the layer that has exactly these."""
        remaining = list(units)
        while remaining:
            known = self._known.get((tree.domain.name, tuple(remaining)))
            if known is not None:
                self.layers.append(known)
                return
            try:
                self._pack(tree, remaining)
            except layer.ChangedError as fault:
                refused.append(Refused(tree.domain.name, fault.unit.name, str(fault)))
                remaining.remove(fault.unit)
            else:
                return

    def _pack(self, tree: Tree, units: Sequence[Unit]) -> None:
        path = self._store.scratch() / uuid.uuid4().hex
        try:
            with path.open("xb") as target:
                packed = layer.pack(tree.domain.name, units, _Source(tree, units), target)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StoreError(f"cannot write a layer to {self._store}: {error.strerror or error}") from None
        except layer.ChangedError:
            path.unlink()
            raise
        self.layers.append(packed)
        if packed.digest in self.paths:  # another domain has the same files
            path.unlink()
        else:
            self.paths[packed.digest] = path

    def discard(self) -> None:
        """Remove what `commit` did not take."""
        for path in self.paths.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)


class _Source:
    """Stored bytes of live files, detached where they are relocated."""

    def __init__(self, tree: Tree, units: Sequence[Unit]) -> None:
        self._tree = tree
        self._units = {file.path: unit for unit in units for file in unit.files}
        self._unit: Unit | None = None
        self._names: Mapping[str, set[str]] = {}

    def __call__(self, file: File) -> Iterator[bytes]:
        try:
            yield from self._bytes(file)
        except (OSError, CannotTravelError):
            raise layer.ChangedError(self._units[file.path], file) from None

    def _bytes(self, file: File) -> Iterator[bytes]:
        live = f"{self._tree.directory}/{file.path}"
        relocation = self._tree.domain.relocation_of(file.path) if file.relocated else None
        if relocation is None:
            return layer.read_file(live)
        siblings = self._siblings_in(self._units[file.path])[file.path.rpartition("/")[0]]
        return iter((relocation.detach(b"".join(layer.read_file(live)), siblings),))

    def _siblings_in(self, unit: Unit) -> Mapping[str, set[str]]:
        """Remembered for one unit, since files come unit by unit: a unit may hold thousands of relocated ones."""
        if unit is not self._unit:
            self._unit, self._names = unit, siblings_of([member.path for member in unit.files])
        return self._names


def _entries(packed: Sequence[Layer], trees: Sequence[Tree]) -> tuple[str, ...]:
    domains = {tree.domain.name: tree.domain for tree in trees}
    names = {domains[made.domain].entry_of(unit.name) for made in packed for unit in made.units}
    return tuple(sorted(name for name in names if name is not None))
