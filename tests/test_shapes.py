"""Every shape that public reports show of a live tree or a local store, one row each: found, said, left out, harmless.

The rows follow "Shapes for fixtures" of the failure log: torn vLLM, Inductor, Triton and modelinfos trees, what dead
writers leave, files whose loading would run code (`test_loading.py`), and symbolic links that lead elsewhere
(`test_links.py`).
"""

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from cachemgr import heal, live, stage
from cachemgr.domains import TABLE, TORCH_PROGRAM, Domain, Target, by_name
from cachemgr.domains.jit import TORCH_EXTENSIONS
from cachemgr.domains.leftovers import ORPHANED_SECONDS
from cachemgr.examine import UnfitError, examine, never, seen_in, units_of
from cachemgr.heal import Ailing
from cachemgr.key import derive
from cachemgr.observe import STAGE_PREFIX, scan
from cachemgr.prepare import Preparation
from cachemgr.statcache import StatCache
from cachemgr.store import Store
from cachemgr.store.captures import captures
from cachemgr.store.local import LocalStore
from cachemgr.store.removal import plan_removal, remove
from tests import trees
from tests.stores import Wrapper

pytestmark = pytest.mark.slow

PYTHON = sys.executable
ROOT = Path(__file__).parent.parent
NOW = trees.NOW_NS / 1e9
AOT = f"torch_aot_compile/{trees.AOT_NAME}"
INNER = f"{AOT}/inductor_cache"
BACKBONE = f"{trees.TEN_HEX}/rank_0_0/backbone"
ARTIFACTS = tuple(f"{BACKBONE}/artifact_compile_range_1_16384_subgraph_{number}" for number in range(2))
INDEX = f"{BACKBONE}/vllm_compile_cache.py"
KERNEL = trees.triton_key("one")
DRIVER = trees.triton_key("driver")
MODULE = trees.python_module("# AOT ID: ['0_inference']\nimport torch\nassert 'call '\n\n\n")[0]
TUNED = MODULE.removesuffix(".py") + ".best_config"
GRAPH = trees.content_entry("fxgraph/ke/fkey" + "a" * 48, b"\x80\x05 graph .")[0]
GRAPH_UNIT = GRAPH.rpartition("/")[0]
ENTRY = trees.content_entry("aotautograd/akey" + "b" * 48, b"\x80\x05 aot .")[0]
HOST_KERNEL = "qa/cqa" + "b" * 49
MODELINFO = "vllm-model_executor-models-llama-LlamaForCausalLM.json"
DIED = "was left by a writer that died"

Hurt = Callable[[Path], None]


def cut(path: str, left: float = 0.5) -> Hurt:
    """Keep only a share of a file."""

    def hurt(directory: Path) -> None:
        data = (directory / path).read_bytes()
        trees.write(directory, {path: data[: int(len(data) * left)]})

    return hurt


def becomes(path: str, data: bytes) -> Hurt:
    """Give a file other bytes."""
    return lambda directory: trees.write(directory, {path: data})


def lacks(path: str) -> Hurt:
    """Take a file or a directory away."""

    def hurt(directory: Path) -> None:
        gone = directory / path
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()

    return hurt


