"""Layers: the same units give the same bytes, any tar can read them, and no damage gets past the reader."""

import io
import os
import resource
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from cachemgr import digest
from cachemgr.capture import File, Layer, Section, Unit, is_safe_path
from cachemgr.digest import of_bytes
from cachemgr.errors import CorruptError
from cachemgr.layer import (
    CHUNK,
    UNREAD,
    Placer,
    UnitError,
    links_in,
    open_quietly,
    pack,
    read_file,
    tar_size,
    unpack,
    writing,
)
from cachemgr.ustar import BLOCK, header, header_size, padding
from tests.conftest import MakeDisk
from tests.trees import noise, read, unit

Files = dict[str, bytes]
Domains = dict[str, Files]

FILES: dict[str, Files] = {
    "a": {"a/empty": b"", "a/one": b"1", "a/same": b"equal" * 100, "a/same too": b"equal" * 100},
    "b": {"b/" + "deep/" * 30 + "long": b"x" * 512, "b/ünï cödé 'quoted'": noise("b", 5000), "b/other": b"equal" * 100},
    "c": {"c/big": noise("c", 2 * CHUNK + 77), "c/edge": noise("edge", CHUNK), "c/over": noise("over", CHUNK + 1)},
}
UNITS = [unit(name, files) for name, files in FILES.items()]
ALL = {path: data for files in FILES.values() for path, data in files.items()}


class Held:
    """Stored bytes from memory, in pieces of an awkward size."""

    def __init__(self, files: Files, piece: int = 70_001) -> None:
        self.files, self.piece = files, piece

    def __call__(self, domain: str, file: File) -> Iterator[bytes]:
        assert domain == "triton"
        data = self.files[file.path]
        yield from (data[at : at + self.piece] for at in range(0, len(data), self.piece))


@dataclass
class Placed:
    """A placer that keeps what it is given."""

    files: Files = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def whole(self, file: File, data: memoryview) -> None:
        self.files[file.path] = bytes(data)

    def parts(self, file: File, parts: Iterator[memoryview]) -> None:
        self.files[file.path] = b"".join(parts)

    def link(self, file: File, original: str) -> None:
        self.files[file.path] = self.files[original]
        self.links[file.path] = original


def sections(units: Iterable[Unit]) -> tuple[Section, ...]:
    return (Section("triton", tuple(units)),)


def packed(units: Iterable[Unit] = UNITS, files: Files = ALL, piece: int = 70_001) -> tuple[Layer, bytes]:
    target = io.BytesIO()
    made = pack(sections(units), Held(files, piece), target)
    return made, target.getvalue()


def unpacked(made: Layer, data: bytes, wanted: Callable[[Unit], bool] = lambda _unit: True) -> Placed:
    placed = Placed()
    unpack(made, io.BytesIO(data), lambda _domain, unit: placed if wanted(unit) else None)
    return placed


def always(placer: Placer) -> Callable[[str, Unit], Placer]:
    return lambda _domain, _unit: placer


DOMAINS: Domains = {
    "inductor": {"a/big": noise("of inductor", CHUNK + 5), "a/same": b"equal" * 100, "a/same too": b"equal" * 100},
    "torch_compile": {"b/" + "deep/" * 30 + "x": b"of torch_compile", "b/huge": noise("huge", 3 * CHUNK + 9)},
    "triton": {"a/big": noise("of triton", 2 * CHUNK), "a/same": b"equal" * 100, "a/same too": b"equal" * 100},
}
"""Three domains; two of them have the same paths."""


def packed_domains(domains: Domains = DOMAINS) -> tuple[Layer, bytes]:
    """One layer of several domains, a unit for each first part of a path."""

    def units(files: Files) -> tuple[Unit, ...]:
        names = sorted({path.split("/")[0] for path in files})
        return tuple(unit(name, {p: d for p, d in files.items() if p.split("/")[0] == name}) for name in names)

    target = io.BytesIO()
    found = [Section(domain, units(files)) for domain, files in domains.items()]
    made = pack(found, lambda domain, file: iter([domains[domain][file.path]]), target)
    return made, target.getvalue()


class Metered(io.BytesIO):
    """A compressed layer that counts the bytes that were asked of it."""

    taken = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        return data


