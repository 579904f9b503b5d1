"""A made cache tree: edited copies of generated kernels, wrappers and objects, laid out and named as Inductor does.

Real trees are a few hundred files. What a store has to bear is fleets of them, so the large tree is made: the same
few programs over and over with other constants in them, which is what recompiling for another shape leaves. Names that
are content hashes really are, objects have a whole ELF header and group files name absolute siblings, so that every
self-check and the relocation of the `inductor` domain run as on a real tree. Everything follows from one seed.
"""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

from cachemgr.digest import base32_name

FILES_PER_PROGRAM = 20
"""What `_program` makes; about 300 kB, so that 1,000 programs are 20,000 files and 300 MB."""

_SEED = 20261129
_BASES = 40
"""How many different files of a kind exist before they are edited."""
_OLD_MTIME_NS = 1_700_000_000_000_000_000
"""Long ago: a stat cache does not trust files that are seconds old."""
_ORIGIN = "/var/lib/elsewhere/triton/0"
"""A root that exists nowhere, as in a cache that was moved."""

_WORDS = """
    tmp arg load store mul add fma max exp log rsqrt tl.where tl.sum xmask rmask xindex rindex XBLOCK RBLOCK
    convert_layout tt.dot tensor<128x64xf16> %ptr ld.global.v4.b32 st.shared mov.b32 %r %f bra.uni call ret
    getelementptr inbounds bitcast i32 i64 float half insertvalue extractvalue phi br label torch.empty_strided
    assert_size_stride aten.mm.default buf extern_kernels.mm del call_args at::vec::Vectorized<float> #pragma omp
""".split()  # noqa: SIM905 - as a list it is fifty lines

_TEXTS = {"ttir": 10, "ttgir": 12, "llir": 40, "ptx": 24, "source": 8, "py": 12, "cpp": 8}
_BINARIES = {"cubin": 20, "launcher": 18, "entry": 30, "bundle": 24, "so": 16}
"""Kinds of files with their size in kB, as they are in trees of vLLM 0.26."""


