"""The doctor: what it says of machines that stand in the way of a warm start, and of those that do not."""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from cachemgr import digest
from cachemgr.cache import open_cache
from cachemgr.doctor import CHECKS, examine
from cachemgr.doctor.finding import Finding, Opened, Patient
from cachemgr.errors import CacheError
from cachemgr.settings import load
from tests.conftest import MakeDisk
from tests.engines import Engines
from tests.machines import Machine, install_program, install_stand_in

NOW = 1_800_000_000.0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "one", tmp_path / "store", install_stand_in(tmp_path))


def said(machine: Machine, *words: str, code: int | None = 0, **variables: str) -> dict[str, tuple[str, str, str]]:
    """What the doctor says of a machine, other than ok, by what it is about: severity, sentence and hint."""
    document = machine.json("doctor", *words, code=code, **variables)
    assert document["healthy"] is not any(each["severity"] == "error" for each in document["findings"])
    return {
        each["about"]: (each["severity"], each["what"], each["hint"])
        for each in document["findings"]
        if each["severity"] != "ok"
    }


def test_nothing_stands_in_the_way_of_a_plain_machine(machine: Machine, tmp_path: Path) -> None:
    found = said(machine, "--", sys.executable, install_program(tmp_path))
    assert {severity for severity, _what, _hint in found.values()} == {"note"}
    assert set(found) == {"store", "plugin"}, "an empty store and a plugin that nobody asked for"


def test_it_speaks_to_people_too(machine: Machine) -> None:
    done = machine.cachemgr("doctor", code=1, CACHEMGR_DEADLINE="soon")
    assert done.stdout.splitlines()[0].startswith("error    settings")
    assert "hint: cachemgr config show" in done.stdout
    assert "1 error, 0 warnings" in done.stderr
    quiet = machine.cachemgr("doctor", "-q", CACHEMGR_PUBLIHS="never")
    assert quiet.stdout.splitlines() == [
        "warning  CACHEMGR_PUBLIHS  is no setting, so it does nothing",
        "                           hint: cachemgr config show",
    ]


def test_settings_that_cannot_be_read_are_an_error_and_the_machine_is_looked_at_all_the_same(machine: Machine) -> None:
    found = said(machine, code=1, CACHEMGR_BUDGET="much", VLLM_PLUGINS="other")
    assert found["settings"][0] == "error"
    assert "`budget` from CACHEMGR_BUDGET must be a size" in found["settings"][1]
    assert found["VLLM_PLUGINS"][0] == "note"


def test_settings_that_others_can_write_are_named(machine: Machine) -> None:
    machine.make_places()
    config = machine.home / ".config" / "cachemgr" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("wait = 1\n")
    config.chmod(0o666)
    severity, what, hint = said(machine)["settings"]
    assert (severity, str(config) in what) == ("warning", True)
    assert f"chmod go-w {config}" in hint


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "VLLM_PLUGINS=cachemgr"),
        ("lora_filesystem_resolver", "VLLM_PLUGINS=lora_filesystem_resolver,cachemgr"),
        ("a, cachemgr", "VLLM_PLUGINS=a,cachemgr"),
    ],
)
def test_a_list_of_plugins_that_drops_ours_is_an_error_where_ours_is_wanted(
    machine: Machine, text: str, hint: str
) -> None:
    assert said(machine, VLLM_PLUGINS=text)["VLLM_PLUGINS"][0] == "note"
    severity, what, line = said(machine, code=1, VLLM_PLUGINS=text, CACHEMGR_ENABLE="1")["VLLM_PLUGINS"]
    assert severity == "error"
    assert "does not load the plugin" in what
    assert f"{hint}, equal on all machines" in line


def test_a_list_of_plugins_with_ours_is_said_to_change_the_hash(machine: Machine) -> None:
    severity, what, _hint = said(machine, VLLM_PLUGINS="a,cachemgr")["VLLM_PLUGINS"]
    assert severity == "note"
    assert "part of vLLM's own hash" in what


