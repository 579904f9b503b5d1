"""Looking up: the right artifact, what of a near one may be used, and what stands in the way."""

from pathlib import Path

import msgspec
import pytest

from cachemgr.domains import TABLE
from cachemgr.domains.triton import TRITON
from cachemgr.errors import CorruptError, StoreError
from cachemgr.key import Factor, Relations, derive
from cachemgr.store import Store, layout
from tests.stores import ListOnce, Recording, Unreadable
from tests.test_warm import BLIND, GUARDED, KEY, NEAR, triton_at
from tests.trees import (
    FACTORS,
    build,
    changed,
    draft,
    live,
    look_up,
    noise,
    publish_trees,
    restore_found,
    targets,
    tree_of,
    triton,
    triton_kernel,
)


def test_an_empty_store_has_nothing(store: Store) -> None:
    found = look_up(store)
    assert (found.result, found.artifact, found.captures) == ("none", None, ())
    layout.ensure_layout(store)
    assert look_up(store) == found


def test_equal_factors_are_exact_and_cost_one_listing(tmp_path: Path, store: Store) -> None:
    publish_trees(store, build(tmp_path / "live"), draft(NEAR))
    publish_trees(store, live(tmp_path / "live"))
    recording = Recording(ListOnce(store))
    found = look_up(recording)
    assert (found.result, found.artifact, found.differs, found.where) == ("exact", KEY, (), "local")
    assert [name for verb, name in recording.calls if verb == "scan"] == [layout.artifact_prefix(KEY)]
    assert not [name for name in recording.opened() if name.startswith("layers/")]


@pytest.mark.parametrize(
    ("wanted", "result", "trees"),
    [(FACTORS, "exact", True), (NEAR, "near", True), (BLIND, "near", False), (GUARDED, "none", True)],
)
def test_near_artifacts_give_what_their_roles_allow(
    tmp_path: Path, store: Store, wanted: tuple[Factor, ...], result: str, trees: bool
) -> None:
    publish_trees(store, build(tmp_path / "live"))
    found = look_up(store, wanted)
    assert (found.result, found.artifact, found.trees) == (result, KEY, trees)
    assert [difference.factor for difference in found.differs] == [
        ours.name for ours, theirs in zip(wanted, FACTORS, strict=True) if ours != theirs
    ]
    restored = restore_found(store, found, targets(tmp_path / "new"))
    arrived = {path.name for path in (tmp_path / "new").iterdir()} if (tmp_path / "new").exists() else set()
    everything = {domain.name for domain in TABLE}
    content_keyed = {domain.name for domain in TABLE if domain.content_keyed}
    assert arrived == (set() if result == "none" else everything if trees else content_keyed)
    left_out = sorted(reason.split(" ", 1)[0] for reason in restored.reasons)
    assert left_out == ([] if trees else sorted(everything - content_keyed))


@pytest.mark.parametrize("side", ["wanted", "stored", "both"])
def test_an_unknown_guard_is_never_exact_and_never_near(tmp_path: Path, store: Store, side: str) -> None:
    triton(tmp_path / "live")
    unknown = changed("device.name", None)
    stored, wanted = (FACTORS if side == "wanted" else unknown), (FACTORS if side == "stored" else unknown)
    publish_trees(store, [tree_of(TRITON, tmp_path / "live")], draft(stored))
    found = look_up(store, wanted)
    assert (found.result, found.captures) == ("none", ())
    assert [difference.factor for difference in found.differs] == ["device.name"]


def test_a_relation_that_does_not_hold_keeps_a_capture_out(tmp_path: Path, store: Store) -> None:
    triton(tmp_path / "live")
    needs = Relations(cpu_features=("avx2", "avx512f"), cuda_runtime="13.0")
    publish_trees(store, [tree_of(TRITON, tmp_path / "live")], draft(needs=needs))
    able = Relations(cpu_features=("avx", "avx2", "avx512f"), driver_cuda="13.1")
    assert look_up(store, host=able).result == "exact"
    for host, names in (
        (msgspec.structs.replace(able, driver_cuda="12.9"), ["cuda_runtime"]),
        (msgspec.structs.replace(able, cpu_features=("avx2",)), ["cpu_features"]),
        (Relations(), ["cpu_features", "cuda_runtime"]),
    ):
        for wanted in (FACTORS, NEAR):
            found = look_up(store, wanted, host)
            assert (found.result, found.artifact, found.captures) == ("none", KEY, ())
            assert [fault.relation for fault in found.relations] == names
            assert len(found.reasons) == len(names)
            assert restore_found(store, found, triton_at(tmp_path / "new")).files == 0


