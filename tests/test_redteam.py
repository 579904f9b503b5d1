"""Hostile inputs: what somebody who can write the store, or beside the live directory, may try. Each is refused with a
reason that says what was found, nothing is placed, and nothing outside of the live directory is touched.

The attacker here has the best tools: manifests are canonical and have the digests of their names, layers have the
digests that manifests say. Only what is really checked stands in the way. Signatures have a suite of their own
(`test_trust.py`).
"""

import io
import json
import os
import re
import shutil
import socket
import tarfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import pytest
import zstandard

from cachemgr import digest, layer
from cachemgr.capture import MAX_CAPTURE_BYTES, MAX_MANIFEST_BYTES, File, Layer, Section, Unit
from cachemgr.capture import encode_manifest as encode
from cachemgr.digest import Digest
from cachemgr.domains import TABLE, Target
from cachemgr.domains.torch import INDUCTOR
from cachemgr.domains.triton import TRITON
from cachemgr.errors import CacheError, DeniedError
from cachemgr.key import derive
from cachemgr.observe import STAGE_PREFIX
from cachemgr.store import layout
from cachemgr.store.captures import commit, load
from cachemgr.store.local import LocalStore
from tests.stores import spool
from tests.trees import FACTORS, NOW_NS, changed, draft, look_up, read, restore_found, state, triton_key, unit

KEY = derive(FACTORS)
KERNEL = triton_key("hostile")
BODIES = {f"{KERNEL}/add.source": b"// source", f"{KERNEL}/add.ttir": b"module {}"}
CANARY = b"nobody touches this"


@dataclass
class Scene:
    """A store with one good capture of one unit, a live directory that is not there yet, and what lies outside."""

    root: Path
    store: LocalStore

    @property
    def live(self) -> Path:
        return self.root / "machine" / "live"

    @property
    def outside(self) -> Path:
        return self.root / "outside"

    def path(self, name: str) -> Path:
        """Where an object of the store lies."""
        return self.root / "store" / name

    @property
    def manifest(self) -> Path:
        (found,) = self.path(layout.artifact_prefix(KEY)).glob("*.json.zst")
        return found

    @property
    def layer(self) -> Path:
        (found,) = self.path(layout.LAYERS).rglob("*.tar.zst")
        return found

    def value(self) -> Any:
        """The manifest as JSON."""
        return json.loads(zstandard.ZstdDecompressor().decompress(self.manifest.read_bytes()))

    def plant(self, data: bytes, *, packed: bytes | None = None, name: Digest | None = None) -> None:
        """Put a manifest of these bytes in the place of the good one."""
        self.manifest.unlink()
        place = self.path(layout.manifest_name(KEY, name or digest.of_bytes(data)))
        place.write_bytes(zstandard.compress(data) if packed is None else packed)

    def warm(self) -> list[str]:
        """Look up and restore as a launch does; every reason that was given."""
        try:
            found = look_up(self.store)
            restored = restore_found(self.store, found, [Target(TRITON, f"{self.live}/triton", ours=True)])
        except CacheError as error:
            return [str(error)]
        return [*(each.reason for each in found.damaged), *found.reasons, *restored.reasons]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    made = Scene(tmp_path, LocalStore(tmp_path / "store"))
    (made.outside / "tree").mkdir(parents=True)  # what a stage would be looked for in
    (made.outside / "canary").write_bytes(CANARY)
    (made.outside / "authorized_keys").write_bytes(CANARY)
    made.live.mkdir(parents=True)
    _commit(made, [unit(KERNEL, BODIES)])
    return made


def _packed(units: Sequence[Unit]) -> tuple[Layer, bytes]:
    target = io.BytesIO()
    made = layer.pack([Section("triton", tuple(units))], lambda _domain, file: iter([BODIES[file.path]]), target)
    return made, target.getvalue()


