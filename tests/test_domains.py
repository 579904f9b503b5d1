"""Domains: what travels, what belongs together, and how a file proves that it is whole.

The shapes are those that engines were seen to write, or that their sources write (named in the domains).
"""

import json
from pathlib import Path

import pytest

from cachemgr.domains import ON_REQUEST, ROOT_VARIABLE, TABLE, TORCH_PROGRAM, VLLM, Domain, by_name
from cachemgr.domains.checks import Content
from cachemgr.domains.torch import INDUCTOR
from cachemgr.domains.triton import TRITON
from cachemgr.domains.vllm import MODELINFOS, TORCH_COMPILE
from cachemgr.examine import units_of
from tests.trees import (
    AOT_NAME,
    STAYS_IN_INDUCTOR,
    TEN_HEX,
    build,
    content_entry,
    elf,
    inductor,
    inductor_files,
    modelinfos,
    noise,
    python_module,
    torch_compile,
    tree_of,
    triton,
    triton_key,
)

AOT = f"torch_aot_compile/{AOT_NAME}"
KEY = triton_key("x")
BACKBONE = f"{TEN_HEX}/rank_0_0/backbone"
UNPACKED = f"{BACKBONE}/artifact_compile_range_1_512_subgraph_0"
HASH = "c" + "a" * 51


def title(value: object) -> str:
    """What a case is called: its domain and the end of its path."""
    if isinstance(value, Domain):
        return value.name
    return value[-50:] if isinstance(value, str) else "bytes"


TRAVELS: list[tuple[Domain, str, str]] = [
    (TRITON, f"{KEY}/add_kernel.cubin", KEY),
    (TRITON, f"{KEY}/add_kernel.json", KEY),
    (TRITON, f"{KEY}/__grp__add_kernel.json", KEY),
    (TRITON, f"{KEY}/add_kernel.autotune.json", KEY),
    (TRITON, f"{KEY}/cuda_utils.cpython-311-x86_64-linux-gnu.so", KEY),
    (TRITON, f"{KEY}/__triton_launcher.cpython-312-x86_64-linux-gnu.so", KEY),
    (TRITON, "0f" * 16 + "/old_kernel.ptx", "0f" * 16),
    (INDUCTOR, f"aa/{HASH}.py", f"aa/{HASH}"),
    (INDUCTOR, f"aa/{HASH}.main.cpp", f"aa/{HASH}"),
    (INDUCTOR, f"aa/{HASH}.main.so", f"aa/{HASH}"),
    (INDUCTOR, f"aa/{HASH}.best_config", f"aa/{HASH}"),
    (INDUCTOR, f"aa/{HASH}.kernel_perf", f"aa/{HASH}"),
    (INDUCTOR, f"fxgraph/ke/fkey/{'a' * 51}", "fxgraph/ke/fkey"),
    (INDUCTOR, f"aotautograd/akey/{'b' * 51}", "aotautograd/akey"),
    (INDUCTOR, f"aotautograd/akey/tmp{'b' * 48}", "aotautograd/akey"),  # a hash may begin so
    (INDUCTOR, f"fxgraph/ke/fkey/tmp{'b' * 48}", "fxgraph/ke/fkey"),
    (INDUCTOR, "cache/44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a", "cache/44136fa355b3678a1146"),
    (INDUCTOR, f"triton/0/{KEY}/add_kernel.cubin", f"triton/0/{KEY}"),
    (INDUCTOR, f"triton/3/{KEY}/__grp__add_kernel.json", f"triton/3/{KEY}"),
    (TORCH_COMPILE, f"{AOT}/rank_0_0/model", AOT),
    (TORCH_COMPILE, f"{AOT}/rank_11_3/model", AOT),
    (TORCH_COMPILE, f"{AOT}/inductor_cache/aa/{HASH}.py", AOT),
    (TORCH_COMPILE, f"{AOT}/inductor_cache/th/{HASH}.main.so", AOT),
    (TORCH_COMPILE, f"{AOT}/inductor_cache/triton/0/{KEY}/add_kernel.cubin", AOT),
    (TORCH_COMPILE, f"{BACKBONE}/vllm_compile_cache.py", TEN_HEX),
    (TORCH_COMPILE, f"{BACKBONE}/computation_graph.py", TEN_HEX),
    (TORCH_COMPILE, f"{BACKBONE}/transformed_code.py", TEN_HEX),
    (TORCH_COMPILE, f"{BACKBONE}/cache_key_factors.json", TEN_HEX),
    (TORCH_COMPILE, UNPACKED, TEN_HEX),
    (TORCH_COMPILE, f"{UNPACKED}/aa/{HASH}.py", TEN_HEX),
    (TORCH_COMPILE, f"{TEN_HEX}/rank_0_0/inductor_cache/aa/{HASH}.py", TEN_HEX),
    (TORCH_COMPILE, f"{TEN_HEX}/rank_0_0/triton_cache/{KEY}/add_kernel.cubin", TEN_HEX),
    (
        MODELINFOS,
        "vllm-model_executor-models-llama-LlamaForCausalLM.json",
        "vllm-model_executor-models-llama-LlamaForCausalLM.json",
    ),
]


