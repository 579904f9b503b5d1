"""What an engine says about its start, read from the bytes that it prints.

The reader is pure and incremental: it is handed chunks of any size with the time at which they came, and keeps a
bounded summary, whatever is printed. Nothing in it can fail on input: what does not match is not there. Messages are
found wherever they stand in a line, so that configured, torn and foreign lines do no harm; `engine_messages` has them.

An answer of None means that the log did not say. The log has no last word about a launch: its exit code and the access
times of restored files are better evidence, where there are any.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from cachemgr.engine_messages import MESSAGES, PHASES, Expected, Message, Version, expected_of, known_reason

_LONGEST_LINE: Final = 1 << 16
"""Bytes of a line that are read; the configuration line of 0.33 has about 6,000."""
_MOST_ENTRIES: Final = 256
_MOST_PROCESSES: Final = 1024
_MOST_FAILURES: Final = 16
_MOST_PATHS: Final = 256
_MOST_NOTES: Final = 32
_MOST_MATCHES: Final = 16
_LONGEST_TEXT: Final = 4096
_LONGEST_TRACEBACK: Final = 20_000
"""Lines after which an open traceback is given up: until it is closed, every line is looked at."""

_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_PROCESS = re.compile(r"\((?P<engine>EngineCore_DP)?[^\s()]{1,64} pid=(?P<pid>\d{1,20})\)")
_HEADER = re.compile(
    r"(?:\[rank(?P<rank>\d{1,7})\]:(?: |$)|\([^\s()]{1,64} pid=(?P<pid>\d{1,20})\)(?: |$))?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]\s]{1,300}\](?: |$))?"
)
_ENTRY = re.compile(r"/(?:torch_aot_compile|torch_compile_cache)/([0-9a-f]{64}|[0-9a-f]{10})/rank_\d+_\d+/")
_RANK = re.compile(r"/rank_(\d{1,7})_\d{1,7}(?:/|$)")
_EXCEPTION = re.compile(r"(?!(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b)[A-Za-z_][\w.]*(?:: .*|:)?$")
_QUOTED_PATH = re.compile(r"[\"'](/[^\"'\n]{1,4096})[\"']")
_BARE_PATH = re.compile(r"(?<![\w/.:~\"'-])((?:/[\w.+@%~=-]{1,255}){2,64})")
_CACHE_WORDS = re.compile(
    r"torch_compile_cache|torch_aot_compile|inductor_cache|torchinductor|/triton/|flashinfer|deep_gemm"
    r"|Compile package was created|finalize_loading|Source code has changed"
)
_TRACEBACK: Final = "Traceback (most recent call last):"
_FATAL: Final = "Fatal Python error: "
_CHAINED: Final = ("During handling of the above exception", "The above exception was the direct cause")
_STACK: Final = ("Thread 0x", "Current thread 0x")
_HARMLESS: Final = frozenset({"DEBUG", "INFO", "WARNING"})
_CONFIG_FACTS: Final = {
    "compile_mode": re.compile(r"'mode': <CompilationMode\.([A-Z_]+)"),
    "graph_mode": re.compile(r"'cudagraph_mode': <CUDAGraphMode\.([A-Z_]+)"),
    "device": re.compile(r"\bdevice_config=(\w+)"),
    "engines": re.compile(r"\bdata_parallel_size=(\d{1,6})\b"),
}


class CompileDirectory(msgspec.Struct, frozen=True):
    """A directory of compiled graphs that a rank uses (`compilation/backends.py`)."""

    path: str
    entry: str | None
    """Its ten-hex name; None where the user chose the directory (`compilation_config.cache_dir`)."""
    rank: int | None
    tag: str | None
    """`backbone`, `eagle_head`, an encoder's name: which of the launch's models."""


class AotEntry(msgspec.Struct, frozen=True):
    """One AOT file of one rank and what became of it (`compilation/decorators.py`)."""

    path: str
    entry: str | None
    """Its 64-hex name."""
    rank: int | None
    tag: str | None
    loaded: bool = False
    saved: bool = False
    rejected: str | None = None
    """The engine's reason."""
    not_saved: str | None = None

    @property
    def verdict(self) -> str:
        """`loaded`, `rejected` (and usually saved again), `saved` (compiled in this start) or `not saved`."""
        if self.rejected is not None:
            return "rejected"
        if self.loaded:
            return "loaded"
        return "saved" if self.saved else "not saved"


