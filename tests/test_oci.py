"""Artifacts as OCI images: what is in one, equal captures make equal images, and reading one believes nothing."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml
import zstandard

from cachemgr import digest
from cachemgr.cache import open_cache
from cachemgr.capture import Layer, Section
from cachemgr.digest import Digest
from cachemgr.errors import CacheError, CorruptError, NotFoundError, StoreError, UsageError
from cachemgr.export import Export
from cachemgr.key import Factor, Key
from cachemgr.oci import documents
from cachemgr.oci.archive import Archive, NewArchive
from cachemgr.oci.directory import Directory, blob_name
from cachemgr.oci.image import compose
from cachemgr.oci.images import ImageStore
from cachemgr.oci.labels import labels
from cachemgr.oci.place import Reference, path, reference
from cachemgr.oci.unpacked import UnpackedStore
from cachemgr.settings import load
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, captures, keys, unasked
from cachemgr.store.local import LocalStore
from cachemgr.store.transfer import Moved, Transfer
from cachemgr.trust import Origin
from cachemgr.warm import restore
from tests.authorities import Authority
from tests.kills import killed_at_every_step
from tests.machines import Fleet, Machine
from tests.registries import needs_skopeo, skopeo, unpacked
from tests.stores import contents
from tests.test_transfer import KEY, NOW, OTHER, OTHER_KEY, without_near
from tests.trees import (
    FEW,
    NOW_NS,
    assert_moved,
    build,
    draft,
    publish_trees,
    targets,
    triton_kernel,
    unit,
    write,
)

ROOT = Path(__file__).parent.parent


@pytest.fixture
def small(tmp_path: Path) -> LocalStore:
    """Two artifacts that share a layer."""
    store = LocalStore(tmp_path / "source")
    trees = build(tmp_path / "live", FEW)
    publish_trees(store, trees)
    publish_trees(store, trees, draft(OTHER), near=captures(store, KEY, []))
    return store


@pytest.fixture
def source(small: LocalStore, tmp_path: Path) -> LocalStore:
    """The same, and another capture of the first one."""
    triton_kernel(tmp_path / "live" / "triton", "later")
    publish_trees(small, build(tmp_path / "live", ()), draft(launch="launch-2", created="2026-01-03T00:00:00Z"))
    return small


def exported(source: Store, place: Path, *wanted: Key) -> Path:
    """These artifacts, or all, in an image layout, or in a tar file where the name ends so."""
    if place.suffix == ".tar":
        with NewArchive(place) as archive:
            journey = Export(source, archive, judge=unasked)
            journey.carry(journey.plan(wanted or keys(source)))
    else:
        journey = Export(source, Directory(place), judge=unasked)
        journey.carry(journey.plan(wanted or keys(source)))
    return place


def opened(place: Path) -> ImageStore:
    return ImageStore(Archive(place) if place.suffix == ".tar" else Directory(place))


def brought(place: Path, target: Store) -> Moved:
    images = opened(place)
    transfer = Transfer(images, target, judge=unasked)
    return transfer.carry(transfer.plan(keys(images), now=NOW))


def manifest_of(place: Path, number: int = 0) -> dict[str, Any]:
    index = json.loads((place / "index.json").read_text())
    found: dict[str, Any] = json.loads(blob(place, index["manifests"][number]["digest"]))
    return found


def blob(place: Path, name: str) -> bytes:
    return (place / blob_name(Digest(name))).read_bytes()


# What is in an image


@pytest.mark.parametrize("name", ["layout", "all.tar"])
def test_what_was_exported_is_brought_back_object_by_object(source: LocalStore, tmp_path: Path, name: str) -> None:
    target = LocalStore(tmp_path / "target")
    moved = brought(exported(source, tmp_path / name), target)
    assert len(moved.captures) == 3
    assert without_near(target) == without_near(source)


def test_the_layers_are_ours_byte_for_byte_and_named_by_both_digests(source: LocalStore, tmp_path: Path) -> None:
    place = exported(source, tmp_path / "layout", KEY)
    image = manifest_of(place)
    config = json.loads(blob(place, image["config"]["digest"]))
    *layers, top = image["layers"]
    held = {layer.digest: layer for capture in captures(source, KEY, []) for layer in capture.manifest.layers}
    assert {layer["digest"] for layer in layers} == set(held)
    for layer, diff_id in zip(layers, config["rootfs"]["diff_ids"], strict=False):
        assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar+zstd"
        data = blob(place, layer["digest"])
        assert data == source.read(layout.layer_name(Digest(layer["digest"])), limit=layer["size"])
        assert digest.of_bytes(zstandard.ZstdDecompressor().decompress(data)) == diff_id
    plain = zstandard.ZstdDecompressor().decompress(blob(place, top["digest"]))
    assert config["rootfs"]["diff_ids"][-1] == digest.of_bytes(plain)
    assert len(config["rootfs"]["diff_ids"]) == len(config["history"]) == len(image["layers"])
    assert config["created"] == "2026-01-03T00:00:00Z"


def test_two_exports_are_equal_to_the_byte(source: LocalStore, tmp_path: Path) -> None:
    first, second = (exported(source, tmp_path / name) for name in ("a.tar", "b.tar"))
    assert first.read_bytes() == second.read_bytes()
    elsewhere = LocalStore(tmp_path / "elsewhere")
    brought(first, elsewhere)
    assert exported(elsewhere, tmp_path / "c.tar").read_bytes() == first.read_bytes(), "also from another store"


def test_what_goes_along_with_a_capture_goes_into_its_image(source: LocalStore, tmp_path: Path) -> None:
    (capture,) = captures(source, OTHER_KEY, [])
    noted = layout.verified_name(OTHER_KEY, capture.digest, "2026-01-02T03:04:05Z")
    for name in (noted, layout.mac_name(OTHER_KEY, capture.digest, "a" * 32)):
        source.put(name, b"{}")
    images = opened(exported(source, tmp_path / "layout", OTHER_KEY))
    assert images.read(noted, limit=10) == b"{}"
    assert not any(entry.name.endswith(".mac") for entry in images.scan("artifacts/"))


def test_a_signature_travels_and_makes_another_image(source: LocalStore, tmp_path: Path) -> None:
    before = manifest_of(exported(source, tmp_path / "before", KEY))
    Authority().sign_all(source, NOW)
    after = manifest_of(exported(source, tmp_path / "after", KEY))
    assert before["layers"][:-1] == after["layers"][:-1], "registries keep what did not change"
    assert before["layers"][-1] != after["layers"][-1]
    target = LocalStore(tmp_path / "target")
    brought(tmp_path / "after", target)
    assert len([name for name in contents(target) if name.endswith(".sig")]) == 2


def test_an_artifact_is_replaced_in_an_index_and_others_stay(source: LocalStore, tmp_path: Path) -> None:
    place = exported(source, tmp_path / "layout")
    Authority().sign_all(source, NOW)
    exported(source, place, KEY)
    names = [
        each["annotations"][documents.NAME] for each in json.loads((place / "index.json").read_text())["manifests"]
    ]
    assert sorted(names) == sorted(key.replace(":", "-") for key in (KEY, OTHER_KEY))
    assert not (place / "tmp").exists(), "nothing of ours lies beside what the format has"


def test_a_second_export_writes_only_what_is_missing(source: LocalStore, tmp_path: Path) -> None:
    target = Directory(tmp_path / "layout")
    journey = Export(source, target, judge=unasked)
    plan = journey.plan(keys(source))
    assert (plan.skipped_objects, plan.objects) == (0, 2 + 2 * 2 + 2), "layers, tops and configs, manifests"
    journey.carry(plan)
    again = Export(source, target, judge=unasked).plan(keys(source))
    assert (again.skipped_objects, again.objects) == (plan.objects - 2, 2)
    assert [image.digest for image in again.images] == [image.digest for image in plan.images]


def test_blobs_that_somebody_left_half_copied_are_written_again(source: LocalStore, tmp_path: Path) -> None:
    place = exported(source, tmp_path / "layout", KEY)
    whole = {path: path.read_bytes() for path in (place / "blobs" / "sha256").iterdir()}
    for each, data in whole.items():
        each.unlink()
        each.write_bytes(data[:-1])
    exported(source, place, KEY)
    assert {path: path.read_bytes() for path in whole} == whole


def test_labels_say_what_others_look_for(source: LocalStore) -> None:
    told = labels(KEY, captures(source, KEY, []))
    assert told["io.cachemgr.key"] == KEY
    assert (told["io.kserve.km/framework"], told["io.kserve.km/cache-type"]) == ("vllm", "torch-compile")
    assert told["io.kserve.km/cache-hash"] == f"40a0994a95,{'5e' * 32}"
    assert "io.kserve.km/cache-root-env" not in told, "nobody may mount these files as they are"
    assert "cache.vllm.image/summary" not in told, "an architecture is never made up"


@pytest.mark.parametrize(
    ("device", "capability", "targets"),
    [
        ("cuda", "9.0", [{"arch": "90", "backend": "cuda", "warp_size": 32}]),
        ("hip", "gfx942", [{"arch": "gfx942", "backend": "hip", "warp_size": 64}]),
        ("cpu", None, None),
    ],
)
def test_the_summary_has_the_architecture_that_was_read(device: str, capability: str, targets: object) -> None:
    factors = (Factor("device", device, "guard"), Factor("device.capability", capability, "guard"))
    capture = Capture(Digest("sha256:" + "0" * 64), msgspec.structs.replace(draft(), factors=factors), 1)
    summary = labels(KEY, [capture]).get("cache.vllm.image/summary")
    assert (json.loads(summary)["targets"] if summary else None) == targets


def test_a_plain_program_has_no_labels_of_vllm(source: LocalStore) -> None:
    (first, *_rest) = captures(source, KEY, [])
    plain = msgspec.structs.replace(first, manifest=msgspec.structs.replace(first.manifest, engine="torch"))
    assert not [name for name in labels(KEY, [plain]) if "kserve" in name or "vllm" in name]


def with_files(*names: str) -> Capture:
    """A capture with one layer that has these files."""
    whole = unit("unit", {f"unit/{name}": name.encode() for name in names})
    name = digest.of_bytes("".join(names).encode())
    layer = Layer(name, 1, name, 1, (Section("triton", (whole,)),))
    return Capture(name, msgspec.structs.replace(draft(), layers=(layer,)), 1)


def test_a_file_that_would_remove_another_cannot_be_in_an_image() -> None:
    with pytest.raises(CorruptError, match="whiteout"):
        compose(KEY, [with_files(".wh.kernel.cubin")], {})
    assert compose(KEY, [with_files("kernel.wh.cubin")], {}).layers


def test_an_image_has_no_more_layers_than_runtimes_take() -> None:
    with pytest.raises(UsageError, match="121 layers"):
        compose(KEY, [with_files(str(number)) for number in range(121)], {})


def test_a_layer_that_captures_share_lies_where_the_oldest_has_it() -> None:
    shared, between = with_files("a"), with_files("b")
    image = compose(KEY, [shared, between, shared], {})
    assert [layer.digest for layer in image.layers] == [between.digest, shared.digest], "the upper one counts"


def test_what_may_not_be_used_here_does_not_leave(source: LocalStore, tmp_path: Path) -> None:
    cache = open_cache(load({}, {"store": str(tmp_path / "source"), "trust": ("require",)}), {})
    with pytest.raises(NotFoundError, match="nobody has signed it"):
        Export(source, Directory(tmp_path / "layout"), judge=cache.local.judge).plan([KEY])


# Failures


def test_a_damaged_layer_is_not_exported(source: LocalStore, tmp_path: Path) -> None:
    (capture,) = captures(source, OTHER_KEY, [])
    name = layout.layer_name(capture.manifest.layers[0].digest)
    target = tmp_path / "source" / name
    target.chmod(0o644)
    target.write_bytes(target.read_bytes()[:-1] + b"?")
    for place in (tmp_path / "layout", tmp_path / "all.tar"):
        with pytest.raises(CorruptError, match="other bytes"):
            exported(source, place, OTHER_KEY)
    assert not (tmp_path / "layout" / "index.json").exists()
    assert [each.name for each in tmp_path.iterdir() if ".tar" in each.name] == []


def test_a_missing_layer_is_named_before_anything_is_written(source: LocalStore, tmp_path: Path) -> None:
    (capture,) = captures(source, OTHER_KEY, [])
    source.delete(layout.layer_name(capture.manifest.layers[0].digest))
    with pytest.raises(NotFoundError, match="is not there"):
        exported(source, tmp_path / "layout", OTHER_KEY)
    assert not (tmp_path / "layout").exists()


def test_one_artifact_that_cannot_be_exported_keeps_no_other_one(source: LocalStore, tmp_path: Path) -> None:
    (capture,) = captures(source, OTHER_KEY, [])
    broken = layout.manifest_name(OTHER_KEY, capture.digest)
    source.delete(broken)
    source.put(broken, b"torn")
    plan = Export(source, Directory(tmp_path / "layout"), judge=unasked).plan([OTHER_KEY, KEY])
    assert [each.key for each in plan.images] == [KEY]
    assert ["no capture that can be exported" in each.reason for each in plan.damaged] == [True]


def test_an_archive_takes_the_place_of_a_file_only(source: LocalStore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(StoreError, match="it is no file"):
        exported(source, tmp_path / "pipe.tar")
    (tmp_path / "link.tar").symlink_to(tmp_path / "all.tar")
    exported(source, tmp_path / "link.tar")
    assert (tmp_path / "link.tar").is_symlink()
    assert tarfile.is_tarfile(tmp_path / "all.tar")


def test_a_disk_that_is_full_leaves_no_tar_file(source: LocalStore, tmp_path: Path, small_disk: Any) -> None:
    place = small_disk(64 << 10) / "all.tar"
    with pytest.raises(StoreError, match="No space left"):
        exported(source, place)
    assert list(place.parent.iterdir()) == []


# Hostile images: whatever is changed in one, nothing is brought, or what is brought is what the digests say


def rewritten(place: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the only image of a layout, and list it under its new digest."""
    index = json.loads((place / "index.json").read_text())
    manifest = manifest_of(place)
    change(manifest)
    data = json.dumps(manifest).encode()
    index["manifests"][0].update(digest=digest.of_bytes(data), size=len(data))
    (place / blob_name(digest.of_bytes(data))).write_bytes(data)
    (place / "index.json").write_text(json.dumps(index))