@pytest.mark.parametrize(("domain", "path", "unit"), TRAVELS, ids=title)
def test_what_travels_and_in_which_unit(domain: Domain, path: str, unit: str) -> None:
    assert domain.travels(path)
    assert domain.unit_of(path).startswith(unit)
    assert "/" not in domain.unit_of(path).removeprefix(unit)


STAYS: list[tuple[Domain, str]] = [
    (TRITON, f"{KEY}/tmp.pid_77_0a1b/add_kernel.cubin"),
    (TRITON, f"{KEY}/add_kernel.cubin.tmp.pid_77_3"),
    (TRITON, f"{KEY}/add_kernel.lock"),
    (TRITON, f"{KEY}/add_kernel.tmp"),
    (TRITON, f"{KEY}/__pycache__/launcher.cpython-311.pyc"),
    (TRITON, "tmp.pid_9_ff/x"),
    (TRITON, "stray file"),
    *((INDUCTOR, path) for path in STAYS_IN_INDUCTOR),
    (INDUCTOR, "aa/tmpab12cd34"),
    (INDUCTOR, f"triton/0/{KEY}/tmp.pid_77_0a1b/add_kernel.cubin"),
    (INDUCTOR, f"triton/0/{KEY}/x.lock"),
    (INDUCTOR, f"aa/__pycache__/{HASH}.cpython-311.pyc"),
    (TORCH_COMPILE, f"{AOT}/rank_0_0/model.77.tmp"),
    (TORCH_COMPILE, f"{AOT}/rank_0_0/tmpab12cd34"),
    (TORCH_COMPILE, f"{AOT}/inductor_cache/locks/{HASH}.lock"),
    (TORCH_COMPILE, f"{AOT}/inductor_cache/aa/.77.140.tmp"),
    (TORCH_COMPILE, f"{AOT}/inductor_cache/aa/__pycache__/{HASH}.cpython-311.pyc"),
    (TORCH_COMPILE, f"{AOT}/inductor_cache/precompiled_headers/x.h"),
    (TORCH_COMPILE, f"{AOT}/inductor_cache/triton/0/{KEY}/tmp.pid_77_1/x.cubin"),
    (TORCH_COMPILE, f"{BACKBONE}/__pycache__/computation_graph.cpython-311.pyc"),
    (TORCH_COMPILE, f"{UNPACKED}/aa/__pycache__/{HASH}.cpython-311.pyc"),
    (TORCH_COMPILE, f"{UNPACKED}/locks/{HASH}.lock"),
    (TORCH_COMPILE, f"{TEN_HEX}/rank_0_0/triton_cache/{KEY}/tmp.pid_77_1/x.cubin"),
    (TORCH_COMPILE, "torch_aot_compile/short/rank_0_0/model"),
    (TORCH_COMPILE, "notes.txt"),
    (TORCH_COMPILE, "mine/of the user"),
    (MODELINFOS, "x.json.tmp"),
    (MODELINFOS, "deep/x.json"),
]


