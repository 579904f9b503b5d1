"""HTTP as it comes over the wire, with an end to the head and body of a request, which the parser sets none to."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10
"""Of the first line and the headers; what comes after them is the application's to bound."""
HEAD_SECONDS = 20.0
"""From the connection, or from the first byte of a later request, until the headers are there."""
BODY_SECONDS = 60.0
"""From there to the last byte of the body, also of one that nobody reads because its request was refused: a connection
that trickles must not take a place for ever. Longer than the application waits for it."""


class Wire(HttpToolsProtocol):
    """One connection. It is closed when a request has no end."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._head_bytes = 0
        self._in_head = True
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._in_head = False
        self._wait(None)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        """The head of a request is there."""
        self._in_head = False
        self._wait(BODY_SECONDS)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of a request is there."""
        self._wait(None)
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Some bytes."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.transport.abort()

    def _expect_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if self._late is None:
            self._wait(HEAD_SECONDS)

    def _wait(self, seconds: float | None) -> None:
        """Close the connection in so many seconds, if it does not come to wait for something else by then."""
        if self._late is not None:
            self._late.cancel()
        self._late = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
