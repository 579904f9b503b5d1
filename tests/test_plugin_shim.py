"""The shim in the engine's processes: what it loads, when it is on, what it tells, and that it is never in the way."""

import ast
import dataclasses
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from cachemgr import observed
from cachemgr.desk import DESK_VARIABLE, HEARS_VARIABLE, Desk
from cachemgr.engine_log import EngineLog
from cachemgr.factors.vllm import flags as flag_words
from cachemgr.factors.vllm import variables
from cachemgr.factors.vllm.arguments import flags_of
from cachemgr.factors.vllm.facts import facts_for, known_versions
from cachemgr.plugin import front, hooks, switch, wire
from cachemgr.plugin.arguments import described
from cachemgr.plugin.hooks import HOOKS, Hook
from cachemgr.plugin.wire import WIRE
from tests.machines import wait_for
from tests.plugged import Plugged
from tests.test_house import loaded_by

SOURCES = os.environ.get("CACHEMGR_VLLM_SOURCES", "")
needs_sources = pytest.mark.skipif(not SOURCES, reason="CACHEMGR_VLLM_SOURCES names no sources (vllm_sources.py)")
Speaking = Callable[[], wire.Wire]
every_version = pytest.mark.parametrize("version", known_versions())

# What is loaded.


def test_the_shim_loads_nothing_of_ours_and_next_to_nothing_else() -> None:
    loaded = loaded_by("import cachemgr.plugin")
    assert loaded - loaded_by("pass") == {"cachemgr"}
    off = "import os, cachemgr.plugin; os.environ.pop('CACHEMGR_ENABLE', None); cachemgr.plugin.register()"
    more = loaded_by(off) - loaded_by("pass") - {"cachemgr"}
    assert more.isdisjoint({"json", "logging", "subprocess", "socket", "threading", "importlib", "dataclasses"})
    assert more <= loaded_by("import re"), "it reads settings"


