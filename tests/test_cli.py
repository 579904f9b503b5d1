"""Commands as a person types them: what they print, in which form, with which exit code."""

import errno
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cachemgr import digest
from cachemgr.cli import COMMANDS
from cachemgr.errors import UsageError, in_words
from cachemgr.inventory import resolve
from cachemgr.key import Key
from cachemgr.store import layout
from cachemgr.store.local import LocalStore
from tests.machines import Machine, install_program, install_stand_in

pytestmark = pytest.mark.full

ARTIFACT_FIELDS = {
    "key", "engine", "engine_version", "model", "device", "domains", "files", "bytes", "stored_bytes", "captures",
    "complete", "created", "last_used", "uses", "pinned", "cold_seconds", "warm_seconds",
    "verdicts", "saved_seconds",
}  # fmt: skip
REPORT_FIELDS = {
    "schema", "key", "result", "artifact", "where", "verdict", "reasons", "restored_files", "restored_bytes",
    "restore_seconds", "added", "added_after_ready", "phases", "published", "errors",
    "gpus", "pulled_bytes", "published_bytes", "pushed_bytes",
}  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "one", tmp_path / "store", install_stand_in(tmp_path))


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    return (sys.executable, install_program(tmp_path), "f", "g")


@pytest.fixture
def key(machine: Machine, command: tuple[str, ...]) -> str:
    """The key of an artifact that was captured cold and used once."""
    machine.run(*command)
    other = Machine(machine.root.parent / "two", machine.store, machine.variables)
    found: str = other.run(*command)["key"]
    return found


def on_a_terminal(machine: Machine, *words: str, columns: int, **more: str) -> str:
    """What a command prints to a terminal of so many columns."""
    controller, terminal = pty.openpty()
    environ = {**machine.environ, "TERM": "xterm", "COLUMNS": str(columns), **more}
    process = subprocess.Popen(
        [sys.executable, "-m", "cachemgr", *words], env=environ, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    printed = b""
    while True:
        try:
            piece = os.read(controller, 65536)
        except OSError:
            break
        if not piece:
            break
        printed += piece
    process.wait(60)
    os.close(controller)
    return printed.decode().replace("\r\n", "\n")


def test_ls_speaks_to_people_programs_and_pipes(machine: Machine, key: str) -> None:
    table = machine.cachemgr("ls").stdout.splitlines()
    assert table[0].split() == ["KEY", "MODEL", "ENGINE", "DEVICE", "FILES", "SIZE", "AGE", "USES"]
    assert table[1].startswith(key[:12])
    assert machine.cachemgr("ls", "-q").stdout == f"{key}\n"
    document = machine.json("ls")
    assert document["schema"] == 1
    (artifact,) = document["artifacts"]
    assert set(artifact) == ARTIFACT_FIELDS
    assert (artifact["key"], artifact["files"], artifact["uses"], artifact["captures"]) == (key, 2, 1, 1)
    assert artifact["domains"] == ["inductor"]
    assert artifact["warm_seconds"] is not None
    assert document == json.loads(machine.cachemgr("ls", "--format", "json").stdout)


def test_ls_fits_a_narrow_terminal_and_names_stay_whole_in_a_pipe(machine: Machine, tmp_path: Path) -> None:
    long = tmp_path / f"{'a-very-long-program-name-' * 5}.py"
    long.write_text(Path(install_program(tmp_path)).read_text())
    machine.run(sys.executable, str(long), "f")
    narrow = on_a_terminal(machine, "ls", columns=80)
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in narrow.splitlines()) <= 80
    assert "FILES" in narrow
    assert "USES" in narrow
    assert long.name in machine.cachemgr("ls").stdout
    assert long.name in on_a_terminal(machine, "ls", columns=250)
    assert "\x1b" not in on_a_terminal(machine, "ls", columns=80, NO_COLOR="1", TERM="dumb")


def test_an_empty_store_lists_nothing_and_says_so_on_stderr(machine: Machine) -> None:
    done = machine.cachemgr("ls")
    assert done.stdout == ""
    assert "no artifacts in" in done.stderr
    assert machine.json("ls")["artifacts"] == []
    assert machine.json("size")["size"]["artifacts"] == 0


