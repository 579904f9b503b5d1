"""Small live trees with the shapes, names and contents that engines write (shared `domains.md`, sections 1, 2, 3, 6).

Names that are content hashes are content hashes, objects are ELF files with their section table at the end, group files
and indexes hold absolute paths and are printed as Triton and vLLM print them. Nothing here is loaded by anything.
"""

import ast
import base64
import hashlib
import json
import os
import pprint
import random
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from cachemgr import digest
from cachemgr.capture import LAYOUT, File, Layer, Manifest, Provenance, Unit
from cachemgr.digest import Digest
from cachemgr.domains import TABLE, Domain, Target
from cachemgr.domains.scrub import WINNER
from cachemgr.examine import Tree
from cachemgr.key import Factor, Relations, derive
from cachemgr.level import Level
from cachemgr.lookup import Found, find
from cachemgr.observe import scan
from cachemgr.publish import Published, publish
from cachemgr.statcache import StatCache
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, captures, commit
from cachemgr.warm import Restored, restore
from tests.stores import MemoryStore, spool

NOW_NS = 1_800_000_000_000_000_000
OLD_NS = 1_700_000_000_000_000_000
"""When settled files were written."""

AOT_NAME = "5e" * 32
TEN_HEX = "40a0994a95"

FACTORS = (
    Factor("cuda.runtime", "13.0", "guard"),
    Factor("device.name", "NVIDIA H200", "guard"),
    Factor("speculative.tokens", "3", "blind"),
    Factor("torch", "2.13.0", "guard"),
    Factor("vllm.max_model_len", "8192", "match"),
)


def noise(seed: str, size: int) -> bytes:
    """Bytes that do not compress, the same for the same seed."""
    return random.Random(seed).randbytes(size)


def elf(seed: str, size: int = 2000) -> bytes:
    """A 64-bit little-endian ELF file of `size` bytes that ends with its section table of two entries."""
    table = size - 2 * 64
    head = b"\x7fELF\x02\x01\x01" + b"\0" * 9 + b"\x03\0\x3e\0" + b"\x01\0\0\0" + b"\0" * 16
    head += table.to_bytes(8, "little") + b"\0" * 4 + b"\x40\0" + b"\x38\0\0\0" + b"\x40\0" + b"\x02\0" + b"\x01\0"
    assert len(head) == 64
    return head + noise(seed, size - 64)


def write(root: Path | str, files: Mapping[str, bytes], *, old: bool = True) -> None:
    """Put files below `root`; `old` makes them settled, so that a stat cache may remember them."""
    for path, data in files.items():
        target = Path(root) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        if old:
            os.utime(target, ns=(OLD_NS, OLD_NS))


def read(root: Path | str) -> dict[str, bytes]:
    """Every file below `root`."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(Path(root).rglob("*")) if path.is_file()}


def state(root: Path | str) -> dict[str, tuple[object, ...]]:
    """Everything below `root` that a careless write would change, and the bytes."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(Path(root).rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(root))] = (status.st_mode, status.st_ino, status.st_mtime_ns, data)
    return found


def triton_key(seed: str) -> str:
    """A kernel directory's name: base32 of sha256, 52 characters."""
    return base64.b32encode(hashlib.sha256(seed.encode()).digest()).decode().rstrip("=")


def triton_kernel(root: Path | str, seed: str, name: str = "add_kernel", *, named_in: str | None = None) -> str:
    """One kernel as Triton leaves it below `root`; its group file names `named_in`, or where it really lies."""
    key = triton_key(seed)
    files = {
        f"{name}.source": f"// {seed}\n".encode(),
        f"{name}.ttir": b"module { tt.func public @add() }\n",
        f"{name}.ttgir": b"module { tt.func public @add() }\n",  # equal to its neighbour: a hard link in the layer
        f"{name}.llir": b"; ModuleID\n" + seed.encode() * 20,
        f"{name}.ptx": b".version 8.7\n" + seed.encode() * 20,
        f"{name}.cubin": elf(seed),
        f"{name}.json": json.dumps({"hash": seed, "num_warps": 4, "name": name}).encode(),
    }
    directory = f"{named_in or root}/{key}"
    group = json.dumps({"child_paths": {child: f"{directory}/{child}" for child in files}}).encode()
    write(f"{root}/{key}", {**files, f"__grp__{name}.json": group})
    return key


