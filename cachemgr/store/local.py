"""A store in a directory of this host.

Every object is written aside, flushed to disk, and then given its name by a hard link that fails when the name is
taken: objects are immutable, the first writer wins, and a crash leaves only files below `tmp/`.
"""

import errno
import os
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from cachemgr.capture import is_safe_path
from cachemgr.errors import CacheError, CorruptError, DeniedError, NotFoundError, StoreError
from cachemgr.places import make_directory
from cachemgr.store import Entry

_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
"""What file systems answer that have no hard links (FUSE mounts, some network shares)."""

_SCRATCH = "tmp"
_ATTEMPTS = 100
_ABANDONED_SECONDS = 24 * 3600.0
"""How old an unfinished write must be to have no writer any more, whatever the clock of a file server says."""


class LocalStore:
    """Objects as files below `root`. Nothing is created before the first write."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def read(self, name: str, *, limit: int) -> bytes:
        with self.open(name) as stream:
            try:
                data = stream.read(limit + 1)
            except OSError as error:
                raise self._failed("read", name, error) from None
        if len(data) > limit:
            raise CorruptError(f"`{name}` in {self} has more than {limit} bytes")
        return data

    def has(self, name: str) -> bool:
        try:
            return stat.S_ISREG(os.lstat(self._path(name)).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise self._failed("read", name, error) from None

    def open(self, name: str) -> BinaryIO:
        path = self._path(name)
        try:
            # Without O_NONBLOCK, a pipe that somebody put here would keep us waiting for ever.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"no `{name}` in {self}") from None
        except OSError as error:
            raise self._failed("read", name, error) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise NotFoundError(f"no `{name}` in {self}")
        return os.fdopen(descriptor, "rb")

    def put(self, name: str, data: bytes) -> bool:
        self._path(name)
        aside = self.scratch() / uuid.uuid4().hex
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
        except OSError as error:
            raise self._discarded(aside, name, error) from None
        return self.put_file(name, aside)

    def put_file(self, name: str, path: Path) -> bool:
        target = self._path(name)
        try:
            _flush(path)
            created = _claim(path, target)
        except OSError as error:
            raise self._discarded(path, name, error) from None
        with suppress(FileNotFoundError):
            path.unlink()
        return created

    def refresh(self, name: str) -> bool:
        try:
            os.utime(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise self._failed("refresh", name, error) from None
        return True

    def delete(self, name: str) -> bool:
        path = self._path(name)
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise self._failed("delete", name, error) from None
        self._tidy(path.parent)
        return True

    def scan(self, prefix: str) -> Iterator[Entry]:
        if prefix and not (prefix.endswith("/") and is_safe_path(prefix[:-1])):
            raise StoreError(f"`{prefix}` is no directory of {self}")
        pending = [prefix]
        while pending:
            directory = pending.pop()
            for entry in self._entries(directory):
                if entry.is_dir(follow_symlinks=False):
                    if directory == "" and entry.name == _SCRATCH:
                        continue
                    pending.append(f"{directory}{entry.name}/")
                elif entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield Entry(directory + entry.name, status.st_size, status.st_mtime)

    def scratch(self) -> Path:
        directory = self._root / _SCRATCH
        try:
            make_directory(self._root.parent)
            make_directory(directory, 0o700)
        except OSError as error:
            raise self._failed("write", _SCRATCH, error) from None
        _sweep(directory)
        return directory

    def _entries(self, directory: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._root / directory) as found:
                return [entry for entry in found if not entry.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._failed("list", directory, error) from None

    def _tidy(self, directory: Path) -> None:
        """Remove directories that the last object left, up to the root."""
        with suppress(OSError):
            while directory != self._root:
                directory.rmdir()
                directory = directory.parent

    def _path(self, name: str) -> Path:
        parts = name.split("/")
        # Listings leave out names with a leading dot (what NFS keeps of deleted files) and unfinished writes.
        if not is_safe_path(name) or parts[0] == _SCRATCH or any(part.startswith(".") for part in parts):
            raise StoreError(f"`{name}` cannot be an object of {self}")
        return self._root / name

    def _failed(self, verb: str, name: str, error: OSError) -> CacheError:
        said = f"cannot {verb} `{name}` in {self}: {error.strerror or error}"
        if error.errno in (errno.EACCES, errno.EPERM) and verb in ("read", "list"):
            return DeniedError(said, hint=f"make {self._root} readable for this user")
        return StoreError(said, hint=_hint(error, self._root))

    def _discarded(self, path: Path, name: str, error: OSError) -> CacheError:
        with suppress(OSError):
            path.unlink()
        return self._failed("write", name, error)


def _sweep(directory: Path) -> None:
    """Remove what writers left that were killed."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > _ABANDONED_SECONDS:
                    os.unlink(entry.path)


def _claim(path: Path, target: Path) -> bool:
    """Durably give `path` the name `target` unless it is taken."""
    for attempt in range(_ATTEMPTS):
        try:
            make_directory(target.parent)
            created = _named(path, target)
        except (FileNotFoundError, FileExistsError):
            # Somebody deleted the last object beside it, and its directory with it.
            if attempt == _ATTEMPTS - 1 or not path.exists():
                raise
        else:
            break
    if created:
        with suppress(FileNotFoundError):
            _flush(target.parent)
    return created


def _named(path: Path, target: Path) -> bool:
    try:
        os.link(path, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Names are digests or launch ids, so the worst a lost race costs is equal bytes over equal bytes.
        if target.exists():
            return False
        path.rename(target)
    return True


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hint(error: OSError, root: Path) -> str | None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"free space or inodes on the file system of {root}, or set CACHEMGR_STORE to another"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"make {root} writable for this user, or set CACHEMGR_STORE to a directory that is"
    return None
