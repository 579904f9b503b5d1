"""Single flight by way of a service, for machines that may not write claims: real processes, a real service, and a real
S3 server that refuses them what a policy of its bucket would."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cachemgr.cli.session import WallClock
from cachemgr.errors import DeniedError, UsageError
from cachemgr.key import Key
from cachemgr.process import this_process
from cachemgr.service import Service
from cachemgr.service_claims import ByService, WithService
from cachemgr.store import Entry, Store, layout
from cachemgr.store.claims import InStore, Owner
from cachemgr.store.local import LocalStore
from tests import s3_faults
from tests.machines import Fleet, Machine, wait_for
from tests.s3_server import S3Server
from tests.stores import Wrapper
from tests.test_mirror import Mirrored
from tests.test_server_process import Served

pytestmark = pytest.mark.slow

KEY = Key("k1:" + "ab" * 16)


def owner(name: str) -> Owner:
    return Owner(name, "host", this_process())


class Denied(Wrapper):
    """A store whose policy refuses us some operations on claims."""

    def __init__(self, inner: Store, operations: set[str]) -> None:
        super().__init__(inner)
        self._denied = operations

    def _check(self, operation: str, name: str) -> None:
        if operation in self._denied and name.startswith(layout.CLAIMS):
            raise DeniedError(f"no {operation} of `{name}`")

    def put(self, name: str, data: bytes) -> bool:
        self._check("put", name)
        return super().put(name, data)

    def scan(self, prefix: str) -> Iterator[Entry]:
        self._check("scan", prefix)
        return super().scan(prefix)

    def read(self, name: str, *, limit: int) -> bytes:
        self._check("read", name)
        return super().read(name, limit=limit)


@dataclass(frozen=True)
class Kept:
    """A service on a directory."""

    server: Served
    store: LocalStore
    token: str

    def claims(self, launch: str) -> ByService:
        service, clock = Service(self.server.url, self.token), WallClock()
        return ByService(service, KEY, launch, clock, until=clock.monotonic() + 60)


class Clinic:
    """A mirror with a service, and nodes that have a token."""

    def __init__(self, directory: Path, s3: S3Server) -> None:
        self.fleet = Mirrored(directory, s3)
        self.mirror = self.fleet.mirror
        self.server = self.fleet.machine("server")
        self.token = self.server.cachemgr("token", "create", "nodes", "--role", "report").stdout.strip()
        self.served = Served(self.server).ready()

    def node(self, name: str, **variables: str) -> Machine:
        told = {"CACHEMGR_SERVER": self.served.url, "CACHEMGR_SERVER_TOKEN": self.token}
        return self.fleet.machine(name, **{**told, "NOISE": "1", **variables})

    def start(self, node: Machine, *graphs: str, wait: str = "120") -> "subprocess.Popen[str]":
        return node.start("run", "--single-flight", wait, "--", *self.fleet.command(*graphs))

    @property
    def claims(self) -> list[str]:
        return [entry.name for entry in self.mirror.scan("claims/")]

    def owner(self) -> Owner:
        """Who compiles, once somebody does."""
        wait_for(lambda: self.claims)
        folder, number = self.claims[0].split("/")[1:]
        found = InStore(self.mirror, Key(folder.replace("-", ":", 1))).owner_of(int(number.split(".")[0]))
        assert found is not None
        return found


@pytest.fixture
def clinic(tmp_path: Path, s3: S3Server) -> Iterator[Clinic]:
    made = Clinic(tmp_path, s3)
    yield made
    if made.served.process.poll() is None:
        assert made.served.end() == 0, made.served.said


@pytest.fixture
def closed(clinic: Clinic, s3: S3Server) -> Iterator[dict[str, str]]:
    """The settings of a node whose policy of the bucket has everything but writing claims."""
    place = clinic.fleet.variables["CACHEMGR_MIRROR"].removeprefix("s3:/")
    with s3_faults.faulty(s3.endpoint) as server:
        for verb in ("PUT", "COPY", "DELETE"):
            server.fail(f"{verb} {place}/claims/", s3_faults.error(403, "AccessDenied"))
        yield {"CACHEMGR_MIRROR_ENDPOINT": server.endpoint, "CACHEMGR_PUBLISH": "mirror"}


def ends(*processes: "subprocess.Popen[str]") -> list[str]:
    """What each said on stderr."""
    return [process.communicate(timeout=180)[1] for process in processes]


def test_a_herd_that_may_write_no_claims_compiles_once(clinic: Clinic, closed: dict[str, str]) -> None:
    writer = clinic.node("writer", CACHEMGR_PUBLISH="mirror")  # who writes claims itself is waited for as well
    nodes = [writer, *(clinic.node(f"n{number}", **closed) for number in range(3))]
    said = ends(*(clinic.start(node, "sleep=3", "f", "g") for node in nodes))
    assert sum("compiled f" in each for each in said) == 1, said
    assert sum("cachemgr: exact" in each for each in said) == 3, said
    assert not any("single flight" in each for each in said), said
    assert clinic.claims == []


def test_an_owner_that_is_killed_is_succeeded(clinic: Clinic, closed: dict[str, str]) -> None:
    nodes = [clinic.node(f"n{number}", **closed) for number in range(3)]
    processes = [clinic.start(node, "f", "sleep=4", "g") for node in nodes]
    os.kill(clinic.owner().process.pid, signal.SIGKILL)
    said = ends(*processes)
    assert [process.returncode for process in processes].count(-signal.SIGKILL) == 1
    assert sum("compiled g" in each for each in said) <= 2, said
    assert sum("cachemgr: exact" in each for each in said) == 1, said
    assert clinic.claims == []


def test_a_service_that_dies_meanwhile_costs_no_start_anything(clinic: Clinic, closed: dict[str, str]) -> None:
    owner = clinic.start(clinic.node("owner", **closed), "sleep=4", "f")
    clinic.owner()
    waiting = clinic.start(clinic.node("waiting", **closed), "sleep=4", "f")
    assert waiting.stderr is not None
    for line in waiting.stderr:
        if "waiting for" in line:
            break
    clinic.served.end(signal.SIGKILL)
    said = ends(owner, waiting)
    assert [owner.returncode, waiting.returncode] == [0, 0]
    assert f"cachemgr: single flight failed: the service {clinic.served.url} does not answer" in said[0]
    assert "cachemgr: exact" in said[1], "who waits looks at the mirror"


def test_who_cannot_succeed_an_owner_because_the_service_is_gone_as_well_starts_without(
    clinic: Clinic, closed: dict[str, str]
) -> None:
    owner = clinic.start(clinic.node("owner", **closed), "sleep=30", "f")
    process = clinic.owner().process
    waiting = clinic.start(clinic.node("waiting", **closed), "f")
    clinic.served.end(signal.SIGKILL)
    os.kill(process.pid, signal.SIGKILL)
    _lost, said = ends(owner, waiting)
    assert waiting.returncode == 0
    assert f"cachemgr: single flight failed: the service {clinic.served.url} does not answer" in said
    assert "cachemgr: single flight is off for this start" in said
    assert "compiled f" in said
    assert len(clinic.fleet.arrived(1)) == 1, "and is published all the same"


def test_who_reads_the_mirror_only_waits_for_who_writes_it_and_keeps_nobody_waiting(clinic: Clinic) -> None:
    alone = clinic.node("alone").run(*clinic.fleet.command("g"), options=("--single-flight", "60"))
    assert (alone["verdict"], alone["errors"]) == ("cold", {}), "nobody compiles, and nobody is waited for"
    writer = clinic.start(clinic.node("writer", CACHEMGR_PUBLISH="mirror"), "sleep=4", "f")
    host = clinic.owner().host
    readers = [clinic.start(clinic.node(name, CACHEMGR_PUBLISH=name), "sleep=4", "f") for name in ("never", "local")]
    said = ends(writer, *readers)
    assert [sum("compiled f" in each for each in said), host] == [1, os.uname().nodename], said
    assert sum("cachemgr: exact" in each for each in said) == 2, said
    assert clinic.claims == []


def test_a_service_that_refuses_or_never_answers_is_off_and_said(clinic: Clinic, closed: dict[str, str]) -> None:
    reads = clinic.server.cachemgr("token", "create", "reads", "--role", "read").stdout.strip()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for graph, wait, settings, why in (
            ("f", "60", {"CACHEMGR_SERVER_TOKEN": reads}, "`reads` has the role read; this needs admin or report"),
            ("g", "2", {"CACHEMGR_SERVER": address}, f"the service {address} does not answer: "),
        ):
            node = clinic.node(f"node-{graph}", **closed, **settings)
            report = node.run(*clinic.fleet.command(graph), options=("--single-flight", wait))
            assert (report["errors"], report["published"] is not None) == ({"single flight": 1}, True)
            assert f"cachemgr: single flight failed: {why}" in report["stderr"]
            assert "cachemgr: single flight is off for this start" in report["stderr"]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Kept]:
    fleet = Fleet(tmp_path)
    machine = fleet.machine("server")
    secret = machine.cachemgr("token", "create", "nodes", "--role", "report").stdout.strip()
    server = Served(machine).ready()
    yield Kept(server, LocalStore(machine.store), secret)
    assert server.end() == 0, server.said


def test_claims_of_a_service_are_those_of_its_store(served: Kept) -> None:
    one, other, kept = served.claims("one"), served.claims("other"), InStore(served.store, KEY)
    assert one.newest() is None
    assert one.take(owner("one"), after=0) == 1
    assert one.take(owner("one"), after=0) == 1, "a request that was sent twice"
    assert other.take(owner("other"), after=0) is None
    assert (other.newest(), other.owner_of(1)) == (kept.newest(), owner("one"))
    before = kept.newest()
    os.utime(f"{served.store}/{layout.claim_name(KEY, 1)}", (1, 1))
    assert one.beat(1)
    assert [kept.newest() == before, other.newest() == kept.newest()] == [False, True]
    assert not other.beat(1), "another launch has it"
    assert other.take(owner("other"), after=1) == 2
    one.give_up(2)
    assert kept.owner_of(2) == owner("other"), "nobody gives up what another one has"
    other.give_up(2)
    assert kept.newest() is None
    assert not other.beat(2)


def test_what_a_store_does_not_let_us_the_service_of_that_very_store_does(served: Kept, tmp_path: Path) -> None:
    for denied in ({"put"}, {"put", "scan", "read"}):
        store = Denied(served.store, denied)
        claims = WithService(InStore(store, KEY), served.claims("one"))
        claims.open()
        assert claims.newest() is None
        assert claims.take(owner("one"), after=0) == 1
        assert claims.newest() == InStore(served.store, KEY).newest()
        assert claims.owner_of(1) == owner("one")
        assert claims.beat(1)
        claims.give_up(1)
        assert InStore(served.store, KEY).newest() is None
    elsewhere = LocalStore(tmp_path / "elsewhere")
    layout.ensure_layout(elsewhere)
    claims = WithService(InStore(Denied(elsewhere, {"put"}), KEY), served.claims("one"))
    with pytest.raises(UsageError, match="keeps the claims of another store than"):
        claims.take(owner("one"), after=0)
    assert InStore(served.store, KEY).newest() is None, "nobody waits for it"
