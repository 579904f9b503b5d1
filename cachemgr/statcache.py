"""The stat cache: what a file was when it was last read, so that unchanged files are not read again.

A file counts as unchanged when its size, modification time and inode are those of last time. A file that changed within
two seconds before it was read is not remembered, because a second change inside the clock's granularity would not show.
"""

import os
from pathlib import Path

import msgspec

from cachemgr.capture import File
from cachemgr.observe import Seen
from cachemgr.remembered import recall, remember

RACY_NS = 2_000_000_000
"""What changed so recently may change again without showing it."""


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    size: int
    mtime_ns: int
    inode: int
    file: File


class StatCache:
    """Stored forms of live files, by absolute path. A missing or torn cache is an empty one."""

    def __init__(self, entries: dict[str, _Entry]) -> None:
        self._entries = entries
        self.changed = False

    @classmethod
    def load(cls, path: Path) -> "StatCache":
        """Read the cache file `path`."""
        return cls(recall(path, dict[str, _Entry]) or {})

    def save(self, path: Path) -> None:
        """Write what changed, without files that are gone."""
        if self.changed:
            remember(path, {file: entry for file, entry in self._entries.items() if os.path.lexists(file)})

    def get(self, path: str, seen: Seen) -> File | None:
        """The stored form of the file at `path`, if it is the file that was remembered."""
        entry = self._entries.get(path)
        if entry is None or (entry.size, entry.mtime_ns, entry.inode) != seen[:3]:
            return None
        return entry.file

    def put(self, path: str, seen: Seen, file: File, *, now_ns: int) -> None:
        """Remember the stored form of a file that was `seen` before and after it was read."""
        if now_ns - seen.mtime_ns < RACY_NS:
            return
        self._entries[path] = _Entry(*seen[:3], file)
        self.changed = True
