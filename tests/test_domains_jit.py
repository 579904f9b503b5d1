"""Caches of kernel libraries: the shapes that DeepGEMM, CuTe DSL, TileLang, FlashInfer, tvm-ffi, torch's extensions and
vLLM's tuning write, whole and torn. Formats are those of the sources that each domain names; ninja is the real one.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cachemgr.domains import TABLE, VLLM, Domain, Target, by_name
from cachemgr.domains.checks import Content
from cachemgr.domains.flashinfer import FLASHINFER_CUBINS, FLASHINFER_JIT, FLASHINFER_WINNERS
from cachemgr.domains.jit import CUTE_DSL, DEEP_GEMM, TILELANG, TORCH_EXTENSIONS, TVM_FFI
from cachemgr.domains.leftovers import is_temporary
from cachemgr.domains.vllm import AUTOTUNE, STARTUP_PLAN
from cachemgr.examine import UnfitError, examine, units_of
from cachemgr.statcache import StatCache
from cachemgr.store import Store
from tests import trees
from tests.trees import NOW_NS, cute_module, elf, look_up, publish_trees, read, restore_found, tree_of, winner, write

HEX = "0a" * 32
TUNED = f"0.7.4/90a/{HEX}"
NINJA = "0.7.4/90a/cached_ops/norm"
CUTE = "0.7.4/90a/cached_ops/gemm_sm90a_cute_dsl"
KERNEL = "cache/kernel.fp8_gemm.00ff"
KERNELS = f"0.1.15/linux-x86_64/kernels/{HEX}"
FOUND, WON = winner("('gemm', 1)")

NEW = (DEEP_GEMM, CUTE_DSL, TILELANG, FLASHINFER_JIT, FLASHINFER_CUBINS, FLASHINFER_WINNERS, AUTOTUNE, TVM_FFI,
       TORCH_EXTENSIONS, STARTUP_PLAN)  # fmt: skip


def title(value: object) -> str:
    return value.name if isinstance(value, Domain) else str(value)[-60:]


TRAVELS: list[tuple[Domain, str, str]] = [
    (DEEP_GEMM, f"{KERNEL}/kernel.cu", KERNEL),
    (DEEP_GEMM, f"{KERNEL}/kernel.cubin", KERNEL),
    (DEEP_GEMM, f"{KERNEL}/kernel.ptx", KERNEL),
    (CUTE_DSL, f"cute_dsl_{HEX}.mlir", f"cute_dsl_{HEX}.mlir"),
    (TILELANG, f"{KERNELS}/kernel_lib.so", KERNELS),
    (TILELANG, f"{HEX}/kernel_lib.so", HEX),  # before there were versions in the path
    (TILELANG, f"0.1.7/{HEX}/params.json", f"0.1.7/{HEX}"),
    (TILELANG, f"0.1.15/cuda-binaries/{HEX}/metadata.json", f"0.1.15/cuda-binaries/{HEX}"),
    (FLASHINFER_JIT, f"{NINJA}/norm.so", NINJA),
    (FLASHINFER_JIT, f"{NINJA}/.ninja_deps", NINJA),
    (FLASHINFER_JIT, "75_80/cached_ops/norm/norm.so", "75_80/cached_ops/norm"),
    (FLASHINFER_JIT, "0.7.4/90a/generated/norm/a/b.cu", "0.7.4/90a/generated/norm"),
    (FLASHINFER_JIT, f"{CUTE}/meta.json", CUTE),
    (FLASHINFER_CUBINS, "0a1b/fmha/x.cubin", "0a1b/fmha/x.cubin"),
    (FLASHINFER_CUBINS, "0a1b/fmha/checksums.txt", "0a1b/fmha/checksums.txt"),
    (FLASHINFER_WINNERS, f"v2/{'0a' * 8}/entries/{FOUND}", f"v2/{'0a' * 8}/entries/{FOUND}"),
    (FLASHINFER_WINNERS, f"v2/{'0a' * 8}/manifest.json", f"v2/{'0a' * 8}/manifest.json"),
    (AUTOTUNE, f"{TUNED}/autotune_configs_dp0_rank11.json", TUNED),
    (AUTOTUNE, f"{TUNED}/autotune_configs.json", TUNED),
    (AUTOTUNE, f"{HEX}/autotune_configs.json", HEX),  # where the user named the directory
    (TVM_FFI, "moe_0a1b/moe.so", "moe_0a1b"),
    (TVM_FFI, "libtorch_c_dlpack_addon_torch213-cuda-0a1b2c3d.so", "libtorch_c_dlpack_addon_torch213-cuda-0a1b2c3d.so"),
    (TORCH_EXTENSIONS, "py311_cu130/ext/ext.so", "py311_cu130/ext"),
    (TORCH_EXTENSIONS, "ext/.ninja_log", "ext"),  # where the user named the directory
    (STARTUP_PLAN, "startup_plan_0123456789abcdef.json", "startup_plan_0123456789abcdef.json"),
]


@pytest.mark.parametrize(("domain", "path", "unit"), TRAVELS, ids=title)
def test_what_travels_and_in_which_unit(domain: Domain, path: str, unit: str) -> None:
    assert domain.travels(path)
    assert domain.unit_of(path) == unit
    assert not any(domain.travels(path + end) for end in (".tmp", ".lock"))
    assert not is_temporary(path)


STAYS: list[tuple[Domain, str]] = [
    (DEEP_GEMM, "tmp/1f2e-77/kernel.cu"),
    (DEEP_GEMM, "cache/kernel.x.00/deeper/kernel.cu"),
    (CUTE_DSL, f"tmp.pid_77_ab/cute_dsl_{HEX}.mlir"),
    (CUTE_DSL, "pyir_class_facts/x.json"),
    (TILELANG, f"0.1.15/linux-x86_64/.staging/{HEX}_77_ab/params.json"),
    (TILELANG, f".staging_ab/{HEX}/params.json"),
    (TILELANG, f"{KERNELS}/.params.json.77_ab.tmp"),
    (TILELANG, f"{KERNELS}/.kernel_lib.77_ab.tmp.so"),
    (TILELANG, f"autotuner/{HEX}/function.pkl"),
    (TILELANG, "py-cache/add.0a1b2c3d.py"),
    (FLASHINFER_JIT, "0.7.4/90a/cached_ops/tmp/norm.lock"),
    (FLASHINFER_JIT, "0.7.4/90a/cached_ops/tmp/flashinfer_jit.ninja"),
    (FLASHINFER_JIT, "0.7.4/90a/cached_ops/.ninja_log"),
    (FLASHINFER_JIT, "0.7.4/90a/flashinfer_jit.log"),
    (FLASHINFER_JIT, "cubins/0a1b/fmha/x.cubin"),
    (FLASHINFER_JIT, f"autotune/v2/{'0a' * 8}/manifest.json"),
    (FLASHINFER_JIT, f"{CUTE}/gemm.o.tmp.77"),
    (FLASHINFER_JIT, f"{CUTE}/meta.json.tmp.77"),
    (FLASHINFER_CUBINS, "0a1b/fmha/x.cubin.00ff.tmp"),
    (FLASHINFER_WINNERS, f"v2/{'0a' * 8}/entries/.autotune_ab.tmp"),
    (FLASHINFER_WINNERS, f"v3/{'0a' * 8}/entries/{FOUND}"),
    (AUTOTUNE, f"{TUNED}/.autotune_configs.json.ab12.tmp"),
    (AUTOTUNE, "0.7.4/90a/short/autotune_configs.json"),
    (TVM_FFI, "moe_0a1b/lock"),
    (TVM_FFI, "stray.so"),
    (TORCH_EXTENSIONS, "py311_cu130/ext/lock"),
    (TORCH_EXTENSIONS, "ext/.ninja_lock"),
    (TORCH_EXTENSIONS, "stray.so"),
    (STARTUP_PLAN, "startup_plan_0123456789abcdef.json.tmp.77"),
]


@pytest.mark.parametrize(("domain", "path"), STAYS, ids=title)
def test_what_stays(domain: Domain, path: str) -> None:
    assert not domain.travels(path)


LEFT = [
    "tmp/1f2e-77/kernel.cu",
    "tmp.pid_77_ab/cute_dsl_x.mlir",
    f"0.1.15/linux-x86_64/.staging/{HEX}_77_ab/params.json",
    f"{KERNELS}/.kernel_lib.77_ab.tmp.so",
    f"{CUTE}/gemm.o.tmp.77",
    "startup_plan_0123456789abcdef.json.tmp.77",
    "0a1b/fmha/x.cubin.00ff.tmp",
]


@pytest.mark.parametrize("path", LEFT)
def test_what_dead_writers_leave_is_known_by_its_name(path: str) -> None:
    assert is_temporary(path)


@pytest.mark.parametrize("path", ["tmp/work", "tmp/a/model", "x.tmp.so.1", "k.tmp.soon", "a.tmpl", "x.staging/y"])
def test_names_that_only_resemble_temporaries(path: str) -> None:
    assert not is_temporary(path)


def fault(domain: Domain, path: str, data: bytes) -> str | None:
    return domain.check_of(path)(Content(path.rsplit("/", 1)[-1], data, len(data)))


PLAN = "startup_plan_0123456789abcdef.json"
ENTRY = f"v2/{'0a' * 8}/entries/{FOUND}"

BAD: list[tuple[Domain, str, bytes, str]] = [
    (DEEP_GEMM, f"{KERNEL}/kernel.cubin", b"", "is no ELF file"),
    (DEEP_GEMM, f"{KERNEL}/kernel.cubin", elf("a")[:-1], "is cut off"),
    (DEEP_GEMM, f"{KERNEL}/kernel.cu", b"", "is empty"),
    (CUTE_DSL, "cute_dsl_a.mlir", b"", "is empty"),
    (CUTE_DSL, "cute_dsl_a.mlir", b"ML\xef", "is cut off"),
    (CUTE_DSL, "cute_dsl_a.mlir", cute_module("a")[:-1], "has other bytes than its checksum says"),
    (CUTE_DSL, "cute_dsl_a.mlir", b"X" + cute_module("a")[1:], "has other bytes than its checksum says"),
    (TILELANG, f"{KERNELS}/kernel_lib.so", elf("a")[:-1], "is cut off"),
    (TILELANG, f"{KERNELS}/kernel.cubin", b"", "is no ELF file"),
    (TILELANG, f"{KERNELS}/params.json", b"[", "is no complete JSON"),
    (TILELANG, f"{KERNELS}/manifest.json", b'{"files": {', "is no complete JSON object"),
    (TILELANG, f"{KERNELS}/manifest.json", b"[]", "is no complete JSON object"),
    (TILELANG, f"{KERNELS}/device_kernel.cu", b"", "is empty"),
    (FLASHINFER_JIT, f"{NINJA}/norm.so", elf("a")[:-1], "is cut off"),
    (FLASHINFER_JIT, f"{NINJA}/norm.cuda.o", b"", "is no ELF file"),
    (FLASHINFER_JIT, f"{NINJA}/.ninja_log", b"", "is no log of ninja"),
    (FLASHINFER_JIT, f"{NINJA}/.ninja_deps", b"\0" * 40, "is no log of ninja"),
    (FLASHINFER_JIT, f"{NINJA}/build.ninja", b"", "is empty"),
    (FLASHINFER_JIT, f"{CUTE}/meta.json", b"{", "is no complete JSON object"),
    (FLASHINFER_CUBINS, "0a/x.cubin", b"", "is empty"),
    (FLASHINFER_CUBINS, "0a/x.cubin", elf("a")[:-1], "is cut off"),
    (FLASHINFER_WINNERS, ENTRY, WON[:-1], "is no complete JSON object"),
    (FLASHINFER_WINNERS, ENTRY, winner("another")[1], "is no entry of its name"),
    (FLASHINFER_WINNERS, ENTRY, b"{}", "is no entry of its name"),
    (AUTOTUNE, f"{TUNED}/autotune_configs.json", b"", "is no complete JSON object"),
    (AUTOTUNE, f"{TUNED}/autotune_configs.json", b'{"_metadata": ', "is no complete JSON object"),
    (AUTOTUNE, f"{TUNED}/autotune_configs.json", b"[]", "is no complete JSON object"),
    (TVM_FFI, "moe_0a/moe.so", elf("a")[:-1], "is cut off"),
    (TVM_FFI, "moe_0a/k.cubin", b"", "is no ELF file"),
    (TORCH_EXTENSIONS, "ext/ext.so", elf("a")[:-1], "is cut off"),
    (STARTUP_PLAN, PLAN, b"{", "is no complete JSON object"),
    (STARTUP_PLAN, PLAN, b'{"fingerprint": "fedcba9876543210"}', "is no plan of its name"),
]


@pytest.mark.parametrize(("domain", "path", "data", "words"), BAD, ids=title)
def test_damaged_files_are_found(domain: Domain, path: str, data: bytes, words: str) -> None:
    assert domain.travels(path)
    assert fault(domain, path, data) == words


@pytest.mark.parametrize("domain", [CUTE_DSL, FLASHINFER_WINNERS, STARTUP_PLAN], ids=title)
def test_of_a_file_that_is_not_held_whole_only_the_beginning_is_judged(domain: Domain) -> None:
    path = next(path for row, path, _unit in TRAVELS if row is domain)
    assert domain.check_of(path)(Content(path.rsplit("/", 1)[-1], b"MLxxxx", 10**9)) is None


def below(unit: str, *names: str) -> list[str]:
    return [f"{unit}/{name}" for name in names]


SOURCES = ("device_kernel.cu", "host_kernel.cu", "params.json", "manifest.json")
BINARY = f"0.1.15/cuda-binaries/{HEX}"

UNIT_FAULTS: list[tuple[Domain, list[str], str | None]] = [
    (DEEP_GEMM, below(KERNEL, "kernel.cu", "kernel.cubin"), None),
    (DEEP_GEMM, below(KERNEL, "kernel.cu"), "has no `kernel.cubin`"),
    (DEEP_GEMM, below(KERNEL, "kernel.cubin"), "has no `kernel.cu`"),
    (TILELANG, below(KERNELS, *SOURCES, "kernel_lib.so"), None),
    (TILELANG, below(KERNELS, *SOURCES, "kernel.cubin", "kernel.py"), None),
    (TILELANG, below(KERNELS, *SOURCES, "kernel.py", "launcher_lib.so"), None),
    (TILELANG, below(KERNELS, "params.json", "kernel_lib.so"), None),  # of a release without manifests
    (TILELANG, below(KERNELS, *SOURCES), "has no library"),
    (TILELANG, below(KERNELS, *SOURCES, "kernel.cubin"), "has no library"),
    (TILELANG, below(KERNELS, "kernel_lib.so", "manifest.json"), "has no `params.json`"),
    (TILELANG, below(KERNELS, *SOURCES[1:], "kernel_lib.so"), "has no source"),
    (TILELANG, below(BINARY, "kernel.cubin", "metadata.json"), None),
    (TILELANG, below(BINARY, "metadata.json"), "has no binary"),
    (FLASHINFER_JIT, below(NINJA, "build.ninja"), None),  # ninja goes on with it
    (FLASHINFER_JIT, below(CUTE, "gemm.o", "meta.json"), None),
    (FLASHINFER_JIT, below(CUTE, "gemm.o"), "has kernels and no `meta.json`"),
]


@pytest.mark.parametrize(("domain", "paths", "words"), UNIT_FAULTS)
def test_what_a_unit_may_not_lack(domain: Domain, paths: list[str], words: str | None) -> None:
    assert domain.unit_fault(domain.unit_of(paths[0]), paths) == words


def test_the_ranks_that_were_tuned() -> None:
    paths = [f"{TUNED}/autotune_configs_dp{dp}_rank{rank}.json" for dp, rank in ((0, 1), (2, 13))]
    assert AUTOTUNE.ranks_of(TUNED, paths) == {"rank_1_0", "rank_13_2"}
    assert AUTOTUNE.ranks_of(TUNED, [f"{TUNED}/autotune_configs.json"]) == set(), "one file for all of them"


# Whole trees


@pytest.mark.parametrize("domain", NEW, ids=title)
def test_a_tree_has_the_units_that_were_written_and_all_of_them_can_be_captured(domain: Domain, tmp_path: Path) -> None:
    written = trees.BUILDERS[domain.name](tmp_path)
    tree = tree_of(domain, tmp_path)
    units = units_of(domain, tree.seen)
    assert list(units) == written
    for name, paths in units.items():
        examine(tree, name, paths, StatCache({}), now_ns=NOW_NS)


@pytest.mark.parametrize("domain", NEW, ids=title)
def test_what_does_not_travel_is_what_nobody_needs(domain: Domain, tmp_path: Path) -> None:
    trees.BUILDERS[domain.name](tmp_path)
    stays = [path for path in read(tmp_path) if not domain.travels(path)]
    known = ("lock", ".log", "pyir_class_facts/x.json", ".py", "function.pkl", "flashinfer_jit.ninja")
    assert all(is_temporary(path) or path.endswith(known) for path in stays), stays


Hurt = Callable[[Path], None]


def lacks(name: str) -> Hurt:
    return lambda unit: (unit / name).unlink()


def cut(name: str) -> Hurt:
    return lambda unit: write(unit, {name: (unit / name).read_bytes()[:-1]})


TORN: dict[str, tuple[Domain, Hurt, str, bool]] = {
    "DeepGEMM without source": (DEEP_GEMM, lacks("kernel.cu"), "has no `kernel.cu`", True),
    "DeepGEMM without cubin": (DEEP_GEMM, lacks("kernel.cubin"), "has no `kernel.cubin`", True),
    "DeepGEMM with a cut cubin": (DEEP_GEMM, cut("kernel.cubin"), "is cut off", True),
    "FlashInfer stopped before it linked": (FLASHINFER_JIT, lacks(".ninja_deps"), "ninja would build again", False),
    "FlashInfer restored without its log": (FLASHINFER_JIT, lacks(".ninja_log"), "ninja would build again", False),
    "FlashInfer with a cut library": (FLASHINFER_JIT, cut("batch_prefill.so"), "is cut off", True),
    "an extension without its log": (TORCH_EXTENSIONS, lacks(".ninja_log"), "ninja would build again", False),
    "an extension with a cut library": (TORCH_EXTENSIONS, cut("nccl_allocator.so"), "is cut off", True),
    "vLLM's tuning, cut": (AUTOTUNE, cut("autotune_configs_dp0_rank1.json"), "is no complete JSON object", True),
}


@pytest.mark.parametrize("shape", TORN)
def test_a_torn_unit_is_not_captured_and_only_what_hurts_is_called_damaged(shape: str, tmp_path: Path) -> None:
    domain, hurt, words, damaged = TORN[shape]
    trees.BUILDERS[domain.name](tmp_path)
    unit = next(iter(units_of(domain, tree_of(domain, tmp_path).seen)))
    hurt(tmp_path / unit)
    tree = tree_of(domain, tmp_path)
    with pytest.raises(UnfitError, match=words) as caught:
        examine(tree, unit, units_of(domain, tree.seen)[unit], StatCache({}), now_ns=NOW_NS)
    assert caught.value.damaged == damaged


def test_rules_without_anything_built_do_not_travel(tmp_path: Path) -> None:
    write(tmp_path, {"ext/build.ninja": b"rule x", "ext/.ninja_log": b"# ninja log v6\n"})
    write(tmp_path, {"ext/.ninja_deps": b"# ninjadeps\n"})
    tree = tree_of(TORCH_EXTENSIONS, tmp_path)
    with pytest.raises(UnfitError, match="nothing beside it that was built") as caught:
        examine(tree, "ext", list(tree.seen), StatCache({}), now_ns=NOW_NS)
    assert not caught.value.damaged


# Ninja itself

RULES = """ninja_required_version = 1.3
rule compile
  command = cc -MMD -MF $out.d -fPIC -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = cc -shared $in -o $out
