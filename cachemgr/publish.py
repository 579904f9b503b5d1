"""The publish journey: capture what a launch used or made, and commit it to the store.

Only units that pass their domain's self-check, that did not change while they were read, and that no usable capture of
the key has. Nothing is replaced. Bytes that were read last time and did not change are not read again, and a tree that
is stored already is recognised by its units alone.
"""

import errno
import os
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from cachemgr import layer
from cachemgr.capture import LAYOUT, File, Layer, Manifest, Section, Unit
from cachemgr.digest import Digest
from cachemgr.domains.relocation import CannotTravelError
from cachemgr.errors import StoreError
from cachemgr.examine import Tree, UnfitError, examine, siblings_of, units_of
from cachemgr.key import Relations, broken, misplaced
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
    ranks: Collection[str] = (),
    now_ns: int,
    without: frozenset[Digest] = frozenset(),
) -> Published:
    """Commit what `trees` hold that no complete capture of the key has, of those that this host could use.

    Args:
        draft: the manifest without layers and entries.
        cache: what unchanged files were last time; updated.
        near: captures of another key whose layers may be the same.
        ranks: names of the ranks that ran here. Of a launch that did not get ready, a unit that has ranks is captured
            with all of these or not at all.
        now_ns: the time, for the stat cache and the grace of layers.
        without: captures that are in quarantine here: what they have is published again.

    Raises:
        StoreError: the store could not be written; nothing is visible then.
        CorruptError: the store is not one of ours, or of a newer layout; it is left alone.
    """
    layout.ensure_layout(store)
    own = [capture for capture in captures(store, draft.key, [], without=without) if has_layers(store, capture)]
    have = _stored_units([capture for capture in own if _serves(capture, draft.needs)])
    refused: list[Refused] = []
    wanted = {
        tree.domain.name: _new_units(
            tree, have[tree.domain.name], () if draft.complete else ranks, cache, refused, now_ns=now_ns
        )
        for tree in trees
    }
    packed = _Packed(store, trees, [*own, *near])
    try:
        made = packed.layer(wanted, refused)
        if made is None:
            return Published(None, 0, 0, 0, tuple(refused), "nothing new to capture")
        manifest = msgspec.structs.replace(draft, layout=LAYOUT, layers=(made,), entries=_entries(made, trees))
        capture = commit(store, manifest, packed.paths, now=now_ns / 1e9)
    finally:
        packed.discard()
    files = list(made.files())
    stored = made.size if made.digest in packed.paths else 0
    return Published(capture, len(files), sum(file.size for file in files), stored, tuple(refused), "")


def _serves(capture: Capture, host: Relations) -> bool:
    """Whether a host like this one may use a capture: what it may not use would keep it cold for ever."""
    return not broken(capture.manifest.needs, host) and not misplaced(capture.manifest.needs, host)


def _stored_units(own: Sequence[Capture]) -> dict[str, dict[str, list[set[str]]]]:
    """Per domain and unit, the sets of paths that complete captures have."""
    have: dict[str, dict[str, list[set[str]]]] = defaultdict(lambda: defaultdict(list))
    for capture in own:
        for _layer, section in capture.manifest.sections() if capture.manifest.complete else ():
            for unit in section.units:
                have[section.domain][unit.name].append({file.path for file in unit.files})
    return have