def of_frame(made: Layer, frame: bytes) -> Layer:
    """The layer that a hostile manifest would describe for this frame."""
    return msgspec.structs.replace(made, digest=of_bytes(frame), size=len(frame))


def test_what_was_packed_is_unpacked() -> None:
    made, data = packed()
    assert unpacked(made, data).files == ALL


def test_the_description_is_that_of_the_bytes() -> None:
    made, data = packed()
    tar = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(data)
    assert (made.digest, made.size) == (of_bytes(data), len(data))
    assert (made.tar_digest, made.tar_size) == (of_bytes(tar), len(tar))
    assert made.tar_size == tar_size(sections(UNITS))
    assert made.sections == sections(UNITS)


def test_packing_twice_gives_equal_bytes_however_the_bytes_arrive() -> None:
    assert packed() == packed(piece=1 << 22) == packed(piece=513)


def test_how_many_threads_compress_says_nothing_about_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of several jobs of the compressor, with and without a second one to do them, in pieces of any size."""
    files = {f"a/{number}": noise(f"{number // 2}", 9 << 20) for number in range(3)}
    two = packed([unit("a", files)], files, piece=CHUNK)
    monkeypatch.setitem(writing._TUNING, "threads", 1)
    assert packed([unit("a", files)], files, piece=700_001) == two
    assert two[0].size < 19 << 20, "what one job has seen another finds again"
    assert unpacked(*two).files == files


BYTES_OF_0_1 = {
    packed: (
        "sha256:56b8fb03ae808475ff7668bb7b0c267b9b1fbe9045e1567ef49bcb19da0b22c8",
        "sha256:18e12fed31852041a317c0e7953a2c0f9ed42633f41e9f7e697ee44021a2e23b",
    ),
    packed_domains: (
        "sha256:a754f2a9ad7861fb84feceeffff686d7a3464518ce2ef9d91f88a48bfcf977e9",
        "sha256:a1b4fa18aa8bc1055a88f337adbe77a39dfcc256383a85cb18de5b47321c4872",
    ),
}
"""Digests of layers and of their tars."""


@pytest.mark.parametrize("make", BYTES_OF_0_1)
def test_the_bytes_are_those_of_the_first_release(make: Callable[[], tuple[Layer, bytes]]) -> None:
    """Or every store would keep everything twice after an update. Compressed they are equal with equal releases of
    zstd only."""
    made, _data = make()
    compressed, tar = BYTES_OF_0_1[make]
    assert made.tar_digest == tar
    if zstandard.ZSTD_VERSION == (1, 5, 7):
        assert made.digest == compressed


def test_a_digest_that_nobody_knows_yet_is_found_while_packing() -> None:
    rows = [msgspec.structs.replace(file, digest=UNREAD) for file in UNITS[2].files]
    assert packed([Unit("c", tuple(rows))]) == packed([UNITS[2]])


def test_an_unread_file_of_another_size_is_told() -> None:
    row = File("a", 3, UNREAD)
    with pytest.raises(UnitError, match="a changed while it was read"):
        packed([Unit("u", (row,))], {"a": b"12"})


def test_packing_in_another_process_gives_equal_bytes(tmp_path: Path) -> None:
    code = "from test_layer import packed; print(packed()[0].digest)"
    environ = {"PYTHONPATH": str(Path(__file__).parent), "PYTHONHASHSEED": "7", "HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == packed()[0].digest


@pytest.mark.parametrize("names", [[], ["inductor"], ["triton"], ["torch_compile"], ["inductor", "triton"], [*DOMAINS]])
def test_the_domains_of_a_layer_arrive_from_one_pass_each_at_its_own_placer(names: list[str]) -> None:
    made, data = packed_domains()
    placers = {name: Placed() for name in names}
    stream = Metered(data)
    unpack(made, stream, lambda domain, _unit: placers.get(domain))
    assert {name: placed.files for name, placed in placers.items()} == {name: DOMAINS[name] for name in names}
    assert stream.taken == 2 * len(data), "once for the digest and once for the bytes"


def test_a_unit_is_asked_for_with_its_domain() -> None:
    files = {"a/x": b"1", "b/x": b"2"}
    made, data = packed_domains({"inductor": files, "triton": files})
    placed = Placed()
    unpack(made, io.BytesIO(data), lambda domain, found: placed if (domain, found.name) == ("triton", "b") else None)
    assert placed.files == {"b/x": b"2"}


def test_no_link_leads_from_one_domain_to_another() -> None:
    """Or one of them could not be restored alone."""
    made, data = packed_domains()
    placers = {domain: Placed() for domain in DOMAINS}
    unpack(made, io.BytesIO(data), lambda domain, _unit: placers[domain])
    links = {domain: placed.links for domain, placed in placers.items()}
    own = {"a/same too": "a/same"}
    assert links == {"inductor": own, "torch_compile": {}, "triton": own}


def test_equal_bytes_of_two_domains_cost_almost_nothing() -> None:
    """Inductor keeps copies of kernels that Triton has as well; whatever lies between them and whatever their names."""
    shared = {f"K{number}/kernel.cubin": noise(f"shared {number}", 300_000) for number in range(10)}
    renamed = {f"qa/{path.replace('/', '-')}": body for path, body in shared.items()}
    between = {"x/model": noise("between", 24 * CHUNK)}
    one, _data = packed_domains({"torch_compile": between, "triton": shared})
    both, data = packed_domains({"inductor": renamed, "torch_compile": between, "triton": shared})
    assert both.size < 1.01 * one.size
    alone = packed_domains({"triton": shared})[0]
    pair, data = packed_domains({"inductor": renamed, "triton": shared})
    assert alone.size > sum(map(len, shared.values()))
    assert pair.size < 1.1 * alone.size
    placers = {"inductor": Placed(), "triton": Placed()}
    unpack(pair, io.BytesIO(data), lambda domain, _unit: placers[domain])
    assert (placers["inductor"].files, placers["triton"].files) == (renamed, shared)


class GivesUp(Placed):
    """A placer that takes so many parts of a large file, as one does whose disk is full, and nothing afterwards."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.left = parts

    def parts(self, file: File, parts: Iterator[memoryview]) -> None:
        self.files[file.path] = b""
        while self.left:
            self.left -= 1
            self.files[file.path] += next(parts)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_a_placer_that_gives_up_in_a_large_file_does_not_shift_what_follows(count: int) -> None:
    files = {"a/huge": noise("huge", 3 * CHUNK + 9), "a/small": b"small", "b/x": noise("x", CHUNK + 1)}
    domains = {"inductor": files, "triton": files}
    made, data = packed_domains(domains)
    tired, fresh = GivesUp(count), Placed()
    unpack(made, io.BytesIO(data), lambda domain, _unit: tired if domain == "inductor" else fresh)
    assert fresh.files == files
    assert tired.files == {"a/huge": files["a/huge"][: count * CHUNK], "a/small": b"small", "b/x": b""}


