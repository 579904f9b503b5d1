"""What the machine is: only what changes compiled code counts."""

from pathlib import Path

import pytest

from cachemgr.factors import host
from cachemgr.factors.packages import Torch

X86 = (
    "processor\t: {n}\nflags\t\t: fpu vme sse sse2 ssse3 avx avx2 fma {more}\nphysical id\t: 0\ncore id\t\t: {core}\n\n"
)


def cpuinfo(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    return path


def features(tmp_path: Path, more: str) -> tuple[str, ...] | None:
    return host.cpu(frozenset({0}), cpuinfo(tmp_path, X86.format(n=0, core=0, more=more))).features


def test_instruction_sets_are_sorted(tmp_path: Path) -> None:
    assert features(tmp_path, "bmi2 adx") == ("adx", "avx", "avx2", "bmi2", "fma", "sse", "sse2", "ssse3")


@pytest.mark.parametrize(
    "word",
    [
        "avx512f", "avx512_bf16", "avx_vnni", "amx_tile", "amx_bf16", "sse4_1", "f16c", "bmi1", "popcnt", "abm", "aes",
        "sha_ni", "vaes", "vpclmulqdq", "gfni", "movbe", "adx",
    ],
)  # fmt: skip
def test_an_instruction_set_counts(tmp_path: Path, word: str) -> None:
    assert word in (features(tmp_path, word) or ())


@pytest.mark.parametrize(
    "word",
    [
        "hypervisor", "constant_tsc", "rep_good", "erms", "fsrm", "ibrs", "spectre_v1", "prefer-no-gather",
        "prefer-no-scatter", "arat", "smap", "smep", "pti", "svm", "vmx", "apic", "aperfmperf", "tsc_known_freq",
    ],
)  # fmt: skip
def test_tuning_bug_and_system_words_do_not_count(tmp_path: Path, word: str) -> None:
    assert features(tmp_path, word) == features(tmp_path, "")


def test_a_mixed_machine_offers_what_every_processor_has(tmp_path: Path) -> None:
    text = X86.format(n=0, core=0, more="avx512f") + X86.format(n=1, core=1, more="bmi2")
    path = cpuinfo(tmp_path, text)
    assert host.cpu(frozenset({0, 1}), path).features == ("avx", "avx2", "fma", "sse", "sse2", "ssse3")
    assert "avx512f" in (host.cpu(frozenset({0}), path).features or ())


def test_arm_lists_only_instruction_sets(tmp_path: Path) -> None:
    path = cpuinfo(tmp_path, "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd sve sve2 bf16\n\n")
    assert host.cpu(frozenset({0}), path).features == ("asimd", "bf16", "fp", "sve", "sve2")


@pytest.mark.parametrize("text", ["", "\n\n", "garbage", "processor: zero\n\nprocessor : 1\n"])
def test_a_cpuinfo_that_tells_nothing_is_unknown(tmp_path: Path, text: str) -> None:
    assert host.cpu(frozenset({0}), cpuinfo(tmp_path, text)).features is None


def test_a_machine_without_cpuinfo_is_unknown(tmp_path: Path) -> None:
    assert host.cpu(frozenset({0}), tmp_path / "nothing") == host.Cpu(None, None)


def test_threads_tell_shared_cores_apart(tmp_path: Path) -> None:
    shared = "".join(X86.format(n=n, core=n // 2, more="") for n in range(4))
    own = "".join(X86.format(n=n, core=n, more="") for n in range(4))
    every = frozenset(range(4))
    assert host.cpu(every, cpuinfo(tmp_path, shared)).threads == "4 on 2 cores"
    assert host.cpu(every, cpuinfo(tmp_path, own)).threads == "4 on 4 cores"
    assert host.cpu(frozenset({0, 1}), cpuinfo(tmp_path, shared)).threads == "2 on 1 cores"


@pytest.mark.parametrize("visible", ["", "-1", "-1,0", " "])
def test_hidden_gpus_leave_the_cpu(visible: str) -> None:
    assert host.device(Torch(cuda="12.8", hip="none"), {"CUDA_VISIBLE_DEVICES": visible}) == host.Device("cpu")


def test_a_torch_without_cuda_computes_on_the_cpu() -> None:
    assert host.device(Torch(cuda="none", hip="none"), {}) == host.Device("cpu")


def test_a_rocm_torch_has_an_unknown_device() -> None:
    assert host.device(Torch(cuda="none", hip="6.4"), {}) == host.Device("rocm")


def test_devices_of_others_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They counted as the CPU, so two models of an accelerator shared a key."""
    assert host.device(Torch(cuda="none", hip="none", other="npu"), {}) == host.Device("npu")
    monkeypatch.setattr(host, "_DRM", tmp_path / "dri")
    assert host.device(Torch(cuda="none", hip="none", other="xpu"), {}) == host.Device("cpu")
    (tmp_path / "dri").mkdir()
    assert host.device(Torch(cuda="none", hip="none", other="xpu"), {}) == host.Device("xpu")


def tool(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_compiler_is_what_it_says_of_itself(tmp_path: Path) -> None:
    tool(tmp_path / "g++", "echo 'g++ (Some) 12.2.0'; echo more")
    assert host.compiler({"PATH": str(tmp_path)}, tmp_path) == "g++ (Some) 12.2.0"


def test_cxx_names_the_compiler(tmp_path: Path) -> None:
    tool(tmp_path / "g++", "echo g++")
    clang = tool(tmp_path / "clang++", "echo clang 18")
    for name in ("clang++", str(clang)):
        assert host.compiler({"PATH": str(tmp_path), "CXX": name}, tmp_path) == "clang 18"


def test_no_compiler_is_known_to_be_none(tmp_path: Path) -> None:
    assert host.compiler({"PATH": str(tmp_path)}, tmp_path) == "none"


def test_a_broken_compiler_is_unknown(tmp_path: Path) -> None:
    tool(tmp_path / "g++", "exit 1")
    assert host.compiler({"PATH": str(tmp_path)}, tmp_path) is None
