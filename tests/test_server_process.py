"""The service as a process: it starts safely, stops gracefully, and loses nothing that it has acknowledged, whatever
kills it; the command line asks it, and launches are told to it without waiting."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachemgr.store import records
from cachemgr.store.local import LocalStore
from tests.machines import Fleet, Machine, wait_for
from tests.plugged import Plugged
from tests.plugged import run as run_plugged
from tests.pods import ROOT
from tests.serving import report_of, started

PAGE = re.findall(r"^\$ (.*)$", (ROOT / "docs" / "service.md").read_text(), re.MULTILINE)
"""The commands that the documentation shows."""


class Served:
    """A running `cachemgr serve`."""

    def __init__(self, machine: Machine, *words: str, **more: str) -> None:
        machine.make_places()
        self._log = machine.root / f"serve-{len(list(machine.root.glob('serve-*')))}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cachemgr", "serve", "--port", "0", "--interval", "0.2", *words],
                # Launches of the tests are of one day, whenever they run.
                env={"CACHEMGR_LAUNCH_AGE": "36500d", **machine.environ, **more},
                cwd=machine.root,
                stderr=log,
            )
        wait_for(lambda: " on http" in self.said or self.process.poll() is not None)
        assert self.process.poll() is None, self.said
        self.url = re.findall(r"https?://\S+", self.said)[0]

    @property
    def said(self) -> str:
        """What it said so far."""
        return self._log.read_text()

    def ask(self, path: str, body: object = None, token: str = "") -> Any:
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def ready(self) -> "Served":
        def holds() -> bool:
            with contextlib.suppress(urllib.error.HTTPError):
                return bool(self.ask("/readyz")["status"] == "ok")
            return False

        wait_for(holds)
        return self

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


@pytest.fixture
def server(fleet: Fleet) -> Machine:
    return fleet.machine("server")


@pytest.fixture
def token(server: Machine) -> str:
    return server.cachemgr("token", "create", "node", "--role", "admin").stdout.strip()


@pytest.fixture
def served(server: Machine, token: str) -> Iterator[Served]:
    made = Served(server).ready()
    yield made
    if made.process.poll() is None:
        assert made.end(signal.SIGTERM) == 0, made.said


def names(machine: Machine) -> set[str]:
    return {launch.launch for launch in records.launches(LocalStore(machine.store))}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "0.0.0.0"), "tokens would travel in clear"),
        (("--host", "::"), "tokens would travel in clear"),
        (("--tls-cert", __file__), "TLS needs a certificate and its key"),
        (("--tls-cert", __file__, "--tls-key", __file__), "cannot be used"),
        (("--host", "203.0.113.1", "--insecure-public"), "cannot listen on 203.0.113.1"),
        (("--host", "nowhere.invalid", "--insecure-public"), "cannot listen on nowhere.invalid:0: Name or service"),
    ],
)
def test_it_does_not_start_unsafely(server: Machine, words: tuple[str, ...], said: str) -> None:
    assert said in server.cachemgr("serve", "--port", "0", *words, code=2).stderr


def test_tokens_are_made_shown_once_listed_and_revoked(server: Machine) -> None:
    secret = server.cachemgr("token", "create", "grafana", "--role", "read", "--expires", "90d").stdout.strip()
    assert re.fullmatch(r"cmgr_[0-9a-f]{64}", secret)
    assert "already" in server.cachemgr("token", "create", "grafana", "--role", "read", code=2).stderr
    server.cachemgr("token", "create", "other", "--role", "admin", "--dry-run")
    listed = server.cachemgr("token", "list").stdout
    assert "grafana" in listed
    assert "counts" in listed
    assert secret not in listed
    assert "other" not in listed
    server.cachemgr("token", "revoke", "grafana")
    assert "revoked" in server.cachemgr("token", "list").stdout
    server.cachemgr("token", "revoke", "nobody", code=10)
    server.cachemgr("token", "revoke", "nobody", "--dry-run", code=10)
    document = json.loads(server.cachemgr("token", "list", "--json").stdout)
    assert [each["name"] for each in document["tokens"]] == ["grafana"]


def test_the_commands_about_tokens_do_what_the_page_says(server: Machine) -> None:
    shown = [line for line in PAGE if line.startswith("cachemgr token")]
    assert len(shown) == 4
    said = [server.cachemgr(*shlex.split(line)[1:]).stdout for line in shown]
    assert [name in said[2] for name in ("grafana", "nodes")] == [True, True]


def test_launches_are_told_to_the_service_and_the_command_line_asks_it(
    fleet: Fleet, server: Machine, served: Served, token: str
) -> None:
    node = fleet.machine("node", CACHEMGR_SERVER=served.url, CACHEMGR_SERVER_TOKEN=token)
    node = Machine(node.root, node.root / "own-store", node.variables)
    key = node.run(*fleet.command("f"))["key"]
    Machine(fleet.directory / "second", node.store, node.variables).run(*fleet.command("f"))
    wait_for(lambda: len(names(server)) == 2)
    assert "cachemgr_launches_total" in urllib.request.urlopen(served.url + "/metrics", timeout=60).read().decode()
    asked = ("--server", served.url)
    total = json.loads(node.cachemgr(*asked, "stats", "--json").stdout)["total"]
    assert (total["starts"], total["verdicts"]) == (2, {"cold": 1, "used": 1})
    why = json.loads(node.cachemgr(*asked, "why", "--json").stdout)["why"]
    assert (why["key"], why["verdict"]) == (key, "used")
    assert "no artifacts in" in node.cachemgr(*asked, "ls").stderr, "it is in the node's own store only"
    shared = fleet.machine("builder")
    shared.run(*fleet.command("f"))
    wait_for(lambda: key in node.cachemgr(*asked, "ls", "-q").stdout)
    assert json.loads(node.cachemgr(*asked, "show", key[:12], "--json").stdout)["artifact"]["key"] == key
    assert "factors" in node.cachemgr(*asked, "show", key[:12]).stdout
    looked = json.loads(node.cachemgr(*asked, "lookup", "--json", "--", *fleet.command("f")).stdout)
    assert (looked["result"], looked["artifact"]) == ("exact", key)
    near = json.loads(node.cachemgr(*asked, "why", "--json", "--", *fleet.command("g")).stdout)["why"]
    assert near["artifact"] == key
    assert near["word"] == "differs"
    for words, code in (((key,), 0), (("--", *fleet.command("g")), 1)):
        here = json.loads(shared.cachemgr("diff", "--json", key[:12], *words, code=code).stdout)
        assert json.loads(node.cachemgr(*asked, "diff", "--json", key[:12], *words, code=code).stdout) == here
    assert "has no `--mirror`" in node.cachemgr(*asked, "diff", "--mirror", key, key, code=2).stderr
    assert "no artifact `k1:ffff`" in node.cachemgr(*asked, "diff", "k1:ffff", key, code=10).stderr
    shown = [line for line in PAGE if line.startswith("cachemgr --server") and " lookup " not in line]
    assert len(shown) == 5
    for line in shown:
        words = line.replace("https://cache.example", served.url).replace("k1:24c0ada7c", key[:12])
        node.cachemgr(*shlex.split(words)[1:])
    assert "no artifact `k1:ffff`" in node.cachemgr(*asked, "show", "k1:ffff", code=10).stderr
    assert "has no `--mirror`" in node.cachemgr(*asked, "ls", "--mirror", code=2).stderr


def test_a_service_that_is_gone_costs_a_launch_nothing_and_is_told_later(
    fleet: Fleet, server: Machine, token: str
) -> None:
    nowhere = {"CACHEMGR_SERVER": "http://127.0.0.1:9", "CACHEMGR_SERVER_TOKEN": token}
    node = fleet.machine("node", **nowhere)
    report = node.run(*fleet.command("f"))
    assert report["errors"] == {}
    assert "does not answer" in node.cachemgr("--server", "http://127.0.0.1:9", "ls", code=13).stderr
    waiting = list((node.home / ".cache/cachemgr/reports").glob("*/*.json"))
    assert len(waiting) == 1
    assert token not in "".join(path.read_text() for path in node.root.rglob("*.json"))


def test_the_plugin_tells_the_service_of_a_start_and_never_waits_for_it(
    tmp_path: Path, served: Served, server: Machine
) -> None:
    engines = Plugged.install(tmp_path / "engines")
    secret = server.cachemgr("token", "create", "nodes", "--role", "report").stdout.strip()
    told = {"CACHEMGR_SERVER": served.url, "CACHEMGR_SERVER_TOKEN": secret}
    cold = run_plugged(engines.machine("node", **told), engines.serve())
    assert cold.report is not None
    assert cold.report["errors"] == {}
    store, name = LocalStore(server.store), cold.report["launch"]
    wait_for(lambda: [(each.launch, each.exit_code) for each in records.launches(store)] == [(name, 0)])
    (launch,) = records.launches(store)
    assert (launch.verdict, launch.model) == ("cold", "model")
    assert (launch.engine, launch.engine_version) == ("vllm", "0.32.0")
    gone = run_plugged(engines.machine("other", **{**told, "CACHEMGR_SERVER": "http://127.0.0.1:9"}), engines.serve())
    assert gone.told == ("exact", "used", 0)
    assert len(gone.said) == 2, "nothing about a service that nobody waits for"
    assert secret not in cold.stderr + gone.stderr


def test_it_answers_what_it_has_begun_and_ends(served: Served, token: str) -> None:
    done: list[Any] = []
    reports = [report_of(started(f"l{number}")) for number in range(20)]
    threads = [
        threading.Thread(target=lambda body=body: done.append(served.ask("/v1/launches", body, token)))
        for body in reports
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: done)
    assert served.end() == 0, served.said
    for thread in threads:
        thread.join(60)
    assert all(each["taken"] == 1 for each in done)


def test_no_acknowledged_report_is_lost_however_it_is_killed(server: Machine, token: str) -> None:
    acknowledged: set[str] = set()
    for generation in range(3):
        served = Served(server).ready()
        kill = threading.Timer(0.5 + 0.3 * generation, lambda served=served: served.process.kill())
        kill.start()
        number = 0
        with contextlib.suppress(OSError):  # it was killed
            while True:
                name = f"g{generation}-{number}"
                served.ask("/v1/launches", report_of(started(name)), token)
                acknowledged.add(name)
                number += 1
        served.process.wait(60)
    assert len(acknowledged) > 3
    assert acknowledged <= names(server)
    served = Served(server).ready()
    try:
        wait_for(lambda: served.ask("/v1/stats", token=token)["total"]["starts"] == len(names(server)))
    finally:
        served.end()


def test_the_head_of_a_request_has_an_end(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as asking:
        for _request in range(3):
            asking.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                piece = asking.recv(1 << 16)
                assert piece, "it stays open"
                answer += piece
            assert answer.startswith(b"HTTP/1.1 200")
        with pytest.raises(OSError):
            asking.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * (64 << 20))
    assert served.ask("/healthz")["status"] == "ok"


def test_a_client_that_leaves_in_the_middle_is_no_bug(served: Served, token: str) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/launches HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nContent-Length: 10\r\n\r\n"
    )
    before = served.said
    for _time in range(3):
        with socket.create_connection((host, int(port)), timeout=60) as asking:
            asking.sendall(head.encode() + b"{")
            time.sleep(0.1)
    assert served.ask("/healthz")["status"] == "ok"
    assert served.end() == 0
    assert served.said == before


def test_a_store_that_is_gone_is_no_empty_one(server: Machine, fleet: Fleet, token: str) -> None:
    server.run(*fleet.command("f"))
    served = Served(server).ready()
    away = server.store.with_name("away")

    def readiness() -> str:
        try:
            return str(served.ask("/readyz")["status"])
        except urllib.error.HTTPError as error:
            return str(json.loads(error.read())["status"])

    wait_for(lambda: served.ask("/v1/artifacts", token=token)["artifacts"])
    server.store.rename(away)
    server.store.mkdir()  # where its volume was mounted
    wait_for(lambda: readiness() == "failing")
    assert f"warning: {server.store} is not there any more\n" in served.said
    assert served.ask("/v1/artifacts", token=token)["artifacts"]
    server.store.rmdir()
    away.rename(server.store)
    wait_for(lambda: readiness() == "ok")
    assert served.end() == 0


def test_it_speaks_tls(server: Machine, token: str, tmp_path: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    try:
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl here, which makes the certificate")
    served = Served(server, "--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    try:
        assert served.url.startswith("https://")
        trusted = str(tmp_path / "cert.pem")
        server.cachemgr("--server", served.url, "ls", SSL_CERT_FILE=trusted, CACHEMGR_SERVER_TOKEN=token)
        assert "certificate" in server.cachemgr("--server", served.url, "ls", code=13).stderr
        (tmp_path / "key.pem").write_text("half of a new pair")
        wait_for(lambda: "cannot be used, the old one is" in served.said)
        server.cachemgr("--server", served.url, "ls", SSL_CERT_FILE=trusted, CACHEMGR_SERVER_TOKEN=token)
        old = shutil.copy(trusted, tmp_path / "old.pem")
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        wait_for(lambda: "cert.pem is used from now on" in served.said)
        server.cachemgr("--server", served.url, "ls", SSL_CERT_FILE=trusted, CACHEMGR_SERVER_TOKEN=token)
        server.cachemgr("--server", served.url, "ls", code=13, SSL_CERT_FILE=str(old), CACHEMGR_SERVER_TOKEN=token)
    finally:
        served.end()


def test_nothing_of_the_service_is_loaded_by_a_launch() -> None:
    code = (
        "import sys, cachemgr.cli.run, cachemgr.cli.artifacts, cachemgr.cli.lookup, cachemgr.cli.reporter;"
        "print([name for name in ('starlette', 'uvicorn', 'jinja2', 'prometheus_client', 'sqlalchemy')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"
