"""The byte budget: what our places on this host's disks may take, by our own count.

A volume of Kubernetes with a size limit shows the free bytes of the whole node (statfs), and a pod that outgrows the
limit is evicted, by what `du` says. So we do as `du` does, with a memory: a directory whose modification time is that
of last time has the files of last time, so a count costs one look per directory and reads only those that changed. A
file that grows in place does not show until its directory changes; engines and stores write aside and rename.

Nothing is reserved: of two launches that count at the same time, both may take what is left.

Places on a network file system do not count: they have limits of their own and many users. Nor does what is mounted
read-only: nothing is added there.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from cachemgr import places, sizes
from cachemgr.digest import fingerprint
from cachemgr.remembered import recall, remember

_RACY_NS = 2_000_000_000
"""A directory that changed so recently may change again without showing it (`cachemgr.statcache`)."""
_KEPT_FREE = 100
"""One in so many bytes stays free for what is not counted beforehand: manifests, records, notes."""
NEARLY, ENOUGH = 0.9, 0.8
"""Shares of the limit: when room is made, and until how much is used."""
BLOCK = 4096
"""What disks give out, so what the smallest file takes."""


class Budget:
    """How much of its limit is left.

    `limit` is in bytes, 0 for none; `counted` are the places that count together; what was seen in each is kept in the
    directory `remembered`.
    """

    def __init__(self, limit: int, counted: Iterable[str], remembered: Path, now_ns: Callable[[], int]) -> None:
        self.limit = limit
        self._places, self._remembered, self._now_ns = tuple(counted), remembered, now_ns
        self._counted: int | None = None

    def left(self) -> int | None:
        """Bytes that may still be written; None where there is no limit."""
        if not self.limit:
            return None
        return max(0, self.limit - self.limit // _KEPT_FREE - self.used())

    def used(self) -> int:
        """Bytes that the places take now. What cannot be looked at counts as nothing."""
        self._counted = sum(self._count(place) for place in _apart(self._places) if _grows_here(place))
        return self._counted

    def excess(self, written: int) -> int:
        """Bytes that should go, after so many were written since it was last counted, so that there is room again; 0
        where there is enough. It is counted anew only where the last count says that it is nearly full."""
        if not self.limit:
            return 0
        if self._counted is not None and self._counted + written <= self.limit * NEARLY:
            return 0
        used = self.used()
        return 0 if used <= self.limit * NEARLY else used - round(self.limit * ENOUGH)

    def refusal(self, left: int) -> str:
        """Why something is not written."""
        return f"the budget of {sizes.spell(self.limit)} leaves {sizes.spell(left)}, too little (CACHEMGR_BUDGET)"

    def _count(self, place: str) -> int:
        file = self._remembered / f"{fingerprint(place.encode('utf-8', 'surrogateescape'))}.msgpack"
        known = recall(file, dict[str, _Folder]) or {}
        seen = _look(place, known, self._now_ns())
        if seen != known:
            remember(file, seen)
        return sum(folder.bytes for folder in seen.values())


class _Folder(msgspec.Struct, frozen=True, array_like=True):
    """A directory as it was last time."""

    mtime_ns: int
    inode: int
    bytes: int
    """What it and the files directly in it take."""
    folders: tuple[str, ...]


def needed(file_sizes: Iterable[int]) -> int:
    """Bytes of disk that files of these sizes take, with the directories around them."""
    return sum((size + BLOCK - 1) // BLOCK * BLOCK for size in file_sizes) + BLOCK


def _apart(given: Iterable[str]) -> list[str]:
    """Each place once, without those that lie in another."""
    found: list[str] = []
    for place in sorted({os.path.realpath(each) for each in given}):
        if not found or not f"{place}/".startswith(f"{found[-1].rstrip('/')}/"):
            found.append(place)
    return found


def _grows_here(place: str) -> bool:
    try:
        read_only = os.statvfs(places.nearest(place)).f_flag & os.ST_RDONLY
    except OSError:
        return False
    return not read_only and places.network_file_system(place) is None


def _look(place: str, known: dict[str, _Folder], now_ns: int) -> dict[str, _Folder]:
    """Every directory at and below `place`, by its path relative to that."""
    seen: dict[str, _Folder] = {}
    pending = [""]
    while pending:
        path = pending.pop()
        folder = _folder(f"{place}/{path}", known.get(path), now_ns)
        if folder is not None:
            seen[path] = folder
            pending.extend(f"{path}{name}/" for name in folder.folders)
    return seen


def _folder(path: str, known: _Folder | None, now_ns: int) -> _Folder | None:
    """None when it is gone, or may not be looked at."""
    try:
        status = os.stat(path)
        if known is not None and (known.mtime_ns, known.inode) == (status.st_mtime_ns, status.st_ino):
            return known
        size, folders = _held(path)
    except (OSError, UnicodeEncodeError):
        return None
    recent = now_ns - status.st_mtime_ns < _RACY_NS
    return _Folder(0 if recent else status.st_mtime_ns, status.st_ino, size + _taken(status), folders)


def _held(path: str) -> tuple[int, tuple[str, ...]]:
    """What the files directly in a directory take, and the directories in it."""
    size, folders = 0, list[str]()
    with os.scandir(path) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    entry.name.encode()
                    folders.append(entry.name)
                else:
                    size += _taken(entry.stat(follow_symlinks=False))
    return size, tuple(sorted(folders))


def _taken(status: os.stat_result) -> int:
    """As `du` counts; where a file system compresses or writes late, its size, which is never too little."""
    return max(status.st_blocks * 512, status.st_size)
