"""What can go wrong with a bucket, told apart. Every failure of the client becomes a `MirrorError` with one word.

The words are counted and shown, so they are few and stay: a person must do something else for each of them. Texts of a
server never reach a person, only its error code does: they are long, foreign, and may be hostile.
"""

import re
import socket
import ssl
from collections.abc import Iterator

import msgspec

from cachemgr.errors import DeadlineError, MirrorDeniedError, MirrorError
from cachemgr.store.s3.bucket import Bucket


class Fault(msgspec.Struct, frozen=True):
    """One way to fail."""

    word: str
    says: str
    attempts: int = 1
    """How often a request that fails like this is made before it counts as failed."""
    hint: str = ""


class ShortAnswerError(Exception):
    """A body has another length than the server said."""


class GarbledAnswerError(Exception):
    """An answer that contradicts the request or itself."""


class ErrorBodyError(Exception):
    """A good status over the body of an error, as servers send that find out too late."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 500}}


_UNREACHABLE = "check `mirror_endpoint` and the network, or set `offline = true`"
_PROXY = "check HTTPS_PROXY and HTTP_PROXY, or name the server in NO_PROXY"
_UNSENDABLE = "look for a line break in AWS_ACCESS_KEY_ID or AWS_SESSION_TOKEN, and at HTTPS_PROXY and HTTP_PROXY"
_NO_TLS = "check scheme and port of `mirror_endpoint`, and AWS_CA_BUNDLE where it is set"
_NOT_S3 = "what answered is no S3 server: check `mirror_endpoint`, and HTTPS_PROXY where it is set"

FAULTS = {
    fault.word: fault
    for fault in (
        Fault("denied", "access is denied"),
        Fault("expired", "the credentials have expired", hint="renew them, for example with `aws sso login`"),
        Fault(
            "no credentials",
            "there are no credentials",
            hint="set AWS_PROFILE or `mirror_profile`, or `mirror_anonymous = true` for a public bucket",
        ),
        Fault("no bucket", "there is no such bucket", hint="create it, or correct `mirror`"),
        Fault("full", "there is no room left", hint="cachemgr prune --mirror, or raise the quota of the bucket"),
        Fault("throttled", "the server asks to slow down", attempts=8, hint="try again later"),
        Fault("wrong region", "the bucket is in another region", hint="set `mirror_region`"),
        Fault("clock skew", "this machine's clock and the server's differ too much", hint="set this machine's clock"),
        Fault("unresolved", "the name of the server cannot be resolved", attempts=2, hint=_UNREACHABLE),
        Fault("unreachable", "the server cannot be reached", attempts=2, hint=_UNREACHABLE),
        Fault("tls", "the server's certificate is not trusted", hint="name a file of trusted ones in AWS_CA_BUNDLE"),
        Fault("stalled", "the server stopped answering", attempts=3, hint="try again later"),
        Fault("truncated", "the answer is cut short", attempts=4, hint="try again later"),
        Fault("garbled", "the answer is not one of S3", attempts=2, hint="check `mirror_endpoint`"),
        Fault("conflict", "somebody else is writing it", attempts=6, hint="try again later"),
        Fault("server error", "the server failed", attempts=5, hint="try again later"),
        Fault("refused", "the server refused the request"),
        Fault("misconfigured", "no request can be made with these settings", hint="cachemgr config show"),
    )
}

_CODES = {
    "AccessDenied": "denied",
    "AllAccessDisabled": "denied",
    "AccountProblem": "denied",
    "Forbidden": "denied",
    "InvalidAccessKeyId": "denied",
    "InvalidObjectState": "denied",
    "KMS.DisabledException": "denied",
    "SignatureDoesNotMatch": "denied",
    "ExpiredToken": "expired",
    "ExpiredTokenException": "expired",
    "InvalidToken": "expired",
    "TokenRefreshRequired": "expired",
    "NoSuchBucket": "no bucket",
    "InsufficientCapacity": "full",
    "QuotaExceeded": "full",
    "XMinioAdminBucketQuotaExceeded": "full",
    "XMinioStorageFull": "full",
    "SlowDown": "throttled",
    "ServiceUnavailable": "throttled",
    "Throttling": "throttled",
    "ThrottlingException": "throttled",
    "RequestLimitExceeded": "throttled",
    "TooManyRequests": "throttled",
    "BandwidthLimitExceeded": "throttled",
    "AuthorizationHeaderMalformed": "wrong region",
    "IllegalLocationConstraintException": "wrong region",
    "PermanentRedirect": "wrong region",
    "TemporaryRedirect": "wrong region",
    "RequestTimeTooSkewed": "clock skew",
    "RequestExpired": "clock skew",
    "RequestTimeout": "stalled",
    "IncompleteBody": "truncated",
    "XAmzContentSHA256Mismatch": "truncated",
    "BadDigest": "truncated",
    "ConditionalRequestConflict": "conflict",
    "OperationAborted": "conflict",
    "InternalError": "server error",
}
"""Error codes of S3 (API reference, "Error responses"), of STS, Ceph and MinIO by our word."""

_STATUSES = {
    301: "wrong region",
    307: "wrong region",
    403: "denied",
    409: "conflict",
    429: "throttled",
    503: "throttled",
    507: "full",
}

_EXCEPTIONS = {
    "NoCredentialsError": "no credentials",
    "PartialCredentialsError": "no credentials",
    "CredentialRetrievalError": "no credentials",
    "MetadataRetrievalError": "no credentials",
    "ProfileNotFound": "no credentials",
    "TokenRetrievalError": "no credentials",
    "SSOError": "no credentials",
    "SSLError": "tls",
    "ConnectTimeoutError": "unreachable",
    "EndpointConnectionError": "unreachable",
    "ProxyConnectionError": "unreachable",
    "ReadTimeoutError": "stalled",
    "DeadlineError": "stalled",
    "IncompleteReadError": "truncated",
    "IncompleteRead": "truncated",
    "ConnectionClosedError": "truncated",
    "ResponseStreamingError": "truncated",
    "HTTPClientError": "truncated",
    "ProtocolError": "truncated",
    "ShortAnswerError": "truncated",
    "ResponseParserError": "garbled",
    "GarbledAnswerError": "garbled",
    "KeyError": "garbled",  # what botocore makes of an entry without a name
    "ValueError": "garbled",  # and of a size or a time that is none
    "BotoCoreError": "misconfigured",
}
"""Exceptions by the name of their class or of one above it, so that this module does not load the client. The last one
is above all of botocore's own."""

