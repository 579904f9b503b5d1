"""A store in a directory of this host.

Every object is written aside, flushed to disk, and then given its name by a hard link that fails when the name is
taken: objects are immutable, the first writer wins, and a crash leaves only files below `tmp/`. The root may be a
symbolic link; what lies below it is reached through none.

Who may enter the root may read what is in it, whatever the umask of a writer is; and where the group of the root may
write there, it may write below, too. Everybody never may.
"""

import errno
import io
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

from cachemgr import beneath
from cachemgr.bounded import Begun
from cachemgr.capture import is_safe_path
from cachemgr.errors import CacheError, CorruptError, DeniedError, NotFoundError, StoreError
from cachemgr.places import make_directory
from cachemgr.store import Entry, Source
from cachemgr.store.names import SCRATCH, is_name, is_prefix
from cachemgr.store.scratch import sweep

_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
"""What file systems answer that have no hard links (FUSE mounts, some network shares)."""

_ATTEMPTS = 100
_PIECE_BYTES = 2 << 20
"""What is written at a time, while it is hashed and more of it is fetched. Larger pieces save a little processor time,
and on a busy machine each step waits longer for the others."""
_FLUSH_BYTES = 32 << 20


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
            with self._beside(name) as (directory, base):
                return stat.S_ISREG(os.stat(base, dir_fd=directory, follow_symlinks=False).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise self._failed("read", name, error) from None

    def open(self, name: str) -> BinaryIO:
        try:
            with self._beside(name) as (directory, base):
                # Without O_NONBLOCK, a pipe that somebody put here would keep us waiting for ever.
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                descriptor = os.open(base, flags, dir_fd=directory)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"no `{name}` in {self}") from None
        except OSError as error:
            raise self._failed("read", name, error) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise NotFoundError(f"no `{name}` in {self}")
        return os.fdopen(descriptor, "rb")

    def slice(self, name: str, start: int, size: int) -> bytes:
        with self.open(name) as stream:
            try:
                stream.seek(start)
                return stream.read(size)
            except OSError as error:
                raise self._failed("read", name, error) from None

    def put(self, name: str, data: bytes) -> bool:
        return self.put_stream(name, io.BytesIO(data))

    def put_stream(self, name: str, source: Source) -> bool:
        self._check(name)
        aside = self.scratch() / uuid.uuid4().hex
        try:
            self._spool(name, aside, source)
        except BaseException:  # what reading raises is the caller's, an interrupt as well
            with suppress(OSError):
                aside.unlink()
            raise
        return self.put_file(name, aside)

    def put_file(self, name: str, path: Path) -> bool:
        self._check(name)
        try:
            _flush(path, mode=self._mode() & 0o664)
            created = self._claim(path, name)
        except OSError as error:
            raise self._discarded(path, name, error) from None
        with suppress(FileNotFoundError):
            path.unlink()
        return created

    def refresh(self, name: str) -> bool:
        try:
            with self._beside(name) as (directory, base):
                os.utime(base, dir_fd=directory, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise self._failed("refresh", name, error) from None
        return True

    def delete(self, name: str) -> bool:
        try:
            with self._beside(name) as (directory, base):
                os.unlink(base, dir_fd=directory)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except IsADirectoryError:
            raise self._failed("delete", name, _in_the_way()) from None
        except OSError as error:
            raise self._failed("delete", name, error) from None
        self._tidy(name.rpartition("/")[0])
        return True

    def scan(self, prefix: str) -> Iterator[Entry]:
        if not is_prefix(prefix):
            raise StoreError(f"`{prefix}` is no directory of {self}")
        pending = [prefix]
        while pending:
            directory = pending.pop()
            for entry in self._entries(directory):
                if entry.is_dir(follow_symlinks=False):
                    if directory == "" and entry.name == SCRATCH:
                        continue
                    pending.append(f"{directory}{entry.name}/")
                elif entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield Entry(directory + entry.name, status.st_size, status.st_mtime)

    def scratch(self) -> Path:
        directory = scratch_of(self._root)
        try:
            make_directory(self._root.parent)
            make_directory(self._root, 0o700)
            root = beneath.enter(self._root)
            try:
                with beneath.inside(root, SCRATCH, make=self._make) as above, suppress(FileExistsError):
                    os.mkdir(directory.name, 0o700, dir_fd=above)
            finally:
                os.close(root)
            sweep(directory)
        except OSError as error:
            raise self._failed("write", SCRATCH, error) from None
        return directory

    def _entries(self, directory: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._root / directory) as found:
                # What nobody can ask for by its name is no object, whoever put it there.
                return [entry for entry in found if not entry.name.startswith(".") and is_safe_path(entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._failed("list", directory, error) from None

    def _tidy(self, directory: str) -> None:
        """Remove directories that the last object left, up to the root."""
        with suppress(OSError):
            while directory:
                with self._beside(directory) as (above, base):
                    os.rmdir(base, dir_fd=above)
                directory = directory.rpartition("/")[0]

    def _mode(self) -> int:
        """Of directories below the root."""
        return 0o755 | os.stat(self._root).st_mode & stat.S_IWGRP

    def _make(self, name: str, above: int) -> None:
        os.mkdir(name, 0o700, dir_fd=above)
        with beneath.listed(name, above) as made:
            kept = os.fstat(made).st_mode & stat.S_ISGID  # handed down by the directory above
            os.fchmod(made, self._mode() | kept)

    @contextmanager
    def _beside(self, name: str, *, make: beneath.Maker | None = None) -> Iterator[tuple[int, str]]:
        """The directory that an object lies in, opened, and its name in there."""
        self._check(name)
        parent, _slash, base = name.rpartition("/")
        root = beneath.enter(self._root)
        try:
            with beneath.inside(root, parent, make=make) as directory:
                yield directory, base
        finally:
            os.close(root)

    def _claim(self, path: Path, name: str) -> bool:
        """Durably give `path` the name of an object unless it is taken."""
        for attempt in range(_ATTEMPTS):
            try:
                with self._beside(name, make=self._make) as (directory, base):
                    created = _named(path, directory, base)
                    if created:
                        _flush(".", directory=directory)
            except FileNotFoundError:
                # Somebody deleted the last object beside it, and its directory with it.
                if attempt == _ATTEMPTS - 1 or not path.exists():
                    raise
            else:
                return created
        raise AssertionError("the last attempt returns or raises")

    def _check(self, name: str) -> None:
        if not is_name(name):
            raise StoreError(f"`{name}` cannot be an object of {self}")

    def _failed(self, verb: str, name: str, error: OSError) -> CacheError:
        if error.errno == errno.ELOOP:
            # One object of many: that somebody put a link in its place must not hide the others.
            kind = DeniedError if verb == "read" else StoreError
            return kind(f"cannot {verb} `{name}` in {self}: a symbolic link is in the way", hint="remove the link")
        said = f"cannot {verb} `{name}` in {self}: {error.strerror or error}"
        if error.errno == errno.EEXIST:
            return StoreError(said, hint=f"remove {self._root / name}")
        if error.errno in (errno.EACCES, errno.EPERM) and verb in ("read", "list"):
            return DeniedError(said, hint=f"make {self._root} readable for this user")
        return StoreError(said, hint=_hint(error, self._root))

    def _spool(self, name: str, aside: Path, source: Source) -> None:
        with self._writing(name):
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        target, flushed = os.fdopen(descriptor, "wb"), _Flushed(descriptor)
        try:
            while piece := source.read(_PIECE_BYTES):
                with self._writing(name):
                    target.write(piece)
                    flushed.wrote(len(piece))
            with self._writing(name):
                target.flush()
                flushed.finish()
        finally:
            flushed.settle()
            with self._writing(name):  # what could not be flushed is tried again here
                target.close()

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed("write", name, error) from None

    def _discarded(self, path: Path, name: str, error: OSError) -> CacheError:
        with suppress(OSError):
            path.unlink()
        return self._failed("write", name, error)


def scratch_of(root: Path) -> Path:
    """Where this user's unfinished writes lie in the store in `root`."""
    return root / SCRATCH / str(os.geteuid())


class _Flushed:
    """Sends what is written of a large file on to the disk while more of it comes, so that the flush at its end, which
    durability needs, finds little left. An error is told to one flush only (fsync(2)), so what these say counts."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._unsent = descriptor, 0
        self._under_way: Begun[None] | None = None

    def wrote(self, count: int) -> None:
        """So many bytes more are written. Raises OSError."""
        self._unsent += count
        if self._unsent >= _FLUSH_BYTES:
            self.finish()
            self._unsent = 0
            self._under_way = Begun("flushing", lambda: os.fdatasync(self._descriptor))

    def finish(self) -> None:
        """Wait for what is under way. Raises OSError."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def settle(self) -> None:
        """Wait for what is under way, because its descriptor is closed next."""
        with suppress(OSError):
            self.finish()


def _named(path: Path, directory: int, base: str) -> bool:
    try:
        os.link(path, base, dst_dir_fd=directory, follow_symlinks=False)
    except FileExistsError:
        return _is_taken(base, directory)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Names are digests or launch ids, so the worst a lost race costs is equal bytes over equal bytes.
        if beneath.there(base, directory):
            return _is_taken(base, directory)
        os.rename(path, base, dst_dir_fd=directory)
    return True


def _is_taken(base: str, directory: int) -> Literal[False]:
    """By an object: to those who publish, what is no file (a directory, a pipe, a link) must not count as theirs."""
    if not stat.S_ISREG(os.stat(base, dir_fd=directory, follow_symlinks=False).st_mode):
        raise _in_the_way()
    return False


def _in_the_way() -> OSError:
    return FileExistsError(errno.EEXIST, "something that is no file is in the way")


def _flush(path: str | Path, *, mode: int | None = None, directory: int | None = None) -> None:
    """Make a file or directory durable, with this mode."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    try:
        if mode is not None:
            os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hint(error: OSError, root: Path) -> str | None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"free space or inodes on the file system of {root}, or set CACHEMGR_STORE to another"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"make {root} writable for this user, or set CACHEMGR_STORE to a directory that is"
    return None
