"""End to end with a real vLLM on the CPU: `vllm run-batch` under `cachemgr run`, on machines that share a store.

Real engines compile a real (tiny) model and answer; `scripts/test-vllm` makes the environment. On a CPU vLLM turns its
own compilation mode off, and rejects at every start what it saved as an AOT artifact: that is one half of the tests.
For the other half a plugin keeps the mode that GPUs have (`tests/vllm/plugin`). The C++ compilers of the machines
remember what they made (`tests/vllm/compiler.py`), or most of the time would go to header files.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachemgr.store import layout
from cachemgr.store.local import LocalStore
from tests.authorities import Authority
from tests.machines import Machine

PYTHON = os.environ.get("CACHEMGR_VLLM_PYTHON")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(PYTHON is None, reason="CACHEMGR_VLLM_PYTHON names no Python with vLLM"),
]

HERE = Path(__file__).parent / "vllm"
PROMPTS = ("w3 w1 w4", "w9 w2 w6 w5 w30 w31")
SECONDS = 500

VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # The engine's core works in its own process, so that one import of torch less is waited for.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # One instruction set for all starts: with AMX, what Inductor finds differs from start to start, because its flags
    # grow at every look (2.13 `_inductor/cpu_vec_isa.py`, `_arch_flags`), and so do the names of kernels.
    "ATEN_CPU_CAPABILITY": "avx2",
}
FLAGS = (
    "--served-model-name=tiny",
    "--dtype=float32",
    "--max-model-len=256",
    "--max-num-seqs=4",
    "--max-num-batched-tokens=256",
    "--distributed-executor-backend=uni",
)
PLUGIN = {"PYTHONPATH": str(HERE / "plugin")}
"""Keeps the compilation mode of GPUs: AOT artifacts that the next start loads."""

Answers = list[tuple[list[int], list[tuple[str, float]]]]
"""Per prompt the token ids, and each token with its log probability."""


class Lab:
    """Machines that share a store, a model, and compilers that remember."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model, self.tools, self.batch = root / "model", root / "tools", root / "batch.jsonl"
        subprocess.run([sys.executable, str(HERE / "tiny_llama.py"), str(self.model)], check=True)
        self.batch.write_text("".join(json.dumps(request(prompt)) + "\n" for prompt in PROMPTS))
        (self.tools / "memory").mkdir(parents=True)
        for name in ("g++", "c++"):
            real = shutil.which(name)
            if real is not None:
                self._install(name, real)

    def _install(self, name: str, real: str) -> None:
        wrapper = self.tools / name
        words = f'"{sys.executable}" "{HERE / "compiler.py"}" "{real}" "{self.tools}/$CALLS" "{self.tools}/memory"'
        wrapper.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        wrapper.chmod(0o755)

    def machine(self, name: str, store: str = "store", **variables: str) -> Machine:
        """A machine with a HOME, a TMPDIR and a cache root of its own."""
        root = self.root / name
        path, engine_root = f"{self.tools}:{os.environ['PATH']}", str(root / "vllm")
        own = {"PATH": path, "CALLS": f"calls-{name}", "VLLM_CACHE_ROOT": engine_root}
        return Machine(root, self.root / store, {**VARIABLES, **own, **variables})

    def kernels(self, name: str) -> list[str]:
        """How the compiler was called for kernels on a machine. Inductor's probes of instruction sets do not count: a
        start probes again what another one has probed, under another name."""
        log = self.tools / f"calls-{name}"
        return [line for line in log.read_text().splitlines() if ".main.so" in line] if log.exists() else []

    def command(self, *flags: str) -> tuple[str, ...]:
        """The batch of this lab; its answers go to the directory that the command starts in."""
        assert PYTHON is not None
        files = ("-i", str(self.batch), "-o", "answers.jsonl", "--model", str(self.model))
        return (PYTHON, "-m", "vllm.entrypoints.cli.main", "run-batch", *files, *FLAGS, *flags)


def request(prompt: str) -> dict[str, object]:
    return {
        "custom_id": prompt,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "tiny",
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": 8,
            "ignore_eos": True,
            "logprobs": True,
            "return_token_ids": True,
        },
    }


