"""What the doctor says of a mirror: exactly the permissions that the settings need, and nothing is left behind."""

from pathlib import Path

import pytest

from cachemgr.cache import open_cache
from cachemgr.doctor import examine
from cachemgr.doctor.finding import Finding, Opened, Patient
from cachemgr.settings import load
from cachemgr.store import layout
from cachemgr.store.s3 import S3Store
from tests import s3_faults
from tests.s3_server import S3Server, free_ports
from tests.stores import contents


class Place:
    """A mirror on the real server, and what the doctor says of it."""

    def __init__(self, s3: S3Server, home: Path) -> None:
        self.s3, self.home = s3, home
        self.store = s3.store(home)

    def said(self, **given: str | bool) -> list[Finding]:
        bucket = self.store._link.bucket
        environ = {"HOME": str(self.home), "PATH": "/bin"}
        flags = {"mirror": str(bucket), "mirror_endpoint": bucket.endpoint, "mirror_region": bucket.region} | given
        settings = load(environ, flags, etc=self.home / "none")
        patient = Patient(environ, self.home, "host", 1_800_000_000.0, Opened(settings, open_cache(settings, environ)))
        return [finding for finding in examine(patient) if finding.about == "mirror"]


@pytest.fixture
def place(s3: S3Server, tmp_path: Path) -> Place:
    return Place(s3, tmp_path)


def use(monkeypatch: pytest.MonkeyPatch, s3: S3Server, user: str) -> None:
    for name, value in s3.environ_of(user).items():
        monkeypatch.setenv(name, value)


def test_a_publisher_is_told_that_all_is_well_and_finds_nothing_there_later(place: Place) -> None:
    layout.ensure_layout(place.store)
    before = contents(place.store)
    first, second = place.said(publish="mirror")
    assert (first.severity, second.severity) == ("ok", "ok")
    assert second.what.endswith("can be published to")
    assert contents(place.store) == before
    assert [finding.what for finding in place.said()] == [f"{place.store} can be listed and read"]


def test_an_empty_mirror_is_no_fault(place: Place) -> None:
    assert [finding.severity for finding in place.said()] == ["note"]
    assert [finding.severity for finding in place.said(publish="mirror")] == ["ok"]
    assert contents(place.store) == {}


def test_only_what_the_settings_need_is_needed(place: Place, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    layout.ensure_layout(place.store)
    use(monkeypatch, s3, "reader")
    for given in ({}, {"publish": "local"}, {"publish": "mirror", "read_only": True}):
        assert [finding.severity for finding in place.said(**given)] == ["ok"]
    failed = place.said(publish="mirror")[-1]
    assert failed.severity == "error"
    assert "access is denied" in failed.what
    assert failed.hint == f"allow s3:PutObject below {place.store} for these credentials"
    use(monkeypatch, s3, "stranger")
    (failed,) = place.said()
    assert failed.hint == f"allow s3:ListBucket below {place.store} for these credentials", "first of what is missing"


def test_what_cannot_be_deleted_is_said(place: Place, s3: S3Server) -> None:
    with s3_faults.faulty(s3.endpoint) as server:
        server.fail("DELETE", s3_faults.error(403, "AccessDenied"))
        found = place.said(publish="mirror", mirror_endpoint=server.endpoint, trust="mirror=off")
    assert [finding.severity for finding in found] == ["ok", "warning"]
    assert "may stay until a prune" in found[1].what
    assert found[1].hint.startswith("allow s3:DeleteObject below ")
    (left,) = contents(place.store)
    assert left.startswith(layout.LAYERS), "an unreferenced layer, which a prune removes"


def test_where_signatures_are_asked_for_it_tries_where_captures_wait(place: Place, s3: S3Server) -> None:
    with s3_faults.faulty(s3.endpoint) as server:
        assert [finding.severity for finding in place.said(publish="mirror", mirror_endpoint=server.endpoint)] == ["ok"]
        written = {asked.partition("?")[0] for asked in server.asked if asked.startswith(("PUT", "DELETE"))}
    assert all("/incoming/layers/" in asked for asked in written if "layout.json" not in asked), written
    assert any("/incoming/layers/" in asked for asked in written)


def test_a_server_without_conditional_writes_is_noted(place: Place, s3: S3Server) -> None:
    with s3_faults.faulty(s3.endpoint) as server:
        server.unknown_headers = {"if-none-match"}
        (found,) = place.said(publish="mirror", mirror_endpoint=server.endpoint)
    assert found.severity == "note"
    assert "no conditional writes" in found.what


@pytest.mark.parametrize(
    ("given", "severity", "words"),
    [
        ({"mirror_endpoint": "http://127.0.0.1:{port}"}, "error", "cannot be reached"),
        ({"mirror": "s3://no-such-bucket/a"}, "error", "no such bucket"),
        ({"offline": True}, "note", "left alone"),
        ({"mirror_profile": "missing"}, "error", "no credentials"),
    ],
)
def test_each_way_to_fail_has_its_words(
    place: Place, s3: S3Server, monkeypatch: pytest.MonkeyPatch, given: dict[str, str | bool], severity: str, words: str
) -> None:
    use(monkeypatch, s3, "admin")
    port = str(free_ports(1)[0])
    filled = {name: value.replace("{port}", port) if isinstance(value, str) else value for name, value in given.items()}
    (found,) = place.said(**filled)
    assert found.severity == severity
    assert words in found.what
    assert severity != "error" or found.hint


def test_publishing_to_no_mirror_is_an_error(place: Place, tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "PATH": "/bin", "CACHEMGR_PUBLISH": "mirror"}
    settings = load(environ, {}, etc=tmp_path / "none")
    patient = Patient(environ, tmp_path, "host", 1_800_000_000.0, Opened(settings, open_cache(settings, environ)))
    (found,) = [finding for finding in examine(patient) if finding.about == "mirror"]
    assert (found.severity, found.hint) == ("error", "set CACHEMGR_MIRROR=s3://BUCKET/PREFIX")
    assert isinstance(place.store, S3Store)