@pytest.mark.slow  # several commands: 3 s
def test_service_links_are_harmless_but_for_the_one_that_breaks_the_engine(machine: Machine) -> None:
    severity, what, _hint = said(machine, VLLM_API_SERVICE_HOST="10.0.0.1", VLLM_API_PORT_80_TCP="tcp://10.0.0.1:80")[
        "service links"
    ]
    assert severity == "note"
    assert "2 variables such as VLLM_API_PORT_80_TCP" in what
    severity, what, hint = said(machine, code=1, VLLM_PORT="tcp://10.0.0.1:80")["VLLM_PORT"]
    assert severity == "error"
    assert "enableServiceLinks: false" in hint
    assert "VLLM_PORT" not in said(machine, VLLM_PORT="5000")


def test_variables_that_divide_keys_are_named(machine: Machine) -> None:
    found = said(machine, CI="true", VLLM_LOGGING_LEVEL="debug", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    assert {name for name in found if name.isupper()} == {
        "CI",
        "VLLM_LOGGING_LEVEL",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
    }


def test_a_plugin_that_is_wanted_must_be_beside_the_engine(tmp_path: Path) -> None:
    engines = Engines.install(tmp_path)
    machine = engines.machine("one", CACHEMGR_ENABLE="1")
    serve = ("--", *engines.serve())
    severity, what, hint = said(machine, "--", sys.executable, "-I", "-S", "-c", "pass", code=1)["plugin"]
    assert severity == "error"
    assert "enabled by CACHEMGR_ENABLE, and not installed beside the engine" in what
    assert "pip install --no-deps cachemgr" in hint
    info = Path(engines.variables["PYTHONPATH"]) / "cachemgr-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: cachemgr\nVersion: 0.1.0\n")
    assert "plugin" not in said(machine, *serve)
    assert said(machine, *serve, CACHEMGR_ENABLE="0")["plugin"][0] == "note"


def test_without_a_command_the_vllm_on_the_path_is_looked_at(tmp_path: Path) -> None:
    engines = Engines.install(tmp_path)
    machine = engines.machine("one", CACHEMGR_ENABLE="1", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    program = tmp_path / "bin" / "vllm"
    program.write_text(f"#!{sys.executable} -IS\n")  # a Python that has nothing installed
    assert said(machine, code=1)["plugin"][0] == "error"


@pytest.mark.slow  # several commands: 3 s
def test_ray_needs_the_plugin_in_a_file(machine: Machine) -> None:
    machine.make_places()
    assert said(machine, code=None, CACHEMGR_ENABLE="1", RAY_ADDRESS="auto")["Ray"][0] == "note"
    backend = ("--", "true", "--distributed-executor-backend=ray")
    assert "/etc/cachemgr.toml" in said(machine, *backend, code=None, CACHEMGR_ENABLE="1")["Ray"][2]
    config = machine.home / ".config" / "cachemgr" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("enable = true\n")
    assert "Ray" not in said(machine, code=None, RAY_ADDRESS="auto")


def test_the_other_half_of_the_plugin_must_answer_and_be_of_this_version(machine: Machine, tmp_path: Path) -> None:
    binary = tmp_path / "cachemgr"
    assert said(machine, code=1, CACHEMGR_BIN=str(binary))["executable"][0] == "error"
    binary.write_text("#!/bin/sh\nexit 3\n")
    assert "chmod +x" in said(machine, code=1, CACHEMGR_BIN=str(binary))["executable"][2]
    binary.chmod(0o755)
    assert "does not answer" in said(machine, code=1, CACHEMGR_BIN=str(binary))["CACHEMGR_BIN"][1]
    binary.write_text("#!/bin/sh\necho cachemgr 0.0.1\n")
    severity, what, _hint = said(machine, CACHEMGR_BIN=str(binary))["CACHEMGR_BIN"]
    assert (severity, "is cachemgr 0.0.1" in what) == ("warning", True)
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} -m cachemgr "$@"\n')
    assert "CACHEMGR_BIN" not in said(machine, CACHEMGR_BIN=str(binary))


