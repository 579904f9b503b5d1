"""What the engine says: its messages one by one, and whatever else may come down a pipe.

`test_engine_log_real.py` has whole logs and the real sources of messages.
"""

import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemgr.engine_log import EngineLog
from cachemgr.engine_messages import (
    EXPECTED,
    KNOWN_REASONS,
    MESSAGES,
    PHASES,
    expected_of,
    known_reason,
)
from cachemgr.seen import Seen
from cachemgr.tracebacks import paths_in

LOGS = Path(__file__).parent / "logs"
EXCERPTS = sorted(path.stem for path in LOGS.glob("*.log"))
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
