"""Answers have an end: what is no object is read up to a limit, and not whatever a server cares to send.

botocore reads a listing or an error whole into memory, however long it is; a wrong port or a hostile server would fill
the memory of the process that starts an engine. Objects are not read here but by `answers`, which knows their length.
"""

from collections.abc import Iterator
from typing import Protocol, cast

from cachemgr.store.s3.faults import GarbledAnswerError

_MOST_BYTES = 16 << 20
"""A listing of a thousand keys of a kilobyte each, all of it escaped, is smaller."""
_READ_BYTES = 64 << 10


class _Body(Protocol):
    def stream(self, amount: int) -> Iterator[bytes]: ...
    def close(self) -> None: ...


class _Answer(Protocol):
    status_code: int
    raw: object


class _Request(Protocol):
    stream_output: bool


class _Http(Protocol):
    def send(self, request: _Request) -> _Answer: ...


class _Endpoint(Protocol):
    http_session: _Http


class _Events(Protocol):
    def register(self, event: str, handler: object) -> None: ...


class _Meta(Protocol):
    events: _Events


class _Client(Protocol):
    _endpoint: _Endpoint
    meta: _Meta


class _Read:
    """A body that was read, for botocore to read again."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def stream(self) -> Iterator[bytes]:
        yield self._data


def bound(made: object) -> None:
    """Let a client of botocore read answers through `_limited`. Its `before-send` event is for sending in its place."""
    client = cast("_Client", made)
    http = client._endpoint.http_session  # noqa: SLF001 - with its proxies, certificates, time-outs and connections

    def send(request: _Request, **_event: object) -> _Answer:
        is_object, request.stream_output = request.stream_output, True  # true: the body is left to us
        answer = http.send(request)
        if not is_object or answer.status_code >= 300:
            answer.raw = _Read(_limited(cast("_Body", answer.raw)))
        return answer

    client.meta.events.register("before-send.s3", send)


def _limited(body: _Body) -> bytes:
    parts, length = [], 0
    for part in body.stream(_READ_BYTES):
        parts.append(part)
        length += len(part)
        if length > _MOST_BYTES:
            body.close()
            raise GarbledAnswerError("an answer without an end")
    return b"".join(parts)