def _new_units(
    tree: Tree,
    have: Mapping[str, list[set[str]]],
    ranks: Collection[str],
    cache: StatCache,
    refused: list[Refused],
    *,
    now_ns: int,
) -> list[Unit]:
    found = []
    for name, paths in units_of(tree.domain, tree.seen).items():
        if tree.touched.isdisjoint(paths) or any(stored.issuperset(paths) for stored in have.get(name, ())):
            continue
        ranked = tree.domain.ranks_of(name, paths)
        if ranked and (missing := sorted(set(ranks) - ranked)):
            refused.append(Refused(tree.domain.name, name, f"has nothing of {', '.join(missing)}"))
            continue
        try:
            found.append(examine(tree, name, paths, cache, now_ns=now_ns))
        except UnfitError as fault:
            refused.append(Refused(tree.domain.name, name, str(fault)))
    return found


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def _created(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    return os.fdopen(descriptor, "wb")


class _Packed:
    """A layer packed into the store's scratch directory until it is committed."""

    def __init__(self, store: Store, trees: Sequence[Tree], known: Sequence[Capture]) -> None:
        self._store = store
        self._trees = {tree.domain.name: tree for tree in trees}
        self._known = {held.sections: held for capture in known for held in capture.manifest.layers}
        self.paths: dict[Digest, Path] = {}

    def layer(self, wanted: Mapping[str, Sequence[Unit]], refused: list[Refused]) -> Layer | None:
        """Pack these units, or find the layer that has exactly them; None when there are none."""
        remaining = {domain: list(units) for domain, units in wanted.items()}
        while True:
            sections = tuple(Section(domain, tuple(units)) for domain, units in sorted(remaining.items()) if units)
            if not sections:
                return None
            known = self._known.get(sections)
            if known is not None and self._store.has(layout.layer_name(known.digest)):
                return known
            try:
                return self._pack(sections)
            except layer.ChangedError as fault:
                refused.append(Refused(fault.domain, fault.unit.name, str(fault)))
                remaining[fault.domain].remove(fault.unit)

    def _pack(self, sections: tuple[Section, ...]) -> Layer:
        path = self._store.scratch() / uuid.uuid4().hex
        try:
            with _created(path) as target:
                packed = layer.pack(sections, _Source(self._trees, sections), target)
        except OSError as error:
            path.unlink(missing_ok=True)
            hint = "free space there, or set CACHEMGR_STORE to another file system" if error.errno in _FULL else None
            raise StoreError(f"cannot write a layer to {self._store}: {error.strerror or error}", hint=hint) from None
        except layer.ChangedError:
            path.unlink()
            raise
        self.paths[packed.digest] = path
        return packed

    def discard(self) -> None:
        """Remove what `commit` did not take."""
        for path in self.paths.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)


class _Source:
    """Stored bytes of live files, detached where they are relocated."""

    def __init__(self, trees: Mapping[str, Tree], sections: Sequence[Section]) -> None:
        self._trees = trees
        self._units = {
            (section.domain, file.path): unit for section in sections for unit in section.units for file in unit.files
        }
        self._unit: Unit | None = None
        self._names: Mapping[str, set[str]] = {}

    def __call__(self, domain: str, file: File) -> Iterator[bytes]:
        unit = self._units[domain, file.path]
        try:
            yield from self._bytes(self._trees[domain], unit, file)
        except (OSError, CannotTravelError):
            raise layer.ChangedError(domain, unit, file) from None

    def _bytes(self, tree: Tree, unit: Unit, file: File) -> Iterator[bytes]:
        live = f"{tree.directory}/{file.path}"
        relocation = tree.domain.relocation_of(file.path) if file.relocated else None
        if relocation is None:
            return layer.read_file(live)
        siblings = self._siblings_in(unit)[file.path.rpartition("/")[0]]
        return iter((relocation.detach(b"".join(layer.read_file(live)), siblings),))

    def _siblings_in(self, unit: Unit) -> Mapping[str, set[str]]:
        """Remembered for one unit, since files come unit by unit: a unit may hold thousands of relocated ones."""
        if unit is not self._unit:
            self._unit, self._names = unit, siblings_of([member.path for member in unit.files])
        return self._names


def _entries(made: Layer, trees: Sequence[Tree]) -> tuple[str, ...]:
    domains = {tree.domain.name: tree.domain for tree in trees}
    names = {domains[section.domain].entry_of(unit.name) for section in made.sections for unit in section.units}
    return tuple(sorted(name for name in names if name is not None))
