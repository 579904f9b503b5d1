"""Stores for tests: one in memory, and plain wrappers that fail, lie or take notes. No mock library anywhere.

A wrapper forwards everything to a real store, so what is tested is the code above it and its order of calls.
"""

import ctypes
import errno
import io
import os
import platform
import signal
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from cachemgr.capture import is_safe_path
from cachemgr.errors import CorruptError, NotFoundError, StoreError
from cachemgr.store import Entry, Source, Store


class MemoryStore:
    """Objects in a dictionary; only the scratch directory is on disk."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    def __str__(self) -> str:
        return f"memory:{self._scratch.name}"

    def read(self, name: str, *, limit: int) -> bytes:
        data = self._get(name)
        if len(data) > limit:
            raise CorruptError(f"`{name}` in {self} has more than {limit} bytes")
        return data

    def has(self, name: str) -> bool:
        return self._checked(name) in self._objects

    def open(self, name: str) -> BinaryIO:
        return io.BytesIO(self._get(name))

    def slice(self, name: str, start: int, size: int) -> bytes:
        return self._get(name)[start : start + size]

    def put(self, name: str, data: bytes) -> bool:
        self._checked(name)
        with self._lock:
            if name in self._objects:
                return False
            self._objects[name] = (bytes(data), time.time())
            return True

    def put_file(self, name: str, path: Path) -> bool:
        try:
            data = path.read_bytes()
            path.unlink()
        except OSError as error:
            raise StoreError(f"cannot write `{name}` in {self}: {error.strerror}") from None
        return self.put(name, data)

    def put_stream(self, name: str, source: Source) -> bool:
        return self.put(name, b"".join(iter(lambda: source.read(1 << 16), b"")))

    def refresh(self, name: str) -> bool:
        return self.set_modified(name, time.time())

    def set_modified(self, name: str, modified: float) -> bool:
        with self._lock:
            found = self._objects.get(self._checked(name))
            if found is not None:
                self._objects[name] = (found[0], modified)
        return found is not None

    def delete(self, name: str) -> bool:
        with self._lock:
            return self._objects.pop(self._checked(name), None) is not None

    def scan(self, prefix: str) -> Iterator[Entry]:
        if prefix:
            self._checked(prefix.removesuffix("/"))
            if not prefix.endswith("/"):
                raise StoreError(f"`{prefix}` is no directory of {self}")
        for name, (data, modified) in list(self._objects.items()):
            if name.startswith(prefix):
                yield Entry(name, len(data), modified)

    def scratch(self) -> Path:
        self._scratch.mkdir(parents=True, exist_ok=True)
        return self._scratch

    def _get(self, name: str) -> bytes:
        found = self._objects.get(self._checked(name))
        if found is None:
            raise NotFoundError(f"no `{name}` in {self}")
        return found[0]

    def _checked(self, name: str) -> str:
        if not is_safe_path(name) or any(part.startswith(".") for part in name.split("/")):
            raise StoreError(f"`{name}` cannot be an object of {self}")
        return name


class Wrapper:
    """Forwards everything; subclasses change one thing."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def __str__(self) -> str:
        return str(self.inner)

    def read(self, name: str, *, limit: int) -> bytes:
        return self.inner.read(name, limit=limit)

    def has(self, name: str) -> bool:
        return self.inner.has(name)

    def open(self, name: str) -> BinaryIO:
        return self.inner.open(name)

    def slice(self, name: str, start: int, size: int) -> bytes:
        return self.inner.slice(name, start, size)

    def put(self, name: str, data: bytes) -> bool:
        return self.inner.put(name, data)

    def put_file(self, name: str, path: Path) -> bool:
        return self.inner.put_file(name, path)

    def put_stream(self, name: str, source: Source) -> bool:
        return self.inner.put_stream(name, source)

    def refresh(self, name: str) -> bool:
        return self.inner.refresh(name)

    def delete(self, name: str) -> bool:
        return self.inner.delete(name)

    def scan(self, prefix: str) -> Iterator[Entry]:
        return self.inner.scan(prefix)

    def scratch(self) -> Path:
        return self.inner.scratch()