@pytest.mark.parametrize(("domain", "path"), STAYS, ids=title)
def test_what_stays(domain: Domain, path: str) -> None:
    assert not domain.travels(path)


@pytest.mark.parametrize(
    ("domain", "path"),
    [(domain, path) for domain, path, _unit in TRAVELS],
    ids=title,
)
def test_a_temporary_of_what_travels_stays(domain: Domain, path: str) -> None:
    assert not domain.travels(path + ".tmp")
    assert not domain.travels(path + ".lock")


def test_units_of_whole_trees(tmp_path: Path) -> None:
    triton(tmp_path / "triton")
    inductor(tmp_path / "inductor")
    torch_compile(tmp_path / "torch_compile")
    modelinfos(tmp_path / "modelinfos")
    units = {
        domain.name: sorted({domain.unit_of(path) for path in tree_of(domain, tmp_path / domain.name).seen})
        for domain in TABLE
    }
    assert units["triton"] == sorted(triton_key(seed) for seed in ("one", "two", "driver", "tuned"))
    assert units["torch_compile"] == [TEN_HEX, AOT]
    assert len(units["modelinfos"]) == 1
    assert units["inductor"] == sorted(
        {
            "aotautograd/akey" + "b" * 48,
            "cache/44136fa3",
            "fxgraph/ke/fkey" + "a" * 48,
            "qa/cqa" + "b" * 49,
            f"triton/0/{triton_key('inside')}",
            next(path.removesuffix(".py") for path in inductor_files() if path.endswith(".py")),
        }
    )


def test_engines_names_of_units() -> None:
    assert TORCH_COMPILE.entry_of(AOT) == AOT_NAME
    assert TORCH_COMPILE.entry_of(TEN_HEX) == TEN_HEX
    assert TORCH_COMPILE.entry_of("torch_aot_compile/abc") is None
    assert TORCH_COMPILE.entry_of("0123456789ABCDEF") is None
    assert TRITON.entry_of(KEY) is None


def test_the_table_is_complete_and_consistent() -> None:
    assert len({domain.name for domain in TABLE}) == len(TABLE)
    assert all(by_name(domain.name) is domain for domain in TABLE)
    assert by_name("of a newer release") is None
    assert all(domain.source for domain in TABLE)
    assert {domain.name for domain in TABLE if not domain.content_keyed} == {
        "torch_compile", "inductor", "flashinfer_autotune", "flashinfer_jit", "tvm_ffi", "torch_extensions",
        "startup_plan",
    }  # fmt: skip
    assert set(TORCH_PROGRAM) < set(VLLM)
    assert set(TABLE) == {*VLLM, *ON_REQUEST}
    assert not {*VLLM} & {*ON_REQUEST}


def test_what_ninja_judges_keeps_its_times_and_travels_between_equals_only() -> None:
    bound = [domain for domain in TABLE if domain.keeps_mtimes]
    assert {domain.name for domain in bound} == {"flashinfer_jit", "tvm_ffi", "torch_extensions"}
    assert all(domain.exact_only and domain.usual_base for domain in bound)
    assert not any(domain.exact_only and domain.content_keyed for domain in TABLE)


def test_where_domains_lie() -> None:
    """What is below vLLM's root has a directory there, so that what is a fact about one machine is never in it."""
    in_place = {domain for domain in TABLE if domain.in_place}
    assert {domain.variable for domain in in_place} == {ROOT_VARIABLE}
    assert {domain.subdirectory for domain in in_place} == {
        "torch_compile_cache", "modelinfos", "flashinfer_autotune_cache", "startup_plan",
    }  # fmt: skip
    assert not any(domain.usual_base for domain in in_place)
    pinned = [domain.variable for domain in TABLE if not domain.in_place and not domain.usual_base]
    assert len(set(pinned)) == len(pinned), "one variable cannot name two directories"
    assert {domain.name for domain in TABLE if domain.needs_compile} == {"torch_compile"}


