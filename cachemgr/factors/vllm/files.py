"""Reading files that anybody may have put there: bounded, and never waiting for a pipe's writer."""

import os
import stat
from pathlib import Path


def head(path: Path, most: int) -> tuple[bytes, int] | None:
    """The first `most` bytes of a regular file and its size; None for anything else and what cannot be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            return None
        with open(handle, "rb", closefd=False) as file:
            return file.read(most), status.st_size
    except OSError:
        return None
    finally:
        os.close(handle)
