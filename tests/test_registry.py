"""Real registries: images go there and come back, with passwords and tokens as they ask for them, and other tools read
what is there."""

import base64
import io
import json
import os
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import urllib3

from cachemgr import digest
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, NotFoundError, RegistryError, StoreError, UsageError
from cachemgr.export import Export
from cachemgr.oci.credentials import Login, login
from cachemgr.oci.documents import Descriptor
from cachemgr.oci.images import ImageStore
from cachemgr.oci.place import Reference
from cachemgr.oci.registry import Registry
from cachemgr.store.captures import keys, unasked
from cachemgr.store.local import LocalStore
from cachemgr.store.transfer import Transfer
from tests.machines import Fleet, Machine
from tests.registries import (
    PASSWORD,
    USER,
    RunningRegistry,
    needs_registry,
    needs_skopeo,
    running,
    skopeo,
    unpacked,
    with_passwords,
    with_tokens,
)
from tests.test_transfer import KEY, NOW, without_near
from tests.trees import FEW, build, publish_trees


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    with running(tmp_path_factory.mktemp("registry") / "it") as made:
        yield made


@pytest.fixture
def source(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "source")
    publish_trees(store, build(tmp_path / "live", FEW))
    return store


def no_pause(_seconds: float) -> None:
    """Nobody waits here."""


def place(host: str, repository: str, home: Path | None = None, tag: str = "h200") -> Registry:
    environ = {} if home is None else {"HOME": str(home)}
    return Registry(Reference(host, repository, tag), environ, pause=no_pause)


def exported(source: LocalStore, target: Registry) -> Digest:
    journey = Export(source, target, judge=unasked)
    plan = journey.plan([KEY])
    journey.carry(plan)
    return plan.images[0].digest


def brought(source: Registry, target: LocalStore) -> None:
    images = ImageStore(source)
    transfer = Transfer(images, target, judge=unasked)
    assert transfer.carry(transfer.plan(keys(images), now=NOW)).failures == ()


@needs_registry
def test_what_went_to_a_registry_comes_back_object_by_object(
    registry: RunningRegistry, source: LocalStore, tmp_path: Path
) -> None:
    name = exported(source, place(registry.host, "team/llama"))
    target = LocalStore(tmp_path / "target")
    brought(place(registry.host, "team/llama"), target)
    assert without_near(target) == without_near(source)
    again = Export(source, place(registry.host, "team/llama"), judge=unasked).plan([KEY])
    assert (again.objects, again.skipped_objects, again.images[0].digest) == (1, 3, name)
    brought(place(registry.host, "team/llama", tag=name), LocalStore(tmp_path / "by-digest"))


@needs_registry
def test_what_is_not_there_is_absent(registry: RunningRegistry) -> None:
    with pytest.raises(NotFoundError, match="there is no"):
        ImageStore(place(registry.host, "team/nothing"))


@needs_registry
@needs_skopeo
def test_a_copy_by_skopeo_is_the_same_image(registry: RunningRegistry, source: LocalStore, tmp_path: Path) -> None:
    name = exported(source, place(registry.host, "from/here"))
    url = f"docker://{registry.host}/"
    told = json.loads(skopeo("inspect", "--tls-verify=false", f"{url}from/here:h200"))
    assert told["Digest"] == name
    assert told["Labels"]["io.kserve.km/framework"] == "vllm"
    skopeo("copy", "-q", "--src-tls-verify=false", f"{url}from/here:h200", f"oci:{tmp_path}/carried:h200")
    skopeo("copy", "-q", "--dest-tls-verify=false", f"oci:{tmp_path}/carried:h200", f"{url}to/there:h200")
    target = LocalStore(tmp_path / "target")
    brought(place(registry.host, "to/there"), target)
    assert without_near(target) == without_near(source)
    assert ImageStore(place(registry.host, "to/there", tag=name)).has("layout.json")


