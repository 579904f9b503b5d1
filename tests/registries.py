"""Real registries for the tests: Debian's docker-registry, on a free port of this host, open, with passwords, or with
tokens; and skopeo, which copies and unpacks images as container runtimes do.

`scripts/system-packages` installs both; without them the tests that need them are skipped.
"""

import base64
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import urllib3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from tests.s3_server import die_with_parent, free_ports

DAEMON, SKOPEO = shutil.which("docker-registry"), shutil.which("skopeo")
needs_registry = pytest.mark.skipif(DAEMON is None, reason="no docker-registry here: scripts/system-packages")
needs_skopeo = pytest.mark.skipif(SKOPEO is None, reason="no skopeo here: scripts/system-packages")

USER, PASSWORD = "somebody", "secret"
_PASSWORDS = "somebody:$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n"
_START_SECONDS = 60.0


@dataclass(frozen=True)
class RunningRegistry:
    """A registry that listens."""

    host: str
    directory: Path

    def log(self) -> str:
        return (self.directory / "registry.log").read_text()

    def login(self, home: Path, password: str = PASSWORD) -> None:
        """What `docker login` leaves in a home."""
        auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
        (home / ".docker").mkdir(parents=True, exist_ok=True)
        (home / ".docker" / "config.json").write_text(json.dumps({"auths": {self.host: {"auth": auth}}}))


@contextmanager
def running(directory: Path, auth: dict[str, object] | None = None) -> Iterator[RunningRegistry]:
    """A registry with its data below `directory`, and `auth` in its configuration."""
    assert DAEMON is not None, "marked with needs_registry"
    (port,) = free_ports(1)
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, object] = {
        "version": 0.1,
        "log": {"accesslog": {"disabled": False}, "level": "info"},
        "storage": {"filesystem": {"rootdirectory": str(directory / "data")}, "delete": {"enabled": True}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    if auth is not None:
        config["auth"] = auth
    (directory / "config.yml").write_text(json.dumps(config))  # JSON is YAML
    with (directory / "registry.log").open("wb") as log:
        process = subprocess.Popen(
            [DAEMON, "serve", str(directory / "config.yml")],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call
        )
    made = RunningRegistry(f"127.0.0.1:{port}", directory)
    try:
        _wait(made, process)
        yield made
    finally:
        process.kill()
        process.wait()


def _wait(registry: RunningRegistry, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + _START_SECONDS
    while True:
        assert process.poll() is None, registry.log()
        try:
            urllib3.request("GET", f"http://{registry.host}/v2/", timeout=5, retries=False)
        except urllib3.exceptions.HTTPError:
            assert time.monotonic() < end, registry.log()
            time.sleep(0.05)
        else:
            return


@contextmanager
def with_passwords(directory: Path) -> Iterator[RunningRegistry]:
    """A registry that lets in who has the password of USER."""
    directory.mkdir(parents=True)
    (directory / "passwords").write_text(_PASSWORDS)
    with running(directory, {"htpasswd": {"realm": "tests", "path": str(directory / "passwords")}}) as made:
        yield made


@dataclass
class Tokens:
    """A server that gives tokens to USER, as that of Docker Hub does (distribution, "Token Authentication")."""

    asked: list[dict[str, list[str]]] = field(default_factory=list)
    """The query of each request."""
    lifetime: float = 300.0
    realm: str = ""
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def certificate(self) -> bytes:
        """The certificate of its key, in PEM."""
        return self._signed.public_bytes(serialization.Encoding.PEM)

    @cached_property
    def _signed(self) -> x509.Certificate:
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tokens")])
        now = datetime.now(timezone.utc)
        made = x509.CertificateBuilder(name, name, self.key.public_key(), 7, now - timedelta(1), now + timedelta(1))
        return made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(
            self.key, hashes.SHA256()
        )

    def token(self, scopes: list[str], user: str) -> str:
        """A signed token for what is asked (RFC 7515, ES256)."""
        now = time.time()
        access = []
        for scope in scopes:
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        der = base64.b64encode(self._signed.public_bytes(serialization.Encoding.DER)).decode()
        claims = {"iss": "tokens", "sub": user, "aud": "tests", "iat": int(now), "nbf": int(now) - 60,
                  "exp": int(now + self.lifetime), "jti": str(len(self.asked)), "access": access}  # fmt: skip
        head = {"typ": "JWT", "alg": "ES256", "x5c": [der]}
        signed = ".".join(_text(json.dumps(part).encode()) for part in (head, claims))
        pair = decode_dss_signature(self.key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{signed}.{_text(b''.join(number.to_bytes(32, 'big') for number in pair))}"


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@contextmanager
def with_tokens(directory: Path, lifetime: float = 300.0) -> Iterator[tuple[RunningRegistry, Tokens]]:
    """A registry that lets in who has a token, and the server that gives them to who has the password of USER."""
    tokens = Tokens(lifetime=lifetime)
    allowed = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            tokens.asked.append(query)
            good = self.headers.get("Authorization") == allowed
            body = json.dumps({"token": tokens.token(query.get("scope", []), USER)} if good else {}).encode()
            self.send_response(200 if good else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    directory.mkdir(parents=True)
    (directory / "tokens.pem").write_bytes(tokens.certificate())
    realm = f"http://127.0.0.1:{server.server_port}/token"
    auth = {"realm": realm, "service": "tests", "issuer": "tokens", "rootcertbundle": str(directory / "tokens.pem")}
    try:
        with running(directory, {"token": auth}) as made:
            yield made, tokens
    finally:
        server.shutdown()
        server.server_close()


def skopeo(*words: str) -> str:
    """What `skopeo WORDS` prints."""
    assert SKOPEO is not None, "marked with needs_skopeo"
    done = subprocess.run([SKOPEO, *words], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def unpacked(image: str, directory: Path) -> Path:
    """The root file system of an image, unpacked as podman and CRI-O do (containers/storage, its driver `vfs`)."""
    skopeo("copy", "-q", *_insecure(image), image, f"containers-storage:[vfs@{directory}/graph+{directory}/run]x/y:z")
    layers = json.loads((directory / "graph" / "vfs-layers" / "layers.json").read_text())
    parents = {layer.get("parent") for layer in layers}
    (top,) = [layer["id"] for layer in layers if layer["id"] not in parents]
    return directory / "graph" / "vfs" / "dir" / str(top)


def _insecure(image: str) -> list[str]:
    return ["--src-tls-verify=false"] if image.startswith("docker://") else []