def triton(root: Path | str, *, named_in: str | None = None) -> list[str]:
    """A Triton cache with two kernels, a driver module, autotune results, and what must stay behind."""
    keys = [triton_kernel(root, seed, named_in=named_in) for seed in ("one", "two")]
    module = triton_key("driver")
    write(root, {f"{module}/cuda_utils.cpython-311-x86_64-linux-gnu.so": elf("driver")})
    tuned = triton_key("tuned")
    write(root, {f"{tuned}/add_kernel.autotune.json": b'{"key": [1, 2], "configs_timings": [[{}, 0.1]]}'})
    write(root, {f"{keys[0]}/tmp.pid_77_ab12/add_kernel.ptx": b"half", f"{module}/build.lock": b""})
    write(root, {f"{keys[1]}/add_kernel.ptx.tmp.pid_77_3": b"half", "tmp.pid_9_ff/x": b"half"})
    return sorted([*keys, module, tuned])


def python_module(text: str) -> tuple[str, bytes]:
    """A generated wrapper and the path below an Inductor directory that its content gives it."""
    data = text.encode()
    name = "c" + digest.base32_name(data.strip())
    return f"{name[1:3]}/{name}.py", data


def content_entry(directory: str, data: bytes) -> tuple[str, bytes]:
    """An entry that is named by its bytes."""
    return f"{directory}/{digest.base32_name(data)}", data


def inductor_files(seed: str = "") -> dict[str, bytes]:
    """What travels of an Inductor directory, apart from Triton kernels."""
    wrapper, text = python_module(f"# AOT ID: ['0_inference']\nimport torch\nassert 'call {seed}'\n\n\n")
    kernel = "qa/cqa" + "b" * 49
    graph = "fkey" + "a" * 48
    aot = "akey" + "b" * 48
    return dict(
        [
            (wrapper, text),
            (wrapper.removesuffix(".py") + ".best_config", b'{"XBLOCK": 128, "triton_cache_hash": "X"}'),
            (f"{kernel}.main.cpp", f"#include <torch/csrc/inductor/cpp_prefix.h>\n// {seed}\n".encode()),
            (f"{kernel}.main.so", elf("kernel" + seed)),
            content_entry(f"fxgraph/{graph[1:3]}/{graph}", b"\x80\x05 graph %s." % seed.encode()),
            content_entry(f"aotautograd/{aot}", b"\x80\x05 aot %s." % seed.encode()),
            ("cache/44136fa3", b'{"mm": {}}'),
        ]
    )


STAYS_IN_INDUCTOR: dict[str, bytes] = {
    "locks/cabc.lock": b"",
    "qa/cqa.lock": b"",
    "qa/.77.140.tmp": b"half",
    "qa/__pycache__/cqa.cpython-311.pyc": b"\0",
    "precompiled_headers/c1.h.gch": b"\0" * 100,
    "xy/header.h.gch": b"\0" * 100,
    "tmp/work": b"",
}


def inductor(root: Path | str, seed: str = "") -> None:
    """An Inductor directory with kernels of its own, a Triton kernel inside, and what must stay behind."""
    write(root, inductor_files(seed))
    write(root, STAYS_IN_INDUCTOR)
    triton_kernel(f"{root}/triton/0", "inside" + seed)