_ACTIONS = {"read": "s3:GetObject", "list": "s3:ListBucket", "write": "s3:PutObject", "refresh": "s3:PutObject"}
_UNKNOWN_KEY = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch"})
_PLAIN_CODE = re.compile(r"[A-Za-z0-9._-]{1,60}")


def code_of(error: BaseException) -> str:
    """The error code of an answer, as `NoSuchKey`; its status, as `404`, where it has none, as a page of a proxy that
    happens to be XML; empty when the server did not answer."""
    code = _detail(error, "Error").get("Code", "")
    return code or (str(status) if (status := _status(error)) else "")


def for_want_of_new_credentials(error: BaseException) -> bool:
    """Whether the request may do with credentials that are asked for again: these had their time, or are withdrawn."""
    code = code_of(error)
    return _CODES.get(code) == "expired" or code == "InvalidAccessKeyId"


def fault_of(error: BaseException) -> Fault | None:
    """What went wrong, or None when this is no failure of a bucket but ours, or one that is told already."""
    if isinstance(error, MirrorError):
        return None
    code = code_of(error)
    if code:
        return FAULTS[_CODES.get(code) or _STATUSES.get(_status(error)) or _of_status(_status(error))]
    return _unanswered(error)


def _unanswered(error: BaseException) -> Fault | None:
    inner = list(_chain(error))
    names = [base.__name__ for base in type(error).__mro__]
    found = FAULTS.get(next((_EXCEPTIONS[name] for name in names if name in _EXCEPTIONS), ""))
    if found is not None and "ProxyConnectionError" in names:
        return msgspec.structs.replace(found, says="the proxy cannot be reached, or lets nobody through", hint=_PROXY)
    if any(isinstance(each, socket.gaierror) or type(each).__name__ == "NameResolutionError" for each in inner):
        return FAULTS["unresolved"]
    if "HTTPClientError" in names and any(isinstance(each, ValueError) for each in inner):
        return msgspec.structs.replace(FAULTS["misconfigured"], hint=_UNSENDABLE)
    if "SSLError" in names and not any(isinstance(each, ssl.SSLCertVerificationError) for each in inner):
        return msgspec.structs.replace(FAULTS["tls"], says="no TLS connection can be made", hint=_NO_TLS)
    return found


def told(fault: Fault, verb: str, name: str, bucket: Bucket, error: BaseException) -> MirrorError:
    """The failure to `verb` the object `name`, for people."""
    code = code_of(error)
    reason = f"{fault.says} ({code})" if _PLAIN_CODE.fullmatch(code) else fault.says
    if isinstance(error, DeadlineError):
        reason = f"{fault.says}: {error}"
    said = f"cannot {verb} `{name}` in {bucket}: {reason}"
    if fault.word == "denied":
        allow = f"allow {_ACTIONS.get(verb, 's3:DeleteObject')} below {bucket} for these credentials"
        hint = "check the access key and its secret" if code in _UNKNOWN_KEY else _NOT_S3 if code.isdigit() else allow
        return MirrorDeniedError(said, word=fault.word, hint=hint)
    return MirrorError(said, word=fault.word, hint=_hint(fault, error))


def _hint(fault: Fault, error: BaseException) -> str | None:
    region = _detail(error, "Error").get("Region", "") or _detail(error, "Headers").get("x-amz-bucket-region", "")
    if fault.word == "wrong region" and _PLAIN_CODE.fullmatch(region):
        return f'set `mirror_region = "{region}"`'
    if fault.word in ("refused", "wrong region") and code_of(error).isdigit():
        return _NOT_S3
    return fault.hint or None


def _of_status(status: int) -> str:
    return "server error" if status >= 500 else "refused"


def _status(error: BaseException) -> int:
    return int(_detail(error, "ResponseMetadata").get("HTTPStatusCode", "0"))


def _detail(error: BaseException, part: str) -> dict[str, str]:
    """Texts from the answer that botocore keeps in `ClientError.response`."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return {}
    metadata = response.get("ResponseMetadata", {})
    found = metadata.get("HTTPHeaders", {}) if part == "Headers" else response.get(part, {})
    return {str(name): str(value) for name, value in found.items()}


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it wraps: botocore keeps them in `kwargs`, urllib3 in `reason`."""
    for _depth in range(8):
        if error is None:
            return
        yield error
        kept = getattr(error, "kwargs", {})
        inner = kept.get("error") if isinstance(kept, dict) else None
        error = next(
            (
                each
                for each in (inner, getattr(error, "reason", None), error.__cause__, error.__context__)
                if isinstance(each, BaseException) and each is not error
            ),
            None,
        )
