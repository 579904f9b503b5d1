"""Seeds: what `prewarm --bake` makes, what `--verify` shows of it, and where it can be used."""

import json
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cachemgr.lookup import NOTHING
from cachemgr.prewarm.isolation import base_of_places, can_unshare
from cachemgr.prewarm.seed import Baking, bake
from cachemgr.spec import Entry, load
from cachemgr.store import layout
from cachemgr.store.captures import captures, enter, no_marks
from cachemgr.store.local import LocalStore
from tests.machines import Fleet, Machine

UNSIGNED = {"CACHEMGR_TRUST": "seed=off"}


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def prewarm(machine: Machine, *words: str, code: int = 0, **more: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(machine.cachemgr("prewarm", "--json", *words, code=code, **more).stdout)
    return document


def test_a_seed_is_enough_for_a_machine_that_has_nothing_else(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    made = prewarm(builder, "--bake", "seed", "--", *fleet.command("one", "two"))
    assert made["baked"]["artifacts"] == [made["entries"][0]["key"]]
    moved = fleet.directory / "elsewhere" / "in" / "the image"
    moved.parent.mkdir(parents=True)
    (builder.root / "seed").rename(moved)
    pod = Machine(fleet.directory / "pod", fleet.directory / "pod-store", {**fleet.variables, **UNSIGNED})
    report = pod.run(*fleet.command("one", "two"), CACHEMGR_SEED=str(moved))
    assert (report["result"], report["where"], report["verdict"]) == ("exact", "seed", "used")
    assert not any(report["added"].values())


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--bake", "seed", "--sign-key", "absent.pem"), 2, "the signing key absent.pem cannot be read"),
        (("--bake", "/dev/null/seed"), 13, "seed /dev/null/seed cannot be made"),
    ],
)
def test_what_would_fail_at_the_end_is_said_before_anything_is_started(
    fleet: Fleet, words: tuple[str, ...], code: int, said: str
) -> None:
    builder = fleet.machine("builder")
    done = builder.cachemgr("prewarm", *words, "--", *fleet.command("one"), code=code)
    assert said in done.stderr
    assert builder.cachemgr("ls", "-q").stdout == ""