class Rejection(msgspec.Struct, frozen=True):
    """Why the engine did not take an entry, or died of it."""

    entry: str | None
    """The path of the AOT file, or the first path in the words of a fatal error."""
    reason: str
    """The engine's own words."""
    explanation: str | None
    fix: str | None
    """Both None where the reason is not known."""
    of_entry: bool = True
    """Whether the entry itself is to blame, as far as anybody knows."""


class Failure(msgspec.Struct, frozen=True):
    """A traceback at no level, ERROR or CRITICAL, or a fatal error of the interpreter. Not every one ends a process."""

    process: str
    """`pid 123`, `rank 0`, or empty where the line does not say."""
    exception: str | None
    """The last exception line, with the next one where it ends in a colon. None while the traceback is still coming."""
    causes: tuple[str, ...]
    """Earlier exceptions of the same chain."""
    paths: tuple[str, ...]
    """Every absolute path in it, in order, at most 256."""
    at: float
    """When it began, on the caller's clock."""
    stopping: bool
    """Whether an engine had been told to stop before: 0.32 logs an EngineDeadError at every orderly stop."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the log said so far. None, or nothing in it, means that it did not say."""

    version: str | None
    model_runner: str | None
    device: str | None
    attention_backend: str | None
    flash_attention: int | None
    compile_mode: str | None
    graph_mode_requested: str | None
    """What a message says it was before the engine lowered it, or as configured."""
    graph_mode: str | None
    """The effective one: lowered by a message, or as configured once graphs were captured or the engine was ready."""
    compile_cache_disabled: bool
    compile_directories: tuple[CompileDirectory, ...]
    aot_entries: tuple[AotEntry, ...]
    rejections: tuple[Rejection, ...]
    phases: dict[str, float]
    """Seconds by phase, of the slowest process, summed over its models: model_init, weights, model_load, dynamo,
    compile_graphs, graphs_load, aot_load, compile, warmup, capture, kernel_warmup, init_engine, ready."""
    compile_ranges: dict[str, float]
    """Seconds by compile range, of the slowest process, as the engine writes the range: `(1, 16384)`."""
    graph_gib: float | None
    kv_tokens: int | None
    """Summed over data-parallel engines."""
    kv_gib: float | None
    weights_gib: float | None
    gpu_free_gib: float | None
    gpu_total_gib: float | None
    world_size: int | None
    ranks: tuple[int, ...]
    """Ranks that announced themselves."""
    engine_ready_at: float | None
    """When all data-parallel engines had said `init engine`. A log of one node of several never has them all."""
    engines_ready: int
    """Engines that said it."""
    server_ready_at: float | None
    """When an API server first said that it is up; it waits for all its engines."""
    out_of_memory: tuple[str, ...]
    """Lines that say so, or that a worker was killed with signal 9: never the fault of a cache."""
    died_of: tuple[int, ...]
    """Signals that ended processes of the engine, but for 9, as their parent says; workers and cores die apart from the
    command."""
    failures: tuple[Failure, ...]
    """The first fifteen and the last one."""
    jit_monitor: bool
    jit_after_ready: tuple[str, ...]
    """Kernels that were compiled while serving, at most 32."""
    jit_count: int
    autotune: str | None
    """FlashInfer: `tuned`, `loaded` or `disabled`."""
    autotune_paths: tuple[str, ...]
    warmed_up: tuple[str, ...]
    missing: tuple[str, ...]
    """Events that a complete start of this version prints and that are not there (yet)."""

    @property
    def ready_at(self) -> float | None:
        """The ready sign: of the server if there is one, else of the engine."""
        return self.server_ready_at if self.server_ready_at is not None else self.engine_ready_at

    @property
    def all_ranks(self) -> bool | None:
        """Whether every rank of the world announced itself in this log; None where none did."""
        return None if self.world_size is None else len(self.ranks) >= self.world_size


@dataclass
class _Traceback:
    level: str | None
    process: str
    at: float
    stopping: bool
    number: int = 0
    exception: str | None = None
    chained: bool = False
    causes: list[str] = field(default_factory=list)
    paths: dict[str, None] = field(default_factory=dict)
    lines: int = 0

    def raised(self, text: str) -> None:
        if self.exception is not None and len(self.causes) < _MOST_NOTES:
            self.causes.append(self.exception)
        self.exception = text[:_LONGEST_TEXT]
        self.chained = False

    def mention(self, text: str) -> None:
        for path in paths_in(text):
            if len(self.paths) >= _MOST_PATHS:
                return
            self.paths.setdefault(path)

    def failure(self) -> Failure:
        return Failure(self.process, self.exception, tuple(self.causes), tuple(self.paths), self.at, self.stopping)


