"""Which process somebody is, told so that a later process of the same number, another container's or another host's is
not taken for it."""

import os
import re
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
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else None


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
    """None when it is gone. The name in the second field may hold anything, parentheses too."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[1])
    except OSError:
        return None


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