def with_top(place: Path, objects: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> Callable[[dict[str, Any]], None]:
    """Another top layer."""

    def change(manifest: dict[str, Any]) -> None:
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w") as tar:
            for name, data in objects.items():
                member = tarfile.TarInfo(name)
                member.type, member.size, member.linkname = kind, len(data), "/etc/passwd"
                tar.addfile(member, io.BytesIO(data))
        put_top(place, manifest, squeezed(target.getvalue()))

    return change


def squeezed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def put_top(place: Path, manifest: dict[str, Any], data: bytes) -> None:
    name = digest.of_bytes(data)
    (place / blob_name(name)).write_bytes(data)
    manifest["layers"][-1].update(digest=name, size=len(data))


def of_members(place: Path, *told: dict[str, str]) -> Callable[[dict[str, Any]], None]:
    """A top layer with one name as often as there are extended headers for it (pax)."""

    def change(manifest: dict[str, Any]) -> None:
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for headers in told:
                member = tarfile.TarInfo(".cachemgr/artifacts/x")
                member.size, member.pax_headers = 1, headers
                tar.addfile(member, io.BytesIO(b"x"))
        put_top(place, manifest, squeezed(target.getvalue()))

    return change


HOSTILE: dict[str, Callable[[Path], Callable[[dict[str, Any]], None]]] = {
    "no image of ours": lambda _place: lambda image: image.update(annotations={}),
    "a newer layout": lambda _place: lambda image: image["annotations"].update({"io.cachemgr.layout": "2"}),
    "no manifest at all": lambda _place: lambda image: image.pop("layers"),
    "a digest that is a path": lambda _place: lambda image: image["layers"][0].update(digest="sha256:../../etc/passwd"),
    "a negative size": lambda _place: lambda image: image["layers"][-1].update(size=-1),
    "an impossible size": lambda _place: lambda image: image["layers"][-1].update(size=1 << 60),
    "a size that is too small": lambda _place: lambda image: image["layers"][-1].update(size=10),
    "a top layer that is no zstd": lambda place: lambda image: put_top(place, image, b"\xff" * 2048),
    "a top layer that is no tar": lambda place: lambda image: put_top(place, image, squeezed(b"\xff" * 2048)),
    "a top layer that is a bomb": lambda place: lambda image: put_top(place, image, squeezed(b"\0" * (2 << 20))),
    "no layers": lambda _place: lambda image: image.update(layers=[]),
    "a name twice": lambda place: of_members(place, {}, {}),
    "another schema": lambda _place: lambda image: image.update(schemaVersion=1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_image_is_an_error_and_nothing_else(
    source: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("cachemgr.oci.image._TOP_BYTES", 1 << 20)  # to inflate so much as is allowed takes seconds
    place = exported(source, tmp_path / "layout", OTHER_KEY)
    rewritten(place, HOSTILE[name](place))
    with pytest.raises(CorruptError) as caught:
        opened(place)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "objects",
    [
        {".cachemgr/../../../outside": b"x", "/etc/passwd": b"x", ".cachemgr//etc/passwd": b"x"},
        {".cachemgr/artifacts/k1-" + "0" * 32 + "/" + "0" * 64 + ".json.zst": b"no manifest"},
        {".cachemgr/layers/sha256/00/" + "0" * 64 + ".tar.zst": b"a layer that is none"},
    ],
    ids=["paths", "manifest", "layer"],
)
def test_what_a_hostile_top_layer_has_becomes_no_object(
    source: LocalStore, tmp_path: Path, objects: dict[str, bytes]
) -> None:
    place = exported(source, tmp_path / "layout", OTHER_KEY)
    rewritten(place, with_top(place, objects))
    target = LocalStore(tmp_path / "target")
    assert brought(place, target).captures == ()
    assert [name for name in contents(target) if name.startswith(("artifacts/", "layers/"))] == []
    assert not (tmp_path / "outside").exists()


def test_links_and_devices_in_a_top_layer_are_nothing(source: LocalStore, tmp_path: Path) -> None:
    place = exported(source, tmp_path / "layout", OTHER_KEY)
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
        rewritten(place, with_top(place, {".cachemgr/layout.json": b""}, kind))
        assert keys(opened(place)) == []


def test_a_sparse_file_in_a_top_layer_is_nothing_whatever_it_claims(source: LocalStore, tmp_path: Path) -> None:
    place = exported(source, tmp_path / "layout", OTHER_KEY)
    rewritten(place, of_members(place, {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 40)}))
    assert list(opened(place).scan("")) == list(opened(place).scan("layers/"))


def test_images_have_no_more_manifests_together_than_memory_takes(
    source: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, all_ = exported(source, tmp_path / "one", OTHER_KEY), exported(source, tmp_path / "all")
    size = sum(entry.size for entry in opened(one).scan("") if not entry.name.startswith("layers/"))
    monkeypatch.setattr("cachemgr.oci.images._MOST_BYTES", size)
    assert keys(opened(one)) == [OTHER_KEY]
    with pytest.raises(CorruptError, match="bytes of manifests"):
        opened(all_)


def test_a_bomb_in_the_place_of_a_manifest_is_refused_by_its_size(source: LocalStore, tmp_path: Path) -> None:
    place = exported(source, tmp_path / "layout", OTHER_KEY)
    (capture,) = captures(source, OTHER_KEY, [])
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (300 << 20))
    name = f".cachemgr/{layout.manifest_name(OTHER_KEY, capture.digest)}"
    rewritten(place, with_top(place, {name: bomb}))
    images = opened(place)
    plan = Transfer(images, LocalStore(tmp_path / "target"), judge=unasked).plan(keys(images), now=NOW)
    assert "larger than a manifest may be" in plan.damaged[0].reason


def test_a_layer_with_other_bytes_is_not_brought(source: LocalStore, tmp_path: Path) -> None:
    place = exported(source, tmp_path / "layout", OTHER_KEY)
    target = place / blob_name(manifest_of(place)["layers"][0]["digest"])
    target.chmod(0o644)
    target.write_bytes(target.read_bytes()[:-1] + b"?")
    store = LocalStore(tmp_path / "target")
    (failure,) = brought(place, store).failures
    assert isinstance(failure.error, CorruptError)
    assert keys(store) == []


def test_layers_that_somebody_compressed_anew_are_missed_by_name(source: LocalStore, tmp_path: Path) -> None:
    place = exported(source, tmp_path / "layout", OTHER_KEY)

    def compressed_anew(manifest: dict[str, Any]) -> None:
        layer = manifest["layers"][0]
        data = zstandard.ZstdCompressor(1).compress(
            zstandard.ZstdDecompressor().decompress(blob(place, layer["digest"]))
        )
        (place / blob_name(digest.of_bytes(data))).write_bytes(data)
        layer.update(digest=digest.of_bytes(data), size=len(data))

    rewritten(place, compressed_anew)
    (failure,) = brought(place, LocalStore(tmp_path / "target")).failures
    assert "skopeo" in str(failure.error.hint)


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("absent.tar", None, NotFoundError),
        ("empty.tar", b"", CorruptError),
        ("text.tar", b"no tar at all" * 100, CorruptError),
        ("layout", None, NotFoundError),
    ],
)
def test_what_is_no_place_of_images_says_so(
    tmp_path: Path, name: str, data: bytes | None, kind: type[CacheError]
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(kind) as caught:
        opened(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_tar_file_that_was_cut_off_is_told_by_what_is_missing(source: LocalStore, tmp_path: Path) -> None:
    place = exported(source, tmp_path / "all.tar")
    whole = place.read_bytes()
    for share in range(1, 10):
        place.write_bytes(whole[: len(whole) * share // 10])
        with pytest.raises((CorruptError, NotFoundError)):
            opened(place)


def test_a_tar_file_with_a_member_twice_is_refused(source: LocalStore, tmp_path: Path) -> None:
    place = exported(source, tmp_path / "all.tar")
    with tarfile.open(place, "a") as tar:
        tar.addfile(tarfile.TarInfo("index.json"))
    with pytest.raises(CorruptError, match="twice"):
        opened(place)


# Killed half-way


@pytest.mark.parametrize("name", ["layout", "all.tar"])
def test_a_place_names_only_whole_images_whenever_an_export_is_killed(
    small: LocalStore, tmp_path: Path, name: str
) -> None:
    place = exported(small, tmp_path / name, OTHER_KEY)
    steps = 0
    for step in killed_at_every_step(lambda: exported(small, place, KEY, OTHER_KEY)):
        images = opened(place)
        assert OTHER_KEY in keys(images)
        for entry in images.scan("layers/"):
            with images.open(entry.name) as stream:
                assert digest.of_bytes(stream.read()) == layout.layer_of(entry.name)
        steps = step
    assert steps >= 2
    assert keys(opened(place)) == sorted([KEY, OTHER_KEY])
    assert brought(place, LocalStore(tmp_path / "target")).failures == ()


# References


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag"),
    [
        ("ghcr.io/team/llama-cache:h200", "ghcr.io", "team/llama-cache", "h200"),
        ("localhost:5000/x", "localhost:5000", "x", "latest"),
        ("registry:5000/a/b/c:v1.2_3", "registry:5000", "a/b/c", "v1.2_3"),
        ("docker://registry/a:b", None, None, None),
        ("docker://reg.example/a:b", "reg.example", "a", "b"),
        ("[::1]:5000/a:b", "[::1]:5000", "a", "b"),
        (f"reg.example/a@sha256:{'0' * 64}", "reg.example", "a", f"sha256:{'0' * 64}"),
    ],
)
def test_a_reference_is_read_as_other_tools_read_it(
    text: str, registry: str | None, repository: str | None, tag: str | None
) -> None:
    if registry is None:
        with pytest.raises(UsageError):
            reference(text)
        return
    found = reference(text)
    assert found == Reference(registry, repository, tag)  # type: ignore[arg-type]
    assert str(found) == (text if ":" in text.rsplit("/", 1)[-1] else f"{text}:latest").removeprefix("docker://")


@pytest.mark.parametrize(
    "text", ["images", "images/llama", "./reg.example/a:b", "/srv/a:b", "~/a", "../a", "oci:reg.example/a"]
)
def test_what_is_no_registry_is_a_path(text: str) -> None:
    assert reference(text) is None
    assert path(text) == text.removeprefix("oci:")


@pytest.mark.parametrize(
    "text", ["reg.example/", "reg.example/A:b", "reg.example/a:", "reg.example/a@b", "reg.example/a:b:c"]
)
def test_a_registry_with_an_impossible_name_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="names no image"):
        reference(text)


# As a seed: unpacked by a container runtime


def rooted(source: Store, directory: Path, *wanted: Key) -> Path:
    """The root file system of an image, layer over layer, as runtimes make it."""
    place = exported(source, directory / "layout", *wanted)
    root = directory / "root"
    for layer in manifest_of(place)["layers"]:
        data = blob(place, layer["digest"])
        if layer["mediaType"].endswith("+zstd"):
            data = zstandard.ZstdDecompressor().decompress(data)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            tar.extractall(root, filter="fully_trusted")
    return root


def test_an_unpacked_image_restores_what_was_captured(source: LocalStore, tmp_path: Path) -> None:
    seed = UnpackedStore(rooted(source, tmp_path, KEY))
    found = captures(seed, KEY, [], judge=unasked)
    assert [each.digest for each in found] == [each.digest for each in captures(source, KEY, [])]
    places = targets(tmp_path / "new")
    restored = restore(seed, found, places, trees=True, launch="l", now_ns=NOW_NS, expired=lambda: False)
    assert (restored.reasons, restored.damaged) == ((), ())
    for target in places:
        if target.domain.name in FEW:
            assert_moved(target.domain, tmp_path / "live" / target.domain.name, target.directory)


def test_an_unpacked_layer_is_the_tar_that_its_manifest_names(source: LocalStore, tmp_path: Path) -> None:
    seed = UnpackedStore(rooted(source, tmp_path, OTHER_KEY))
    (capture,) = captures(seed, OTHER_KEY, [])
    (layer,) = capture.manifest.layers
    name = layout.layer_name(layer.digest)
    assert seed.has(name)
    assert [entry.name for entry in seed.scan("layers/sha256/")] == [name]
    with seed.open(name) as stream:
        once = stream.read()
        stream.seek(0)
        assert stream.read() == once
    assert (len(once), digest.of_bytes(once)) == (layer.tar_size, layer.tar_digest)
    assert seed.slice(name, 512, 100) == once[512:612]


@pytest.mark.parametrize("how", ["changed", "cut", "longer", "gone", "a link", "a link above"])
def test_a_changed_file_in_an_unpacked_image_restores_nothing_of_its_layer(
    source: LocalStore, tmp_path: Path, how: str
) -> None:
    root = rooted(source, tmp_path, OTHER_KEY)
    (victim,) = [path for path in (root / "triton").rglob("add_kernel.cubin") if path.is_file()][:1]
    data = victim.read_bytes()
    if how == "a link above":
        victim.parent.rename(tmp_path / "aside")
        victim.parent.symlink_to(tmp_path / "aside")
    else:
        victim.unlink()
    if how == "a link":
        (tmp_path / "aside").write_bytes(data)
        victim.symlink_to(tmp_path / "aside")
    elif how in {"changed", "cut"}:
        victim.write_bytes(data[:-1] + (b"?" if how == "changed" else b""))
    elif how == "longer":
        victim.write_bytes(data + b"?")
    seed = UnpackedStore(root)
    found = captures(seed, OTHER_KEY, [], judge=unasked)
    restored = restore(
        seed, found, targets(tmp_path / "new"), trees=True, launch="l", now_ns=NOW_NS, expired=lambda: False
    )
    if how == "longer":
        assert restored.files, "what is behind the end is never read"
        return
    assert restored.files == 0
    assert restored.reasons


def test_of_two_captures_with_the_same_file_the_older_one_is_in_the_image(tmp_path: Path) -> None:
    """Two machines that compiled at the same time, with results that differ."""
    source = LocalStore(tmp_path / "source")
    for number, day in enumerate(("02", "01")):
        made = LocalStore(tmp_path / f"machine-{number}")
        live = tmp_path / f"live-{number}"
        build(live, FEW)
        write(live / "triton", {f"{triton_kernel(live / 'triton', 'x')}/add_kernel.ttir": b"%d" % number})
        publish_trees(made, build(live, ()), draft(launch=str(number), created=f"2026-01-{day}T00:00:00Z"))
        transfer = Transfer(made, source)
        transfer.carry(transfer.plan([KEY], now=NOW))
    older, newer = captures(source, KEY, [])
    assert older.manifest.launch == "1"
    seed = UnpackedStore(rooted(source, tmp_path, KEY))
    found = captures(seed, KEY, [], judge=unasked)
    restored = restore(
        seed, found, targets(tmp_path / "new"), trees=True, launch="l", now_ns=NOW_NS, expired=lambda: False
    )
    assert restored.damaged == ()
    with seed.open(layout.layer_name(newer.manifest.layers[0].digest)) as stream:
        assert digest.of_bytes(stream.read()) != newer.manifest.layers[0].tar_digest
    target = LocalStore(tmp_path / "target")
    assert len(brought(tmp_path / "layout", target).captures) == 2, "importing is not concerned"


def test_nothing_is_ever_written_to_an_image(source: LocalStore, tmp_path: Path) -> None:
    seed = UnpackedStore(rooted(source, tmp_path, OTHER_KEY))
    for attempt in (
        lambda: seed.put("a", b""),
        lambda: seed.put_file("a", tmp_path),
        lambda: seed.put_stream("a", io.BytesIO()),
        lambda: seed.refresh("a"),
        lambda: seed.delete("a"),
        seed.scratch,
    ):
        with pytest.raises(StoreError, match="it is only read"):
            attempt()


# Commands


@pytest.mark.parametrize("version", ["1.33", kubernetes_validate.latest_version()])
def test_the_pod_of_the_docs_is_valid_and_quoted_as_it_is(version: str) -> None:
    text = (ROOT / "docs" / "deploy" / "image-volume.yaml").read_text()
    kubernetes_validate.validate(yaml.safe_load(text), version, strict=True)
    (quoted,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "oci.md").read_text(), re.DOTALL)
    assert [line for line in quoted.splitlines() if line.strip() not in text] == []


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def alone(fleet: Fleet, name: str, **variables: str) -> Machine:
    """A machine with a store of its own."""
    return Machine(fleet.directory / name, fleet.directory / f"{name}-store", {**fleet.variables, **variables})


@needs_skopeo
def test_an_image_that_a_runtime_has_unpacked_makes_a_pod_warm(fleet: Fleet) -> None:
    """Everything real but torch: the image is unpacked by containers/storage, as podman and CRI-O do it."""
    builder = fleet.machine("builder")
    key = builder.run(*fleet.command("f", "g"))["key"]
    builder.cachemgr("export", key, "--oci", "layout")
    root = unpacked(f"oci:{builder.root}/layout", fleet.directory)
    assert all(path.stat().st_mode & 0o555 == 0o555 for path in root.rglob("*") if path.is_dir())
    refused = alone(fleet, "stranger", CACHEMGR_SEED=str(root)).run(*fleet.command("f", "g"))
    assert refused["verdict"] == "cold"
    report = alone(fleet, "pod", CACHEMGR_SEED=str(root), CACHEMGR_TRUST="seed=off").run(*fleet.command("f", "g"))
    assert (report["result"], report["where"], report["verdict"]) == ("exact", "seed", "used")


def test_import_verifies_as_any_other_source_and_keeps_where_it_was_from(fleet: Fleet) -> None:
    builder, pod = fleet.machine("builder"), alone(fleet, "pod")
    key = builder.run(*fleet.command("f"))["key"]
    layout_of = builder.root / "layout"
    builder.cachemgr("keygen", "signing.pem")
    builder.cachemgr("export", key, "--oci", str(layout_of))
    closed = pod.cachemgr("import", str(layout_of), code=12)
    assert "no trusted key" in closed.stderr
    trusting = alone(fleet, "pod", CACHEMGR_TRUSTED_KEYS=str(builder.root / "signing.pem.pub"))
    unsigned = trusting.cachemgr("import", str(layout_of), code=12)
    assert "nobody has signed it" in unsigned.stderr
    assert pod.cachemgr("ls", "-q").stdout == ""
    builder.cachemgr("sign", key, "--key", "signing.pem")
    builder.cachemgr("export", key, "--oci", str(layout_of))
    dry = trusting.json("import", str(layout_of), "--dry-run")
    assert len(dry["plan"]["loads"]) == 1
    assert pod.cachemgr("ls", "-q").stdout == ""
    assert "imported 1 capture" in trusting.cachemgr("import", str(layout_of)).stderr
    assert "skipped 3 objects" in trusting.cachemgr("import", str(layout_of)).stderr
    assert trusting.run(*fleet.command("f"))["verdict"] == "used"
    assert pod.run(*fleet.command("f"))["result"] == "none", "its origin still asks for the signature"
    (note,) = Path(pod.store).rglob("*.origin.json")
    assert msgspec.json.decode(note.read_bytes(), type=Origin).where == "image"


def test_a_tar_file_carries_everything_to_a_site_without_a_network(fleet: Fleet) -> None:
    builder, site = fleet.machine("builder"), alone(fleet, "site", CACHEMGR_TRUST="image=off")
    wanted = {builder.run(*fleet.command(graph))["key"] for graph in ("f", "g")}
    assert "one tag is one image" in builder.cachemgr("export", "--oci", "reg.example/a:b", code=2).stderr
    document = builder.json("export", "--tar", "all.tar")
    assert {image["key"] for image in document["plan"]["images"]} == wanted
    one = min(wanted)
    site.cachemgr("import", str(builder.root / "all.tar"), one[:20])
    assert site.cachemgr("ls", "-q").stdout.split() == [one]
    site.cachemgr("import", str(builder.root / "all.tar"), "-f", "model=engine.py")
    assert set(site.cachemgr("ls", "-q").stdout.split()) == wanted


def test_a_dry_export_writes_nothing(source: LocalStore, tmp_path: Path) -> None:
    builder = Machine(tmp_path / "builder", Path(str(source)))
    for words in (("--oci", "layout"), ("--tar", "one.tar")):
        assert "would export 2 images (8 blobs" in builder.cachemgr("export", *words, "--dry-run").stderr
    assert builder.json("export", KEY, "--oci", "layout", "--dry-run")["dry_run"] is True
    assert not (builder.root / "layout").exists()
    assert not list(builder.root.glob("*.tar*"))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("export", "--oci", "a", "--tar", "b"), 2, "an export goes to one place"),
        (("export", "--tar", ""), 2, "an export goes to one place"),
        (("export", "--tar", "/"), 2, "/ is a directory"),
        (("export", "--oci", "reg.example/UPPER:x"), 2, "names no image in a registry"),
        (("export", "--tar", "x.tar"), 0, "nothing to export"),
        (("export", "k1:00", "--oci", "a"), 10, "no artifact"),
        (("import", "nothing-there"), 10, "nothing-there"),
        (("import", "reg.example/UPPER:x"), 2, "names no image in a registry"),
    ],
)
def test_what_cannot_be_done_says_why(fleet: Fleet, words: tuple[str, ...], code: int, said: str) -> None:
    assert said in fleet.machine("machine").cachemgr(*words, code=code).stderr


