"""Prewarm with real engines: a torch.compile program, and vLLM's server on the CPU with weights that mean nothing."""

import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachemgr.prewarm.exercise import BATCHES, SAMPLING
from tests import test_vllm_e2e as vllm
from tests.machines import Machine

PROGRAM = """
import torch
print(torch.compile(lambda x: torch.sin(x) + 2 * x)(torch.arange(8.0)).sum().item())
"""
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch in this environment")
needs_vllm = pytest.mark.skipif(vllm.PYTHON is None, reason="CACHEMGR_VLLM_PYTHON names no Python with vLLM")


ANOTHER_QUESTION = re.compile(r"added \d+ in torch_compile · added \S+/c[a-z2-7]{51}\.cpp$|verdict partly used$")
"""One start in some asks the compiler for one instruction set more than the one before, which was seen on busy CPUs:
probably threads of torch see each other's flags (2.13 `_inductor/cpu_vec_isa.py`, VecAVX512.__bool__). No kernel is
compiled for that, which watched compilers tell."""


def prewarm(machine: Machine, *words: str, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
    machine.make_places()
    process = machine.start("prewarm", "--json", *words)
    out, errors = process.communicate(timeout=900)
    assert process.returncode in codes, f"exit {process.returncode}\n{out}\n{errors}"
    document: dict[str, Any] = json.loads(out)
    return document


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An engine's processes meet at a socket below TMPDIR, whose path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="v") as place:
        yield Path(place)


@pytest.mark.e2e
@needs_torch
def test_a_program_starts_warm_from_a_seed_that_was_verified(tmp_path: Path) -> None:
    builder = Machine(tmp_path / "builder", tmp_path / "store", {"CI": "true", "TORCHINDUCTOR_COMPILE_THREADS": "1"})
    (tmp_path / "program.py").write_text(PROGRAM)
    command = (sys.executable, str(tmp_path / "program.py"))
    made = prewarm(builder, "--bake", "seed", "--verify", "--", *command)
    (result,), (proof,) = made["entries"], made["proofs"]
    assert result["state"] == "warm"
    assert result["passes"][0]["report"]["verdict"] == "cold"
    assert proof["holds"], proof
    assert (proof["verdict"], proof["added"], proof["compilers"]) == ("used", {}, [])


@pytest.mark.vllm
@needs_vllm
def test_a_server_prewarmed_without_weights_is_exact_for_one_with_them(short_path: Path) -> None:
    """From prewarming over baking to verifying. The key and the engine's own entry are those of a production start: one
    with weights, which has the seed and nothing else, no network either, loads what was made without them, adds
    nothing, and answers."""
    lab = vllm.Lab(short_path)
    assert vllm.PYTHON is not None
    command = (vllm.PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", str(lab.model), *vllm.FLAGS)
    weights = lab.model / "model.safetensors"
    kept = weights.rename(short_path / "weights")
    builder = lab.machine("builder", **vllm.PLUGIN)
    (result,) = prewarm(builder, "--bake", "seed", "--", *command)["entries"]
    assert result["state"] == "warm", "without any weights on the machine"
    first, *_others, last = result["passes"]
    assert (first["report"]["verdict"], last["report"]["verdict"]) == ("cold", "used")
    asked = {step["name"]: step["status"] for step in first["exercised"]}
    answered = [f"a batch of {size}" for size in BATCHES] + ["a long prompt", *SAMPLING, "a chat"]
    assert {name: asked.get(name) for name in answered} == dict.fromkeys(answered, 200)
    assert asked["a picture"] == 400, "it sees nothing"
    # 500: its tokenizer cannot spell JSON.
    assert "refused structured output (500 Internal server error)" in result["notes"]
    kept.rename(weights)
    (proof,) = prewarm(builder, "--verify", "--seed", "seed", "--real-weights", codes=(0, 1))["proofs"]
    assert (proof["key"], proof["compilers"]) == (result["key"], []), proof
    assert [fault for fault in proof["faults"] if not ANOTHER_QUESTION.match(fault)] == []
    assert proof["holds"] or set(proof["added"]) == {"torch_compile"}, proof