TORN: dict[str, tuple[str, Hurt, str, str]] = {
    "vLLM: empty model": ("torch_compile", becomes(f"{AOT}/rank_0_0/model", b""), AOT, "is empty"),
    "vLLM: cut model": ("torch_compile", becomes(f"{AOT}/rank_1_0/model", b"\x80\x05cut"), AOT, "is cut off"),
    "vLLM: cut index": ("torch_compile", cut(INDEX), trees.TEN_HEX, "is no complete Python literal"),
    "vLLM: empty index": ("torch_compile", becomes(INDEX, b""), trees.TEN_HEX, "is empty"),
    "vLLM: index of zeros": ("torch_compile", becomes(INDEX, b"\0" * 90), trees.TEN_HEX, "is no complete Python lit"),
    "vLLM: index names a missing artifact": ("torch_compile", lacks(ARTIFACTS[0]), trees.TEN_HEX, "is not beside it"),
    "vLLM: index names a missing directory": ("torch_compile", lacks(ARTIFACTS[1]), trees.TEN_HEX, "is not beside it"),
    "vLLM: artifacts without an index": ("torch_compile", lacks(INDEX), trees.TEN_HEX, "has artifacts and no index"),
    "vLLM: empty artifact": ("torch_compile", becomes(ARTIFACTS[0], b""), trees.TEN_HEX, "is empty"),
    "vLLM: cut factors": (
        "torch_compile",
        cut(f"{BACKBONE}/cache_key_factors.json"),
        trees.TEN_HEX,
        "no complete JSON",
    ),
    "vLLM: cut wrapper in an unpacked artifact": (
        "torch_compile",
        becomes(f"{ARTIFACTS[1]}/bb/cbb{'d' * 48}.py", b"def broken(:\n"),
        trees.TEN_HEX,
        "is no complete Python file",
    ),
    "vLLM: kernel without binary in an unpacked artifact": (
        "torch_compile",
        lacks(f"{ARTIFACTS[1]}/triton/0/{trees.triton_key('unpacked')}/add_kernel.cubin"),
        trees.TEN_HEX,
        "has no binary",
    ),
    "vLLM: cut object in inductor_cache": ("torch_compile", cut(f"{INNER}/{HOST_KERNEL}.main.so"), AOT, "is cut off"),
    "vLLM: wrong bytes in inductor_cache": (
        "torch_compile",
        becomes(f"{INNER}/{ENTRY}x", b"x"),
        AOT,
        "has other bytes",
    ),
    "old vLLM: cut wrapper below rank": (
        "torch_compile",
        becomes(f"0123456789/rank_0_0/inductor_cache/ab/cab{'e' * 48}.py", b"x = (\n"),
        "0123456789",
        "is no complete Python file",
    ),
    "old vLLM: cut wrapper below the hash": (
        "torch_compile",
        becomes(f"0123456789/inductor_cache/ab/{'e' * 51}.py", b"x = (\n"),
        "0123456789",
        "is no complete Python file",
    ),
    "old vLLM: empty library in triton_cache": (
        "torch_compile",
        becomes(f"0123456789/rank_0_0/triton_cache/{'C' * 52}/cuda_utils.so", b""),
        "0123456789",
        "is no ELF file",
    ),
    "Inductor: cut .best_config": ("inductor", cut(TUNED), MODULE.removesuffix(".py"), "is no complete JSON"),
    "Inductor: cut wrapper": ("inductor", becomes(MODULE, b"x = (\n"), MODULE[:-3], "is no complete Python file"),
    "Inductor: empty wrapper": ("inductor", becomes(MODULE, b""), MODULE[:-3], "is empty"),
    "Inductor: FX graph of another name": ("inductor", becomes(GRAPH, b"\x80\x05."), GRAPH_UNIT, "has other bytes"),
    "Inductor: AOTAutograd entry cut": ("inductor", cut(ENTRY), ENTRY.rpartition("/")[0], "has other bytes"),
    "Inductor: AOTAutograd entry emptied": ("inductor", becomes(ENTRY, b""), ENTRY.rpartition("/")[0], "other bytes"),
    "Inductor: cut host kernel": ("inductor", cut(f"{HOST_KERNEL}.main.so"), HOST_KERNEL, "is cut off"),
    "Inductor: empty source": ("inductor", becomes(f"{HOST_KERNEL}.main.cpp", b""), HOST_KERNEL, "is empty"),
    "Inductor: cut tuning results": ("inductor", cut("cache/44136fa3"), "cache/44136fa3", "is no complete JSON"),
    "Inductor: kernel inside without binary": (
        "inductor",
        lacks(f"triton/0/{trees.triton_key('inside')}/add_kernel.cubin"),
        f"triton/0/{trees.triton_key('inside')}",
        "has no binary",
    ),
    "Triton: cut group": ("triton", cut(f"{KERNEL}/__grp__add_kernel.json"), KERNEL, "is no complete JSON"),
    "Triton: empty group": ("triton", becomes(f"{KERNEL}/__grp__add_kernel.json", b""), KERNEL, "is no complete JSON"),
    "Triton: no group": ("triton", lacks(f"{KERNEL}/__grp__add_kernel.json"), KERNEL, "binary and no group file"),
    "Triton: missing cubin": ("triton", lacks(f"{KERNEL}/add_kernel.cubin"), KERNEL, "has no binary"),
    "Triton: missing stage": ("triton", lacks(f"{KERNEL}/add_kernel.ttir"), KERNEL, "is not beside it"),
    "Triton: cut cubin": ("triton", cut(f"{KERNEL}/add_kernel.cubin"), KERNEL, "is cut off"),
    "Triton: cut metadata": ("triton", cut(f"{KERNEL}/add_kernel.json"), KERNEL, "is no complete JSON"),
    "Triton: empty ptx": ("triton", becomes(f"{KERNEL}/add_kernel.ptx", b""), KERNEL, "is empty"),
    "Triton: cut driver module": (
        "triton",
        cut(f"{DRIVER}/cuda_utils.cpython-311-x86_64-linux-gnu.so"),
        DRIVER,
        "is cut off",
    ),
    "Triton: old directory name, cut group": (
        "triton",
        becomes(f"{'ab' * 16}/__grp__add.json", b'{"child_paths": {'),
        "ab" * 16,
        "is no complete JSON",
    ),
    "modelinfos: cut": ("modelinfos", cut(MODELINFO), MODELINFO, "is no complete JSON"),
    "modelinfos: empty": ("modelinfos", becomes(MODELINFO, b""), MODELINFO, "is no complete JSON"),
}