def fault(domain: Domain, path: str, data: bytes) -> str | None:
    return domain.check_of(path)(Content(path.rsplit("/", 1)[-1], data, len(data)))


MODULE, TEXT = python_module("import torch\n\ndef call(args):\n    return [torch.empty(3)]\n")
GRAPH, BLOB = content_entry("fxgraph/ke/fkey", b"\x80\x05 a graph.")
ENTRY, AOT_BLOB = content_entry("aotautograd/akey", b"\x80\x05 an entry.")

GOOD: list[tuple[Domain, str, bytes]] = [
    (TRITON, f"{KEY}/a.cubin", elf("a")),
    (TRITON, f"{KEY}/a.so", elf("b")),
    (TRITON, f"{KEY}/a.hsaco", elf("c")),
    (TRITON, f"{KEY}/a.json", b'{"num_warps": 4}'),
    (TRITON, f"{KEY}/a.ptx", b".version"),
    (INDUCTOR, MODULE, TEXT),
    (INDUCTOR, MODULE, b"\n\n" + TEXT + b"\n  \n"),  # the name is that of the stripped text
    (INDUCTOR, f"aa/{HASH}.py", b"x = 1\n"),  # autotuning templates mix more into the name
    (INDUCTOR, f"aa/{HASH}.py", b"PATTERN = '\\d+'\n"),
    (INDUCTOR, f"aa/{HASH}.main.so", elf("d")),
    (INDUCTOR, f"aa/{HASH}.best_config", b'{"XBLOCK": 64}'),
    (INDUCTOR, f"aa/{HASH}.main.cpp", b"// kernel"),
    (INDUCTOR, GRAPH, BLOB),
    (INDUCTOR, ENTRY, AOT_BLOB),
    (INDUCTOR, "cache/abc", b"{}"),
    (TORCH_COMPILE, f"{AOT}/rank_0_0/model", b"\x80\x05 pickle ."),
    (TORCH_COMPILE, f"{AOT}/inductor_cache/{MODULE}", TEXT),
    (TORCH_COMPILE, f"{AOT}/inductor_cache/{GRAPH}", BLOB),
    (TORCH_COMPILE, f"{BACKBONE}/computation_graph.py", b"def forward(self, L_x_: Sym(s0)): ...  # no real <python>\n"),
    (TORCH_COMPILE, f"{BACKBONE}/cache_key_factors.json", b"{}"),
    (TORCH_COMPILE, UNPACKED, b"CRC"),
    (TORCH_COMPILE, f"{UNPACKED}/{MODULE}", TEXT),
    (TORCH_COMPILE, f"{UNPACKED}/triton/0/{KEY}/a.cubin", elf("e")),
    (MODELINFOS, "a.json", b"{}"),
]


@pytest.mark.parametrize(("domain", "path", "data"), GOOD, ids=title)
def test_good_files_pass_and_empty_ones_do_not(domain: Domain, path: str, data: bytes) -> None:
    assert fault(domain, path, data) is None
    assert fault(domain, path, b"") is not None


