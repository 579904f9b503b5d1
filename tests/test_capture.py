"""Manifests: canonical bytes, and nothing in them is believed before it is checked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr import digest
from cachemgr.capture import (
    LAYOUT,
    MAX_CAPTURE_BYTES,
    MAX_FILES,
    File,
    Launch,
    Layer,
    Manifest,
    Provenance,
    Section,
    Unit,
    decode_launch,
    decode_manifest,
    encode_launch,
    encode_manifest,
    is_safe_path,
)
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError
from cachemgr.key import Difference, Factor, Key, Relations, derive
from tests.trees import FACTORS, draft

GOLDEN = Path(__file__).parent / "data" / "manifest.json"
GOLDEN_DIGEST = "sha256:acdb4ee7e70a7b4b426c7eba3384df85553183e93d039aa8aa74aa3881fad706"


def named(number: int) -> Digest:
    return Digest(f"sha256:{number:064x}")


GROUP = File("K1/__grp__add.json", 90, named(2), relocated=True)
MANIFEST = msgspec.structs.replace(
    draft(created="2026-01-02T03:04:05Z", launch="0190c5e4-launch"),
    needs=Relations(cpu_features=("avx2", "avx512f"), cuda_runtime="13.0", ordinals={"rank_0_0": 0, "rank_1_0": 1}),
    layers=(
        Layer(
            named(10),
            2000,
            named(11),
            10240,
            (
                Section(
                    "torch_compile",
                    (Unit("torch_aot_compile/ab", (File("torch_aot_compile/ab/rank_0_0/model", 5, named(3)),)),),
                ),
                Section(
                    "triton",
                    (
                        Unit("K1", (GROUP, File("K1/add ü.cubin", 7, named(4)), File("K1/run", 0, named(5), 0o755))),
                        Unit("K2", (File("K2/cuda_utils.so", 9, named(6), mtime_ns=1_600_000_000_123_456_789),)),
                    ),
                ),
            ),
        ),
        Layer(
            named(20),
            1000,
            named(21),
            4096,
            (Section("modelinfos", (Unit("m.json", (File("m.json", 3, named(7)),)),)),),
        ),
    ),
    provenance=Provenance("0.1.0", "build-host", ("vllm", "serve", "--api-key", "***")),
    timings={"run": 45.25, "init": 3.0},
    ranks=("rank_0_0", "rank_1_0"),
    entries=("ab", "40a0994a95"),
)


def test_the_bytes_of_a_released_manifest_never_change() -> None:
    data = GOLDEN.read_bytes()
    assert encode_manifest(MANIFEST) == data
    assert decode_manifest(data, name="golden") == MANIFEST
    assert digest.of_bytes(data) == GOLDEN_DIGEST


def test_a_manifest_is_canonical_json() -> None:
    data = encode_manifest(MANIFEST)
    again = json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert again.encode() == data


def test_the_order_in_which_a_manifest_was_filled_does_not_matter() -> None:
    reordered = msgspec.structs.replace(
        MANIFEST,
        timings=dict(reversed(MANIFEST.timings.items())),
        needs=msgspec.structs.replace(MANIFEST.needs, ordinals={"rank_1_0": 1, "rank_0_0": 0}),
    )
    assert encode_manifest(reordered) == encode_manifest(MANIFEST)


texts = st.text(st.characters(codec="utf-8"), max_size=8)
names = st.text(st.characters(codec="ascii", categories=("Ll", "N")), min_size=1, max_size=8)
digests = st.integers(0, 16**64 - 1).map(named)
sizes = st.integers(0, MAX_CAPTURE_BYTES // 64)
rows = st.builds(
    File,
    path=names,
    size=sizes,
    digest=digests,
    mode=st.sampled_from([0o644, 0o755]),
    mtime_ns=st.none() | st.integers(0, 2**62),
    relocated=st.booleans(),
)


def unit_of(files: list[File], name: str) -> Unit:
    placed = {f"{name}/{file.path}": file for file in files}
    return Unit(name, tuple(msgspec.structs.replace(placed[path], path=path) for path in sorted(placed)))


units = st.dictionaries(names, st.lists(rows, min_size=1, max_size=4), min_size=1, max_size=4).map(
    lambda found: tuple(unit_of(found[name], name) for name in sorted(found))
)
found_sections = st.lists(
    st.builds(Section, domain=names, units=units), max_size=3, unique_by=lambda section: section.domain
)
factors = st.lists(
    st.builds(Factor, name=texts, value=texts | st.none(), role=st.sampled_from(["guard", "match", "blind"])),
    max_size=4,
    unique_by=lambda factor: factor.name,
)


@given(factors, found_sections, st.integers(0, 3), st.tuples(digests, sizes, digests, sizes), texts, st.booleans())
def test_every_manifest_survives(
    found: list[Factor],
    held: list[Section],
    cut: int,
    facts: tuple[Digest, int, Digest, int],
    text: str,
    complete: bool,
) -> None:
    parts = (held[:cut], held[cut:])
    layers = tuple(Layer(*facts, tuple(sorted(part, key=lambda section: section.domain))) for part in parts)
    manifest = msgspec.structs.replace(draft(found, complete=complete), layers=layers, model=text, timings={text: 0.1})
    assert decode_manifest(encode_manifest(manifest), name="x") == manifest


def altered(change: Callable[[Any], object]) -> bytes:
    """The golden manifest with a change, canonical again, and with the key that its factors make."""
    value = json.loads(encode_manifest(MANIFEST))
    change(value)
    return canonical(value)


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def put(*where: str | int, value: object) -> Callable[[Any], object]:
    def change(found: Any) -> None:
        for step in where[:-1]:
            found = found[step]
        found[where[-1]] = value

    return change


LAYER = ("layers", 0)
SECTION = (*LAYER, "sections", 1)
ALONE = ("layers", 1, "sections", 0)
"""The only section of its layer: its name is out of order beside no other."""
UNIT = (*SECTION, "units", 0)
FILE = (*UNIT, "files", 1)


def triton_of(value: Any) -> Any:
    """The section of Triton in the golden manifest as JSON."""
    return value["layers"][0]["sections"][1]


def repeat_first_section(value: Any) -> None:
    sections = value["layers"][0]["sections"]
    sections.insert(0, sections[0])


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a newer layout": (put("layout", value=LAYOUT + 1), "layout 2, this cachemgr reads layout 1"),
    "layout 0": (put("layout", value=0), "layout 0"),
    "a layout in words": (put("layout", value="1"), "cannot be read"),
    "an unknown field": (put("extra", value=1), "unknown field `extra`"),
    "an unknown field of a layer": (put(*LAYER, "chunks", value=[]), "not in canonical form"),
    "an unknown field of a section": (put(*SECTION, "format", value="tar"), "not in canonical form"),
    "an unknown field of a unit": (put(*UNIT, "rank", value=0), "not in canonical form"),
    "an unknown field of a file": (put(*FILE, "xattrs", value={}), "not in canonical form"),
    "an unknown field of a factor": (put("factors", 0, "scope", value="x"), "not in canonical form"),
    "an unknown relation": (put("needs", "driver", value="580"), "not in canonical form"),
    "a missing field": (lambda value: value.pop("complete"), "missing required field `complete`"),
    "a role that nobody knows": (put("factors", 0, "role", value="hint"), "cannot be read"),
    "no key": (put("key", value="k1:xyz"), "is no key"),
    "an empty key": (put("key", value=""), "is no key"),
    "a key of other factors": (put("key", value="k1:" + "0" * 32), "do not make its key"),
    "another factor value": (put("factors", 0, "value", value="12.8"), "do not make its key"),
    "a factor given twice": (lambda value: value["factors"].append(value["factors"][0]), "a factor is given twice"),
    "a domain in two layers": (put(*ALONE, "domain", value="torch_compile"), "a domain has two sections"),
    "a section twice": (repeat_first_section, "a domain has two sections"),
    "sections out of order": (lambda value: value["layers"][0]["sections"].reverse(), "misorders its sections"),
    "an empty section": (put(*SECTION, "units", value=[]), "section triton is empty"),
    "a section without a domain": (lambda value: triton_of(value).pop("domain"), "missing required field `domain`"),
    "a section without units": (lambda value: triton_of(value).pop("units"), "missing required field `units`"),
    "a layer without sections": (lambda value: value["layers"][0].pop("sections"), "missing required field `sections`"),
    "a layer digest that is none": (put(*LAYER, "digest", value="sha256:../../etc"), "malformed digest"),
    "a digest in capitals": (put(*LAYER, "digest", value="sha256:" + "A" * 64), "malformed digest"),
    "a tar digest that is none": (put(*LAYER, "tar_digest", value="md5:00"), "malformed digest"),
    "a file digest that is none": (put(*FILE, "digest", value=""), "malformed digest"),
    "a negative layer": (put(*LAYER, "size", value=-1), "impossible size"),
    "a negative tar": (put(*LAYER, "tar_size", value=-1), "impossible size"),
    "an enormous tar": (put(*LAYER, "tar_size", value=MAX_CAPTURE_BYTES + 1), "impossible size"),
    "a negative file": (put(*FILE, "size", value=-1), "impossible size"),
    "an enormous file": (put(*FILE, "size", value=MAX_CAPTURE_BYTES + 1), "impossible size"),
    "a size that no integer holds": (put(*FILE, "size", value=2**70), "cannot be read|impossible size"),
    "files that are too large together": (
        lambda value: [file.update(size=MAX_CAPTURE_BYTES) for file in triton_of(value)["units"][0]["files"]],
        "impossible size together",
    ),
    "a time before all times": (put(*FILE, "mtime_ns", value=-1), "impossible time"),
    "a time that no kernel takes": (put(*FILE, "mtime_ns", value=2**63), "impossible time"),
    "two names in two cases": (
        put(*SECTION, "units", 1, "files", 0, "path", value=GROUP.path.swapcase()),
        "repeats a file of another unit",
    ),
    "a setuid mode": (put(*FILE, "mode", value=0o4755), "has mode 4755"),
    "a mode for everybody": (put(*FILE, "mode", value=0o666), "has mode 666"),
    "a unit twice": (put(*SECTION, "units", 1, "name", value="K1"), "repeats or misorders its units"),
    "units out of order": (lambda value: triton_of(value)["units"].reverse(), "repeats or misorders its units"),
    "an empty unit": (put(*UNIT, "files", value=[]), "is empty"),
    "files out of order": (lambda value: triton_of(value)["units"][0]["files"].reverse(), "misorders its files"),
    "a file twice": (put(*FILE, "path", value=GROUP.path), "repeats or misorders its files"),
    "a file of another unit": (
        put(*SECTION, "units", 1, "files", 0, "path", value=GROUP.path),
        "repeats a file of another unit",
    ),
    "a file where a directory must be": (put(*FILE, "path", value="K1/__grp__add.json/x"), "a file and a directory"),
    "a file over another unit": (
        put(*SECTION, "units", 1, "files", 0, "path", value="K1/run/x"),
        "`k1/run` is a file and a directory",
    ),
    "a unit name that leads out": (put(*UNIT, "name", value="../K1"), "is not a unit that may be placed"),
    "an absolute unit name": (put(*UNIT, "name", value="/K1"), "is not a unit that may be placed"),
    "an empty unit name": (put(*UNIT, "name", value=""), "is not a unit that may be placed"),
    "an entry that leads out": (put("entries", value=["../../layers"]), "is no name of an entry"),
    "an entry with a slash": (put("entries", value=["a/b"]), "is no name of an entry"),
    "an empty entry": (put("entries", value=[""]), "is no name of an entry"),
    "a hidden entry": (put("entries", value=[".x"]), "is no name of an entry"),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_manifest_that_is_not_in_order_is_refused(change: Callable[[Any], object], words: str) -> None:
    with pytest.raises(CorruptError, match=words) as caught:
        decode_manifest(altered(change), name="abc123")
    assert str(caught.value).startswith("capture abc123 ")


UNSAFE = {
    "empty": "",
    "absolute": "/etc/cron.d/x",
    "up": "../x",
    "up inside": "K1/../../x",
    "up at the end": "K1/..",
    "here": "K1/./x",
    "doubled": "K1//x",
    "directory": "K1/x/",
    "nul": "K1/a\0b",
    "newline": "K1/a\nb",
    "escape": "K1/\x1b[31m",
    "right to left": "K1/\u202egpj.so",
    "no-break space": "K1/a\u00a0b",
    "backslash": "K1\\x",
    "long name": "K1/" + "x" * 256,
    "long name in bytes": "K1/" + "ü" * 128,
    "long path": "K1/" + "x/" * 600 + "x",
}


@pytest.mark.parametrize("path", UNSAFE.values(), ids=UNSAFE.keys())
def test_a_path_that_could_lead_elsewhere_is_refused(path: str) -> None:
    def change(value: Any) -> None:
        first = triton_of(value)["units"][0]
        first["files"] = [first["files"][0] | {"path": path}]

    assert not is_safe_path(path)
    with pytest.raises(CorruptError, match="is not a path that may be placed"):
        decode_manifest(altered(change), name="x")


UNSAFE_DOMAINS = {
    "empty": "",
    "up": "..",
    "here": ".",
    "hidden": ".triton",
    "a path": "triton/K1",
    "up and away": "../layers",
    "absolute": "/etc",
    "backslash": "..\\layers",
    "nul": "tri\0ton",
    "newline": "triton\n",
    "escape": "\x1b[31m",
    "right to left": "\u202enotirt",
    "long": "x" * 256,
    "long in bytes": "ü" * 128,
}


@pytest.mark.parametrize("domain", UNSAFE_DOMAINS.values(), ids=UNSAFE_DOMAINS.keys())
def test_a_domain_that_could_lead_elsewhere_is_refused(domain: str) -> None:
    """It is the first part of every member's name, and messages show it."""
    with pytest.raises(CorruptError, match="is no name of a domain") as caught:
        decode_manifest(altered(put(*ALONE, "domain", value=domain)), name="x")
    assert str(caught.value).isprintable()