def test_show_takes_any_unambiguous_prefix(machine: Machine, key: str) -> None:
    for prefix in (key, key[:12], key[3:9], key.removeprefix("k1:")):
        assert f"key       {key}" in machine.cachemgr("show", prefix).stdout
    document = machine.json("show", key)
    (capture,) = document["captures"]
    assert capture["key"] == key
    assert {factor["role"] for factor in capture["factors"]} == {"guard", "match"}
    assert machine.cachemgr("show", key, "--files").stdout.count("aotautograd/") == 2


def test_show_has_the_command_as_it_is_typed(machine: Machine, command: tuple[str, ...]) -> None:
    shell = ("sh", "-c", f"true && {shlex.join(command)}")
    key = machine.run(*shell)["key"]
    assert f"command   {shlex.join(shell)}" in machine.cachemgr("show", key).stdout


def test_show_lists_guards_before_what_may_differ(machine: Machine, key: str) -> None:
    lines = machine.cachemgr("show", key).stdout.splitlines()
    roles = [line.split()[0] for line in lines if line.startswith(("  guard ", "  match ", "  blind "))]
    assert roles == sorted(roles, key=["guard", "blind", "match"].index)
    assert set(roles) == {"guard", "match"}


def test_show_names_what_it_does_not_find(machine: Machine, key: str) -> None:
    done = machine.cachemgr("show", "k1:0000000000", code=10)
    assert done.stderr == f"error: no artifact `k1:0000000000` in {machine.store}\nhint: cachemgr ls\n"


def test_an_ambiguous_prefix_is_a_usage_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for last in "ab":
        store.put(layout.manifest_name(Key("k1:" + "0" * 31 + last), digest.of_bytes(b"x")), b"x")
    with pytest.raises(UsageError, match="`k1:00` is the beginning of 2 artifacts"):
        resolve(store, "k1:00")


@pytest.mark.parametrize("nothing", ["", "k1", "k1:"])
def test_a_variable_that_is_not_set_names_no_artifact(machine: Machine, key: str, nothing: str) -> None:
    assert f"error: `{nothing}` names no artifact\nhint: " in machine.cachemgr("rm", "-y", nothing, code=2).stderr
    assert machine.cachemgr("ls", "-q").stdout == f"{key}\n"


@pytest.mark.parametrize(
    ("words", "said", "asked"),
    [
        (("--nope", "ls"), "no such option", "cachemgr"),
        (("nope",), "no such command 'nope'", "cachemgr"),
        (("config", "nope"), "no such command 'nope'", "cachemgr config"),
        (("show",), "missing argument 'KEY'", "cachemgr show"),
        (("run", "--"), "missing argument", "cachemgr run"),
        (("ls", "--limit", "0"), "invalid value for '--limit': 0 is not in the range x>=1", "cachemgr ls"),
        (("dir", "more"), "got unexpected extra argument (more)", "cachemgr dir"),
    ],
)
def test_a_wrong_command_line_is_said_as_every_error(
    machine: Machine, words: tuple[str, ...], said: str, asked: str
) -> None:
    machine.make_places()
    done = machine.cachemgr(*words, code=2)
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: {said}")
    assert hint == f"hint: {asked} --help"
    assert done.stdout == ""


@pytest.mark.parametrize("words", [(), ("config",)])
def test_a_group_without_a_command_shows_its_help(machine: Machine, words: tuple[str, ...]) -> None:
    machine.make_places()
    done = machine.cachemgr(*words, code=None)
    assert (done.stdout + done.stderr).startswith(" ".join(("Usage: cachemgr", *words)))


def test_a_home_that_cannot_be_used_is_said_by_every_command(machine: Machine, key: str) -> None:
    said = machine.cachemgr("ls", CACHEMGR_HOME="/dev/null").stderr
    assert said.count("warning: /dev/null can be written by everybody, so ") == 1


def test_a_file_is_no_store(machine: Machine) -> None:
    machine.make_places()
    said = machine.cachemgr("--store", "/etc/passwd", "ls", code=10).stderr
    assert said == "error: /etc/passwd is no store: it is no directory\nhint: --store DIR, see cachemgr dir\n"


def test_a_filter_that_nothing_fits_is_not_an_empty_store(machine: Machine, key: str) -> None:
    assert machine.cachemgr("ls", "-f", "files>99").stderr == f"no artifacts in {machine.store} that fit\n"


