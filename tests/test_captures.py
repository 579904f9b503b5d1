"""Captures: the order of writes that makes a manifest the commit point, and the order in which they go."""

import errno
import os
from pathlib import Path

import msgspec
import pytest
import zstandard

from cachemgr import digest
from cachemgr.capture import encode_manifest
from cachemgr.domains import TABLE
from cachemgr.domains.triton import TRITON
from cachemgr.errors import CorruptError, StoreError
from cachemgr.key import derive, folder
from cachemgr.store import Store, layout
from cachemgr.store.captures import GRACE_SECONDS, Damaged, captures, commit, has_layers, keys
from cachemgr.store.records import launches, record
from cachemgr.store.removal import plan_removal, referenced, remove
from tests.stores import Corrupting, Faulty, ListOnce, MemoryStore, Recording, Stale, Unreadable, contents
from tests.test_capture import LAUNCH, MANIFEST
from tests.trees import (
    AOT_NAME,
    FACTORS,
    NOW_NS,
    TEN_HEX,
    Publisher,
    build,
    changed,
    draft,
    live,
    look_up,
    noise,
    publish_apart,
    publish_trees,
    tree_of,
    triton_kernel,
)

KEY = derive(FACTORS)
OTHER = changed("vllm.max_model_len", "4096")

PUBLISHERS = pytest.mark.parametrize(
    ("publisher", "layers"), [(publish_trees, 1), (publish_apart, len(TABLE))], ids=["one layer", "a layer a domain"]
)
"""What we publish, and what the format allows others to."""

NOW = NOW_NS / 1e9


def kinds(calls: list[tuple[str, str]]) -> list[str]:
    """Which kinds of objects were written, each run of equal ones once."""
    found: list[str] = []
    for _verb, name in calls:
        kind = name.split("/")[0]
        if not found or found[-1] != kind:
            found.append(kind)
    return found


def age_all(root: Path, seconds: float) -> None:
    for path in (root / "layers").rglob("*.zst"):
        os.utime(path, (NOW - seconds, NOW - seconds))


@pytest.fixture
def recording(store: Store) -> Recording:
    return Recording(store)


@PUBLISHERS
def test_layers_are_written_first_then_the_manifest_then_hints(
    tmp_path: Path, recording: Recording, publisher: Publisher, layers: int
) -> None:
    publisher(recording, build(tmp_path / "live"), draft())
    assert len([name for _verb, name in recording.writes() if name.startswith("layers/")]) == layers
    assert kinds(recording.writes()) == ["layout.json", "CACHEDIR.TAG", "layers", "artifacts", "entries"]
    hints = [name for _verb, name in recording.writes() if name.startswith("entries/")]
    assert sorted(hints) == [f"entries/{TEN_HEX}/{folder(KEY)}", f"entries/{AOT_NAME}/{folder(KEY)}"]


@PUBLISHERS
def test_removal_runs_backwards(
    tmp_path: Path, store: Store, recording: Recording, publisher: Publisher, layers: int
) -> None:
    publisher(store, build(tmp_path / "live"), draft())
    age_all(tmp_path / "store", GRACE_SECONDS + 1)
    remove(recording, plan_removal(store, [KEY], now=NOW))
    assert kinds(recording.writes()) == ["entries", "artifacts", "layers"]
    assert {verb for verb, _name in recording.writes()} == {"delete"}
    assert set(contents(store)) == {"layout.json", "CACHEDIR.TAG"}
    assert list(keys(store)) == []


@PUBLISHERS
def test_removal_that_fails_anywhere_leaves_no_manifest_without_its_layers(
    tmp_path: Path, publisher: Publisher, layers: int
) -> None:
    trees = build(tmp_path / "live")
    total = None
    number = 0
    while total is None or number < total:
        store = MemoryStore(tmp_path / f"scratch-{number}")
        publisher(store, trees, draft())
        for entry in store.scan("layers/"):
            store.set_modified(entry.name, NOW - GRACE_SECONDS)
        plan = plan_removal(store, [KEY], now=NOW)
        total = len(plan.hints) + len(plan.manifests) + len(plan.layers)
        with pytest.raises(StoreError):
            remove(Faulty(store, fail_after=number), plan)
        found = captures(store, KEY, [])
        assert all(has_layers(store, capture) for capture in found)
        assert bool(found) == (number < len(plan.hints) + 1)
        remove(store, plan_removal(store, [KEY], now=NOW))
        assert not [name for name in contents(store) if name.startswith(("artifacts/", "entries/"))]
        number += 1
    assert total == 2 + 1 + layers  # hints, manifest