def test_one_path_may_lie_in_two_domains() -> None:
    """Paths are relative to the directory of their domain; Inductor and Triton both have kernels."""
    row = Unit("K1", (File("K1/run", 1, named(3)),))
    layer = Layer(named(1), 1, named(2), 1, (Section("inductor", (row,)), Section("triton", (row,))))
    manifest = msgspec.structs.replace(draft(), layers=(layer,))
    assert decode_manifest(encode_manifest(manifest), name="x") == manifest


def test_a_domain_that_nobody_knows_yet_is_not_refused() -> None:
    """A later release may capture more; what this one knows is still of use."""
    assert decode_manifest(altered(put(*ALONE, "domain", value="flashinfer")), name="x").section("flashinfer")


@pytest.mark.parametrize("path", ["a", "a b/c'd\"", "ünïcödé/文", "x" * 255, "..a/b..", "...", "a:b", "-rf", "~"])
def test_odd_and_harmless_paths_are_not_refused(path: str) -> None:
    assert is_safe_path(path)


def test_a_lone_surrogate_is_no_path() -> None:
    assert not is_safe_path("a\udcff")
    escaped = encode_manifest(MANIFEST).replace(b"K1/run", b"K1/s\\udcff")
    with pytest.raises(CorruptError):
        decode_manifest(escaped, name="x")


