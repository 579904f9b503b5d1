"""Where a mirror is and how it wants to be spoken to. No client is needed to say so."""

import re
from urllib.parse import urlsplit

import msgspec

from cachemgr.capture import is_safe_path
from cachemgr.errors import UsageError

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
"""Bucket names by the rules of general purpose buckets (S3 user guide, "Bucket naming rules")."""

_SHAPE = "s3://BUCKET or s3://BUCKET/PREFIX"
_ENDPOINT = "write https://HOST or http://HOST:PORT"


class Bucket(msgspec.Struct, frozen=True):
    """A bucket, the prefix below which everything lies, and how to reach it. None leaves a choice to the client."""

    name: str
    prefix: str = ""
    """Without slashes at its ends."""
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    path_style: bool | None = None
    sse: str | None = None
    kms_key: str | None = None
    requester_pays: bool = False
    anonymous: bool = False

    def __str__(self) -> str:
        return f"s3://{self.name}/{self.prefix}" if self.prefix else f"s3://{self.name}"

    def key(self, name: str) -> str:
        """The key of the object `name`, or the key prefix of the directory `name`."""
        return f"{self.prefix}/{name}" if self.prefix else name


def parse(url: str) -> tuple[str, str]:
    """Bucket and prefix of `s3://bucket/prefix`.

    Raises:
        UsageError: it is something else.
    """
    scheme, _separator, rest = url.partition("://")
    name, _slash, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    if scheme != "s3" or not _NAME.fullmatch(name):
        raise UsageError(f"`{url}` is no bucket", hint=f"write {_SHAPE}")
    if prefix and not is_safe_path(prefix):
        raise UsageError(f"`{url}` has a prefix that cannot be used", hint=f"write {_SHAPE}")
    return name, prefix


def check_endpoint(url: str) -> str:
    """`url` if it can be an endpoint.

    Raises:
        UsageError: it is no URL of a server, or it has a password in it.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an address in them, or a port that is none
        raise UsageError("`mirror_endpoint` is no URL of a server", hint=_ENDPOINT) from None
    if not usable or parts.query or parts.fragment:
        raise UsageError(f"`{url}` is no endpoint", hint=_ENDPOINT)
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            f"the endpoint at {parts.hostname} has a user name in it",
            hint="give credentials as AWS does: AWS_ACCESS_KEY_ID, or a profile",
        )
    return url