@needs_registry
def test_passwords_and_tokens_are_given_to_who_asks_for_them(source: LocalStore, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with with_passwords(tmp_path / "passwords") as guarded, with_tokens(tmp_path / "tokens") as (bearer, tokens):
        for each in (guarded, bearer):
            for stranger in (None, tmp_path / "wrong"):
                if stranger is not None:
                    each.login(stranger, "wrong")
                with pytest.raises(RegistryError, match="does not let us use team/llama") as caught:
                    exported(source, place(each.host, "team/llama", stranger))
                assert caught.value.word == "denied"
                assert "wrong" not in str(caught.value)
            each.login(home)
            exported(source, place(each.host, "team/llama", home))
            target = LocalStore(tmp_path / each.host)
            brought(place(each.host, "team/llama", home), target)
            assert without_near(target) == without_near(source)
        scopes = {scope for query in tokens.asked for scope in query.get("scope", [])}
    names, actions = zip(*(scope.rsplit(":", 1) for scope in scopes), strict=True)
    assert set(names) == {"repository:team/llama"}
    assert {frozenset(each.split(",")) for each in actions} == {frozenset({"pull"}), frozenset({"pull", "push"})}


@needs_registry
def test_a_token_that_ends_half_way_is_got_anew(source: LocalStore, tmp_path: Path) -> None:
    home = tmp_path / "home"
    # The registry lets old tokens in for a minute (docker/distribution `registry/auth/token`, Leeway).
    with with_tokens(tmp_path / "tokens", lifetime=-61.0) as (bearer, tokens):
        bearer.login(home)
        target = place(bearer.host, "team/llama", home)
        with pytest.raises(RegistryError):
            exported(source, target)
        tokens.lifetime = 300.0
        exported(source, target)


@needs_registry
def test_commands_move_images_between_a_store_and_a_registry(registry: RunningRegistry, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    builder = fleet.machine("builder")
    key = builder.run(*fleet.command("f"))["key"]
    where = f"{registry.host}/cli/f:v1"
    assert "exported 1 image" in builder.cachemgr("export", key, "--oci", where).stderr
    pod = Machine(tmp_path / "pod", tmp_path / "pod-store", {**fleet.variables, "CACHEMGR_TRUST": "image=off"})
    assert "imported 1 capture" in pod.cachemgr("import", where).stderr
    assert pod.run(*fleet.command("f"))["verdict"] == "used"
    assert "there is no" in pod.cachemgr("import", f"{registry.host}/cli/f:v2", code=10).stderr
    down = pod.cachemgr("import", "127.0.0.1:1/cli/f:v1", code=13)
    assert "cannot be reached" in down.stderr
    assert "Traceback" not in down.stderr


@needs_registry
@needs_skopeo
def test_an_image_pulled_from_a_registry_is_a_seed(registry: RunningRegistry, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    builder = fleet.machine("builder")
    key = builder.run(*fleet.command("f"))["key"]
    builder.cachemgr("keygen", "signing.pem")
    builder.cachemgr("sign", key, "--key", "signing.pem")
    builder.cachemgr("export", key, "--oci", f"{registry.host}/seed/f:v1")
    root = unpacked(f"docker://{registry.host}/seed/f:v1", tmp_path)
    variables = {"CACHEMGR_SEED": str(root), "CACHEMGR_TRUSTED_KEYS": str(builder.root / "signing.pem.pub")}
    pod = Machine(tmp_path / "pod", tmp_path / "pod-store", {**fleet.variables, **variables})
    report = pod.run(*fleet.command("f"))
    assert (report["result"], report["where"], report["verdict"]) == ("exact", "seed", "used")


# Failures that a healthy registry does not show


class Scripted(ThreadingHTTPServer):
    """A registry that answers as it is told, one answer a request, and notes what it was asked."""

    daemon_threads = True

    def __init__(self, *answers: tuple[int, dict[str, str], bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.asked: list[tuple[str, str, str | None]] = []
        self.proxied: list[str | None] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def _answer(self) -> None:
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization")))
        self.server.proxied.append(self.headers.get("Proxy-Authorization"))
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, headers, body = self.server.answers.pop(0)
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = _answer  # noqa: N815 - the names that it looks for

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


BUSY: tuple[int, dict[str, str], bytes] = (503, {}, b"busy")


def test_a_busy_registry_is_asked_again_and_not_for_ever() -> None:
    document = b'{"schemaVersion": 2}'
    server = Scripted(BUSY, (429, {"Retry-After": "3600"}, b""), (200, {}, document))
    assert place(server.host, "a").index() == document
    server = Scripted(*[BUSY] * 4)
    with pytest.raises(RegistryError, match="status 503") as caught:
        place(server.host, "a").index()
    assert caught.value.word == "unreachable"
    assert len(server.asked) == 4


def test_an_upload_that_fails_half_way_begins_again() -> None:
    begun = (202, {"Location": "/v2/a/blobs/uploads/1?state=x"}, b"")
    server = Scripted(begun, BUSY, begun, (201, {}, b""))
    data = b"blob" * 1000
    opened: list[int] = []

    def source() -> io.BytesIO:
        opened.append(1)
        return io.BytesIO(data)

    place(server.host, "a").put(Descriptor("x", digest.of_bytes(data), len(data)), source)
    assert len(opened) == 2
    assert server.asked[-1][1].startswith("/v2/a/blobs/uploads/1?state=x&digest=sha256%3A")


def test_a_registry_that_was_busy_still_lets_in_who_may(tmp_path: Path) -> None:
    server = Scripted(BUSY, BUSY, BUSY, (401, {"WWW-Authenticate": 'Basic realm="x"'}, b""), (200, {}, b"{}"))
    RunningRegistry(server.host, tmp_path).login(tmp_path)
    assert place(server.host, "a", tmp_path).index() == b"{}"


def test_what_is_asked_for_by_digest_has_it() -> None:
    """Where no signature is asked for, the digest is all that there is."""
    document = b'{"schemaVersion": 2}'
    server = Scripted((200, {}, document), (200, {}, document))
    assert place(server.host, "a", tag=digest.of_bytes(document)).index() == document
    with pytest.raises(CorruptError, match="other bytes"):
        place(server.host, "a", tag=digest.of_bytes(b"another")).index()


def test_a_proxy_is_asked_as_its_address_says() -> None:
    proxy = Scripted((200, {}, b"{}"), (200, {}, b"{}"))
    for named in (proxy.host, f"http://{USER}:p%40ss@{proxy.host}"):
        made = Registry(Reference("reg.example", "a", "b"), {"HTTP_PROXY": named}, plain_http=True)
        assert made.index() == b"{}"
    assert {each[1] for each in proxy.asked} == {"http://reg.example/v2/a/manifests/b"}
    assert proxy.proxied == [None, "Basic " + base64.b64encode(f"{USER}:p@ss".encode()).decode()]


@pytest.mark.parametrize("passed", ["*", "example", ".example", "*.example", "other, reg.example"])
def test_no_proxy_names_who_is_asked_directly(passed: str) -> None:
    direct = Registry(Reference("reg.example", "a", "b"), {"https_proxy": "http://127.0.0.1:1", "NO_PROXY": passed})
    assert not isinstance(direct._pool, urllib3.ProxyManager)


def test_a_registry_on_this_machine_has_no_proxy() -> None:
    server = Scripted((200, {}, b"{}"))
    made = Registry(Reference(server.host, "a", "b"), {"HTTP_PROXY": "http://127.0.0.1:1"}, pause=no_pause)
    assert made.index() == b"{}"


@pytest.mark.parametrize("named", ["socks5://u:secret@proxy:1", "http://u:secret@proxy:port"])
def test_a_proxy_that_cannot_be_used_is_a_usage_error(named: str) -> None:
    with pytest.raises(UsageError, match=r"reg\.example") as caught:
        Registry(Reference("reg.example", "a", "b"), {"HTTPS_PROXY": named})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("status", [400, 413])
def test_a_refusal_is_final(status: int) -> None:
    server = Scripted((status, {}, b""))
    with pytest.raises(RegistryError, match=f"status {status}") as caught:
        place(server.host, "a").index()
    assert (caught.value.word, len(server.asked)) == ("refused", 1)


def test_a_body_that_is_cut_short_is_no_blob() -> None:
    server = Scripted((200, {"Content-Length": "100"}, b"short"))
    with (
        pytest.raises(StoreError, match="cannot be reached"),
        place(server.host, "a").open(Digest("sha256:00")) as body,
    ):
        body.read()


def test_a_login_goes_to_no_other_host_and_blobs_are_followed_there(tmp_path: Path) -> None:
    elsewhere = Scripted((200, {}, b"blob"), (200, {}, b""))
    challenge = {"WWW-Authenticate": 'Basic realm="x"'}
    # Another name of this host is another host.
    moved = {"Location": f"http://localhost:{elsewhere.server_port}/blob"}
    server = Scripted((401, challenge, b""), (307, moved, b""), (307, moved, b""))
    RunningRegistry(server.host, tmp_path).login(tmp_path)
    target = place(server.host, "a", tmp_path)
    with target.open(Digest("sha256:00")) as body:
        assert body.read() == b"blob"
    assert target.has(Descriptor("x", Digest("sha256:00"), 4))
    assert [each[2] is not None for each in server.asked] == [False, True, True]
    assert [each[::2] for each in elsewhere.asked] == [("GET", None), ("HEAD", None)]


def test_a_token_server_without_tls_gets_no_login_of_a_registry_with_it(tmp_path: Path) -> None:
    made = Registry(Reference("reg.example", "a", "b"), {"HOME": str(tmp_path)})
    with pytest.raises(RegistryError, match="no TLS"):
        made._token({"realm": "http://reg.example/token"}, Login("u", "p"))


def test_a_manifest_is_read_to_its_limit_only() -> None:
    server = Scripted((200, {}, b" " * (5 << 20)))
    with pytest.raises(CorruptError, match="more than"):
        ImageStore(place(server.host, "a"))


# Logins


def written(path: Path, document: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


AUTH = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
KNOWN = {"auths": {"reg.example": {"auth": AUTH}}}


@pytest.mark.parametrize(
    ("variable", "file"),
    [
        ("HOME", ".docker/config.json"),
        ("HOME", ".config/containers/auth.json"),
        ("DOCKER_CONFIG", "config.json"),
        ("XDG_RUNTIME_DIR", "containers/auth.json"),
    ],
)
def test_logins_are_found_where_other_tools_leave_them(tmp_path: Path, variable: str, file: str) -> None:
    written(tmp_path / file, KNOWN)
    assert login("reg.example", {variable: str(tmp_path)}) == Login(USER, PASSWORD)
    assert login("other.example", {variable: str(tmp_path)}) is None
    assert login("reg.example", {}) is None


def test_a_named_file_of_logins_comes_first(tmp_path: Path) -> None:
    written(tmp_path / ".docker" / "config.json", KNOWN)
    other = written(tmp_path / "auth.json", {"auths": {"reg.example": {"username": "u", "password": "p"}}})
    assert login("reg.example", {"HOME": str(tmp_path), "REGISTRY_AUTH_FILE": str(other)}) == Login("u", "p")


def test_the_hub_has_a_name_of_its_own(tmp_path: Path) -> None:
    written(tmp_path / ".docker" / "config.json", {"auths": {"https://index.docker.io/v1/": {"auth": AUTH}}})
    assert login("docker.io", {"HOME": str(tmp_path)}) == Login(USER, PASSWORD)


HELPER = """#!/bin/sh
[ "$1" = get ] && read -r name
[ "$name" = reg.example ] && echo '{"ServerURL":"x","Username":"u","Secret":"s"}' || { echo none; exit 1; }
"""


@pytest.mark.parametrize(
    "document",
    [
        {"credHelpers": {"reg.example": "tests"}},
        {"credsStore": "tests"},
        {"credHelpers": {"reg.example": "tests"}, **KNOWN},
    ],
    ids=["of one", "of all", "and an old login"],
)
def test_a_helper_is_asked_as_docker_asks_it(tmp_path: Path, document: object) -> None:
    written(tmp_path / ".docker" / "config.json", document)
    helper = tmp_path / "docker-credential-tests"
    helper.write_text(HELPER)
    helper.chmod(helper.stat().st_mode | stat.S_IXUSR)
    environ = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert login("reg.example", environ) == Login("u", "s")
    assert login("other.example", environ) is None
    with pytest.raises(StoreError, match="docker-credential-tests"):
        login("reg.example", {"HOME": str(tmp_path), "PATH": str(tmp_path / "nowhere")})


@pytest.mark.parametrize("text", ["no json", '{"auths": {"reg.example": {"auth": "***"}}}', '{"auths": []}'])
def test_a_login_that_cannot_be_read_is_told_without_its_content(tmp_path: Path, text: str) -> None:
    path = tmp_path / ".docker" / "config.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(StoreError) as caught:
        login("reg.example", {"HOME": str(tmp_path)})
    assert "***" not in str(caught.value)