NOT_CANONICAL = {
    "white space": lambda data: data.replace(b'","', b'", "', 1),
    "a trailing newline": lambda data: data + b"\n",
    "another order": lambda data: b'{"layout":1,' + data[1:].replace(b'"layout":1,', b"", 1),
    "an escaped letter": lambda data: data.replace("ü".encode(), b"\\u00fc"),
    "a key twice": lambda data: b'{"complete":false,' + data[1:],
    "a default spelled out": lambda data: data.replace(b'"mode":493', b'"mode":493,"mtime_ns":null'),
    "a float with more digits": lambda data: data.replace(b"45.25", b"45.250"),
}


@pytest.mark.parametrize("change", NOT_CANONICAL.values(), ids=NOT_CANONICAL.keys())
def test_bytes_that_say_the_same_in_another_way_are_no_manifest(change: Callable[[bytes], bytes]) -> None:
    data = encode_manifest(MANIFEST)
    assert change(data) != data
    with pytest.raises(CorruptError, match="not in canonical form"):
        decode_manifest(change(data), name="x")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"\0", b'{"layout":1}', b"[" * 100_000])
def test_what_is_no_manifest_at_all_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match="capture x"):
        decode_manifest(data, name="x")


def test_every_cut_of_a_manifest_is_refused() -> None:
    data = encode_manifest(MANIFEST)
    for end in range(len(data)):
        with pytest.raises(CorruptError):
            decode_manifest(data[:end], name="x")


