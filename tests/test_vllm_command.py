"""Which commands start an engine of vLLM."""

from pathlib import Path

import pytest

from cachemgr.factors import program
from cachemgr.factors.vllm.command import EngineCommand, recognise
from cachemgr.factors.wrappers import unwrap


@pytest.fixture
def console(tmp_path: Path) -> str:
    path = tmp_path / "vllm"
    path.write_text("#!/usr/bin/python3\n")
    path.chmod(0o755)
    return str(path)


def read(argv: list[str]) -> EngineCommand | None:
    return recognise(program.parse(unwrap(argv, {"PATH": ""}), Path("/")))


@pytest.mark.parametrize(
    ("words", "kind", "model", "rest"),
    [
        ("serve m -tp 2", "serve", "m", ("m", "-tp", "2")),
        ("serve --model m", "serve", "m", ("--model", "m")),
        ("serve --model=m --port 1", "serve", "m", ("--model=m", "--port", "1")),
        ("serve --config c.yaml", "serve", None, ("--config", "c.yaml")),
        ("serve", "serve", None, ()),
        ("run-batch -i a -o b --model m", "run-batch", "m", ("-i", "a", "-o", "b", "--model", "m")),
        ("bench latency --model m", "bench latency", "m", ("--model", "m")),
        ("bench throughput --model m --backend vllm", "bench throughput", "m", ("--model", "m", "--backend", "vllm")),
        ("bench forward --model m", "bench forward", "m", ("--model", "m")),
        ("bench mm-processor --model m", "bench mm-processor", "m", ("--model", "m")),
    ],
)
def test_engine_commands(console: str, words: str, kind: str, model: str | None, rest: tuple[str, ...]) -> None:
    for argv in ([console], ["python", console], ["vllm"], ["python", "-m", "vllm.entrypoints.cli.main"]):
        found = read([*argv, *words.split()])
        assert found is not None
        assert (found.kind, found.front_end, found.model, found.words) == (kind, kind, model, rest)
        assert not found.measures_cold


@pytest.mark.parametrize(
    ("module", "kind", "front_end"),
    [
        ("vllm.entrypoints.openai.api_server", "api_server", "serve"),
        ("vllm.entrypoints.launchers.api_server.entry", "api_server", "serve"),
        ("vllm.entrypoints.grpc_server", "grpc_server", "grpc"),
        ("vllm.entrypoints.launchers.grpc_server", "grpc_server", "grpc"),
        ("vllm.entrypoints.openai.run_batch", "run-batch", "run-batch"),
    ],
)
def test_modules_that_serve(module: str, kind: str, front_end: str) -> None:
    found = read(["python3", "-m", module, "--model", "m"])
    assert found is not None
    assert (found.kind, found.front_end, found.model) == (kind, front_end, "m")


@pytest.mark.parametrize(
    "words",
    [
        "bench serve --model m",
        "bench sweep serve",
        "bench",
        "bench throughput --model m --backend hf",
        "bench throughput --model m --backend=mii",
        "chat",
        "complete",
        "collect-env",
        "download-kernels",
        "launch render m",
        "preload --model m",
        "snapshot create m",
        "serve --help",
        "serve m -h",
        "serve --help=ModelConfig",
        "--version",
        "-v",
        "--help",
        "",
        "serve m --omni",
    ],
)
def test_what_starts_no_engine_of_vllm(console: str, words: str) -> None:
    assert read([console, *words.split()]) is None


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "-m", "vllm.collect_env"],
        ["python", "-m", "vllm.entrypoints.launchers.render.entry", "m"],
        ["python", "serve.py", "vllm", "serve"],
        ["python", "-m", "vllm_ascend.serve"],
        ["python", "-c", "import vllm"],
        ["vllm-serve", "serve", "m"],
    ],
)
def test_other_programs(argv: list[str]) -> None:
    assert read(argv) is None


@pytest.mark.parametrize("words", ["bench startup --model m", "bench sweep startup --model m"])
def test_what_measures_cold_starts_says_so(console: str, words: str) -> None:
    found = read([console, *words.split()])
    assert found is not None
    assert found.measures_cold


@pytest.mark.parametrize(
    ("words", "headless"),
    [
        ("m --headless", True),
        ("m --api-server-count 0", True),
        ("m --api_server_count=0", True),
        ("m -asc 0", True),
        ("m --api-server-count 2", False),
        ("m", False),
    ],
)
def test_a_node_without_a_server_is_headless(words: str, headless: bool) -> None:
    found = read(["vllm", "serve", *words.split()])
    assert found is not None
    assert found.headless == headless


def test_a_command_behind_wrappers_and_a_launcher() -> None:
    torchrun = ["torchrun", "--nproc-per-node=2", "-m", "vllm.entrypoints.cli.main", "bench", "forward", "--model", "m"]
    found = read(["env", "A=1", "numactl", "-N", "0", *torchrun])
    assert found is not None
    assert found.kind == "bench forward"
