"""What a command line starts of vLLM: an engine, and by which front end.

Only commands that build an engine in their own process tree are recognised: clients (`vllm bench serve`, `chat`,
`complete`), tools (`collect-env`, `download-kernels`), front ends without an engine (`launch render`), the daemons of
`preload`, and `snapshot` (whose images are bound to the files that were open) are programs like any other.
`--omni` hands everything over to another package with other flags (`entrypoints/cli/main.py`, maybe_run_omni), so such
a command is none of ours. `--headless` starts the engines of a further node, or only its workers, without a server:
it is an engine with the same key that never answers on a port.

Sources: vLLM 0.26 to 0.33 `entrypoints/cli/*.py`, and the modules with a `__main__` part.
"""

import os
from collections.abc import Sequence

import msgspec

from cachemgr.factors.program import Program

_CLI = frozenset({"vllm.entrypoints.cli.main", "vllm.entrypoints.cli"})
_MODULES = {
    "vllm.entrypoints.openai.api_server": ("api_server", "serve"),
    "vllm.entrypoints.launchers.api_server.entry": ("api_server", "serve"),
    "vllm.entrypoints.grpc_server": ("grpc_server", "grpc"),
    "vllm.entrypoints.launchers.grpc_server": ("grpc_server", "grpc"),
    "vllm.entrypoints.openai.run_batch": ("run-batch", "run-batch"),
    "vllm.entrypoints.launchers.run_batch": ("run-batch", "run-batch"),
    "vllm.benchmarks.mm_processor": ("bench mm-processor", "bench mm-processor"),
}
_BENCHES = frozenset({"latency", "throughput", "mm-processor", "forward"})
# Other engines that `vllm bench throughput --backend` compares with (`benchmarks/throughput.py`).
_FOREIGN = frozenset({"hf", "mii"})
_ASKS = frozenset({"-h", "--help", "-v", "--version"})


class EngineCommand(msgspec.Struct, frozen=True):
    """A command that builds an engine."""

    kind: str
    """`serve`, `api_server`, `grpc_server`, `run-batch`, `bench latency`, `bench startup` …"""
    front_end: str
    """Whose flags it takes beside the engine's: an owner of `facts.Flag`."""
    words: tuple[str, ...]
    """What follows the words of `kind`."""
    model: str | None
    """The model as the command line names it. A configuration file may name it as well: `flags.parse` knows."""
    headless: bool = False
    """No server: ready is what the engine's log says, never a port."""
    measures_cold: bool = False
    """Measures cold starts on purpose, so it must be left alone."""


def recognise(program: Program) -> EngineCommand | None:
    """The engine command that `program` is, or None when it starts no engine of vLLM."""
    words = program.arguments
    if program.kind == "module" and program.name in _MODULES:
        kind, front_end = _MODULES[program.name]
        return _command(kind, front_end, words)
    if program.kind == "module" and program.name in _CLI:
        return _subcommand(words)
    if program.kind in {"file", "command"} and os.path.basename(program.name) == "vllm":
        return _subcommand(words)
    return None


def _subcommand(words: tuple[str, ...]) -> EngineCommand | None:
    if words[:1] in {("serve",), ("run-batch",)}:
        return _command(words[0], words[0], words[1:])
    if words[:1] == ("bench",) and len(words) > 1:
        return _bench(words[1], words[2:])
    return None


def _bench(name: str, words: tuple[str, ...]) -> EngineCommand | None:
    if name == "startup" or (name == "sweep" and words[:1] == ("startup",)):
        return _command("bench startup", "bench startup", words, measures_cold=True)
    if name not in _BENCHES or _value(words, "--backend") in _FOREIGN:
        return None
    return _command(f"bench {name}", f"bench {name}", words)


def _command(kind: str, front_end: str, words: tuple[str, ...], *, measures_cold: bool = False) -> EngineCommand | None:
    if "--omni" in words or any(word in _ASKS or word.startswith("--help=") for word in words):
        return None
    return EngineCommand(
        kind=kind,
        front_end=front_end,
        words=words,
        model=_model(kind, words),
        headless=front_end == "serve" and ("--headless" in words or _no_servers(words)),
        measures_cold=measures_cold,
    )


def _no_servers(words: Sequence[str]) -> bool:
    """`--api-server-count 0` is headless too (`entrypoints/cli/serve.py`)."""
    return "0" in {_value(words, "--api-server-count"), _value(words, "-asc")}


def _model(kind: str, words: Sequence[str]) -> str | None:
    named = _value(words, "--model")
    if kind == "serve":  # --model is moved to the front, before a positional (`utils/argparse_utils.py`, parse_args)
        first = words[0] if words and not words[0].startswith("-") else None
        return named or first
    return named


def _value(words: Sequence[str], option: str) -> str | None:
    """The value of `option`, as `--option value`, `--option=value` or with underscores."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        spelled = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        if spelled == option:
            return value if equals else next(iter(words[at + 1 :]), None)
    return None
