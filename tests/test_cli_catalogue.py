"""`ls`, `show`, `why`, `diff`, `lint`, `stats` and `reindex` as people and programs run them."""

import json
import os
import re
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner
from sqlalchemy import make_url

from cachemgr.cli import cli, output
from cachemgr.store.local import LocalStore
from tests.databases import made, run
from tests.engines import Engines
from tests.machines import Fleet, Machine, launches_in
from tests.test_cli import on_a_terminal

NOBODY = "postgresql://user:hunter2@127.0.0.1:1/fleet"


class Asking(Machine):
    """A machine that answers questions in this process, which saves starts of Python; launches are real ones."""

    def cachemgr(self, *words: str, code: int | None = 0, **more: str) -> "subprocess.CompletedProcess[str]":
        if words[0] == "run":
            return super().cachemgr(*words, code=code, **more)
        with patch.dict(os.environ, {**self.environ, **more}, clear=True):
            done = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert code is None or done.exit_code == code, f"exit {done.exit_code}\n{done.output}"
        return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


class AskingFleet(Fleet):
    """Such machines."""

    def machine(self, name: str, **variables: str) -> Asking:
        return Asking(self.directory / name, self.directory / "store", {**self.variables, **variables})


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return AskingFleet(tmp_path)


def started(fleet: Fleet, machine: Machine, *words: str, **more: str) -> str:
    """Run the program; the key of what it compiled."""
    found: str = Machine(machine.root, machine.store, machine.variables | more).run(*fleet.command(*words))["key"]
    return found


def test_why_explains_the_last_launch_of_this_host(fleet: Fleet) -> None:
    one = fleet.machine("one")
    assert one.cachemgr("why", code=10).stderr.startswith(f"error: {one.store} tells of no launch on this host\n")
    first = started(fleet, one, "f")
    assert "the first of its kind" in one.cachemgr("why").stdout
    two = fleet.machine("two")
    started(fleet, two, "f")
    assert "why     it was warm: everything" in two.cachemgr("why").stdout
    started(fleet, two, "f", "g")
    text = two.cachemgr("why").stdout
    assert 'program.args ["f","g"]≠["f"] (match)\n  means     other arguments of the program\n' in text
    assert "to do  mark an argument that shapes nothing: --ignore-arg --NAME" in text
    told = two.json("why")["why"]
    assert (told["word"], told["artifact"], told["result"]) == ("differs", first, "near")
    assert [each["factor"] for each in told["differs"]] == ["program.args"]
    assert one.json("why", first)["why"]["key"] == first, "of a key, its last launch"


