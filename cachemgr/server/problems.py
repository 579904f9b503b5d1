"""Failures as answers: the sentences of the command line as problem+json (RFC 9457)."""

import msgspec
from starlette.responses import Response

from cachemgr.errors import CacheError, DeadlineError, UsageError
from cachemgr.server.contract import Problem

MEDIA_TYPE = "application/problem+json"

_STATUS = {2: 400, 10: 404, 11: 409, 12: 422, 13: 503}
"""HTTP status by exit code."""
_TITLES = {
    400: "Bad request",
    401: "No token",
    403: "Not allowed",
    404: "Not found",
    405: "No such method",
    409: "Conflict",
    413: "Too large",
    415: "Not JSON",
    422: "Damaged or untrusted",
    500: "A bug",
    503: "Unavailable",
}


_HINTS = {
    400: "/v1 lists what can be asked",
    401: "Authorization: Bearer TOKEN, of cachemgr token create",
    403: "cachemgr token list says who may what",
    404: "/v1 lists what can be asked",
    405: "/v1 lists what can be asked, and by which method",
    409: "ask again how it is now",
    413: "send less at a time",
    415: "Content-Type: application/json",
    422: "cachemgr verify",
    500: "the log of the service has the reason, under the X-Request-Id of this answer",
    503: "ask again in a moment",
}
"""What to do where the failure itself does not say."""


class RefusedError(UsageError):
    """A request that is refused for a reason that HTTP has a status for."""

    def __init__(self, status: int, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


def problem_of(error: CacheError) -> Problem:
    """A failure as a document."""
    if isinstance(error, RefusedError):
        status = error.status
    elif isinstance(error, DeadlineError):
        status = 503
    else:
        status = _STATUS.get(error.exit_code, 500)
    return Problem(
        title=_TITLES.get(status, "Refused"),
        status=status,
        detail=str(error),
        hint=error.hint or hint_of(status),
        word=error.word,
        exit_code=error.exit_code,
    )


def hint_of(status: int) -> str:
    """What to do about an answer with this status, where nothing says it better."""
    return _HINTS.get(status, _HINTS[400])


def answer(problem: Problem) -> Response:
    """A problem as an answer."""
    headers = {}
    if problem.status == 503:
        headers["Retry-After"] = "1"
    if problem.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="cachemgr"'
    body = msgspec.json.encode(problem, order="sorted")
    return Response(body, problem.status, headers=headers, media_type=MEDIA_TYPE)