def test_a_command_is_looked_at_as_run_would(machine: Machine, tmp_path: Path) -> None:
    assert said(machine, "--", "no-such-command", code=1)["engine"][0] == "error"
    severity, what, _hint = said(machine, "--", "/bin/true", PATH="/nowhere")["command"]
    assert severity == "warning"
    assert "cannot be read, so no artifact fits" in what


def test_a_store_of_a_newer_layout_is_an_error(machine: Machine) -> None:
    machine.store.mkdir()
    (machine.store / "layout.json").write_text('{"layout": 9, "salt": "x"}')
    severity, what, hint = said(machine, code=1)["local store"]
    assert (severity, hint) == ("error", "upgrade cachemgr")
    assert "has layout 9" in what


def test_a_store_that_everybody_can_write_is_a_warning(machine: Machine) -> None:
    machine.store.mkdir(mode=0o777)
    machine.store.chmod(0o777)
    severity, what, hint = said(machine)["store"]
    assert severity == "warning"
    assert "everybody can write" in what
    assert hint == f"chmod o-w {machine.store}"


def patient(home: Path, **variables: str) -> Patient:
    environ = {"HOME": str(home), "PATH": os.environ["PATH"], **variables}
    settings = load(environ, {}, etc=home / "no-etc.toml")
    return Patient(environ, home, "host", NOW, Opened(settings, open_cache(settings, environ)))


def about(findings: list[Finding], subject: str) -> list[tuple[str, str]]:
    return [(each.severity, each.what) for each in findings if each.about == subject]


def test_a_volume_that_everybody_can_write_is_normal(small_disk: MakeDisk, home: Path) -> None:
    volume = small_disk(1 << 30)
    volume.chmod(0o777)
    found = examine(patient(home, CACHEMGR_HOME=str(volume), CACHEMGR_STORE=str(volume / "store")))
    (told, place) = about(found, "home")
    assert told[0] == "note"
    assert str(volume) in told[1]
    assert place[0] == "ok"
    assert place[1].startswith(f"{volume}/"), "a private directory in it"
    assert about(found, "store")[0][0] == "note"
    assert about(found, "budget")[0][0] == "note", "20 GB do not fit on a disk of 1 GB"


@pytest.mark.parametrize(
    ("variables", "subject", "severity", "what"),
    [
        ({"HOME": ""}, "HOME", "warning", "is not set"),
        ({"HOME": "/"}, "HOME", "note", "is `/`"),
        ({"HOME": "/dev/null/me"}, "HOME", "note", "is /dev/null/me, which cannot be written"),
        ({"TMPDIR": "/dev/null"}, "TMPDIR", "error", "no compiler runs without it"),
        ({"VLLM_CACHE_ROOT": "/dev/null/x"}, "VLLM_CACHE_ROOT", "warning", "/dev/null/x cannot be written, so"),
        ({"VLLM_CACHE_ROOT": "/dev/null/x", "TMPDIR": "/dev/null"}, "VLLM_CACHE_ROOT", "error", "neither can a spare"),
        ({"CACHEMGR_STORE": "/dev/null/x"}, "store", "warning", "cannot be written, so nothing is published"),
        ({"CACHEMGR_HOME": "/dev/null/x"}, "home", "warning", "/dev/null/x cannot be written, so"),
    ],
)
def test_a_place_that_cannot_be_used_is_named(
    home: Path, tmp_path: Path, variables: dict[str, str], subject: str, severity: str, what: str
) -> None:
    found = about(examine(patient(home, **{"TMPDIR": str(tmp_path), **variables})), subject)
    assert any(each == severity and what in sentence for each, sentence in found), found