def target(name: str, root: Path, *, ours: bool = True) -> Target:
    domain = by_name(name)
    assert domain is not None
    return Target(domain, str(root / name), ours)


def look(root: Path, *, ours: bool = True, now_ns: int = trees.NOW_NS) -> list[Ailing]:
    return heal.look(trees.targets(root, ours=ours), StatCache({}), now_ns=now_ns)


def damage(found: list[Ailing]) -> list[tuple[str, str, str]]:
    """Domain, unit and reason of what is damaged; left-overs are another matter."""
    return [
        (each.target.domain.name, fault.unit, fault.reason)
        for each in found
        for fault in each.faults
        if fault.reason != DIED
    ]


def travelling(root: Path) -> dict[str, tuple[str, str]]:
    """Every file below `root` that travels: its path, with its domain and unit."""
    return {
        f"{domain.name}/{path}": (domain.name, domain.unit_of(path))
        for domain in TABLE
        for path in scan(str(root / domain.name), domain.travels)
    }


def restored(store: Store, root: Path) -> dict[str, bytes]:
    found = trees.look_up(store)
    assert found.result == "exact"
    assert trees.restore_found(store, found, trees.targets(root)).reasons == ()
    return trees.read(root)


# Torn units.


@pytest.mark.parametrize("shape", TORN)
def test_a_torn_unit_is_found_left_out_of_captures_and_poisons_nothing(shape: str, tmp_path: Path) -> None:
    domain, hurt, unit, said = TORN[shape]
    room, store = tmp_path / "room", LocalStore(tmp_path / "store")
    trees.build(room)
    hurt(room / domain)
    ((where, what, why),) = damage(look(room))
    assert (where, what) == (domain, unit)
    assert said in why
    published = trees.publish_trees(store, trees.live(room))
    assert [(refused.domain, refused.unit) for refused in published.refused] == [(domain, unit)]
    assert said in published.refused[0].reason
    wanted = {path for path, owner in travelling(room).items() if owner != (domain, unit)}
    assert restored(store, tmp_path / "other").keys() == wanted


