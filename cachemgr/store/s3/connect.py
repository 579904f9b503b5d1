"""The client of a bucket: its time-outs, and credentials that are there within two seconds or not at all.

The only importer of botocore, the core of boto3: its `Session` is used and not boto3's, whose layer of resources costs
45 ms and serves nobody here.
"""

import gzip
import os
from collections.abc import Mapping
from typing import BinaryIO, Protocol, TypedDict, cast

import msgspec

from cachemgr import __version__
from cachemgr.bounded import within
from cachemgr.errors import DeadlineError, MirrorError, in_words
from cachemgr.store.s3.bounds import bound
from cachemgr.store.s3.bucket import Bucket
from cachemgr.store.s3.faults import FAULTS, code_of

CONNECT_SECONDS = 3.0
STALL_SECONDS = 10.0
"""How long a server may keep silent in the middle of an answer."""
CONNECTIONS = 64
"""How many requests may be under way at once."""

_CREDENTIAL_SECONDS = 1.5
"""For the whole chain. Where there is no metadata server, packets to it often vanish, and botocore waits twice."""
_ROLE_SECONDS = 5.0
"""Where a role is named: its token service may be in another region, and its client is loaded on a busy machine."""
_PROGRAM_SECONDS = 10.0
"""How long a `credential_process` or a single sign-on may take, which a person has set up on purpose."""
_CONTAINER_SECONDS = 0.4
"""How long one of three questions to the agent of a container may take."""


class Got(TypedDict, total=False):
    """The answer of GetObject."""

    Body: BinaryIO
    ContentLength: int
    ContentRange: str
    ETag: str
    ResponseMetadata: Mapping[str, object]


class _Time(Protocol):
    def timestamp(self) -> float: ...


class Listed(TypedDict):
    """One object in an answer of ListObjectsV2."""

    Key: str
    Size: int
    LastModified: _Time


class Listing(TypedDict, total=False):
    """The answer of ListObjectsV2."""

    Contents: list[Listed]
    NextContinuationToken: str
    IsTruncated: bool


Said = Mapping[str, object]
"""An answer that has to name what was made."""


class Copied(TypedDict, total=False):
    """The answer of CopyObject."""

    CopyObjectResult: Said


class Client(Protocol):
    """What is used of botocore's client."""

    def get_object(self, **request: object) -> Got: ...
    def list_objects_v2(self, **request: object) -> Listing: ...
    def put_object(self, **request: object) -> Said: ...
    def copy_object(self, **request: object) -> Copied: ...
    def delete_object(self, **request: object) -> object: ...
    def create_multipart_upload(self, **request: object) -> Said: ...
    def upload_part(self, **request: object) -> Said: ...
    def complete_multipart_upload(self, **request: object) -> Said: ...
    def abort_multipart_upload(self, **request: object) -> object: ...


class _Session(Protocol):
    """What is used of botocore's session."""

    def get_config_variable(self, name: str) -> object: ...
    def set_default_client_config(self, config: object) -> None: ...
    def register_component(self, name: str, component: object) -> None: ...
    def get_scoped_config(self) -> Mapping[str, object]: ...
    def get_component(self, name: str) -> "_Resolver": ...
    def get_credentials(self) -> "_Credentials | None": ...
    def create_client(self, service: str, **options: object) -> object: ...


class _Resolver(Protocol):
    def insert_before(self, name: str, provider: object) -> None: ...


class _Credentials(Protocol):
    def get_frozen_credentials(self) -> object: ...