class Recording(Wrapper):
    """Takes notes: `calls` has each verb and name in order."""

    WRITES = frozenset({"put", "put_file", "put_stream", "refresh", "delete"})

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []

    def writes(self) -> list[tuple[str, str]]:
        """The calls that change something."""
        return [call for call in self.calls if call[0] in self.WRITES]

    def opened(self) -> list[str]:
        """The objects whose bytes were asked for."""
        return [name for verb, name in self.calls if verb in ("open", "read")]

    def read(self, name: str, *, limit: int) -> bytes:
        self.calls.append(("read", name))
        return super().read(name, limit=limit)

    def has(self, name: str) -> bool:
        self.calls.append(("has", name))
        return super().has(name)

    def open(self, name: str) -> BinaryIO:
        self.calls.append(("open", name))
        return super().open(name)

    def put(self, name: str, data: bytes) -> bool:
        self.calls.append(("put", name))
        return super().put(name, data)

    def put_file(self, name: str, path: Path) -> bool:
        self.calls.append(("put_file", name))
        return super().put_file(name, path)

    def put_stream(self, name: str, source: Source) -> bool:
        self.calls.append(("put_stream", name))
        return super().put_stream(name, source)

    def refresh(self, name: str) -> bool:
        self.calls.append(("refresh", name))
        return super().refresh(name)

    def delete(self, name: str) -> bool:
        self.calls.append(("delete", name))
        return super().delete(name)

    def scan(self, prefix: str) -> Iterator[Entry]:
        self.calls.append(("scan", prefix))
        return super().scan(prefix)


class Faulty(Wrapper):
    """Lets `fail_after` writes through and fails from then on. With `late`, the first failing write takes effect before
    its error is told, as when a network drops the answer."""

    def __init__(self, inner: Store, *, fail_after: int, late: bool = False) -> None:
        super().__init__(inner)
        self._left = fail_after
        self._late = late

    @property
    def failed(self) -> bool:
        """Whether a write was refused."""
        return self._left < 0

    def _fails(self) -> bool:
        self._left -= 1
        return self._left < 0

    def _error(self, name: str) -> StoreError:
        return StoreError(f"cannot write `{name}` in {self}: the test said so")

    def put(self, name: str, data: bytes) -> bool:
        if self._fails():
            if self._late and self._left == -1:
                super().put(name, data)
            raise self._error(name)
        return super().put(name, data)

    def put_file(self, name: str, path: Path) -> bool:
        if self._fails():
            if self._late and self._left == -1:
                super().put_file(name, path)
            raise self._error(name)
        return super().put_file(name, path)

    def put_stream(self, name: str, source: Source) -> bool:
        if self._fails():
            if self._late and self._left == -1:
                super().put_stream(name, source)
            raise self._error(name)
        return super().put_stream(name, source)

    def refresh(self, name: str) -> bool:
        if self._fails():
            raise self._error(name)
        return super().refresh(name)

    def delete(self, name: str) -> bool:
        if self._fails():
            if self._late and self._left == -1:
                super().delete(name)
            raise self._error(name)
        return super().delete(name)


class Dying(Wrapper):
    """Lets so many writes through and kills its process, uncatchably, before the next."""

    def __init__(self, inner: Store, *, after: int) -> None:
        super().__init__(inner)
        self._left = after

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def put(self, name: str, data: bytes) -> bool:
        self._count()
        return super().put(name, data)

    def put_file(self, name: str, path: Path) -> bool:
        self._count()
        return super().put_file(name, path)

    def put_stream(self, name: str, source: Source) -> bool:
        self._count()
        return super().put_stream(name, source)

    def delete(self, name: str) -> bool:
        self._count()
        return super().delete(name)


class Unreadable(Wrapper):
    """Fails to read what lies below `prefix`: a failure, which is not absence."""

    def __init__(self, inner: Store, prefix: str) -> None:
        super().__init__(inner)
        self._prefix = prefix

    def _check(self, name: str) -> None:
        if name.startswith(self._prefix):
            raise StoreError(f"cannot read `{name}` in {self}: the test said so")

    def read(self, name: str, *, limit: int) -> bytes:
        self._check(name)
        return super().read(name, limit=limit)

    def slice(self, name: str, start: int, size: int) -> bytes:
        self._check(name)
        return super().slice(name, start, size)

    def open(self, name: str) -> BinaryIO:
        self._check(name)
        return super().open(name)