@pytest.mark.parametrize("shape", TORN)
def test_a_torn_unit_is_set_aside_and_its_neighbours_stay_as_they_are(shape: str, tmp_path: Path) -> None:
    domain, hurt, unit, said = TORN[shape]
    trees.build(tmp_path)
    hurt(tmp_path / domain)
    torn = {path for path, owner in travelling(tmp_path).items() if owner == (domain, unit)}
    before = trees.state(tmp_path)
    found = look(tmp_path, ours=False)
    (line,) = [line for each in found for line in heal.set_aside(each, "launch-9")]
    assert line.startswith(f"set aside {domain} {unit}: ")
    assert said in line
    assert not torn & trees.read(tmp_path).keys()
    aside = trees.read(tmp_path / domain / f"{STAGE_PREFIX}aside-launch-9")
    assert {f"{domain}/{path}" for path in aside} == torn, "kept as evidence"
    after = trees.state(tmp_path)
    files = {path for path, row in before.items() if row[3]} - torn
    assert {path: after[path] for path in files} == {path: before[path] for path in files}
    assert damage(look(tmp_path)) == []


@pytest.mark.parametrize("shape", TORN)
def test_examining_a_torn_unit_says_that_it_is_damaged(shape: str, tmp_path: Path) -> None:
    domain, hurt, unit, said = TORN[shape]
    trees.build(tmp_path)
    hurt(tmp_path / domain)
    place = target(domain, tmp_path)
    tree = trees.tree_of(place.domain, place.directory)
    with pytest.raises(UnfitError, match=said) as caught:
        examine(tree, unit, units_of(place.domain, tree.seen)[unit], StatCache({}), now_ns=trees.NOW_NS)
    assert caught.value.damaged


def test_whole_trees_of_every_layout_are_healthy_and_travel(tmp_path: Path) -> None:
    room, store = tmp_path / "room", LocalStore(tmp_path / "store")
    trees.build(room)
    wrapper, text = trees.python_module("assert 'old'\n")
    old = {
        f"0123456789/rank_0_0/inductor_cache/{wrapper}": text,
        f"0123456789/rank_0_0/triton_cache/{'C' * 52}/cuda_utils.so": trees.elf("old"),
        f"abcdef0123/inductor_cache/{wrapper}": text,
        "abcdef0123/rank_0_0_dev1/backbone/computation_graph.py": b"class GraphModule: ...\n",
    }
    trees.write(room / "torch_compile", old)
    trees.triton_kernel(room / "triton", "old")
    (room / "triton" / trees.triton_key("old")).rename(room / "triton" / ("cd" * 16))
    assert damage(look(room)) == []
    assert trees.publish_trees(store, trees.live(room)).refused == ()
    there = restored(store, tmp_path / "other")
    assert there.keys() == travelling(room).keys()
    assert {path for path in there if path.startswith("torch_compile/")} >= {f"torch_compile/{path}" for path in old}
    assert damage(look(tmp_path / "other")) == []


@pytest.mark.parametrize("torn", [0, 41, 99])
def test_one_torn_unit_of_a_hundred_leaves_ninety_nine(torn: int, tmp_path: Path) -> None:
    room, store = tmp_path / "room", LocalStore(tmp_path / "store")
    keys = [trees.triton_kernel(room / "triton", f"kernel {number}") for number in range(100)]
    cut(f"{keys[torn]}/add_kernel.cubin")(room / "triton")
    (ailing,) = look(room)
    assert [fault.unit for fault in ailing.faults] == [keys[torn]]
    published = trees.publish_trees(store, trees.live(room))
    assert [refused.unit for refused in published.refused] == [keys[torn]]
    assert published.files == 99 * 8
    there = restored(store, tmp_path / "other")
    assert {path.split("/")[1] for path in there} == set(keys) - {keys[torn]}
    heal.set_aside(ailing, "launch-9")
    assert look(room) == []
    assert restored(store, room).keys() >= there.keys(), "what was whole is in place"


def test_what_an_engine_compares_with_digests_itself_is_not_read_before_a_start(tmp_path: Path) -> None:
    paths = trees.flashinfer_cubins(tmp_path / "flashinfer_cubins")
    cubin = next(path for path in paths if path.endswith(".cubin"))
    (tmp_path / "flashinfer_cubins" / cubin).write_bytes(b"\x7fELF cut")
    os.utime(tmp_path / "flashinfer_cubins" / cubin, ns=(0, trees.NOW_NS))
    assert look(tmp_path) == []
    assert (tmp_path / "flashinfer_cubins" / cubin).stat().st_atime_ns == 0


