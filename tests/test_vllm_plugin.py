"""A real vLLM with our plugin and no wrapper: `vllm serve` and `LLM(...)` are warm by installing a package and setting
a variable, and start all the same whatever is wrong with it. `test_vllm_e2e.py` says how these engines are made.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.machines import Machine, launches_in
from tests.plugged import ours
from tests.test_vllm_e2e import FLAGS, PLUGIN, PYTHON, SECONDS, Lab

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(PYTHON is None, reason="CACHEMGR_VLLM_PYTHON names no Python with vLLM"),
]

ROOT = Path(__file__).parent.parent
PROMPT = [6, 4, 7]
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256,
              distributed_executor_backend="uni")
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    answer = llm.generate({"prompt_token_ids": json.loads(sys.argv[2])}, greedy)[0].outputs[0].token_ids
    print("ANSWER", json.dumps(list(answer)), flush=True)
"""

ON = {
    **PLUGIN,
    "CACHEMGR_ENABLE": "1",
    # What we set on a CPU is in Inductor's key: set for all, so that what is compared is the plugin and nothing else.
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}


def distributions(python: Path) -> set[tuple[str, str]]:
    """Every installed package that a Python sees, with its version."""
    code = "import importlib.metadata as m; print([(d.name, d.version) for d in m.distributions()])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return set(eval(found.stdout))


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[tuple[str, str]]]:
    """A Python that has the real vLLM and cachemgr, installed by pip, and what it had before."""
    assert PYTHON is not None
    where = tmp_path_factory.mktemp("beside") / "venv"
    subprocess.run([PYTHON, "-m", "venv", str(where)], check=True)
    python = where / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    of_vllm = subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True, check=True).stdout
    own = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout
    Path(own.strip(), "engine.pth").write_text(of_vllm)
    before = distributions(python)
    quietly = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*quietly, "install", str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return python, before


@pytest.fixture(scope="module")
def python(beside: tuple[Path, set[tuple[str, str]]]) -> str:
    return str(beside[0])


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    made = Lab(tmp_path_factory.mktemp("plugged"))
    (made.root / "offline.py").write_text(PROGRAM)
    return made


class Done:
    """One start, after its launch has settled."""

    def __init__(self, machine: Machine, stdout: str, stderr: str, answer: list[int]) -> None:
        self.stdout, self.stderr, self.answer = stdout, stderr, answer
        path = machine.root / "report.json"
        self.report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.aot = aot_entries(machine)

    @property
    def said(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("cachemgr: ")]

    @property
    def entries(self) -> list[str]:
        return [entry["verdict"] for entry in self.report["observed"]["entries"]]


def environ(machine: Machine) -> dict[str, str]:
    machine.make_places()
    (machine.root / "report.json").unlink(missing_ok=True)
    return {**machine.environ, "CACHEMGR_REPORT": str(machine.root / "report.json")}