def _commit(scene: Scene, units: Sequence[Unit]) -> None:
    made, data = _packed(units)
    manifest = msgspec.structs.replace(draft(), layers=(made,))
    commit(scene.store, manifest, {made.digest: spool(scene.store, data)}, now=NOW_NS / 1e9)


Attack = Callable[[Scene], object]


def forged(change: Callable[[Any], object]) -> Attack:
    """The good manifest with a change, canonical, under the name that its bytes make."""

    def attack(scene: Scene) -> None:
        value = scene.value()
        change(value)
        scene.plant(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())

    return attack


def spelled(change: Callable[[bytes], bytes]) -> Attack:
    """The good manifest with a change to its bytes, under the name that they make."""
    return lambda scene: scene.plant(change(zstandard.ZstdDecompressor().decompress(scene.manifest.read_bytes())))


def of_file(**fields: object) -> Attack:
    """The last file of the only unit with other fields."""
    return forged(lambda value: _unit(value)["files"][-1].update(fields))


def called(*names: str) -> Attack:
    """The files of the only unit with these names."""

    def change(value: Any) -> None:
        template = _unit(value)["files"][0]
        _unit(value)["files"] = [{**template, "path": name} for name in sorted(names)]

    return forged(change)


def _unit(value: Any) -> Any:
    return value["layers"][0]["sections"][0]["units"][0]


def replaced(place: Callable[[Scene], Path], make: Callable[[Scene, Path], object]) -> Attack:
    """Something else in the place of an object of the store."""

    def attack(scene: Scene) -> None:
        path = place(scene)
        path.unlink()
        make(scene, path)

    return attack


def relinked(place: Callable[[Scene], Path]) -> Attack:
    """A directory of the store moved outside, and a link in its place."""

    def attack(scene: Scene) -> None:
        path = place(scene)
        path.rename(scene.root / "moved")
        path.symlink_to(scene.root / "moved")

    return attack


def with_layer(bodies: Callable[[bytes], bytes], *, named: bool = True) -> Attack:
    """Other bytes in the place of the layer; `named` makes the manifest say so."""

    def attack(scene: Scene) -> None:
        path, data = scene.layer, bodies(scene.layer.read_bytes())
        if not named:
            path.write_bytes(data)
            return
        found = digest.of_bytes(data)
        path.unlink()
        place = scene.path(layout.layer_name(found))
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        forged(lambda value: value["layers"][0].update(digest=found, size=len(data)))(scene)

    return attack


def of_tar(change: Callable[[bytes], bytes]) -> Attack:
    """The layer packed anew after a change to its tar."""
    return with_layer(lambda data: zstandard.compress(change(zstandard.ZstdDecompressor().decompress(data))))