def test_an_artifact_that_vanishes_after_its_index_was_remembered_is_found(tmp_path: Path) -> None:
    trees.torch_compile(tmp_path / "torch_compile")
    remembered = StatCache({})
    places = [target("torch_compile", tmp_path, ours=False)]
    assert heal.look(places, remembered, now_ns=trees.NOW_NS) == []
    lacks(ARTIFACTS[0])(tmp_path / "torch_compile")
    ((_where, what, _why),) = damage(heal.look(places, remembered, now_ns=trees.NOW_NS))
    assert what == trees.TEN_HEX


def test_an_artifact_that_no_index_names_is_no_damage_and_travels(tmp_path: Path) -> None:
    # The index may grow under one name, so there may be more artifacts than it has; the engine asks the index only.
    room, store = tmp_path / "room", LocalStore(tmp_path / "store")
    trees.torch_compile(room / "torch_compile")
    more = f"{BACKBONE}/artifact_compile_range_16385_32768_subgraph_7"
    trees.write(room / "torch_compile", {more: b"CRC0 of a later size"})
    assert damage(look(room)) == []
    assert trees.publish_trees(store, trees.live(room)).refused == ()
    there = restored(store, tmp_path / "other")
    assert there[f"torch_compile/{more}"] == b"CRC0 of a later size"
    assert more.rpartition("/")[2].encode() not in there[f"torch_compile/{INDEX}"]


FOREIGN: dict[str, str] = {
    "vLLM's dummy": "torch_compile/dummy_cache/x.py",
    "no hash of vLLM's": "torch_compile/nothex/model",
    "an artifact of JAX without its time": "torch_compile/jit_step-0a1b2c-cache",
    "a time of JAX without its artifact": "triton/jit_step-0a1b2c-atime",
    "Neuron": "torch_compile/neuronxcc-2.21.0+0a1b/MODULE_123+0a1b/model.neff",
    "a stamp of versions": "torch_compile/.logos_compile_cache_stamp.json",
    "a stamp below a model": "torch_compile/llama/cache_meta.json",
    "DeepEP": "deep_gemm/kernel.combine.00ff/kernel.cu",
    "a lock of AITER": "torch_extensions/lock_module_mha",
    "a lock of AITER's build": "torch_extensions/module_mha/build/lock",
    "a lock of ninja": "torch_extensions/module_mha/build/.ninja_lock",
    "a lock of tvm-ffi": "tvm_ffi/module_0a1b/lock",
    "a lock of FlashInfer": "flashinfer_jit/0.7.4/90a/cached_ops/tmp/norm.lock",
    "a file of nobody": "triton/x",
}


@pytest.mark.parametrize("shape", FOREIGN)
def test_what_no_layout_has_stays_as_it_is_and_does_not_travel(shape: str, tmp_path: Path) -> None:
    room, store = tmp_path / "room", LocalStore(tmp_path / "store")
    trees.write(room, {FOREIGN[shape]: b""})
    before = trees.state(room)
    assert look(room, ours=False) == []
    assert look(room) == []
    assert trees.publish_trees(store, trees.live(room)).capture is None
    assert trees.state(room) == before


@pytest.mark.parametrize("domain", [each for each in TABLE if not each.in_place], ids=lambda domain: domain.name)
def test_a_home_that_somebody_chose_for_a_cache_stays_as_it_is(domain: Domain, tmp_path: Path) -> None:
    trees.write_home(tmp_path)
    before = trees.state(tmp_path)
    place = Target(domain, str(tmp_path), ours=False)
    assert heal.look([place], StatCache({}), now_ns=trees.NOW_NS) == []
    assert seen_in(place) == {}
    assert trees.state(tmp_path) == before


def test_every_unit_of_an_engine_is_known_in_a_directory_that_somebody_chose(tmp_path: Path) -> None:
    trees.build(tmp_path)
    for place in trees.targets(tmp_path, ours=False):
        assert seen_in(place).keys() == scan(place.directory, place.domain.travels).keys(), place.domain.name