def test_what_a_placer_did_not_want_to_see_is_verified_all_the_same() -> None:
    made, data = packed_domains()
    wrong = msgspec.structs.replace(made.sections[0].units[0].files[0], digest=of_bytes(b"other"))
    units = (Unit("a", (wrong, *made.sections[0].units[0].files[1:])),)
    false = msgspec.structs.replace(made, sections=(Section("inductor", units), *made.sections[1:]))
    with pytest.raises(CorruptError, match="`a/big` has other bytes"):
        unpack(false, io.BytesIO(data), always(GivesUp(1)))


def test_tar_opens_a_layer_of_several_domains(tmp_path: Path) -> None:
    _made, data = packed_domains()
    (tmp_path / "layer.tar.zst").write_bytes(data)
    (tmp_path / "out").mkdir()
    shell("zstd -q -d --long=27 < layer.tar.zst | tar -xf - -C out", tmp_path)
    out = tmp_path / "out"
    assert {name: read(out / name) for name in DOMAINS} == DOMAINS
    assert sorted(path.name for path in out.iterdir()) == sorted(DOMAINS)
    for name in ("inductor", "triton"):
        assert (out / name / "a/same").stat().st_ino == (out / name / "a/same too").stat().st_ino
    assert (out / "inductor/a/same").stat().st_ino != (out / "triton/a/same").stat().st_ino
    listing = shell("zstd -q -d --long=27 < layer.tar.zst | tar -tf -", tmp_path).splitlines()
    assert listing == [f"{domain}/{path}" for domain, files in DOMAINS.items() for path in sorted(files)]