BAD: list[tuple[Domain, str, bytes, str]] = [
    (TRITON, f"{KEY}/a.cubin", elf("a")[:-1], "is cut off"),
    (TRITON, f"{KEY}/a.cubin", elf("a")[:100], "is cut off"),
    (TRITON, f"{KEY}/a.cubin", elf("a")[:40], "is no ELF file"),
    (TRITON, f"{KEY}/a.so", noise("so", 2000), "is no ELF file"),
    (TRITON, f"{KEY}/a.json", b'{"num_warps": 4', "is no complete JSON"),
    (TRITON, f"{KEY}/__grp__a.json", b'{"child_paths": {"a.cu', "is no complete JSON"),
    (TRITON, f"{KEY}/a.json", b"\xff\xfe\x00", "is no complete JSON"),
    (TRITON, f"{KEY}/a.json", b"[" * 100_000, "is no complete JSON"),
    (INDUCTOR, MODULE, TEXT[:-10], "is no complete Python file"),
    (INDUCTOR, MODULE, b"\0" * len(TEXT), "is no complete Python file"),
    (INDUCTOR, MODULE, b"  \n\n", "is empty"),
    (INDUCTOR, f"aa/{HASH}.main.so", elf("d")[:-1], "is cut off"),
    (INDUCTOR, f"aa/{HASH}.best_config", b'{"XBLOCK"', "is no complete JSON"),
    (INDUCTOR, GRAPH, BLOB[:-1], "has other bytes than its name says"),
    (INDUCTOR, GRAPH, BLOB + b"x", "has other bytes than its name says"),
    (INDUCTOR, ENTRY, AOT_BLOB[:-1], "has other bytes than its name says"),
    (INDUCTOR, "cache/abc", b"{", "is no complete JSON"),
    (INDUCTOR, f"triton/0/{KEY}/a.cubin", elf("a")[:-1], "is cut off"),
    (TORCH_COMPILE, f"{AOT}/rank_0_0/model", b"\x80\x05 pickle", "is cut off"),
    (TORCH_COMPILE, f"{AOT}/rank_0_0/model", b"", "is empty"),
    (TORCH_COMPILE, f"{AOT}/inductor_cache/{MODULE}", TEXT[:-10], "is no complete Python file"),
    (TORCH_COMPILE, f"{AOT}/inductor_cache/{GRAPH}", BLOB[:-1], "has other bytes than its name says"),
    (TORCH_COMPILE, f"{AOT}/inductor_cache/triton/0/{KEY}/a.so", elf("a")[:-1], "is cut off"),
    (TORCH_COMPILE, f"{BACKBONE}/cache_key_factors.json", b"{", "is no complete JSON"),
    (TORCH_COMPILE, f"{UNPACKED}/{MODULE}", TEXT[:-10], "is no complete Python file"),
    (TORCH_COMPILE, f"{UNPACKED}/triton/0/{KEY}/a.cubin", elf("e")[:-1], "is cut off"),
    (TORCH_COMPILE, f"{TEN_HEX}/rank_0_0/triton_cache/{KEY}/a.so", elf("e")[:-1], "is cut off"),
    (MODELINFOS, "a.json", b"{", "is no complete JSON"),
]


@pytest.mark.parametrize(("domain", "path", "data", "words"), BAD, ids=title)
def test_damaged_files_are_found(domain: Domain, path: str, data: bytes, words: str) -> None:
    assert fault(domain, path, data) == words


def test_every_cut_of_an_object_is_found() -> None:
    data = elf("whole", 700)
    assert [end for end in range(len(data) + 1) if fault(TRITON, f"{KEY}/a.cubin", data[:end]) is None] == [len(data)]


def test_a_32_bit_and_a_big_endian_object_are_understood() -> None:
    head = b"\x7fELF\x01\x02\x01" + b"\0" * 9 + b"\0" * 16 + (200).to_bytes(4, "big") + b"\0" * 10
    head += (40).to_bytes(2, "big") + (3).to_bytes(2, "big") + b"\0" * 2
    data = head.ljust(320, b"\0")
    assert len(head) == 52
    assert fault(TRITON, f"{KEY}/a.so", data) is None
    assert fault(TRITON, f"{KEY}/a.so", data[:-1]) == "is cut off"


def test_of_a_file_that_is_not_held_whole_only_the_beginning_is_judged() -> None:
    assert INDUCTOR.check_of(GRAPH)(Content("x", b"abc", 10**9)) is None
    assert INDUCTOR.check_of(MODULE)(Content("x.py", b"def (", 10**9)) is None
    assert TRITON.check_of("k/a.json")(Content("a.json", b"{", 10**9)) is None
    assert TRITON.check_of("k/a.so")(Content("a.so", elf("a", 4000)[:1000], 4000)) is None
    assert TRITON.check_of("k/a.so")(Content("a.so", elf("a", 4000)[:1000], 3999)) == "is cut off"
    assert TORCH_COMPILE.check_of(f"{AOT}/rank_0_0/model")(Content("model", b"\x80", 10**9)) is None