def test_a_capture_that_fits_is_used_beside_one_that_does_not(tmp_path: Path, store: Store) -> None:
    for seed, needs in (("one", Relations(cuda_runtime="13.0")), ("two", Relations())):
        triton_kernel(tmp_path / seed, seed)
        publish_trees(store, [tree_of(TRITON, tmp_path / seed)], draft(launch=seed, needs=needs))
    found = look_up(store)
    assert (found.result, [capture.manifest.launch for capture in found.captures]) == ("exact", ["two"])


def test_the_best_near_artifact_is_chosen(tmp_path: Path, store: Store) -> None:
    """Equal blind factors first, then complete captures, then few differences, then the newest."""
    triton(tmp_path / "live")
    trees = [tree_of(TRITON, tmp_path / "live")]
    two = tuple(Factor(f.name, "x", f.role) if f.role == "match" else f for f in (*FACTORS, Factor("b", "1", "match")))
    order = [
        ("newest", draft(changed("vllm.max_model_len", "1"), created="2026-03-01T00:00:00Z")),
        ("older", draft(changed("vllm.max_model_len", "2"), created="2026-02-01T00:00:00Z")),
        ("two differences", draft(two, created="2026-04-01T00:00:00Z")),
        ("incomplete", draft(changed("vllm.max_model_len", "3"), complete=False, created="2026-05-01T00:00:00Z")),
        ("blind", draft(BLIND, created="2026-06-01T00:00:00Z")),
    ]
    for _title, manifest in order:
        publish_trees(store, trees, manifest)
    for title, manifest in order:
        found = look_up(store)
        assert (found.result, found.artifact) == ("near", manifest.key), title
        for entry in list(store.scan(layout.artifact_prefix(manifest.key))):
            store.delete(entry.name)
    assert look_up(store).result == "none"


def test_a_missing_layer_reads_as_a_miss_and_a_near_artifact_is_used_instead(tmp_path: Path, store: Store) -> None:
    triton_kernel(tmp_path / "one", "one")
    triton_kernel(tmp_path / "two", "two")
    publish_trees(store, [tree_of(TRITON, tmp_path / "one")])
    publish_trees(store, [tree_of(TRITON, tmp_path / "two")], draft(NEAR))
    layer = look_up(store).captures[0].manifest.layers[0]
    store.delete(layout.layer_name(layer.digest))
    found = look_up(store)
    assert (found.result, found.artifact) == ("near", derive(NEAR))


def test_damaged_manifests_are_told_and_do_not_hide_good_ones(tmp_path: Path, store: Store) -> None:
    triton(tmp_path / "live")
    publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    names = [f"{layout.artifact_prefix(KEY)}{number:064x}.json.zst" for number in range(2)]
    store.put(names[0], b"")
    store.put(names[1], noise("no manifest", 200))
    found = look_up(store)
    assert found.result == "exact"
    assert sorted(row.name for row in found.damaged) == names
    found = look_up(store, NEAR)
    assert found.result == "near"
    assert sorted(row.name for row in found.damaged) == names


def test_a_store_that_fails_is_an_error_and_not_a_miss(tmp_path: Path, store: Store) -> None:
    triton(tmp_path / "live")
    publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    for prefix in ("layout.json", "artifacts/"):
        with pytest.raises(StoreError, match="the test said so"):
            look_up(Unreadable(store, prefix))


def test_a_store_of_a_newer_layout_is_an_error(store: Store) -> None:
    store.put("layout.json", b'{"layout":7,"salt":""}')
    with pytest.raises(CorruptError, match="layout 7"):
        look_up(store)