def test_a_newer_layout_says_what_to_do_even_when_its_fields_are_strange() -> None:
    with pytest.raises(CorruptError, match="layout 9") as caught:
        decode_manifest(b'{"layout":9,"layers":{"a":"b"}}', name="x")
    assert caught.value.hint == "upgrade cachemgr"


def test_a_million_members_are_refused() -> None:
    """However they are spread over domains."""
    many = tuple(File(f"u/{number:07}", 0, named(0)) for number in range(MAX_FILES + 1))
    half = len(many) // 2
    sections = (Section("inductor", (Unit("u", many[:half]),)), Section("triton", (Unit("u", many[half:]),)))
    layer = Layer(named(1), 1, named(2), 1, sections)
    with pytest.raises(CorruptError, match="more than 500000"):
        decode_manifest(encode_manifest(msgspec.structs.replace(draft(), layers=(layer,))), name="x")


def test_a_section_is_found_by_its_domain() -> None:
    held = MANIFEST.section("triton")
    assert held is not None
    layer, section = held
    assert layer is MANIFEST.layers[0]
    assert [file.path for file in section.files()] == [
        "K1/__grp__add.json",
        "K1/add ü.cubin",
        "K1/run",
        "K2/cuda_utils.so",
    ]
    assert list(layer.files()) == [*layer.sections[0].files(), *section.files()]
    assert MANIFEST.section("modelinfos") == (MANIFEST.layers[1], MANIFEST.layers[1].sections[0])
    assert [found.domain for _layer, found in MANIFEST.sections()] == ["torch_compile", "triton", "modelinfos"]
    assert MANIFEST.section("inductor") is None