class Maker:
    """The seed material; `write` makes a tree of it."""

    def __init__(self) -> None:
        chance = random.Random(_SEED)
        self._bases = {
            **{kind: [_text(chance, size * 1000) for _ in range(_BASES)] for kind, size in _TEXTS.items()},
            **{kind: [_binary(chance, size * 1000) for _ in range(_BASES)] for kind, size in _BINARIES.items()},
        }

    def write(self, root: Path, files: int) -> None:
        """Make a tree of `files` files, a multiple of `FILES_PER_PROGRAM`. Smaller trees are part of larger ones."""
        for number in range(files // FILES_PER_PROGRAM):
            for path, data in self._program(random.Random(_SEED + number + 1)):
                _write(f"{root}/{path}", data)

    def _program(self, chance: random.Random) -> Iterator[tuple[str, bytes]]:
        """One compiled program: a Triton kernel with its launcher, wrappers, host kernels and graph entries."""
        yield from self._kernel(chance)
        launcher = _key(chance)
        yield f"triton/0/{launcher}/__triton_launcher.cpython-312-x86_64-linux-gnu.so", self._object(chance, "launcher")
        for _ in range(3):
            text = self._copy(chance, "py").strip()
            yield _inductor("c" + base32_name(text), "py"), text
        yield _inductor(_key(chance).lower(), "best_config"), _best_config(chance)
        for _ in range(2):
            yield f"{_entry('fxgraph', chance)}/{base32_name(entry := self._copy(chance, 'entry'))}", entry
        yield f"{_entry('aotautograd', chance)}/{base32_name(bundle := self._copy(chance, 'bundle'))}", bundle
        for _ in range(2):
            text = self._copy(chance, "cpp")
            name = "c" + base32_name(text)
            yield _inductor(name, "cpp"), text
            yield _inductor(name, "so"), self._object(chance, "so")

    def _kernel(self, chance: random.Random) -> Iterator[tuple[str, bytes]]:
        name, directory = f"triton_poi_fused_{chance.randrange(64)}", _key(chance)
        siblings = [f"{name}.{kind}" for kind in ("json", "ttir", "ttgir", "llir", "ptx", "cubin", "source")]
        group = {"child_paths": {sibling: f"{_ORIGIN}/{directory}/{sibling}" for sibling in siblings}}
        yield f"triton/0/{directory}/__grp__{name}.json", json.dumps(group).encode()
        for sibling in siblings:
            kind = sibling.rsplit(".", 1)[1]
            yield f"triton/0/{directory}/{sibling}", self._member(chance, kind, name)

    def _member(self, chance: random.Random, kind: str, name: str) -> bytes:
        if kind == "json":
            meta = {"name": name, "hash": _key(chance), "num_warps": chance.choice((1, 2, 4, 8)), "shared": 0}
            return json.dumps(meta | {"options": dict.fromkeys(_WORDS, chance.randrange(9))}).encode()
        return self._object(chance, kind) if kind == "cubin" else self._copy(chance, kind)

    def _copy(self, chance: random.Random, kind: str) -> bytes:
        """One of the bases with an edit of eight bytes about every 400."""
        data = bytearray(chance.choice(self._bases[kind]))
        for _ in range(len(data) // 400):
            at = chance.randrange(len(data) - 8)
            data[at : at + 8] = b"%08d" % chance.randrange(10**8)
        return bytes(data)

    def _object(self, chance: random.Random, kind: str) -> bytes:
        body = self._copy(chance, kind)
        return _elf_header(len(body)) + body


def write_noise(root: Path, size: int) -> None:
    """A Triton directory of so many bytes that do not compress, in kernels of 1 MB."""
    chance = random.Random(_SEED)
    for number in range(size >> 20):
        directory, name = _key(chance), f"noise_{number}"
        group = {"child_paths": {f"{name}.cubin": f"{_ORIGIN}/{directory}/{name}.cubin"}}
        body = chance.randbytes(1 << 20)
        _write(f"{root}/{directory}/__grp__{name}.json", json.dumps(group).encode())
        _write(f"{root}/{directory}/{name}.cubin", _elf_header(len(body)) + body)


def _text(chance: random.Random, size: int) -> bytes:
    lines: list[str] = []
    length = 0
    while length < size:
        words = " ".join(chance.choices(_WORDS, k=chance.randrange(4, 10)))
        lines.append(f"    {words} {chance.randrange(10_000)}")
        length += len(lines[-1]) + 1
    return "\n".join(lines).encode()


def _binary(chance: random.Random, size: int) -> bytes:
    """Machine code: a small set of instructions with operands, tables of names, and zeros."""
    instructions = [chance.randbytes(12) for _ in range(96)]
    code = b"".join(chance.choice(instructions) + chance.randbytes(2) + b"\0\0" for _ in range(size // 32))
    names = "\0".join(chance.choices(_WORDS, k=size // 40)).encode()
    return (code + names).ljust(size, b"\0")[:size]


def _elf_header(body: int) -> bytes:
    """A 64-bit little-endian header whose section table of one row ends with the file."""
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    kind = b"\x03\x00\x3e\x00\x01\x00\x00\x00"
    addresses = bytes(16) + (64 + body - 64).to_bytes(8, "little")
    return (ident + kind + addresses + bytes(10) + b"\x40\x00\x01\x00").ljust(64, b"\0")


def _best_config(chance: random.Random) -> bytes:
    return json.dumps({"XBLOCK": chance.choice((64, 128, 256)), "num_warps": 4, "configs_hash": _key(chance)}).encode()


def _key(chance: random.Random) -> str:
    return "".join(chance.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", k=52))


def _inductor(name: str, suffix: str) -> str:
    return f"{name[1:3]}/{name}.{suffix}"


def _entry(kind: str, chance: random.Random) -> str:
    name = kind[0] + _key(chance)[:51].lower()
    return f"{kind}/{name[1:3]}/{name}" if kind == "fxgraph" else f"{kind}/{name}"


def _write(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "xb") as stream:
        stream.write(data)
    os.utime(path, ns=(_OLD_MTIME_NS, _OLD_MTIME_NS))