def test_planning_changes_nothing(tmp_path: Path, store: Store, recording: Recording) -> None:
    publish_trees(store, build(tmp_path / "live"))
    plan = plan_removal(recording, [KEY], now=NOW)
    assert recording.writes() == []
    assert plan == plan_removal(store, [KEY, KEY], now=NOW)
    assert plan.keys == (KEY,)


@PUBLISHERS
def test_young_layers_wait_for_their_grace_and_are_counted(
    tmp_path: Path, store: Store, publisher: Publisher, layers: int
) -> None:
    publisher(store, build(tmp_path / "live"), draft())
    sizes = {entry.name: entry.size for entry in store.scan("layers/")}
    assert len(sizes) == layers
    manifests = sum(entry.size for entry in store.scan("artifacts/"))
    for age, gone in ((0.0, False), (GRACE_SECONDS - 1, False), (GRACE_SECONDS, True)):
        age_all(tmp_path / "store", age)
        plan = plan_removal(store, [KEY], now=NOW)
        assert plan.layers == (tuple(sorted(sizes)) if gone else ())
        assert plan.freed == manifests + (sum(sizes.values()) if gone else 0)
        assert plan.later == (0 if gone else sum(sizes.values()))
    age_all(tmp_path / "store", 0)
    remove(store, plan_removal(store, [KEY], now=NOW))
    assert {entry.name for entry in store.scan("layers/")} == set(sizes)
    assert plan_removal(store, [], now=NOW + GRACE_SECONDS).layers == tuple(sorted(sizes))


def test_layers_that_another_artifact_needs_stay(tmp_path: Path, store: Store) -> None:
    trees = build(tmp_path / "live")
    publish_apart(store, trees)
    triton_kernel(tmp_path / "live/triton", "only in the second")
    publish_apart(store, live(tmp_path / "live"), draft(OTHER))
    age_all(tmp_path / "store", 2 * GRACE_SECONDS)
    shared = {layer.digest for layer in captures(store, derive(OTHER), [])[0].manifest.layers}
    own = {layer.digest for layer in captures(store, KEY, [])[0].manifest.layers} - shared
    assert (len(own), len(shared)) == (1, len(TABLE))
    plan = plan_removal(store, [KEY], now=NOW)
    assert plan.layers == tuple(layout.layer_name(layer) for layer in own)
    remove(store, plan)
    assert look_up(store, OTHER).result == "exact"
    assert all(has_layers(store, capture) for capture in captures(store, derive(OTHER), []))
    assert referenced(store) == shared


def test_a_layer_that_two_artifacts_share_goes_with_the_last(tmp_path: Path, store: Store) -> None:
    trees = build(tmp_path / "live")
    for factors in (FACTORS, OTHER):
        publish_trees(store, trees, draft(factors))
    age_all(tmp_path / "store", 2 * GRACE_SECONDS)
    (name,) = (entry.name for entry in store.scan("layers/"))
    plan = plan_removal(store, [KEY], now=NOW)
    assert (plan.layers, plan.later) == ((), 0)
    remove(store, plan)
    assert look_up(store, OTHER).result == "exact"
    assert plan_removal(store, [derive(OTHER)], now=NOW).layers == (name,)


def test_hints_of_another_artifact_stay(tmp_path: Path, store: Store) -> None:
    trees = build(tmp_path / "live")
    publish_trees(store, trees)
    publish_trees(store, trees, draft(OTHER))
    remove(store, plan_removal(store, [KEY], now=NOW))
    assert {name for name in contents(store) if name.startswith("entries/")} == {
        f"entries/{entry}/{folder(derive(OTHER))}" for entry in (AOT_NAME, TEN_HEX)
    }


def test_an_artifact_whose_manifest_is_damaged_can_be_removed(tmp_path: Path, store: Store) -> None:
    publish_trees(store, build(tmp_path / "live"))
    name = next(store.scan("artifacts/")).name
    store.delete(name)
    store.put(name, b"torn")
    age_all(tmp_path / "store", GRACE_SECONDS)
    remove(store, plan_removal(store, [KEY], now=NOW))
    assert not [name for name in contents(store) if name.startswith(("artifacts/", "layers/"))]


