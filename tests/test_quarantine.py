"""Quarantine across a fleet: signed reports only; every reader obeys them, people see why, and can bring it back."""

import sys
from pathlib import Path

import pytest

from cachemgr.errors import NotFoundError, UntrustedError, UsageError
from cachemgr.quarantine import bring_back, named, noted, notes, report, spread
from cachemgr.store import Store, layout
from cachemgr.store.captures import Damaged, captures
from cachemgr.store.captures import quarantine as quarantine_here
from cachemgr.store.local import LocalStore
from cachemgr.trust import Trust, policies_of, trusted_keys
from tests import trees
from tests.authorities import Authority
from tests.machines import Fleet
from tests.pruning import add, factors_of, key_of
from tests.s3_server import S3Server
from tests.stores import Recording, contents

SIGNED = "2026-11-01T00:00:00Z"


def trusting(*authorities: Authority, revoked: frozenset[str] = frozenset()) -> Trust:
    keys = trusted_keys([each.public for each in authorities], [])
    return Trust(policies_of((), private=True), keys=keys, revoked=revoked)


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def filled(store: Store, tmp_path: Path) -> Store:
    add(store, tmp_path / "live", "a")
    add(store, tmp_path / "live", "b")
    return store


def seen(store: Store, trust: Trust, name: str = "a") -> tuple[int, list[str]]:
    """How many captures a launch may use, and why it may not use the others; the policy of the store asks nothing."""
    damaged: list[Damaged] = []
    found = captures(store, key_of(name), damaged, judge=lambda *each: trust.standing("off", *each))
    return len(found), [each.reason for each in damaged]


def test_what_the_holder_of_a_trusted_key_reports_is_used_by_nobody_who_trusts_it(
    filled: Store, authority: Authority
) -> None:
    ((key, capture),) = named(filled, key_of("a"))
    report(filled, key, capture, authority.signer, reason="wrong output", signed=SIGNED)
    count, said = seen(filled, trusting(authority))
    assert count == 0
    assert said == [f"capture {capture[7:19]} is in quarantine: wrong output (key {authority.id})"]
    assert seen(filled, trusting(authority), "b") == (1, [])
    assert seen(filled, trusting()) == (1, []), "nobody who does not trust the key believes it"
    assert seen(filled, trusting(authority, revoked=frozenset({authority.id}))) == (1, [])
    assert [note.where for note in notes([filled], trusting(authority), capture)] == [f"all hosts (key {authority.id})"]
    assert notes([filled], trusting(), capture) == []
    assert (
        trusting(authority).opinion(filled, key, capture, [e.name for e in filled.scan("artifacts/")]).doubt == said[0]
    )


def test_an_unsigned_forged_or_copied_report_takes_nothing_from_anybody(filled: Store, authority: Authority) -> None:
    ((key, capture),) = named(filled, key_of("a"))
    ((other_key, other),) = named(filled, key_of("b"))
    listed, beside = layout.report_names(key, capture, authority.id, SIGNED)
    genuine = authority.signer.report(other, other_key, reason="about b", signed=SIGNED)
    thief = Authority().signer.report(capture, key, reason="x", signed=SIGNED)
    signature = authority.signer.sign(capture, key, signed=SIGNED)
    for data in (b"", b"{}", genuine, thief, signature, genuine.replace(other.encode(), capture.encode())):
        for name in (listed, beside):
            filled.delete(name)
            filled.put(name, data)
        assert seen(filled, trusting(authority)) == (1, [])
        assert notes([filled], trusting(authority), capture) == []


def test_a_look_up_pays_nothing_where_there_is_no_report(filled: Store, authority: Authority) -> None:
    def asked(trust: Trust) -> list[tuple[str, str]]:
        recording = Recording(filled)
        captures(recording, key_of("a"), [], judge=lambda *each: trust.standing("off", *each, origins=False))
        return recording.calls

    assert asked(trusting(authority)) == asked(trusting())


def test_it_is_brought_back_with_every_note_of_this_host(filled: Store, authority: Authority) -> None:
    ((key, capture),) = named(filled, key_of("a"))
    before = contents(filled)
    report(filled, key, capture, authority.signer, reason="wrong output", signed=SIGNED)
    for host in ("here", "there"):
        quarantine_here(filled, capture, host=host, reason="it died", since=SIGNED)
    assert noted(filled, trusting()) == {capture}
    assert len(notes([filled], trusting(authority), capture)) == 3
    assert len(bring_back(filled, [(key, capture)], host="here")) == 3
    assert [note.where for note in notes([filled], trusting(authority), capture)] == ["there"]
    assert seen(filled, trusting(authority)) == (1, [])
    bring_back(filled, [(key, capture)], host=None)
    assert contents(filled) == before


def test_captures_are_named_by_key_or_digest(filled: Store) -> None:
    ((key, capture),) = named(filled, key_of("a")[:14])
    assert named(filled, capture[:20]) == [(key, capture)]
    for text, error in (("sha256:", UsageError), ("k1:ffffffff", NotFoundError), ("sha256:0000000000", NotFoundError)):
        with pytest.raises(error):
            named(filled, text)


