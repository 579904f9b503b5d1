"""What a start left behind: proof of use, and the verdict.

A restore is a hit only if the engine used it. The proof is in the directories: restored files carry access time 0, so
any newer one is a read; files that are new or changed are what had to be compiled after all. Our own reads leave access
times alone. Where the file system keeps none (noatime), the answer is `unknown`, never a guess.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec

from cachemgr.capture import Verdict

STAGE_PREFIX = ".cachemgr-"
"""How names of our own begin inside a live directory; no scan sees them."""


class Seen(NamedTuple):
    """What `stat` says of one file."""

    size: int
    mtime_ns: int
    inode: int
    atime_ns: int

    def same_bytes(self, other: "Seen") -> bool:
        """Whether both look like one unchanged file. Access times do not count."""
        return self[:3] == other[:3]


Snapshot = Mapping[str, Seen]
"""Paths relative to one directory, with `/`."""


class Growth(msgspec.Struct, frozen=True):
    """What one start did in one domain's directory."""

    added: frozenset[str]
    """Files that travel and are new or changed."""
    read: frozenset[str] | None
    """Files of the snapshot that were read; None where access times are not kept."""


def scan(directory: str, travels: Callable[[str], bool]) -> dict[str, Seen]:
    """Every regular file below `directory` that travels; nothing when there is no such directory.

    Symbolic links are not followed, and what vanishes while we look is left out.
    """
    found: dict[str, Seen] = {}
    pending = [""]
    while pending:
        prefix = pending.pop()
        try:
            entries = list(os.scandir(f"{directory}/{prefix}"))
        except OSError:
            continue
        for entry in entries:
            path = prefix + entry.name
            if entry.name.startswith(STAGE_PREFIX):
                continue
            if entry.is_dir(follow_symlinks=False):
                pending.append(path + "/")
            elif entry.is_file(follow_symlinks=False) and travels(path):
                _look(entry, path, found)
    return found


def _look(entry: "os.DirEntry[str]", path: str, found: dict[str, Seen]) -> None:
    try:
        stat = entry.stat(follow_symlinks=False)
        path.encode()
    except (OSError, UnicodeEncodeError):
        return
    found[path] = Seen(stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_atime_ns)


def growth(before: Snapshot, after: Snapshot, *, access_times: bool) -> Growth:
    """What happened between two snapshots of one directory."""
    added = {path for path, seen in after.items() if path not in before or not seen.same_bytes(before[path])}
    if not access_times:
        return Growth(frozenset(added), None)
    read = {path for path, seen in before.items() if path in after and after[path].atime_ns != seen.atime_ns}
    return Growth(frozenset(added), frozenset(read))


def forget_reads(directory: str, snapshot: Snapshot) -> dict[str, Seen]:
    """Set the access time of these files to 0, so that the next read shows, and return the snapshot as it is then.

    Files of other owners keep theirs: for them the first read of a day may not show.
    """
    forgotten: dict[str, Seen] = {}
    for path, seen in snapshot.items():
        forgotten[path] = seen if seen.atime_ns == 0 else _forgotten(f"{directory}/{path}", seen)
    return forgotten


def _forgotten(path: str, seen: Seen) -> Seen:
    try:
        os.utime(path, ns=(0, seen.mtime_ns), follow_symlinks=False)
    except OSError:
        return seen
    return seen._replace(atime_ns=0)


def were_forgotten(directory: str, paths: Iterable[str], since_ns: int) -> bool:
    """Whether somebody has changed what one of these files says about itself since then, as whoever forgets reads
    does: that it was not read is no news then."""
    for path in paths:
        with suppress(OSError):
            if os.stat(f"{directory}/{path}", follow_symlinks=False).st_ctime_ns > since_ns:
                return True
    return False


def listed(directory: str, names: Iterable[str]) -> set[str]:
    """Which of these directories below `directory` somebody has listed since `forget_listings`.

    To be asked before a scan, which lists them all.
    """
    found = set()
    for name in names:
        with suppress(OSError):
            if os.stat(f"{directory}/{name}", follow_symlinks=False).st_atime_ns != 0:
                found.add(name)
    return found


def forget_listings(directory: str, names: Iterable[str]) -> None:
    """Set the access time of these directories to 0, so that the next listing shows."""
    for name in names:
        path = f"{directory}/{name}"
        with suppress(OSError):
            os.utime(path, ns=(0, os.stat(path, follow_symlinks=False).st_mtime_ns), follow_symlinks=False)


def keeps_access_times(directory: str) -> bool:
    """Try it: a file with access time 0 is read, and must say so afterwards. `directory` must be writable."""
    with suppress(OSError), _probe(directory) as descriptor:
        os.write(descriptor, b"x")
        os.utime(descriptor, ns=(0, os.fstat(descriptor).st_mtime_ns))
        os.pread(descriptor, 1, 0)
        return os.fstat(descriptor).st_atime_ns != 0
    return False


def time_in(directory: str) -> int:
    """The time by the clock of a directory's file system, which may be a server's; 0 where it cannot be asked."""
    with suppress(OSError), _probe(directory) as descriptor:
        return os.fstat(descriptor).st_ctime_ns
    return 0


@contextmanager
def _probe(directory: str) -> Iterator[int]:
    probe = f"{directory}/{STAGE_PREFIX}atime-{os.getpid()}"
    descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        os.unlink(probe)


def verdict(offered: int, read: int | None, added: int) -> Verdict:
    """The verdict of a start.

    Args:
        offered: files of artifacts that lay in the live directories when the engine started.
        read: how many of them it read; None when nobody can know.
        added: files that travel and are new or changed, over all domains.
    """
    if offered == 0:
        return "cold"
    if read is None:
        return "unknown"
    if read == 0:
        return "inert"
    return "partly used" if added else "used"