def test_tar_opens_it(tmp_path: Path) -> None:
    _made, data = packed()
    (tmp_path / "layer.tar.zst").write_bytes(data)
    listing = shell("zstd -q -d --long=27 < layer.tar.zst | tar -tvf -", tmp_path, TZ="UTC").splitlines()
    assert len(listing) == len(ALL)
    assert all(line.split()[:2] == ["-rw-r--r--", "0/0"] or line.startswith("hrw-r--r-- 0/0") for line in listing)
    assert all("1970-01-01 00:00" in line for line in listing)
    assert [line for line in listing if "link to" in line] == [listing[3]]
    (tmp_path / "out").mkdir()
    shell("zstd -q -d --long=27 < layer.tar.zst | tar -xf - -C out", tmp_path)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["triton"]
    out = tmp_path / "out" / "triton"
    assert read(out) == ALL
    assert (out / "a/same").stat().st_ino == (out / "a/same too").stat().st_ino
    assert (out / "b/other").stat().st_nlink == 1


def shell(command: str, directory: Path, **environ: str) -> str:
    """Run a pipe of real tools."""
    ran = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=directory,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return ran.stdout


def test_modes_and_kept_times_are_in_the_tar(tmp_path: Path) -> None:
    rows = (
        File("u/plain", 1, of_bytes(b"x"), 0o644, 1_600_000_000_123_456_789),
        File("u/tool", 1, of_bytes(b"x"), 0o755, 1_600_000_000_123_456_789),
    )
    _made, data = packed([Unit("u", rows)], {"u/plain": b"x", "u/tool": b"x"})
    (tmp_path / "layer").write_bytes(data)
    listing = shell("zstd -q -d < layer | tar -tvf -", tmp_path, TZ="UTC").splitlines()
    assert [line.split()[0] for line in listing] == ["-rw-r--r--", "-rwxr-xr-x"]
    assert all("2020-09-13 12:26" in line for line in listing)


def test_equal_files_of_a_unit_are_linked_and_others_are_not() -> None:
    same = of_bytes(b"x")
    rows = (
        File("u/1", 1, same),
        File("u/2", 1, same),
        File("u/3", 1, same, 0o755),
        File("u/4", 1, same, 0o644, 5),
        File("u/5", 1, same, relocated=True),
        File("u/6", 1, same, relocated=True),
        File("u/7", 0, of_bytes(b"")),
        File("u/8", 0, of_bytes(b"")),
        File("u/9", 1, same),
    )
    assert links_in(Unit("u", rows)) == {"u/2": "u/1", "u/9": "u/1"}


def test_links_arrive_as_files_with_the_bytes_of_their_original() -> None:
    made, data = packed()
    placed = unpacked(made, data)
    assert placed.links == {"a/same too": "a/same"}


@pytest.mark.parametrize("names", [[], ["a"], ["b"], ["c"], ["a", "c"], ["b", "c"]])
def test_only_the_wanted_units_arrive(names: list[str]) -> None:
    made, data = packed()
    placed = unpacked(made, data, lambda found: found.name in names)
    assert placed.files == {path: body for name in names for path, body in FILES[name].items()}


@pytest.mark.parametrize("units", [[], [unit("e", {"e/x": b""})]])
def test_almost_nothing_can_be_packed_too(units: list[Unit]) -> None:
    made, data = packed(units, {"e/x": b""})
    assert made.tar_size == 2 * BLOCK + BLOCK * len(units)
    assert set(unpacked(made, data).files) == {file.path for found in units for file in found.files}


parts = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=60)
paths = st.lists(parts, min_size=1, max_size=6).map("/".join).filter(is_safe_path)
sizes = st.integers(0, 1 << 20) | st.sampled_from([8**11 - 1, 8**11, 10**11])
times = st.none() | st.integers(-(2**60), 2**63 - 1)


@given(parts.filter(is_safe_path), paths, paths | st.none(), sizes, times, st.sampled_from([0o644, 0o755]))
def test_the_size_of_a_header_is_known_without_making_it(
    domain: str, path: str, link: str | None, size: int, mtime: int | None, mode: int
) -> None:
    file = File(path, size, of_bytes(b""), mode, mtime)
    made = header(domain, file, link)
    assert header_size(domain, file, link) == len(made)
    assert made == by_tarfile(domain, file, link)