GROUP = ["k/__grp__add.json", "k/add.json", "k/add.source", "k/add.ptx"]

UNIT_FAULTS: list[tuple[Domain, list[str], str | None]] = [
    (TRITON, [*GROUP, "k/add.cubin"], None),
    (TRITON, [*GROUP, "k/add.hsaco"], None),
    (TRITON, [*GROUP, "k/add.spv"], None),
    (TRITON, GROUP, "kernel `add` has no binary"),
    (TRITON, [*GROUP, "k/other.cubin"], "kernel `add` has no binary"),
    (TRITON, ["k/add.cubin", "k/add.json"], "has a binary and no group file"),
    (TRITON, ["k/cuda_utils.so"], None),
    (TRITON, ["k/add.autotune.json"], None),
    (INDUCTOR, ["aa/cx.py"], None),
    (INDUCTOR, [f"triton/0/{path}" for path in GROUP], "kernel `add` has no binary"),
    (TORCH_COMPILE, [f"{AOT}/rank_0_0/model"], None),
    (TORCH_COMPILE, [f"{AOT}/inductor_cache/triton/0/{path}" for path in GROUP], "kernel `add` has no binary"),
    (TORCH_COMPILE, [f"{AOT}/inductor_cache/triton/0/{path}" for path in (*GROUP, "k/add.cubin")], None),
    (
        TORCH_COMPILE,
        [
            *(f"{AOT}/inductor_cache/triton/0/{path}" for path in (*GROUP, "k/add.cubin")),
            *(f"{AOT}/inductor_cache/triton/1/{path}" for path in GROUP),
        ],
        "kernel `add` has no binary",
    ),
    (TORCH_COMPILE, [f"{BACKBONE}/computation_graph.py"], None),
    (TORCH_COMPILE, [UNPACKED, f"{BACKBONE}/vllm_compile_cache.py"], None),
    (TORCH_COMPILE, [UNPACKED], f"`{BACKBONE}` has artifacts and no index"),
    (TORCH_COMPILE, [f"{UNPACKED}/aa/cx.py", f"{BACKBONE}/vllm_compile_cache.py"], None),
    (TORCH_COMPILE, [f"{UNPACKED}/aa/cx.py"], f"`{BACKBONE}` has artifacts and no index"),
    (
        TORCH_COMPILE,
        [UNPACKED, UNPACKED.replace("rank_0_0", "rank_1_0"), f"{BACKBONE}/vllm_compile_cache.py"],
        f"`{BACKBONE.replace('rank_0_0', 'rank_1_0')}` has artifacts and no index",
    ),
    (TORCH_COMPILE, [f"{AOT}/rank_0_0/model", f"{AOT}/rank_1_0/model"], None),
    (TORCH_COMPILE, [f"{AOT}/rank_0_0/model", f"{AOT}/rank_1_0/notes"], "`rank_1_0` has no `model`"),
    (TORCH_COMPILE, [f"{AOT}/rank_0_0/model", f"{AOT}/rank_0_0_dev1/x"], "`rank_0_0_dev1` has no `model`"),
    (TORCH_COMPILE, [f"{AOT}/inductor_cache/aa/cx.py"], None),  # a CPU start has nothing else of use
    (TORCH_COMPILE, [f"{TEN_HEX}/rank_0_0/backbone/computation_graph.py"], None),
    (MODELINFOS, ["a.json"], None),
]


@pytest.mark.parametrize(("domain", "paths", "words"), UNIT_FAULTS)
def test_what_a_unit_may_not_lack(domain: Domain, paths: list[str], words: str | None) -> None:
    assert domain.unit_fault(domain.unit_of(paths[0]), paths) == words


