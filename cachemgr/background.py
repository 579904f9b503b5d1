"""Processes of ours that outlive us: they have a session of their own, no terminal, and nothing of ours open."""

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cachemgr.places import make_directory

_STEP_SECONDS = 0.05


def start(argv: Sequence[str], environ: Mapping[str, str], *, log: Path) -> int:
    """Start a process that nobody waits for, and return its id. What it says goes to the file `log`.

    Raises:
        OSError: it cannot be started.
    """
    make_directory(log.parent, 0o700)
    return os.posix_spawn(
        argv[0],
        list(argv),
        dict(environ),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *((os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in _inherited()),
        ],
        setsid=True,
        setsigmask=[],  # ours may be blocked
    )


def _inherited() -> list[int]:
    """Descriptors that whoever started us left open for the command: somebody may wait for their end."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def wait(pids: Collection[int], seconds: float) -> bool:
    """Wait so long for these children of ours to end. Whether they have."""
    end = time.monotonic() + seconds
    waiting = set(pids)
    while True:
        for pid in list(waiting):
            with suppress(ChildProcessError):  # reaped by somebody else
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            waiting.discard(pid)
        if not waiting or time.monotonic() >= end:
            return not waiting
        time.sleep(_STEP_SECONDS)