def by_tarfile(domain: str, file: File, link: str | None) -> bytes:
    """The header that the standard library makes."""
    member = tarfile.TarInfo(f"{domain}/{file.path}")
    member.mode = file.mode
    member.mtime = min(max(file.mtime_ns or 0, 0) // 1_000_000_000, 8**11 - 1)
    if link is None:
        member.size = file.size
    else:
        member.type, member.linkname = tarfile.LNKTYPE, f"{domain}/{link}"
    return member.tobuf(tarfile.PAX_FORMAT)


@pytest.mark.parametrize("domain", ["triton", "t", "é", "t" * 49])
@pytest.mark.parametrize("letter", ["x", "é"])
@pytest.mark.parametrize("linked", [False, True])
def test_the_size_of_a_header_is_right_around_the_limits_of_ustar(letter: str, linked: bool, domain: str) -> None:
    """The domain is a part of the name, so that it counts too."""
    for length in range(80 - len(domain), 131):
        path = f"{letter}{'x' * 9}/{'x' * (length - 11)}"
        assert len(path) == length
        file = File(path if not linked else "short", 1, of_bytes(b"1"))
        link = path if linked else None
        assert header_size(domain, file, link) == len(header(domain, file, link))
        assert header(domain, file, link) == by_tarfile(domain, file, link)


trees = st.dictionaries(paths, st.binary(max_size=2000) | st.just(b"same"), max_size=8)


@given(trees)
def test_any_unit_survives(files: Files) -> None:
    units = [unit(f"{number}", {path: data}) for number, (path, data) in enumerate(sorted(files.items()))]
    units.append(unit("z", {f"z/{path}": data for path, data in files.items()} or {"z": b""}))
    held = {"z": b"", **files, **{f"z/{path}": data for path, data in files.items()}}
    made, data = packed(units, held)
    assert unpacked(made, data).files == {file.path: held[file.path] for each in units for file in each.files}


def test_every_flipped_bit_is_found() -> None:
    made, data = packed([UNITS[0]])
    for at in range(len(data)):
        with pytest.raises(CorruptError, match="other bytes than its name says"):
            unpacked(made, data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])


@pytest.mark.parametrize("change", ["cut", "appended", "empty", "doubled"])
def test_other_bytes_than_the_name_says_are_refused_before_anything_is_placed(change: str) -> None:
    made, data = packed()
    other = {"cut": data[:-1], "appended": data + b"\0", "empty": b"", "doubled": data + data}[change]
    placed = Placed()
    with pytest.raises(CorruptError, match="other bytes than its name says"):
        unpack(made, io.BytesIO(other), always(placed))
    assert placed.files == {}