def index(directory: str, artifacts: Iterable[str]) -> bytes:
    """`vllm_compile_cache.py` as vLLM 0.26 to 0.32 print it."""
    value = {
        ((1, 16384), at, "inductor_standalone"): {
            "cache_key": "azbem4aht462yxrbupy5f4eywggfrq3lu7mfmet76rukhypvpcfw",
            "graph_handle": (name, f"{directory}/{name}"),
        }
        for at, name in enumerate(artifacts)
    }
    return pprint.PrettyPrinter(indent=4).pformat(value).encode()


def torch_compile(root: Path | str, *, named_in: str | None = None) -> None:
    """`torch_compile_cache` of a vLLM: an AOT directory of two ranks and a ten-hex directory with its index; one of the
    artifacts is unpacked."""
    aot = f"torch_aot_compile/{AOT_NAME}"
    for rank in ("rank_0_0", "rank_1_0"):
        write(root, {f"{aot}/{rank}/model": b"\x80\x05" + noise(rank, 3000) + b"."})
        write(root, {f"{aot}/{rank}/model.77.tmp": b"half", f"{aot}/{rank}/tmpab12cd34": b"half"})
    write(root, {f"{aot}/inductor_cache/{path}": data for path, data in inductor_files("vllm").items()})
    write(root, {f"{aot}/inductor_cache/{path}": data for path, data in STAYS_IN_INDUCTOR.items()})
    triton_kernel(
        f"{root}/{aot}/inductor_cache/triton/0",
        "vllm",
        named_in=named_in and f"{named_in}/{aot}/inductor_cache/triton/0",
    )
    backbone = f"{TEN_HEX}/rank_0_0/backbone"
    names = ["artifact_compile_range_1_16384_subgraph_0", "artifact_compile_range_1_16384_subgraph_1"]
    wrapper, text = python_module("import torch\nassert 'unpacked'\n")
    write(
        f"{root}/{backbone}",
        {
            names[0]: b"CRC0" + noise("artifact", 5000),
            f"{names[1]}/{wrapper}": text,
            "computation_graph.py": b"class GraphModule(torch.nn.Module):\n    def forward(self, L_x_: Sym(s0)): ...\n",
            "cache_key_factors.json": b'{"env": {"VLLM_TARGET_DEVICE": "cuda"}, "code_hash": "12"}',
            "vllm_compile_cache.py": index(f"{named_in or root}/{backbone}", names),
        },
    )
    triton_kernel(
        f"{root}/{backbone}/{names[1]}/triton/0",
        "unpacked",
        named_in=named_in and f"{named_in}/{backbone}/{names[1]}/triton/0",
    )


def modelinfos(root: Path | str) -> None:
    """`modelinfos` of a vLLM."""
    name = "vllm-model_executor-models-llama-LlamaForCausalLM.json"
    write(root, {name: b'{"hash": "d41d8cd98f00b204e9800998ecf8427e", "modelinfo": {"architecture": "Llama"}}'})


def deep_gemm(root: Path | str) -> list[str]:
    """A DeepGEMM cache of two kernels (`csrc/jit/compiler.hpp`), and what a compiler that died left of a third."""
    units = [f"cache/kernel.fp8_gemm.{'0a' * 16}", f"cache/kernel.smxx_layout.{'0b' * 16}"]
    for unit_name in units:
        write(root, {f"{unit_name}/kernel.cu": f"// Includes' hash value: 1\n// {unit_name}".encode()})
        write(root, {f"{unit_name}/kernel.cubin": elf(unit_name)})
    write(root, {"tmp/1f2e-77-00c0ffee/kernel.cu": b"half"})
    return units


def cute_module(seed: str) -> bytes:
    """Byte-code with its checksum, as `write_bytecode_with_crc32` ends it."""
    code = b"ML\xefR" + noise(seed, 400)
    return code + zlib.crc32(code).to_bytes(4, sys.byteorder)