def test_why_explains_a_command_before_it_starts(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    key = started(fleet, machine, "f")
    exact = machine.json("why", "--", *fleet.command("f"))["why"]
    assert (exact["word"], exact["result"], exact["key"], exact["differs"]) == (None, "exact", key, [])
    near = machine.json("why", "--", *fleet.command("g"), CI="1")["why"]
    assert [each["factor"] for each in near["differs"]] == ["env.CI", "program.args"]
    assert near["fix"] == "unset CI, or set it on all machines"


def test_a_pod_that_is_gone_is_explained_by_its_record(fleet: Fleet) -> None:
    """Also when the artifact that was near is gone, too."""
    key = started(fleet, fleet.machine("one"), "f")
    gone = fleet.machine("gone")
    started(fleet, gone, "g", CI="1")
    (record,) = [each for each in launches_in(gone.store) if each["result"] == "near"]
    assert {factor["name"] for factor in record["factors"]} >= {"env.CI", "program.args", "torch"}
    here = fleet.machine("here")
    for _time in range(2):
        told = here.json("why", "--launch", record["launch"][:20])["why"]
        assert (told["launch"], told["host"]) == (record["launch"], record["host"])
        assert [each["factor"] for each in told["differs"]] == ["env.CI", "program.args"]
        here.cachemgr("rm", key, "-y", code=None)
    assert "no store tells of a launch `zz`" in here.cachemgr("why", "--launch", "zz", code=10).stderr
    assert "there can be no key" in here.cachemgr("why", "--launch", "x", "--", "true", code=2).stderr


@pytest.mark.parametrize(
    ("variables", "words", "word"),
    [
        ({"CACHEMGR_TRUST": "require"}, ("f",), "untrusted"),
        ({}, ("idle", "f"), "inert"),
    ],
)
def test_what_really_went_wrong_is_told_apart(
    fleet: Fleet, variables: dict[str, str], words: tuple[str, ...], word: str
) -> None:
    started(fleet, fleet.machine("one"), *words)
    two = fleet.machine("two")
    two.make_places()
    (two.tmp / "idle").touch()
    started(fleet, two, *words, **variables)
    assert two.json("why")["why"]["word"] == word
    (missed,) = [each for each in two.json("stats")["missed"] if each["reason"] != "absent"]
    assert missed == {"reason": word, "factor": None, "starts": 1}


def test_diff_names_factors_and_files(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    first = started(fleet, machine, "f")
    second = started(fleet, machine, "f", "g", NOISE="1")
    same = machine.cachemgr("diff", first, first[:12])
    assert same.stdout.endswith("\nnothing differs\n")
    told = machine.json("diff", first, second, code=1)
    assert [each["factor"] for each in told["differs"]] == ["program.args"]
    (file,) = told["files"]
    assert file["path"].startswith("inductor/aotautograd/")
    assert (file["first"], re.fullmatch(r"sha256:[0-9a-f]{64}", file["second"]) is not None) == (None, True)
    text = machine.cachemgr("diff", first, second, code=1).stdout
    assert "1 file that differ or that one has" in text
    command = machine.json("diff", first, "--", *fleet.command("h"), code=1)
    assert [each["factor"] for each in command["differs"]] == ["program.args"]
    assert machine.json("diff", first, "--", *fleet.command("f"))["differs"] == []
    assert "no artifact `k1:00`" in machine.cachemgr("diff", first, "k1:00", code=10).stderr


def test_what_cannot_be_meant_is_said_so(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    key = started(fleet, machine, "f")
    for name in ("show", "rm"):
        assert "names no artifact" in machine.cachemgr(name, "", code=2).stderr, "an empty variable"
    for words in (("why", key, "--json"), ("diff", key, key, "--json")):
        failed = machine.cachemgr(*words, code=2).stderr
        assert failed.startswith(f"error: nothing can follow the key {key}\nhint: cachemgr {words[0]} --help; options")
    machine.cachemgr("rm", key, "-y")
    assert machine.json("why", key.removeprefix("k1:"))["why"]["key"] == key, "its artifact is gone, its launch is not"


def test_a_command_that_is_left_alone_gets_one_document_all_the_same(tmp_path: Path) -> None:
    engines = Engines.install(tmp_path)
    one = engines.machine("one")
    machine = Asking(one.root, one.store, one.variables)
    key = machine.run(*engines.serve())["key"]
    measuring = ("--", engines.serve()[0], "bench", "startup")
    assert machine.json("why", *measuring)["why"] is None
    assert machine.json("lint", *measuring)["hazards"] == []
    compared = machine.json("diff", key, *measuring, code=1)
    assert (compared["second"], compared["result"]) == (None, "none"), "nothing was compared, so they are not equal"


def test_a_setting_that_cannot_be_read_is_said_once(fleet: Fleet, tmp_path: Path) -> None:
    machine = fleet.machine("one", CACHEMGR_TRUSTED_KEYS=str(tmp_path / "nowhere.pub"))
    said = machine.cachemgr("ls").stderr.splitlines()
    assert [line.startswith("warning: ") for line in said] == [True, False]


def test_a_table_fits_a_terminal_also_with_long_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    headers = ("KEY", "MODEL", "ENGINE", "DEVICE", "FILES", "SIZE", "AGE", "USES")
    row = (
        "k1:24c0ada7c",
        "meta-llama/Llama-3.1-8B",
        "vllm 0.32.0",
        "NVIDIA H100 80GB HBM3",
        "1,420",
        "40.1 MB",
        "12 min",
        "123",
    )
    monkeypatch.setattr(output, "_room", lambda: 80)
    output.table(headers, [row], right=("FILES", "SIZE", "AGE", "USES"), flexible="MODEL")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "meta-lla…  vllm 0.32.0  NVIDIA H100…" in lines[1]
    assert [each for each in row[4:] if each not in lines[1]] == []


def test_size_looks_at_no_launch_and_says_what_is_damaged(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    started(fleet, machine, "f")
    for record in machine.store.rglob("launches/*/*"):
        record.unlink()
        record.mkdir()
    assert machine.json("size")["size"]["artifacts"] == 1
    (manifest,) = machine.store.rglob("artifacts/*/*.json.zst")
    manifest.chmod(0o600)
    manifest.write_bytes(b"noise")
    done = machine.cachemgr("size")
    assert done.stderr.startswith("warning: ")
    assert "artifacts  0 " in done.stdout


def test_reindex_reads_a_store_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = fleet.machine("one")
    started(fleet, machine, "f")
    read: list[str] = []
    real = LocalStore.read

    def noted(store: LocalStore, name: str, *, limit: int) -> bytes:
        read.append(name)
        return real(store, name, limit=limit)

    monkeypatch.setattr(LocalStore, "read", noted)
    machine.cachemgr("reindex")
    launches = [name for name in read if name.startswith("launches/")]
    assert len(launches) == len(set(launches)) > 0


def test_stats_add_up(fleet: Fleet) -> None:
    one, two = fleet.machine("one"), fleet.machine("two")
    assert one.json("stats")["total"]["hit_rate"] is None
    assert "hit rate  nothing is known yet" in one.cachemgr("stats").stdout
    started(fleet, one, "f")
    started(fleet, two, "f")
    started(fleet, two, "f", CACHEMGR_TRUST="require")
    told = two.json("stats")
    assert told["total"]["starts"] == 3
    assert told["total"]["verdicts"].get("cold", 0) >= 1
    assert told["total"]["restored_files"] == 1
    assert told["total"]["timed"] >= 1
    assert told["errors"] == {"untrusted": 1}
    assert told["stored"]["artifacts"] == 1
    assert told["stored"]["dedup"] == 1.0
    assert told["stored"]["compression"] > 1
    (group,) = two.json("stats", "--by", "gpu")["groups"]
    assert (group["name"], group["starts"]["starts"]) == ("cpu", 3)
    assert two.json("stats", "--since", "7d")["total"]["starts"] == 3
    text = two.cachemgr("stats", "--by", "model").stdout
    assert "not wholly warm\nREASON" in text
    assert "by model\nMODEL" in text
    assert "--since 7d" in two.cachemgr("stats", "--since", "soon", code=2).stderr
    narrow = on_a_terminal(two, "stats", "--by", "host", columns=80)
    assert max(map(len, narrow.splitlines())) <= 80


def test_lint_says_what_to_unset(tmp_path: Path) -> None:
    engines = Engines.install(tmp_path)
    clean, machine = engines.machine("two"), engines.machine("one", VLLM_PLUGINS="a")
    done = machine.cachemgr("lint", "--", *engines.serve(), code=1)
    assert "fragments  VLLM_PLUGINS" in done.stdout
    assert "hint: unset VLLM_PLUGINS" in done.stdout
    assert done.stderr == "2 hazards for vllm 0.32.0\n"
    told = machine.json("lint", "--", *engines.serve(), code=1)
    assert [each["about"] for each in told["hazards"]] == ["VLLM_PLUGINS", "model"]
    vllm, serve, _model = engines.serve()
    assert clean.json("lint", "--", vllm, serve, "acme/model")["hazards"] == []


def test_show_tells_history_places_and_what_is_turned_on(tmp_path: Path) -> None:
    engines = Engines.install(tmp_path)
    key = engines.machine("one").run(*engines.serve("-O1"))["key"]
    two = engines.machine("two")
    two.run(*engines.serve("-O1"))
    text = two.cachemgr("show", key).stdout
    assert f"where     the local store {two.store}" in text
    assert "level     -O1: Dynamo and Inductor, piecewise CUDA graphs" in text
    assert "graphs    PIECEWISE (by level)" in text
    assert "\nrelations\n  CPU features" in text
    assert "\nlast launches\nLAUNCH" in text
    document = two.json("show", key)
    assert [each["verdict"] for each in document["launches"]] == ["used", "cold"]
    assert document["places"] == [f"the local store {two.store}"]
    assert document["captures"][0]["needs"]["cpu_features"]


def test_a_catalogue_that_is_lost_or_damaged_costs_nothing(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    started(fleet, machine, "f")
    path = machine.home / ".cache" / "cachemgr" / "catalogue.db"
    assert not path.exists(), "a start never opens it"
    listed, told = machine.json("ls"), machine.json("stats")
    assert path.stat().st_mode & 0o077 == 0
    path.unlink()
    assert (machine.json("ls"), machine.json("stats")) == (listed, told)
    path.write_bytes(b"noise" * 1000)
    done = machine.cachemgr("ls", "--json")
    assert done.stderr == f"warning: {path} is damaged; it is catalogue.db.damaged now, and made anew from the store\n"
    assert json.loads(done.stdout) == listed
    assert machine.cachemgr("ls").stderr == ""
    done = machine.cachemgr("reindex")
    assert done.stderr == f"read 1 artifact and 1 start in {machine.store}\n"
    read = {"store": str(machine.store), "artifacts": 1, "launches": 1, "damaged": 0}
    assert machine.json("reindex") == {"schema": 1, "stores": [read], "dry_run": False}
    planned = {"schema": 1, "stores": [{"store": str(machine.store)}], "dry_run": True}
    assert machine.json("reindex", "--dry-run") == planned
    assert (machine.json("ls"), machine.json("stats")) == (listed, told)
    assert "would read everything" in machine.cachemgr("reindex", "--dry-run").stderr


def test_a_server_that_does_not_answer_stops_no_start_and_no_list(fleet: Fleet) -> None:
    machine = fleet.machine("one", CACHEMGR_DATABASE_URL=NOBODY)
    report = machine.run(*fleet.command("f"))
    assert (report["verdict"], report["errors"]) == ("cold", {})
    done = machine.cachemgr("ls", "-q")
    assert done.stdout == f"{report['key']}\n"
    assert re.match(r"warning: the catalogue postgresql://127\.0\.0\.1:1/fleet cannot be used: .*\n", done.stderr)
    assert machine.cachemgr("show", report["key"]).stdout
    for words in (("stats",), ("why",), ("reindex",)):
        failed = machine.cachemgr(*words, code=13)
        assert failed.stderr.startswith("error: the catalogue postgresql://127.0.0.1:1/fleet cannot be used")
    examined = machine.cachemgr("doctor", code=1).stdout
    assert re.search(r"error +catalogue +the catalogue postgresql://127\.0\.0\.1:1/fleet cannot be used", examined)
    shown = machine.cachemgr("config", "show").stdout
    assert re.search(r"database_url +\*\*\* +CACHEMGR_DATABASE_URL", shown)
    wrong = machine.cachemgr("ls", code=2, CACHEMGR_DATABASE_URL="mysql://user:hunter2@host/x")
    assert "hunter2" not in f"{done.stderr}{shown}{wrong.stderr}"
    assert "must be a URL: postgresql://" in wrong.stderr


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_of_any_encoding_is_used_or_named(fleet: Fleet, postgres: str, encoding: str) -> None:
    url = made(postgres, f"ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    machine = fleet.machine("one", CACHEMGR_DATABASE_URL=url)
    started(fleet, machine, "f")
    assert machine.json("stats")["total"]["starts"] == 1
    (path,) = machine.store.glob("launches/*/*.json")
    record = {**json.loads(path.read_text()), "launch": "20260101T000000-0123456789", "model": "模型"}
    path.with_name(f"{record['launch']}.json").write_text(json.dumps(record))
    if encoding == "SQL_ASCII":
        assert machine.json("stats")["total"]["starts"] == 2
    else:
        assert machine.cachemgr("stats", code=13).stderr.endswith("hint: make its database with ENCODING 'UTF8'\n")
        assert machine.cachemgr("ls").stderr.endswith("everything is read from the store\n")


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("ALTER TABLE launch DROP COLUMN verdict", "column launch.verdict does not exist"),
        ("ALTER DATABASE {} SET default_transaction_read_only = on", "in a read-only transaction"),
    ],
)
def test_doctor_finds_what_other_commands_send_there_for(
    fleet: Fleet, postgres: str, statement: str, said: str
) -> None:
    url = made(postgres)
    machine = fleet.machine("one", CACHEMGR_DATABASE_URL=url)
    started(fleet, machine, "f")
    machine.cachemgr("reindex")
    run(url, statement.format(make_url(url).database))
    failed = machine.cachemgr("reindex", code=13).stderr
    assert failed.endswith("hint: cachemgr doctor\n")
    assert "LINE" not in failed
    examined = machine.cachemgr("doctor", code=1).stdout
    assert said in " ".join(examined.split())


def test_a_fleet_has_one_catalogue(fleet: Fleet, postgres: str) -> None:
    url = made(postgres)
    one, two = (fleet.machine(name, CACHEMGR_DATABASE_URL=url) for name in ("one", "two"))
    key = started(fleet, one, "f")
    assert one.cachemgr("ls", "-q").stdout == f"{key}\n"
    started(fleet, two, "f")
    assert one.json("stats")["total"]["starts"] == 2
    assert two.json("stats") == one.json("stats")
    assert two.json("why")["why"]["verdict"] == "used"
    assert re.search(r"ok +catalogue +postgresql://.* answers", two.cachemgr("doctor", code=None).stdout)
    assert not list(one.home.rglob("catalogue.db*"))
