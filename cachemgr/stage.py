"""The stage: where restored units are made whole, before they get their names by one rename each.

Never a partial unit, never over a live file, nothing at all if a byte is wrong.
"""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from cachemgr import beneath
from cachemgr import layer as layers
from cachemgr.capture import File, Unit
from cachemgr.domains import Target
from cachemgr.domains.leftovers import ORPHANED_SECONDS
from cachemgr.domains.relocation import CannotTravelError
from cachemgr.errors import CorruptError, DeadlineError, StoreError
from cachemgr.observe import STAGE_PREFIX
from cachemgr.places import free, make_directory

_SPACE_MARGIN = 64 << 20
"""Bytes that a restore leaves free: the engine has to write too."""
_RELOCATED_LIMIT = 64 << 20
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Stage:
    """A private directory on the target's file system, in which units are made whole before they get their names.

    It is a `cachemgr.layer.Placer`. It lies beside a directory of ours, so that a missing directory is placed by one
    rename, and inside one that the user chose, which may be a mount point. Nothing in it exists when it is made, and
    only this user may enter it, so paths below it cannot be links that somebody planted. It is held open: whoever may
    write beside it can rename it, and not make us write elsewhere.
    """

    def __init__(self, target: Target, *, launch: str, now_ns: int, expired: Callable[[], bool]) -> None:
        self._domain = target.domain
        self._final = target.directory
        self._parent, name = _where(target)
        self._name, self._private = name, f"{STAGE_PREFIX}{launch}-{name}"
        self._whole_tree = target.ours
        self._times = (0, now_ns)
        self._expired = expired
        self._open: _Open | None = None
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
            source = layers.open_quietly(original, self._opened().tree)  # the original must not look read
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
        tree = self._opened().tree
        directory = file.path.rpartition("/")[0]
        if directory not in self._made:
            self._make(tree, directory)
        return os.open(file.path, _CREATE, file.mode, dir_fd=tree)

    def _opened(self) -> "_Open":
        if self._open is None:
            make_directory(self._parent)
            self._open = _Open(self._parent, self._private)
        return self._open

    def _make(self, tree: int, directory: str) -> None:
        if directory and directory not in self._made:
            self._make(tree, directory.rpartition("/")[0])
            os.mkdir(directory, 0o755, dir_fd=tree)
            self._made.add(directory)

    def _settle(self, descriptor: int, file: File) -> None:
        os.utime(descriptor, ns=self._times if file.mtime_ns is None else (0, file.mtime_ns))

    def require_space(self, size: int, files: int) -> None:
        """Raises StoreError when the target's file system cannot take this many bytes and files."""
        if not files:
            return
        make_directory(self._parent)
        left, inodes = free(self._parent)
        if left < size + _SPACE_MARGIN:
            raise StoreError(
                f"no space on the file system of {self._parent}", hint="free space, or move VLLM_CACHE_ROOT"
            )
        if inodes is not None and inodes < files + 100:
            raise StoreError(
                f"no inodes on the file system of {self._parent}", hint="free inodes, or move VLLM_CACHE_ROOT"
            )

    def publish(self, units: Sequence[Unit]) -> list[Unit]:
        """Give the staged units their names; those that another launch placed meanwhile stay as they are."""
        stage = self._open
        if stage is None:
            return []
        if self._whole_tree and _renamed(("tree", stage.private), (self._name, stage.parent)):
            return list(units)
        final = beneath.enter(self._final)
        try:
            return [unit for unit in units if _publish_unit(unit, stage.tree, final)]
        finally:
            os.close(final)

    def discard(self) -> None:
        """Remove what was not published."""
        if self._open is not None:
            self._open.discard()
            self._open = None


_Named = tuple[str, int]
"""A path, and the open directory that it is relative to."""


