"""What is fuzzed: every reader of bytes that somebody else may have written, with what it may raise and what must hold.

Inputs are mutations of `seeds` and of the corpus in `data/fuzz/<target>/`, where `scripts/fuzz` keeps inputs that
reached new lines and those that failed once. `test_fuzz.py` runs all of the corpus, and a few hundred new inputs.
"""

import ast
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

import msgspec
import zstandard
from hypothesis import strategies as st

from cachemgr import digest, layer, settings
from cachemgr.capture import File, Layer, Section, decode_launch, decode_manifest, encode_manifest, is_safe_path
from cachemgr.clock import written
from cachemgr.digest import Digest
from cachemgr.domains import TABLE
from cachemgr.domains.checks import Content
from cachemgr.domains.relocation import CannotTravelError, unchanged
from cachemgr.engine_log import EngineLog
from cachemgr.errors import CorruptError, NotFoundError, UntrustedError, UsageError
from cachemgr.factors import program, wrappers
from cachemgr.factors.vllm import flags, yaml_file
from cachemgr.factors.vllm.facts import facts_for
from cachemgr.heads import Heads
from cachemgr.hold import others
from cachemgr.key import derive
from cachemgr.observe import STAGE_PREFIX, Seen
from cachemgr.oci import documents
from cachemgr.oci.directory import listed
from cachemgr.oci.documents import Descriptor
from cachemgr.oci.image import Image, compose, stored_objects
from cachemgr.oci.images import ImageStore
from cachemgr.sensitive import without_secrets
from cachemgr.signature import Signer, public_key, verified
from cachemgr.statcache import StatCache
from cachemgr.store.captures import Capture, load
from cachemgr.store.layout import Layout, manifest_name, read_layout
from cachemgr.trust import revoked_names, trusted_keys
from tests.authorities import Authority
from tests.stores import MemoryStore
from tests.trees import FACTORS, draft, elf, index, strings, unit

CORPUS = Path(__file__).parent / "data" / "fuzz"
KEY = derive(FACTORS)
_FACTS = facts_for("0.32.0")
_CAPTURE = Digest("sha256:" + "5e" * 32)
_AUTHORITY = Authority()


@dataclass(frozen=True)
class Target:
    """One reader. `run` raises nothing but AssertionError, and that when something does not hold."""

    name: str
    seeds: tuple[bytes, ...]
    run: Callable[[bytes], None]
    words: tuple[bytes, ...] = ()
    """What makes sense somewhere in an input."""

    def corpus(self) -> list[bytes]:
        """Seeds and what was kept."""
        kept = sorted((CORPUS / self.name).glob("*"))
        return [*self.seeds, *(path.read_bytes() for path in kept)]


def inputs(target: Target) -> st.SearchStrategy[bytes]:
    """Mutations of what is known, and now and then anything at all."""
    known = st.sampled_from(target.corpus())
    place = st.floats(0, 1, exclude_max=True)
    words = st.sampled_from(target.words or (b"\0", b"/", b'"'))
    edit = st.one_of(
        st.tuples(st.just("flip"), place, st.integers(1, 255)),
        st.tuples(st.just("insert"), place, st.binary(min_size=1, max_size=8) | words),
        st.tuples(st.just("replace"), place, st.binary(min_size=1, max_size=8) | words),
        st.tuples(st.just("delete"), place, st.integers(1, 64)),
        st.tuples(st.just("repeat"), place, st.integers(2, 300)),
        st.tuples(st.just("splice"), place, known),
    )
    return st.builds(_edited, known, st.lists(edit, max_size=6)) | st.binary(max_size=200)


def _edited(data: bytes, edits: Sequence[tuple[str, float, int | bytes]]) -> bytes:
    for kind, place, more in edits:
        at = int(place * len(data))
        if kind == "flip" and data:
            assert isinstance(more, int)
            data = data[:at] + bytes([data[at] ^ more]) + data[at + 1 :]
        elif kind == "delete":
            assert isinstance(more, int)
            data = data[:at] + data[at + more :]
        elif kind == "repeat":
            assert isinstance(more, int)
            data = data[:at] + data[at : at + 1] * more + data[at:]
        elif isinstance(more, bytes):
            data = data[:at] + more + data[at + (len(more) if kind == "replace" else 0) :]
    return data


# Layers

_FILES = {"a/empty": b"", "a/one": b"1" * 700, "a/same": b"equal" * 100, "a/same too": b"equal" * 100}


