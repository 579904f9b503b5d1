"""`cachemgr prewarm`: starts until a start adds nothing, of one command and of a spec."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from cachemgr.factors import host
from cachemgr.factors.vllm.facts import known_versions
from cachemgr.factors.vllm.flags import Flags
from cachemgr.prewarm.entries import Record, missing_gpus
from cachemgr.prewarm.passes import Result
from cachemgr.prewarm.roots import own_root, sweep
from cachemgr.prewarm.starting import needs_weights
from cachemgr.process import children
from cachemgr.spec import Entry
from tests.engines import Engines
from tests.machines import Fleet, Machine, install_stand_in, launches_in, wait_for
from tests.test_vllm_reports import nvml


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines.install(tmp_path_factory.mktemp("engines"))


def prewarm(machine: Machine, *words: str, code: int = 0, **more: str) -> list[dict[str, Any]]:
    done = machine.cachemgr("prewarm", "--json", *words, code=code, **more)
    entries: list[dict[str, Any]] = json.loads(done.stdout)["entries"]
    return entries


def test_a_program_is_started_until_a_start_adds_nothing(fleet: Fleet) -> None:
    builder = fleet.machine("builder", CI="true")
    (result,) = prewarm(builder, "--", *fleet.command("one", "two"))
    assert result["state"] == "warm"
    assert [each["report"]["verdict"] for each in result["passes"]] == ["cold", "used"]
    assert [sum(each["report"]["added"].values()) for each in result["passes"]] == [2, 0]
    server = fleet.machine("server").run(*fleet.command("one", "two"))
    assert (server["result"], server["verdict"], server["key"]) == ("exact", "used", result["key"])


def test_nothing_of_a_start_is_left_but_what_it_published(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    prewarm(builder, "--", *fleet.command("one"))
    assert not list(builder.tmp.rglob("torchinductor*"))
    assert not [path for path in builder.home.rglob("prewarm/*") if path.is_dir()]
    assert not (builder.home / ".cache" / "vllm").exists()


def test_a_program_that_grows_at_every_start_is_not_called_warm(fleet: Fleet, tmp_path: Path) -> None:
    growing = tmp_path / "growing.py"
    text = Path(fleet.program).read_text()
    growing.write_text(text.replace("sys.argv[1:]", "[*sys.argv[1:], str(time.monotonic_ns())]"))
    done = fleet.machine("builder").cachemgr(
        "prewarm", "--max-passes", "3", "--", sys.executable, str(growing), "one", code=1
    )
    assert "grows" in done.stdout
    assert "start 3 still added 1 in inductor" in done.stdout
    assert "aotautograd/" in done.stdout, "an example of what it added"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("one", "exit=3"), "exit code 3"), (("kill=9",), "exit code 137"), ((), "it compiles nothing that can be kept")],
)
def test_a_command_that_fails_or_has_nothing_to_keep(fleet: Fleet, arguments: tuple[str, ...], said: str) -> None:
    (result,) = prewarm(fleet.machine("builder"), "--", *fleet.command(*arguments), code=1)
    assert (result["state"], result["reason"]) == ("failed", said)


def test_a_program_that_uses_nothing_of_its_artifact_is_not_called_warm(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    builder.run(*fleet.command("one"), options=("--ignore-arg", "--size"))
    builder.run(sys.executable, fleet.program, "--size=2", options=("--ignore-arg", "--size"))
    (result,) = prewarm(builder, "--", *fleet.command(), code=1)
    assert (result["state"], result["reason"]) == ("failed", "it uses nothing of what was restored")


def test_a_command_that_does_not_end_is_ended(fleet: Fleet) -> None:
    (result,) = prewarm(fleet.machine("builder"), "--limit", "2s", "--", *fleet.command("one", "sleep=600"), code=1)
    assert (result["state"], result["reason"]) == ("timed out", "not done after 2 s")
    assert result["passes"][0]["code"] == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--", "vllm", "bench", "startup"), "measures cold starts"),
        ((), "takes a command or a spec"),
        (("--limit", "soon", "--", "true"), "`--limit` must be a time"),
        (("--spec", "none.toml"), "spec none.toml cannot be read: No such file"),
        (("--sign-key", "key.pem", "--", "true"), "--sign-key signs what --bake makes"),
        (("--again", "--", "true"), "--again goes with --spec"),
        (("--state", "state.json", "--", "true"), "--state goes with --spec"),
        (("--dryrun", "--", "true"), "no such option '--dryrun'. Did you mean '--dry-run'?"),
    ],
)
def test_what_cannot_be_meant(fleet: Fleet, words: tuple[str, ...], said: str) -> None:
    code = 1 if "startup" in words else 2
    done = fleet.machine("builder").cachemgr("prewarm", *words, code=code)
    assert said in done.stdout + done.stderr


def test_publishing_must_be_on(fleet: Fleet) -> None:
    done = fleet.machine("builder", CACHEMGR_READ_ONLY="1").cachemgr("prewarm", "--", *fleet.command("one"), code=1)
    assert "publishing is off" in done.stdout


def test_a_server_is_asked_what_users_ask_and_told_to_end(engines: Engines) -> None:
    builder = engines.machine("builder")
    (result,) = prewarm(builder, "--", *engines.serve("--max-model-len=64"))
    assert result["state"] == "warm"
    first, second = result["passes"]
    asked = {step["name"]: step["status"] for step in first["exercised"]}
    assert {"a batch of 1", "a batch of 64", "greedy", "penalties", "structured output"} <= asked.keys()
    assert asked["a batch of 1"] == 200
    assert asked["a picture"] == 400, "what a server does not offer it refuses"
    assert first["report"]["added"]["triton"] == 4, "two kernels of the start, two of the requests"
    assert not any(second["report"]["added"].values())
    # The same command as users write it, with its weights, on a machine that has only the store in common.
    started = engines.machine("server").run(*engines.serve("--max-model-len=64"))
    assert (started["result"], started["verdict"], started["key"]) == ("exact", "used", result["key"])
    assert not any(started["added"].values())


def test_a_server_gets_weights_that_mean_nothing_and_a_port_of_its_own(engines: Engines) -> None:
    builder = engines.machine("planner")
    (row,) = builder.json("prewarm", "--dry-run", "--", *engines.serve("--port=80"))["plan"]
    tail = row["command"][-6:]
    assert tail[:5] == ["--load-format", "dummy", "--host", "127.0.0.1", "--port"]
    assert row["action"] == "start"
    (row,) = builder.json("prewarm", "--dry-run", "--", *engines.serve("--load-format=dummy"))["plan"]
    assert row["command"].count("--load-format") == 0, "said once is enough: vLLM warns of words that come twice"
    (row,) = builder.json("prewarm", "--dry-run", "--real-weights", "--", *engines.serve())["plan"]
    assert "dummy" not in row["command"]


@pytest.mark.parametrize("version", known_versions())
def test_every_release_is_started_without_its_weights(tmp_path: Path, version: str) -> None:
    """The hash has nothing of them, and no release compiles without making an engine (`test_vllm_facts.py`)."""
    other = Engines.install(tmp_path, version)
    (row,) = other.machine("planner").json("prewarm", "--dry-run", "--", *other.serve())["plan"]
    assert (row["action"], row["found"], row["note"]) == ("start", "none", "")
    assert row["command"][-6:-4] == ["--load-format", "dummy"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--load-format", "tensorizer"),
        ("-q", "bitsandbytes"),
        ("-q", "gguf"),
        ("--model-loader-extra-config", '{"a": 1}'),
    ],
)
def test_weights_that_cannot_be_made_up_are_loaded(engines: Engines, flags: tuple[str, ...]) -> None:
    (row,) = engines.machine("planner").json("prewarm", "--dry-run", "--", *engines.serve(*flags))["plan"]
    assert "dummy" not in row["command"]
    assert row["note"].startswith("loads its weights: ")


@pytest.mark.parametrize(
    ("model", "gguf"),
    [
        ("/models/tiny.Q4_K_M.gguf", True),
        ("org/tiny-GGUF:Q4_K_M", True),
        ("org/tiny-GGUF", False),
        ("s3://bucket/org/tiny:1", False),
        ("/models/llama", False),
    ],
)
def test_a_gguf_file_is_known_by_its_name(model: str, gguf: bool) -> None:
    assert ("GGUF" in needs_weights(Flags("serve", {}, model=model))) is gguf


def test_that_weights_are_loaded_is_said_before_they_are(engines: Engines) -> None:
    """Before minutes of loading, or a failure for want of them."""
    builder = engines.machine("weights", STAND_IN="quit", CACHEMGR_STORE=str(engines.directory / "store-weights"))
    done = builder.cachemgr("prewarm", "--", *engines.serve("--quantization=gguf"), code=1)
    said = [line for line in done.stderr.splitlines() if line.startswith(("cachemgr: ", "command: "))]
    assert said[0] == "cachemgr: command loads its weights: a GGUF file has its own kinds of layers"
    assert sum("loads its weights" in line for line in said) == 1


def test_a_server_that_compiles_at_every_request_is_not_called_warm(engines: Engines) -> None:
    builder = engines.machine("noisy", STAND_IN="noise", CACHEMGR_STORE=str(engines.directory / "noisy-store"))
    (result,) = prewarm(builder, "--max-passes", "2", "--", *engines.serve(), code=1)
    assert result["state"] == "grows"
    assert "in triton" in result["reason"]


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("quit", "exit code 0 before it was ready"),
        ("dies-of-json", "its engine died of structured output (500 cannot spell JSON): 503"),
    ],
)
def test_a_server_that_fails_is_not_called_warm(engines: Engines, behaviour: str, said: str) -> None:
    store = str(engines.directory / f"store-{behaviour}")
    builder = engines.machine(behaviour, STAND_IN=behaviour, CACHEMGR_STORE=store)
    (result,) = prewarm(builder, "--", *engines.serve(), code=1)
    assert result["state"] == "failed"
    assert result["reason"].startswith(said)


@pytest.mark.parametrize(
    ("behaviour", "refused"),
    [
        ("no-json", ["refused structured output (500 cannot spell JSON)", "refused a picture (400 no template)"]),
        ("fail", ["refused batches (8 of 8, first a batch of 1: 500 {})", "refused structured output (500 {})"]),
    ],
)
def test_what_a_server_refuses_is_told_by_kind_and_is_no_fault_of_its_start(
    engines: Engines, behaviour: str, refused: list[str]
) -> None:
    store = str(engines.directory / f"store-{behaviour}")
    builder = engines.machine(behaviour, STAND_IN=behaviour, CACHEMGR_STORE=store)
    done = builder.cachemgr("prewarm", "--json", "--", *engines.serve())
    (result,) = json.loads(done.stdout)["entries"]
    assert result["state"] == "warm"
    assert set(refused) <= set(result["notes"])
    kinds = "structured output, a chat, a picture"
    told = kinds if behaviour == "no-json" else f"batches, samplers, {kinds}"
    assert f"questions answered · refused {told}" in done.stderr


def spec_of(machine: Machine, *entries: dict[str, object]) -> str:
    machine.make_places()
    (machine.root / "spec.toml").write_text(
        "".join("[[entries]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in each.items()) for each in entries)
    )
    return "spec.toml"


def test_one_entry_that_fails_loses_no_other_and_what_is_done_is_done(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    good: dict[str, object] = {"name": "good", "command": fleet.command("one")}
    spec = spec_of(
        builder,
        {"name": "bad", "command": fleet.command("exit=9")},
        good,
        {"name": "elsewhere", "command": fleet.command("two"), "gpu": "H200", "gpus": 8},
        {"name": "absent", "command": ["no-such-command"]},
    )
    states = {each["name"]: each["state"] for each in prewarm(builder, "--spec", spec, code=3)}
    assert states == {"bad": "failed", "good": "warm", "elsewhere": "no GPU", "absent": "failed"}
    before = len(launches_in(builder.store))
    again = {each["name"]: each["state"] for each in prewarm(builder, "--spec", spec, code=3)}
    assert again == {**states, "good": "already warm"}
    assert len(launches_in(builder.store)) == before + 1, "only the one that failed was started again"
    # The record says that it is done, and the store does not: it is done again.
    key = builder.cachemgr("ls", "-q").stdout.split()[0]
    builder.cachemgr("rm", "-y", key)
    assert [each["state"] for each in prewarm(builder, "--spec", spec, "--entry", "good")] == ["warm"]
    # Another command under the same name is another entry.
    spec_of(builder, {**good, "command": fleet.command("three")})
    assert [each["state"] for each in prewarm(builder, "--spec", spec)] == ["warm"]


def test_what_is_done_again_loses_nothing_of_what_is_not(tmp_path: Path) -> None:
    """Of a state file that two processes write, each for the entries of its own GPU."""
    first, second, third = (Entry(name, ("true",)) for name in ("first", "second", "third"))
    path = tmp_path / "state.json"
    record, other = Record(path), Record(path)
    for entry in (first, second):
        record.note(entry, Result(entry.name, "warm", None, ""), "2026-11-30T00:00:00Z")
    other.note(third, Result("third", "failed", None, "exit code 1"), "2026-11-30T00:00:00Z")
    record.forget([first])
    assert record.of(first) is None
    record.note(first, Result("first", "warm", None, ""), "2026-11-30T01:00:00Z")
    states = [done.state for entry in (first, second, third) if (done := Record(path).of(entry)) is not None]
    assert states == ["warm", "warm", "failed"]


def test_what_failed_here_and_others_did_is_in_the_store_and_not_since_then(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    spec = spec_of(builder, {"name": "one", "command": fleet.command("one"), "limit": "0.01s"})
    assert [each["state"] for each in prewarm(builder, "--spec", spec, code=1)] == ["timed out"]
    fleet.machine("other").run(*fleet.command("one"))
    (result,) = prewarm(builder, "--spec", spec, "--if-missing")
    assert (result["state"], result["reason"]) == ("already warm", "in the local store")


def test_an_interrupted_spec_goes_on_where_it_was(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    spec = spec_of(
        builder,
        {"name": "first", "command": fleet.command("one")},
        {"name": "second", "command": fleet.command("two", "sleep=600")},
    )
    process = builder.start("prewarm", "--spec", spec, "--state", "state.json", group=True)
    wait_for((builder.root / "state.json").exists)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    spec_of(
        builder,
        {"name": "first", "command": fleet.command("one")},
        {"name": "second", "command": fleet.command("two")},
    )
    assert [each["state"] for each in prewarm(builder, "--spec", spec, "--state", "state.json")] == [
        "already warm",
        "warm",
    ]


def roots(machine: Machine) -> list[Path]:
    return sorted(path for path in (machine.home / ".cache" / "cachemgr").rglob("prewarm/*") if path.suffix != ".json")


def test_what_a_killed_prewarm_left_is_removed_by_the_next_and_not_while_its_start_runs(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    process = builder.start("prewarm", "--", *fleet.command("one", "sleep=600"))
    assert process.stderr is not None
    while "sleeping" not in process.stderr.readline():
        pass
    (orphan,) = children(process.pid)
    process.kill()
    process.wait()
    root, lock = roots(builder)
    assert (root.is_dir(), lock.name) == (True, f"{root.name}.lock")
    prewarm(builder, "--", *fleet.command("two"))
    assert roots(builder) == [root, lock], "somebody is still in there"
    os.kill(orphan, signal.SIGKILL)
    process.communicate()  # its end: whoever had our pipe is gone
    done = builder.cachemgr("prewarm", "--", *fleet.command("two"))
    assert "removed what 1 start left whose prewarm was killed" in done.stderr
    assert roots(builder) == []


def test_only_roots_that_nobody_holds_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "prewarm"
    with own_root(tmp_path, "held", "here") as held:
        (folder / "left" / "deep").mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        (folder / "linked").symlink_to(tmp_path, target_is_directory=True)
        (folder / "early.lock").touch()
        assert sweep(tmp_path, "here") == ("left",)
        assert held.is_dir()
        assert {path.name for path in folder.iterdir()} == {"held", "held.lock", "state.json", "linked"}
    assert not held.exists()
    # On a file system of several hosts a lock that could be taken may not be seen by the others.
    for name in ("here", "there"):
        (folder / name).mkdir()
        (folder / f"{name}.lock").write_text(name)
    monkeypatch.setattr("cachemgr.prewarm.roots.network_file_system", lambda _path: "nfs4")
    assert sweep(tmp_path, "here") == ("here",)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_is_told_to_end_starts_no_other_entry(fleet: Fleet, number: signal.Signals) -> None:
    builder = fleet.machine("builder")
    spec = spec_of(
        builder,
        {"name": "first", "command": fleet.command("one", "sleep=600")},
        {"name": "second", "command": fleet.command("two")},
    )
    process = builder.start("prewarm", "--spec", spec)
    assert process.stderr is not None
    while "sleeping" not in process.stderr.readline():
        pass
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "second" not in errors


def test_a_state_file_that_is_none_is_said(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    spec = spec_of(builder, {"name": "first", "command": fleet.command("one")})
    (builder.root / "state.json").write_text("{")
    done = builder.cachemgr("prewarm", "--spec", spec, "--state", "state.json", code=12)
    assert "state.json cannot be read" in done.stderr


def test_upgrade_day_is_one_spec(fleet: Fleet) -> None:
    """What the old image's captures were made of is prewarmed in the new one, whose torch is another."""
    old = fleet.machine("old")
    old.run(*fleet.command("one"))
    old.run(*fleet.command("two", "--api-key", "s3cr3t"))
    done = old.cachemgr("spec", "-f", "engine_version=2.13*")
    assert "left out" in done.stderr
    assert "s3cr3t" not in done.stdout + done.stderr
    new = fleet.machine("new", **install_stand_in(fleet.directory, torch="2.14.0+cpu"))
    new.make_places()
    (new.root / "next.yaml").write_text(done.stdout)
    (result,) = prewarm(new, "--spec", "next.yaml")
    assert result["state"] == "warm"
    assert result["passes"][-1]["report"]["engine_version"] == "2.14.0+cpu"
    assert old.cachemgr("spec", "-f", "engine_version=9", code=1).stdout == ""


@pytest.mark.parametrize(
    ("there", "wanted", "lack"),
    [
        (("NVIDIA H200",) * 2, {"gpu": "H200", "gpus": 2}, ""),
        (("NVIDIA H200",) * 2, {"gpu": "h200", "gpus": 4}, "needs 4 of h200, and here are 2 of NVIDIA H200"),
        (("NVIDIA L4", "NVIDIA H200"), {"gpu": "H200", "gpus": 2}, "and here are 1 of NVIDIA L4, 1 of NVIDIA H200"),
        (("NVIDIA L4",), {"gpus": 1}, ""),
        ((), {"gpus": 1}, "needs 1 of any GPU, and here is none"),
        ((), {}, ""),
    ],
)
def test_an_entry_goes_only_where_its_gpus_are(
    there: tuple[str, ...], wanted: dict[str, Any], lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_NVIDIA_NODES", (Path("/dev/null"),))
    monkeypatch.setitem(sys.modules, "pynvml", nvml(*there))
    assert missing_gpus(Entry("a", ("true",), **wanted), {}).endswith(lack)
    assert bool(missing_gpus(Entry("a", ("true",), **wanted), {})) == bool(lack)