class _Open:
    """The directories of a stage, made and held open: the one it lies in, the private one, and the tree in that."""

    def __init__(self, parent: str, name: str) -> None:
        self._path, self._name = f"{parent}/{name}", name
        self.parent = beneath.enter(parent)
        self.private = self.tree = -1
        try:
            self.private = beneath.made(name, self.parent, 0o700)
            self._identity = _own_identity(self.private)
            self.tree = beneath.made("tree", self.private, 0o755)
        except BaseException:
            self._close()
            raise

    def discard(self) -> None:
        with suppress(OSError):
            found = os.stat(self._name, dir_fd=self.parent, follow_symlinks=False)
            if (found.st_dev, found.st_ino) == self._identity:
                shutil.rmtree(self._path, ignore_errors=True)
        self._close()

    def _close(self) -> None:
        for descriptor in (self.parent, self.private, self.tree):
            if descriptor >= 0:
                os.close(descriptor)


def _own_identity(directory: int) -> tuple[int, int]:
    """Device and number of a directory that we just made. Raises StoreError when somebody put another in its place."""
    found = os.fstat(directory)
    if found.st_uid != os.geteuid():
        raise StoreError(f"a directory that was just made belongs to user {found.st_uid}")
    return found.st_dev, found.st_ino


def _publish_unit(unit: Unit, tree: int, final: int) -> bool:
    """One rename for a unit with a directory of its own; name by name for one among others.

    False where the place is taken, or a directory on the way is a symbolic link: what lies behind it is not this cache,
    and no scan sees it. The live directory itself may be one.
    """
    parent, _slash, name = unit.name.rpartition("/")
    try:
        with beneath.inside(final, parent, make=beneath.make_readable) as above:
            if all(file.path.startswith(unit.name + "/") for file in unit.files):
                return _renamed((unit.name, tree), (name, above)) or _filled((unit.name, tree), (name, above))
        taken = [_publish_file(file.path, tree, final) for file in unit.files]
        return all(taken)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def _publish_file(path: str, tree: int, final: int) -> bool:
    parent, _slash, name = path.rpartition("/")
    with beneath.inside(final, parent, make=beneath.make_readable) as above:
        return _claimed((path, tree), (name, above))


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


def _renamed(staged: _Named, final: _Named) -> bool:
    """Rename a directory unless something is there; an empty directory of that name is replaced."""
    try:
        os.rename(staged[0], final[0], src_dir_fd=staged[1], dst_dir_fd=final[1])
    except (FileExistsError, NotADirectoryError):
        return False
    except OSError as error:
        if beneath.there(*final):
            return False
        raise error from None
    return True


def _filled(staged: _Named, final: _Named) -> bool:
    """Move a unit into a directory in which there are only directories: vLLM makes `<entry>/inductor_cache` before it
    looks (0.26-0.33 compilation/decorators.py), and others of its processes may be making it right now, so it must not
    vanish for a moment.

    In the order of names: what an engine looks for first (`rank_0_0/model` after `inductor_cache`, an index after its
    artifacts) comes last.
    """
    if not _has_directories_only(final):
        return False
    with beneath.listed(*staged) as source, beneath.listed(*final) as place:
        for name in sorted(os.listdir(source)):
            if not _is_directory((name, source)):
                _claimed((name, source), (name, place))
            elif not _renamed((name, source), (name, place)):
                _filled((name, source), (name, place))
    return True


def _has_directories_only(place: _Named) -> bool:
    """A link is no directory of this cache."""
    if not _is_directory(place):
        return False
    with beneath.listed(*place) as directory:
        return all(_has_directories_only((name, directory)) for name in os.listdir(directory))


def _is_directory(place: _Named) -> bool:
    return stat.S_ISDIR(os.stat(place[0], dir_fd=place[1], follow_symlinks=False).st_mode)


def _claimed(staged: _Named, final: _Named) -> bool:
    """Give a file its name unless the name is taken: by a link, which cannot replace, where there are links."""
    try:
        os.link(staged[0], final[0], src_dir_fd=staged[1], dst_dir_fd=final[1], follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError:
        if beneath.there(*final):
            return False
        os.rename(staged[0], final[0], src_dir_fd=staged[1], dst_dir_fd=final[1])
        return True
    os.unlink(staged[0], dir_fd=staged[1])
    return True


def _write_all(descriptor: int, data: memoryview) -> None:
    while (written := os.write(descriptor, data)) < len(data):
        data = data[written:]
