"""How much one replica takes on: requests at a time, seconds and bytes of each; and what every answer says to browsers.

Nothing of an answer may load anything from elsewhere, run a script, or be shown inside another page; no other origin
may read one, as CORS is off.
"""

import asyncio
import secrets
from collections.abc import MutableMapping
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from cachemgr.server.contract import Problem
from cachemgr.server.problems import RefusedError, answer

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
REQUEST_ID = "X-Request-Id"
"""What an answer and what the log says of its request have in common. It is ours: one that is sent is not believed."""
_MOST_DIGITS = 19
_UNBOUNDED = frozenset({"/healthz"})
"""What has to answer however much is going on."""


class Bounds(msgspec.Struct, frozen=True):
    """The limits of one replica."""

    body_bytes: int = 8 << 20
    seconds: float = 30.0
    """From the first byte of a request until its answer begins."""
    requests: int = 64
    """At a time."""
    threads: int = 12
    """That work on them; each may have a connection to the database."""


class Bounded:
    """Keeps an application within time and number of requests, and adds the headers."""

    def __init__(self, app: ASGIApp, bounds: Bounds) -> None:
        self._app, self._bounds = app, bounds
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the life of the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sender = _Sender(send, request_id(scope))
        if scope["path"] in _UNBOUNDED:
            await self._app(scope, receive, sender)
            return
        if self._running >= self._bounds.requests:
            await self._refuse(scope, receive, sender, f"{self._running} requests are being answered already")
            return
        self._running += 1
        try:
            await asyncio.wait_for(self._app(scope, receive, sender), self._bounds.seconds)
        except asyncio.TimeoutError:
            if sender.begun:
                raise
            await self._refuse(scope, receive, sender, f"no answer came within {self._bounds.seconds:.0f} s")
        finally:
            self._running -= 1

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, why: str) -> None:
        problem = Problem(title="Unavailable", status=503, detail=why, hint="ask again in a moment", exit_code=13)
        await answer(problem)(scope, receive, send)


class _Sender:
    """Sends, with our headers."""

    def __init__(self, send: Send, name: str) -> None:
        self._send, self._name = send, name
        self.begun = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", "no-store")
            headers[REQUEST_ID] = self._name
        await self._send(message)


def request_id(scope: Scope) -> str:
    """The name of a request, which it gets when it is first asked for."""
    name: str = scope.setdefault("state", {}).setdefault("cachemgr.request", secrets.token_hex(8))
    return name


async def body_of(request: Request, limit: int) -> bytes:
    """The body of a request.

    Raises:
        RefusedError: it is larger than `limit` bytes, or no JSON.
    """
    _require_json(request.headers)
    told = request.headers.get("content-length", "0")
    too_large = RefusedError(413, f"the body has more than {limit} bytes", hint="send less at a time")
    if not (told.isascii() and told.isdigit() and len(told) < _MOST_DIGITS) or int(told) > limit:
        raise too_large
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            raise too_large
    return bytes(data)


def _require_json(headers: Headers) -> None:
    """A form of another site's page can send other types without being asked."""
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusedError(415, f"the body is `{kind[:100]}`", hint="Content-Type: application/json")