class Breaking(Wrapper):
    """Opens what lies below `prefix`, hands out so many pieces of it, and then fails as a dead file server does."""

    def __init__(self, inner: Store, prefix: str, *, after: int) -> None:
        super().__init__(inner)
        self._prefix, self._after = prefix, after

    def open(self, name: str) -> BinaryIO:
        with super().open(name) as stream:
            data = stream.read()
        return _BreakingStream(data, self._after) if name.startswith(self._prefix) else io.BytesIO(data)


class _BreakingStream(io.BytesIO):
    def __init__(self, data: bytes, left: int) -> None:
        super().__init__(data)
        self._left = left

    def read(self, size: int | None = -1) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(size)


class Corrupting(Wrapper):
    """Hands out objects below `prefix` with other bytes: one bit flipped at `at` (a share of the length), or cut off
    there."""

    def __init__(self, inner: Store, prefix: str, *, at: float = 0.5, cut: bool = False) -> None:
        super().__init__(inner)
        self._prefix, self._at, self._cut = prefix, at, cut

    def _damaged(self, name: str, data: bytes) -> bytes:
        if not name.startswith(self._prefix) or not data:
            return data
        at = min(int(len(data) * self._at), len(data) - 1)
        return data[:at] if self._cut else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    def read(self, name: str, *, limit: int) -> bytes:
        return self._damaged(name, super().read(name, limit=limit))

    def open(self, name: str) -> BinaryIO:
        with super().open(name) as stream:
            return io.BytesIO(self._damaged(name, stream.read()))