def test_while_another_artifact_cannot_be_read_no_layer_is_removed(tmp_path: Path, store: Store) -> None:
    trees = build(tmp_path / "live")
    publish_trees(store, trees)
    publish_trees(store, trees, draft(OTHER))
    age_all(tmp_path / "store", GRACE_SECONDS)
    with pytest.raises(CorruptError, match="layers that it needs are unknown") as caught:
        plan_removal(Corrupting(store, layout.artifact_prefix(derive(OTHER))), [KEY], now=NOW)
    assert caught.value.hint == f"cachemgr rm {derive(OTHER)}"
    with pytest.raises(StoreError):
        plan_removal(Unreadable(store, layout.artifact_prefix(derive(OTHER))), [KEY], now=NOW)


@PUBLISHERS
def test_only_a_layer_that_is_old_is_refreshed_when_it_is_met_again(
    tmp_path: Path, store: Store, publisher: Publisher, layers: int
) -> None:
    trees = build(tmp_path / "live")
    publisher(store, trees, draft())
    half = GRACE_SECONDS / 2
    for number, (age, refreshed) in enumerate([(0.0, 0), (half - 10, 0), (half + 10, layers)]):
        age_all(tmp_path / "store", age)
        recording = Recording(store)
        publisher(recording, trees, draft(changed("vllm.max_model_len", f"{number}")))
        assert len([name for verb, name in recording.writes() if verb == "refresh"]) == refreshed


def stored(manifest: bytes, *, name: str | None = None) -> tuple[str, bytes]:
    """A manifest as an object, under its own name or another."""
    digits = name or digest.hex_of(digest.of_bytes(manifest))
    return f"{layout.artifact_prefix(KEY)}{digits}.json.zst", zstandard.compress(manifest)


def bad_objects() -> dict[str, tuple[str, bytes, str]]:
    good = encode_manifest(msgspec.structs.replace(MANIFEST, launch="other"))
    name, packed = stored(good)
    huge = zstandard.ZstdCompressor(level=1).compress(bytes(300 << 20))
    endless = zstandard.ZstdCompressor(write_content_size=False).compress(good)
    later = good.replace(b'"layout":1', b'"layout":2')
    foreign = encode_manifest(draft(OTHER))
    return {
        "nothing": (name, b"", "cannot be decompressed"),
        "garbage": (name, noise("garbage", 500), "cannot be decompressed"),
        "a cut frame": (name, packed[:-20], "cannot be decompressed"),
        "a frame with more behind it": (name, packed + b"x", "cannot be decompressed"),
        "a bomb": (stored(b"x", name="ab" * 32)[0], huge, "claims to be larger"),
        "a frame that hides its size": (name, endless, "claims to be larger"),
        "another name": (stored(good, name="ab" * 32)[0], packed, "other bytes than its name says"),
        "a name that is no digest": (stored(good, name="latest")[0], packed, "has a name that is no digest"),
        "a newer layout": (*stored(later), "layout 2"),
        "another key": (*stored(foreign), f"belongs to {derive(OTHER)} and lies under {KEY}"),
        "no manifest": (*stored(b"{}"), "cannot be read"),
    }


@pytest.mark.parametrize(("name", "data", "words"), bad_objects().values(), ids=bad_objects().keys())
def test_a_damaged_capture_is_told_and_hides_no_other(
    tmp_path: Path, store: Store, name: str, data: bytes, words: str
) -> None:
    triton_kernel(tmp_path / "live", "one")
    publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    store.put(name, data)
    damaged: list[Damaged] = []
    assert len(captures(store, KEY, damaged)) == 1
    assert [(row.key, row.name) for row in damaged] == [(KEY, name)]
    assert words in damaged[0].reason
    assert damaged[0].reason.startswith("capture ")


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path)
    commit(store, MANIFEST, {}, now=NOW)
    name = next(store.scan("artifacts/")).name
    data = store.read(name, limit=1 << 20)
    for at in range(len(data)):
        damaged: list[Damaged] = []
        flipped = Corrupting(store, "artifacts/", at=(at + 0.5) / len(data))
        found = captures(flipped, MANIFEST.key, damaged)
        assert not found or found[0].manifest == MANIFEST  # bits of a frame that zstd itself ignores
        assert len(found) + len(damaged) == 1


