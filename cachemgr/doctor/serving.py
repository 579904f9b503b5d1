"""What the serving user may do: asked of the kernel for ourselves, and worked out from owners and modes for others."""

import grp
import os
import pwd
import stat


def may_write(directory: str, uid: int) -> bool:
    """Whether a user can make files in a directory."""
    if uid == os.geteuid():
        return os.access(directory, os.W_OK | os.X_OK)
    try:
        if os.statvfs(directory).f_flag & os.ST_RDONLY:
            return False
    except OSError:
        return False
    return missing_way(directory, uid) == ""


def missing_way(directory: str, uid: int) -> str:
    """The first directory on the way to this one that a user cannot enter, or this one if he cannot write it; nothing
    where he can do both."""
    if uid == 0:
        return ""
    groups = _groups(uid)
    place = "/"
    for name in ["", *os.path.realpath(directory).strip("/").split("/")]:
        place = os.path.join(place, name)
        last = place == os.path.realpath(directory)
        if not _allows(os.stat(place), uid, groups, 0o3 if last else 0o1):
            return place
    return ""


def _allows(status: os.stat_result, uid: int, groups: set[int], wanted: int) -> bool:
    """By the class that counts for this user: owner before group before others (path_resolution(7))."""
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == uid:
        mode >>= 6
    elif status.st_gid in groups:
        mode >>= 3
    return mode & wanted == wanted


def _groups(uid: int) -> set[int]:
    """Of a user without a name nobody knows more than what containers do: its own number, and the group of root."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return {uid, 0}
    return {user.pw_gid, *(group.gr_gid for group in grp.getgrall() if user.pw_name in group.gr_mem)}
