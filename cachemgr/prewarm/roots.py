"""Roots of starts: each belongs to the process that made it, and goes with it, also when that is killed.

Whoever makes a root holds a lock beside it, and so does what it starts in there. The kernel lets go of the lock when
the last of them has ended, however they ended: what nobody holds is removed by the next who makes one.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cachemgr.errors import StoreError
from cachemgr.places import make_directory, network_file_system

_FOLDER = "prewarm"
"""Of the state of cachemgr. What became of specs lies here as well."""
_LOCK = ".lock"
_MOST_BYTES = 256


@contextmanager
def own_root(home: Path, launch: str, host: str) -> Iterator[Path]:
    """An empty directory for the caches of one start, which goes with the block.

    Raises:
        StoreError: there is no place for it.
    """
    root = home / _FOLDER / launch
    lock = _lock_of(root)
    try:
        make_directory(root.parent, 0o700)
        held = _held(lock, host)
    except OSError as error:
        raise _unmade(root, error) from None
    try:
        try:
            make_directory(root, 0o700)
        except OSError as error:
            raise _unmade(root, error) from None
        yield root
    finally:
        _remove(root, lock)
        os.close(held)


def sweep(home: Path, host: str) -> tuple[str, ...]:
    """Remove the roots that nobody holds any more; the names of their launches.

    A file system that has no locks, or a network's where the lock is another host's, tells nothing: those stay.
    """
    folder = home / _FOLDER
    try:
        names = sorted({name.removesuffix(_LOCK) for name in os.listdir(folder) if _is_root(folder / name)})
    except FileNotFoundError:
        return ()
    shared = network_file_system(folder) is not None
    return tuple(name for name in names if _swept(folder / name, host if shared else None))


def _is_root(path: Path) -> bool:
    return path.name.endswith(_LOCK) or (path.is_dir() and not path.is_symlink())


def _swept(root: Path, host: str | None) -> bool:
    """Whether a root was removed; one that is held, or not by `host`, is not."""
    lock, there = _lock_of(root), root.exists()
    with suppress(OSError):
        descriptor = _opened(lock)
        try:
            if host is not None and os.read(descriptor, _MOST_BYTES).decode(errors="replace") != host:
                return False
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _is_at(descriptor, lock) and _remove(root, lock) and there
        finally:
            os.close(descriptor)
    return False


def _remove(root: Path, lock: Path) -> bool:
    """The lock goes last, so that what cannot be removed now is tried again."""
    shutil.rmtree(root, ignore_errors=True)
    if os.path.lexists(root):
        return False
    with suppress(OSError):
        lock.unlink()
    return True


def _held(lock: Path, host: str) -> int:
    """A descriptor that holds a lock, and that what we start inherits."""
    while True:
        descriptor = _opened(lock)
        try:
            with suppress(OSError):  # where there are no locks, nobody else can get one either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, lock):  # and not one that was just swept
                os.write(descriptor, host.encode()[:_MOST_BYTES])
                os.set_inheritable(descriptor, True)  # noqa: FBT003 - it has no name
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _opened(lock: Path) -> int:
    return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _is_at(descriptor: int, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), lock.lstat())
    except FileNotFoundError:
        return False


def _lock_of(root: Path) -> Path:
    return root.with_name(root.name + _LOCK)


def _unmade(root: Path, error: OSError) -> StoreError:
    return StoreError(f"{root} cannot be made: {error.strerror}", hint="set CACHEMGR_HOME")