def test_a_shim_that_is_on_loads_the_standard_library_only() -> None:
    code = (
        "import os, sys, cachemgr.plugin; os.environ['CACHEMGR_ENABLE'] = '1'; cachemgr.plugin.register();"
        "assert 'cachemgr.plugin.hooks' in sys.modules;"
        "print(' '.join(n for n in sys.modules if n.startswith('cachemgr')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = set(done.stdout.split())
    assert ours == {
        "cachemgr",
        *(f"cachemgr.plugin{part}" for part in ("", ".arguments", ".front", ".hooks", ".node", ".switch", ".wire")),
    }
    others = loaded_by(code.split("print", maxsplit=1)[0]) - loaded_by("pass") - {"cachemgr"}
    assert others <= set(sys.stdlib_module_names)


def test_what_goes_wrong_in_it_is_one_line_and_no_exception() -> None:
    code = "import sys, cachemgr.plugin; sys.modules['cachemgr.plugin.switch'] = None; cachemgr.plugin.register()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr.startswith("cachemgr: the plugin stays off: ")
    assert len(done.stderr.splitlines()) == 1


# When it is on.


def test_it_is_off_unless_a_variable_or_a_file_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    etc = home / "etc.toml"
    monkeypatch.setattr(switch, "ETC", str(etc))
    assert switch.stays_out({"HOME": str(home)}, ["vllm", "serve"])
    etc.write_text('# for all nodes\nenable = true  # yes\nbin = "/opt/cachemgr"\n[other]\ndeadline = 3\n')
    on = {"HOME": str(home)}
    assert not switch.stays_out(on, ["vllm", "serve"])
    assert switch.setting("bin", on) == "/opt/cachemgr"
    assert switch.deadline(on) == 30.0, "a table is not ours"
    mine = home / ".config" / "cachemgr" / "config.toml"
    mine.parent.mkdir(parents=True)
    mine.write_text("enable = false\ndeadline = 5\n")
    assert switch.stays_out(on, ["vllm", "serve"])
    assert switch.deadline(on) == 5.0
    assert not switch.stays_out({**on, "CACHEMGR_ENABLE": "1"}, ["vllm", "serve"])
    assert switch.stays_out({**on, "CACHEMGR_ENABLE": "0", "CACHEMGR_LAUNCH": "x"}, ["vllm", "serve"])
    assert not switch.stays_out({**on, "CACHEMGR_LAUNCH": "x"}, ["vllm", "serve"]), "a launch is in charge"


@pytest.mark.parametrize(
    "argv",
    [
        ["vllm", "bench", "startup", "m"],
        ["vllm", "bench", "sweep", "startup"],
        ["/site/vllm/entrypoints/cli/main.py", "bench", "startup"],
        ["/bin/vllm", "--help"],
        ["/bin/vllm", "serve", "--help=max"],
        ["/site/vllm/model_executor/models/registry.py"],
    ],
)
def test_processes_that_are_left_alone(argv: list[str]) -> None:
    assert switch.stays_out({"CACHEMGR_ENABLE": "1"}, argv)


@pytest.mark.parametrize(
    ("argv", "starts"),
    [
        (["/bin/vllm", "serve", "m"], True),
        (["/bin/vllm", "run-batch"], True),
        (["/site/vllm/entrypoints/cli/main.py", "serve", "m"], True),
        (["/site/vllm/entrypoints/openai/api_server.py", "--model", "m"], True),
        (["/bin/vllm", "bench", "latency"], False),
        (["/bin/vllm", "chat"], False),
        (["train.py", "serve"], False),
        ([], False),
    ],
)
def test_only_command_lines_that_name_their_engine_start_a_child_early(argv: list[str], starts: bool) -> None:
    assert switch.starts_engine(argv) is starts


def test_the_environment_of_the_start_counts_unless_somebody_has_written_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOW", "1")
    memory = tmp_path / "environ"
    memory.write_bytes(b"A=1\0EMPTY=\0B=x=y\0")
    assert front._original(str(memory)) == {"A": "1", "EMPTY": "", "B": "x=y"}
    for garbage in (b"ray::Trainer\0A=1\0", b"\0\0\0", b"=\0"):
        memory.write_bytes(garbage)
        assert front._original(str(memory)) == dict(os.environ)
    assert front._original(str(tmp_path / "nothing"))["NOW"] == "1"


def test_a_switch_that_was_read_at_import_is_set_where_it_was_read_to(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModuleType("torch._inductor.config")
    vars(config)["cpp_cache_precompile_headers"] = True
    monkeypatch.setitem(sys.modules, "torch._inductor.config", config)
    front._make_effective("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    assert vars(config)["cpp_cache_precompile_headers"] is False
    front._make_effective("TRITON_CACHE_DIR", "/x")


def test_a_hook_passes_arguments_results_and_exceptions_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_anything: object) -> None:
        raise RuntimeError("of ours")

    def double(number: int, *, add: int = 0) -> int:
        """Doubles."""
        if number < 0:
            raise ValueError("of the engine")
        return 2 * number + add

    module = ModuleType("of_vllm")
    vars(module)["double"] = double
    told: list[object] = []
    monkeypatch.setattr(WIRE, "tell", lambda **fact: told.append(fact))
    rows = [Hook("one", "of_vllm", "double", "*", before=fails, after=fails), Hook("two", "of_vllm", "gone.call", "*")]
    hooks._patch(module, rows)
    wrapped = vars(module)["double"]
    assert wrapped(3, add=1) == 7
    assert (wrapped.__name__, wrapped.__doc__) == ("double", "Doubles.")
    with pytest.raises(ValueError, match="of the engine"):
        wrapped(-1)
    assert told == [
        {"lacks": "two"},
        *[{"failed": f"{when} double"} for when in ("before", "after", "before")],
    ]


def test_a_module_is_patched_when_the_engine_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine_module_of_a_test.py").write_text("def answer():\n    return 41\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[object] = []
    row = Hook("one", "engine_module_of_a_test", "answer", "*", after=lambda _given, result: seen.append(result))
    monkeypatch.setattr(sys, "meta_path", [hooks._Finder({row.module: [row]}), *sys.meta_path])
    assert importlib.import_module(row.module).answer() == 41
    assert seen == [41]
    del sys.modules[row.module]


# What vLLM has.


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from (
                (f"{node.name}.{inner.name}", inner) for inner in node.body if isinstance(inner, ast.FunctionDef)
            )


def in_versions(hook: Hook, version: str) -> bool:
    first, _, last = hook.versions.partition("-")
    minor = version.rsplit(".", 1)[0]
    return first <= minor <= (last or first)


@needs_sources
@every_version
def test_every_hook_has_its_place_in_the_versions_that_it_names(version: str) -> None:
    parameters = {
        "_try_load_aot_compiled_fn": ["model", "aot_compilation_path"],
        "CompilerManager.initialize_cache": ["self", "cache_dir", "disable_cache"],
    }
    for hook in HOOKS:
        path = Path(SOURCES, version, *hook.module.split(".")).with_suffix(".py")
        found = dict(functions(ast.parse(path.read_text())))
        there = hook.function in found and not (hook.unless and hook.unless in found)
        assert there == in_versions(hook, version), hook
        if there:
            given = [argument.arg for argument in found[hook.function].args.args]
            wanted = parameters.get(hook.function, ["self"])
            assert given[: len(wanted)] == wanted


@needs_sources
@every_version
def test_what_the_import_of_vllm_sets_is_known(version: str) -> None:
    text = Path(SOURCES, version, "vllm", "env_override.py").read_text()
    found = set()
    for node in ast.walk(ast.parse(text)):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "os.environ":
            found.add(ast.literal_eval(target.slice))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.environ.setdefault":
            found.add(ast.literal_eval(node.args[0]))
    assert found <= variables._SET_BY_IMPORT


@needs_sources
@every_version
def test_the_fields_of_engine_args_are_flags(version: str) -> None:
    tree = ast.parse(Path(SOURCES, version, "vllm", "engine", "arg_utils.py").read_text())
    args = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    fields = {
        each.target.id for each in args.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    options = facts_for(version).options("LLM")
    strange = {name for name in fields if name.replace("_", "-") not in options}
    assert strange <= NO_FLAGS, "they count as unknown words do"


NO_FLAGS = {
    "_api_process_count",
    "_api_process_rank",
    "enable_mm_processor_stats",
    "mamba_config",
    "model_weights",
    "quantization_config",
    "tokens_only",
}


# What a program asked for.


@dataclasses.dataclass
class Config:
    mode: int | None = None
    pass_config: dict[str, bool] = field(default_factory=dict)


@dataclasses.dataclass
class Arguments:
    model: str = "m"
    max_model_len: int | None = None
    enforce_eager: bool = False
    dtype: object = "auto"
    hf_token: str | None = None
    tensor_parallel_size: int = 1
    kv_cache_dtype_skip_layers: list[str] = field(default_factory=list)
    speculative_config: dict[str, object] | None = None
    compilation_config: Config = field(default_factory=Config)
    logits_processors: list[object] | None = None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_model_len": 4096}, "--max-model-len 4K"),
        ({"enforce_eager": True, "tensor_parallel_size": 2}, "--enforce-eager -tp 2"),
        ({"speculative_config": {"method": "ngram"}}, '--speculative-config {"method":"ngram"}'),
        ({"compilation_config": Config(mode=3)}, "-cc.mode 3"),
        ({"kv_cache_dtype_skip_layers": ["0", "1"]}, "--kv-cache-dtype-skip-layers 0 1"),
        ({"hf_token": "secret"}, "--hf-token secret"),
        ({}, ""),
    ],
)
def test_a_program_and_a_command_line_ask_in_the_same_words(given: dict[str, object], words: str) -> None:
    facts = facts_for("0.32.0")
    fields = json.loads(json.dumps(described(Arguments(**given))))  # type: ignore[arg-type]
    assert "secret" not in json.dumps(fields)
    ours = flag_words.factors(flags_of(fields, facts), facts)
    theirs = flag_words.factors(flag_words.parse(words.split(), facts, "LLM", Path("/")), facts)
    assert ours == theirs


def test_what_json_has_no_words_for_counts_by_its_name() -> None:
    assert described(Arguments(logits_processors=[dict, object()]))["logits_processors"] == [
        "builtins.dict",
        "builtins.object",
    ]
    unknown = flags_of({"a_field_of_tomorrow": 1}, facts_for("0.32.0"))
    assert unknown.unknown == ("--a-field-of-tomorrow=1",)


# The wire and the desk.


@pytest.fixture
def speaking() -> Iterator[Speaking]:
    """Makes wires, and closes them."""
    made: list[wire.Wire] = []

    def make() -> wire.Wire:
        made.append(wire.Wire())
        return made[-1]

    yield make
    for each in made:
        each.renew()


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Desk, list[bytes]]]:
    heard: list[bytes] = []
    made = Desk.open(heard.append)
    made.attend(lambda path: f"asked for {path}")
    monkeypatch.setenv(DESK_VARIABLE, made.name)
    monkeypatch.setenv(HEARS_VARIABLE, "some")
    yield made, heard
    made.close()


