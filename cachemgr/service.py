"""The service as a client sees it: requests with a token over HTTP, answers as values, problems as our own errors.

Standard library only, and no redirect is followed, because the token would follow it.
"""

import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import quote, urlencode

import msgspec

from cachemgr.errors import CacheError, CorruptError, NotFoundError, StoreError, UsageError

T = TypeVar("T")

_SECONDS = 30.0
_MOST = 256 << 20
"""Bytes of an answer that are read."""


class Refusal(msgspec.Struct, frozen=True):
    """What a service says when it does not answer (RFC 9457)."""

    status: int
    detail: str
    hint: str | None = None
    exit_code: int = 1


class RefusedError(UsageError):
    """The service does not take this, and will not take it the next time either."""


class ConflictError(RefusedError):
    """Somebody else was first."""


class Service:
    """One service. `seconds` is how long it may be silent in the middle of an answer."""

    def __init__(self, url: str, token: str | None, *, seconds: float = _SECONDS) -> None:
        self._url, self._token, self._seconds = url.rstrip("/"), token, seconds
        self._opener = urllib.request.build_opener(_NoRedirects())

    def __str__(self) -> str:
        return self._url

    def get(self, path: str, kind: type[T], **query: str | int | None) -> T:
        """The answer to a question in a path and query; what is None is left out.

        Raises:
            CacheError: as the command line would, or StoreError where the service does not answer.
        """
        given = urlencode({name: value for name, value in query.items() if value is not None})
        return self._decoded(self._asked("GET", f"{path}?{given}" if given else path, None), kind)

    def post(self, path: str, body: bytes, kind: type[T]) -> T:
        """The answer to a question in a JSON body. Raises as `get`."""
        return self._decoded(self._asked("POST", path, body), kind)

    def put(self, path: str, kind: type[T], **query: str) -> T:
        """The answer to a change that needs no body. Raises as `get`."""
        return self._decoded(self._asked("PUT", f"{path}?{urlencode(query)}", None), kind)

    def delete(self, path: str, kind: type[T], **query: str) -> T:
        """The answer to a removal. Raises as `get`."""
        return self._decoded(self._asked("DELETE", f"{path}?{urlencode(query)}", None), kind)

    def _decoded(self, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptError(
                f"{self} does not answer as a service of cachemgr: {error}", hint="check the URL, and its version"
            ) from None

    def _asked(self, method: str, path: str, body: bytes | None) -> bytes:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(f"{self._url}{path}", body, headers, method=method)  # noqa: S310 - checked
        try:
            with self._opener.open(request, timeout=self._seconds) as answer:
                data: bytes = answer.read(_MOST + 1)
        except urllib.error.HTTPError as error:
            raise self._refused(error) from None
        except (OSError, ssl.SSLError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise StoreError(f"the service {self} does not answer: {why}", hint="cachemgr doctor") from None
        if len(data) > _MOST:
            raise CorruptError(f"{self} answers with more than {_MOST} bytes")
        return data

    def _refused(self, error: urllib.error.HTTPError) -> CacheError:
        try:
            told = msgspec.json.decode(error.read(1 << 20), type=Refusal)
        except (msgspec.MsgspecError, UnicodeDecodeError, OSError, http.client.HTTPException):
            return StoreError(f"the service {self} answers {error.code} {error.reason}", hint="check the URL")
        if told.status in {401, 403}:
            return UsageError(f"{told.detail} ({self})", hint="CACHEMGR_SERVER_TOKEN=…")
        if told.status == 409:
            return ConflictError(told.detail, hint=told.hint)
        kinds: dict[int, Callable[..., CacheError]] = {2: RefusedError, 10: NotFoundError, 12: CorruptError}
        return kinds.get(told.exit_code, StoreError)(told.detail, hint=told.hint)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args: object) -> None:
        return None


def segment(text: str) -> str:
    """A text as a part of a path."""
    return quote(text, safe="")
