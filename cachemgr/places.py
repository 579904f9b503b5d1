"""Places that can be used: a directory that can be written, a private spare one, and what kind of file system it is on.

Containers run under user ids that nobody knows, with HOME unset or `/`, on read-only roots; clusters put HOME on a
network file system, where a compile cache is slow at best (stale handles, no locks, late visibility) and torn at worst.
"""

import os
import stat
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "lustre",
        "gpfs",
        "ceph",
        "9p",
        "afs",
        "beegfs",
        "glusterfs",
        "panfs",
        "wekafs",
    }
)
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.overlayfs", "fuse.lxcfs", "fuseblk"})
"""FUSE file systems over local disks; every other one may be a bucket or another host."""


def usable(path: str | Path) -> bool:
    """Whether this process can write in the directory `path`, or make it."""
    place = os.path.abspath(path)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    return os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)


def make_directory(path: str | Path, mode: int = 0o755) -> None:
    """Make a directory and what is missing above it, none of them writable for others, whatever the umask allows.

    Raises:
        OSError: it cannot be made.
    """
    missing = []
    place = os.path.abspath(path)
    while not os.path.isdir(place):
        missing.append(place)
        place = os.path.dirname(place)
    for directory in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(directory, mode)


def write_private(path: Path, data: bytes) -> None:
    """Write a file of our own state whole or not at all, for this user only.

    Raises:
        OSError: it cannot be written.
    """
    make_directory(path.parent, 0o700)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    aside.rename(path)


def spare(environ: Mapping[str, str]) -> Path | None:
    """A directory below the temporary one that only this user can enter, or None when there is none to be had.

    The temporary directory belongs to everybody: a name in it may have been taken by somebody else on purpose, so what
    is there must be a real directory, ours, and closed to others.
    """
    path = Path(environ.get("TMPDIR") or "/tmp") / f"cachemgr-{os.geteuid()}"  # noqa: S108 - checked below
    with suppress(OSError):
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
            return path
    return None


def network_file_system(path: str | Path, mounts: Path = MOUNTS) -> str | None:
    """The type of the file system under `path` if it is a network's or a bucket's, else None."""
    kind = _type_at(os.path.realpath(path), mounts)
    if kind in _NETWORK or (kind.startswith("fuse") and kind not in _LOCAL_FUSE):
        return kind
    return None


def _type_at(path: str, mounts: Path) -> str:
    """The type of the innermost mount above `path` (proc(5), mountinfo); of two on one place the later one shows."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        fields, _dash, rest = line.partition(" - ")
        point = _unescaped(fields.split()[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, rest.split()[0]
    return kind


def _unescaped(text: str) -> str:
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, letter)
    return text
