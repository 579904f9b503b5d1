"""Which files processes have open, or mapped, or run: what is read now must not be taken away.

By inode, because a path in another mount namespace is another path, and by path, because of a file on an overlay the
kernel tells the device below. Processes of other users cannot be looked into without privileges; how many is told.
"""

import os
from collections.abc import Mapping
from contextlib import suppress

import msgspec

_PROC = "/proc"
_DELETED = " (deleted)"
"""How the kernel marks paths that lead nowhere any more (proc(5))."""


class Opened(msgspec.Struct, frozen=True):
    """What was open when somebody looked; for each file a process that has it."""

    inodes: dict[tuple[int, int], int]
    paths: dict[str, int]
    unseen: int
    """Processes that could not be looked into."""
    above: dict[str, int] = {}
    """The directories above the paths."""

    def holder(self, path: str, inode: tuple[int, int]) -> int | None:
        """A process that has this file open, or this directory, or something in it."""
        return self.inodes.get(inode, self.paths.get(path, self.above.get(path)))


def look() -> Opened:
    """Look at every process that can be seen, but for this one."""
    found = Opened({}, {}, 0)
    unseen = 0
    own = str(os.getpid())
    for name in os.listdir(_PROC):
        if name.isdigit() and name != own:
            unseen += not (_descriptors(name, found) and _maps(name, found))
    return msgspec.structs.replace(found, unseen=unseen, above=_above(found.paths))


def _above(paths: Mapping[str, int]) -> dict[str, int]:
    """What is deleted already lies in no directory any more."""
    found: dict[str, int] = {}
    for path, pid in paths.items():
        above = "" if path.endswith(_DELETED) else path.rpartition("/")[0]
        while above and above not in found:
            found[above] = pid
            above = above.rpartition("/")[0]
    return found


def _descriptors(pid: str, found: Opened) -> bool:
    """Its descriptors, its working directory and its program. Whether they could be seen, or it is gone."""
    directory = f"{_PROC}/{pid}/fd"
    try:
        links = [f"{directory}/{name}" for name in os.listdir(directory)]
    except FileNotFoundError:
        return True
    except OSError:
        return False
    for link in (*links, f"{_PROC}/{pid}/cwd", f"{_PROC}/{pid}/exe"):
        with suppress(OSError):
            status = os.stat(link)
            found.inodes.setdefault((status.st_dev, status.st_ino), int(pid))
            found.paths.setdefault(os.readlink(link), int(pid))
    return True


def _maps(pid: str, found: Opened) -> bool:
    """Field 6 of a line is the path, which is all that counts here (proc(5), maps)."""
    try:
        with open(f"{_PROC}/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
            paths = {line.split(None, 5)[5].rstrip("\n") for line in file if "/" in line}
    except FileNotFoundError:
        return True
    except OSError:
        return False
    for path in paths - found.paths.keys():
        found.paths[path] = int(pid)
        with suppress(OSError):
            status = os.stat(path)
            found.inodes.setdefault((status.st_dev, status.st_ino), int(pid))
    return True
