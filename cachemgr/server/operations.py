"""The table of what can be asked for: each operation with its path, who may, what it takes and what it answers.

The routes, the OpenAPI page, the audit and the tests of who may what are all made from this table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from cachemgr.catalogue.tokens import Role
from cachemgr.errors import UsageError
from cachemgr.server.access import Visitor
from cachemgr.server.backend import Backend
from cachemgr.server.contract import Document, Nothing, Question
from cachemgr.server.problems import RefusedError

Q = TypeVar("Q", bound=msgspec.Struct)
B = TypeVar("B", bound=Question)


@dataclass(frozen=True)
class Call(Generic[Q, B]):
    """One request, understood."""

    path: Mapping[str, str]
    query: Q
    body: B
    visitor: Visitor


@dataclass(frozen=True)
class Request:
    """One request, as it came."""

    path: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes
    visitor: Visitor


@dataclass(frozen=True)
class Operation:
    """One row of the table."""

    method: str
    path: str
    name: str
    roles: frozenset[Role]
    summary: str
    query: type[msgspec.Struct]
    """Refuses what it does not know, as a Question does."""
    body: type[Question]
    answer: type[Document]
    run: Callable[[Backend, Request], Document]
    changes: bool
    """Whether it changes something, so that a server that changes nothing refuses it."""
    audited: bool
    """Whether a line about it is kept. Launches and claims are not: they are records themselves."""


def operation(
    method: str,
    path: str,
    handler: Callable[[Backend, Call[Q, B]], Document],
    *,
    roles: frozenset[Role],
    query: type[Q],
    body: type[B],
    answer: type[Document],
    audited: bool = False,
    changes: bool = False,
) -> Operation:
    """A row whose `handler` gets its query and body as these types; its name and first line of documentation are those
    of the operation."""

    def run(backend: Backend, request: Request) -> Document:
        if changes or audited:
            backend.require_writable()
        call = Call(request.path, _query(request.query, query), _body(request.body, body), request.visitor)
        return handler(backend, call)

    summary = (handler.__doc__ or "").strip().split("\n", maxsplit=1)[0]
    return Operation(
        method,
        path,
        handler.__name__,
        roles,
        summary,
        query,
        body,
        answer,
        run,
        changes=changes or audited,
        audited=audited,
    )


def _query(given: Mapping[str, str], kind: type[Q]) -> Q:
    try:
        return msgspec.convert(dict(given), kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"the query cannot be meant: {_said(error)}", hint="/v1 lists what can be asked") from None


def _body(data: bytes, kind: type[B]) -> B:
    if kind is Nothing:
        if data.strip() not in {b"", b"{}"}:
            raise UsageError("this takes no body", hint="/v1 lists what can be asked")
        data = b"{}"
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the body cannot be meant: {_said(error)}", hint="/v1 lists what can be asked") from None


def _said(error: Exception) -> str:
    return str(error)[:300]


MOST_LISTED = 1000


def page_size(limit: int) -> int:
    """How many a page may have.

    Raises:
        UsageError: it is none that can be.
    """
    if not 0 < limit <= MOST_LISTED:
        raise UsageError(f"`limit` is {limit}; it may be 1 to {MOST_LISTED}", hint="`after` asks for the next page")
    return limit


def cursor(text: str | None) -> tuple[str, str] | None:
    """Where a page begins.

    Raises:
        UsageError: no page has ended so.
    """
    if text is None:
        return None
    time, tilde, name = text.partition("~")
    if not tilde or "\0" in text:
        raise UsageError("`after` is not the end of a page", hint="leave it out for the first page")
    return time, name


def written(after: tuple[str, str] | None) -> str | None:
    """The end of a page, as `cursor` reads it."""
    return None if after is None else "~".join(after)


def plain(query: Any) -> None:
    """Refuse texts that no database takes.

    Raises:
        UsageError: a parameter has a null character or half a letter in it.
    """
    for name, value in msgspec.structs.asdict(query).items():
        if isinstance(value, str) and ("\0" in value or not value.isprintable()):
            raise RefusedError(
                400, f"`{name}` has characters in it that cannot be printed", hint="/v1 lists what can be asked"
            )
