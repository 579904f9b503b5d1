"""Reaching a bucket: the network, certificates, and credentials of every kind, in a time that a start can spare."""

import json
import os
import re
import shlex
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from cachemgr.cache import open_cache
from cachemgr.errors import DeadlineError, MirrorError, NotFoundError, UsageError
from cachemgr.settings import TABLE, load
from cachemgr.store.s3 import Bucket, S3Store
from cachemgr.store.s3 import connect as connecting
from cachemgr.store.s3.bucket import check_endpoint, parse
from cachemgr.store.s3.faults import FAULTS
from tests import s3_faults
from tests.machines import Machine, install_stand_in
from tests.s3_faults import FaultyServer
from tests.s3_server import S3Server, free_ports, make_bucket
from tests.test_s3_faults import failure, listing

ROLE = "arn:aws:iam::123456789012:role/vllm-fleet"
SPARED_SECONDS = 20.0
"""A bound that shows on a busy machine too that nobody waited for a server that never answers: those hold for 30 s."""


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """No credentials from anywhere."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "credentials"))


@pytest.fixture
def silent() -> Iterator[FaultyServer]:
    """A server that never answers, as a metadata server behind a firewall."""
    with s3_faults.faulty("http://127.0.0.1:1") as server:
        server.fail("", s3_faults.silent)
        yield server


@pytest.fixture
def bucket_server() -> Iterator[FaultyServer]:
    """A bucket that is empty for everybody; it notes who asked."""
    with s3_faults.faulty("http://127.0.0.1:1") as server:
        server.fail("LIST", listing())
        yield server


def store_at(endpoint: str, tmp_path: Path, **more: "str | bool") -> S3Store:
    return S3Store(msgspec.structs.replace(Bucket("bucket", "prefix", endpoint=endpoint), **more), tmp_path / "tmp")


def without_credentials(tmp_path: Path) -> MirrorError:
    """The failure of a store that has none, which must come soon."""
    store = store_at("http://127.0.0.1:1", tmp_path)
    begun = time.monotonic()
    told = failure(lambda: store.has("a"))
    assert time.monotonic() - begun < SPARED_SECONDS
    assert told.word == "no credentials"
    assert "s3://bucket/prefix" in str(told)
    return told


def signer(server: FaultyServer) -> str:
    """The access key that signed the last request."""
    return server.headers[-1]["authorization"].split("Credential=")[1].split("/")[0]


def test_nobody_has_credentials(tmp_path: Path) -> None:
    told = without_credentials(tmp_path)
    assert str(told) == "cannot use s3://bucket/prefix: there are no credentials"
    assert "mirror_anonymous" in (told.hint or "")


def test_a_role_without_its_token_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    assert f"for role {ROLE}: {tmp_path}/token: No such file" in str(without_credentials(tmp_path))


def test_a_token_service_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: FaultyServer
) -> None:
    (tmp_path / "token").write_text("token")
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", silent.endpoint)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert f"for role {ROLE}: " in str(without_credentials(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://nowhere.invalid")
    assert f"for role {ROLE}: " in str(without_credentials(tmp_path)), "the role, not the name of the mirror's server"
    assert len(silent.asked) >= 1


def test_a_role_is_taken_with_a_token_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket_server: FaultyServer
) -> None:
    given = (
        "<AccessKeyId>ASIAROLE</AccessKeyId><SecretAccessKey>secret</SecretAccessKey>"
        "<SessionToken>session</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration>"
    )
    kind = "AssumeRoleWithWebIdentity"
    body = f"<{kind}Response><{kind}Result><Credentials>{given}</Credentials></{kind}Result></{kind}Response>".encode()
    bucket_server.fail(
        "POST /", lambda handler: handler.reply(s3_faults.Answer(200, [("Content-Type", "text/xml")], body))
    )
    (tmp_path / "token").write_text("token")
    monkeypatch.setattr(connecting, "_ROLE_SECONDS", 60.0)  # a busy machine answers late
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", bucket_server.endpoint)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert store_at(bucket_server.endpoint, tmp_path).has("a") is False
    assert signer(bucket_server) == "ASIAROLE"
    assert bucket_server.headers[-1]["x-amz-security-token"] == "session"


@pytest.mark.parametrize("variable", ["AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI"])
def test_a_metadata_server_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: FaultyServer, variable: str
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv(variable, silent.endpoint)
    without_credentials(tmp_path)
    assert len(silent.asked) >= 1


def test_a_metadata_server_that_must_not_be_asked_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: FaultyServer
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", silent.endpoint)
    without_credentials(tmp_path)
    assert silent.asked == []


def test_a_profile_with_a_slow_program_is_given_time(tmp_path: Path, home: Path, bucket_server: FaultyServer) -> None:
    said = json.dumps({"Version": 1, "AccessKeyId": "AKIAPROGRAM", "SecretAccessKey": "secret"})
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nsleep 2.2\necho '{said}'\n")
    program.chmod(0o755)
    (home / "config").write_text(f"[profile fleet]\ncredential_process = {program}\n")
    assert store_at(bucket_server.endpoint, tmp_path, profile="fleet").has("a") is False
    assert signer(bucket_server) == "AKIAPROGRAM"


def test_a_caller_in_a_hurry_does_not_wait_for_a_slow_program(tmp_path: Path, home: Path) -> None:
    (home / "config").write_text("[profile fleet]\ncredential_process = sleep 5\n")
    store = store_at("http://127.0.0.1:1", tmp_path, profile="fleet")
    begun = time.monotonic()
    with pytest.raises(DeadlineError):
        store.until(begun + 0.2).has("a")
    assert time.monotonic() - begun < 4


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    told = failure(lambda: store_at("http://127.0.0.1:1", tmp_path, profile="missing").has("a"))
    assert told.word == "no credentials"
    assert "(missing)" in str(told)


def test_a_configuration_that_is_none_is_named(tmp_path: Path, home: Path) -> None:
    (home / "config").write_text("[default\n")
    assert f"{home}/config" in str(without_credentials(tmp_path))


def test_credentials_that_come_late_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket_server: FaultyServer
) -> None:
    store = store_at(bucket_server.endpoint, tmp_path)
    assert failure(lambda: store.has("a")).word == "no credentials"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "late")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert store.has("a") is False


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
def test_credentials_that_are_renewed_are_found(
    tmp_path: Path, home: Path, bucket_server: FaultyServer, code: str
) -> None:
    def give(name: str) -> None:
        (home / "credentials").write_text(f"[default]\naws_access_key_id={name}\naws_secret_access_key=secret\n")

    give("OLD")
    store = store_at(bucket_server.endpoint, tmp_path)
    assert store.has("a") is False
    bucket_server.clear()
    bucket_server.fail("LIST", s3_faults.error(400, code), times=1)
    bucket_server.fail("LIST", listing())
    give("NEW")
    assert store.has("a") is False
    assert signer(bucket_server) == "NEW"
    bucket_server.clear()
    bucket_server.fail("LIST", s3_faults.error(400, code))
    assert failure(lambda: store.has("a")).word in ("expired", "denied")
    assert len(bucket_server.asked) == 2, "once more with what may be new, and no more"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some credentials."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("given", [{"region": "no region!"}, {"endpoint": "http://no host"}])
def test_settings_that_no_request_can_be_made_with(tmp_path: Path, given: dict[str, str]) -> None:
    told = failure(lambda: store_at(**{"endpoint": "http://127.0.0.1:1", **given}, tmp_path=tmp_path).has("a"))
    assert told.word == "misconfigured"
    assert "s3://bucket/prefix" in str(told)
    assert told.hint == "cachemgr config show"


@pytest.mark.usefixtures("known")
def test_a_name_that_cannot_be_resolved(tmp_path: Path) -> None:
    told = failure(lambda: store_at("http://nowhere.invalid", tmp_path).read("a", limit=1))
    assert told.word == "unresolved"
    assert "offline" in (told.hint or "")


@pytest.mark.usefixtures("known")
def test_a_port_that_nobody_listens_on(tmp_path: Path) -> None:
    told = failure(lambda: store_at(f"http://127.0.0.1:{free_ports(1)[0]}", tmp_path).has("a"))
    assert told.word == "unreachable"


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("variables", "scheme", "word", "hint"),
    [
        ({"HTTP_PROXY": "http://127.0.0.1:1"}, "http", "unreachable", "NO_PROXY"),
        ({"HTTPS_PROXY": "http://127.0.0.1:1"}, "https", "unreachable", "NO_PROXY"),
        ({"HTTP_PROXY": "no:::proxy"}, "http", "misconfigured", "HTTP_PROXY"),
        ({"AWS_ACCESS_KEY_ID": "key\n"}, "http", "misconfigured", "line break in AWS_ACCESS_KEY_ID"),
        ({"AWS_SESSION_TOKEN": "to\nken"}, "http", "misconfigured", "line break in AWS_ACCESS_KEY_ID"),
        ({}, "https", "tls", "scheme and port of `mirror_endpoint`"),
        ({"AWS_CA_BUNDLE": "/nonexistent"}, "https", "tls", "AWS_CA_BUNDLE where it is set"),
    ],
)
def test_what_stands_in_the_environment_is_named_and_no_secret(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bucket_server: FaultyServer,
    variables: dict[str, str],
    scheme: str,
    word: str,
    hint: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    told = failure(lambda: store_at(bucket_server.endpoint.replace("http", scheme), tmp_path).has("a"))
    assert told.word == word
    assert hint in (told.hint or "")
    assert not any(value.strip() in str(told) for value in variables.values())
    assert bucket_server.asked == []


@pytest.mark.usefixtures("known")
def test_a_certificate_that_nobody_vouches_for(tmp_path: Path) -> None:
    made = subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {tmp_path}/key -out {tmp_path}/cert -subj /CN=host".split(),
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("no openssl here")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_shake_hands, args=(listener, context), daemon=True).start()
        told = failure(lambda: store_at(f"https://127.0.0.1:{listener.getsockname()[1]}", tmp_path).has("a"))
    assert told.word == "tls"
    assert "AWS_CA_BUNDLE" in (told.hint or "")


def _shake_hands(listener: socket.socket, context: ssl.SSLContext) -> None:
    while True:
        try:
            connection, _address = listener.accept()
            context.wrap_socket(connection, server_side=True).close()
        except ssl.SSLError:
            continue
        except OSError:
            return


def test_a_public_bucket_is_read_without_credentials(
    running_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for name, value in running_s3.environ_of("admin").items():
            patch.setenv(name, value)
        make_bucket(running_s3, "public")
        writer = store_at(running_s3.endpoint, tmp_path, name="public")
        writer.put("a", b"for all")
    public = store_at(running_s3.endpoint, tmp_path, name="public", anonymous=True)
    assert public.read("a", limit=100) == b"for all"
    assert [entry.name for entry in public.scan("")] == ["a"]
    assert failure(lambda: public.put("b", b"1")).word == "denied"


@pytest.mark.usefixtures("known")
def test_what_the_settings_ask_for_is_asked_of_the_server(tmp_path: Path, bucket_server: FaultyServer) -> None:
    bucket_server.fail("", s3_faults.error(403, "AccessDenied"))
    store = store_at(
        bucket_server.endpoint, tmp_path, requester_pays=True, sse="aws:kms", kms_key="our-key", path_style=True
    )
    for ask in (lambda: store.read("a", limit=1), lambda: store.put("a", b"1"), lambda: store.refresh("a")):
        with suppress(MirrorError, NotFoundError):
            ask()
    verbs = [asked.split()[0] for asked in bucket_server.asked]
    seen = dict(zip(verbs, bucket_server.headers, strict=True))
    assert set(seen) == {"GET", "LIST", "PUT", "COPY"}
    assert {verb: headers.get("x-amz-request-payer") for verb, headers in seen.items()} == dict.fromkeys(
        seen, "requester"
    )
    for verb in ("PUT", "COPY"):
        assert seen[verb]["x-amz-server-side-encryption"] == "aws:kms"
        assert seen[verb]["x-amz-server-side-encryption-aws-kms-key-id"] == "our-key"
    assert "PUT /bucket/prefix/a" in bucket_server.asked


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket", ("bucket", "")),
        ("s3://bucket/", ("bucket", "")),
        ("s3://my.bucket-1/a/b/", ("my.bucket-1", "a/b")),
    ],
)
def test_a_bucket_is_written_as_a_url(url: str, place: tuple[str, str]) -> None:
    assert parse(url) == place
    assert str(Bucket(*place)) == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    ["", "bucket", "s3:/bucket", "s3://", "s3://UPPER", "s3://a", "s3://bucket//a", "s3://bucket/../a", "gs://bucket"],
)
def test_anything_else_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(url)
    assert "s3://BUCKET" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "url",
    ["minio:9000", "http://", "ftp://host", "https://host?x=1", "http://[::1", "http://host:99999", "http://host:port"],
)
def test_an_endpoint_is_a_server(url: str) -> None:
    with pytest.raises(UsageError):
        check_endpoint(url)


def test_an_endpoint_has_no_password_and_it_is_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        check_endpoint("https://user:secret@host")
    assert "secret" not in str(caught.value)


def opened(tmp_path: Path, **given: str | bool) -> S3Store | None:
    """The mirror that settings describe."""
    etc = tmp_path / "etc.toml"
    etc.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()))
    mirror = open_cache(load({"HOME": str(tmp_path)}, {}, etc=etc), {}).mirror
    assert mirror is None or isinstance(mirror, S3Store)
    return mirror


def test_every_setting_of_a_mirror_reaches_it(tmp_path: Path) -> None:
    assert opened(tmp_path) is None
    assert opened(tmp_path, mirror="s3://bucket/a", offline=True) is None
    plain = opened(tmp_path, mirror="s3://bucket/a/")
    assert plain is not None
    assert plain._link.bucket == Bucket("bucket", "a")
    full = opened(
        tmp_path,
        mirror="s3://bucket/a",
        mirror_endpoint="https://minio:9000",
        mirror_region="eu-west-1",
        mirror_profile="fleet",
        mirror_path_style=False,
        mirror_kms_key="key",
        mirror_requester_pays=True,
        mirror_anonymous=True,
    )
    assert full is not None
    assert full._link.bucket == Bucket(
        "bucket", "a", "https://minio:9000", "eu-west-1", "fleet", False, "aws:kms", "key", True, True
    )
    with pytest.raises(UsageError, match="no bucket"):
        opened(tmp_path, mirror="/mnt/bucket")
    with pytest.raises(UsageError, match=r"`mirror_sse` .* must be one of `AES256`"):
        opened(tmp_path, mirror="s3://bucket", mirror_sse="yes")


GUIDE = (Path(__file__).parent.parent / "docs" / "mirror.md").read_text()


def test_the_guide_names_every_word_and_every_setting() -> None:
    rows = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \|", GUIDE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    ours = {setting.name for setting in TABLE if setting.name.startswith("mirror") or setting.name == "offline"}
    assert named == ours | set(FAULTS)


def test_the_policy_of_the_guide_is_one_and_names_what_hints_ask_for() -> None:
    policy = json.loads(re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)[0])
    allowed = [statement["Action"] for statement in policy["Statement"]]
    flat = {action for each in allowed for action in (each if isinstance(each, list) else [each])}
    assert flat == {"s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"}


@pytest.mark.slow
def test_the_commands_of_the_guide_do_what_they_say(running_s3: S3Server, tmp_path: Path) -> None:
    bucket = running_s3.fresh()
    machine = Machine(
        tmp_path / "machine",
        tmp_path / "store",
        install_stand_in(tmp_path)
        | {
            "CACHEMGR_MIRROR": str(bucket),
            "CACHEMGR_PUBLISH": "mirror",
            "CACHEMGR_TRUST": "mirror=off",
            "CACHEMGR_MIRROR_ENDPOINT": running_s3.endpoint,
            "CACHEMGR_MIRROR_REGION": "us-east-1",
            **running_s3.environ,
        },
    )
    shown = re.findall(r"^\$ cachemgr (.*)", GUIDE, re.MULTILINE)
    assert len(shown) >= 4
    for line in shown:
        machine.cachemgr(*shlex.split(line))
