"""A fleet on one mirror: launch records of machines that have nothing else in common."""

import os
import time
from pathlib import Path

import pytest

from cachemgr.history import fold
from cachemgr.key import Key
from cachemgr.signature import PublicKey
from cachemgr.store.records import launches
from tests.s3_server import S3Server
from tests.test_mirror import PATIENCE, Mirrored

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(tmp_path: Path, s3: S3Server) -> Mirrored:
    return Mirrored(tmp_path, s3)


def recorded(fleet: Mirrored, count: int) -> list[str]:
    """The hosts' launches on the mirror, once there are so many."""
    end = time.monotonic() + PATIENCE
    while len(found := [launch.launch for launch in launches(fleet.mirror)]) < count and time.monotonic() < end:
        time.sleep(0.1)
    return sorted(found)


def test_records_of_a_fleet_meet_on_the_mirror_in_batches(fleet: Mirrored) -> None:
    one = fleet.machine("one", CACHEMGR_PUBLISH="mirror")
    two = fleet.machine("two", CACHEMGR_PUBLISH="mirror")
    cold = one.run(*fleet.command("f"))
    assert recorded(fleet, 1) == [cold["launch"]], "with its capture"
    two.cachemgr("pull")
    warm = two.run(*fleet.command("f"))
    (waiting,) = two.home.glob(".cache/cachemgr/outbox/*/launches/*.json")
    assert waiting.stem == warm["launch"], "a single record is not worth a request"
    os.utime(waiting, (time.time() - 3600, time.time() - 3600))
    again = two.run(*fleet.command("f"))
    assert set(recorded(fleet, 2)) >= {cold["launch"], warm["launch"]}
    assert again["errors"] == {}
    history = fold(launches(fleet.mirror))[Key(cold["key"])]
    assert history.uses >= 1
    assert history.verdicts["used"] == history.uses


def test_a_herd_that_meets_on_the_mirror_only_compiles_once(fleet: Mirrored) -> None:
    machines = [fleet.machine(f"m{number}", CACHEMGR_PUBLISH="mirror", NOISE="1") for number in range(5)]
    words = ("run", "--single-flight", "300", "--", *fleet.command("sleep=3", "f", "g"))
    said = [process.communicate(timeout=300)[1] for process in [machine.start(*words) for machine in machines]]
    assert sum("compiled f" in each for each in said) == 1, said
    assert sum("cachemgr: exact" in each for each in said) == 4, said
    assert [entry.name for entry in fleet.mirror.scan("claims/")] == []
    assert len(fleet.arrived(1)) == 1


def test_where_what_is_published_waits_for_a_signature_nobody_waits_for_it(fleet: Mirrored) -> None:
    machine = fleet.machine("one", CACHEMGR_PUBLISH="mirror", CACHEMGR_TRUST="mirror=require")
    flight = ("--single-flight", "60")
    closed = machine.run(*fleet.command("f"), options=flight)
    assert "single flight is off: mirror s3://" in closed["stderr"]
    assert "is not read: no trusted key" in closed["stderr"]
    signed = machine.run(*fleet.command("g"), options=flight, CACHEMGR_TRUSTED_KEYS=str(PublicKey(bytes(range(32)))))
    assert "requires signatures, and what is compiled now has none yet" in signed["stderr"]
    assert [entry.name for entry in fleet.mirror.scan("claims/")] == []