def connect(bucket: Bucket) -> Client:
    """A client for `bucket`, with credentials from AWS's own chain unless it is read anonymously.

    Raises:
        MirrorError: there are no credentials; said in less than two seconds, with the name of the role if there is one.
    """
    import botocore.session
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.loaders import Loader

    session = cast("_Session", botocore.session.Session(profile=bucket.profile))
    session.register_component("data_loader", Loader(file_loader=_Models()))
    # Also for the token service, which a role's credentials come from.
    session.set_default_client_config(
        Config(connect_timeout=1, read_timeout=1.5, retries={"total_max_attempts": 2, "mode": "standard"})
    )
    if not bucket.anonymous:
        _authenticate(session, bucket)
    addressing = {None: "auto", True: "path", False: "virtual"}[bucket.path_style]
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=STALL_SECONDS,
        # Retries are ours: they have to end with the caller's deadline.
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
        signature_version=UNSIGNED if bucket.anonymous else None,
        s3={"addressing_style": addressing},
        # Bodies are signed, and names are digests; checksums of a newer kind are unknown to many servers.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra=f"cachemgr/{__version__}",
    )
    region = bucket.region or session.get_config_variable("region") or os.environ.get("AWS_REGION") or "us-east-1"
    try:
        client = session.create_client("s3", region_name=region, endpoint_url=bucket.endpoint, config=config)
    except ValueError as error:  # a region or an endpoint that cannot be one
        fault = FAULTS["misconfigured"]
        raise MirrorError(f"cannot use {bucket}: {fault.says}: {error}", word=fault.word, hint=fault.hint) from None
    bound(client)
    return cast("Client", client)


class _Models:
    """Loads the descriptions of services, megabytes of JSON, faster than botocore does by itself: a sixth of the time
    that a client takes to be made (60 of 330 ms; botocore 1.44 `loaders.JSONFileLoader` is what this stands for)."""

    def exists(self, path: str) -> bool:
        return os.path.isfile(path + ".json") or os.path.isfile(path + ".json.gz")

    def load_file(self, path: str) -> object:
        for suffix, opened in ((".json", open), (".json.gz", gzip.open)):
            if os.path.isfile(path + suffix):
                with opened(path + suffix, "rb") as file:
                    return msgspec.json.decode(file.read())
        return None


def _authenticate(session: _Session, bucket: Bucket) -> None:
    scoped: Mapping[str, object] = {}
    try:
        scoped = session.get_scoped_config()
        _hurry_containers(session)
        found = within(_seconds(scoped), "asking for credentials", lambda: _found(session))
    except Exception as error:  # noqa: BLE001 - the chain raises what its files, programs and servers raise
        raise _unauthenticated(bucket, scoped, _reason(error)) from None
    if not found:
        raise _unauthenticated(bucket, scoped, "")


def _seconds(scoped: Mapping[str, object]) -> float:
    """How long credentials are waited for: the longer, the surer it is that somebody has set them up."""
    if any(name in scoped for name in ("credential_process", "sso_session", "sso_start_url")):
        return _PROGRAM_SECONDS
    return _CREDENTIAL_SECONDS if _role(scoped) is None else _ROLE_SECONDS


def _role(scoped: Mapping[str, object]) -> str | None:
    role = os.environ.get("AWS_ROLE_ARN") or scoped.get("role_arn")
    return None if role is None else str(role)


def _found(session: _Session) -> bool:
    credentials = session.get_credentials()
    if credentials is None:
        return False
    credentials.get_frozen_credentials()  # a role's are only fetched now
    return True


def _hurry_containers(session: _Session) -> None:
    """ECS and EKS Pod Identity: by default three attempts of two seconds (botocore 1.44 `ContainerMetadataFetcher`)."""
    from botocore.credentials import ContainerProvider
    from botocore.httpsession import URLLib3Session
    from botocore.utils import ContainerMetadataFetcher

    fetcher = ContainerMetadataFetcher(session=URLLib3Session(timeout=_CONTAINER_SECONDS), sleep=lambda _seconds: None)
    session.get_component("credential_provider").insert_before("container-role", ContainerProvider(fetcher=fetcher))


def _unauthenticated(bucket: Bucket, scoped: Mapping[str, object], reason: str) -> MirrorError:
    fault = FAULTS["no credentials"]
    role = _role(scoped)
    said = f"cannot use {bucket}: {fault.says}" + (f" for role {role}" if role else "")
    return MirrorError(f"{said}: {reason}" if reason else said, word=fault.word, hint=fault.hint)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return in_words(error)
    # These name what a person wrote, and no secret.
    if isinstance(error, DeadlineError) or type(error).__name__ in ("ProfileNotFound", "ConfigParseError"):
        return str(error)
    return code_of(error) or type(error).__name__