def test_lookup_answers_before_a_start(machine: Machine, command: tuple[str, ...], key: str) -> None:
    exact = machine.json("lookup", "--", *command)
    assert (exact["result"], exact["key"], exact["artifact"], exact["where"]) == ("exact", key, key, "local")
    near = machine.json("lookup", "--", *command, "h", code=1)
    assert set(near) == {"schema", "result", "key", "artifact", "differs", "relations", "where"}
    assert (near["result"], near["artifact"]) == ("near", key)
    assert near["differs"] == [
        {"factor": "program.args", "wanted": '["f","g","h"]', "stored": '["f","g"]', "role": "match"}
    ]
    text = machine.cachemgr("lookup", "--", *command, "h", code=1).stdout
    assert 'differs   program.args ["f","g","h"]≠["f","g"] (match)' in text


def test_lookup_without_a_store_is_none(machine: Machine, command: tuple[str, ...]) -> None:
    assert machine.json("lookup", "--", *command, code=1)["result"] == "none"
    assert not machine.store.exists(), "looking creates nothing"


def test_env_prints_what_run_would_set(machine: Machine, command: tuple[str, ...], key: str) -> None:
    text = machine.cachemgr("env", "--", *command).stdout
    shell = f'{text}\nprintf "%s %s" "$CACHEMGR_KEY" "$TORCHINDUCTOR_CACHE_DIR"'
    told = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert told == f"{key} {machine.home}/.cache/vllm/cachemgr/{key.replace(':', '-')}/inductor"


def test_size_counts_what_is_stored(machine: Machine, key: str) -> None:
    held = machine.json("size")["size"]
    objects = [path for name in ("layers", "artifacts") for path in (machine.store / name).rglob("*") if path.is_file()]
    assert held["stored_bytes"] == sum(path.stat().st_size for path in objects)
    assert machine.cachemgr("size", "-q").stdout == f"{held['stored_bytes']}\n"


def test_dir_prints_places(machine: Machine) -> None:
    assert machine.cachemgr("dir").stdout == f"{machine.store}\n"
    assert machine.cachemgr("dir", "--live").stdout == f"{machine.home}/.cache/vllm/cachemgr\n"
    assert machine.cachemgr("--store", "/elsewhere", "dir").stdout == "/elsewhere\n"


def test_rm_plans_asks_and_removes(machine: Machine, key: str) -> None:
    dry = machine.cachemgr("rm", key[:12], "--dry-run")
    assert dry.stderr.startswith("would remove 1 artifact (")
    refused = machine.cachemgr("rm", key[:12], code=2)
    assert "hint: add -y, or look first with --dry-run" in refused.stderr
    assert machine.json("ls")["artifacts"], "nothing was removed so far"
    plan = machine.json("rm", key, "--dry-run")["plan"]
    assert plan["keys"] == [key]
    assert machine.cachemgr("rm", key, "-y").stderr.startswith("removed 1 artifact (")
    assert machine.json("ls")["artifacts"] == []
    machine.cachemgr("rm", key, "-y", code=10)


def test_config_show_tells_every_origin(machine: Machine) -> None:
    told = machine.cachemgr("config", "show", "--json", CACHEMGR_WAIT="5").stdout
    settings = json.loads(told)["settings"]
    assert settings["wait"] == {
        "value": 5.0,
        "variable": "CACHEMGR_WAIT",
        "origin": "CACHEMGR_WAIT",
        "help": settings["wait"]["help"],
    }
    assert settings["deadline"]["origin"] == "default"
    assert "CACHEMGR_DEADLINE" in machine.cachemgr("config", "show").stdout


def test_the_report_has_the_documented_fields(machine: Machine, command: tuple[str, ...]) -> None:
    report = machine.run(*command)
    assert set(report) >= REPORT_FIELDS
    assert report["schema"] == 1
    assert re.fullmatch(r"k1:[0-9a-f]{32}", report["key"])
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", report["published"])