def frames() -> dict[str, tuple[Layer, bytes]]:
    """Layers whose manifest matches their compressed bytes, and whose tar is not what the manifest says."""
    made, data = packed()
    tar = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(data)
    compress = zstandard.ZstdCompressor(level=1).compress
    big = len(tar)
    flipped = tar[: big - 5000] + bytes([tar[big - 5000] ^ 1]) + tar[big - 4999 :]
    cases = {
        "a cut tar": compress(tar[:-BLOCK]),
        "a cut frame": data[: len(data) // 2],
        "a tar cut inside a file": compress(tar[: big // 2]),
        "a longer tar": compress(tar + bytes(BLOCK)),
        "an end that is no end": compress(tar[:-1] + b"x"),
        "other bytes in a file": compress(flipped),
        "no zstd at all, and other bytes": flipped,
        "nothing": b"",
        "an empty frame": compress(b""),
        "garbage": noise("garbage", 1000),
    }
    found = {title: (of_frame(made, frame), frame) for title, frame in cases.items()}
    for title, size in (("a tar_size too small", big - BLOCK), ("a tar_size too large", big + BLOCK), ("zero", 0)):
        found[title] = (msgspec.structs.replace(made, tar_size=size), data)
    swapped = (UNITS[1], UNITS[0], UNITS[2])
    found["units in another order"] = (msgspec.structs.replace(made, sections=sections(swapped)), data)
    found["a unit too few"] = (msgspec.structs.replace(made, sections=sections(UNITS[:2])), data)
    wide, data = packed_domains()
    one, two, three = wide.sections
    for title, held in {
        "sections in another order": (two, one, three),
        "a section too few": (one, two),
        "a section too many": (one, two, three, Section("z", (UNITS[0],))),
        "sections that changed places": (
            msgspec.structs.replace(one, units=three.units),
            two,
            msgspec.structs.replace(three, units=one.units),
        ),
        "a domain with a longer header": (msgspec.structs.replace(one, domain="x" * 100), two, three),
    }.items():
        found[title] = (msgspec.structs.replace(wide, sections=held), data)
    return found


@pytest.mark.parametrize(("made", "data"), frames().values(), ids=frames().keys())
def test_a_tar_that_is_not_what_the_manifest_says_is_refused(made: Layer, data: bytes) -> None:
    with pytest.raises(CorruptError, match=r"ends early|does not end where|has other bytes|cannot be decompressed"):
        unpacked(made, data)


def test_the_tar_itself_serves_where_a_store_has_the_layer_unpacked() -> None:
    made, data = packed()
    tar = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(data)
    assert unpacked(made, tar) == unpacked(made, data)
    with pytest.raises(CorruptError):
        unpacked(made, tar[:-1] + b"x")


def test_skipped_units_hide_nothing() -> None:
    made, data = packed()
    small = msgspec.structs.replace(made, tar_size=made.tar_size - BLOCK)
    with pytest.raises(CorruptError):
        unpacked(small, data, lambda _unit: False)


def test_a_bomb_is_cut_off_where_the_manifest_ends() -> None:
    made, _data = packed([UNITS[0]])
    frame = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptError):
        unpacked(of_frame(made, frame), frame)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_frame_that_wants_a_larger_window_is_refused() -> None:
    made, data = packed()
    tar = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(data)
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    greedy = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = greedy.compress(tar) + greedy.flush()
    assert zstandard.get_frame_parameters(frame).window_size == 1 << 28
    with pytest.raises(CorruptError, match="cannot be decompressed"):
        unpacked(of_frame(made, frame), frame)


def test_a_frame_of_another_compressor_is_as_good() -> None:
    made, data = packed()
    tar = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(data)
    for level in (1, 19):
        small = zstandard.ZstdCompressionParameters.from_level(level, window_log=18)
        frame = zstandard.ZstdCompressor(compression_params=small).compress(tar)
        assert unpacked(of_frame(made, frame), frame).files == ALL


def test_a_layer_larger_than_the_window_survives(tmp_path: Path) -> None:
    piece = noise("window", CHUNK)
    count = 132

    def source(domain: str, file: File) -> Iterator[bytes]:
        return (piece for _number in range(count))

    running = digest.hasher()
    for _number in range(count):
        running.update(piece)
    row = File("u/big", count * CHUNK, digest.finish(running))
    with (tmp_path / "layer").open("wb") as target:
        made = pack(sections([Unit("u", (row,))]), source, target)
    assert made.size < 3 * CHUNK
    with (tmp_path / "layer").open("rb") as stream:
        assert zstandard.get_frame_parameters(stream.read(64)).window_size == 1 << 27

    class Counting(Placed):
        def parts(self, file: File, parts: Iterator[memoryview]) -> None:
            assert sum(len(part) for part in parts) == file.size

    with (tmp_path / "layer").open("rb") as stream:
        unpack(made, stream, always(Counting()))


MEMORY = """
import sys, io, resource
from test_layer import *
piece, count = noise("memory", CHUNK), 300
running = digest.hasher()
for _number in range(count):
    running.update(piece)
row = File("u/big", count * CHUNK, digest.finish(running))
class Dropping(Placed):
    def parts(self, file, parts):
        for part in parts:
            pass
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with open(sys.argv[1], "w+b") as target:
    made = pack(sections([Unit("u", (row,))]), lambda _domain, _file: iter([piece] * count), target)
    target.seek(0)
    unpack(made, target, always(Dropping()))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_memory_is_bounded_by_the_window_and_not_by_the_layer(tmp_path: Path) -> None:
    environ = {"PYTHONPATH": str(Path(__file__).parent), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "layer")]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 200


@pytest.mark.parametrize("data", [b"shorte", b"longer!!", b"changed"[:6] + b"D", b""])
def test_a_file_that_changed_while_it_was_packed_is_told(data: bytes) -> None:
    units = [unit("a", {"a/x": b"1"}), unit("b", {"b/x": b"changed"})]
    held: Domains = {"inductor": {"a/x": b"1", "b/x": b"changed"}, "triton": {"a/x": b"1", "b/x": data}}
    found = [Section(domain, tuple(units)) for domain in held]
    with pytest.raises(UnitError, match="b/x changed while it was read") as caught:
        pack(found, lambda domain, file: iter([held[domain][file.path]]), io.BytesIO())
    assert (caught.value.domain, caught.value.unit) == ("triton", units[1])


def test_a_large_file_that_grows_while_it_is_packed_is_not_read_to_its_end() -> None:
    row = File("a", 10, of_bytes(b"0123456789"))
    pieces = 0

    def endless(domain: str, file: File) -> Iterator[bytes]:
        nonlocal pieces
        while pieces < 1000:
            pieces += 1
            yield b"0123456789"

    with pytest.raises(UnitError):
        pack(sections([Unit("u", (row,))]), endless, io.BytesIO())
    assert pieces == 2


class Full(io.BytesIO):
    """A target without space for more than so many bytes."""

    def __init__(self, space: int) -> None:
        super().__init__()
        self.space = space

    def write(self, data: object) -> int:
        self.space -= len(bytes(data))  # type: ignore[call-overload]
        if self.space < 0:
            raise OSError(28, "No space left on device")
        return 0


@pytest.mark.parametrize("space", [0, 10, 1000, 1 << 20, 3 << 20])
@pytest.mark.parametrize("units", [UNITS, UNITS[:1]], ids=["large", "small"])
def test_a_target_that_is_full_is_an_error_and_not_a_wait(units: list[Unit], space: int) -> None:
    """A small layer is written in one piece, after the last byte of it was handed over."""
    needed = packed(units)[0].size
    failures: list[OSError] = []

    def attempt() -> None:
        try:
            pack(sections(units), Held(ALL), Full(min(space, needed - 1)))
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert [failure.errno for failure in failures] == [28]


def test_nothing_is_read_any_more_once_the_target_is_full() -> None:
    files = {f"a/{number}": noise(f"{number}", CHUNK) for number in range(90)}
    source = Held(files)
    read = 0

    def counted(domain: str, file: File) -> Iterator[bytes]:
        nonlocal read
        read += 1
        return source(domain, file)

    with pytest.raises(OSError, match="No space left"):
        pack(sections([unit("a", files)]), counted, Full(0))
    assert read < 90


def test_a_full_disk_is_an_error_and_not_a_wait(small_disk: MakeDisk) -> None:
    place = small_disk(64 << 10)
    with pytest.raises(OSError, match="No space left"), (place / "layer").open("wb") as target:
        pack(sections(UNITS), Held(ALL), target)


def test_an_error_of_the_placer_is_passed_on() -> None:
    class Refusing(Placed):
        def whole(self, file: File, data: memoryview) -> None:
            raise PermissionError(13, "no")

    made, data = packed()
    with pytest.raises(PermissionError):
        unpack(made, io.BytesIO(data), always(Refusing()))


def test_a_large_file_with_wrong_bytes_ends_in_an_error() -> None:
    made, data = packed([UNITS[2]])
    wrong = msgspec.structs.replace(UNITS[2].files[0], digest=of_bytes(b"other"))
    units = (Unit("c", (wrong, *UNITS[2].files[1:])),)
    with pytest.raises(CorruptError, match="`c/big` has other bytes"):
        unpacked(msgspec.structs.replace(made, sections=sections(units)), data)


def test_padding_fills_blocks() -> None:
    assert [padding(size) for size in (0, 1, 511, 512, 513)] == [0, 511, 1, 0, 511]


def test_reading_a_live_file_leaves_its_access_time(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(noise("live", CHUNK + 5))
    os.utime(path, ns=(0, 10**18))
    assert b"".join(read_file(str(path))) == noise("live", CHUNK + 5)
    assert path.stat().st_atime_ns == 0


def test_a_live_link_is_not_followed_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OSError, match="symbolic links"):
        open_quietly(str(tmp_path / "link"))
    os.mkfifo(tmp_path / "pipe")
    assert b"".join(read_file(str(tmp_path / "pipe"))) == b""
