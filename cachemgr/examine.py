"""Examining live units: whole or not, and what they look like in a store.

One read of each file gives its digest, its self-check and its relocated form; files that did not change since they were
last read are not read again. The same examination guards what is captured and what an engine is started on.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from cachemgr import digest, layer
from cachemgr.capture import File, Unit, is_safe_path
from cachemgr.digest import Digest
from cachemgr.domains import Domain
from cachemgr.domains.checks import Content
from cachemgr.domains.relocation import CannotTravelError
from cachemgr.observe import Seen, Snapshot
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


def units_of(domain: Domain, seen: Snapshot) -> dict[str, list[str]]:
    """The paths of each unit in a snapshot, sorted."""
    members: dict[str, list[str]] = defaultdict(list)
    for path in seen:
        members[domain.unit_of(path)].append(path)
    return {name: sorted(members[name]) for name in sorted(members)}


def faults(tree: Tree, cache: StatCache, *, now_ns: int) -> list[Fault]:
    """The units of a live tree that are damaged."""
    found = []
    for name, paths in units_of(tree.domain, tree.seen).items():
        try:
            examine(tree, name, paths, cache, now_ns=now_ns, names=True)
        except UnfitError as fault:
            if fault.damaged:
                found.append(Fault(name, str(fault), tuple(paths)))
    return found


def examine(tree: Tree, name: str, paths: Sequence[str], cache: StatCache, *, now_ns: int, names: bool = False) -> Unit:
    """The stored form of one live unit.

    `names` has what unchanged files name looked for again, where an engine dies when it is missing.

    Raises:
        UnfitError: it is damaged, changed while it was read, is not ours, or cannot travel.
    """
    odd = next((path for path in paths if not is_safe_path(path)), None)
    if odd is not None:
        raise UnfitError(f"`{odd[:200]!r}` has a name that cannot be stored")
    fault = tree.domain.unit_fault(name, paths)
    if fault is not None:
        raise UnfitError(fault, damaged=True)
    siblings = siblings_of(paths)
    return Unit(name, tuple(_file(tree, path, siblings, cache, now_ns=now_ns, names=names) for path in paths))


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
    tree: Tree, path: str, siblings: Mapping[str, set[str]], cache: StatCache, *, now_ns: int, names: bool
) -> File:
    """The stored form of a live file, from the stat cache or by reading, checking and hashing it."""
    live, seen = f"{tree.directory}/{path}", tree.seen[path]
    known = cache.get(live, seen)
    if known is not None and not (names and known.relocated and _needs_all(tree.domain, path)):
        return msgspec.structs.replace(known, path=path)
    head, found, mode = _read(live, path, seen)
    fault = tree.domain.check_of(path)(Content(path.rsplit("/", 1)[-1], head, seen.size))
    if fault is not None:
        raise UnfitError(f"`{path}` {fault}", damaged=True)
    file = File(path, seen.size, found, mode, seen.mtime_ns if tree.domain.keeps_mtimes else None)
    relocation = tree.domain.relocation_of(path)
    if relocation is not None:
        stored = _detached(relocation.detach, path, head, siblings)
        file = msgspec.structs.replace(file, size=len(stored), digest=digest.of_bytes(stored), relocated=True)
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


def _read(live: str, path: str, seen: Seen) -> tuple[bytes, Digest, int]:
    """The beginning (or all) of a file, the digest of all of it, and the mode it is stored with."""
    try:
        descriptor = layer.open_quietly(live)
    except OSError as error:
        raise UnfitError(f"`{path}` cannot be read: {error.strerror}") from None
    try:
        stat = os.fstat(descriptor)
        head = _read_up_to(descriptor, min(stat.st_size, _HEAD_BYTES))
        running = digest.hasher()
        running.update(head)
        while len(head) == _HEAD_BYTES and (piece := os.read(descriptor, layer.CHUNK)):
            running.update(piece)
        after = os.fstat(descriptor)
    except OSError as error:
        raise UnfitError(f"`{path}` cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if stat.st_uid != os.geteuid():
        raise UnfitError(f"`{path}` belongs to user {stat.st_uid}")
    if not all((now.st_size, now.st_mtime_ns, now.st_ino) == seen[:3] for now in (stat, after)):
        raise UnfitError(f"`{path}` changed while it was read")
    return head, digest.finish(running), 0o755 if stat.st_mode & 0o100 else 0o644


def _read_up_to(descriptor: int, limit: int) -> bytes:
    data = os.read(descriptor, limit)
    while len(data) < limit and (piece := os.read(descriptor, limit - len(data))):
        data += piece
    return data