def paths_in(text: str) -> list[str]:
    """The absolute paths in `text`, in order: quoted ones whole, bare ones up to white space."""
    found = [(match.start(1), match[1]) for match in _QUOTED_PATH.finditer(text)]
    found += [(match.start(1), match[1].rstrip(".")) for match in _BARE_PATH.finditer(text)]
    return [path for _, path in sorted(found)]


def parse_version(version: str) -> Version | None:
    """Major and minor of a vLLM version; None for anything else."""
    match = re.match(r"(\d{1,6})\.(\d{1,6})", version)
    return (int(match[1]), int(match[2])) if match else None


class _Tracebacks:
    """Follows tracebacks of several processes whose lines are mixed."""

    def __init__(self) -> None:
        self._open: dict[str, _Traceback] = {}
        self._done: list[_Traceback] = []
        self._number = 0

    @property
    def following(self) -> bool:
        return bool(self._open)

    def failures(self) -> tuple[Failure, ...]:
        """In the order in which they began: the root cause comes first, the processes that waited for it follow."""
        known = [*self._done, *(each for each in self._open.values() if each.level not in _HARMLESS)]
        known.sort(key=lambda trace: trace.number)
        return tuple(trace.failure() for trace in (*known[: _MOST_FAILURES - 1], *known[_MOST_FAILURES - 1 :][-1:]))

    def line(self, text: str, now: float, *, stopping: bool) -> None:
        header = _HEADER.match(text)
        assert header is not None, "every part of it is optional"
        process = f"pid {header['pid']}" if header["pid"] else f"rank {header['rank']}" if header["rank"] else ""
        body = text[header.end() :]
        for each in [name for name, trace in self._open.items() if trace.lines > _LONGEST_TRACEBACK]:
            self._close(each)
        for trace in self._open.values():
            trace.lines += 1
        if _TRACEBACK in body or body.startswith(_FATAL):
            self._start(body, _Traceback(header["level"], process, now, stopping))
        elif process in self._open:
            self._follow(body, process)

    def _start(self, body: str, new: _Traceback) -> None:
        trace = self._open.get(new.process)
        if trace is not None and not trace.chained and (trace.exception is not None or trace.level != new.level):
            self._close(new.process)
            trace = None
        if trace is None:
            if len(self._open) >= _MOST_FAILURES:
                self._close(next(iter(self._open)))
            self._number += 1
            trace = self._open[new.process] = new
            trace.number = self._number
        if body.startswith(_FATAL):
            trace.raised(body)
            trace.mention(body)

    def _follow(self, body: str, process: str) -> None:
        trace = self._open[process]
        if not body or body[0] in " \t" or body.startswith((*_CHAINED, *_STACK)):
            trace.mention(body)
            trace.chained = trace.chained or body.startswith(_CHAINED)
        elif trace.exception is not None and trace.exception.endswith(":") and not trace.chained:
            trace.exception = f"{trace.exception} {body}"[:_LONGEST_TEXT]
            trace.mention(body)
        elif trace.exception is not None and not trace.chained:
            self._close(process)
        elif _EXCEPTION.match(body):
            trace.raised(body)
            trace.mention(body)

    def _close(self, process: str) -> None:
        trace = self._open.pop(process)
        if trace.level in _HARMLESS:
            return
        if len(self._done) >= _MOST_FAILURES:
            self._done.pop()
        self._done.append(trace)


@dataclass(frozen=True)
class _Found:
    """One message: what its pattern took out, the process id before it (or nothing), and when it came."""

    fields: dict[str, str]
    process: str
    now: float


