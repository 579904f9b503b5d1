"""Places that can be used: a directory that can be written, a private spare one, and what kind of file system it is on.

Containers run under user ids that nobody knows, with HOME unset or `/`, on read-only roots; clusters put HOME on a
network file system, where a compile cache is slow at best (stale handles, no locks, late visibility) and torn at worst.
"""

import errno
import os
import stat
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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
_MAX_LINKS = 40
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.overlayfs", "fuse.lxcfs", "fuseblk"})
"""FUSE file systems over local disks; every other one may be a bucket or another host."""
_EXPORTED = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "fuse.glusterfs"})
"""Network file systems whose mounts name a server and what it exports."""
_LOOPBACK = ("127.", "localhost", "[::1]", "//127.", "//localhost")
"""A tunnel that ends on this host, as that of Amazon EFS: behind it may be any server."""


def working_directory() -> Path:
    """Where this process works. Where that has been deleted, a name of it that still leads there: to nothing, so that
    a relative path means for us what it means for the command."""
    try:
        return Path.cwd()
    except OSError:
        return Path("/proc/self/cwd")


def absolute(path: str | Path) -> str:
    """The path from the root, without `..` and the like, also where the working directory has been deleted."""
    return os.path.normpath(working_directory() / path)


def usable(path: str | Path) -> bool:
    """Whether this process can write in the directory `path`, or make it."""
    place = nearest(path)
    return os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)


def nearest(path: str | Path) -> str:
    """The path itself if something is there, else the nearest one above it where something is."""
    place = absolute(path)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    return place


def free_bytes(path: str | Path) -> int:
    """Bytes that the file system of a directory, which need not be there yet, has free for us.

    Raises:
        OSError: it cannot be asked.
    """
    return free(nearest(path))[0]


def make_directory(path: str | Path, mode: int = 0o755) -> None:
    """Make a directory and what is missing above it, none of them writable for others, whatever the umask allows.

    Raises:
        OSError: it cannot be made.
    """
    missing = []
    place = absolute(path)
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
    if is_special(path):  # a device would be lost for everybody
        raise FileExistsError(errno.EEXIST, "it is no file", str(path))
    make_directory(path.parent, 0o700)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        aside.rename(path)
    except OSError as error:  # a full disk; writing does not know the name
        with suppress(OSError):
            aside.unlink()
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    except BaseException:  # an interrupt
        with suppress(OSError):
            aside.unlink()
        raise


def is_special(path: Path) -> bool:
    """Whether something is there that must not give way to a new file: a device, a pipe, or what a process has open."""
    parts = (working_directory() / path).parts[1:]
    if parts[:1] in (("dev",), ("proc",)) and parts[:2] != ("dev", "shm"):
        return True
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def free(place: str | os.PathLike[str]) -> tuple[int, int | None]:
    """Bytes and inodes that a file system has left; None for those that have no number of inodes."""
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize, disk.f_favail if disk.f_files else None


def spare(environ: Mapping[str, str]) -> Path | None:
    """A directory below the temporary one that only this user can enter, or None when there is none to be had."""
    return private_in(spare_of(environ).parent)


def spare_of(environ: Mapping[str, str]) -> Path:
    """Where `spare` is, whether or not it can be had."""
    return _private(Path(environ.get("TMPDIR") or "/tmp"))  # noqa: S108 - checked before it is used


def _private(directory: Path) -> Path:
    return directory / f"cachemgr-{os.geteuid()}"


def private_in(directory: Path) -> Path | None:
    """A directory in one that others may write, which only this user can enter; None when there is none to be had.

    A name in there may have been taken by somebody else on purpose, so what is there must be a real directory, ours,
    and closed to others.
    """
    path = _private(directory)
    with suppress(OSError):
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
            return path
    return None


def exposure(path: str | Path, *, way: bool = True) -> str | None:
    """Who else than this user and root can put something into the directory `path`, in a sentence; None for nobody.

    With `way`, the directories above count as well: whoever may write in one of them can put another directory in the
    place of the next, unless it is sticky. Links on the way are followed, and count as what their owner may change. A
    directory that is missing yet will be ours.
    """
    pending, place, links = absolute(path).split("/"), "/", 0
    while pending:
        name = pending.pop(0)
        following = os.path.normpath(os.path.join(place, name))
        try:
            found = os.lstat(following)
        except OSError:
            return None
        fault = _exposed(following, found, last=not any(pending))
        if fault is not None and (way or not any(pending)):
            return fault
        if not stat.S_ISLNK(found.st_mode):
            place = following
            continue
        links += 1
        if links > _MAX_LINKS:
            return f"{path} leads through too many links"
        target = os.readlink(following)
        place = "/" if target.startswith("/") else place
        pending = [*target.split("/"), *pending]
    return None


def _exposed(path: str, found: os.stat_result, *, last: bool) -> str | None:
    if found.st_uid not in (0, os.geteuid()) and not _is_unmapped(found.st_uid):
        return f"{path} belongs to user {found.st_uid}"
    if stat.S_ISLNK(found.st_mode) or (found.st_mode & stat.S_ISVTX and not last):
        return None
    if found.st_mode & stat.S_IWOTH:
        return f"{path} can be written by everybody"
    # Where every user has a group of the same number, that group is nobody else.
    if found.st_mode & stat.S_IWGRP and not found.st_gid == os.getegid() == os.geteuid():
        return f"{path} can be written by group {found.st_gid}"
    return None


def _is_unmapped(user: int) -> bool:
    """Whether this is how a user outside of our user namespace looks: nobody in it can become that user."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
        mapped = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return False
    return user == overflow and mapped != ["0", "0", "4294967295"]


def network_file_system(path: str | Path, mounts: Path = MOUNTS) -> str | None:
    """The type of the file system under `path` if it is a network's or a bucket's, else None."""
    kind = _mount_at(os.path.realpath(path), mounts).kind
    if kind in _NETWORK or (kind.startswith("fuse") and kind not in _LOCAL_FUSE):
        return kind
    return None


def file_system(path: str | Path) -> str:
    """The type of the file system under `path`, such as `ext4`; empty where it cannot be told."""
    return _mount_at(os.path.realpath(path), MOUNTS).kind


def exported_place(path: str | Path, mounts: Path = MOUNTS) -> str | None:
    """What hosts that share a file system of a network call `path` alike, such as `server:/export/caches`, wherever
    each of them has mounted it; None for a local one, and where mounts of different servers may look alike."""
    real = os.path.realpath(path)
    mount = _mount_at(real, mounts)
    if mount.kind not in _EXPORTED or mount.source.startswith(_LOOPBACK):
        return None
    inside = os.path.relpath(real, mount.point)
    return os.path.normpath(f"{mount.source}/{mount.root}/{inside}")


class _Mount(NamedTuple):
    """A line of mountinfo (proc(5)): type, what is mounted, which directory of it, and where."""

    kind: str = ""
    source: str = ""
    root: str = ""
    point: str = ""


def _mount_at(path: str, mounts: Path) -> _Mount:
    """The innermost mount above `path`; of two on one place the later one shows. Empty where it cannot be told."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return _Mount()
    best = _Mount()
    for line in lines:
        fields, _dash, rest = line.partition(" - ")
        _id, _parent, _device, root, point = map(_unescaped, fields.split()[:5])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best.point):
            kind, source = map(_unescaped, [*rest.split(), ""][:2])
            best = _Mount(kind, source, root, point)
    return best


def _unescaped(text: str) -> str:
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, letter)
    return text