def cute_dsl(root: Path | str) -> list[str]:
    """A CuTe DSL cache (`base_dsl/cache_helpers.py`, `save_ir`)."""
    names = [f"cute_dsl_{hashlib.sha256(seed.encode()).hexdigest()}.mlir" for seed in ("one", "two")]
    write(root, {name: cute_module(name) for name in names})
    write(root, {f"tmp.pid_77_ab/{names[0]}": b"half", "pyir_class_facts/x.json": b"{}"})
    return sorted(names)


def tilelang_entry(directory: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A directory of TileLang with its manifest (`cache/kernel_cache.py`, `_write_manifest`)."""
    listed = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    manifest = json.dumps({"version": 1, "files": listed}, indent=2, sort_keys=True).encode()
    return {f"{directory}/{name}": data for name, data in {**files, "manifest.json": manifest}.items()}


def tilelang(root: Path | str) -> list[str]:
    """A TileLang cache with kernels of three back ends and a binary, and what must stay behind."""
    space = "0.1.15/linux-x86_64"
    sources = {"device_kernel.cu": b"// device", "host_kernel.cu": b"// host", "params.json": b"[]"}
    python = {"device_kernel.py": b"# device", "host_kernel.py": b"# host", "params.json": b"[]"}
    entries = [
        {**sources, "kernel_lib.so": elf("tvm_ffi")},
        {**sources, "kernel.cubin": elf("nvrtc"), "kernel.py": b"# nvrtc"},
        {**python, "kernel.py": b"# cute", "launcher_lib.so": elf("launcher"), "launcher.cpp": b"// launcher"},
    ]
    keys = [hashlib.sha256(str(at).encode()).hexdigest() for at in range(len(entries))]
    units = [f"{space}/kernels/{key}" for key in keys]
    for directory, files in zip(units, entries, strict=True):
        write(root, tilelang_entry(directory, files))
    binary = f"0.1.15/cuda-binaries/{keys[0]}"
    image = elf("image")
    facts = {"format": "x", "size": len(image), "sha256": hashlib.sha256(image).hexdigest()}
    write(root, {f"{binary}/kernel.cubin": image, f"{binary}/metadata.json": json.dumps(facts).encode()})
    write(root, {f"{space}/.staging/{keys[1]}_77_ab/params.json": b"half", "py-cache/add.12ab.py": b"x = 1\n"})
    write(root, {f"{units[0]}/.kernel_lib.77_ab.tmp.so": b"half", f"autotuner/{keys[2]}/function.pkl": b"\x80\x05."})
    return sorted([*units, binary])


def ninja_build(name: str) -> dict[str, bytes]:
    """A finished build directory: rules with absolute paths, ninja's logs, an object and the library.

    It names the place where it was built, wherever it lies: nobody can move it.
    """
    directory = f"/root/.cache/engine/{name}"
    rules = f"rule link\n  command = c++ $in -o $out\nbuild {directory}/{name}.so: link {directory}/{name}.o\n"
    return {
        "build.ninja": rules.encode(),
        ".ninja_log": f"# ninja log v6\n1\t2\t1700000000000000000\t{directory}/{name}.o\tab12\n".encode(),
        ".ninja_deps": b"# ninjadeps\n\x04\0\0\0" + directory.encode(),
        f"{name}.o": elf(name + ".o"),
        f"{name}.so": elf(name),
    }


def flashinfer_jit(root: Path | str) -> list[str]:
    """`~/.cache/flashinfer` with two modules that ninja built and CuTe kernels, and what must stay behind."""
    space = "0.7.4/90a"
    modules = ["batch_prefill", "norm"]
    for name in modules:
        write(f"{root}/{space}/cached_ops/{name}", ninja_build(name))
    sources = f"{space}/generated/batch_prefill"
    write(root, {f"{sources}/kernel.cu": b"// generated"})
    cute = f"{space}/cached_ops/gemm_sm90a_cute_dsl"
    write(root, {f"{cute}/gemm_a.o": elf("gemm_a"), f"{cute}/meta.json": b'{"arch": "sm90a"}'})
    write(root, {f"{cute}/gemm_b.o.tmp.77": b"half", f"{space}/cached_ops/tmp/norm.lock": b""})
    write(root, {f"{space}/flashinfer_jit.log": b"log", f"{space}/cached_ops/tmp/flashinfer_jit.ninja": b"x"})
    return sorted([*(f"{space}/cached_ops/{name}" for name in modules), sources, cute])


def flashinfer_cubins(root: Path | str) -> list[str]:
    """Downloaded cubins with the list of their hashes (`jit/cubin_loader.py`)."""
    artifact = "0a1b2c3d/fmha/trtllm-gen"
    image = elf("fmha")
    lists = f"{hashlib.sha256(image).hexdigest()} fmha_a.cubin\n".encode()
    files = {f"{artifact}/fmha_a.cubin": image, f"{artifact}/checksums.txt": lists, f"{artifact}/include/X.h": b"// X"}
    write(root, files)
    write(root, {f"{artifact}/fmha_a.cubin.lock": b"", f"{artifact}/fmha_b.cubin.00ff.tmp": b"half"})
    return sorted(files)


def winner(key: str) -> tuple[str, bytes]:
    """An entry of the managed autotuner, and the name that its key gives it (`autotune_cache.py`, `publish`)."""
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    return f"{name}.json", json.dumps({"key": key, "runner": "R", "tactic": 3}, indent=2, sort_keys=True).encode()


def flashinfer_winners(root: Path | str) -> list[str]:
    """A managed autotune store of one environment."""
    space = "v2/0123456789abcdef"
    files = {f"{space}/entries/{name}": data for name, data in (winner("('gemm', 1)"), winner("('gemm', 2)"))}
    files[f"{space}/manifest.json"] = b'{"cache_schema": "v2"}'
    write(root, files)
    write(root, {f"{space}/entries/.autotune_ab12.tmp": b"half"})
    return sorted(files)


def flashinfer_autotune(root: Path | str) -> list[str]:
    """`flashinfer_autotune_cache` of a vLLM 0.32 with two ranks, and of one up to 0.31."""
    units = [f"0.7.4/90a/{letters * 32}" for letters in ("ab", "cd")]
    tuned = b'{"_metadata": {"flashinfer_version": "0.7.4"}, "(\'gemm\', 1)": ["R", 3]}'
    write(root, {f"{units[0]}/autotune_configs_dp0_rank{rank}.json": tuned for rank in (0, 1)})
    write(root, {f"{units[1]}/autotune_configs.json": tuned, f"{units[1]}/.autotune_configs.json.ab12.tmp": b"half"})
    return units


def tvm_ffi(root: Path | str) -> list[str]:
    """`~/.cache/tvm-ffi` with a built module and torch's addon, and their locks."""
    addon, module = "libtorch_c_dlpack_addon_torch213-cuda-0a1b2c3d.so", "moe_0123456789abcdef"
    write(f"{root}/{module}", {**ninja_build("moe"), "cuda.cu": b"// source", "lock": b""})
    write(root, {addon: elf("addon"), f"{addon}.lock": b"", f"{addon}.tmp": b"half"})
    return sorted([addon, module])


def torch_extensions(root: Path | str) -> list[str]:
    """`~/.cache/torch_extensions` with one extension whose builder died: its lock is there."""
    module = "py311_cu130/nccl_allocator"
    write(f"{root}/{module}", {**ninja_build("nccl_allocator"), "main.cpp": b"// source"})
    write(root, {f"{module}/lock": b"", f"{module}/.ninja_lock": b""})
    return [module]


def startup_plan(root: Path | str) -> list[str]:
    """`startup_plan` of a vLLM with two ranks."""
    prints = ["0123456789abcdef", "fedcba9876543210"]
    files = {f"startup_plan_{each}.json": json.dumps({"schema": 1, "fingerprint": each}).encode() for each in prints}
    write(root, files)
    write(root, {f"startup_plan_{prints[0]}.json.tmp.77": b"half"})
    return sorted(files)


def tree_of(domain: Domain, root: Path | str, touched: Iterable[str] | None = None) -> Tree:
    """A live directory as a launch left it; without `touched`, all of it was used."""
    seen = scan(str(root), domain.travels)
    return Tree(domain, str(root), seen, frozenset(seen if touched is None else touched))


def draft(
    factors: Iterable[Factor] = FACTORS,
    *,
    created: str = "2026-01-02T03:04:05Z",
    launch: str = "launch-1",
    complete: bool = True,
    needs: Relations | None = None,
) -> Manifest:
    """A manifest before its layers are known."""
    listed = tuple(factors)
    return Manifest(
        layout=LAYOUT,
        key=derive(listed),
        factors=listed,
        needs=needs or Relations(),
        engine="vllm",
        engine_version="0.32.0",
        model="llama",
        device="NVIDIA H200",
        created=created,
        launch=launch,
        complete=complete,
        layers=(),
        provenance=Provenance("0.1.0", "host"),
    )


def changed(name: str, value: str | None) -> tuple[Factor, ...]:
    """`FACTORS` with another value for one of them."""
    assert any(factor.name == name for factor in FACTORS)
    return tuple(Factor(f.name, value, f.role) if f.name == name else f for f in FACTORS)


def unit(name: str, files: Mapping[str, bytes], *, mode: int = 0o644) -> Unit:
    """A unit with these files, sorted."""
    rows = (File(path, len(data), digest.of_bytes(data), mode) for path, data in sorted(files.items()))
    return Unit(name, tuple(rows))


BUILDERS: dict[str, Callable[[Path], object]] = {
    "torch_compile": torch_compile,
    "inductor": inductor,
    "triton": triton,
    "modelinfos": modelinfos,
    "flashinfer_autotune": flashinfer_autotune,
    "deep_gemm": deep_gemm,
    "cute_dsl": cute_dsl,
    "tilelang": tilelang,
    "flashinfer_jit": flashinfer_jit,
    "flashinfer_cubins": flashinfer_cubins,
    "flashinfer_winners": flashinfer_winners,
    "tvm_ffi": tvm_ffi,
    "torch_extensions": torch_extensions,
    "startup_plan": startup_plan,
}


FEW = ("torch_compile", "inductor", "triton", "modelinfos", "flashinfer_jit")
"""Domains of every kind, for tests that do one thing once per file."""


def build(root: Path, names: Iterable[str] = tuple(BUILDERS)) -> list[Tree]:
    """A live tree of these domains below `root`, one directory each."""
    for name in names:
        BUILDERS[name](root / name)
    return live(root)


def live(root: Path) -> list[Tree]:
    """What lies below `root` now, all of it used."""
    return [tree_of(domain, root / domain.name) for domain in TABLE]


def write_home(root: Path) -> None:
    """What a home, a working directory or `/tmp` has: nothing of it is an engine's, and much is empty or odd."""
    names = [
        *("notes.txt", "main.py", "__init__.py", "x.tmp", "y.123.tmp", "tmp_qwerty", "tsconfig.json", "libc.so"),
        *("src/cmain.py", "src/__init__.py", "src/data.json", "src/module.so", "build/main.o", "a/b/c.bin"),
        *(".git/HEAD", ".git/objects/0a/1b2c", "node_modules/x/index.js", "tmpabcd1234/data", "ab/x.best_config"),
        *("cache/models/weights.bin", "triton/notes/one/two.json", "aotautograd/notes", "lock", "locks/x.lock"),
    ]
    write(root, dict.fromkeys(names, b""))


def targets(root: Path, *, ours: bool = True) -> list[Target]:
    """Where every domain is restored below `root`."""
    return [Target(domain, str(root / domain.name), ours) for domain in TABLE]


def publish_trees(
    store: Store,
    trees: Sequence[Tree],
    manifest: Manifest | None = None,
    cache: StatCache | None = None,
    near: Sequence[Capture] = (),
) -> Published:
    """Publish `trees` as one launch."""
    found = draft() if manifest is None else manifest
    return publish(store, found, trees, StatCache({}) if cache is None else cache, near=near, now_ns=NOW_NS)


def publish_apart(store: Store, trees: Sequence[Tree], manifest: Manifest | None = None) -> Digest:
    """Commit one capture of `trees` with a layer for each of them: the format allows what another publisher may do."""
    found = draft() if manifest is None else manifest
    layers: list[Layer] = []
    paths: dict[Digest, Path] = {}
    entries: list[str] = []
    for tree in trees:
        alone = MemoryStore(store.scratch())
        publish_trees(alone, [tree], found)
        (capture,) = captures(alone, found.key, [])
        for layer in capture.manifest.layers:
            layers.append(layer)
            paths[layer.digest] = spool(store, alone.read(layout.layer_name(layer.digest), limit=layer.size))
        entries.extend(capture.manifest.entries)
    whole = msgspec.structs.replace(found, layers=tuple(layers), entries=tuple(sorted(entries)))
    made = commit(store, whole, paths, now=NOW_NS / 1e9)
    for path in paths.values():
        path.unlink(missing_ok=True)
    return made


Publisher = Callable[[Store, Sequence[Tree], Manifest], object]
"""`publish_trees` or `publish_apart`."""


def look_up(store: Store, factors: Sequence[Factor] = FACTORS, host: Relations | None = None) -> Found:
    """What a launch with these factors would find."""
    return find([Level("local", store, "off")], derive(factors), factors, host or Relations())


def restore_found(
    store: Store, found: Found, places: Sequence[Target], expired: Callable[[], bool] = lambda: False
) -> Restored:
    """Restore what was found."""
    return restore(store, found.captures, places, trees=found.trees, launch="launch-2", now_ns=NOW_NS, expired=expired)


def strings(value: object) -> list[str]:
    """Every string in a value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in strings(item)]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [text for item in value for text in strings(item)]
    return []


def parsed(path: str, data: bytes) -> object:
    """The value of a relocated file."""
    return json.loads(data) if path.endswith(".json") else ast.literal_eval(data.decode())


def renamed(value: object, directory: str) -> object:
    """`value` with each absolute path in it placed in `directory`."""
    if isinstance(value, str):
        return f"{directory}/{value.rsplit('/', 1)[-1]}" if value.startswith("/") else value
    if isinstance(value, dict):
        return {renamed(key, directory): renamed(item, directory) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(renamed(item, directory) for item in value)
    return value


NAMES_ITS_DIRECTORY = re.compile(r"(?:__grp__[^/]*\.json|vllm_compile_cache\.py)$")


def assert_moved(domain: Domain, old: Path | str, new: Path | str) -> int:
    """Every file that travels arrived byte for byte, and relocated ones name the new directory in every path.

    Winners of a tuning come without the time that it took.

    Returns the number of relocated files.
    """
    travelling = {path: data for path, data in read(old).items() if domain.travels(path)}
    arrived = read(new)
    assert arrived.keys() == travelling.keys()
    relocated = 0
    for path, data in arrived.items():
        if NAMES_ITS_DIRECTORY.search(path) is None:
            sent = travelling[path]
            assert data == (WINNER.detach(sent, ()) if path.endswith(".best_config") else sent), path
            continue
        relocated += 1
        directory = f"{new}/{path}".rpartition("/")[0]
        value = parsed(path, data)
        assert value == renamed(parsed(path, travelling[path]), directory)
        named = [text for text in strings(value) if text.startswith("/")]
        assert named, path
        assert all(os.path.dirname(text) == directory and os.path.exists(text) for text in named)
    return relocated