class EngineLog:
    """Reads what one launch prints. `started` and every `now` are seconds on one monotonic clock of the caller's."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._pending = b""
        self._tracebacks = _Tracebacks()
        self._events: dict[str, int] = {}
        self._facts: dict[str, str] = {}
        self._seconds: dict[str, dict[str, float]] = {}
        self._gib: dict[str, dict[str, float]] = {}
        self._kv_tokens: dict[str, int] = {}
        self._directories: dict[str, CompileDirectory] = {}
        self._aot: dict[str, AotEntry] = {}
        self._just_loaded: set[str] = set()
        self._engines: set[str] = set()
        self._initialised: set[str] = set()
        self._world = 0
        self._ranks: set[int] = set()
        self._engine_ready_at: float | None = None
        self._server_ready_at: float | None = None
        self._notes: dict[str, dict[str, None]] = {}
        self._handlers: dict[str, Callable[[_Found], None]] = {
            "engine": self._engine,
            "graph_mode": self._lowered,
            "ranks": self._rank,
            "compile_directory": self._directory,
            "aot_loaded": self._aot_loaded,
            "aot_rejected": self._aot_rejected,
            "aot_saved": self._aot_saved,
            "aot_not_saved": self._aot_not_saved,
            "kv_tokens": self._tokens,
            "gpu_memory": self._gpu,
            "init_engine": self._init_engine,
            "server_ready": self._server,
        }

    def feed(self, data: bytes, now: float) -> None:
        """Take the next bytes. A line counts when its end (a line feed or a carriage return) has come. Never raises."""
        if b"\r" in data:
            data = data.replace(b"\r", b"\n")
        end = data.rfind(b"\n")
        if end < 0:
            self._pending += data[: _LONGEST_LINE - len(self._pending)]
            return
        self._block(self._pending + data[:end], now)
        self._pending = data[end + 1 :][:_LONGEST_LINE]

    def close(self, now: float) -> None:
        """The command has ended: what came without an end of line counts too."""
        self._block(self._pending, now)
        self._pending = b""

    def _block(self, block: bytes, now: float) -> None:
        plain = _ANSI.sub(b"", block) if b"\x1b" in block else block
        hubs = [hub for hub in _HUBS if hub in plain]
        if not hubs and not self._tracebacks.following:
            return
        for raw in block.split(b"\n"):
            line = raw[:_LONGEST_LINE]
            if b"\x1b" in line:
                line = _ANSI.sub(b"", line)
            hit = [hub for hub in hubs if hub in line] if hubs else hubs
            if hit or self._tracebacks.following:
                self._line(line.decode("utf-8", "backslashreplace"), hit, now)

    def _line(self, text: str, hubs: Iterable[bytes], now: float) -> None:
        for hub in hubs:
            for row in _HUBS[hub]:
                if row.literal in text:
                    self._row(row, text, now)
        if self._tracebacks.following or _TRACEBACK in text or _FATAL in text:
            self._tracebacks.line(text, now, stopping="stopping" in self._events)

    def _row(self, row: Message, text: str, now: float) -> None:
        for count, match in enumerate(row.pattern.finditer(text)):
            if count >= _MOST_MATCHES:
                return
            process = ""
            for process_match in _PROCESS.finditer(text, max(0, match.start() - 400), match.start()):
                process = process_match["pid"]
                if process_match["engine"] and len(self._engines) < _MOST_PROCESSES:
                    self._engines.add(process)
            self._events[row.event] = self._events.get(row.event, 0) + 1
            self._take(row.event, match, process, now)

    def _take(self, event: str, match: re.Match[str], process: str, now: float) -> None:
        fields = match.groupdict()
        if fields.get("seconds"):
            self._took(event, process, fields)
        if fields.get("gib"):
            self._amount(self._gib, event, process)[process] = float(fields["gib"])
        if event in _FACTS:
            self._facts.setdefault(event, fields["value"])
        elif event in _NOTES:
            self._note(event, (fields.get("path") or fields.get("value") or match[0])[:_LONGEST_TEXT])
        if event in self._handlers:
            self._handlers[event](_Found(fields, process, now))

    def _note(self, event: str, text: str) -> None:
        notes = self._notes.setdefault(event, {})
        if len(notes) < _MOST_NOTES:
            notes.setdefault(text)

    def _amount(self, table: dict[str, dict[str, float]], name: str, process: str) -> dict[str, float]:
        """The values of `name` by process, with room for `process`: those beyond the bound are not kept apart."""
        values = table.setdefault(name, {})
        if process not in values and len(values) >= _MOST_PROCESSES:
            values.pop(next(iter(values)))
        return values

    def _took(self, event: str, process: str, fields: dict[str, str]) -> None:
        phase = PHASES[event]
        if event == "compile_total" and process in self._just_loaded:
            self._just_loaded.discard(process)
            phase = "aot_load"
        self._add(phase, process, float(fields["seconds"]))
        if event == "compile_range" and len(self._seconds) < _MOST_ENTRIES:
            self._add(f"range {fields['range']}", process, float(fields["seconds"]))

    def _add(self, phase: str, process: str, seconds: float) -> None:
        values = self._amount(self._seconds, phase, process)
        values[process] = values.get(process, 0.0) + seconds

    def _engine(self, found: _Found) -> None:
        self._facts.setdefault("version", found.fields["version"])
        for name, pattern in _CONFIG_FACTS.items():
            value = pattern.search(found.fields["config"])
            if value:
                self._facts.setdefault(name, value[1])

    def _lowered(self, found: _Found) -> None:
        if found.fields.get("old"):
            self._facts.setdefault("graph_mode_requested", found.fields["old"])
        elif "graph_mode" in self._facts:
            self._facts.setdefault("graph_mode_requested", self._facts["graph_mode"])
        self._facts["graph_mode_lowered"] = found.fields["new"]

    def _rank(self, found: _Found) -> None:
        self._world = max(self._world, int(found.fields["world"]))
        if len(self._ranks) < _MOST_PROCESSES:
            self._ranks.add(int(found.fields["rank"]))

    def _directory(self, found: _Found) -> None:
        path = found.fields["path"]
        if len(self._directories) < _MOST_ENTRIES:
            tag = found.fields["tag"] or path.rpartition("/")[2]
            self._directories.setdefault(path, CompileDirectory(path, _entry_in(path), _rank_in(path), tag))

    def _aot_entry(self, fields: dict[str, str]) -> AotEntry | None:
        path = fields["path"]
        if path not in self._aot and len(self._aot) >= _MOST_ENTRIES:
            return None
        return self._aot.get(path) or AotEntry(path, _entry_in(path), _rank_in(path), fields["tag"])

    def _aot_changed(self, fields: dict[str, str], **change: object) -> None:
        entry = self._aot_entry(fields)
        if entry is not None:
            self._aot[entry.path] = msgspec.structs.replace(entry, **change)

    def _aot_loaded(self, found: _Found) -> None:
        if len(self._just_loaded) < _MOST_PROCESSES:
            self._just_loaded.add(found.process)
        self._aot_changed(found.fields, loaded=True)

    def _aot_rejected(self, found: _Found) -> None:
        self._aot_changed(found.fields, rejected=found.fields["reason"][:_LONGEST_TEXT])

    def _aot_saved(self, found: _Found) -> None:
        self._aot_changed(found.fields, saved=True)

    def _aot_not_saved(self, found: _Found) -> None:
        self._aot_changed(found.fields, not_saved=found.fields["reason"][:_LONGEST_TEXT])

    def _tokens(self, found: _Found) -> None:
        digits = found.fields["tokens"].replace(",", "")
        if digits and (found.process in self._kv_tokens or len(self._kv_tokens) < _MOST_PROCESSES):
            self._kv_tokens[found.process] = int(digits)

    def _gpu(self, found: _Found) -> None:
        for name in ("free", "total"):
            self._amount(self._gib, f"gpu_{name}", found.process)[found.process] = float(found.fields[name])

    def _init_engine(self, found: _Found) -> None:
        if len(self._initialised) < _MOST_PROCESSES:
            self._initialised.add(found.process)
        expected = max(len(self._engines), int(self._facts.get("engines", "1")))
        if self._engine_ready_at is None and len(self._initialised) >= expected:
            self._engine_ready_at = found.now

    def _server(self, found: _Found) -> None:
        if self._server_ready_at is None:
            self._server_ready_at = found.now

    def seen(self) -> Seen:
        """What the log said so far."""
        facts, failures = self._facts, self._tracebacks.failures()
        graph_mode = self._graph_mode()
        flash = facts.get("flash_attention")
        return Seen(
            version=facts.get("version"),
            model_runner=facts.get("model_runner"),
            device=facts.get("device"),
            attention_backend=facts.get("attention_backend"),
            flash_attention=int(flash) if flash else None,
            compile_mode=facts.get("compile_mode"),
            graph_mode_requested=facts.get("graph_mode_requested", facts.get("graph_mode")),
            graph_mode=graph_mode,
            compile_cache_disabled="compile_cache_disabled" in self._events,
            compile_directories=tuple(self._directories.values()),
            aot_entries=tuple(self._aot.values()),
            rejections=self._rejections(failures),
            phases=self._phases(),
            compile_ranges={
                name.removeprefix("range "): max(values.values())
                for name, values in self._seconds.items()
                if name.startswith("range ")
            },
            graph_gib=self._most("graph_pool", "capture"),
            kv_tokens=sum(self._kv_tokens.values()) if self._kv_tokens else None,
            kv_gib=self._most("kv_memory"),
            weights_gib=self._most("model_load"),
            gpu_free_gib=self._most("gpu_free"),
            gpu_total_gib=self._most("gpu_total"),
            world_size=self._world or None,
            ranks=tuple(sorted(self._ranks)),
            engine_ready_at=self._engine_ready_at,
            engines_ready=len(self._initialised),
            server_ready_at=self._server_ready_at,
            out_of_memory=self._noted("out_of_memory"),
            died_of=tuple(int(number) for number in self._noted("process_died")),
            failures=failures,
            jit_monitor="jit_monitor" in self._events,
            jit_after_ready=self._noted("jit_compiled"),
            jit_count=self._events.get("jit_compiled", 0),
            autotune=self._autotune(),
            autotune_paths=(*self._noted("autotune_file"), *self._noted("autotune_loaded")),
            warmed_up=self._noted("warming_up"),
            missing=self._missing(graph_mode),
        )

    def _noted(self, event: str) -> tuple[str, ...]:
        return tuple(self._notes.get(event, ()))

    def _most(self, *events: str) -> float | None:
        """The largest amount over the processes, of the first of `events` that came."""
        return next((max(self._gib[event].values()) for event in events if event in self._gib), None)

    def _graph_mode(self) -> str | None:
        lowered = self._facts.get("graph_mode_lowered")
        if lowered is not None:
            return lowered
        return self._facts.get("graph_mode") if "capture" in self._events or "init_engine" in self._events else None

    def _autotune(self) -> str | None:
        events = self._events
        if "autotune_tuning" in events or ("autotune_running" in events and "autotune_loaded" not in events):
            return "tuned"
        if "autotune_loaded" in events:
            return "loaded"
        return "disabled" if "autotune_disabled" in events else None

    def _phases(self) -> dict[str, float]:
        phases = {name: max(values.values()) for name, values in self._seconds.items() if not name.startswith("range ")}
        ready_at = self._server_ready_at if self._server_ready_at is not None else self._engine_ready_at
        if ready_at is not None:
            phases["ready"] = ready_at - self._started
        return phases

    def _rejections(self, failures: tuple[Failure, ...]) -> tuple[Rejection, ...]:
        found = [
            _explained(entry.path, reason)
            for entry in self._aot.values()
            for reason in (entry.rejected, entry.not_saved)
            if reason is not None
        ]
        found += [
            _explained(next(iter(paths_in(words)), None), words)
            for failure in failures
            for words in (failure.exception, *failure.causes)
            if words is not None and _blames_a_cache(words, failure.paths) and known_reason(words) is not None
        ]
        return tuple(found)

    def _missing(self, graph_mode: str | None) -> tuple[str, ...]:
        version = parse_version(self._facts.get("version", ""))
        if version is None:
            return ("engine",)
        cuda = self._facts.get("device") == "cuda"
        conditions = {
            "cuda": cuda,
            "compiled": self._facts.get("compile_mode") == "VLLM_COMPILE",
            "captured": cuda and graph_mode not in {None, "NONE"},
        }
        expected: tuple[Expected, ...] = expected_of(
            version, frozenset(name for name, holds in conditions.items() if holds)
        )
        return tuple(each.events[0] for each in expected if self._events.keys().isdisjoint(each.events))


def _blames_a_cache(words: str, paths: tuple[str, ...]) -> bool:
    """Whether a fatal error is about a cache: `No such file` may be about a model. A damaged index goes unnamed."""
    if _CACHE_WORDS.search(words):
        return True
    return "(<unknown>, line " in words and any(path.endswith("/vllm/compilation/backends.py") for path in paths)


def _explained(entry: str | None, reason: str) -> Rejection:
    known = known_reason(reason)
    if known is None:
        return Rejection(entry, reason, None, None)
    return Rejection(entry, reason, known.explanation, known.fix, known.of_entry)


def _entry_in(path: str) -> str | None:
    found = _ENTRY.search(f"{path}/")
    return found[1] if found else None


def _rank_in(path: str) -> int | None:
    found = _RANK.search(path)
    return int(found[1]) if found else None


_HUBS: Final[dict[bytes, tuple[Message, ...]]] = {
    **{
        hub.encode(): tuple(row for row in MESSAGES if row.hub == hub)
        for hub in dict.fromkeys(row.hub for row in MESSAGES)
    },
    _TRACEBACK.encode(): (),
    _FATAL.encode(): (),
}
_FACTS: Final = frozenset({"model_runner", "attention_backend", "flash_attention"})
_NOTES: Final = frozenset(
    {"out_of_memory", "process_died", "jit_compiled", "autotune_file", "autotune_loaded", "warming_up"}
)
