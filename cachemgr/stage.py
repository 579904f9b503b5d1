"""The stage: where restored units are made whole, before they get their names by one rename each.

Never a partial unit, never over a live file, nothing at all if a byte is wrong.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from cachemgr import layer as layers
from cachemgr.capture import File, Unit
from cachemgr.domains import Target
from cachemgr.domains.leftovers import ORPHANED_SECONDS
from cachemgr.domains.relocation import CannotTravelError
from cachemgr.errors import CorruptError, DeadlineError, StoreError
from cachemgr.observe import STAGE_PREFIX
from cachemgr.places import make_directory

_SPACE_MARGIN = 64 << 20
"""Bytes that a restore leaves free: the engine has to write too."""
_RELOCATED_LIMIT = 64 << 20
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Stage:
    """A private directory on the target's file system, in which units are made whole before they get their names.

    It is a `cachemgr.layer.Placer`. It lies beside a directory of ours, so that a missing directory is placed by one
    rename, and inside one that the user chose, which may be a mount point. Nothing in it exists when it is made, and
    only this user may enter it, so paths below it cannot be links that somebody planted.
    """

    def __init__(self, target: Target, *, launch: str, now_ns: int, expired: Callable[[], bool]) -> None:
        self._domain = target.domain
        self._final = target.directory
        self._parent, name = _where(target)
        self._private = f"{self._parent}/{STAGE_PREFIX}{launch}-{name}"
        self._root = f"{self._private}/tree"
        self._whole_tree = target.ours
        self._times = (0, now_ns)
        self._expired = expired
        self._made: set[str] = set()

    def whole(self, file: File, data: memoryview) -> None:
        self._write(file, (self._relocated(file, data),))

    def parts(self, file: File, parts: Iterator[memoryview]) -> None:
        if not file.relocated:
            self._write(file, parts)
        elif file.size <= _RELOCATED_LIMIT:
            self.whole(file, memoryview(b"".join(parts)))
        else:
            raise CorruptError(f"`{file.path}` is too large to be relocated")

    def _relocated(self, file: File, data: memoryview) -> memoryview:
        relocation = self._domain.relocation_of(file.path) if file.relocated else None
        if relocation is None:
            return data
        own = f"{self._final}/{file.path}".rpartition("/")[0]
        try:
            return memoryview(relocation.attach(bytes(data), own))
        except (CannotTravelError, ValueError, RecursionError) as error:
            raise CorruptError(f"`{file.path}` cannot be relocated: it {error}") from None

    def _write(self, file: File, parts: Iterable[memoryview]) -> None:
        descriptor = self._create(file)
        try:
            for part in parts:
                _write_all(descriptor, part)
            self._settle(descriptor, file)
        finally:
            os.close(descriptor)

    def link(self, file: File, original: str) -> None:
        descriptor = self._create(file)
        try:
            source = layers.open_quietly(f"{self._root}/{original}")  # the original must not look read
            try:
                while os.sendfile(descriptor, source, None, 1 << 30):
                    pass
            finally:
                os.close(source)
            self._settle(descriptor, file)
        finally:
            os.close(descriptor)

    def _create(self, file: File) -> int:
        if self._expired():
            raise DeadlineError("the deadline has passed")
        path = f"{self._root}/{file.path}"
        directory = path.rpartition("/")[0]
        if directory not in self._made:
            self._enter(directory)
        return os.open(path, _CREATE, file.mode)

    def _enter(self, directory: str) -> None:
        if not self._made:
            make_directory(self._parent)
            os.mkdir(self._private, 0o700)
            os.mkdir(self._root, 0o755)
            self._made.add(self._root)
        if directory not in self._made:
            self._enter(directory.rpartition("/")[0])
            os.mkdir(directory, 0o755)
            self._made.add(directory)

    def _settle(self, descriptor: int, file: File) -> None:
        os.utime(descriptor, ns=self._times if file.mtime_ns is None else (0, file.mtime_ns))

    def require_space(self, size: int, files: int) -> None:
        """Raises StoreError when the target's file system cannot take this many bytes and files."""
        if not files:
            return
        make_directory(self._parent)
        space = os.statvfs(self._parent)
        if space.f_bavail * space.f_frsize < size + _SPACE_MARGIN:
            raise StoreError(
                f"no space on the file system of {self._parent}", hint="free space, or move VLLM_CACHE_ROOT"
            )
        if space.f_files and space.f_favail < files + 100:
            raise StoreError(
                f"no inodes on the file system of {self._parent}", hint="free inodes, or move VLLM_CACHE_ROOT"
            )

    def publish(self, units: Sequence[Unit]) -> list[Unit]:
        """Give the staged units their names; those that another launch placed meanwhile stay as they are."""
        if not self._made:
            return []
        if self._whole_tree and _renamed(self._root, self._final):
            return list(units)
        return [unit for unit in units if self._publish_unit(unit)]

    def _publish_unit(self, unit: Unit) -> bool:
        """One rename for a unit with a directory of its own; name by name for one among others."""
        staged, final = f"{self._root}/{unit.name}", f"{self._final}/{unit.name}"
        if self._leads_out(unit.name.rpartition("/")[0]):
            return False
        make_directory(final.rpartition("/")[0])
        if all(file.path.startswith(unit.name + "/") for file in unit.files):
            return _renamed(staged, final)
        taken = [_claimed(f"{self._root}/{file.path}", f"{self._final}/{file.path}") for file in unit.files]
        return all(taken)

    def _leads_out(self, path: str) -> bool:
        """Whether a directory on the way is a symbolic link: what lies behind it is not this cache, and no scan sees
        it. The live directory itself may be one."""
        while path and not os.path.islink(f"{self._final}/{path}"):
            path = path.rpartition("/")[0]
        return bool(path)

    def discard(self) -> None:
        """Remove what was not published."""
        if self._made:
            shutil.rmtree(self._private, ignore_errors=True)


def remove_abandoned(target: Target, *, now_ns: int) -> None:
    """Remove the stages of launches that were killed while they restored: nothing in them was ever given a name."""
    parent, name = _where(target)
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            is_stage = entry.name.startswith(STAGE_PREFIX) and entry.name.endswith(f"-{name}")
            if is_stage and entry.is_dir(follow_symlinks=False) and os.path.isdir(f"{entry.path}/tree"):
                age = now_ns - entry.stat(follow_symlinks=False).st_mtime_ns
                if age > ORPHANED_SECONDS * 1e9:
                    shutil.rmtree(entry.path, ignore_errors=True)


def _where(target: Target) -> tuple[str, str]:
    """The directory that stages for a target lie in, and how their names end."""
    parent, name = os.path.split(target.directory)
    return parent if target.ours else target.directory, name


def _renamed(staged: str, final: str) -> bool:
    """Rename a directory unless something is there; an empty directory of that name is replaced."""
    try:
        os.rename(staged, final)
    except (FileExistsError, NotADirectoryError):
        return False
    except OSError as error:
        if os.path.isdir(final):
            return False
        raise error from None
    return True


def _claimed(staged: str, final: str) -> bool:
    """Give a file its name unless the name is taken: by a link, which cannot replace, where there are links."""
    try:
        os.link(staged, final)
    except FileExistsError:
        return False
    except OSError:
        if os.path.lexists(final):
            return False
        os.rename(staged, final)
        return True
    os.unlink(staged)
    return True


def _write_all(descriptor: int, data: memoryview) -> None:
    while (written := os.write(descriptor, data)) < len(data):
        data = data[written:]
