"""Real vLLM cache trees survive capture and restore under another root.

`CACHEMGR_TEST_TREES` names a directory with `vllm026-default.tar.xz` and `vllm026-pinned.tar.xz`: what vLLM 0.26 left
on an H200. Both are unpacked under other names than the roots that are written inside them.
"""

import os
import subprocess
from pathlib import Path

import pytest

from cachemgr.domains import Domain, Target, by_name
from cachemgr.key import derive
from cachemgr.oci.unpacked import UnpackedStore
from cachemgr.store import Store
from cachemgr.store.captures import captures
from cachemgr.store.local import LocalStore
from tests.test_oci import rooted
from tests.trees import (
    FACTORS,
    assert_moved,
    look_up,
    publish_apart,
    publish_trees,
    read,
    restore_found,
    tree_of,
)

TREES = os.environ.get("CACHEMGR_TEST_TREES", "")

pytestmark = [pytest.mark.full, pytest.mark.skipif(not TREES, reason="CACHEMGR_TEST_TREES names no directory")]

PLACES: dict[str, dict[str, str]] = {
    "vllm026-default": {
        "torch_compile": "c1/torch_compile_cache",
        "modelinfos": "c1/modelinfos",
        "triton": "h1/.triton/cache",
    },
    "vllm026-pinned": {"torch_compile": "c7/torch_compile_cache", "modelinfos": "c7/modelinfos", "triton": "t7"},
}
RELOCATED = {
    "vllm026-default": {"torch_compile": 46, "modelinfos": 0, "triton": 24},
    "vllm026-pinned": {"torch_compile": 1, "modelinfos": 0, "triton": 45},
}
"""As `find -name '__grp__*.json' -o -name vllm_compile_cache.py` counts them."""


def unpack(name: str, target: Path) -> Path:
    target.mkdir()
    subprocess.run(["tar", "-xJf", f"{TREES}/{name}.tar.xz", "-C", str(target), "--no-same-owner"], check=True)
    return target


def domain(name: str) -> Domain:
    found = by_name(name)
    assert found is not None
    return found


@pytest.mark.parametrize("archive", PLACES)
def test_a_real_tree_arrives_under_another_root(tmp_path: Path, store: Store, archive: str) -> None:
    old, new = unpack(archive, tmp_path / "old"), tmp_path / "a new 'root'"
    places = PLACES[archive]
    trees = [tree_of(domain(name), old / place) for name, place in places.items()]
    published = publish_trees(store, trees)
    assert published.refused == ()
    stays = {path for name, place in places.items() for path in read(old / place) if not domain(name).travels(path)}
    assert all(path.endswith((".lock", ".pyc")) for path in stays), stays
    assert published.files == sum(len(read(old / place)) for place in places.values()) - len(stays)
    found = look_up(store)
    restored = restore_found(
        store, found, [Target(domain(name), str(new / place), True) for name, place in places.items()]
    )
    assert restored.reasons == ()
    assert restored.files == published.files
    assert {path.stat().st_atime_ns for path in new.rglob("*") if path.is_file()} == {0}
    counts = {name: assert_moved(domain(name), old / place, new / place) for name, place in places.items()}
    assert counts == RELOCATED[archive]


@pytest.mark.parametrize("archive", PLACES)
def test_a_real_tree_arrives_from_a_mounted_image(tmp_path: Path, store: Store, archive: str) -> None:
    old, new = unpack(archive, tmp_path / "old"), tmp_path / "new"
    places = PLACES[archive]
    publish_trees(store, [tree_of(domain(name), old / place) for name, place in places.items()])
    seed = UnpackedStore(rooted(store, tmp_path))
    arrived = [Target(domain(name), str(new / place), True) for name, place in places.items()]
    assert restore_found(seed, look_up(seed), arrived).reasons == ()
    counts = {name: assert_moved(domain(name), old / place, new / place) for name, place in places.items()}
    assert counts == RELOCATED[archive]


def test_real_trees_are_smaller_in_the_store(tmp_path: Path, store: Store) -> None:
    old = unpack("vllm026-default", tmp_path / "old")
    trees = [tree_of(domain(name), old / place) for name, place in PLACES["vllm026-default"].items()]
    published = publish_trees(store, trees)
    assert published.stored_bytes * 10 < published.bytes
    entries = captures(store, derive(FACTORS), [])[0].manifest.entries
    assert sorted(map(len, entries)) == [10, 64]


@pytest.mark.parametrize(("archive", "share"), [("vllm026-default", 0.7), ("vllm026-pinned", 0.95)])
def test_real_domains_share_bytes_when_they_share_a_layer(
    tmp_path: Path, store: Store, archive: str, share: float
) -> None:
    """By default, vLLM keeps kernels in Triton's directory and once more in its own."""
    old = unpack(archive, tmp_path / "old")
    trees = [tree_of(domain(name), old / place) for name, place in PLACES[archive].items()]
    together = publish_trees(store, trees).stored_bytes
    apart = LocalStore(tmp_path / "apart")
    publish_apart(apart, trees)
    layers = captures(apart, derive(FACTORS), [])[0].manifest.layers
    assert len(layers) == 3
    assert together < share * sum(layer.size for layer in layers)
