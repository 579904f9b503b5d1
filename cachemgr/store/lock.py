"""Locks between processes of one host. They only save work: nothing here is needed for a correct result."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from cachemgr.places import make_directory


@contextmanager
def held(path: Path, *, wait: float) -> Iterator[bool]:
    """Try for `wait` seconds to hold the lock `path`; the body runs either way and is told whether it holds it.

    A file system without locks, or a directory that cannot be written, reads as not held.
    """
    lock = FileLock(path, mode=0o600)
    try:
        make_directory(path.parent, 0o700)
        lock.acquire(timeout=wait)
    except (Timeout, OSError, NotImplementedError):
        yield False
        return
    try:
        yield True
    finally:
        with suppress(OSError):
            lock.release()