def start(machine: Machine, command: tuple[str, ...], *, group: bool = False) -> "subprocess.Popen[str]":
    """The command under `cachemgr run`; `finish` waits for it."""
    (machine.root / "answers.jsonl").unlink(missing_ok=True)
    return machine.start("run", "--report", "report.json", "--", *command, group=group)


def finish(machine: Machine, process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Its report, with its `answers` and what it wrote as `log`."""
    out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, f"exit {process.returncode}\n{out}\n{errors}"
    report: dict[str, Any] = json.loads((machine.root / "report.json").read_text())
    return {**report, "answers": answers(machine.root / "answers.jsonl"), "log": out + errors}


def launch(machine: Machine, command: tuple[str, ...]) -> dict[str, Any]:
    machine.make_places()
    return finish(machine, start(machine, command))


def answers(path: Path) -> Answers:
    found: Answers = []
    for line in path.read_text().splitlines():
        answer = json.loads(line)
        assert answer["error"] is None, answer["error"]
        choice = answer["response"]["body"]["choices"][0]
        probabilities = [(token["token"], token["logprob"]) for token in choice["logprobs"]["content"]]
        found.append((choice["token_ids"], probabilities))
    assert len(found) == len(PROMPTS)
    return found


def tokens(report: dict[str, Any]) -> list[list[int]]:
    return [ids for ids, _probabilities in report["answers"]]


def entries(report: dict[str, Any]) -> list[str]:
    """What the engine said about each of its AOT entries."""
    return [entry["verdict"] for entry in report["observed"]["entries"]]


def wait_for(holds: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def cold(lab: Lab) -> dict[str, Any]:
    """One cold start of the CPU build as it is."""
    return launch(lab.machine("cold"), lab.command())


@pytest.fixture(scope="module")
def warm(lab: Lab, cold: dict[str, Any]) -> dict[str, Any]:
    """The same on another machine."""
    return launch(lab.machine("warm"), lab.command())


@pytest.fixture(scope="module")
def compiled(lab: Lab) -> dict[str, Any]:
    """One cold start in the compilation mode of GPUs."""
    return launch(lab.machine("compiled", "gpu-mode", **PLUGIN), lab.command())


def test_a_cold_start_is_recognised_and_captured(lab: Lab, cold: dict[str, Any]) -> None:
    assert (cold["result"], cold["verdict"], cold["engine"]) == ("none", "cold", "vllm")
    assert cold["published"] is not None
    assert sum(cold["added"].values()) > 20
    assert entries(cold) == ["compiled"]
    assert lab.kernels("cold"), "the watched compilers were used, so that their silence means something later"


def test_a_start_elsewhere_compiles_no_machine_code_and_answers_the_same(
    lab: Lab, cold: dict[str, Any], warm: dict[str, Any]
) -> None:
    assert warm["result"] == "exact"
    assert lab.kernels("warm") == []
    assert warm["answers"] == cold["answers"]
    assert warm["phases"]["init_engine"] < cold["phases"]["init_engine"]


def test_the_aot_artifact_that_the_cpu_build_never_loads_is_named(warm: dict[str, Any]) -> None:
    assert entries(warm) == ["rejected"]
    assert any("finalize_loading" in reason for reason in warm["reasons"])
    assert warm["verdict"] in ("used", "partly used"), "what Inductor keeps was read, and the AOT file is written anew"


def test_another_length_is_near_and_answers_the_same(lab: Lab, cold: dict[str, Any]) -> None:
    near = launch(lab.machine("near"), lab.command("--max-model-len=192"))
    assert near["result"] == "near"
    assert [(each["factor"], each["role"]) for each in near["differs"]] == [("flags.max-model-len", "match")]
    assert tokens(near) == tokens(cold)


def test_a_start_that_was_killed_while_it_compiled_leaves_nothing_that_hurts(lab: Lab, cold: dict[str, Any]) -> None:
    machine, command = lab.machine("killed", "killed"), lab.command()
    machine.make_places()
    process = start(machine, command, group=True)
    wait_for(lambda: len(lab.kernels("killed")) >= 3, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    reap(machine)
    before = len(lab.kernels("killed"))
    again = launch(machine, command)
    assert len(lab.kernels("killed")) > before, "it was killed before it had compiled everything"
    assert again["answers"] == cold["answers"]
    elsewhere = launch(lab.machine("after-killed", "killed"), command)
    assert (elsewhere["result"], elsewhere["answers"]) == ("exact", cold["answers"])
    assert lab.kernels("after-killed") == []


def reap(machine: Machine) -> None:
    """End the processes of an engine that left the group of their parent: those whose HOME is this machine's."""
    ours = f"HOME={machine.home}".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and ours in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def test_two_engines_of_one_key_at_once_serve_every_later_start(lab: Lab, cold: dict[str, Any]) -> None:
    machines = [lab.machine(name, "race") for name in ("left", "right")]
    for machine in machines:
        machine.make_places()
    racing = [start(machine, lab.command()) for machine in machines]
    reports = [finish(machine, process) for machine, process in zip(machines, racing, strict=True)]
    assert [report["key"] for report in reports] == [cold["key"]] * 2
    assert [report["answers"] for report in reports] == [cold["answers"]] * 2
    later = launch(lab.machine("later", "race"), lab.command())
    assert (later["result"], later["answers"]) == ("exact", cold["answers"])
    assert lab.kernels("later") == []


def test_an_aot_artifact_is_loaded_on_another_machine(lab: Lab, compiled: dict[str, Any]) -> None:
    assert (compiled["result"], entries(compiled)) == ("none", ["compiled"])
    loaded = launch(lab.machine("loaded", "gpu-mode", **PLUGIN), lab.command())
    assert (loaded["result"], entries(loaded)) == ("exact", ["loaded"])
    assert "Directly load AOT compilation" in loaded["log"]
    assert loaded["answers"] == compiled["answers"]
    assert loaded["verdict"] in ("used", "partly used"), "probes of instruction sets may be new"
    assert lab.kernels("loaded") == []


def test_the_plugin_makes_another_key(cold: dict[str, Any], compiled: dict[str, Any]) -> None:
    assert compiled["key"] != cold["key"]
    assert entries(compiled) == ["compiled"], "and nothing of the other mode was taken for its own"


def test_no_torch_tree_crosses_what_the_engine_is_blind_to(lab: Lab, compiled: dict[str, Any]) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    command = lab.command("--speculative-config", json.dumps(speculative))
    report = launch(lab.machine("blind", "gpu-mode", **PLUGIN), command)
    assert report["result"] == "near"
    assert "blind" in {each["role"] for each in report["differs"]}
    assert entries(report) == ["compiled"], "its own hash may be the same, so nothing may lie there"
    assert tokens(report) == tokens(compiled), "greedy answers do not depend on speculation"


def test_a_seed_is_loaded_if_it_is_signed_and_not_if_it_is_unsigned_or_was_changed(
    lab: Lab, compiled: dict[str, Any]
) -> None:
    author, seed = Authority(), LocalStore(lab.root / "seed")
    shutil.copytree(lab.root / "gpu-mode", lab.root / "seed")
    pod = {**PLUGIN, "CACHEMGR_SEED": str(seed), "CACHEMGR_TRUSTED_KEYS": author.public}
    unsigned = launch(lab.machine("unsigned", "unsigned", **pod), lab.command())
    assert (unsigned["result"], entries(unsigned)) == ("none", ["compiled"])
    assert "starts cold · untrusted: capture " in unsigned["log"]
    author.sign_all(seed, time.time())
    signed = launch(lab.machine("signed", "signed", **pod), lab.command())
    assert (signed["result"], signed["where"], entries(signed)) == ("exact", "seed", ["loaded"])
    assert lab.kernels("signed") == []
    for entry in list(seed.scan(layout.LAYERS)):
        layer = lab.root / "seed" / entry.name
        layer.write_bytes(layer.read_bytes()[:-1] + b"\0\0")
    changed = launch(lab.machine("changed", "changed", **pod), lab.command())
    assert (changed["verdict"], entries(changed)) == ("cold", ["compiled"])
    assert "has other bytes than its name says" in changed["log"]
    assert unsigned["answers"] == signed["answers"] == changed["answers"] == compiled["answers"]