def test_facts_log_and_questions_cross_the_wire(desk: tuple[Desk, list[bytes]], speaking: Speaking) -> None:
    made, heard = desk
    mine = speaking()
    handler = wire.Forward(mine)
    failure = ValueError("of the engine")
    why = (ValueError, failure, None)
    handler.emit(logging.LogRecord("vllm", logging.ERROR, "/vllm/core.py", 7, "it\n%s", ("failed",), why))
    answer = mine.ask(10, fetch="/root/entry")
    assert answer is not None
    assert answer["told"] == "asked for /root/entry"
    for entry, loaded in (("/a", True), ("/a", True), ("/b", False), ("/b", True)):
        mine.tell(entry=entry, loaded=loaded)
    mine.tell(ready=2, counters={"loads": 1}, lacks="a hook")
    wait_for(lambda: made.facts().lacking)
    facts = made.facts()
    assert not facts.ready, "one of two engine cores"
    assert (facts.looked_up, facts.counters, facts.processes) == ({"/a": True, "/b": False}, {"loads": 1}, 1)
    text = b"".join(heard).decode()
    assert f"(MainProcess pid={os.getpid()}) ERROR" in text
    assert "[core.py:7] failed\n" in text
    assert text.count("[core.py:7] ") == len(text.splitlines()), "every line of a traceback says where it is from"
    assert "[core.py:7] ValueError: of the engine\n" in text


