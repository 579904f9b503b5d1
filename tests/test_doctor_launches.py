"""The doctor on launches: whether engines can tell them anything, what they swallowed, and what waits to be sent."""

import socket
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from cachemgr import observed, outbox
from cachemgr.clock import written
from cachemgr.desk import Facts
from cachemgr.digest import Digest
from cachemgr.doctor import examine, launches
from cachemgr.doctor.finding import Finding, Patient
from cachemgr.store import records
from tests.pruning import key_of
from tests.test_capture import LAUNCH
from tests.test_doctor_places import NOW, patient

DAY = 86400


def test_messages_of_an_engine_are_tried(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, opened = patient(home)
    assert [finding.severity for finding in launches.desk(asked, opened)] == ["ok"]

    class NoSockets:
        def __init__(self, *_arguments: object) -> None:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "socket", NoSockets)
    (finding,) = launches.desk(asked, opened)
    assert (finding.severity, "Operation not permitted" in finding.what) == ("warning", True)
    assert "SOCK_SEQPACKET" in finding.hint


def test_what_the_last_launches_here_swallowed_is_said_by_name(home: Path) -> None:
    asked, opened = patient(home)

    def record(name: str, days: float, host: str, errors: dict[str, int]) -> None:
        started = written(NOW - days * DAY)
        launch = msgspec.structs.replace(LAUNCH, launch=name, host=host, started=started, errors=errors)
        records.record(opened.cache.store, launch)

    assert list(launches.recent(asked, opened)) == []
    record("well", 1, "host", {})
    record("long-ago", 30, "host", {"publishing": 9})
    record("elsewhere", 1, "another", {"publishing": 9})
    (finding,) = launches.recent(asked, opened)
    assert (finding.severity, finding.what) == ("ok", "1 on this host in 7 days, without errors")
    record("first", 3, "host", {"facts dropped": 2, "publishing": 1})
    record("second", 2, "host", {"facts dropped": 3})
    (finding,) = launches.recent(asked, opened)
    assert finding.severity == "warning"
    assert finding.what == "2 of 3 on this host in 7 days swallowed errors: facts dropped 5, publishing 1"
    assert finding.hint == "cachemgr why --launch second"


def test_what_waits_to_be_sent_is_said_with_the_reason(home: Path) -> None:
    server = "http://127.0.0.1:9"
    asked, opened = patient(home, CACHEMGR_MIRROR="s3://bucket/prefix", CACHEMGR_SERVER=server)
    queue = opened.cache.outbox
    assert queue is not None
    assert list(launches.waiting(asked, opened)) == []
    queue.add(key_of("a"), Digest("sha256:" + "5e" * 32))
    (finding,) = launches.waiting(asked, opened)
    assert (finding.severity, finding.hint) == ("note", "cachemgr push")
    queue.fail(outbox.Trouble("denied", "the mirror denies it", "2026-01-01T00:00:00Z"))
    records.keep(outbox.reports(opened.cache.home, server), LAUNCH)
    mirror, service = launches.waiting(asked, opened)
    assert mirror.severity == service.severity == "warning"
    assert mirror.what == "1 capture waits for the mirror since 2026-01-01T00:00:00Z: the mirror denies it"
    assert service.what.startswith(f"1 report of a launch waits for {server}")


def test_every_warning_and_error_says_what_to_type(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where much is wrong, a check that breaks and one that cannot look included."""
    (home / "file").write_bytes(b"no directory")
    asked, _opened = patient(
        home,
        CACHEMGR_STORE=f"{home}/file",
        VLLM_PLUGINS="other",
        VLLM_CACHE_ROOT="/proc/nowhere",
        CACHEMGR_ENABLE="1",
        CACHEMGR_X="1",
    )

    def breaks(_patient: Patient) -> list[Finding]:
        raise ZeroDivisionError

    def cannot(_patient: Patient) -> list[Finding]:
        raise PermissionError(13, "Permission denied", "/somewhere")

    monkeypatch.setattr("cachemgr.doctor.CHECKS", (breaks, cannot))
    bad = [finding for finding in examine(asked) if finding.severity in {"warning", "error"}]
    assert len(bad) >= 4
    assert [finding for finding in bad if not finding.hint] == []


def test_facts_that_were_dropped_are_counted_once_however_often_they_are_told() -> None:
    errors = Counter({"publishing": 1})
    facts = Facts(True, {}, {}, (), ("aot",), 2, 1, 0)
    for told in (facts, msgspec.structs.replace(facts, dropped=3)):
        observed.count_lost(errors, told)
    assert errors == {"facts dropped": 3, "hooks failed": 1, "publishing": 1}