RANKS: list[tuple[list[str], set[str]]] = [
    ([f"{AOT}/rank_0_0/model", f"{AOT}/rank_1_0/model", f"{AOT}/inductor_cache/aa/cx.py"], {"rank_0_0", "rank_1_0"}),
    ([f"{AOT}/rank_0_0_dev0/model", f"{AOT}/rank_0_0_dev1/model"], {"rank_0_0"}),
    ([f"{AOT}/inductor_cache/rank_0_0/x"], set()),
    ([f"{AOT}/rank_0/model", f"{AOT}/rank_0_0_x/model"], set()),
    (
        [f"{TEN_HEX}/rank_11_3/backbone/vllm_compile_cache.py", f"{TEN_HEX}/rank_0_3/eagle_head/x"],
        {"rank_11_3", "rank_0_3"},
    ),
    ([f"{TEN_HEX}/rank_0_0"], set()),
]


@pytest.mark.parametrize(("paths", "ranks"), RANKS)
def test_the_ranks_of_a_unit(paths: list[str], ranks: set[str]) -> None:
    assert TORCH_COMPILE.ranks_of(TORCH_COMPILE.unit_of(paths[0]), paths) == ranks
    assert TRITON.ranks_of(KEY, paths) == set()


RELOCATED = [
    (TRITON, f"{KEY}/__grp__add.json"),
    (INDUCTOR, f"triton/0/{KEY}/__grp__add.json"),
    (TORCH_COMPILE, f"{AOT}/inductor_cache/triton/0/{KEY}/__grp__add.json"),
    (TORCH_COMPILE, f"{BACKBONE}/vllm_compile_cache.py"),
    (TORCH_COMPILE, f"{UNPACKED}/triton/0/{KEY}/__grp__add.json"),
    (TORCH_COMPILE, f"{TEN_HEX}/rank_0_0/triton_cache/{KEY}/__grp__add.json"),
]


SCRUBBED = ((TORCH_COMPILE, f"{BACKBONE}/cache_key_factors.json"), (INDUCTOR, f"aa/{HASH}.best_config"))


def test_only_winners_of_tunings_are_choices() -> None:
    winners = [
        f"aa/{HASH}.best_config",
        f"{AOT}/inductor_cache/aa/{HASH}.best_config",
        f"{UNPACKED}/aa/{HASH}.best_config",
    ]
    assert [INDUCTOR.chooses(winners[0]), *map(TORCH_COMPILE.chooses, winners[1:])] == [True] * 3
    others = [(domain, path) for domain, path, _unit in TRAVELS if not path.endswith(".best_config")]
    assert not [path for domain, path in others if domain.chooses(path)]


@pytest.mark.parametrize(("domain", "path"), RELOCATED)
def test_files_that_name_their_directory_are_relocated(domain: Domain, path: str) -> None:
    assert domain.travels(path)
    assert domain.relocation_of(path) is not None


@pytest.mark.parametrize(
    ("domain", "path"),
    [(domain, path) for domain, path, _unit in TRAVELS if (domain, path) not in (*RELOCATED, *SCRUBBED)],
    ids=title,
)
def test_other_files_are_stored_as_they_are(domain: Domain, path: str) -> None:
    relocated = "__grp__" in path or path.endswith("vllm_compile_cache.py")
    assert (domain.relocation_of(path) is not None) == relocated


def test_the_trees_of_these_tests_are_whole(tmp_path: Path) -> None:
    """Or every other test that uses them would prove nothing."""
    build(tmp_path)
    for domain in TABLE:
        tree = tree_of(domain, tmp_path / domain.name)
        assert tree.seen
        faults = {path: fault(domain, path, Path(tree.directory, path).read_bytes()) for path in tree.seen}
        assert faults == dict.fromkeys(tree.seen)
        units = units_of(domain, tree.seen)
        assert {name: domain.unit_fault(name, paths) for name, paths in units.items()} == dict.fromkeys(units)
    group = next((tmp_path / "triton").rglob("__grp__*.json"))
    assert set(json.loads(group.read_bytes())["child_paths"]) < {path.name for path in group.parent.iterdir()}
