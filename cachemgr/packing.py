"""Live units on their way into one layer of a store: examined, read once and packed, or refused with a reason.

What decides the shape of the layer is looked at first (`cachemgr.examine.sketch`); all other files are read, checked,
hashed and compressed in one go. When one of them turns out to be unfit, the layer is begun again without its unit, once
everything else has been examined, so that this happens once however many units are damaged.
"""

import errno
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from cachemgr import layer
from cachemgr.budget import Budget
from cachemgr.capture import File, Layer, Names, Section, Unit
from cachemgr.digest import Digest
from cachemgr.domains.relocation import CannotTravelError
from cachemgr.errors import StoreError
from cachemgr.examine import Tree, UnfitError, contents, examine, siblings_of, sketch
from cachemgr.statcache import StatCache
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture

_KEPT_BYTES = 24 << 20
"""Of what was read for a sketch and is packed soon; what is more is read again."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Refused(msgspec.Struct, frozen=True):
    """A unit that was left out, and why."""

    domain: str
    unit: str
    reason: str


class OverBudgetError(Exception):
    """What is packed takes more than the budget leaves; nothing else is wrong with it."""


class Packing:
    """A layer of the units that are added, packed into the store's scratch directory until it is committed.

    Args:
        known: captures of which a layer may be the same.
        cache: what unchanged files were last time; updated.
        budget: what the store may still take; None for as much as there is.
        now_ns: the time, for the stat cache.
    """

    def __init__(
        self,
        store: Store,
        trees: Sequence[Tree],
        known: Sequence[Capture],
        cache: StatCache,
        budget: Budget | None,
        *,
        now_ns: int,
    ) -> None:
        self._store, self._budget, self._cache, self._now_ns = store, budget, cache, now_ns
        self._trees = {tree.domain.name: tree for tree in trees}
        self._known = {held.sections: held for capture in known for held in capture.manifest.layers}
        self._units: dict[str, list[Unit]] = defaultdict(list)
        self._kept = _Kept(_KEPT_BYTES)
        self.paths: dict[Digest, Path] = {}
        """The packed layer, if there is one."""
        self.refused: list[Refused] = []

    def add(self, tree: Tree, name: str, paths: Sequence[str], names: Names) -> None:
        """Add a live unit, or refuse it; `names` has those of the units of its tree that were added before."""
        domain = tree.domain.name

        def look() -> Unit:
            return sketch(tree, name, paths, self._cache, self._kept.keeper(domain), now_ns=self._now_ns)

        unit = self._fit(tree, name, look)
        clash = None if unit is None else names.add(unit)
        if clash is not None:
            self.refuse(tree, name, clash)
        elif unit is not None:
            self._units[domain].append(unit)

    def refuse(self, tree: Tree, name: str, reason: str) -> None:
        """Leave a unit out."""
        self.refused.append(Refused(tree.domain.name, name, reason))

    def layer(self) -> Layer | None:
        """Pack what was added, or find the layer that has exactly that; None when there is nothing.

        Raises:
            OverBudgetError: it does not fit.
            StoreError: it could not be written.
        """
        while sections := self._sections():
            known = self._known.get(sections)
            if known is not None and self._store.has(layout.layer_name(known.digest)):
                return known
            if self._has_unread() and self._looks_known(sections):
                self._examine_unread()
                continue
            try:
                return self._pack(sections)
            except layer.UnitError as fault:
                self.refused.append(Refused(fault.domain, fault.unit.name, str(fault)))
                self._units[fault.domain].remove(fault.unit)
                self._examine_unread()
        return None

    def discard(self) -> None:
        """Remove what `commit` did not take."""
        for path in self.paths.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _sections(self) -> tuple[Section, ...]:
        return tuple(Section(domain, tuple(units)) for domain, units in sorted(self._units.items()) if units)

    def _fit(self, tree: Tree, name: str, look: Callable[[], Unit]) -> Unit | None:
        """What `look` finds, unless it is unfit."""
        try:
            return look()
        except UnfitError as fault:
            self.refuse(tree, name, str(fault))
            return None

    def _has_unread(self) -> bool:
        return not all(layer.is_read(unit) for units in self._units.values() for unit in units)

    def _looks_known(self, sections: Sequence[Section]) -> bool:
        """Whether a known layer has the same paths: then reading is enough to find out whether it is the same."""
        paths = _paths_in(sections)
        return any(_paths_in(known) == paths for known in self._known)

    def _examine_unread(self) -> None:
        """Find the digests of all files that were not read yet, and refuse the units of those that are unfit."""
        for domain, units in self._units.items():
            tree = self._trees[domain]
            examined = [unit if layer.is_read(unit) else self._examined(tree, unit) for unit in units]
            units[:] = [unit for unit in examined if unit is not None]

    def _examined(self, tree: Tree, unit: Unit) -> Unit | None:
        paths = [file.path for file in unit.files]
        return self._fit(tree, unit.name, lambda: examine(tree, unit.name, paths, self._cache, now_ns=self._now_ns))

    def _pack(self, sections: tuple[Section, ...]) -> Layer:
        path = self._store.scratch() / uuid.uuid4().hex
        try:
            with _created(path) as target:
                packed = layer.pack(sections, _Source(self._trees, sections, self._kept), _sink(target, self._budget))
        except OSError as error:
            path.unlink(missing_ok=True)
            hint = "free space there, or set CACHEMGR_STORE to another file system" if error.errno in _FULL else None
            raise StoreError(f"cannot write a layer to {self._store}: {error.strerror or error}", hint=hint) from None
        except (layer.UnitError, OverBudgetError):
            path.unlink()
            raise
        self.paths[packed.digest] = path
        self._remember(sections, packed.sections)
        return packed

    def _remember(self, before: Sequence[Section], after: Sequence[Section]) -> None:
        """Tell the stat cache what was read while it was packed."""
        for old, new in zip(before, after, strict=True):
            tree = self._trees[new.domain]
            for was, file in zip(old.files(), new.files(), strict=True):
                if was.digest == layer.UNREAD:
                    live = f"{tree.directory}/{file.path}"
                    self._cache.put(live, tree.seen[file.path], file, now_ns=self._now_ns)


def _paths_in(sections: Sequence[Section]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((section.domain, tuple(file.path for file in section.files())) for section in sections)


class _Kept:
    """Stored bytes of files that are packed soon, by domain and path, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._bodies: dict[tuple[str, str], bytes] = {}

    def keeper(self, domain: str) -> Callable[[str, bytes], None]:
        """Keeps files of this domain, as far as there is room."""

        def keep(path: str, body: bytes) -> None:
            if len(body) <= self._left:
                self._left -= len(body)
                self._bodies[domain, path] = body

        return keep

    def take(self, domain: str, path: str) -> bytes | None:
        """The bytes, which are not kept any longer, or None."""
        return self._bodies.pop((domain, path), None)