def test_a_directory_that_somebody_planted_under_our_name_is_named(home: Path, tmp_path: Path) -> None:
    planted = tmp_path / f"cachemgr-{os.geteuid()}"
    planted.mkdir(mode=0o755)
    assert about(examine(patient(home, TMPDIR=str(tmp_path))), "TMPDIR")[0][0] == "warning"


def test_places_of_other_users_are_named(home: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    try:
        shutil.chown(store, 4242)
    except PermissionError:
        pytest.skip("this user cannot give a directory away")
    warned = about(examine(patient(home, CACHEMGR_STORE=str(store))), "store")
    assert ("warning", f"{store} belongs to user id 4242, who can replace what engines load") in warned


def test_a_store_that_rests_and_captures_that_are_avoided_are_told(home: Path) -> None:
    looked = patient(home)
    assert isinstance(looked.opened, Opened)
    looked.opened.cache.let_rest(looked.opened.cache.store, NOW - 100)
    reasons = {digest.of_bytes(b"a capture"): "an engine died of it"}
    looked.opened.cache.avoid(reasons, host="host", since="now", writable=True)
    found = examine(looked)
    assert ("warning", f"{looked.opened.cache.store} did not answer and is left alone for 200 s") in about(
        found, "store"
    )
    assert about(found, "quarantine")[0][0] == "note"


def test_no_budget_at_all_is_worth_a_word(home: Path) -> None:
    assert about(examine(patient(home, CACHEMGR_BUDGET="0")), "budget")[0][0] == "note"


def test_a_check_that_fails_stops_no_other(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_patient: Patient) -> list[Finding]:
        raise CacheError("the moon is full", hint="wait")

    def is_wrong(_patient: Patient) -> list[Finding]:
        raise ValueError("of ours")

    healthy = examine(patient(home))
    monkeypatch.setattr("cachemgr.doctor.CHECKS", (breaks, is_wrong, *CHECKS))
    found = examine(patient(home))
    assert found[0] == Finding("error", "breaks", "the moon is full", "wait")
    assert found[1] == Finding("error", "is wrong", "this check failed: ValueError: of ours", found[1].hint)
    # The temporary directory belongs to all tests, and what is left in it may change between two looks.
    told, told_then = (
        [(finding.severity, finding.about) for finding in each if finding.about != "debris"]
        for each in (healthy, found[2:])
    )
    assert told == told_then


def test_whose_captures_are_used_and_until_when(machine: Machine, tmp_path: Path) -> None:
    from cachemgr.clock import written
    from cachemgr.store import layout
    from cachemgr.store.local import LocalStore
    from tests.authorities import Authority

    seed, author = tmp_path / "seed", Authority()
    layout.ensure_layout(LocalStore(seed))

    def trust(code: int, **variables: str) -> tuple[str, str, str]:
        return said(machine, code=code, CACHEMGR_SEED=str(seed), **variables)["trust"]

    assert trust(1) == ("error", f"seed {seed} is not read: no trusted key", "set CACHEMGR_TRUSTED_KEYS")
    assert "whoever can write it runs code here" in trust(0, CACHEMGR_TRUST="seed=off")[1]
    assert "there is no store in seed" in said(machine, code=1, CACHEMGR_SEED=f"{tmp_path}/absent")["trust"][1]
    assert "trust" not in said(machine, CACHEMGR_SEED=str(seed), CACHEMGR_TRUSTED_KEYS=author.public)
    soon = f"{author.public} expires={written(time.time() + 86_400)}"
    assert "expires on" in trust(0, CACHEMGR_TRUSTED_KEYS=soon)[1]
    ended = f"{author.public} expires={written(time.time() - 86_400)}"
    assert trust(1, CACHEMGR_TRUSTED_KEYS=ended)[0] in {"error", "warning"}
    key = machine.home / ".cache" / "cachemgr" / "machine.key"
    key.parent.mkdir(parents=True, mode=0o700)
    key.write_bytes(b"x" * 32)
    key.chmod(0o644)
    assert f"{key} may be known to others" in said(machine)["trust"][1]