def test_what_was_known_before_there_was_a_launch_is_told_when_there_is_one(
    desk: tuple[Desk, list[bytes]], speaking: Speaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _heard = desk
    mine = speaking()
    monkeypatch.delenv(DESK_VARIABLE)
    for number in range(1000):
        mine.tell(lacks=f"hook {number}")
    monkeypatch.setenv(DESK_VARIABLE, made.name)
    mine.tell(ready=1)
    wait_for(lambda: made.facts().ready)
    assert 0 < len(made.facts().lacking) <= 64


def test_a_fork_has_a_connection_of_its_own(desk: tuple[Desk, list[bytes]], speaking: Speaking) -> None:
    made, _heard = desk
    mine = speaking()
    mine.tell(entry="/parent")
    wait_for(lambda: made.connected == 1)
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(wire.__file__).parent.parent.parent)!r})
from cachemgr.plugin.wire import Wire
mine = Wire()
mine.tell(entry="/parent-2")
pid = os.fork()
mine.tell(entry="/child" if pid == 0 else "/parent-3")
assert mine.ask(20, fetch="/x")["told"] == "asked for /x"
os._exit(0) if pid == 0 else os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    wait_for(lambda: {"/parent-2", "/parent-3", "/child"} <= made.facts().looked_up.keys())
    assert made.facts().processes == 3


@pytest.mark.parametrize("letter", ["x", "\u4e2d", "\U0001f600", '"'])
def test_a_long_record_of_any_letters_is_shortened_and_ends_nothing(
    letter: str, desk: tuple[Desk, list[bytes]], speaking: Speaking
) -> None:
    made, heard = desk
    mine = speaking()
    wire.Forward(mine).emit(logging.LogRecord("vllm", logging.INFO, "/a.py", 1, letter * 100_000, (), None))
    mine.tell(log=letter * 1_000_000)  # too long for a packet
    mine.tell(ready=1)
    wait_for(lambda: made.facts().ready)
    assert 10_000 < b"".join(heard).decode().count(letter) < 100_000
    assert made.facts().dropped == 1


def test_a_question_that_nobody_answers_ends_the_questions_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, speaking: Speaking
) -> None:
    over = threading.Event()
    made = Desk.open(lambda _data: None)
    made.attend(lambda path: "" if over.wait(60) else path)
    monkeypatch.setenv(DESK_VARIABLE, made.name)
    mine = speaking()
    assert mine.ask(0.2, fetch="/late") is None
    assert mine.ask(600, fetch="/more") is None
    over.set()
    mine.tell(ready=1)
    wait_for(lambda: made.facts().ready)
    made.close()


def test_an_entry_that_was_not_found_is_not_one_that_was_saved(desk: tuple[Desk, list[bytes]]) -> None:
    facts = msgspec.structs.replace(desk[0].facts(), looked_up={"/a": False, "/b": True})
    missed, loaded = observed.joined(EngineLog(0.0).seen(), facts, None).aot_entries
    assert (missed.path, missed.saved, missed.loaded) == ("/a", False, False)
    assert (loaded.path, loaded.saved, loaded.loaded) == ("/b", False, True)


