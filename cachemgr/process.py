"""Which process somebody is, told so that a later process of the same number, another container's or another host's is
not taken for it."""

import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec


class Process(msgspec.Struct, frozen=True):
    """One process of one boot of one host."""

    pid: int
    started: str
    """Start time in clock ticks since boot, which a second process of this number cannot share."""
    boot: str
    namespace: str
    """The PID namespace: `pid` means nothing outside of it."""


def this_process() -> Process:
    """The one that asks."""
    pid = os.getpid()
    return Process(pid, start_time(pid) or "", _boot(), _namespace())


def runs(process: Process) -> bool | None:
    """Whether it is still there; None for a process of another host or container, which cannot be looked at."""
    if process.boot != _boot() or process.namespace != _namespace():
        return None
    return start_time(process.pid) == process.started


def start_time(pid: int) -> str | None:
    """Field 22 of `/proc/<pid>/stat` (proc(5)); None when there is no such process, or only its zombie."""
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in _ENDED else None


def exit_status(pid: int) -> int | None:
    """Field 52 of it while its parent has not reaped it; a number that was given to another process since is no
    zombie."""
    fields = _stat(pid)
    return int(fields[49]) if len(fields) > 49 and fields[0] in _ENDED else None


def tell(pid: int, started: str | None, number: int) -> None:
    """Signal the process that had this number and start time, unless it is gone and the number may be another's."""
    if started is not None and start_time(pid) == started:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def children(pid: int) -> set[int]:
    """The children of a process by the process table; itself where that cannot be read, so that it never looks empty.

    `/proc/PID/task/TID/children` would be one look, and many kernels are built without it. A child stays in the table
    until it is reaped, so an orphan that is handed to its grandparent meanwhile cannot hide: its parent is still there.
    """
    table = _parents()
    return {pid} if table is None else {child for child, parent in table.items() if parent == pid}


def descendants(pid: int) -> set[int]:
    """The children of a process, theirs, and so on; empty where the process table cannot be read."""
    table = _parents() or {}
    found: set[int] = set()
    wave = {pid}
    while wave:
        wave = {child for child, parent in table.items() if parent in wave} - found
        found |= wave
    return found


def with_variable_in(directory: str) -> int | None:
    """A process that has a variable naming this directory or something in it, as what a start began has; of those that
    may be looked into, and but for this one."""
    named = os.fsencode(directory)
    found = re.compile(b"=" + re.escape(named) + b"(?:[/:\\0]|$)")
    own = str(os.getpid())
    for name in os.listdir("/proc"):
        if name.isdecimal() and name != own:
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue  # it has ended, or is another user's
            if found.search(environ):
                return int(name)
    return None


def _parents() -> dict[int, int | None] | None:
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return None
    return {pid: _parent(pid) for pid in pids}


def _parent(pid: int) -> int | None:
    """None when it is gone."""
    fields = _stat(pid)
    return int(fields[1]) if len(fields) > 1 else None


_ENDED = frozenset("ZX")
"""States of a process of which only its number and its status are left."""


def _stat(pid: int) -> list[str]:
    """The fields of `/proc/<pid>/stat` from the third on; none when there is no such process. The name in the second
    one may hold anything, parentheses too."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