def test_a_cache_that_was_moved_is_healthy_though_its_paths_are_stale(tmp_path: Path) -> None:
    trees.torch_compile(tmp_path / "torch_compile", named_in="/somewhere/else")
    trees.triton(tmp_path / "triton", named_in="/somewhere/else")
    assert damage(look(tmp_path)) == []


# What writers leave behind.

LEFT_OVERS = [
    f"torch_compile/{AOT}/rank_0_0/model.4242.tmp",
    "inductor/qa/.4242.140.tmp",
    f"triton/{KERNEL}/tmp.pid_4242_ab-cd/add_kernel.ptx",
    "triton/tmp.pid_4242_ff/add_kernel.ptx",
    f"triton/{KERNEL}/add_kernel.ptx.tmp.pid_4242_3",
    "inductor/.staging_4242/kernel.cu",
    "triton/.staging_4242/kernel.cu",
]


@pytest.mark.parametrize("path", LEFT_OVERS)
def test_a_left_over_stays_while_its_writer_may_live_goes_when_it_is_old_and_never_travels(
    path: str, tmp_path: Path
) -> None:
    room, store = tmp_path / "room", LocalStore(tmp_path / "store")
    trees.write(room, {path: b"half"})
    born = (room / path).stat().st_mtime_ns
    young, old = (born + int(share * ORPHANED_SECONDS * 1e9) for share in (0.9, 1.1))
    assert look(room, now_ns=young) == []
    assert look(room, ours=False, now_ns=old) == [], "in a directory of the user's we know too little"
    (ailing,) = look(room, now_ns=old)
    assert [fault.reason for fault in ailing.faults] == [DIED]
    assert trees.publish_trees(store, trees.live(room)).capture is None
    (line,) = heal.set_aside(ailing, "launch-9")
    assert line.endswith(DIED)
    assert not (room / path).exists()


@pytest.mark.parametrize("path", ["locks/cabc.lock", "qa/cqa.lock", "precompiled_headers/c1.h.gch", "tmp/work"])
def test_locks_and_facts_of_one_machine_are_left_alone(path: str, tmp_path: Path) -> None:
    room, store = tmp_path / "room", LocalStore(tmp_path / "store")
    trees.write(room / "inductor", {path: b""})
    assert look(room) == []
    assert trees.publish_trees(store, trees.live(room)).capture is None


class Start:
    """A launch that takes and heals live directories below `root`."""

    def __init__(self, root: Path, launch: str, domains: tuple[Domain, ...] = TORCH_PROGRAM) -> None:
        self.notes: list[str] = []
        environ = {"VLLM_CACHE_ROOT": str(root / "root"), "TMPDIR": str(root), "HOME": str(root)}
        claim = live.Claim(derive(trees.FACTORS), launch, "warm", "sight")
        preparation = Preparation(environ, domains, claim, now_ns=lambda: trees.NOW_NS, notes=self.notes)
        self.prepared = preparation.heal(preparation.enter(), root / f"{launch}.remembered", never)
        self.directories = {target.domain.name: Path(target.directory) for target in self.prepared.room.targets}


def test_an_old_left_over_stays_while_another_launch_is_there_and_sends_nobody_away(tmp_path: Path) -> None:
    running = Start(tmp_path, "running")
    left = {"tmp.pid_77_ab/add.ptx": b"of a compiler that takes its time"}
    trees.write(running.directories["triton"], left)
    second = Start(tmp_path, "second")
    assert not second.prepared.room.private
    assert trees.read(second.directories["triton"]) == left
    for launch in (running, second):
        launch.prepared.leave()
    assert any(line.endswith(DIED) for line in Start(tmp_path, "third").notes)
    assert not (second.directories["triton"] / "tmp.pid_77_ab/add.ptx").exists()


