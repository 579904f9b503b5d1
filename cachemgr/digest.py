"""Bytes to names. The only place that knows how our own are made; other projects' stand where their rules are.

A digest names *what is stored*, so it is sha256: an attacker may choose the bytes. A fingerprint goes into a key, which
names *what was compiled*; keys are never adversarial (a signature binds them to their bytes), so they may be fast.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import NewType, Protocol

Digest = NewType("Digest", str)
"""`sha256:` and 64 lower-case hex digits."""

_SEAL_SALT, _SEAL_ROUNDS = b"cachemgr sealed value 1", 10_000
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


def fingerprint_of(names: Iterable[str]) -> str:
    """One short name for a set of names, in whatever order they come."""
    return fingerprint("\n".join(sorted(names)).encode())


def sealed(value: str) -> str:
    """`value` so that equal values compare equal everywhere and cannot be read back from what is published.

    The same on every machine, because a key names what was compiled and not where it is kept: under a salt of each
    store, an artifact would never be exact in a seed or a mirror. Such a salt would lie beside the captures anyway, for
    everybody who can read them; what stands against guessing is that each guess costs some milliseconds.
    """
    mac = hashlib.pbkdf2_hmac("sha256", value.encode(), _SEAL_SALT, _SEAL_ROUNDS, 16)
    return "sealed:" + mac.hex()


def mac(secret: bytes, data: bytes) -> str:
    """HMAC-SHA256 of `data` in hex: only who knows `secret` can make it."""
    return hmac.new(secret, data, hashlib.sha256).hexdigest()


def content_md5(data: bytes) -> str:
    """The value of a `Content-MD5` header (RFC 1864), by which a server knows a body that was cut off."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def base32_name(data: bytes) -> str:
    """How Inductor names content: lower-case base32 of sha256, 51 characters (torch 2.13 `_inductor/codecache.py`)."""
    return base64.b32encode(hashlib.sha256(data).digest())[:51].decode().lower()