def test_it_has_the_modes_of_an_image_whatever_the_umask_was(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    words = [sys.executable, "-m", "cachemgr", "prewarm", "--bake", "seed", "--", *fleet.command("one")]
    done = subprocess.run(
        words, env=builder.environ, cwd=builder.root, umask=0o077, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    seed = builder.root / "seed"
    assert {oct(path.stat().st_mode & 0o7777) for path in [seed, *seed.rglob("*")] if path.is_dir()} == {"0o755"}
    assert {oct(path.stat().st_mode & 0o7777) for path in seed.rglob("*") if path.is_file()} == {"0o644"}
    assert not (seed / "tmp").exists()
    assert not (seed / "CACHEDIR.TAG").exists(), "tools that leave caches out would leave it out of the image"


def test_it_names_no_place_of_the_builder_and_grows_by_what_is_compressed(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    prewarm(builder, "--bake", "seed", "--", *fleet.command("one", "two"))
    seed = builder.root / "seed"
    stored = sum(path.stat().st_size for path in seed.rglob("*") if path.is_file())
    assert stored < 5000, "two kernels of 5 kB each"
    for layer in seed.rglob("*.tar.zst"):
        unpacked = subprocess.run(["tar", "--zstd", "-xOf", str(layer)], capture_output=True, check=True)
        assert str(builder.root).encode() not in unpacked.stdout


def test_several_bakes_add_up(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    (builder.root).mkdir(exist_ok=True)
    for number in ("one", "two"):
        (builder.root / f"{number}.toml").write_text(
            f'[[entries]]\nname = "{number}"\ncommand = {json.dumps(fleet.command(number))}\n'
            'env = { MY_TOKEN = "hf_secret", TORCHINDUCTOR_FOO = "1" }\n'
        )
        prewarm(builder, "--spec", f"{number}.toml", "--bake", "seed")
    listed = builder.json("ls", CACHEMGR_STORE=str(builder.root / "seed"))["artifacts"]
    assert len(listed) == 2
    kept = (builder.root / "seed" / "commands.yaml").read_text()
    assert "name: one" in kept
    assert "name: two" in kept
    assert "TORCHINDUCTOR_FOO" in kept
    assert "secret" not in kept


def of_two(fleet: Fleet, builder: Machine, *options: str) -> list[str]:
    """The words that prewarm a spec of two entries which have all domains in common but for their graphs."""
    builder.make_places()
    rows = [{"name": name, "command": list(fleet.command(name, *options))} for name in ("one", "two")]
    (builder.root / "spec.json.yaml").write_text(json.dumps({"entries": rows}))
    return ["--spec", "spec.json.yaml"]


def names_in(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_an_artifact_that_is_damaged_loses_no_other_and_leaves_nothing_in_the_seed(fleet: Fleet) -> None:
    """Of two that are warm already, the layer of one has rotted in the store."""
    builder = fleet.machine("builder")
    words = of_two(fleet, builder)
    one, two = prewarm(builder, *words)["entries"]
    prewarm(builder, "--bake", "whole", "--", *fleet.command("two"))
    (manifest,) = captures(LocalStore(builder.store), one["key"], [])
    rotten = builder.store / layout.layer_name(manifest.manifest.layers[0].digest)
    rotten.chmod(0o644)
    rotten.write_bytes(rotten.read_bytes()[:-3] + b"rot")
    done = builder.cachemgr("prewarm", "--json", "--bake", "seed", "--verify", *words, code=3)
    told = json.loads(done.stdout)
    (left_out,) = told["baked"]["left_out"]
    assert (left_out["name"], left_out["key"]) == ("one", one["key"])
    assert "one: not baked: layer sha256:" in done.stderr
    assert told["baked"]["artifacts"] == [two["key"]]
    assert [(proof["name"], proof["holds"]) for proof in told["proofs"]] == [("two", True)]
    seed = {name for name in names_in(builder.root / "seed") if not name.endswith(".verified")}
    assert seed == names_in(builder.root / "whole"), "as if it had never been asked for"
    assert [entry.command[-1] for entry in load(builder.root / "seed" / "commands.yaml").entries] == ["two"]


def test_an_artifact_that_arrives_in_part_is_taken_out_again_and_what_was_there_stays(fleet: Fleet) -> None:
    builder, store = fleet.machine("builder"), LocalStore(fleet.directory / "store")
    prewarm(builder, "--bake", "seed", "--", *fleet.command("kept"))
    before = names_in(builder.root / "seed")
    made = prewarm(builder, *of_two(fleet, builder))["entries"]
    (first,), (second,) = (captures(store, each["key"], []) for each in made)
    joined = msgspec.structs.replace(second.manifest, key=first.manifest.key, factors=first.manifest.factors)
    enter(store, joined, no_marks)
    (builder.store / layout.layer_name(joined.layers[0].digest)).unlink()
    both = captures(store, first.manifest.key, [])
    assert len(both) == 2
    whole = msgspec.structs.replace(NOTHING, result="exact", artifact=first.manifest.key, captures=both, store=store)
    baking = [Baking(Entry("both", ("x",)), first.manifest.key, whole)]
    baked = bake(baking, builder.root / "seed", now=0.0)
    assert [(each.name, each.key) for each in baked.left_out] == [("both", first.manifest.key)]
    assert (baked.artifacts, baked.captures, baked.bytes) == ((), (), 0)
    assert names_in(builder.root / "seed") == before


def test_a_single_command_that_cannot_be_baked_is_an_answer_that_says_so(fleet: Fleet) -> None:
    """Somebody removes the artifact between the last start and the seed: the program itself does, at its second."""
    program = fleet.directory / "fickle.py"
    program.write_text(
        Path(fleet.program).read_text() + "\nimport atexit, shutil\nif os.listdir(os.environ['STORE'] + '/artifacts'):"
        "\n    shutil.rmtree(os.environ['STORE'] + '/layers')\n"
    )
    builder = fleet.machine("builder", STORE=str(fleet.directory / "store"))
    (fleet.directory / "store" / "artifacts").mkdir(parents=True)
    done = builder.cachemgr("prewarm", "--json", "--bake", "seed", "--", sys.executable, str(program), "one", code=1)
    told = json.loads(done.stdout)
    assert told["entries"][0]["state"] == "warm"
    assert told["baked"]["artifacts"] == []
    assert "command: not baked: " in done.stderr
    assert names_in(builder.root / "seed") == {"layout.json"}


def test_who_dies_of_verifying_one_entry_goes_on_with_the_others(fleet: Fleet) -> None:
    """As when memory runs out: the kernel takes the process that watches the start, not only the start."""
    program = fleet.directory / "greedy.py"
    kill = "\nif os.environ.get('GREEDY') and sys.argv[1] == 'one':\n"
    kill += "    print('greedy', os.getpid(), file=sys.stderr, flush=True)\n"
    kill += "    os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)\n"
    program.write_text(Path(fleet.program).read_text() + kill)
    builder = fleet.machine("builder")
    builder.make_places()
    rows = [{"name": name, "command": [sys.executable, str(program), name]} for name in ("one", "two")]
    (builder.root / "spec.yaml").write_text(json.dumps({"entries": rows}))
    prewarm(builder, "--spec", "spec.yaml", "--bake", "seed")
    done = builder.cachemgr("prewarm", "--json", "--verify", "--seed", "seed", code=3, GREEDY="1")
    first, second = json.loads(done.stdout)["proofs"]
    assert (first["name"], first["holds"]) == ("one", False)
    assert first["faults"] == ["the process that started it ended with exit code 137"]
    assert (second["name"], second["holds"]) == ("two", True)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("greedy ")]
    assert not Path(f"/proc/{line.split()[1]}").exists(), "what it had started is ended"


def test_what_is_ignored_when_it_is_made_is_ignored_when_it_is_verified(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    ignored = ("--bake", "seed", "--verify", "--ignore-arg", "--port")
    (proof,) = prewarm(builder, *ignored, "--", *fleet.command("one", "--port=80"))["proofs"]
    assert proof["holds"], proof


def test_a_seed_is_verified_and_says_so_beside_its_captures(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    made = prewarm(builder, "--bake", "seed", "--verify", "--", *fleet.command("one"))
    (proof,) = made["proofs"]
    assert proof["holds"], proof
    assert (proof["verdict"], proof["added"], proof["compilers"]) == ("used", {}, [])
    (note,) = (builder.root / "seed").rglob("*.verified")
    record = json.loads(note.read_bytes())
    assert record["captures"] == proof["captures"]
    assert (record["device"], record["added"], record["key"]) == ("cpu", 0, proof["key"])


def test_only_what_was_verified_is_used_where_that_is_asked_for(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    prewarm(builder, "--bake", "plain", "--", *fleet.command("one"))
    prewarm(builder, "--bake", "verified", "--verify", "--", *fleet.command("one"))
    found = {}
    for seed in ("plain", "verified"):
        pod = Machine(fleet.directory / seed, fleet.directory / f"{seed}-store", {**fleet.variables, **UNSIGNED})
        variables = {"CACHEMGR_SEED": str(builder.root / seed)}
        report = pod.run(*fleet.command("one"), options=("--require-verified",), CACHEMGR_SEED=str(builder.root / seed))
        found[seed] = report["result"]
        looked = pod.json("lookup", "--", *fleet.command("one"), code=None, CACHEMGR_REQUIRE_VERIFIED="1", **variables)
        assert looked["result"] == report["result"]
        if seed == "plain":
            assert report["errors"]["untrusted"] == 1
            assert "was never verified" in report["stderr"]
    assert found == {"plain": "none", "verified": "exact"}


def test_a_seed_that_is_signed_is_used_where_that_is_required(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    builder.make_places()
    builder.cachemgr("keygen", "signing.pem")
    public = (builder.root / "signing.pem.pub").read_text().split()[0]
    made = prewarm(builder, "--bake", "seed", "--verify", "--sign-key", "signing.pem", "--", *fleet.command("one"))
    assert made["proofs"][0]["holds"]
    assert len(list((builder.root / "seed").rglob("*.sig"))) == 1
    for name, trusted, result in (("pod", public, "exact"), ("other", "", "none")):
        pod = Machine(fleet.directory / name, fleet.directory / f"{name}-store", fleet.variables)
        report = pod.run(*fleet.command("one"), CACHEMGR_SEED=str(builder.root / "seed"), CACHEMGR_TRUSTED_KEYS=trusted)
        assert report["result"] == result


def test_a_seed_is_verified_again_in_the_image_and_stays_an_image(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    prewarm(builder, "--bake", "seed", "--", *fleet.command("one"))
    for words in (("prewarm", "--verify"), ("verify",)):
        (proof,) = json.loads(builder.cachemgr(*words, "--seed", "seed", "--json").stdout)["proofs"]
        assert proof["holds"]
    assert {path.name for path in (builder.root / "seed").iterdir()} == {
        "artifacts",
        "layers",
        "commands.yaml",
        "layout.json",
    }
    assert "there is no seed" in builder.cachemgr("verify", "--seed", "nowhere", code=10).stderr
    assert "--store seed verify" in builder.cachemgr("verify", "--seed", "seed", "--deep", code=2).stderr


def test_what_was_noted_of_an_artifact_goes_with_it(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    made = prewarm(builder, "--verify", "--", *fleet.command("one"))
    assert list(builder.store.rglob("*.verified"))
    builder.cachemgr("rm", "-y", made["entries"][0]["key"])
    assert not list(builder.store.rglob("*.verified"))


def test_two_command_lines_into_one_seed_are_both_kept(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    commands = [list(fleet.command("one")), list(fleet.command("two"))]
    for command in commands:
        prewarm(builder, "--bake", "seed", "--", *command)
    prewarm(builder, "--bake", "seed", "--", *commands[0])
    planned = prewarm(builder, "--verify", "--seed", "seed", "--dry-run")["plan"]
    assert [each["command"] for each in planned] == commands
    assert [each["name"] for each in planned] == ["command", "command-2"]


def modes(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mode for path in [directory, *directory.rglob("*")]}


def test_what_is_no_seed_is_not_made_one(fleet: Fleet) -> None:
    """In an image all may be read by all, and nothing temporary is kept; not so in a home directory."""
    builder = fleet.machine("builder")
    builder.run(*fleet.command("one"))
    mine = builder.root / "mine"
    (mine / "tmp").mkdir(parents=True, mode=0o700)
    (mine / "tmp" / "key.pem").write_text("private")
    (mine / "tmp" / "key.pem").chmod(0o600)
    (builder.root / "spec.yaml").write_text(f"entries:\n- {{name: a, command: {json.dumps(fleet.command('one'))}}}\n")
    before = modes(mine), modes(builder.store)
    for place in (mine, builder.store):
        done = builder.cachemgr("prewarm", "--bake", str(place), "--", *fleet.command("one"), code=2)
        assert f"{place} has something in it that is no seed" in done.stderr
    done = builder.cachemgr("prewarm", "--verify", "--seed", str(mine), "--spec", "spec.yaml", code=10)
    assert "there is no seed" in done.stderr
    assert (modes(mine), modes(builder.store)) == before


def test_a_store_that_is_verified_as_if_it_were_a_seed_stays_as_it_is(fleet: Fleet) -> None:
    builder = fleet.machine("builder")
    builder.run(*fleet.command("one"))
    before = modes(builder.store)
    (proof,) = prewarm(builder, "--verify", "--seed", str(builder.store))["proofs"]
    assert proof["holds"], proof
    assert before.items() <= modes(builder.store).items()


def test_who_verifies_ends_with_what_is_verified_and_hands_it_no_key(fleet: Fleet) -> None:
    program = fleet.directory / "patient.py"
    told = "'sleeping', os.environ.get('CACHEMGR_SIGN_KEY'), os.environ.get('MY_KEY'), os.environ['TMPDIR']"
    sleep = f"\nif os.environ.get('SLEEP'): print({told}, file=sys.stderr, flush=True); time.sleep(600)\n"
    program.write_text(Path(fleet.program).read_text() + sleep)
    builder = fleet.machine("builder")
    prewarm(builder, "--bake", "seed", "--", sys.executable, str(program), "one")
    signer = fleet.machine("builder", SLEEP="1", CACHEMGR_SIGN_KEY="env:MY_KEY", MY_KEY="private")
    process = signer.start("prewarm", "--verify", "--seed", "seed")
    assert process.stderr is not None
    line = ""
    while not line.startswith("sleeping"):
        line = process.stderr.readline()
        assert line
    _sleeping, where, key, place = line.split()
    assert (where, key) == ("None", "None")
    assert len(place) + len("/01234567-89ab-cdef-0123-456789abcdef") <= 107, "where engines meet at sockets"
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not Path(place).parent.parent.exists()
    assert not [each for each in Path("/proc").glob("[0-9]*/cmdline") if str(program).encode() in told_by(each)]


def told_by(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("length", [5, 30, 60, 100])
def test_places_of_starts_have_room_for_sockets(length: int) -> None:
    usual = "/" + "t" * (length - 1)
    base = base_of_places(usual)
    assert base in {usual, "/tmp"}
    assert len(f"{base}/cachemgr-v-12345678/10000/tmp/{uuid.uuid4()}") <= 107


SNEAKY = """
import os, subprocess, sys
subprocess.run(["nvcc", "--version"], check=True)
if os.environ.get("SNEAK"):
    subprocess.run(["nvcc", "-o", "kernel.o", "kernel.cu"], check=True)
"""


@pytest.mark.parametrize(
    ("variables", "fault"),
    [
        ({"SNEAK": "1"}, "1 compilers ran: nvcc kernel.cu"),
        ({"LEAK": "1"}, "left caches in the temporary directory: torchinductor_me"),
        ({"GROW": "1"}, "added 1 in inductor"),
        ({"DIE": "1"}, "exit code 5"),
        ({"TORCHINDUCTOR_FOO": "1"}, "the seed has no exact artifact for it: env.TORCHINDUCTOR_FOO"),
    ],
)
def test_what_a_start_does_beyond_its_seed_is_named(fleet: Fleet, variables: dict[str, str], fault: str) -> None:
    """The program behaves while it is prewarmed, and not when it is verified: as an image does that is built by another
    machine than it runs on."""
    program = fleet.directory / "sneaky.py"
    leak = "import os\nif os.environ.get('LEAK'): os.makedirs(os.environ['TMPDIR'] + '/torchinductor_me/fxgraph')\n"
    grow = "\nif os.environ.get('GROW'): compiled(str(time.monotonic_ns()))\nif os.environ.get('DIE'): sys.exit(5)\n"
    program.write_text(SNEAKY + leak + Path(fleet.program).read_text() + grow)
    tools = fleet.directory / "tools"
    tools.mkdir()
    (tools / "nvcc").write_text("#!/bin/sh\nexit 0\n")
    (tools / "nvcc").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    builder = fleet.machine("builder", PATH=path)
    prewarm(builder, "--bake", "seed", "--", sys.executable, str(program), "one")
    done = builder.cachemgr("prewarm", "--verify", "--seed", "seed", "--json", code=1, **variables)
    (told,) = json.loads(done.stdout)["proofs"]
    assert not told["holds"]
    assert any(text.startswith(fault) for text in told["faults"]), told["faults"]


@pytest.mark.skipif(not can_unshare(), reason="this user cannot make a network")
def test_a_start_that_is_verified_reaches_nobody_but_itself(fleet: Fleet) -> None:
    """An engine that downloads at first use, as kernels in binary form are, would do so on the first day as well."""
    program = fleet.directory / "calls.py"
    talk = """
import os, socket
with socket.create_server(("127.0.0.1", 0)) as own:
    socket.create_connection(own.getsockname()).close()
try:
    socket.create_connection(("127.0.0.1", int(os.environ["CALLED"]))).close()
except OSError:
    print("nobody answers")
else:
    compiled("what was downloaded")
"""
    program.write_text(Path(fleet.program).read_text() + talk)
    builder = fleet.machine("builder")
    prewarm(builder, "--bake", "seed", "--", sys.executable, str(program), "one", CALLED="1")
    with socket.create_server(("127.0.0.1", 0)) as outside:
        port = str(outside.getsockname()[1])
        done = builder.cachemgr("prewarm", "--verify", "--seed", "seed", "--json", CALLED=port)
    assert "nobody answers" in done.stderr
    assert json.loads(done.stdout)["proofs"][0]["network"] == "none"