@pytest.mark.parametrize("ours", [True, False])
def test_the_stage_of_a_killed_restore_goes_when_it_is_old(ours: bool, tmp_path: Path) -> None:
    place = target("triton", tmp_path / "room", ours=ours)
    trees.triton_kernel(place.directory, "one")
    parent = Path(place.directory).parent if ours else Path(place.directory)
    names = ("old", "young", "aside-old", "held")
    stages = {name: parent / f"{STAGE_PREFIX}{name}-triton" for name in names}
    for name, path in stages.items():
        trees.write(path, {f"{'kernel' if name in names[2:] else 'tree'}/K/add.cubin": b"half"})
        born = 0.9 if name == "young" else 1.1
        os.utime(path, ns=(0, trees.NOW_NS - int(born * ORPHANED_SECONDS * 1e9)))
    before = trees.read(Path(place.directory) / KERNEL)
    stage.remove_abandoned(place, now_ns=trees.NOW_NS)
    assert [name for name in names if stages[name].exists()] == ["young", "aside-old", "held"]
    assert trees.read(Path(place.directory) / KERNEL) == before


def test_a_start_removes_what_a_killed_restore_staged(tmp_path: Path) -> None:
    first = Start(tmp_path, "first")
    first.prepared.leave()
    staged = first.directories["triton"].parent / f"{STAGE_PREFIX}dead-triton"
    trees.write(staged, {"tree/K/add.cubin": b"half"})
    os.utime(staged, ns=(0, trees.OLD_NS))
    Start(tmp_path, "second")
    assert not staged.exists()


def test_a_lock_that_an_engine_would_wait_for_in_vain_is_named_and_left(tmp_path: Path) -> None:
    # torch waits for the file to go, whoever made it: a killed build hangs every later start.
    place = tmp_path / ".cache/torch_extensions/py311_cu130"
    locks = {"dead/lock": b"", "dead/ext.so": trees.elf("ext"), "dead/.ninja_lock": b""}
    trees.write(place, locks)
    trees.write(place, {"building/lock": b""})
    os.utime(place / "building/lock", ns=(0, trees.NOW_NS - int(0.9 * ORPHANED_SECONDS * 1e9)))
    started = Start(tmp_path, "first", (TORCH_EXTENSIONS,))
    (line,) = started.notes
    assert line.startswith(f"{place}/dead/lock is ")
    assert "waits until it is removed" in line
    assert trees.read(place).keys() == {*locks, "building/lock"}


# File systems that misbehave under a live root.


