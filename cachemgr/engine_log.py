"""What an engine says about its start, read from the bytes that it prints.

The reader is pure and incremental: it is handed chunks of any size with the time at which they came, and keeps a
bounded summary, whatever is printed. Nothing in it can fail on input: what does not match is not there. Messages are
found wherever they stand in a line, so that configured, torn and foreign lines do no harm; `engine_messages` has them.

An answer of None means that the log did not say. The log has no last word about a launch: its exit code and the access
times of restored files are better evidence, where there are any.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from cachemgr.engine_messages import MESSAGES, PHASES, Expected, Message, Version, expected_of, known_reason
from cachemgr.seen import AotEntry, CompileDirectory, Rejection, Seen
from cachemgr.tracebacks import FATAL, TRACEBACK, Failure, Tracebacks, paths_in

_LONGEST_LINE: Final = 1 << 16
"""Bytes of a line that are read; the configuration line of 0.33 has about 6,000."""
_MOST_ENTRIES: Final = 256
_MOST_PROCESSES: Final = 1024
_MOST_NOTES: Final = 32
_MOST_MATCHES: Final = 16
_LONGEST_TEXT: Final = 4096

_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_PROCESS = re.compile(r"\((?P<engine>EngineCore_DP)?[^\s()]{1,64} pid=(?P<pid>\d{1,20})\)")
_ENTRY = re.compile(r"/(?:torch_aot_compile|torch_compile_cache)/([0-9a-f]{64}|[0-9a-f]{10})/rank_\d+_\d+/")
_RANK = re.compile(r"/rank_(\d{1,7})_\d{1,7}(?:/|$)")
_CACHE_WORDS = re.compile(
    r"torch_compile_cache|torch_aot_compile|inductor_cache|torchinductor|/triton/|flashinfer|deep_gemm"
    r"|Compile package was created|finalize_loading|Source code has changed"
)
_CONFIG_FACTS: Final = {
    "compile_mode": re.compile(r"'mode': <CompilationMode\.([A-Z_]+)"),
    "graph_mode": re.compile(r"'cudagraph_mode': <CUDAGraphMode\.([A-Z_]+)"),
    "device": re.compile(r"\bdevice_config=(\w+)"),
    "engines": re.compile(r"\bdata_parallel_size=(\d{1,6})\b"),
}


def parse_version(version: str) -> Version | None:
    """Major and minor of a vLLM version; None for anything else."""
    match = re.match(r"(\d{1,6})\.(\d{1,6})", version)
    return (int(match[1]), int(match[2])) if match else None


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
        self._tracebacks = Tracebacks()
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
        if self._tracebacks.following or TRACEBACK in text or FATAL in text:
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
    TRACEBACK.encode(): (),
    FATAL.encode(): (),
}
_FACTS: Final = frozenset({"model_runner", "attention_backend", "flash_attention"})
_NOTES: Final = frozenset(
    {"out_of_memory", "process_died", "jit_compiled", "autotune_file", "autotune_loaded", "warming_up"}
)
