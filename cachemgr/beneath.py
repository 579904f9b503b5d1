"""Below a directory and nowhere else: paths walked name by name, through no symbolic link, also while names change.

Looking first (`os.path.islink`) and acting on the whole path afterwards leaves a moment in which somebody who may write
there swaps a directory for a link. So each directory is opened from the one above it, without following, and what is
made, renamed or removed is named relative to the last one.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_ENTER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def enter(path: str | os.PathLike[str]) -> int:
    """A descriptor of the directory that everything else is below; it may itself be a symbolic link.

    Raises:
        OSError: there is no such directory.
    """
    return os.open(path, _ENTER)


Maker = Callable[[str, int], None]
"""Makes a directory of that name in an open one."""


def make_readable(name: str, above: int) -> None:
    """Make a directory that others may read, as far as the umask lets them."""
    os.mkdir(name, 0o755, dir_fd=above)


@contextmanager
def inside(root: int, path: str, *, make: Maker | None = None) -> Iterator[int]:
    """A descriptor of the directory `path` below the open directory `root`, or of `root` itself for no path.

    With `make`, what is missing is made.

    Raises:
        OSError: a directory is missing or may not be entered; ELOOP where a name is a symbolic link.
    """
    opened = root
    try:
        for name in path.split("/") if path else ():
            below = _step(opened, name, make)
            if opened != root:
                os.close(opened)
            opened = below
        yield opened
    finally:
        if opened != root:
            os.close(opened)


def _step(above: int, name: str, make: Maker | None) -> int:
    try:
        return os.open(name, _ENTER | os.O_NOFOLLOW, dir_fd=above)
    except FileNotFoundError:
        if make is None:
            raise
    except NotADirectoryError:
        if is_link(above, name):
            raise OSError(errno.ELOOP, f"`{name}` is a symbolic link") from None
        raise
    with suppress(FileExistsError):
        make(name, above)
    return os.open(name, _ENTER | os.O_NOFOLLOW, dir_fd=above)


def made(name: str, above: int, mode: int) -> int:
    """A descriptor of a new directory `name` in an open one. Raises FileExistsError where something has that name."""
    os.mkdir(name, mode, dir_fd=above)
    return os.open(name, _ENTER | os.O_NOFOLLOW, dir_fd=above)


@contextmanager
def listed(name: str, above: int) -> Iterator[int]:
    """A descriptor of the directory `name` in an open one, which can be listed.

    Raises:
        OSError: there is no such directory, or it is a symbolic link.
    """
    opened = os.open(name, _LIST, dir_fd=above)
    try:
        yield opened
    finally:
        os.close(opened)


def there(name: str, directory: int) -> bool:
    """Whether something has that name in an open directory."""
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def is_link(directory: int, name: str) -> bool:
    """Whether `name` in an open directory is a symbolic link."""
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except OSError:
        return False


def read_plain(path: str | os.PathLike[str], *, limit: int) -> bytes:
    """A small file of our own state, that somebody else may have put something in the place of.

    Raises:
        OSError: it is missing, a symbolic link, a pipe or a device, or has more than `limit` bytes.
    """
    descriptor = os.open(path, _READ)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
    return data
