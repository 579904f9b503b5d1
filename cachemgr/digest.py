"""Bytes to names. The only place that knows sha256 and xxh3.

A digest names *what is stored*, so it is sha256: an attacker may choose the bytes. A fingerprint goes into a key, which
names *what was compiled*; keys are never adversarial (a signature binds them to their bytes), so they may be fast.
"""

import base64
import hashlib
import hmac
import re
from typing import NewType, Protocol

Digest = NewType("Digest", str)
"""`sha256:` and 64 lower-case hex digits."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Hasher(Protocol):
    """What `hashlib.sha256()` returns."""

    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def hasher() -> Hasher:
    """Start a digest over bytes that arrive in pieces; `finish` it."""
    return hashlib.sha256()


def finish(running: Hasher) -> Digest:
    """The digest of all bytes that `running` was given."""
    return Digest("sha256:" + running.hexdigest())


def of_bytes(data: bytes | memoryview) -> Digest:
    """The digest of `data`."""
    return Digest("sha256:" + hashlib.sha256(data).hexdigest())


def is_digest(text: str) -> bool:
    """Whether `text` is spelled like a digest."""
    return _DIGEST.fullmatch(text) is not None


def hex_of(digest: Digest) -> str:
    """The 64 hex digits, which name files and objects (a colon does not belong into a path)."""
    return digest.removeprefix("sha256:")


def from_hex(digits: str) -> Digest | None:
    """The digest that a file name spells, or None when it is no digest."""
    digest = Digest("sha256:" + digits)
    return digest if is_digest(digest) else None


def fingerprint(data: bytes) -> str:
    """128 bits of xxh3 over `data` as 32 hex digits: for keys, never for bytes that are placed."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


def sealed(value: str, salt: str) -> str:
    """`value` so that equal values compare equal within one store and cannot be read back from it."""
    mac = hmac.new(salt.encode(), value.encode(), hashlib.sha256)
    return "hmac:" + mac.hexdigest()[:32]


def base32_name(data: bytes) -> str:
    """How Inductor names content: lower-case base32 of sha256, 51 characters (torch 2.13 `_inductor/codecache.py`)."""
    return base64.b32encode(hashlib.sha256(data).digest())[:51].decode().lower()
