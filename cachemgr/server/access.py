"""Who may ask for what: bearer tokens, and what a browser or a program on the same host may see without one.

Tokens are known by their digests, which are compared in constant time. A replica remembers the table of tokens for a
few seconds: that is how long a revoked one may still be taken.
"""

import base64
import binascii
import hmac
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from cachemgr.catalogue.opened import Catalogue
from cachemgr.catalogue.tokens import Role, Token, print_of, tokens
from cachemgr.clock import Clock
from cachemgr.server.problems import RefusedError

REMEMBERED_SECONDS = 5.0
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of this host that no other host can have: a page of somebody else cannot ask under one of them."""
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")
"""What a proxy adds: whoever asks through one may be anywhere."""

READ = frozenset[Role]({"read", "admin"})
REPORT = frozenset[Role]({"report", "admin"})
ANY = frozenset[Role]({"read", "report", "admin"})
ADMIN = frozenset[Role]({"admin"})


class Visitor(msgspec.Struct, frozen=True):
    """Who asks."""

    name: str
    role: Role


LOCAL = Visitor("local", "read")
"""Whoever asks on the loopback without a token, where that is allowed."""


class Access:
    """Knows the tokens."""

    def __init__(self, catalogue: Catalogue, clock: Clock, *, open_to_loopback: bool) -> None:
        self._catalogue, self._clock, self._open = catalogue, clock, open_to_loopback
        self._lock = threading.Lock()
        self._tokens: Mapping[str, Token] = {}
        self._read = float("-inf")

    def admit(self, headers: Mapping[str, str], roles: frozenset[Role], *, basic: bool) -> Visitor:
        """Who asks, if that one may.

        Args:
            headers: those of the request, by lower-case name.
            roles: which of them may.
            basic: whether a browser's own way of asking for a password is good as well: the token is the password.
                Only pages take it, as browsers send it along with what other sites make them ask for.

        Raises:
            RefusedError: nobody known (401), or somebody who may not (403).
            DatabaseError: the tokens cannot be read.
        """
        secret = _secret(headers.get("authorization", ""), basic=basic)
        visitor = self._without(headers) if secret is None else self._named(secret)
        if visitor.role not in roles:
            needed = " or ".join(sorted(roles))
            raise RefusedError(
                403, f"`{visitor.name}` has the role {visitor.role}; this needs {needed}", hint=_CREATE.format(needed)
            )
        return visitor

    def check(self) -> None:
        """Raises DatabaseError where the tokens cannot be read now."""
        tokens(self._catalogue)

    def _without(self, headers: Mapping[str, str]) -> Visitor:
        forwarded = any(name in headers for name in _FORWARDED)
        if self._open and not forwarded and _host(headers.get("host", "")) in LOOPBACK:
            return LOCAL
        raise RefusedError(401, "this needs a token", hint=_CREATE.format("read"))

    def _named(self, secret: str) -> Visitor:
        mark = print_of(secret)
        found = next((held for known, held in self._known().items() if hmac.compare_digest(known, mark)), None)
        if found is None or not found.holds(self._clock.text()):
            raise RefusedError(401, "this token is not known, or counts no more", hint="cachemgr token list")
        return Visitor(found.name, found.role)

    def _known(self) -> Mapping[str, Token]:
        with self._lock:
            now = self._clock.monotonic()
            if now - self._read >= REMEMBERED_SECONDS:
                self._tokens, self._read = tokens(self._catalogue), now
            return self._tokens


_CREATE = "cachemgr token create NAME --role {}"


def _secret(header: str, *, basic: bool) -> str | None:
    scheme, _space, value = header.partition(" ")
    if scheme.lower() == "bearer" and value:
        return value.strip()
    if scheme.lower() == "basic" and basic:
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return None


def _host(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