LAUNCH = Launch(
    schema=1,
    launch="0190c5e4",
    key=derive(FACTORS),
    result="near",
    artifact=Key("k1:" + "1" * 32),
    where="local",
    verdict="partly used",
    reasons=("because",),
    restored_files=3,
    restored_bytes=4,
    restore_seconds=0.25,
    present_files=0,
    added={"triton": 1},
    added_after_ready=0,
    phases={"run": 1.5},
    published=None,
    errors={},
    started="2026-01-02T03:04:05Z",
    exit_code=0,
    engine="torch",
    engine_version=None,
    model="m.py",
    device="cpu",
    host="host",
    differs=(Difference("vllm.max_model_len", "4096", "8192", "match"),),
)


def launch_named(name: str, *, exit_code: int | None = 0, day: str = "2026-01-02") -> Launch:
    """A record of another launch."""
    return msgspec.structs.replace(LAUNCH, launch=name, exit_code=exit_code, started=f"{day}T03:04:05Z")


def test_a_launch_record_survives_and_shows_every_field() -> None:
    for launch in (LAUNCH, msgspec.structs.replace(LAUNCH, differs=())):
        data = encode_launch(launch)
        assert decode_launch(data) == launch
        assert set(json.loads(data)) == set(Launch.__struct_fields__)
        assert canonical(json.loads(data)) == data


def test_a_launch_record_of_a_later_release_can_still_be_counted() -> None:
    later = json.loads(encode_launch(LAUNCH)) | {"new": 1}
    assert decode_launch(canonical(later)) == LAUNCH


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b"[" * 100_000])
def test_a_torn_launch_record_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match="launch record"):
        decode_launch(data)


def test_a_manifest_type_is_exported_with_its_layout() -> None:
    assert Manifest.__struct_fields__[0] == "layout"
    assert MANIFEST.layout == LAYOUT == 1
