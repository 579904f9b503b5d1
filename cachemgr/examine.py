"""Examining live units: whole or not, and what they look like in a store.

One read of each file gives its digest, its self-check and its relocated form; files that did not change since they were
last read are not read again. The same examination guards what is captured and what an engine is started on.

What is captured is read once altogether: `sketch` looks at what decides the shape of a layer (sizes and links), and
`contents` checks the other files while their bytes go into it.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from cachemgr import digest, layer
from cachemgr.capture import File, Unit, is_safe_path
from cachemgr.domains import Domain, Target
from cachemgr.domains.checks import Content
from cachemgr.domains.relocation import CannotTravelError
from cachemgr.errors import DeadlineError
from cachemgr.observe import Snapshot, scan
from cachemgr.statcache import StatCache

_HEAD_BYTES = 16 << 20
"""Files up to this size are checked whole; of larger ones only the beginning is held in memory."""


class Tree(msgspec.Struct, frozen=True):
    """One domain's live directory as a launch left it, and which of its files count as used or made."""

    domain: Domain
    directory: str
    seen: Snapshot
    touched: frozenset[str]
    """Files that this launch read or made; a unit is captured when one of its files is among them."""


class UnfitError(Exception):
    """A unit that cannot be captured. `str()` is the reason; `damaged` says that no engine should find it either."""

    def __init__(self, reason: str, *, damaged: bool = False) -> None:
        super().__init__(reason)
        self.damaged = damaged


class Fault(msgspec.Struct, frozen=True):
    """A unit, or a left-over, that an engine must not find."""

    unit: str
    reason: str
    paths: tuple[str, ...]


def seen_in(target: Target) -> Snapshot:
    """The files of a live directory that belong to units of its engine."""
    seen = scan(target.directory, target.domain.travels)
    if target.ours or target.domain.is_unit is None:
        return seen
    known = known_units(target, units_of(target.domain, seen))
    return {path: each for path, each in seen.items() if target.domain.unit_of(path) in known}


def known_units(target: Target, units: Mapping[str, Sequence[str]]) -> Collection[str]:
    """Which of these units are the engine's: all in a directory of ours, elsewhere those whose names tell."""
    is_unit = target.domain.is_unit
    if target.ours or is_unit is None:
        return units
    return {unit for unit, paths in units.items() if is_unit(paths)}


def units_of(domain: Domain, seen: Iterable[str]) -> dict[str, list[str]]:
    """The paths of each unit of those that were seen, sorted."""
    members: dict[str, list[str]] = defaultdict(list)
    for path in seen:
        members[domain.unit_of(path)].append(path)
    return {name: sorted(members[name]) for name in sorted(members)}


def never() -> bool:
    """For who has all the time."""
    return False


def faults(tree: Tree, cache: StatCache, *, now_ns: int, expired: Callable[[], bool] = never) -> list[Fault]:
    """The units of a live tree that are damaged.

    Raises:
        DeadlineError: `expired` was true before all of it was read.
    """
    found = []
    for name, paths in units_of(tree.domain, tree.seen).items():
        try:
            examine(tree, name, paths, cache, now_ns=now_ns, names=True, expired=expired)
        except UnfitError as fault:
            if fault.damaged:
                found.append(Fault(name, str(fault), tuple(paths)))
    return found


def examine(
    tree: Tree,
    name: str,
    paths: Sequence[str],
    cache: StatCache,
    *,
    now_ns: int,
    names: bool = False,
    expired: Callable[[], bool] = never,
) -> Unit:
    """The stored form of one live unit.

    `names` has what unchanged files name looked for again, where an engine dies when it is missing.

    Raises:
        UnfitError: it is damaged, changed while it was read, is not ours, or cannot travel.
        DeadlineError: `expired` was true before all of it was read.
    """
    _expect_whole(tree, name, paths)
    siblings = siblings_of(paths)
    files = (_file(tree, path, siblings, cache, now_ns=now_ns, names=names, expired=expired) for path in paths)
    return Unit(name, tuple(files))


def _expect_whole(tree: Tree, name: str, paths: Sequence[str]) -> None:
    odd = next((path for path in paths if not is_safe_path(path)), None)
    if odd is not None:
        raise UnfitError(f"`{odd[:200]!r}` has a name that cannot be stored")
    fault = tree.domain.unit_fault(name, paths)
    if fault is not None:
        raise UnfitError(fault, damaged=True)


Keep = Callable[[str, bytes], None]
"""Takes the stored bytes of a file of this path, for whoever needs them soon."""


def sketch(tree: Tree, name: str, paths: Sequence[str], cache: StatCache, keep: Keep, *, now_ns: int) -> Unit:
    """One live unit with the final sizes, modes and links of its files. Files that are not remembered and of which that
    is known without their bytes are `layer.UNREAD`; those that were read are given to `keep`.

    Raises:
        UnfitError: as `examine`, for as much as was read.
    """
    _expect_whole(tree, name, paths)
    siblings = siblings_of(paths)
    sizes = Counter(tree.seen[path].size for path in paths)

    def row(path: str) -> File:
        seen = tree.seen[path]
        known = cache.get(f"{tree.directory}/{path}", seen)
        if known is not None:
            return msgspec.structs.replace(known, path=path)
        if sizes[seen.size] > 1 or tree.domain.relocation_of(path) is not None:
            return _file(tree, path, siblings, cache, now_ns=now_ns, keep=keep)
        return File(path, seen.size, layer.UNREAD, _mode_of(tree, path), _kept_mtime(tree, path))

    return Unit(name, tuple(row(path) for path in paths))