def test_signatures_and_strange_objects_beside_manifests_are_not_read(tmp_path: Path, store: Store) -> None:
    triton_kernel(tmp_path / "live", "one")
    publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    name = next(store.scan("artifacts/")).name
    store.put(name + ".sig", b"signature")
    store.put(layout.artifact_prefix(KEY) + "notes", b"")
    store.put("artifacts/not-a-key/x.json.zst", b"")
    recording = Recording(store)
    damaged: list[Damaged] = []
    assert len(captures(recording, KEY, damaged)) == 1
    assert damaged == []
    assert recording.opened() == [name]
    assert list(keys(store)) == [KEY]


def test_a_capture_is_committed_once_however_often(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path)
    first = commit(store, MANIFEST, {}, now=NOW)
    before = contents(store)
    assert commit(store, MANIFEST, {}, now=NOW) == first == digest.of_bytes(encode_manifest(MANIFEST))
    assert contents(store) == before


def test_captures_come_oldest_first(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path)
    times = ["2026-03-01T00:00:00Z", "2025-12-31T00:00:00Z", "2026-01-01T00:00:00Z"]
    for created in times:
        commit(store, msgspec.structs.replace(MANIFEST, created=created), {}, now=NOW)
    found = captures(ListOnce(store), MANIFEST.key, [])
    assert [capture.manifest.created for capture in found] == sorted(times)
    assert all(capture.stored > 100 for capture in found)


def test_a_manifest_that_vanishes_while_it_is_listed_is_skipped(tmp_path: Path) -> None:
    class Vanishing(MemoryStore):
        def read(self, name: str, *, limit: int) -> bytes:
            self.delete(name)
            return super().read(name, limit=limit)

    store = Vanishing(tmp_path)
    store.put(*stored(encode_manifest(MANIFEST)))
    damaged: list[Damaged] = []
    assert captures(store, KEY, damaged) == ()
    assert damaged == []


def test_launch_records_are_kept_by_day_and_torn_ones_do_not_hide_the_others(store: Store) -> None:
    record(store, LAUNCH)
    later = msgspec.structs.replace(LAUNCH, launch="later", started="2026-02-03T00:00:00Z")
    record(store, later)
    store.put("launches/2026-02-03/torn.json", b"{")
    assert sorted(launches(store), key=lambda launch: launch.started) == [LAUNCH, later]
    assert {entry.name for entry in store.scan("launches/")} == {
        "launches/2026-01-02/0190c5e4.json",
        "launches/2026-02-03/later.json",
        "launches/2026-02-03/torn.json",
    }


def test_nothing_is_recorded_in_a_store_of_a_newer_layout(store: Store) -> None:
    store.put("layout.json", b'{"layout":2,"salt":""}')
    for attempt in (lambda: record(store, LAUNCH), lambda: commit(store, MANIFEST, {}, now=NOW)):
        with pytest.raises(CorruptError, match="layout 2"):
            attempt()
    assert set(contents(store)) == {"layout.json"}


def test_names_of_objects_never_change() -> None:
    layer = digest.Digest("sha256:ab" + "0" * 62)
    key = derive(FACTORS)
    name = folder(key)
    assert name == key.replace(":", "-")
    assert layout.layer_name(layer) == f"layers/sha256/ab/ab{'0' * 62}.tar.zst"
    assert layout.manifest_name(key, layer) == f"artifacts/{name}/ab{'0' * 62}.json.zst"
    assert layout.entry_name("40a0994a95", key) == f"entries/40a0994a95/{name}"
    assert layout.pin_name(key, "2026-01-01T00:00:00Z") == f"pins/{name}.20260101T000000Z.json"
    assert layout.launch_name("2026-01-02", "l") == "launches/2026-01-02/l.json"


def test_a_manifest_that_cannot_be_read_for_good_hides_no_other_artifact(tmp_path: Path, store: Store) -> None:
    trees = build(tmp_path / "live")
    publish_trees(store, trees)
    publish_trees(store, trees, draft(OTHER))
    broken = Stale(store, "read", prefix=layout.artifact_prefix(derive(OTHER)), error=errno.EIO)
    found = look_up(broken, changed("vllm.max_model_len", "16"))
    assert found.artifact == KEY
    assert [(one.kind, "Input/output error" in one.reason) for one in found.damaged] == [("unreadable", True)]
