"""Publishing: what is captured, what is refused, and that a failure at any write leaves nothing half-visible."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cachemgr.capture import File
from cachemgr.domains import TABLE
from cachemgr.domains.torch import INDUCTOR
from cachemgr.domains.triton import TRITON
from cachemgr.domains.vllm import TORCH_COMPILE
from cachemgr.errors import CorruptError, StoreError
from cachemgr.key import derive
from cachemgr.observe import Seen
from cachemgr.statcache import StatCache
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, captures, has_layers
from cachemgr.store.local import LocalStore
from tests.conftest import MakeDisk
from tests.stores import Corrupting, Faulty, MemoryStore, Recording, contents
from tests.trees import (
    AOT_NAME,
    FACTORS,
    TEN_HEX,
    Publisher,
    assert_moved,
    build,
    changed,
    draft,
    elf,
    inductor,
    live,
    look_up,
    noise,
    publish_apart,
    publish_trees,
    read,
    restore_found,
    state,
    targets,
    tree_of,
    triton,
    triton_kernel,
    triton_key,
    write,
)

KEY = derive(FACTORS)


class Counting(StatCache):
    """A stat cache that says which files were read."""

    def __init__(self) -> None:
        super().__init__({})
        self.read: list[str] = []

    def put(self, path: str, seen: Seen, file: File, *, now_ns: int) -> None:
        self.read.append(file.path)
        super().put(path, seen, file, now_ns=now_ns)


def only(store: Store) -> Capture:
    """The one capture of the store."""
    found = captures(store, KEY, [])
    assert len(found) == 1
    return found[0]


def paths_of(capture: Capture) -> dict[str, list[str]]:
    return {section.domain: [file.path for file in section.files()] for _layer, section in capture.manifest.sections()}


def test_what_travels_of_every_domain_is_captured(tmp_path: Path, store: Store) -> None:
    trees = build(tmp_path / "live")
    published = publish_trees(store, trees)
    assert published.refused == ()
    capture = only(store)
    assert capture.digest == published.capture
    expected = {
        domain.name: sorted(path for path in read(tmp_path / "live" / domain.name) if domain.travels(path))
        for domain in TABLE
    }
    assert {name: sorted(paths) for name, paths in paths_of(capture).items()} == expected
    files = [file for layer in capture.manifest.layers for file in layer.files()]
    assert (published.files, published.bytes) == (len(files), sum(file.size for file in files))
    assert published.stored_bytes == sum(layer.size for layer in capture.manifest.layers)
    assert capture.manifest.entries == (TEN_HEX, AOT_NAME)
    assert has_layers(store, capture)
    assert list(store.scratch().iterdir()) == []


def test_the_live_directory_is_left_as_it_was(tmp_path: Path, store: Store) -> None:
    trees = build(tmp_path / "live")
    for path in (tmp_path / "live").rglob("*"):
        if path.is_file():
            os.utime(path, ns=(0, path.stat().st_mtime_ns))
    before = state(tmp_path / "live")
    for path in (tmp_path / "live").rglob("*"):
        if path.is_file():
            os.utime(path, ns=(0, path.stat().st_mtime_ns))
    publish_trees(store, trees)
    assert {path.stat().st_atime_ns for path in (tmp_path / "live").rglob("*") if path.is_file()} == {0}
    assert state(tmp_path / "live") == before


def test_relocated_files_are_stored_without_their_directory(tmp_path: Path, store: Store) -> None:
    publish_trees(store, build(tmp_path / "live"))
    marked = {file.path for layer in only(store).manifest.layers for file in layer.files() if file.relocated}
    assert len([path for path in marked if "__grp__" in path]) == 5
    assert [path for path in marked if path.endswith(".py")] == [f"{TEN_HEX}/rank_0_0/backbone/vllm_compile_cache.py"]


def test_the_same_tree_in_another_place_makes_the_same_layers(tmp_path: Path) -> None:
    layers = []
    for name in ("one", "a longer two"):
        store = LocalStore(tmp_path / name / "store")
        publish_trees(store, build(tmp_path / name / "live"))
        layers.append(only(store).manifest.layers)
    assert layers[0] == layers[1]


def test_executable_files_stay_executable_and_other_modes_do_not_travel(tmp_path: Path, store: Store) -> None:
    root = tmp_path / "live"
    write(root, {"K/run.so": elf("a"), "K/private": b"x", "K/open": b"y"})
    for name, mode in (("run.so", 0o775), ("private", 0o600), ("open", 0o666)):
        (root / "K" / name).chmod(mode)
    publish_trees(store, [tree_of(TRITON, root)])
    modes = {file.path: file.mode for layer in only(store).manifest.layers for file in layer.files()}
    assert modes == {"K/run.so": 0o755, "K/private": 0o644, "K/open": 0o644}


def test_only_units_that_were_touched_are_captured(tmp_path: Path, store: Store) -> None:
    keys = triton(tmp_path / "live")
    published = publish_trees(store, [tree_of(TRITON, tmp_path / "live", [f"{keys[0]}/add_kernel.json", "gone"])])
    assert published.refused == ()
    assert {path.split("/")[0] for path in paths_of(only(store))["triton"]} <= {keys[0]}


def test_nothing_touched_is_nothing_captured(tmp_path: Path, store: Store) -> None:
    triton(tmp_path / "live")
    published = publish_trees(store, [tree_of(TRITON, tmp_path / "live", [])])
    assert (published.capture, published.reason) == (None, "nothing new to capture")
    assert captures(store, KEY, []) == ()


DAMAGE = {
    "add_kernel.cubin": (elf("one")[:-1], "`{key}/add_kernel.cubin` is cut off"),
    "add_kernel.json": (b'{"hash":', "`{key}/add_kernel.json` is no complete JSON"),
    "__grp__add_kernel.json": (b'{"child_paths": {', "`{key}/__grp__add_kernel.json` is no complete JSON"),
    "add_kernel.ptx": (b"", "`{key}/add_kernel.ptx` is empty"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_unit_is_refused_and_said_and_the_others_are_captured(
    tmp_path: Path, store: Store, name: str
) -> None:
    data, words = DAMAGE[name]
    bad, good = (triton_kernel(tmp_path / "live", seed) for seed in ("bad", "good"))
    write(tmp_path / "live", {f"{bad}/{name}": data})
    published = publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    assert [(row.domain, row.unit, row.reason) for row in published.refused] == [("triton", bad, words.format(key=bad))]
    assert {path.split("/")[0] for path in paths_of(only(store))["triton"]} == {good}


def test_a_group_whose_member_is_missing_is_refused(tmp_path: Path, store: Store) -> None:
    key = triton_kernel(tmp_path / "live", "one")
    (tmp_path / "live" / key / "add_kernel.ptx").unlink()
    published = publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    assert [row.reason for row in published.refused] == [
        f"`{key}/__grp__add_kernel.json` names `add_kernel.ptx`, which is not beside it"
    ]
    (tmp_path / "live" / key / "add_kernel.cubin").unlink()
    published = publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    assert [row.reason for row in published.refused] == ["kernel `add_kernel` has no binary"]


def test_an_index_of_a_missing_artifact_is_refused(tmp_path: Path, store: Store) -> None:
    build(tmp_path / "live")
    backbone = tmp_path / "live/torch_compile" / TEN_HEX / "rank_0_0/backbone"
    (backbone / "artifact_compile_range_1_16384_subgraph_0").unlink()
    published = publish_trees(store, live(tmp_path / "live"))
    assert [(row.unit, row.reason.split("` ", 1)[1]) for row in published.refused] == [
        (TEN_HEX, "names `artifact_compile_range_1_16384_subgraph_0`, which is not beside it")
    ]
    assert only(store).manifest.entries == (AOT_NAME,)


def test_a_name_that_no_manifest_may_hold_is_refused(tmp_path: Path, store: Store) -> None:
    """Or the whole capture would be unreadable."""
    good = triton_kernel(tmp_path / "live", "good")
    for name in ("new\nline", "back\\slash", "\x1b[2J", "no\u00a0break"):
        write(tmp_path / "live", {f"K{ord(name[-1])}/{name}": b"x"})
    published = publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    assert [row.reason.rsplit("` ", 1)[1] for row in published.refused] == ["has a name that cannot be stored"] * 4
    assert all(row.reason.isprintable() for row in published.refused)
    assert {path.split("/")[0] for path in paths_of(only(store))["triton"]} == {good}


def test_links_pipes_and_names_that_are_no_text_are_not_captured(tmp_path: Path, store: Store) -> None:
    key = triton_kernel(tmp_path / "live", "one")
    directory = tmp_path / "live" / key
    (directory / "link").symlink_to("/etc/passwd")
    (tmp_path / "live" / "linked").symlink_to(directory)
    os.mkfifo(directory / "pipe")
    (Path(os.fsdecode(os.fsencode(directory) + b"/\xff"))).write_bytes(b"x")
    published = publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    assert published.refused == ()
    assert not {"link", "pipe"} & {path.split("/")[1] for path in paths_of(only(store))["triton"]}
    assert published.files == 8


def test_a_file_that_became_a_link_after_it_was_seen_is_refused(tmp_path: Path, store: Store) -> None:
    key = triton_kernel(tmp_path / "live", "one")
    tree = tree_of(TRITON, tmp_path / "live")
    target = tmp_path / "live" / key / "add_kernel.ptx"
    target.unlink()
    target.symlink_to("/etc/passwd")
    published = publish_trees(store, [tree])
    assert [row.reason for row in published.refused] == [
        f"`{key}/add_kernel.ptx` cannot be read: Too many levels of symbolic links"
    ]


@pytest.mark.parametrize("data", [b".version 9.9", b"longer than it was " * 100, b""])
def test_a_file_that_changed_after_it_was_seen_is_refused(tmp_path: Path, store: Store, data: bytes) -> None:
    key = triton_kernel(tmp_path / "live", "one")
    tree = tree_of(TRITON, tmp_path / "live")
    (tmp_path / "live" / key / "add_kernel.ptx").write_bytes(data)
    published = publish_trees(store, [tree])
    assert [row.reason for row in published.refused] == [f"`{key}/add_kernel.ptx` changed while it was read"]
    assert captures(store, KEY, []) == ()


def test_a_file_that_changes_between_hashing_and_packing_costs_its_unit_only(tmp_path: Path, store: Store) -> None:
    """The stat cache vouches for the file, so that only the packer can see that its bytes are other ones."""
    bad, good = (triton_kernel(tmp_path / "live", seed) for seed in ("bad", "good"))
    cache = StatCache({})
    publish_trees(LocalStore(tmp_path / "other"), [tree_of(TRITON, tmp_path / "live")], cache=cache)
    path = tmp_path / "live" / bad / "add_kernel.ptx"
    before = path.stat()
    with path.open("r+b") as stream:
        stream.write(b"X")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    published = publish_trees(store, [tree_of(TRITON, tmp_path / "live")], cache=cache)
    assert [(row.unit, row.reason) for row in published.refused] == [
        (bad, f"{bad}/add_kernel.ptx changed while it was read")
    ]
    assert {path.split("/")[0] for path in paths_of(only(store))["triton"]} == {good}
    assert list(store.scratch().iterdir()) == []


def test_a_unit_that_changes_before_packing_costs_no_other_domain(tmp_path: Path, store: Store) -> None:
    """The same paths may lie in two domains; only the unit that changed is left out."""
    files = {"qa/x.bin": b"x", "qa/y.bin": noise("y", 1000)}
    for name in ("inductor", "triton"):
        write(tmp_path / "live" / name, files)
    cache = StatCache({})
    trees = live(tmp_path / "live")
    publish_trees(LocalStore(tmp_path / "other"), trees, cache=cache)
    (tmp_path / "live/triton/qa/y.bin").unlink()
    published = publish_trees(store, trees, cache=cache)
    assert [(row.domain, row.unit) for row in published.refused] == [("triton", "qa")]
    assert paths_of(only(store)) == {"inductor": [*files]}
    assert list(store.scratch().iterdir()) == []


def test_a_file_that_vanishes_before_packing_costs_its_unit_only(tmp_path: Path, store: Store) -> None:
    bad, good = (triton_kernel(tmp_path / "live", seed) for seed in ("bad", "good"))
    cache = StatCache({})
    tree = tree_of(TRITON, tmp_path / "live")
    publish_trees(LocalStore(tmp_path / "other"), [tree], cache=cache)
    (tmp_path / "live" / bad / "add_kernel.llir").unlink()
    published = publish_trees(store, [tree], cache=cache)
    assert [row.unit for row in published.refused] == [bad]
    assert {path.split("/")[0] for path in paths_of(only(store))["triton"]} == {good}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_files_of_another_user_are_refused(tmp_path: Path, store: Store) -> None:
    key = triton_kernel(tmp_path / "live", "one")
    os.chown(tmp_path / "live" / key / "add_kernel.ptx", 65534, 65534)
    published = publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    assert [row.reason for row in published.refused] == [f"`{key}/add_kernel.ptx` belongs to user 65534"]


def test_a_large_file_is_captured_whole(tmp_path: Path, store: Store) -> None:
    data = noise("large", (17 << 20) + 3)
    write(tmp_path / "live", {"K/big.bin": data})
    publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    restore_found(store, look_up(store), targets(tmp_path / "new"))
    assert (tmp_path / "new/triton/K/big.bin").read_bytes() == data


def test_an_unchanged_tree_published_again_reads_nothing_and_writes_nothing(tmp_path: Path, store: Store) -> None:
    trees = build(tmp_path / "live")
    cache = Counting()
    first = publish_trees(store, trees, cache=cache)
    assert len(cache.read) == first.files
    before = contents(store)
    cache.read.clear()
    recording = Recording(store)
    second = publish_trees(recording, live(tmp_path / "live"), draft(launch="launch-2"), cache)
    assert (second.capture, second.reason) == (None, "nothing new to capture")
    assert cache.read == []
    assert recording.writes() == []
    assert not [name for name in recording.opened() if name.startswith("layers/")]
    assert contents(store) == before


def test_a_stat_cache_spares_the_reading_and_changes_nothing_else(tmp_path: Path) -> None:
    trees = build(tmp_path / "live")
    cache = Counting()
    stores = [LocalStore(tmp_path / name) for name in "abc"]
    publish_trees(stores[0], trees, cache=cache)
    cache.read.clear()
    publish_trees(stores[1], trees, cache=cache)
    assert cache.read == []
    publish_trees(stores[2], trees)
    assert only(stores[0]) == only(stores[1]) == only(stores[2])


def test_only_what_changed_is_read_again(tmp_path: Path) -> None:
    trees = build(tmp_path / "live")
    cache = Counting()
    publish_trees(LocalStore(tmp_path / "a"), trees, cache=cache)
    cache.read.clear()
    name = next(path for path in read(tmp_path / "live/modelinfos"))
    (tmp_path / "live/modelinfos" / name).write_bytes(b'{"hash": "new"}')
    publish_trees(LocalStore(tmp_path / "b"), live(tmp_path / "live"), cache=cache)
    assert cache.read == [name]


def test_the_same_tree_under_another_key_reuses_the_layers(tmp_path: Path, store: Store) -> None:
    trees = build(tmp_path / "live")
    cache = Counting()
    publish_trees(store, trees, cache=cache)
    cache.read.clear()
    recording = Recording(store)
    other = changed("vllm.max_model_len", "4096")
    published = publish_trees(recording, trees, draft(other), cache, near=(only(store),))
    assert cache.read == []
    assert published.stored_bytes == 0
    assert [verb for verb, name in recording.writes() if name.startswith("layers/")] == []
    assert len([name for _verb, name in recording.writes() if name.startswith("artifacts/")]) == 1
    found = captures(store, derive(other), [])
    assert found[0].manifest.layers == only(store).manifest.layers


def test_a_near_capture_whose_layer_is_gone_is_not_leant_on(tmp_path: Path, store: Store) -> None:
    trees = build(tmp_path / "live")
    publish_trees(store, trees)
    capture = only(store)
    for layer in capture.manifest.layers:
        store.delete(layout.layer_name(layer.digest))
    publish_trees(store, trees, draft(changed("vllm.max_model_len", "4096")), near=(capture,))
    assert has_layers(store, capture)


def test_of_a_near_capture_with_several_layers_the_one_that_fits_is_reused(tmp_path: Path, store: Store) -> None:
    """And it does not matter whether the others are there still."""
    trees = build(tmp_path / "live")
    publish_apart(store, trees)
    capture = only(store)
    held = capture.manifest.section("triton")
    assert held is not None
    for layer in capture.manifest.layers:
        if layer is not held[0]:
            store.delete(layout.layer_name(layer.digest))
    manifest = draft(changed("vllm.max_model_len", "4096"))
    (tree,) = (tree for tree in trees if tree.domain is TRITON)
    published = publish_trees(store, [tree], manifest, near=(capture,))
    assert published.stored_bytes == 0
    (found,) = captures(store, manifest.key, [])
    assert found.manifest.layers == (held[0],)
    published = publish_trees(store, trees, draft(changed("vllm.max_model_len", "1")), near=(capture,))
    assert published.stored_bytes > held[0].size


def test_what_a_capture_with_several_layers_has_is_not_published_again(tmp_path: Path, store: Store) -> None:
    trees = build(tmp_path / "live")
    publish_apart(store, trees)
    assert publish_trees(store, trees, draft(launch="b")).reason == "nothing new to capture"


def test_new_units_become_a_capture_of_their_own(tmp_path: Path, store: Store) -> None:
    one = triton_kernel(tmp_path / "live", "one")
    publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    two = triton_kernel(tmp_path / "live", "two")
    publish_trees(store, [tree_of(TRITON, tmp_path / "live")], draft(created="2026-02-01T00:00:00Z", launch="b"))
    found = captures(store, KEY, [])
    assert [{path.split("/")[0] for path in paths_of(capture)["triton"]} for capture in found] == [{one}, {two}]


def test_a_unit_that_grew_is_captured_again_and_one_that_shrank_is_not(tmp_path: Path, store: Store) -> None:
    key = triton_kernel(tmp_path / "live", "one")
    publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    write(tmp_path / "live", {f"{key}/add_kernel.autotune.json": b"{}"})
    assert publish_trees(store, [tree_of(TRITON, tmp_path / "live")], draft(launch="b")).files == 9
    (tmp_path / "live" / key / "add_kernel.autotune.json").unlink()
    assert publish_trees(store, [tree_of(TRITON, tmp_path / "live")], draft(launch="c")).capture is None


def test_an_incomplete_capture_does_not_spare_a_later_launch_its_own(tmp_path: Path, store: Store) -> None:
    trees = build(tmp_path / "live")
    publish_trees(store, trees, draft(complete=False))
    published = publish_trees(store, trees, draft(launch="b"))
    assert published.capture is not None
    assert [capture.manifest.complete for capture in captures(store, KEY, [])].count(True) == 1


@pytest.mark.parametrize(
    ("publisher", "layers"), [(publish_trees, 1), (publish_apart, 4)], ids=["one layer", "a layer a domain"]
)
def test_a_capture_that_lost_a_layer_is_published_again(tmp_path: Path, publisher: Publisher, layers: int) -> None:
    trees = build(tmp_path / "live")
    for number in range(layers):
        store = LocalStore(tmp_path / f"store-{number}")
        publisher(store, trees, draft())
        lost = only(store).manifest.layers[number]
        assert look_up(store).result == "exact"
        store.delete(layout.layer_name(lost.digest))
        assert look_up(store).result == "none"
        assert publish_trees(store, trees, draft(launch="b")).capture is not None
        assert look_up(store).result == "exact"
        assert store.has(layout.layer_name(lost.digest)) == (publisher is publish_trees)
        new = tmp_path / f"new-{number}"
        restore_found(store, look_up(store), targets(new))
        for target in targets(new):
            assert_moved(target.domain, tmp_path / "live" / target.domain.name, target.directory)


def test_a_damaged_manifest_does_not_spare_a_launch_its_own(tmp_path: Path, store: Store) -> None:
    trees = build(tmp_path / "live")
    publish_trees(store, trees)
    published = publish_trees(Corrupting(store, "artifacts/"), trees, draft(launch="b"))
    assert published.capture is not None


def test_two_domains_with_equal_files_share_their_bytes_in_one_layer(tmp_path: Path, store: Store) -> None:
    kernel = {"qa/cqa.main.so": elf("the same", 1 << 20)}
    write(tmp_path / "live/triton", kernel)
    alone = publish_trees(LocalStore(tmp_path / "alone"), live(tmp_path / "live"))
    write(tmp_path / "live/inductor", kernel)
    both = publish_trees(store, live(tmp_path / "live"))
    assert (both.files, both.bytes) == (2, 2 * alone.bytes)
    assert alone.bytes < both.stored_bytes < 1.01 * alone.stored_bytes
    (layer,) = only(store).manifest.layers
    assert [section.domain for section in layer.sections] == ["inductor", "triton"]
    assert paths_of(only(store)) == {"inductor": [*kernel], "triton": [*kernel]}
    assert list(store.scratch().iterdir()) == []
    assert restore_found(store, look_up(store), targets(tmp_path / "new")).reasons == ()
    assert {name: read(tmp_path / "new" / name) for name in ("inductor", "triton")} == {
        "inductor": kernel,
        "triton": kernel,
    }


def test_a_publish_packs_one_layer_whatever_the_order_of_its_trees(tmp_path: Path, store: Store) -> None:
    trees = build(tmp_path / "live")
    publish_trees(store, trees)
    (layer,) = only(store).manifest.layers
    names = [section.domain for section in layer.sections]
    assert names == sorted(domain.name for domain in TABLE)
    other = LocalStore(tmp_path / "other")
    publish_trees(other, trees[::-1])
    assert only(other) == only(store)


def test_a_domain_without_anything_new_has_no_section(tmp_path: Path, store: Store) -> None:
    build(tmp_path / "live")
    publish_trees(store, live(tmp_path / "live"))
    key = triton_kernel(tmp_path / "live/triton", "new")
    published = publish_trees(store, live(tmp_path / "live"), draft(launch="b"))
    (capture,) = (found for found in captures(store, KEY, []) if found.digest == published.capture)
    assert {name: {path.split("/")[0] for path in paths} for name, paths in paths_of(capture).items()} == {
        "triton": {key}
    }


def test_a_store_of_a_newer_layout_is_left_alone(tmp_path: Path, store: Store) -> None:
    store.put("layout.json", b'{"layout":2,"salt":"00"}')
    with pytest.raises(CorruptError, match="layout 2"):
        publish_trees(store, build(tmp_path / "live"))
    assert list(contents(store)) == ["layout.json"]


def test_a_store_without_room_says_so_and_leaves_nothing(tmp_path: Path, small_disk: MakeDisk) -> None:
    store = LocalStore(small_disk(256 << 10) / "store")
    write(tmp_path / "live", {"K/big": noise("big", 1 << 20)})
    with pytest.raises(StoreError, match="No space left"):
        publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    assert captures(store, KEY, []) == ()
    assert list(store.scratch().iterdir()) == []


def check_invariants(store: Store, live_root: Path, new: Path) -> None:
    """Whatever is visible is whole, and a publish that is tried again makes it so."""
    damaged: list[object] = []
    found = captures(store, KEY, damaged)  # type: ignore[arg-type]
    assert damaged == []
    for capture in found:
        assert has_layers(store, capture)
        assert capture.manifest.complete
    manifests = {capture.manifest.key for capture in found}
    hints = [entry.name for entry in store.scan("entries/")]
    assert not hints or manifests
    publish_trees(store, live(live_root), draft(launch="again"))
    for target in targets(new):
        restore_found(store, look_up(store), [target])
        assert_moved(target.domain, live_root / target.domain.name, target.directory)


def writes_of_a_publish(tmp_path: Path) -> int:
    recording = Recording(MemoryStore(tmp_path / "count"))
    publish_trees(recording, build(tmp_path / "live"))
    return len(recording.writes())


@pytest.mark.parametrize("late", [False, True], ids=["refused", "answer lost"])
def test_a_publish_that_fails_at_any_write_leaves_no_half_capture(tmp_path: Path, late: bool) -> None:
    writes = writes_of_a_publish(tmp_path)
    assert writes == 2 + 1 + 1 + 2  # layout, layer, manifest, hints
    for number in range(writes):
        store = LocalStore(tmp_path / f"store-{number}")
        faulty = Faulty(store, fail_after=number, late=late)
        with pytest.raises(StoreError, match="the test said so"):
            publish_trees(faulty, live(tmp_path / "live"))
        assert faulty.failed
        visible = captures(store, KEY, [])
        assert bool(visible) == (number > 3 or (late and number == 3))
        if store.has("layout.json"):
            assert list(store.scratch().iterdir()) == []
        check_invariants(store, tmp_path / "live", tmp_path / f"new-{number}")


DIE = """
import sys
from pathlib import Path
from tests.stores import Dying
from tests.trees import live, publish_trees
from cachemgr.store.local import LocalStore
publish_trees(Dying(LocalStore(Path(sys.argv[1])), after=int(sys.argv[3])), live(Path(sys.argv[2])))
"""


def test_a_publish_that_is_killed_at_any_write_leaves_no_half_capture(tmp_path: Path) -> None:
    writes = writes_of_a_publish(tmp_path)
    environ = {"PYTHONPATH": str(Path(__file__).parent), "HOME": str(tmp_path)}
    for number in range(writes):
        root = tmp_path / f"store-{number}"
        command = [sys.executable, "-c", DIE, str(root), str(tmp_path / "live"), str(number)]
        ran = subprocess.run(command, env=environ, capture_output=True, check=False)
        assert ran.returncode == -signal.SIGKILL, ran.stderr.decode()
        assert bool(captures(LocalStore(root), KEY, [])) == (number > 3)
        check_invariants(LocalStore(root), tmp_path / "live", tmp_path / f"new-{number}")


def test_two_publishers_of_one_key_leave_an_artifact_that_serves_both(tmp_path: Path, store: Store) -> None:
    code = """
