"""Taking things away from live directories, as a plan says, under the eyes of engines that may start any time."""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from cachemgr import beneath, hold, open_files
from cachemgr.beneath import make_readable
from cachemgr.hold import Hold, Holder
from cachemgr.live import sharers
from cachemgr.observe import STAGE_PREFIX
from cachemgr.open_files import Opened
from cachemgr.process import this_process
from cachemgr.prune.limits import Kept
from cachemgr.prune.live import Doomed, LivePlan
from cachemgr.prune.survey import survey, take_away

_SIGHT = "prune"
"""Equal to that of no launch, so that one which starts now keeps away from what all share."""


def carry_out(plan: LivePlan, *, prune: str, now: float) -> LivePlan:
    """Do what a plan says; what is in use by now stays. What was done, as the plan that says only that.

    Args:
        prune: a name for this prune that no other has.
        now: seconds since the epoch.
    """
    deed = _Deed(prune, now)
    with deed.holding(plan.roots) as used:
        done = deed.left_overs([doomed for doomed in plan.goners if doomed.kind == "left-over"])
        done += deed.take([doomed for doomed in plan.goners if doomed.kind != "left-over"], used)
    return msgspec.structs.replace(
        plan,
        goners=tuple(done),
        kept=(*plan.kept, *deed.kept),
        bytes=sum(each.bytes for each in done),
        files=sum(each.files for each in done),
    )


class _Deed:
    def __init__(self, prune: str, now: float) -> None:
        self._prune, self._now = prune, now
        self._aside = f"{STAGE_PREFIX}gone-{prune}"
        self.kept: list[Kept] = []

    @contextmanager
    def holding(self, roots: Sequence[str]) -> Iterator[frozenset[str]]:
        """Hold what launches share on these roots; the roots on which launches use it already are told."""
        held, used = [], set()
        for root in roots:
            if os.path.isdir(f"{root}/cachemgr") or os.path.isdir(root):
                holder = Holder(self._prune, "compiling", this_process(), _SIGHT)
                with suppress(OSError):
                    held.append((root, Hold.take(f"{root}/cachemgr/{self._aside}", holder)))
                if sharers(root, self._prune, now=self._now):
                    used.add(root)
        try:
            yield frozenset(used)
        finally:
            for root, each in held:
                each.release()
                take_away(f"{root}/cachemgr", self._aside)

    def left_overs(self, left: Sequence[Doomed]) -> list[Doomed]:
        """What no engine looks at, so that nothing has to be out of sight first."""
        opened = open_files.look() if left else None
        return [each for each in left if opened and _gone(each, opened)]

    def take(self, things: Sequence[Doomed], used: frozenset[str]) -> list[Doomed]:
        """Directories and units: renamed, looked at once more, and then gone or back."""
        if not things:
            return []
        opened = open_files.look()
        renamed = [(doomed, paths) for doomed in things if (paths := self._renamed(doomed, opened, used))]
        opened = open_files.look()
        done = [doomed for doomed, paths in renamed if not self._returned(doomed, paths, opened)]
        for place in {doomed.place for doomed, _paths in renamed}:
            take_away(place, self._aside)
        return done

    def _renamed(self, doomed: Doomed, opened: Opened, used: frozenset[str]) -> list[str]:
        """The paths that were renamed; none where somebody uses the thing by now."""
        paths = _paths(doomed)
        user = self._user(doomed, used) or _holder(opened, doomed.place, paths)
        if user is not None:
            self._keep(doomed, user)
            return []
        moved = [path for path in paths if _moved(doomed.place, path, f"{self._aside}/{path}")]
        if len(moved) < len(paths):
            self._put_back(doomed, moved)
            self._keep(doomed, "it cannot be renamed")
            return []
        return moved

    def _user(self, doomed: Doomed, used: frozenset[str]) -> str | None:
        """The launch that uses it. The directory of a key is held by us from now on, as long as it is there."""
        if doomed.kind == "unit":
            return "a launch uses what is shared there" if doomed.place.startswith(_below(used)) else None
        path = f"{doomed.place}/{doomed.path}"
        try:
            status = os.stat(path)
            Hold.take(path, Holder(self._prune, "compiling", this_process()))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # by which others tell its last use
        except OSError as error:
            return f"it cannot be held: {error.strerror}"
        others = hold.others(path, self._prune, now=self._now)
        return f"in use by launch {others[0].launch}" if others else None

    def _returned(self, doomed: Doomed, paths: Sequence[str], opened: Opened) -> bool:
        """Whether somebody had opened something before it was renamed, so that it went back to its place."""
        user = _holder(opened, doomed.place, [f"{self._aside}/{path}" for path in paths])
        if user is None or not self._put_back(doomed, paths):
            return False
        self._keep(doomed, user)
        return True

    def _put_back(self, doomed: Doomed, paths: Sequence[str]) -> bool:
        back = [path for path in paths if _moved(doomed.place, f"{self._aside}/{path}", path)]
        return len(back) == len(paths)

    def _keep(self, doomed: Doomed, why: str) -> None:
        """It stays, and we do not hold it any more."""
        path = f"{doomed.place}/{doomed.path}"
        if doomed.kind == "directory":
            with suppress(OSError):
                status = os.stat(path)
                os.unlink(f"{path}/{hold.FOLDER}/{self._prune}.json")
                with suppress(OSError):
                    os.rmdir(f"{path}/{hold.FOLDER}")
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        self.kept.append(Kept(f"{doomed.place}/{doomed.path}", doomed.why, why))


def _gone(left: Doomed, opened: Opened) -> bool:
    return _holder(opened, left.place, [left.path]) is None and take_away(left.place, left.path)


def _below(roots: Collection[str]) -> tuple[str, ...]:
    return tuple(f"{root}/" for root in roots)


def _moved(place: str, path: str, to: str) -> bool:
    """Rename below `place`, through no symbolic link, and never over something."""
    try:
        root = beneath.enter(place)
    except OSError:
        return False
    try:
        above, _slash, name = path.rpartition("/")
        beside, _slash, target = to.rpartition("/")
        with beneath.inside(root, above) as source, beneath.inside(root, beside, make=make_readable) as aside:
            if beneath.there(target, aside):
                return False
            os.rename(name, target, src_dir_fd=source, dst_dir_fd=aside)
    except OSError:
        return False
    finally:
        os.close(root)
    return True


def _paths(doomed: Doomed) -> list[str]:
    """The thing itself where it is a directory or a file; where it is the beginning of the names of some, those."""
    path = f"{doomed.place}/{doomed.path}"
    if os.path.lexists(path):
        return [doomed.path]
    above, _slash, stem = path.rpartition("/")
    with suppress(OSError):
        names = sorted(name for name in os.listdir(above) if name.partition(".")[0] == stem)
        return [f"{above}/{name}".removeprefix(f"{doomed.place}/") for name in names]
    return []


def _holder(opened: Opened, place: str, paths: Sequence[str]) -> str | None:
    """Which process has one of these, or something in them, open.

    Records of launches do not count. Our own is younger than the look, so it may have the inode of what somebody had
    open then and has deleted since.
    """
    real = os.path.realpath(place)
    for path in paths:
        files = [file for file in survey(f"{place}/{path}").files if not hold.is_record(file.path)]
        inodes = [(f"{path}/{file.path}", file.inode) for file in files]
        with suppress(OSError):
            status = os.stat(f"{place}/{path}", follow_symlinks=False)
            inodes.append((path, (status.st_dev, status.st_ino)))
        for name, inode in inodes:
            pid = opened.holder(f"{real}/{name}", inode)
            if pid is not None:
                return f"process {pid} has {name} open"
    return None