def test_a_stopped_launch_is_never_waited_for(speaking: Speaking, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import time\nfrom cachemgr.desk import Desk\ndesk = Desk.open(lambda _: None)\n"
        "desk.attend(str)\nprint(desk.name, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        monkeypatch.setenv(DESK_VARIABLE, other.stdout.readline().strip())
        mine = speaking()
        assert mine.ask(30, fetch="/x") is not None
        other.send_signal(signal.SIGSTOP)
        line = "x" * 50_000
        begun = time.monotonic()
        for _ in range(2000):
            mine.tell(log=line)
        assert mine.ask(1, fetch="/x") is None
        assert mine.ask(600, fetch="/x") is None, "and nobody asks twice"
        assert time.monotonic() - begun < 60
        other.kill()
    mine.tell(log="nobody hears this")


def test_odd_packets_and_too_many_facts_do_no_harm(desk: tuple[Desk, list[bytes]], speaking: Speaking) -> None:
    import socket

    made, _heard = desk
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect("\0" + made.name)
        for packet in (
            b"{",
            b"\xff\xfe",
            b'{"ready": "x"}',
            b"[]",
            b'{"log": 7}',
            b'{"ready": 1000000000}',
        ):
            raw.send(packet)
        for number in range(2000):
            raw.send(json.dumps({"entry": f"/{number}", "lacks": "y" * 5000, "failed": str(number)}).encode())
        mine = speaking()
        assert mine.ask(30, fetch="/x") is not None
    wait_for(lambda: len(made.facts().failed) == 256)
    assert len(made.facts().looked_up) == 256
    assert made.facts().lacking == ("y" * 200,)


def test_a_closed_desk_is_noticed(desk: tuple[Desk, list[bytes]], speaking: Speaking) -> None:
    made, _heard = desk
    mine = speaking()
    assert mine.ask(30, fetch="/x") is not None
    made.close()
    done = threading.Event()

    def speak() -> None:
        for _ in range(100):
            mine.tell(log="x")
        assert mine.ask(30, fetch="/x") is None
        done.set()

    threading.Thread(target=speak, daemon=True).start()
    assert done.wait(30)


# Many starts.


@pytest.mark.slow
def test_a_thousand_starts_with_every_fault_all_start_and_say_the_same(tmp_path: Path) -> None:
    fleet = Plugged.install(tmp_path)
    children = {
        "hangs": "exec sleep 600",
        "dies": "kill -9 $$",
        "fails": "exit 3",
        "babbles": "echo '{}'; echo nonsense",
        "vanishes": 'echo \'{"cachemgr": 1, "variables": {"CACHEMGR_LAUNCH": "x", "CACHEMGR_DESK": "nobody"}}\'',
        "refuses": 'echo \'{"cachemgr": 1, "variables": null, "reason": "no"}\'',
        "lies": 'echo \'{"cachemgr": 1, "variables": {"A": 1, "B": null, "CACHEMGR_DESK": 7}}\'',
    }
    faults: dict[str, dict[str, str]] = {
        "missing": {"CACHEMGR_BIN": str(tmp_path / "nothing")},
        "broken deadline": {"CACHEMGR_BIN": "/bin/false", "CACHEMGR_DEADLINE": "soon"},
        "broken switch": {"CACHEMGR_ENABLE": "perhaps"},
        "disabled": {"CACHEMGR_ENABLE": "0"},
    }
    for name, body in children.items():
        path = tmp_path / f"child-{name}"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        faults[name] = {"CACHEMGR_BIN": str(path), "CACHEMGR_DEADLINE": "0.5"}
    faults |= {f"{name} (server)": {**each, "AS_SERVER": "1"} for name, each in faults.items()}
    program = Path(__file__).parent / "programs" / "many_starts.py"
    machine = fleet.machine("one")
    words = [fleet.model, str(tmp_path / "roots"), "1000", json.dumps(faults)]
    done = subprocess.run(
        [sys.executable, str(program), *words], env=machine.environ, capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    starts = [json.loads(line) for line in lines]
    assert len(starts) == 1000
    assert {(code, answer) for _number, _name, code, answer, _seconds in starts} == {(0, "graph of None")}
    late = [start for start in starts if start[4] > 20]
    assert late == [], "the deadline was half a second"
    assert {start[1] for start in starts} == faults.keys()
