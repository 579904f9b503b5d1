"""Symbolic links out of a live root or a store: nothing follows one, writes through one or removes what it names."""

import json
import shutil
from pathlib import Path

import pytest

from cachemgr import heal, live
from cachemgr.domains import TORCH_PROGRAM
from cachemgr.key import derive
from cachemgr.statcache import StatCache
from cachemgr.store import layout
from cachemgr.store.captures import captures
from cachemgr.store.local import LocalStore
from cachemgr.store.removal import plan_removal, remove
from tests import trees
from tests.machines import Machine, install_program, install_stand_in
from tests.test_shapes import HOST_KERNEL, KERNEL, NOW, PYTHON, cut, look, restored, target


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Somebody else's files, which look like a cache."""
    trees.write(tmp_path / "outside", {"precious.txt": b"mine", f"{'E' * 52}/add.json": b"{", "model.1.tmp": b"half"})
    trees.triton_kernel(tmp_path / "outside", "outside")
    return tmp_path / "outside"


def link_out(root: Path, outside: Path) -> None:
    """Links of every kind out of a live root."""
    (root / "triton").mkdir(parents=True, exist_ok=True)
    (root / "inductor").mkdir(exist_ok=True)
    (root / "modelinfos").symlink_to(outside)
    (root / "triton" / ("F" * 52)).symlink_to(outside)
    (root / "triton" / ("G" * 52)).mkdir()
    (root / "triton" / ("G" * 52) / "precious.json").symlink_to(outside / "precious.txt")
    (root / "inductor" / "aotautograd").symlink_to(outside)
    (root / "inductor" / "dangling").symlink_to(outside / "nowhere")


def test_links_out_of_a_live_root_are_not_followed_by_look_or_publish(tmp_path: Path, outside: Path) -> None:
    room, store = tmp_path / "room", LocalStore(tmp_path / "store")
    link_out(room, outside)
    before = trees.state(outside)
    trees.triton_kernel(room / "triton", "one")
    # A domain's own directory may be a link: that is how users move it.
    seen = [found for found in look(room) if found.target.domain.name != "modelinfos"]
    assert seen == []
    trees.publish_trees(store, [tree for tree in trees.live(room) if tree.domain.name != "modelinfos"])
    assert {path.split("/")[1] for path in restored(store, tmp_path / "other")} == {KERNEL}
    assert trees.state(outside) == before


def test_a_restore_does_not_write_through_a_link_out_of_the_live_root(tmp_path: Path, outside: Path) -> None:
    room, store = tmp_path / "room", LocalStore(tmp_path / "store")
    trees.build(tmp_path / "made")
    trees.publish_trees(store, trees.live(tmp_path / "made"))
    (room / "triton").mkdir(parents=True)
    (room / "triton" / KERNEL).symlink_to(outside)
    (room / "inductor").mkdir()
    for name in ("aotautograd", "fxgraph", "qa"):
        (room / "inductor" / name).symlink_to(outside)
    before = trees.state(outside)
    outcome = trees.restore_found(store, trees.look_up(store), trees.targets(room))
    assert trees.state(outside) == before
    assert outcome.files > 0, "the others are restored"
    assert (room / "inductor" / "qa").is_symlink()
    assert f"qa/{HOST_KERNEL}.main.so" not in outcome.offered["inductor"]


def test_a_private_live_directory_goes_without_what_its_links_lead_to(tmp_path: Path, outside: Path) -> None:
    key = derive(trees.FACTORS)
    environ = {"VLLM_CACHE_ROOT": str(tmp_path / "root"), "TMPDIR": str(tmp_path)}
    before = trees.state(outside)
    claim = live.Claim(key, "launch-1", "compiling", "sight")
    room = live.enter(environ, TORCH_PROGRAM, claim, alone=True, now=NOW, notes=[])
    own = Path(room.targets[0].directory).parent
    link_out(own, outside)
    room.leave(in_use=False)
    assert not own.exists()
    assert trees.state(outside) == before


def test_links_out_of_a_store_are_neither_listed_nor_removed(tmp_path: Path, outside: Path) -> None:
    place = tmp_path / "store"
    store = LocalStore(place)
    trees.publish_trees(store, trees.build(tmp_path / "room"))
    key = derive(trees.FACTORS)
    (capture,) = captures(store, key, [])
    manifest = layout.manifest_name(key, capture.digest)
    shutil.copy(place / manifest, outside / "stolen.json.zst")
    (place / manifest).parent.joinpath("ab" * 32 + ".json.zst").symlink_to(outside / "stolen.json.zst")
    (place / "artifacts" / ("k1-" + "0" * 32)).symlink_to(outside)
    (place / "layers" / "sha256" / "00").symlink_to(outside)
    (place / "entries" / "link").symlink_to(outside)
    before = trees.state(outside)
    assert {entry.name for entry in store.scan("artifacts/")} == {manifest}
    assert [found.digest for found in captures(store, key, [])] == [capture.digest]
    remove(store, plan_removal(store, [key], now=NOW, grace=0))
    assert captures(store, key, []) == ()
    assert trees.state(outside) == before
    assert (place / "artifacts" / ("k1-" + "0" * 32)).is_symlink(), "not ours to remove"


def test_rm_leaves_what_links_in_the_store_lead_to(tmp_path: Path, outside: Path) -> None:
    machine = Machine(tmp_path / "one", tmp_path / "store", install_stand_in(tmp_path))
    report = machine.run(PYTHON, install_program(tmp_path), "f")
    (machine.store / "layers" / "sha256" / "00").symlink_to(outside)
    (machine.store / "launches" / "link").symlink_to(outside)
    before = trees.state(outside)
    machine.cachemgr("rm", "-y", report["key"])
    assert json.loads(machine.cachemgr("ls", "--json").stdout)["artifacts"] == []
    assert trees.state(outside) == before


def test_a_torn_unit_behind_a_link_does_not_hide_the_units_of_the_room(tmp_path: Path, outside: Path) -> None:
    link_out(tmp_path / "room", outside)
    cut_one = target("triton", tmp_path / "room")
    trees.triton_kernel(cut_one.directory, "one")
    cut(f"{KERNEL}/add_kernel.json")(Path(cut_one.directory))
    before = trees.state(outside)
    (ailing,) = heal.look([cut_one], StatCache({}), now_ns=trees.NOW_NS)
    heal.set_aside(ailing, "launch-9")
    assert [fault.unit for fault in ailing.faults] == [KERNEL]
    assert trees.state(outside) == before