def refusing(monkeypatch: pytest.MonkeyPatch, name: str, error: int, below: Path) -> list[str]:
    """Makes a call of `os` fail for paths below a directory; what was asked for is in the list."""
    real, asked = getattr(os, name), list[str]()

    def call(path: str, *more: object, **named: object) -> object:
        above = named.get("src_dir_fd", named.get("dir_fd"))
        whole = str(path) if above is None else f"{os.readlink(f'/proc/self/fd/{above}')}/{path}"
        if whole.startswith(f"{below}/"):
            asked.append(whole)
            raise OSError(error, os.strerror(error))
        return real(path, *more, **named)

    monkeypatch.setattr(os, name, call)
    return asked


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EBUSY, errno.ESTALE])
def test_a_live_root_without_renames_is_said_and_has_nothing_half(
    error: int, ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, room = LocalStore(tmp_path / "store"), tmp_path / "room"
    trees.build(tmp_path / "made", ["triton", "torch_compile"])
    trees.publish_trees(store, trees.live(tmp_path / "made"))
    found, places = trees.look_up(store), [target(name, room, ours=ours) for name in ("triton", "torch_compile")]
    asked = refusing(monkeypatch, "rename", error, room)
    outcome = trees.restore_found(store, found, places)
    monkeypatch.undo()
    assert asked
    assert outcome.files == 0
    assert [reason.partition(" not restored: ")[0] for reason in outcome.reasons] == ["triton", "torch_compile"]
    assert all(os.strerror(error) in reason for reason in outcome.reasons)
    assert outcome.damaged == (), "nobody's fault but the place's"
    assert trees.read(room) == {}
    assert restored(store, room).keys() == travelling(tmp_path / "made").keys()


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EBUSY, errno.ESTALE, errno.EACCES])
def test_a_torn_unit_that_cannot_be_moved_is_said_and_left(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees.build(tmp_path, ["triton"])
    cut(f"{KERNEL}/add_kernel.cubin")(tmp_path / "triton")
    before = trees.read(tmp_path)
    (ailing,) = look(tmp_path, ours=False)
    refusing(monkeypatch, "rename", error, tmp_path)
    (line,) = heal.set_aside(ailing, "launch-9")
    assert line.startswith(f"triton {KERNEL}: ")
    assert line.endswith("cannot be set aside")
    assert trees.read(tmp_path) == before


@pytest.mark.parametrize("error", [errno.EBUSY, errno.ESTALE])
def test_a_directory_that_cannot_be_removed_yet_is_no_trouble(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Network file systems answer EBUSY to rmdir while a deleted file is open somewhere.
    store, room = LocalStore(tmp_path / "store"), tmp_path / "room"
    trees.build(room, ["triton"])
    trees.publish_trees(store, trees.live(room))
    cut(f"{KERNEL}/add_kernel.cubin")(room / "triton")
    (ailing,) = look(room, ours=False)
    asked = refusing(monkeypatch, "rmdir", error, tmp_path)
    (line,) = heal.set_aside(ailing, "launch-9")
    assert line.startswith("set aside triton")
    assert trees.restore_found(store, trees.look_up(store), trees.targets(room)).reasons == ()
    remove(store, plan_removal(store, [derive(trees.FACTORS)], now=NOW, grace=0))
    assert captures(store, derive(trees.FACTORS), []) == ()
    held = Start(tmp_path, "first")
    held.prepared.leave()
    assert asked
    assert damage(look(room)) == []


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EBUSY, errno.EIO])
def test_a_live_file_that_cannot_be_read_costs_its_unit_a_capture_and_is_not_called_damaged(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, store = tmp_path / "room", LocalStore(tmp_path / "store")
    keys = [trees.triton_kernel(room / "triton", seed) for seed in ("one", "two")]
    seen = trees.live(room)
    asked = refusing(monkeypatch, "open", error, room / "triton" / keys[0])
    assert look(room) == [], "the next start may read it"
    published = trees.publish_trees(store, seen)
    monkeypatch.undo()
    assert asked
    ((unit, reason),) = [(refused.unit, refused.reason) for refused in published.refused]
    assert unit == keys[0]
    assert reason.endswith(f"cannot be read: {os.strerror(error)}")
    assert {path.split("/")[1] for path in restored(store, tmp_path / "other")} == {keys[1]}


# Live use.


class RemovedOnOpen(Wrapper):
    """The artifact is removed by somebody else while its layer is open."""

    def open(self, name: str) -> BinaryIO:
        stream = super().open(name)
        remove(self.inner, plan_removal(self.inner, [derive(trees.FACTORS)], now=NOW, grace=0))
        return stream


def test_an_artifact_that_is_removed_while_it_is_restored_arrives_whole_and_stays(tmp_path: Path) -> None:
    store, room = LocalStore(tmp_path / "store"), tmp_path / "room"
    trees.publish_trees(store, trees.build(tmp_path / "made"))
    outcome = trees.restore_found(RemovedOnOpen(store), trees.look_up(store), trees.targets(room))
    assert (outcome.reasons, outcome.damaged) == ((), ())
    assert captures(store, derive(trees.FACTORS), []) == ()
    assert not list((tmp_path / "store").rglob("*.tar.zst"))
    assert trees.read(room).keys() == travelling(tmp_path / "made").keys()
    assert damage(look(room)) == []


def test_a_unit_is_whole_whatever_order_its_files_are_listed_in(tmp_path: Path) -> None:
    trees.triton_kernel(tmp_path / "triton", "one")
    place = target("triton", tmp_path)
    tree = trees.tree_of(place.domain, place.directory)
    paths = units_of(place.domain, tree.seen)[KERNEL]
    forward, backward = (
        examine(tree, KERNEL, order, StatCache({}), now_ns=trees.NOW_NS) for order in (paths, paths[::-1])
    )
    assert set(forward.files) == set(backward.files)