@cache
def _layer() -> tuple[Layer, bytes]:
    target = io.BytesIO()
    sections = [Section("triton", (unit("a", _FILES),))]
    return layer.pack(sections, lambda _domain, file: iter([_FILES[file.path]]), target), target.getvalue()


class _Placed:
    """Checks that whatever arrives is what the manifest says."""

    def whole(self, file: File, data: memoryview) -> None:
        assert digest.of_bytes(data) == file.digest

    def parts(self, file: File, parts: Iterator[memoryview]) -> None:
        assert digest.of_bytes(b"".join(parts)) == file.digest

    def link(self, file: File, original: str) -> None:
        assert _FILES[original] == _FILES[file.path]


def _compressed(data: bytes) -> None:
    """A layer whose manifest has the digest of these bytes, as a hostile publisher makes it."""
    made = msgspec.structs.replace(_layer()[0], digest=digest.of_bytes(data), size=len(data))
    with suppress(CorruptError):
        layer.unpack(made, io.BytesIO(data), lambda _domain, _unit: _Placed())


def _tar(data: bytes) -> None:
    _compressed(zstandard.compress(data))


# Images


class _Place:
    """A place of images of which only the first document is there."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def index(self) -> bytes:
        return self._data

    def document(self, wanted: Descriptor) -> bytes:
        raise NotFoundError(f"no {wanted.digest}")

    def open(self, blob: Digest) -> BinaryIO:
        raise NotFoundError(f"no {blob}")


def _image(data: bytes) -> None:
    with suppress(CorruptError, NotFoundError):
        ImageStore(_Place(data))
        raise AssertionError("an image without its top layer has nothing")


def _top(data: bytes) -> None:
    with suppress(CorruptError):
        objects = stored_objects(zstandard.compress(data), "an image")
        assert all(len(held) <= len(data) for held in objects.values())


def _composed() -> Image:
    made, _data = _layer()
    capture = Capture(_CAPTURE, msgspec.structs.replace(draft(), layers=(made,)), 1)
    return compose(KEY, [capture], {})


# Manifests and what else a store has


def _manifest(data: bytes) -> None:
    try:
        found = decode_manifest(data, name="fuzz")
    except CorruptError:
        return
    assert encode_manifest(found) == data
    paths = [file.path for _layer, section in found.sections() for file in section.files()]
    assert all(is_safe_path(path) and os.path.normpath(f"/root/{path}") == f"/root/{path}" for path in paths)
    assert all(file.mode in (0o644, 0o755) for held in found.layers for file in held.files())


def _store(objects: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore(Path(tempfile.gettempdir()))
    for name, data in objects.items():
        store.put(name, data)
    return store


def _packed_manifest(data: bytes) -> None:
    name = manifest_name(KEY, _CAPTURE)
    with suppress(CorruptError):
        load(_store({name: data}), KEY, name)
        raise AssertionError("these bytes cannot have this digest")


def _launch(data: bytes) -> None:
    with suppress(CorruptError):
        decode_launch(data)


def _layout(data: bytes) -> None:
    with suppress(CorruptError):
        assert isinstance(read_layout(_store({"layout.json": data})), Layout)


# Relocating parsers and self-checks


def _relocated(path: str) -> Callable[[bytes], None]:
    found = (domain.relocation_of(path) for domain in TABLE)
    relocation = next(each for each in found if each is not None)
    moves = relocation.attach is not unchanged

    def run(data: bytes) -> None:
        with suppress(CannotTravelError):
            stored = relocation.detach(data, {"add.cubin", "artifact_a", "x"})
            relocation.attach(stored, "/new/place")
        try:
            placed = relocation.attach(data, "/new/place")
        except (CannotTravelError, ValueError, RecursionError):  # what the stage takes for a refusal
            return
        if moves:
            value = json.loads(placed) if path.endswith(".json") else ast.literal_eval(placed.decode())
            assert [text for text in strings(value) if text.startswith("/") and not _is_sibling(text)] == []

    return run


def _is_sibling(text: str) -> bool:
    base = text.removeprefix("/new/place/")
    return base != text and "/" not in base and base not in ("", ".", "..")


_CHECKED = ("AA/x.json", "AA/x.so", "qa/cqa.py", "fxgraph/a/b/c", "x.cubin", "a.best_config", "v2/a/entries/x.json")


def _checks(data: bytes) -> None:
    for domain in TABLE:
        for path in (*_CHECKED, "startup_plan_0123456789abcdef.json", "5e" * 32 + "/rank_0_0/model", "a/build.ninja"):
            name = path.rsplit("/", 1)[-1]
            for size in (len(data), len(data) + 1):
                fault = domain.check_of(path)(Content(name, data, size))
                assert fault is None or fault


# Signatures and keys


def _signature(data: bytes) -> None:
    try:
        said = verified(data, _CAPTURE, KEY, _AUTHORITY.signer.public)
    except UntrustedError:
        return
    assert data == _signed(), "only the signer can make another one"
    assert said.capture == _CAPTURE


@cache
def _signed() -> bytes:
    return _AUTHORITY.signer.sign(_CAPTURE, KEY, signed=written(1_800_000_000))


def _keys(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    words = text.replace("/", "").replace("~", "").split("\n")  # no files of this machine
    faults: list[str] = []
    for name, key in trusted_keys(words, faults).items():
        assert public_key(str(key.public)).id == name
    revoked_names(words, faults)
    with suppress(UsageError):
        Signer(data, where="fuzz")


# Settings and command lines


def _settings(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.toml"
        path.write_bytes(data)
        with suppress(UsageError):
            settings.load({"HOME": directory}, {}, config=path, etc=Path(directory) / "none")
        with suppress(UsageError):
            settings.load({"HOME": directory}, {}, etc=path)


def _variables(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape").replace("\0", "")
    for setting in settings.TABLE:
        with suppress(UsageError):
            settings.load({"HOME": "/h", setting.variable: text}, {}, etc=Path("/none"))


def _words(data: bytes) -> list[str]:
    return [os.fsdecode(word) for word in data.split(b"\0")]


def _flags(data: bytes) -> None:
    words = [word for word in _words(data) if not word.startswith("--conf")]  # no files of this machine
    for front_end in ("serve", "bench latency"):
        found = flags.parse(words, _FACTS, front_end, Path("/none"))
        for factor in flags.factors(found, _FACTS):
            factor.name.encode()
            (factor.value or "").encode()


def _command(data: bytes) -> None:
    words = _words(data)
    shown = program.shown(words)
    assert len(shown) == len(words)
    command = wrappers.unwrap(words, {})
    if command.argv:
        found = program.parse(command, Path("/none"))
        found.label.encode()


def _secrets(data: bytes) -> None:
    text = data.decode("utf-8", "backslashreplace")
    hidden = without_secrets(text)
    assert without_secrets(hidden) == hidden


def _yaml(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.yaml"
        path.write_bytes(data)
        with suppress(ValueError):
            yaml_file.words(path, {"x"})


# Our own state, that somebody may have written for us, and what an engine prints


def _state(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "state").write_bytes(data)
        cache_of = StatCache.load(place / "state")
        cache_of.get("/x", Seen(1, 2, 3, 4))
        cache_of.save(place / "state")
        (place / "state").write_bytes(data)
        assert Heads(place / "state").of(_store({}), []) == {}
        held = place / "live" / f"{STAGE_PREFIX}held"
        held.mkdir(parents=True)
        (held / "x.json").write_bytes(data)
        assert len(others(str(place / "live"), "launch", now=0.0)) <= 1


def _log(data: bytes) -> None:
    log = EngineLog(0.0)
    for at in range(0, len(data), 97):
        log.feed(data[at : at + 97], float(at))
    log.close(1e6)
    log.seen()


_JSON = (b"null", b"true", b"1e999", b"-1", b"[", b"{", b'"@dir@/x"', b'"/etc/passwd"', b'"\\ud800"', b"9" * 30)
_GROUP = b'{"child_paths": {"add.cubin": "@dir@/add.cubin", "x": "/old/place/x"}}'
_INDEX = index("/old/place", ["artifact_a", "x"])
_ENGINE_LOG = (
    b"INFO 07-01 12:00:00 [core.py:77] Initializing a V1 LLM engine (v0.32.0) with config: model='m'\n"
    b"(EngineCore pid=7) INFO 07-01 12:00:01 [backends.py:1] Directly load AOT compilation from path "
    b"/c/5e/rank_0_0/model\n"
    b"INFO:     Application startup complete.\nTraceback (most recent call last):\n  File x\nValueError: y\n"
)

TARGETS = (
    Target(
        "secrets",
        (
            b'--x={"password": "x", "a": [{"auth_token": "y"}]}',
            b"https://u:p@h/x?sig=1&a=2",
            b"Authorization: Bearer abcd",
        ),
        _secrets,
        (b"token=", b"://", b"@", b"?sig=", b"bearer ", b"hf_abcdefghijklmnop", b'"', b"=", b": ", b"***"),
    ),
    Target("layer", (_layer()[1],), _compressed),
    Target(
        "tar", (zstandard.ZstdDecompressor().decompress(_layer()[1]),), _tar, (b"ustar\0", b"0000644\0", b"\0" * 512)
    ),
    Target(
        "manifest",
        (encode_manifest(draft()), encode_manifest(msgspec.structs.replace(draft(), layers=(_layer()[0],)))),
        _manifest,
        (*_JSON, b'"path":"../x"', b'"mode":2541', b"sha256:", b'"layout":2'),
    ),
    Target("image", (_composed().manifest, documents.encode(listed([_composed()]))), _image, _JSON),
    Target("image top", (zstandard.decompress(_composed().top),), _top, (b"ustar\0", b".cachemgr/", b"\0" * 512)),
    Target("packed manifest", (zstandard.compress(encode_manifest(draft())),), _packed_manifest),
    Target("launch", (b'{"schema":1,"launch":"x"}',), _launch, _JSON),
    Target("layout", (b'{"layout":1}', b'{"layout":1,"salt":"00"}'), _layout, _JSON),
    Target("group", (_GROUP,), _relocated("AA/__grp__add.json"), _JSON),
    Target(
        "index",
        (_INDEX,),
        _relocated("40a0994a95/rank_0_0/vllm_compile_cache.py"),
        (b"0x" + b"f" * 64, b"{1, 2}", b"b'x'", b"'@dir@/x'", b"'\\ud800'", b"(", b"[", b"1j", b"-"),
    ),
    Target(
        "factors",
        (b'{"env": {"VLLM_API_KEY": "x", "A": "http://u:p@h"}}',),
        _relocated("40a0994a95/rank_0_0/cache_key_factors.json"),
        _JSON,
    ),
    Target(
        "checks", (elf("seed", 400), b"import x\n", b'{"a": 1}', b"rule cc\nbuild a: cc b\n", _INDEX), _checks, _JSON
    ),
    Target("signature", (_signed(),), _signature, (*_JSON, b'"version":2', b'"expires":"2999-01-01T00:00:00Z"')),
    Target(
        "keys",
        (_AUTHORITY.public.encode(), _AUTHORITY.public.encode() + b"\nexpires=2027-01-01T00:00:00Z", b"5e" * 16),
        _keys,
    ),
    Target(
        "settings",
        (b'store = "/x"\ndeadline = 3.5\ntrust = "require"\nlocked = ["store"]\n',),
        _settings,
        (b"[[", b"inf", b"nan", b"1979-05-27"),
    ),
    Target(
        "variables",
        (b"1", b"/x", b"local=off,seed=require", b"3.5", b"ed25519:AAAA"),
        _variables,
        (b"=", b",", b"inf", b"nan", b"~"),
    ),
    Target(
        "flags",
        (
            b"m\0-tp\x002\0-O2\0--max-model-len=4K\0-cc.mode=3",
            b'm\0-cc\0{"mode": 3, "pass_config": {"a": true}}\0--lora-modules\0a=/x',
        ),
        _flags,
        (b"\0", b"--", b"-cc.", b"=", b"{", b"--no-", b"-cc.a+", b"inf", b"1e400", b"\xff"),
    ),
    Target(
        "command",
        (b"env\0A=1\0nice\0-n\x003\0python\0-m\0torch.distributed.run\0x.py\0--token\0s",),
        _command,
        (b"\0", b"-", b"env\0-S", b"="),
    ),
    Target(
        "yaml",
        (b"model: m\ntensor-parallel-size: 2\nx: [1, 2]\n",),
        _yaml,
        (b"- ", b"? ", b"&a *a", b"!!python/object/apply:os.system", b"{", b"[", b"1979-05-27"),
    ),
    Target(
        "state",
        (msgspec.msgpack.encode({"x": 1}), msgspec.msgpack.encode({"x": [KEY, "t", True, [], [[], None]]})),
        _state,
    ),
    Target("log", (_ENGINE_LOG,), _log, (b"\n", b"\r", b"\x1b[0m", b"Traceback", b"[", b"\xe2")),
)