def _created(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    return os.fdopen(descriptor, "wb")


class _Within:
    """Bytes go to a file, as long as the budget lasts: how small a layer gets is only known when it is packed."""

    def __init__(self, target: BinaryIO, budget: Budget, left: int) -> None:
        self._target, self._budget, self._left, self._size = target, budget, left, 0

    def write(self, data: bytes, /) -> None:
        self._size += len(data)
        if self._size > self._left:
            raise OverBudgetError(self._budget.refusal(self._left))
        self._target.write(data)


def _sink(target: BinaryIO, budget: Budget | None) -> layer.Sink:
    left = None if budget is None else budget.left()
    return target if budget is None or left is None else _Within(target, budget, left)


class _Source:
    """Stored bytes of live files, detached where they are relocated, examined where nobody did."""

    def __init__(self, trees: Mapping[str, Tree], sections: Sequence[Section], kept: _Kept) -> None:
        self._trees, self._kept = trees, kept
        self._units = {
            (section.domain, file.path): unit for section in sections for unit in section.units for file in unit.files
        }
        self._unit: Unit | None = None
        self._names: Mapping[str, set[str]] = {}

    def __call__(self, domain: str, file: File) -> Iterator[bytes]:
        unit = self._units[domain, file.path]
        try:
            yield from self._bytes(self._trees[domain], unit, file)
        except UnfitError as fault:
            raise layer.UnitError(domain, unit, str(fault)) from None
        except (OSError, CannotTravelError):
            raise layer.UnitError.changed(domain, unit, file) from None

    def _bytes(self, tree: Tree, unit: Unit, file: File) -> Iterator[bytes]:
        kept = self._kept.take(tree.domain.name, file.path)
        if kept is not None:
            return iter((kept,))
        if file.digest == layer.UNREAD:
            return contents(tree, file)
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