def test_reports_spread_to_hosts_that_have_the_capture_already_and_so_does_their_end(
    filled: Store, tmp_path: Path, authority: Authority
) -> None:
    trust = trusting(authority)
    local = LocalStore(tmp_path / "local")
    add(local, tmp_path / "live", "a")
    ((key, capture),) = named(filled, key_of("a"))
    ((other_key, other),) = named(filled, key_of("b"))
    before = contents(local)
    for each, digest in ((key, capture), (other_key, other)):
        report(filled, each, digest, authority.signer, reason="wrong output", signed=SIGNED)
    report(filled, key, capture, Authority().signer, reason="nobody knows me", signed=SIGNED)
    assert spread(filled, local, trust) == 1
    assert seen(local, trust)[0] == 0
    recording = Recording(filled)
    assert spread(recording, local, trust) == 0
    assert not [name for name in recording.opened() if authority.id in name and capture[7:] in name], "what is known"
    bring_back(filled, [(key, capture)], host=None)
    assert spread(filled, local, trust) == 1
    assert seen(local, trust) == (1, [])
    assert contents(local) == before


@pytest.mark.slow  # several commands: 3 s
def test_a_fleet_leaves_a_reported_capture_alone_and_takes_it_up_again(tmp_path: Path, s3: S3Server) -> None:
    bucket, authority = s3.fresh(), Authority()
    fleet = Fleet(tmp_path)
    variables = {
        **s3.environ,
        "CACHEMGR_MIRROR": f"s3://{bucket.name}/{bucket.prefix}",
        "CACHEMGR_MIRROR_ENDPOINT": s3.endpoint,
        "CACHEMGR_MIRROR_REGION": "us-east-1",
        "CACHEMGR_TRUSTED_KEYS": authority.public,
        "CACHEMGR_SIGN_KEY": str(authority.file(tmp_path)),
    }
    builder = fleet.machine("builder", **variables, CACHEMGR_STORE=str(tmp_path / "builder-store"))
    command = (sys.executable, fleet.program, "one")
    key = builder.run(*command)["key"]
    builder.cachemgr("sign", key)
    builder.cachemgr("push", key)
    had = fleet.machine("had", **variables, CACHEMGR_STORE=str(tmp_path / "had-store"))
    assert had.run(*command)["where"] == "mirror"
    done = builder.cachemgr("quarantine", key, "--reason", "wrong output", "--mirror")
    assert "into quarantine: wrong output" in done.stderr
    fresh = fleet.machine("fresh", **variables, CACHEMGR_STORE=str(tmp_path / "fresh-store"))
    report = fresh.run(*command, options=("--publish", "never"))
    assert (report["result"], report["verdict"]) == ("none", "cold")
    assert "is in quarantine: wrong output" in " ".join(report["reasons"])
    assert "wrong output" in builder.cachemgr("show", key, "--mirror").stdout
    assert "1 capture in quarantine" in builder.cachemgr("ls", "--mirror").stderr
    had.cachemgr("pull", key, code=None)
    assert had.run(*command, options=("--publish", "never"))["result"] == "none", "a capture that it had already"
    assert "all hosts" in builder.cachemgr("unquarantine", key, "--mirror").stderr
    builder.cachemgr("unquarantine", key, "--mirror", code=1)
    had.cachemgr("pull", key)
    assert had.run(*command)["result"] == "exact"


def test_a_report_by_a_key_that_nobody_trusts_is_not_counted_and_is_forgotten_all_the_same(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    machine = fleet.machine("one", CACHEMGR_SIGN_KEY=str(Authority().file(tmp_path)))
    key = machine.run(sys.executable, fleet.program, "one")["key"]
    done = machine.cachemgr("quarantine", key, "--reason", "wrong output").stderr
    assert "this machine does not trust key" in done
    assert "hint: CACHEMGR_TRUSTED_KEYS=ed25519:" in done
    assert "quarantine" not in machine.cachemgr("ls").stderr, "`show` has nothing to say of it"
    assert "would remove 2 notes" in machine.cachemgr("unquarantine", key, "--dry-run").stderr
    assert "removed 2 notes" in machine.cachemgr("unquarantine", key).stderr
    assert "would remove 0 notes" in machine.cachemgr("unquarantine", key, "--dry-run", code=1).stderr


def test_no_capture_is_meant_by_nothing(filled: Store) -> None:
    with pytest.raises(UsageError, match="names no capture"):
        named(filled, "sha256:")


def test_who_has_no_key_reports_nothing(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    machine = fleet.machine("one")
    key = machine.run(sys.executable, fleet.program, "one")["key"]
    assert "no signing key is set" in machine.cachemgr("quarantine", key, "--reason", "x", code=2).stderr


def test_a_report_says_why_in_an_error(filled: Store, authority: Authority) -> None:
    ((key, capture),) = named(filled, key_of("a"))
    report(filled, key, capture, authority.signer, reason="r" * 1000, signed=SIGNED)
    beside = [entry.name for entry in filled.scan(layout.artifact_prefix(key))]
    with pytest.raises(UntrustedError, match=r"is in quarantine: r{500} "):
        trusting(authority).standing("warn", filled, key, capture, beside)
    assert trees.look_up(filled, factors_of("b")).result == "exact"