def start(machine: Machine, command: tuple[str, ...]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, env=environ(machine), cwd=machine.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def offline(lab: Lab, machine: Machine, python: str, program: str = "offline.py") -> Done:
    process = start(machine, (python, str(lab.root / program), str(lab.model), json.dumps(PROMPT)))
    out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, f"{out}\n{errors}"
    line = next(line for line in out.splitlines() if line.startswith("ANSWER "))
    return Done(machine, out, errors, json.loads(line.removeprefix("ANSWER ")))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def command(lab: Lab, python: str, port: int = 0) -> tuple[str, ...]:
    words = ("serve", str(lab.model), *FLAGS, f"--port={port}", "--host=127.0.0.1")
    return (python, "-m", "vllm.entrypoints.cli.main", *words)


def serve(lab: Lab, machine: Machine, python: str, wrapper: tuple[str, ...] = ()) -> Done:
    """Start a server, ask it, wait until its capture is made, and stop it as a cluster does."""
    port = free_port()
    words = (*wrapper, *command(lab, python, port))
    variables = environ(machine)
    with open(machine.root / "out", "w") as out, open(machine.root / "err", "w") as errors:
        process = subprocess.Popen(words, env=variables, cwd=machine.root, stdout=out, stderr=errors)
    try:
        wait_for(lambda: answered(f"http://127.0.0.1:{port}/health") is not None, process)
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = answered(f"http://127.0.0.1:{port}/v1/completions", {**asked, "return_token_ids": True})
        assert answer is not None
        wait_for((machine.root / "report.json").exists, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=SECONDS)
    end = time.monotonic() + 60
    while ours(machine) and time.monotonic() < end:
        time.sleep(0.1)
    told = [(machine.root / name).read_text() for name in ("out", "err")]
    return Done(machine, told[0], told[1], json.loads(answer)["choices"][0]["token_ids"])


def answered(url: str, body: dict[str, object] | None = None) -> bytes | None:
    data = None if body is None else json.dumps(body).encode()
    try:
        asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as response:
            found: bytes = response.read()
            return found
    except OSError:
        return None


def wait_for(holds: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def cold(lab: Lab, python: str) -> Done:
    """A server on the first machine."""
    return serve(lab, lab.machine("first", **ON), python)


def aot_entries(machine: Machine) -> list[str]:
    root = machine.root / "vllm" / "torch_compile_cache" / "torch_aot_compile"
    return sorted(os.listdir(root)) if root.is_dir() else []


def test_installing_beside_a_real_vllm_changes_no_installed_package(
    beside: tuple[Path, set[tuple[str, str]]],
) -> None:
    python, before = beside
    after = distributions(python)
    assert before <= after, "nothing was removed and no version changed"
    new = {name.lower().replace("_", "-") for name, _version in after - before}
    assert "cachemgr" in new
    assert new <= {"cachemgr", "click", "filelock", "msgspec", "nvidia-ml-py", "pyyaml", "xxhash", "zstandard"} | {
        "boto3", "botocore", "cryptography", "cffi", "pycparser", "jmespath", "s3transfer", "sqlalchemy", "alembic",
        "mako", "python-dateutil", "six", "urllib3", "greenlet", "markupsafe", "typing-extensions",
    }  # fmt: skip


def test_a_plain_server_is_warm_on_another_machine_and_answers_the_same(lab: Lab, python: str, cold: Done) -> None:
    assert (cold.report["result"], cold.entries) == ("none", ["compiled"])
    machine = lab.machine("second", **ON)
    warm = serve(lab, machine, python)
    assert (warm.report["result"], warm.entries) == ("exact", ["loaded"])
    assert warm.report["verdict"] in ("used", "partly used"), "probes of instruction sets may be new"
    assert warm.answer == cold.answer
    assert lab.kernels("second") == []
    assert len(warm.said) >= 2
    assert "cachemgr: exact" in warm.said[0]
    assert warm.report["observed"]["processes"] >= 2, "the front process and the engine core"
    assert "cachemgr" not in warm.stdout
    found = machine.json("lookup", "--", *command(lab, python))
    assert (found["result"], found["key"]) == ("exact", warm.report["key"]), "the key of a wrapper"


def test_a_program_loads_the_artifact_of_the_server(lab: Lab, python: str, cold: Done) -> None:
    (lab.root / "another.py").write_text(f"{PROGRAM}# no other test runs this, whatever their order\n")
    done = offline(lab, lab.machine("program", **ON), python, "another.py")
    assert (done.report["result"], done.entries) == ("near", ["loaded"])
    assert {each["factor"] for each in done.report["differs"]} <= {"program", "flags.front-end"}
    assert done.answer == cold.answer


def test_plugin_and_wrapper_are_one_launch(lab: Lab, python: str, cold: Done) -> None:
    machine = lab.machine("wrapped", **ON)
    done = serve(lab, machine, python, (sys.executable, "-m", "cachemgr", "run", "--"))
    assert (done.report["result"], done.entries) == ("exact", ["loaded"])
    assert done.report["key"] == cold.report["key"]
    assert done.report["observed"]["processes"] >= 2
    assert done.answer == cold.answer
    records = launches_in(lab.root / "store")
    assert [each["launch"] for each in records].count(done.report["launch"]) == 1


def test_the_plugin_does_not_change_what_the_engine_calls_its_entry(lab: Lab, python: str, cold: Done) -> None:
    machine = lab.machine("off", **{**ON, "CACHEMGR_ENABLE": "0"})
    done = offline(lab, machine, python)
    assert done.said == []
    assert done.aot == cold.aot
    assert done.answer == cold.answer


@pytest.mark.parametrize("fault", ["missing", "hangs", "dies", "broken", "store"])
def test_an_engine_starts_whatever_is_wrong_with_the_plugin(
    lab: Lab, python: str, cold: Done, tmp_path: Path, fault: str
) -> None:
    """On the first machine, whose caches are warm: what is shown is that it starts."""
    child = tmp_path / "child"
    child.write_text("#!/bin/sh\n" + {"hangs": "exec sleep 600", "dies": "kill -9 $$"}.get(fault, "exit 1") + "\n")
    child.chmod(0o755)
    (tmp_path / "file").write_text("")
    more = {
        "missing": {"CACHEMGR_BIN": str(tmp_path / "nothing")},
        "hangs": {"CACHEMGR_BIN": str(child), "CACHEMGR_DEADLINE": "5"},
        "dies": {"CACHEMGR_BIN": str(child)},
        "broken": {"CACHEMGR_PUBLISH": "sometimes"},
        "store": {"CACHEMGR_STORE": str(tmp_path / "file" / "store"), "CACHEMGR_DEADLINE": "10"},
    }[fault]
    done = offline(lab, lab.machine("first", **{**ON, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **more}), python)
    assert done.answer == cold.answer
    assert done.said, "and somebody is told"


def test_a_child_that_is_killed_is_not_missed(lab: Lab, python: str, cold: Done) -> None:
    machine = lab.machine("first", **{**ON, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    process = start(machine, (python, str(lab.root / "offline.py"), str(lab.model), json.dumps(PROMPT)))
    while not ours(machine):
        assert process.poll() is None
        time.sleep(0.1)
    for pid in ours(machine):
        os.kill(pid, signal.SIGKILL)
    out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, f"{out}\n{errors}"
    assert json.dumps(cold.answer) in out


def test_a_few_rolling_starts_are_all_warm(lab: Lab, python: str, cold: Done) -> None:
    for number in range(2):
        done = offline(lab, lab.machine(f"rolling-{number}", **ON), python)
        assert done.entries == ["loaded"]
        assert done.answer == cold.answer