def test_an_export_of_nothing_writes_nothing_but_a_document(fleet: Fleet) -> None:
    machine = fleet.machine("machine")
    assert machine.json("export", "--tar", "x.tar")["plan"]["images"] == []
    assert not list(machine.root.glob("*.tar*"))


def test_help_and_starts_load_no_registry() -> None:
    code = "import sys, cachemgr.cli.exchange; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"urllib3", "boto3", "botocore", "cryptography"} & set(done.stdout.split())


@needs_skopeo
def test_skopeo_reads_what_we_write(source: LocalStore, tmp_path: Path) -> None:
    place, archive = exported(source, tmp_path / "layout", KEY), exported(source, tmp_path / "one.tar", KEY)
    told = json.loads(skopeo("inspect", f"oci:{place}"))
    assert told["Digest"] == json.loads(skopeo("inspect", f"oci-archive:{archive}"))["Digest"]
    assert told["Labels"]["io.cachemgr.key"] == KEY
    skopeo("copy", "-q", "--dest-decompress", f"oci:{place}", f"dir:{tmp_path}/dir")
    layer = captures(source, KEY, [])[0].manifest.layers[0]
    plain = tmp_path / "dir" / digest.hex_of(layer.tar_digest)
    listed = subprocess.run(["tar", "-tf", str(plain)], capture_output=True, text=True, check=True).stdout.split()
    assert listed == [f"{section.domain}/{file.path}" for section in layer.sections for file in section.files()]


def test_a_pipe_is_neither_read_as_images_nor_replaced_by_them(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    machine.run(*fleet.command("f"))
    pipe = machine.root / "pipe"
    os.mkfifo(pipe)
    assert "it is no file" in machine.cachemgr("import", str(pipe), code=12, CACHEMGR_TRUST="image=off").stderr
    assert "no file that could be replaced" in machine.cachemgr("export", "--tar", str(pipe), code=2).stderr
    assert pipe.is_fifo()
    long = machine.cachemgr("import", "x" * 5000, code=13, CACHEMGR_TRUST="image=off")
    assert "File name too long" in long.stderr
