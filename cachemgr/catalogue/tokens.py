"""Tokens of the service: random texts that give a role to whoever has one. The database has digests of them only.

A token has 256 random bits, so that one round of SHA-256 is as strong as any slow hash would be.
"""

from typing import Any, Literal

import msgspec
from sqlalchemy import Connection, Row, insert, select, update

from cachemgr import digest
from cachemgr.catalogue.opened import Catalogue
from cachemgr.catalogue.schema import token
from cachemgr.errors import DatabaseError, NotFoundError, UsageError

Role = Literal["read", "report", "admin"]
"""`read`: sees everything; `report`: what a node needs, which is to look up, report launches and claim keys; `admin`:
everything."""

PREFIX = "cmgr_"
"""What every token begins with, so that people and scanners of secrets recognise one."""


class Token(msgspec.Struct, frozen=True):
    """A token without its secret. Times are RFC 3339 in UTC."""

    name: str
    role: Role
    created: str
    expires: str | None = None
    revoked: str | None = None

    def holds(self, now: str) -> bool:
        """Whether it opens anything at this time."""
        return self.revoked is None and (self.expires is None or now < self.expires)


def secret_of(randomness: bytes) -> str:
    """The text of a token made of 32 random bytes."""
    assert len(randomness) == 32, "256 bits are what makes one round of a hash enough"
    return PREFIX + randomness.hex()


def print_of(secret: str) -> str:
    """What is kept of a token."""
    return digest.of_bytes(secret.encode("utf-8", "surrogatepass"))


def create(catalogue: Catalogue, made: Token, secret: str) -> None:
    """Keep a token.

    Raises:
        UsageError: there is one with this name, or was.
        DatabaseError: nothing can be kept in this catalogue.
    """
    _require_kept(catalogue)

    def work(connection: Connection) -> bool:
        if connection.execute(select(token.c.name).where(token.c.name == made.name)).first() is not None:
            return False
        connection.execute(insert(token), [{**msgspec.structs.asdict(made), "digest": print_of(secret)}])
        return True

    if not catalogue.write(work):
        raise UsageError(f"there is a token `{made.name}` already", hint="cachemgr token list")


def revoke(catalogue: Catalogue, name: str, now: str) -> Token:
    """Let a token open nothing any more. It stays in the list.

    Raises:
        NotFoundError: there is none with this name.
    """
    _require_kept(catalogue)

    def work(connection: Connection) -> Token | None:
        where = token.c.name == name
        connection.execute(update(token).where(where, token.c.revoked.is_(None)).values(revoked=now))
        row = connection.execute(select(token).where(where)).first()
        return None if row is None else _token(row)

    found = catalogue.write(work)
    if found is None:
        raise NotFoundError(f"there is no token `{name}`", hint="cachemgr token list")
    return found


def tokens(catalogue: Catalogue) -> dict[str, Token]:
    """Every token by its digest, the oldest first. One statement."""
    statement = select(token).order_by(token.c.created, token.c.name)
    rows = catalogue.read(lambda connection: connection.execute(statement).all())
    return {row.digest: _token(row) for row in rows}


def _token(row: Row[Any]) -> Token:
    return Token(row.name, row.role, row.created, row.expires, row.revoked)


def _require_kept(catalogue: Catalogue) -> None:
    if catalogue.note and str(catalogue) == "memory":
        raise DatabaseError(f"tokens cannot be kept: {catalogue.note}", hint="cachemgr doctor")