def test_a_damaged_capture_is_a_warning_beside_the_others(machine: Machine, command: tuple[str, ...], key: str) -> None:
    machine.run(*command, "h")
    (manifest,) = (machine.store / "artifacts" / key.replace(":", "-")).glob("*.zst")
    manifest.write_bytes(manifest.read_bytes()[:-9])
    listed = machine.cachemgr("ls", "-q")
    assert len(listed.stdout.split()) == 1
    assert "warning: capture" in listed.stderr
    assert "can be read" in machine.cachemgr("show", key, code=12).stderr
    machine.cachemgr("rm", key, "-y")
    assert "warning" not in machine.cachemgr("ls").stderr


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_with_its_exit_codes(machine: Machine, name: str) -> None:
    text = machine.cachemgr(name, "--help").stdout
    assert "Exit codes: 0 done" in text
    assert name in machine.cachemgr("--help").stdout


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("nonsense",), 2),
        (("run",), 2),
        (("ls", "--sort", "colour"), 2),
        (("ls", "--limit", "0"), 2),
        (("--config", "/no/such/file", "ls"), 2),
        (("run", "--deadline", "soon", "--", "true"), 2),
        (("show",), 2),
        (("rm",), 2),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(machine: Machine, words: tuple[str, ...], code: int) -> None:
    done = machine.cachemgr(*words, code=code)
    assert "Traceback" not in done.stderr
    assert done.stderr
    assert done.stdout == ""


def test_output_into_a_closed_pipe_is_no_error(machine: Machine, key: str) -> None:
    shell = f'"{sys.executable}" -m cachemgr show {key} --files | true; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", shell], env=machine.environ, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UsageError("a sentence"), "a sentence"),
        (PermissionError(errno.EACCES, "Permission denied", "/srv/store"), "/srv/store: Permission denied"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (MemoryError(), "there is not enough memory"),
        (ValueError("odd"), "ValueError: odd"),
    ],
)
def test_an_error_of_the_system_is_said_in_its_words(error: Exception, said: str) -> None:
    assert in_words(error) == said


def test_long_values_keep_what_tells_them_apart(machine: Machine, command: tuple[str, ...], key: str) -> None:
    wanted = "/srv/" + "directory-that-is-long/" * 5 + "engine.py"
    done = machine.cachemgr("lookup", "--", *command, wanted, code=1).stdout
    (line,) = [line for line in done.splitlines() if line.startswith("differs")]
    assert len(line) < 120
    assert "program.args" in line


def test_a_cache_that_is_not_kept_on_request_names_the_one_that_is(machine: Machine) -> None:
    done = machine.cachemgr("run", "--also", "triton", "--", "true", code=2)
    assert "hint: --also startup_plan" in done.stderr


def test_the_exit_code_of_a_command_that_failed_is_in_its_verdict(machine: Machine, command: tuple[str, ...]) -> None:
    assert "· exit code 3" in machine.run(*command, "exit=3", code=3)["stderr"]
    assert "exit code" not in machine.run(*command)["stderr"]


@pytest.mark.parametrize("words", [("rm", "k1:0"), ("push",), ("size",), ("verify",)])
def test_what_is_about_this_machine_asks_no_service(tmp_path: Path, words: tuple[str, ...]) -> None:
    machine = Machine(tmp_path / "one", tmp_path / "store", {})
    done = machine.cachemgr("--server", "http://127.0.0.1:1", *words, code=2)
    assert f"`{words[0]}` is about the stores of this machine" in done.stderr
    assert "hint: leave out --server" in done.stderr


@pytest.mark.parametrize(("streams", "code"), [(">/dev/full", 1), (">&-", 0)])
@pytest.mark.parametrize("words", ["ls", "show KEY", "config show", "--help"])
def test_output_that_cannot_be_written_is_no_traceback(
    machine: Machine, key: str, words: str, streams: str, code: int
) -> None:
    start = f"{sys.executable} -m cachemgr {words.replace('KEY', key)} {streams}"
    done = subprocess.run(["sh", "-c", start], env=machine.environ, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert ("error: the output cannot be written: No space left on device" in done.stderr) == bool(code)


def test_who_cannot_be_asked_needs_a_yes(machine: Machine, key: str) -> None:
    start = f"{sys.executable} -m cachemgr rm {key} <&-"
    done = subprocess.run(["sh", "-c", start], env=machine.environ, capture_output=True, text=True, check=False)
    assert (done.returncode, "needs a yes" in done.stderr) == (2, True)