import sys
from pathlib import Path
from tests.trees import draft, live, publish_trees
from cachemgr.store.local import LocalStore
while not Path(sys.argv[4]).exists():
    pass
publish_trees(LocalStore(Path(sys.argv[1])), live(Path(sys.argv[2])), draft(launch=sys.argv[3]))
"""
    for name in ("one", "two"):
        inductor(tmp_path / name / "inductor", seed=name)
        triton(tmp_path / name / "triton")
    environ = {"PYTHONPATH": str(Path(__file__).parent), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, str(store)]
    racers = [
        subprocess.Popen([*command, str(tmp_path / name), name, str(tmp_path / "go")], env=environ)
        for name in ("one", "two")
    ]
    (tmp_path / "go").touch()
    assert [racer.wait(60) for racer in racers] == [0, 0]
    assert len(captures(store, KEY, [])) == 2
    restore_found(store, look_up(store), targets(tmp_path / "new"))
    arrived = {INDUCTOR.unit_of(path) for path in read(tmp_path / "new/inductor")}
    made = [set(map(INDUCTOR.unit_of, tree_of(INDUCTOR, tmp_path / name / "inductor").seen)) for name in ("one", "two")]
    assert made[0] != made[1]
    assert arrived == made[0] | made[1]


def test_an_unreadable_live_directory_is_an_empty_one(tmp_path: Path, store: Store) -> None:
    published = publish_trees(store, [tree_of(TORCH_COMPILE, tmp_path / "nowhere")])
    assert published.capture is None


def test_a_capture_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    """Equal drafts over equal trees are one capture; another launch is another capture over the same layers."""
    trees = build(tmp_path / "live")
    digests = {}
    for name, manifest in (("a", draft()), ("b", draft()), ("c", draft(launch="other"))):
        store = LocalStore(tmp_path / name)
        digests[name] = publish_trees(store, trees, manifest).capture
    assert digests["a"] == digests["b"] != digests["c"]
    first, other = (captures(LocalStore(tmp_path / name), KEY, [])[0].manifest for name in "ac")
    assert msgspec.structs.replace(other, launch=first.launch) == first


def test_a_layer_that_lies_in_the_store_is_not_written_a_second_time(tmp_path: Path, store: Store) -> None:
    trees = build(tmp_path / "live")
    publish_trees(store, trees)
    before = {path: path.stat().st_ino for path in (tmp_path / "store/layers").rglob("*.zst")}
    publish_trees(store, trees, draft(changed("vllm.max_model_len", "4096")))
    assert len(before) == 1
    assert {path: path.stat().st_ino for path in (tmp_path / "store/layers").rglob("*.zst")} == before
    assert list(store.scratch().iterdir()) == []


def test_of_two_names_that_some_file_systems_take_for_one_the_second_is_left_out(tmp_path: Path, store: Store) -> None:
    first, second = triton_key("a"), triton_key("a").swapcase()
    for name in (first, second):
        write(tmp_path / "live" / name, {"add.source": b"// 1"})
    tree = tree_of(TRITON, tmp_path / "live")
    published = publish_trees(store, [tree])
    assert [(each.unit, each.reason) for each in published.refused] == [
        (max(first, second), f"unit {max(first, second)} repeats a file of another unit")
    ]
    (capture,) = captures(store, KEY, [])
    assert {unit.name for section in capture.manifest.layers[0].sections for unit in section.units} == {
        min(first, second)
    }