class ListOnce(Wrapper):
    """A listing that is asked for twice is a bug where listings cost money and disagree with each other."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._listed: set[str] = set()

    def scan(self, prefix: str) -> Iterator[Entry]:
        assert prefix not in self._listed, f"`{prefix}` is listed a second time"
        self._listed.add(prefix)
        return super().scan(prefix)


class Slow(Wrapper):
    """Thinks a while before each answer, as a busy file server does."""

    def __init__(self, inner: Store, *, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    def read(self, name: str, *, limit: int) -> bytes:
        time.sleep(self._seconds)
        return super().read(name, limit=limit)

    def has(self, name: str) -> bool:
        time.sleep(self._seconds)
        return super().has(name)

    def open(self, name: str) -> BinaryIO:
        time.sleep(self._seconds)
        return super().open(name)

    def put(self, name: str, data: bytes) -> bool:
        time.sleep(self._seconds)
        return super().put(name, data)

    def put_file(self, name: str, path: Path) -> bool:
        time.sleep(self._seconds)
        return super().put_file(name, path)

    def put_stream(self, name: str, source: Source) -> bool:
        time.sleep(self._seconds)
        return super().put_stream(name, source)

    def scan(self, prefix: str) -> Iterator[Entry]:
        time.sleep(self._seconds)
        return super().scan(prefix)


class Stale(Wrapper):
    """Answers `verbs` about what lies below `prefix` as a file server does whose handles went stale or whose files are
    busy: `times` times, or always."""

    def __init__(
        self,
        inner: Store,
        *verbs: Literal["read", "open", "scan", "has"],
        prefix: str = "",
        times: int | None = None,
        error: int = errno.ESTALE,
    ) -> None:
        super().__init__(inner)
        self._verbs, self._prefix, self._left, self._errno = verbs, prefix, times, error

    def _check(self, verb: str, name: str) -> None:
        if verb not in self._verbs or not name.startswith(self._prefix) or self._left == 0:
            return
        if self._left is not None:
            self._left -= 1
        raise StoreError(f"cannot {verb} `{name}` in {self}: {os.strerror(self._errno)}")

    def read(self, name: str, *, limit: int) -> bytes:
        self._check("read", name)
        return super().read(name, limit=limit)

    def has(self, name: str) -> bool:
        self._check("has", name)
        return super().has(name)

    def open(self, name: str) -> BinaryIO:
        self._check("open", name)
        return super().open(name)

    def scan(self, prefix: str) -> Iterator[Entry]:
        self._check("scan", prefix)
        return super().scan(prefix)


class Late(Wrapper):
    """Shows what was put only after it was asked for `after` times, as attribute caches of network mounts do."""

    def __init__(self, inner: Store, *, after: int) -> None:
        super().__init__(inner)
        self._after = after
        self._hidden: dict[str, int] = {}

    def _hides(self, name: str) -> bool:
        left = self._hidden.get(name, 0)
        if left:
            self._hidden[name] = left - 1
        return left > 0

    def read(self, name: str, *, limit: int) -> bytes:
        if self._hides(name):
            raise NotFoundError(f"no `{name}` in {self}")
        return super().read(name, limit=limit)

    def has(self, name: str) -> bool:
        return super().has(name) and not self._hides(name)

    def open(self, name: str) -> BinaryIO:
        if self._hides(name):
            raise NotFoundError(f"no `{name}` in {self}")
        return super().open(name)

    def put(self, name: str, data: bytes) -> bool:
        created = super().put(name, data)
        if created:
            self._hidden[name] = self._after
        return created

    def put_file(self, name: str, path: Path) -> bool:
        created = super().put_file(name, path)
        if created:
            self._hidden[name] = self._after
        return created

    def put_stream(self, name: str, source: Source) -> bool:
        created = super().put_stream(name, source)
        if created:
            self._hidden[name] = self._after
        return created

    def scan(self, prefix: str) -> Iterator[Entry]:
        return (entry for entry in super().scan(prefix) if not self._hides(entry.name))


class Nameless(Wrapper):
    """Takes no file under its name, `times` times or always: a mount that implements neither links nor renames."""

    def __init__(self, inner: Store, *, times: int | None = None) -> None:
        super().__init__(inner)
        self._left = times

    def put_file(self, name: str, path: Path) -> bool:
        if self._left == 0:
            return super().put_file(name, path)
        if self._left is not None:
            self._left -= 1
        raise StoreError(f"cannot write `{name}` in {self}: {os.strerror(errno.ENOSYS)}")


class Spoilt:
    """`size` zero bytes, and at their end, where a checking reader compares digests, `failure`."""

    def __init__(self, size: int, failure: BaseException) -> None:
        self._left, self._failure = size, failure

    def read(self, size: int, /) -> bytes:
        if self._left == 0:
            raise self._failure
        count = min(size, self._left)
        self._left -= count
        return bytes(count)


def contents(store: Store) -> dict[str, bytes]:
    """Every object of a store."""
    return {entry.name: store.read(entry.name, limit=1 << 30) for entry in store.scan("")}


def spool(store: Store, data: bytes) -> Path:
    """A file in a store's scratch directory."""
    path = store.scratch() / uuid.uuid4().hex
    path.write_bytes(data)
    return path


_LINK_CALLS = {"x86_64": (86, 265), "aarch64": (37,)}


def deny_hard_links() -> bool:
    """From now on the kernel answers EPERM to hard links in this process, as on FUSE mounts. Whether that worked.

    A seccomp filter, so that the code under test meets the real system call and not a stand-in.
    """
    numbers = _LINK_CALLS.get(platform.machine())
    if numbers is None:
        return False
    load = struct.pack("=HBBI", 0x20, 0, 0, 0)
    tests = [
        struct.pack("=HBBI", 0x15, len(numbers) - at, 0, number)  # equal: jump to the refusal
        for at, number in enumerate(numbers)
    ]
    allow, refuse = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000), struct.pack("=HBBI", 0x06, 0, 0, 0x00050001)
    program = b"".join((load, *tests, allow, refuse))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, filter_mode = 38, 22, 2
    return (
        libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
        and libc.prctl(seccomp, filter_mode, ctypes.create_string_buffer(header, len(header)), 0, 0) == 0
        and _links_are_denied()
    )


def _links_are_denied() -> bool:
    here = f"/tmp/cachemgr-links-{os.getpid()}"
    Path(here).write_bytes(b"")
    try:
        os.link(here, here + ".2")
    except PermissionError:
        return True
    finally:
        os.unlink(here)
    os.unlink(here + ".2")
    return False