def as_socket(_scene: Scene, path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's name is short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def link_amplification(scene: Scene) -> None:
    """Equal files are stored once: two small ones that claim to be larger than any disk."""

    def change(value: Any) -> None:
        big = {**_unit(value)["files"][0], "size": MAX_CAPTURE_BYTES}
        _unit(value)["files"] = [{**big, "path": f"{KERNEL}/{name}"} for name in "ab"]

    forged(change)(scene)


def another_key(scene: Scene) -> None:
    """A sound capture of another artifact, under this key: a replay to a launch that it was not made for."""
    other = msgspec.structs.replace(draft(changed("torch", "2.12.0")), layers=_packed([unit(KERNEL, BODIES)])[:1])
    scene.plant(encode(other))


def manifest_bomb(scene: Scene) -> None:
    """A few kilobytes that unpack to more than a manifest may have."""
    data = zstandard.compress(b" " * (MAX_MANIFEST_BYTES + 1))
    scene.plant(b"", packed=data, name=digest.of_bytes(b"bomb"))


def unsized(scene: Scene) -> None:
    """A frame that does not say how much will come out."""
    data = zstandard.ZstdDecompressor().decompress(scene.manifest.read_bytes())
    stream = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    scene.plant(data, packed=stream.compress(data) + stream.flush())


def two_frames(scene: Scene) -> None:
    good = scene.manifest.read_bytes()
    data = zstandard.ZstdDecompressor().decompress(good)
    scene.plant(data, packed=good + zstandard.compress(b"{}"))


def wide_window(data: bytes) -> bytes:
    parameters = zstandard.ZstdCompressionParameters(window_log=28, write_content_size=False)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return stream.compress(zstandard.ZstdDecompressor().decompress(data)) + stream.flush()


def swapped_members(tar: bytes) -> bytes:
    return tar[1024:2048] + tar[:1024] + tar[2048:]


MANIFESTS: dict[str, tuple[Attack, str]] = {
    "a path that climbs": (called(f"{KERNEL}/../../../outside/canary"), "not a path that may be placed"),
    "an absolute path": (called("/etc/cron.d/x"), "not a path that may be placed"),
    "a path of this process": (called("/proc/self/cwd/x"), "not a path that may be placed"),
    "a path that ends in nothing": (called(f"{KERNEL}/"), "not a path that may be placed"),
    "a path with NUL": (called(f"{KERNEL}/a\0b"), "not a path that may be placed"),
    "a path with a newline": (called(f"{KERNEL}/a\nb"), "not a path that may be placed"),
    "a path that paints the terminal": (called(f"{KERNEL}/\x1b[2Ja"), "not a path that may be placed"),
    "a path that reads backwards": (called(f"{KERNEL}/\u202egpj.os"), "not a path that may be placed"),
    "a path with invisible letters": (called(f"{KERNEL}/a\u200bb"), "not a path that may be placed"),
    "a path for Windows": (called(f"{KERNEL}/..\\..\\x"), "not a path that may be placed"),
    "a name that no file system takes": (called(f"{KERNEL}/" + "x" * 256), "not a path that may be placed"),
    "a path that no system call takes": (called("/".join([KERNEL, *["x" * 200] * 6])), "not a path that may be placed"),
    "half of a surrogate pair": (spelled(lambda data: data.replace(b"add.ttir", rb"\ud800")), "cannot be read"),
    "one name composed in two ways": (called(f"{KERNEL}/\u00e9", f"{KERNEL}/e\u0301"), "take for one"),
    "one name in two cases": (called(f"{KERNEL}/README", f"{KERNEL}/readme"), "take for one"),
    "one name with a long s": (called(f"{KERNEL}/\u017f", f"{KERNEL}/s"), "take for one"),
    "one name twice": (called(f"{KERNEL}/a", f"{KERNEL}/a"), "repeats or misorders"),
    "a file that is a directory": (called(f"{KERNEL}/a", f"{KERNEL}/a/b"), "is a file and a directory"),
    "a file that is a directory in another case": (called(f"{KERNEL}/A", f"{KERNEL}/a/b"), "is a file and a directory"),
    "a setuid bit": (of_file(mode=0o4755), "has mode 4755"),
    "a setgid bit": (of_file(mode=0o2755), "has mode 2755"),
    "a sticky bit": (of_file(mode=0o1644), "has mode 1644"),
    "a mode for everybody": (of_file(mode=0o666), "has mode 666"),
    "a device's mode": (of_file(mode=0o60644), "has mode 60644"),
    "a negative size": (of_file(size=-1), "impossible size"),
    "a sparse giant": (of_file(size=1 << 62), "impossible size"),
    "a size beyond integers": (of_file(size=1 << 80), "cannot be read|impossible size"),
    "links that fill the disk": (link_amplification, "impossible size together"),
    "a time before time": (of_file(mtime_ns=-1), "impossible time"),
    "a time after time": (of_file(mtime_ns=1 << 63), "impossible time"),
    "a digest that is a path": (of_file(digest="sha256:../../../outside/canary"), "malformed digest"),
    "a layer that is a path": (forged(lambda value: value["layers"][0].update(digest="sha256:/")), "malformed digest"),
    "a domain that climbs": (
        forged(lambda v: v["layers"][0]["sections"][0].update(domain="..")),
        "no name of a domain",
    ),
    "a domain that is a path": (forged(lambda v: v["layers"][0]["sections"][0].update(domain="a/b")), "no name of a"),
    "a unit that climbs": (forged(lambda v: _unit(v).update(name="../x")), "not a unit that may be placed"),
    "a unit without files": (forged(lambda v: _unit(v).update(files=[])), "is empty"),
    "a hint that climbs": (forged(lambda v: v.update(entries=["../../layers"])), "no name of an entry"),
    "a field that asks for less": (forged(lambda v: v.update(signature="none")), "unknown field `signature`"),
    "a field hidden deep": (forged(lambda v: _unit(v)["files"][0].update(owner=0)), "not in canonical form"),
    "an older layout": (forged(lambda v: v.update(layout=0)), "has layout 0"),
    "a newer layout": (forged(lambda v: v.update(layout=2)), "has layout 2"),
    "a layout that is true": (forged(lambda v: v.update(layout=True)), "cannot be read"),
    "a key of another artifact": (another_key, "belongs to k1:"),
    "factors that make another key": (forged(lambda v: v["factors"][0].update(value="12.8")), "do not make its key"),
    "one factor twice": (forged(lambda v: v["factors"].append(v["factors"][0])), "a factor is given twice"),
    "a key that is a path": (forged(lambda v: v.update(key="k1:../../x")), "is no key"),
    "spaces": (spelled(lambda data: data.replace(b":", b": ", 1)), "not in canonical form"),
    "a field twice": (spelled(lambda data: data[:-1] + b',"launch":"x"}'), "not in canonical form"),
    "a byte order mark": (spelled(lambda data: b"\xef\xbb\xbf" + data), "cannot be read"),
    "a hundred thousand brackets": (spelled(lambda _data: b"[" * 100_000), "cannot be read"),
    "a number that is none": (spelled(lambda data: data.replace(b'"size":9', b'"size":NaN', 1)), "cannot be read"),
    "letters that are none": (spelled(lambda data: data.replace(b"llama", b"\xff\xfe", 1)), "cannot be read"),
    "a bomb": (manifest_bomb, "larger than a manifest may be"),
    "a frame of unknown size": (unsized, "claims to be larger|cannot be decompressed"),
    "a second frame": (two_frames, "cannot be decompressed"),
    "no frame": (lambda scene: scene.plant(b"", packed=b"{}", name=digest.of_bytes(b"{}")), "cannot be decompressed"),
    "bytes of another name": (
        lambda scene: scene.plant(b"{}", name=digest.of_bytes(b"x")),
        "other bytes than its name",
    ),
}

LAYERS: dict[str, tuple[Attack, str]] = {
    "one flipped bit": (
        with_layer(lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:], named=False),
        "other bytes than its name says",
    ),
    "cut": (with_layer(lambda data: data[:-1], named=False), "other bytes than its name says"),
    "cut, and named so": (with_layer(lambda data: data[: len(data) // 2]), "ends early|decompressed|does not end"),
    "something after it": (with_layer(lambda data: data + zstandard.compress(b"more")), "does not end where"),
    "not compressed, and other bytes": (
        with_layer(lambda data: zstandard.ZstdDecompressor().decompress(data) + b"x"),
        "cannot be decompressed",
    ),
    "a window of 256 MiB": (with_layer(wide_window), "cannot be decompressed"),
    "a bomb": (of_tar(lambda tar: tar + b"\0" * (200 << 20)), "does not end where its manifest says"),
    "other bytes in a file": (
        of_tar(lambda tar: tar.replace(b"// source", b"// poison")),
        "other bytes than its manif",
    ),
    "members in another order": (of_tar(swapped_members), "other bytes than its manifest says"),
    "a member more": (of_tar(lambda tar: tar[:1024] + tar), "other bytes than its manifest says"),
    "an end in the middle": (of_tar(lambda tar: tar[:1024] + b"\0" * 1024), "other bytes than|ends early"),
}

PLACES: dict[str, tuple[Attack, str]] = {
    "a layer that links outside": (
        replaced(lambda scene: scene.layer, lambda scene, path: path.symlink_to(scene.outside / "canary")),
        "has a layer that is not in the store",
    ),
    "a layer that is a hard link to outside": (
        replaced(lambda scene: scene.layer, lambda scene, path: os.link(scene.outside / "canary", path)),
        "other bytes than its name says",
    ),
    "a layer that is a pipe": (
        replaced(lambda scene: scene.layer, lambda _scene, path: os.mkfifo(path)),
        "has a layer that is not",
    ),
    "a layer that is a socket": (replaced(lambda scene: scene.layer, as_socket), "has a layer that is not"),
    "a layer that is a directory": (
        replaced(lambda scene: scene.layer, lambda _scene, path: path.mkdir()),
        "has a layer that is not",
    ),
    "a layer that is not there": (
        replaced(lambda scene: scene.layer, lambda _scene, _path: None),
        "has a layer that is not",
    ),
    "an artifact that is elsewhere": (relinked(lambda scene: scene.manifest.parent), "a symbolic link is in the way"),
    "all artifacts elsewhere": (relinked(lambda scene: scene.path("artifacts")), "a symbolic link is in the way"),
    "all layers elsewhere": (
        relinked(lambda scene: scene.path("layers")),
        "has a layer that is not|a symbolic link is in the way",
    ),
    "layers of two letters elsewhere": (
        relinked(lambda scene: scene.layer.parent),
        "has a layer that is not|a symbolic link is in the way",
    ),
    "a layout that links outside": (
        replaced(lambda scene: scene.path("layout.json"), lambda s, path: path.symlink_to(s.outside / "canary")),
        "a symbolic link is in the way",
    ),
    "a layout of tomorrow": (
        lambda scene: scene.path("layout.json").write_text('{"layout":2,"salt":""}'),
        "has layout 2, this cachemgr reads layout 1",
    ),
    "a layout that is no number": (
        lambda scene: scene.path("layout.json").write_text('{"layout":"../../x"}'),
        "is no cachemgr store",
    ),
    "a layout without end": (
        lambda scene: os.truncate(scene.path("layout.json"), 1 << 40),
        "has more than 65536 bytes",
    ),
}

ATTACKS = {
    f"{kind}: {name}": row
    for kind, rows in (("manifest", MANIFESTS), ("layer", LAYERS), ("store", PLACES))
    for name, row in rows.items()
}


@pytest.mark.parametrize(("attack", "words"), ATTACKS.values(), ids=ATTACKS.keys())
def test_it_is_refused_with_a_reason_and_nothing_is_placed(scene: Scene, attack: Attack, words: str) -> None:
    attack(scene)
    before = state(scene.outside)
    reasons = scene.warm()
    assert [reason for reason in reasons if re.search(words, reason)], reasons
    assert all(reason.isprintable() for reason in reasons)
    assert list(scene.live.iterdir()) == []
    assert state(scene.outside) == before


def test_the_suite_is_as_large_as_it_says_and_the_scene_is_sound(scene: Scene) -> None:
    """A suite in which everything is refused would prove nothing."""
    assert len(ATTACKS) >= 80
    assert scene.warm() == []
    assert read(scene.live / "triton") == BODIES


@pytest.mark.parametrize("target", ["canary", "/proc/self/environ", "nowhere"])
def test_a_manifest_that_is_a_link_is_none(scene: Scene, target: str) -> None:
    """A listing leaves it out, so that there is nothing to be refused."""
    path = scene.manifest
    path.unlink()
    path.symlink_to(scene.outside / target)
    assert look_up(scene.store).result == "none"
    with pytest.raises(DeniedError, match="a symbolic link is in the way"):
        load(scene.store, KEY, str(path.relative_to(scene.root / "store")))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
@pytest.mark.parametrize("place", ["manifest", "layer", "layout"])
def test_a_device_in_the_place_of_an_object_is_not_read(scene: Scene, place: str) -> None:
    path = {"manifest": scene.manifest, "layer": scene.layer, "layout": scene.path("layout.json")}[place]
    path.unlink()
    os.mknod(path, 0o20644, os.makedev(1, 5))  # /dev/zero has no end
    scene.warm()
    assert list(scene.live.iterdir()) == []


# Headers of a tar are for other tools, nobody here reads them: whatever they say, files arrive, and only those.

HEADERS: dict[str, Callable[[tarfile.TarInfo], object]] = {
    "a symbolic link": lambda member: _typed(member, tarfile.SYMTYPE, "../../../outside/canary"),
    "a hard link": lambda member: _typed(member, tarfile.LNKTYPE, "/etc/passwd"),
    "a character device": lambda member: _typed(member, tarfile.CHRTYPE, ""),
    "a block device": lambda member: _typed(member, tarfile.BLKTYPE, ""),
    "a pipe": lambda member: _typed(member, tarfile.FIFOTYPE, ""),
    "a directory": lambda member: _typed(member, tarfile.DIRTYPE, ""),
    "a sparse file": lambda member: _typed(member, tarfile.GNUTYPE_SPARSE, ""),
    "another name": lambda member: setattr(member, "name", "../../../outside/canary"),
    "an absolute name": lambda member: setattr(member, "name", "/etc/cron.d/x"),
    "a setuid bit": lambda member: setattr(member, "mode", 0o6777),
    "another size": lambda member: setattr(member, "size", 1 << 30),
    "another owner": lambda member: setattr(member, "uid", 4321),
}


def _typed(member: tarfile.TarInfo, kind: bytes, target: str) -> None:
    member.type, member.linkname = kind, target


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS.keys())
def test_whatever_the_headers_of_a_tar_say_only_files_of_the_manifest_arrive(
    scene: Scene, change: Callable[[tarfile.TarInfo], object]
) -> None:
    def rewritten(tar: bytes) -> bytes:
        member = tarfile.TarInfo.frombuf(tar[:512], "utf-8", "strict")
        change(member)
        return member.tobuf(tarfile.USTAR_FORMAT) + tar[512:]

    before = state(scene.outside)
    of_tar(rewritten)(scene)
    assert scene.warm() == []
    placed = scene.live / "triton"
    assert read(placed) == BODIES
    assert all(path.lstat().st_mode in (0o100644, 0o040755) for path in placed.rglob("*"))
    assert all(path.lstat().st_uid == os.geteuid() for path in placed.rglob("*"))
    assert state(scene.outside) == before


# Units that no engine keeps there

UNITS: dict[str, Unit] = {
    "byte-code beside a module": unit("qa", {"qa/__pycache__/cqa.cpython-311.pyc": b"1"}),
    "a holder of the directory": unit(f"{STAGE_PREFIX}held", {f"{STAGE_PREFIX}held/x.json": b"1"}),
    "what no scan sees": unit("K1", {f"K1/{STAGE_PREFIX}x/y": b"1"}),
    "a file of another unit": unit("K1", {"K2/x": b"1"}),
    "a module for every interpreter": unit("sitecustomize", {"sitecustomize.py": b"1"}),
    "a lock": unit("locks/x", {"locks/x.lock": b"1"}),
}


@pytest.mark.parametrize("strange", UNITS.values(), ids=UNITS.keys())
@pytest.mark.parametrize("domain", [TRITON, next(each for each in TABLE if each.name == "torch_compile")])
def test_a_unit_that_an_engine_would_not_keep_there_is_left_out(scene: Scene, domain: Any, strange: Unit) -> None:
    target = io.BytesIO()
    made = layer.pack([Section(domain.name, (strange,))], lambda _domain, _file: iter([b"1"]), target)
    manifest = msgspec.structs.replace(draft(), layers=(made,))
    scene.manifest.unlink()
    commit(scene.store, manifest, {made.digest: spool(scene.store, target.getvalue())}, now=NOW_NS / 1e9)
    restored = restore_found(scene.store, look_up(scene.store), [Target(domain, f"{scene.live}/x", ours=True)])
    assert restored.reasons == (f"{domain.name}: 1 units left out, {domain.name} has no such files",)
    assert list(scene.live.iterdir()) == []


GROUPS: dict[str, bytes] = {
    "a child outside": b'{"child_paths": {"add.cubin": "/tmp/evil.cubin"}}',
    "a child that climbs": b'{"child_paths": {"add.cubin": "@dir@/../../evil.cubin"}}',
    "a child that is the directory": b'{"child_paths": {"add.cubin": "@dir@/."}}',
    "a child in a key": b'{"@dir@/../x": 1}',
    "too deep": b"[" * 60 + b"]" * 60,
    "too deep for any parser": b"[" * 100_000,
    "no JSON": b"import os",
    "one child by two names": b'{"@dir@/a": 1, "@dir@/a": 2, "/x": 3}',
}


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())
def test_a_group_file_that_names_something_outside_stops_its_domain(scene: Scene, group: bytes) -> None:
    path = f"{KERNEL}/__grp__add.json"
    rows = (File(path, len(group), digest.of_bytes(group), relocated=True),)
    target = io.BytesIO()
    made = layer.pack([Section("triton", (Unit(KERNEL, rows),))], lambda _domain, _file: iter([group]), target)
    scene.manifest.unlink()
    manifest = msgspec.structs.replace(draft(), layers=(made,))
    commit(scene.store, manifest, {made.digest: spool(scene.store, target.getvalue())}, now=NOW_NS / 1e9)
    (reason,) = scene.warm()
    assert f"`{path}` cannot be relocated" in reason
    assert list(scene.live.iterdir()) == []


# The live directory, which others may write


def _directory(scene: Scene) -> Path:
    place = scene.live / "inductor"
    place.mkdir()
    return place


def _inductor(scene: Scene) -> list[str]:
    """Restore two files in a directory of two letters into a live directory that is there."""
    bodies = {"qa/cqa.cpp": b"int main() {}", "qa/cqb.cpp": b"int x;"}
    units = [unit("qa/cqa", {"qa/cqa.cpp": bodies["qa/cqa.cpp"]}), unit("qa/cqb", {"qa/cqb.cpp": bodies["qa/cqb.cpp"]})]
    target = io.BytesIO()
    made = layer.pack([Section("inductor", tuple(units))], lambda _domain, file: iter([bodies[file.path]]), target)
    scene.manifest.unlink()
    manifest = msgspec.structs.replace(draft(), layers=(made,))
    commit(scene.store, manifest, {made.digest: spool(scene.store, target.getvalue())}, now=NOW_NS / 1e9)
    place = Target(INDUCTOR, f"{scene.live}/inductor", ours=False)
    return list(restore_found(scene.store, look_up(scene.store), [place]).reasons)


def _linked(directory: Path, target: Path) -> None:
    directory.mkdir()
    for name in ("cqa.cpp", "cqb.cpp"):
        (directory / name).symlink_to(target)


SQUATTED: dict[str, Callable[[Scene, Path], object]] = {
    "a directory that links outside": lambda scene, place: (place / "qa").symlink_to(scene.outside),
    "a directory that links nowhere": lambda scene, place: (place / "qa").symlink_to(scene.root / "nowhere"),
    "a directory that is a file": lambda _scene, place: (place / "qa").write_bytes(b""),
    "a directory that is a pipe": lambda _scene, place: os.mkfifo(place / "qa"),
    "files that link outside": lambda scene, place: _linked(place / "qa", scene.outside / "canary"),
    "a stage that is there": lambda _scene, place: (place / f"{STAGE_PREFIX}launch-2-inductor").mkdir(),
    "a stage that links outside": lambda scene, place: (place / f"{STAGE_PREFIX}launch-2-inductor").symlink_to(
        scene.outside
    ),
}


@pytest.mark.parametrize("squat", SQUATTED.values(), ids=SQUATTED.keys())
def test_what_others_put_into_the_live_directory_is_neither_followed_nor_replaced(
    scene: Scene, squat: Callable[[Scene, Path], object]
) -> None:
    place = _directory(scene)
    squat(scene, place)
    before, outside = sorted(os.listdir(place)), state(scene.outside)
    _inductor(scene)
    assert state(scene.outside) == outside
    assert sorted(os.listdir(place)) == before
    assert not (scene.root / "nowhere").exists()


class Swapping:
    """A directory that somebody else turns into a link and back, as fast as he can."""

    def __init__(self, place: Path, outside: Path) -> None:
        self._place, self._outside = place, outside
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.turns = 0

    def __enter__(self) -> "Swapping":
        self._place.with_name("link").symlink_to(self._outside)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        link, aside = self._place.with_name("link"), self._place.with_name("aside")
        while not self._over.is_set():
            with suppress(FileNotFoundError, NotADirectoryError):
                os.rename(self._place, aside)
            with suppress(IsADirectoryError):  # it was made anew meanwhile
                os.rename(link, self._place)
                self.turns += 1
                os.rename(self._place, link)
            shutil.rmtree(aside, ignore_errors=True)


def test_a_directory_that_is_swapped_for_a_link_meanwhile_leads_nowhere(scene: Scene) -> None:
    place = _directory(scene)
    outside = state(scene.outside)
    with Swapping(place / "qa", scene.outside) as swapping:
        for _attempt in range(40):
            _inductor_again(scene, place)
    assert swapping.turns > 10
    assert state(scene.outside) == outside


def _inductor_again(scene: Scene, place: Path) -> None:
    try:
        _inductor(scene)
    except FileNotFoundError:  # the good manifest of the scene is there for the first attempt only
        restore_found(scene.store, look_up(scene.store), [Target(INDUCTOR, str(place), ours=False)])


class Renaming(LocalStore):
    """Somebody who may write beside the stage puts a directory of his own in its place while a layer is read."""

    def __init__(self, root: Path, place: Path, outside: Path) -> None:
        super().__init__(root)
        self._place, self._outside = place, outside

    def open(self, name: str) -> BinaryIO:
        stream = super().open(name)
        return cast("BinaryIO", _Noticed(stream, self._swap)) if name.startswith("layers/") else stream

    def _swap(self) -> None:
        for stage in self._place.glob(f"{STAGE_PREFIX}launch-2-*"):
            if not stage.is_symlink():
                stage.rename(stage.with_name("taken"))
                stage.symlink_to(self._outside)


class _Noticed(io.RawIOBase):
    """A stream whose every read is noticed."""

    def __init__(self, stream: BinaryIO, notice: Callable[[], None]) -> None:
        super().__init__()
        self._stream, self._notice = stream, notice

    def read(self, size: int = -1) -> bytes:
        self._notice()
        return self._stream.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset, whence)

    def close(self) -> None:
        self._stream.close()
        super().close()


def test_a_stage_that_is_swapped_for_a_link_meanwhile_leads_nowhere(scene: Scene) -> None:
    place = _directory(scene)
    _inductor(scene)
    for path in place.iterdir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    outside = state(scene.outside)
    threads = threading.active_count()
    store = Renaming(scene.root / "store", place, scene.outside)
    with _Ticking(store):
        restored = restore_found(store, look_up(store), [Target(INDUCTOR, str(place), ours=False)])
    assert state(scene.outside) == outside
    assert threading.active_count() == threads
    assert restored.offered["inductor"] <= {"qa/cqa.cpp", "qa/cqb.cpp"}
    assert set(read(place / "qa").values()) <= {b"int main() {}", b"int x;"}


class _Ticking:
    """Swap again and again, also after the last read."""

    def __init__(self, store: Renaming) -> None:
        self._store, self._over = store, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._store._swap()
            except OSError:
                continue

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
