"""What lies below a directory, seen without leaving it: through no symbolic link, over no mount point."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from cachemgr import beneath


class File(NamedTuple):
    """One regular file. `path` is relative to the directory that was surveyed."""

    path: str
    bytes: int
    """What it takes on the disk, as `du` counts."""
    modified: float
    inode: tuple[int, int]
    owner: int


class Survey(NamedTuple):
    """The files below a directory; `barred` are directories below it that are not ours to enter: other mounts,
    other owners, or such as cannot be read."""

    files: tuple[File, ...]
    barred: tuple[str, ...]
    modified: float
    """Of the directory itself."""


def survey(directory: str) -> Survey:
    """Look at all that lies below a directory; nothing where there is none."""
    try:
        root = beneath.enter(directory)
    except OSError:
        return Survey((), (), 0.0)
    try:
        files: list[File] = []
        barred: list[str] = []
        with suppress(OSError), beneath.listed(".", root) as opened:
            _look(opened, "", _mount(root), files, barred)
        return Survey(tuple(files), tuple(barred), os.fstat(root).st_mtime)
    finally:
        os.close(root)


def _mount(opened: int) -> tuple[int, str]:
    """Where an open directory is mounted: its device, and the number of its mount (proc(5), fdinfo), because what is
    bound here from elsewhere on the same file system has the same device."""
    try:
        with open(f"/proc/self/fdinfo/{opened}", encoding="ascii") as file:
            number = next((line for line in file if line.startswith("mnt_id:")), "")
    except OSError:
        number = ""
    return os.fstat(opened).st_dev, number


def _look(directory: int, prefix: str, mount: tuple[int, str], files: list[File], barred: list[str]) -> None:
    for name, status in _entries(directory):
        path = prefix + name
        if stat.S_ISREG(status.st_mode):
            size = max(status.st_blocks * 512, status.st_size) if status.st_nlink == 1 else 0
            files.append(File(path, size, status.st_mtime, (status.st_dev, status.st_ino), status.st_uid))
        elif not stat.S_ISDIR(status.st_mode):
            continue  # a link, a socket: takes nothing
        elif status.st_uid != os.geteuid():
            barred.append(path)
        else:
            try:
                with beneath.listed(name, directory) as below:
                    if _mount(below) == mount:
                        _look(below, f"{path}/", mount, files, barred)
                    else:
                        barred.append(path)
            except OSError:
                barred.append(path)


def _entries(directory: int) -> Iterator[tuple[str, os.stat_result]]:
    for name in sorted(os.listdir(directory)):
        with suppress(OSError):
            yield name, os.stat(name, dir_fd=directory, follow_symlinks=False)


def take_away(directory: str, path: str) -> bool:
    """Remove what lies at `path` below a directory, with everything in it, but for what belongs to others or is mounted
    there, and the directories above that. Whether nothing is left."""
    try:
        root = beneath.enter(directory)
    except OSError:
        return True
    above, _slash, name = path.rpartition("/")
    try:
        with beneath.inside(root, above) as opened:
            return _removed(opened, name, _mount(root))
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    finally:
        os.close(root)


def _removed(above: int, name: str, mount: tuple[int, str]) -> bool:
    try:
        status = os.stat(name, dir_fd=above, follow_symlinks=False)
        if status.st_uid != os.geteuid():
            return False
        if stat.S_ISDIR(status.st_mode):
            return _emptied(above, name, mount)
        os.unlink(name, dir_fd=above)
    except FileNotFoundError:  # another prune was faster
        return True
    except OSError:
        return False
    return True


def _emptied(above: int, name: str, mount: tuple[int, str]) -> bool:
    """Remove a directory and all in it. Raises OSError."""
    with beneath.listed(name, above) as opened:
        if _mount(opened) != mount:
            return False
        left = [each for each in os.listdir(opened) if not _removed(opened, each, mount)]
    if not left:
        os.rmdir(name, dir_fd=above)
    return not left
