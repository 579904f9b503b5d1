"""Scratch directories of stores: private, and swept of what killed writers left there."""

import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from cachemgr.places import make_directory

_ABANDONED_SECONDS = 24 * 3600.0
"""How old an unfinished write must be to have no writer any more, whatever the clock of a file server says."""


def prepare(directory: Path) -> None:
    """Make the scratch directory of a store and remove what was abandoned in it.

    Raises:
        OSError: it cannot be made.
    """
    make_directory(directory.parent.parent)
    make_directory(directory, 0o700)
    sweep(directory)


def create(path: Path) -> BinaryIO:
    """A new file, to be written and read again; a store that takes it (`put_file`) gives it the mode of its objects.

    Raises:
        OSError: it cannot be made.
    """
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w+b")


def sweep(directory: Path) -> None:
    """Remove what writers that were killed left in a scratch directory."""
    for path, _size in abandoned(directory, now=time.time()):
        with suppress(OSError):
            os.unlink(path)


def abandoned(directory: Path, *, now: float) -> Iterator[tuple[str, int]]:
    """Unfinished writes in a scratch directory that have no writer any more: path and bytes of each."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and now - status.st_mtime > _ABANDONED_SECONDS:
                    yield entry.path, status.st_size
