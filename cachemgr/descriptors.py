"""Descriptors of ours, at numbers that no command gets anything at."""

import fcntl
import os

_LOWEST = 10
"""Above all that is given to a child at fixed numbers, also where our own standard streams are closed."""


def raised(fd: int) -> int:
    """The same at such a number; `fd` is closed."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LOWEST)
    finally:
        os.close(fd)
