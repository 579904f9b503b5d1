"""The key of this machine: a MAC beside each capture that was made here, so that it can be told from what others wrote.

The key is made in our home when the first capture is, and never leaves it. Whoever copies a home copies the machine: an
image must not have one in it.
"""

import hmac
import os
import secrets
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from cachemgr import digest
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, DeniedError, NotFoundError
from cachemgr.key import Key
from cachemgr.places import make_directory
from cachemgr.store import Store, layout

_DOMAIN = b"cachemgr capture mac 1\n"
_KEY_DOMAIN = b"cachemgr machine 1\n"
_BYTES = 32
_MAC_LIMIT = 1 << 10


class Machine:
    """This machine, by the file that its key is kept in."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: bytes | None = None

    def mark(self, key: Key, capture: Digest) -> Mapping[str, bytes]:
        """The MAC object for a capture that is made here; nothing where no key can be kept.

        A machine that cannot remember what it made is one that trusts less, not one that fails.
        """
        secret = self._secret() or self._make()
        return {} if secret is None else {layout.mac_name(key, capture, _id(secret)): _mac(secret, key, capture)}

    def made(self, store: Store, key: Key, capture: Digest, beside: Collection[str]) -> bool:
        """Whether this machine made a capture."""
        secret = self._secret()
        if secret is None:
            return False
        name = layout.mac_name(key, capture, _id(secret))
        with suppress(CorruptError, DeniedError, NotFoundError):
            return name in beside and hmac.compare_digest(
                store.read(name, limit=_MAC_LIMIT), _mac(secret, key, capture)
            )
        return False

    @property
    def spoilt(self) -> Path | None:
        """The file of a key that is there and does not count, because others may know it or it is none."""
        return self._path if os.path.lexists(self._path) and self._secret() is None else None

    def _secret(self) -> bytes | None:
        """The key if there is one that nobody else can know."""
        if self._known is None:
            with suppress(OSError):
                self._known = _read_private(self._path)
        return self._known

    def _make(self) -> bytes | None:
        """Of several that make it at once, the first wins."""
        aside = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        with suppress(OSError):
            make_directory(self._path.parent, 0o700)
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(secrets.token_bytes(_BYTES))
                self._take(aside)
            finally:
                aside.unlink(missing_ok=True)
        return self._secret()

    def _take(self, aside: Path) -> None:
        try:
            os.link(aside, self._path)
        except FileExistsError:
            return
        except OSError:  # a file system without links
            if not os.path.lexists(self._path):
                aside.rename(self._path)


def _read_private(path: Path) -> bytes | None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        data = file.read(_BYTES + 1) if private else b""
    return data if len(data) == _BYTES else None


def _id(secret: bytes) -> str:
    """The name of the key: 32 hex digits that do not tell it."""
    return digest.hex_of(digest.of_bytes(_KEY_DOMAIN + secret))[:32]


def _mac(secret: bytes, key: Key, capture: Digest) -> bytes:
    return digest.mac(secret, _DOMAIN + f"{key}\n{capture}".encode()).encode()