build {directory}/norm.o: compile {source}
build {directory}/norm.so: link {directory}/norm.o
default {directory}/norm.so
"""


def ninja(directory: Path) -> str:
    made = subprocess.run(["ninja", "-C", str(directory)], capture_output=True, text=True, check=True)
    return made.stdout


@pytest.mark.skipif(not (shutil.which("ninja") and shutil.which("cc")), reason="needs ninja and a C compiler")
def test_ninja_leaves_a_restored_module_alone_in_its_place_and_builds_it_again_elsewhere(
    tmp_path: Path, store: Store
) -> None:
    source, live, elsewhere = tmp_path / "norm.c", tmp_path / "live", tmp_path / "elsewhere"
    source.write_text("int norm(void) { return 3; }\n")
    place = live / NINJA
    write(place, {"build.ninja": RULES.format(directory=place, source=source).encode()}, old=False)
    assert "no work to do" not in ninja(place)
    assert "no work to do" in ninja(place)
    built = read(live)
    assert built.keys() == {f"{NINJA}/{name}" for name in
                            ("build.ninja", ".ninja_log", ".ninja_deps", "norm.o", "norm.so")}  # fmt: skip
    published = publish_trees(store, [tree_of(FLASHINFER_JIT, live)])
    assert published.refused == ()
    shutil.rmtree(live)
    for root in (live, elsewhere):
        assert restore_found(store, look_up(store), [Target(FLASHINFER_JIT, str(root), ours=False)]).reasons == ()
    assert read(live) == built
    assert "no work to do" in ninja(place), "exact times, logs and paths"
    moved = elsewhere / NINJA
    text = (moved / "build.ninja").read_text().replace(str(place), str(moved))
    (moved / "build.ninja").write_text(text)  # as FlashInfer writes it anew
    assert "no work to do" not in ninja(moved)


@pytest.mark.skipif(not (shutil.which("ninja") and shutil.which("cc")), reason="needs ninja and a C compiler")
def test_ninja_does_not_see_that_a_library_is_cut(tmp_path: Path) -> None:
    """The reason for which a cut library counts as damage, though ninja keeps the directory."""
    source = tmp_path / "norm.c"
    source.write_text("int norm(void) { return 3; }\n")
    place = tmp_path / NINJA
    write(place, {"build.ninja": RULES.format(directory=place, source=source).encode()}, old=False)
    ninja(place)
    library = place / "norm.so"
    status = library.stat()
    library.write_bytes(library.read_bytes()[:-100])
    os.utime(library, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "no work to do" in ninja(place)
    assert fault(FLASHINFER_JIT, f"{NINJA}/norm.so", library.read_bytes()) == "is cut off"


# Real sources of vLLM

VLLM_SOURCES = os.environ.get("CACHEMGR_VLLM_SOURCES", "")


@pytest.fixture(params=["0.26.0", "0.28.0", "0.31.0", "0.32.0", "0.33.0"])
def sources(request: pytest.FixtureRequest) -> Path:
    """The Python files of a released vLLM."""
    if not VLLM_SOURCES:
        pytest.skip("CACHEMGR_VLLM_SOURCES names no directory")
    found = Path(VLLM_SOURCES) / str(request.param) / "vllm"
    if not found.is_dir():
        pytest.skip(f"{found} is not there")
    return found


def test_vllm_keeps_a_pinned_directory_of_deep_gemm(sources: Path) -> None:
    text = (sources / "utils/deep_gemm.py").read_text()
    at = text.index('DEEP_GEMM_JIT_CACHE_ENV_NAME = "DG_JIT_CACHE_DIR"')
    rest = text[at:].split("\n", 2)
    assert rest[1].strip() == "if not os.environ.get(DEEP_GEMM_JIT_CACHE_ENV_NAME, None):"
    assert text.count("os.environ[DEEP_GEMM_JIT_CACHE_ENV_NAME]") == 1


def test_nothing_in_vllm_reads_the_file_that_is_scrubbed(sources: Path) -> None:
    naming = [path for path in sources.rglob("*.py") if '"cache_key_factors.json"' in path.read_text()]
    assert [str(path.relative_to(sources)) for path in naming] == ["compilation/backends.py"]
    text = naming[0].read_text()
    assert text.count('"cache_key_factors.json"') == 1
    assert 'if not os.path.exists(meta_path):\n                with open(meta_path, "w") as f:' in text
    assert text.count("meta_path") == 3


def test_vllm_names_its_tuning_and_its_ranks_as_we_read_them(sources: Path) -> None:
    warmup = sources / "model_executor/warmup"
    text = (warmup / "flashinfer_autotune_cache.py").read_text() + (warmup / "kernel_warmup.py").read_text()
    assert f'/ "{AUTOTUNE.subdirectory}"' in text
    assert f"envs.{AUTOTUNE.moved_by}" in text
    assert '"autotune_configs.json"' in text
    per_rank = "_dp{dp_rank}_rank{" in text
    assert per_rank == (sources.parent.name in ("0.32.0", "0.33.0"))
    for name in ("compilation/decorators.py", "compilation/backends.py"):
        assert 'f"rank_{rank}_{dp_rank}"' in (sources / name).read_text()


def test_vllm_keeps_its_plans_where_we_look(sources: Path) -> None:
    text = (sources / "v1/worker/startup_plan.py").read_text()
    assert 'envs.VLLM_CACHE_ROOT, "startup_plan", f"startup_plan_{fingerprint}.json"' in text
    assert 'tmp = f"{path}.tmp.{os.getpid()}"' in text
    assert "return digest[:16]" in text


def test_every_row_has_a_tree_in_these_tests() -> None:
    assert {domain.name for domain in TABLE} == trees.BUILDERS.keys()
    assert set(NEW) <= {*VLLM, STARTUP_PLAN}
    assert all(by_name(name) is not None for name in trees.BUILDERS)
    assert json.loads(trees.tilelang_entry("x", {"a": b"1"})["x/manifest.json"])["files"]["a"]["size"] == 1