def _mode_of(tree: Tree, path: str) -> int:
    try:
        return _stored_mode(os.lstat(f"{tree.directory}/{path}"))
    except OSError as error:
        raise UnfitError(f"`{path}` cannot be read: {error.strerror}") from None


def _stored_mode(stat: os.stat_result) -> int:
    return 0o755 if stat.st_mode & 0o100 else 0o644


def _kept_mtime(tree: Tree, path: str) -> int | None:
    return tree.seen[path].mtime_ns if tree.domain.keeps_mtimes else None


def contents(tree: Tree, file: File) -> Iterator[bytes]:
    """The bytes of an unread file of a sketch, examined on the way.

    Raises:
        UnfitError: as `examine`; what was given before may not be used.
    """
    with _opened(tree, file.path) as reading:
        if reading.mode != file.mode:
            raise reading.changed()
        yield from reading.pieces()


def siblings_of(paths: Sequence[str]) -> dict[str, set[str]]:
    """Per directory, the names in it: files, and directories that hold some."""
    names: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        rest = path
        while rest:
            parent, _slash, name = rest.rpartition("/")
            names[parent].add(name)
            rest = parent
    return names


def _file(
    tree: Tree,
    path: str,
    siblings: Mapping[str, set[str]],
    cache: StatCache,
    *,
    now_ns: int,
    names: bool = False,
    keep: Keep | None = None,
    expired: Callable[[], bool] = never,
) -> File:
    """The stored form of a live file, from the stat cache or by reading, checking and hashing it."""
    live, seen = f"{tree.directory}/{path}", tree.seen[path]
    known = cache.get(live, seen)
    if known is not None and not (names and known.relocated and _needs_all(tree.domain, path)):
        return msgspec.structs.replace(known, path=path)
    with _opened(tree, path) as reading:
        running = digest.hasher()
        for piece in reading.pieces():
            if expired():
                raise DeadlineError(f"the deadline has passed while `{path}` was read")
            running.update(piece)
    file = File(path, seen.size, digest.finish(running), reading.mode, _kept_mtime(tree, path))
    stored, relocation = reading.head, tree.domain.relocation_of(path)
    if relocation is not None:
        stored = _detached(relocation.detach, path, reading.head, siblings)
        file = msgspec.structs.replace(file, size=len(stored), digest=digest.of_bytes(stored), relocated=True)
    if keep is not None and len(stored) == file.size:
        keep(path, stored)
    cache.put(live, seen, file, now_ns=now_ns)
    return file


def _needs_all(domain: Domain, path: str) -> bool:
    relocation = domain.relocation_of(path)
    return relocation is not None and relocation.needs_all


def _detached(
    detach: Callable[[bytes, set[str]], bytes], path: str, data: bytes, siblings: Mapping[str, set[str]]
) -> bytes:
    try:
        return detach(data, siblings[path.rpartition("/")[0]])
    except CannotTravelError as fault:
        # What is neither beside the file nor where it says is missing here, too.
        missing = fault.named is not None and not os.path.lexists(fault.named)
        raise UnfitError(f"`{path}` {fault}", damaged=missing) from None


class _Reading:
    """An open live file. `head` is its beginning (or all) once `pieces` has begun; `mode` is what it is stored with."""

    def __init__(self, tree: Tree, path: str, descriptor: int) -> None:
        self._tree, self._path, self._descriptor = tree, path, descriptor
        self._first = os.fstat(descriptor)
        if self._first.st_uid != os.geteuid():
            raise UnfitError(f"`{path}` belongs to user {self._first.st_uid}")
        self.mode = _stored_mode(self._first)
        self.head = b""

    def pieces(self) -> Iterator[bytes]:
        """All bytes in pieces of at most a chunk, after the file proved as far as it is held that it is whole.

        Raises:
            UnfitError: it did not, or it changed since it was seen.
        """
        self._expect_unchanged()
        seen = self._tree.seen[self._path]
        self.head = _read_up_to(self._descriptor, min(seen.size, _HEAD_BYTES))
        self._expect_unchanged()
        fault = self._tree.domain.check_of(self._path)(Content(self._path.rsplit("/", 1)[-1], self.head, seen.size))
        if fault is not None:
            raise UnfitError(f"`{self._path}` {fault}", damaged=True)
        yield from _chunks(self.head)
        left = seen.size - len(self.head)
        while left and (piece := os.read(self._descriptor, min(layer.CHUNK, left))):
            left -= len(piece)
            yield piece
        if seen.size > _HEAD_BYTES:
            self._expect_unchanged()

    def changed(self) -> UnfitError:
        """What is wrong with a file that is not what it was when it was seen."""
        return UnfitError(f"`{self._path}` changed while it was read")

    def _expect_unchanged(self) -> None:
        """The times tell: whoever sets that of the last modification back moves that of the last change on."""
        now = os.fstat(self._descriptor)
        if (now.st_size, now.st_mtime_ns, now.st_ino) != self._tree.seen[self._path][:3]:
            raise self.changed()
        if now.st_ctime_ns != self._first.st_ctime_ns:
            raise self.changed()


@contextmanager
def _opened(tree: Tree, path: str) -> Iterator[_Reading]:
    try:
        descriptor = layer.open_quietly(f"{tree.directory}/{path}")
        try:
            yield _Reading(tree, path, descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UnfitError(f"`{path}` cannot be read: {error.strerror}") from None


def _chunks(data: bytes) -> Iterator[bytes]:
    if len(data) <= layer.CHUNK:
        yield data
        return
    for at in range(0, len(data), layer.CHUNK):
        yield data[at : at + layer.CHUNK]


def _read_up_to(descriptor: int, limit: int) -> bytes:
    data = os.read(descriptor, limit)
    while len(data) < limit and (piece := os.read(descriptor, limit - len(data))):
        data += piece
    return data
