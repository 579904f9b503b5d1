"""Verify: a shelf of broken stores and live trees, each found, told apart and mended, and nothing whole is touched."""

import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from cachemgr.digest import fingerprint_of
from cachemgr.domains import Target
from cachemgr.domains.triton import TRITON
from cachemgr.history import NO_HISTORY
from cachemgr.inventory import Indexed, summarise
from cachemgr.key import Key
from cachemgr.store import Store, layout, pins
from cachemgr.store.captures import captures, has_layers, keys
from cachemgr.store.local import LocalStore
from cachemgr.store.pins import Pin
from cachemgr.verify import Depth, Verified, mend, verify
from tests import trees
from tests.conftest import NOW
from tests.kills import killed_at_every_step
from tests.machines import Fleet, Machine
from tests.pruning import add, factors_of, key_of, settle
from tests.stores import Recording, Unreadable, contents


def whole(place: Path) -> LocalStore:
    """Two artifacts that share nothing, one with entries of an engine."""
    store = LocalStore(place)
    add(store, place.parent / "live", "other")
    live = trees.build(place.parent / "entries", ("torch_compile", "triton"))
    trees.publish_trees(store, live, trees.draft(factors_of("entries")))
    settle(place)
    return store


def layer_of(store: Store, name: str) -> str:
    (capture,) = captures(store, key_of(name), [])
    return layout.layer_name(capture.manifest.layers[0].digest)


def manifest_of(store: Store, name: str) -> str:
    (capture,) = captures(store, key_of(name), [])
    return layout.manifest_name(key_of(name), capture.digest)


def write(store: Store, name: str, data: bytes) -> None:
    store.delete(name)
    store.put(name, data)


def flip(store: Store, name: str) -> None:
    data = bytearray(store.read(name, limit=1 << 20))
    data[len(data) // 2] ^= 1
    write(store, name, bytes(data))


def cut(store: Store, name: str) -> None:
    write(store, name, store.read(name, limit=1 << 20)[:-7])


def linked(store: Store, name: str) -> None:
    """As a tool leaves it that keeps equal files once."""
    path = Path(str(store)) / name
    path.rename(path.with_name("kept"))
    path.symlink_to("kept")


SHELF: dict[str, tuple[Callable[[Store], object], str, int]] = {
    # what somebody did to it, what is said, how many captures the repair gives up
    "whole": (lambda store: None, "", 0),
    "a layer is missing": (lambda store: store.delete(layer_of(store, "other")), "is missing, and capture", 1),
    "a layer is a link": (lambda store: linked(store, layer_of(store, "other")), "is missing, and capture", 1),
    "a layer is cut": (lambda store: cut(store, layer_of(store, "other")), "bytes and not", 1),
    "a layer is empty": (lambda store: write(store, layer_of(store, "other"), b""), "has 0 bytes", 1),
    "a bit of a layer is another": (lambda store: flip(store, layer_of(store, "other")), "is damaged", 1),
    "a manifest is cut": (lambda store: cut(store, manifest_of(store, "other")), "cannot be decompressed", 1),
    "a manifest is empty": (lambda store: write(store, manifest_of(store, "other"), b""), "decompressed", 1),
    "a bit of a manifest is another": (lambda store: flip(store, manifest_of(store, "other")), "capture", 1),
    "a manifest has the name of another": (
        lambda store: write(
            store, manifest_of(store, "other"), store.read(manifest_of(store, "entries"), limit=1 << 20)
        ),
        "other bytes than its name says",
        1,
    ),
    "hints are missing": (
        lambda store: [store.delete(entry.name) for entry in list(store.scan(layout.ENTRIES))],
        "is missing, so capture",
        0,
    ),
}


def verified(store: Store, depth: Depth = "digests", **more: object) -> Verified:
    return verify(store, depth=depth, now=float(NOW), **more)  # type: ignore[arg-type]


def damage(found: Verified) -> list[str]:
    return [fault.what for fault in found.report.faults if fault.severity == "damage"]


@pytest.mark.parametrize("what", SHELF)
@pytest.mark.parametrize("depth", ["digests", "deep"])
def test_every_damage_is_found_and_mended_and_its_neighbours_stay(tmp_path: Path, what: str, depth: Depth) -> None:
    broken, said, given_up = SHELF[what]
    store = whole(tmp_path / "store")
    broken(store)
    settle(tmp_path / "store")
    before = contents(store)
    found = verified(store, depth)
    assert contents(store) == before, "looking changes nothing"
    assert all(said in each for each in damage(found))
    assert found.report.damaged is bool(said)
    assert found.repair.empty is not bool(said)
    assert len(found.repair.manifests) == given_up
    mend(store, found.repair, launch="repair", now=float(NOW))
    again = verified(store, depth)
    assert damage(again) == []
    assert trees.look_up(store, factors_of("entries")).result == "exact"
    restored = trees.restore_found(
        store, trees.look_up(store, factors_of("entries")), trees.targets(tmp_path / "restored")
    )
    assert not restored.reasons
    add(store, tmp_path / "live", "other")
    assert trees.look_up(store, factors_of("other")).result == "exact", "it is published again"
    assert damage(verified(store, "deep")) == []


@pytest.mark.parametrize("what", [what for what in SHELF if "a bit of a layer" not in what])
def test_what_a_listing_shows_is_found_without_reading_a_layer(tmp_path: Path, what: str) -> None:
    broken, said, _given_up = SHELF[what]
    store = whole(tmp_path / "store")
    broken(store)
    settle(tmp_path / "store")
    recording = Recording(store)
    found = verified(recording, "sizes")
    assert found.report.damaged is bool(said)
    assert not [name for name in recording.opened() if name.startswith(layout.LAYERS)]


def test_a_file_in_a_layer_that_is_not_what_the_manifest_says_is_found_deep(tmp_path: Path) -> None:
    """Whoever packs a layer may put other bytes in it than the manifest tells; the layer's digest is right then."""
    import msgspec

    from cachemgr.capture import File
    from cachemgr.store.captures import commit

    store = whole(tmp_path / "store")
    (capture,) = captures(store, key_of("other"), [])
    (layer,) = capture.manifest.layers
    (section,) = layer.sections
    unit = section.units[0]
    files = tuple(
        msgspec.structs.replace(file, digest=section.units[0].files[-1].digest) if at == 0 else file
        for at, file in enumerate(unit.files)
    )
    assert isinstance(files[0], File)
    lying = msgspec.structs.replace(
        capture.manifest,
        launch="liar",
        layers=(
            msgspec.structs.replace(
                layer, sections=(msgspec.structs.replace(section, units=(msgspec.structs.replace(unit, files=files),)),)
            ),
        ),
    )
    commit(store, lying, {}, now=NOW)
    assert damage(verified(store, "digests")) == []
    found = verified(store, "deep")
    assert any("is damaged" in each for each in damage(found))


def test_what_only_takes_space_is_a_note(tmp_path: Path) -> None:
    store = whole(tmp_path / "store")
    gone = key_of("gone")
    store.put(f"layers/sha256/ab/{'ab' * 32}.tar.zst", b"orphan")
    store.put(layout.entry_name("5e" * 32, gone), b"")
    pins.put(store, gone, Pin("me", "2026-01-01T00:00:00Z"))
    settle(tmp_path / "store", days=0)
    assert {fault.what for fault in verified(store).report.faults} == {
        "pins an artifact that is not there; `cachemgr unpin` lifts it"
    }
    settle(tmp_path / "store")
    found = verified(store)
    assert not found.report.damaged
    assert sorted(fault.name.split("/")[0] for fault in found.report.faults) == ["entries", "layers", "pins"]
    mend(store, found.repair, launch="repair", now=float(NOW))
    assert [fault.name.split("/")[0] for fault in verified(store).report.faults] == ["layers", "pins"]


def test_what_others_believe_to_be_there_is_missed(tmp_path: Path) -> None:
    store = whole(tmp_path / "store")
    other, gone = key_of("other"), key_of("gone")
    held = captures(store, other, [])
    there = fingerprint_of(layout.manifest_name(other, each.digest) for each in held)
    true = summarise(other, held, NO_HISTORY, pinned=False)
    found = verified(store, known={other: Indexed(there, true), gone: Indexed("", true)})
    assert [(fault.key, fault.what) for fault in found.report.faults] == [
        (gone, "is in the catalogue, and not in the store, as the next `ls` will find")
    ]
    assert not found.report.damaged, "somebody may have removed it"
    wrong = msgspec.structs.replace(true, files=true.files + 1, pinned=True, uses=7)
    assert not verified(store, known={other: Indexed("behind", wrong)}).report.faults, "the next `ls` reads it"
    found = verified(store, known={other: Indexed(there, wrong)})
    assert [(fault.severity, fault.key) for fault in found.report.faults] == [("damage", other)]
    assert f"files {wrong.files} and not {true.files}" in found.report.faults[0].what
    assert (found.repair.indexed, found.repair.empty) == ((other,), False)


def test_what_is_mended_before_the_repair_is_left_alone(tmp_path: Path) -> None:
    """The question may wait for long: a launch publishes the layer again, another person the manifest."""
    store = whole(tmp_path / "store")
    layer, manifest = layer_of(store, "other"), manifest_of(store, "entries")
    kept = {name: store.read(name, limit=1 << 20) for name in (layer, manifest)}
    store.delete(layer)
    write(store, manifest, b"torn")
    found = verified(store)
    assert len(found.repair.manifests) == 2
    for name, data in kept.items():
        write(store, name, data)
    before = contents(store)
    mend(store, found.repair, launch="repair", now=float(NOW))
    assert contents(store) == before


def test_only_the_artifacts_that_are_asked_for_are_read(tmp_path: Path) -> None:
    store = whole(tmp_path / "store")
    flip(store, layer_of(store, "other"))
    assert not verify(store, {key_of("entries")}, now=float(NOW)).report.damaged
    assert verify(store, {key_of("other")}, now=float(NOW)).report.damaged


def test_what_cannot_be_read_is_said_and_stays(tmp_path: Path) -> None:
    from cachemgr.errors import DeniedError

    class Denying(Unreadable):
        def open(self, name: str):  # type: ignore[no-untyped-def]
            if name.startswith(layout.LAYERS):
                raise DeniedError(f"cannot read `{name}`: the test said so")
            return self.inner.open(name)

    store = whole(tmp_path / "store")
    found = verified(Denying(store, "none/"))
    assert all("cannot be read" in each for each in damage(found))
    assert len(damage(found)) == 2
    assert found.repair.empty


def test_a_capture_of_a_newer_release_is_never_given_up(tmp_path: Path) -> None:
    import zstandard

    from cachemgr import digest

    store = whole(tmp_path / "store")
    data = b'{"layout":2}'
    store.put(layout.manifest_name(key_of("other"), digest.of_bytes(data)), zstandard.compress(data))
    found = verified(store)
    assert found.report.damaged
    assert found.repair.manifests == ()


def test_live_trees_damaged_units_are_damage_and_uncovered_ones_a_note(tmp_path: Path) -> None:
    store = whole(tmp_path / "store")
    live = tmp_path / "vllm" / "triton"
    trees.triton_kernel(live, "other")
    broken = trees.triton_kernel(live, "broken")
    target = Target(TRITON, str(live), ours=True)
    found = verified(store, live=[target])
    assert not found.report.damaged
    assert [fault.what for fault in found.report.faults] == [
        f"1 of 2 units are in no artifact, such as {broken}",
    ]
    (live / broken / "add_kernel.json").write_bytes(b"{torn")
    found = verified(store, live=[target])
    assert [fault.name for fault in found.report.faults if fault.severity == "damage"] == [f"{live}/{broken}"]
    mend(store, found.repair, launch="repair", now=float(NOW))
    assert not verified(store, live=[target]).report.damaged
    assert not (live / broken).exists()
    assert (live / ".cachemgr-aside-repair" / broken).is_dir()


def test_an_artifact_that_is_removed_while_it_is_read_is_no_damage(tmp_path: Path) -> None:
    from cachemgr.store.removal import plan_removal, remove

    store = whole(tmp_path / "store")

    class Removing(Recording):
        def open(self, name: str):  # type: ignore[no-untyped-def]
            if name.startswith(layout.LAYERS):
                remove(self.inner, plan_removal(self.inner, keys(self.inner), now=NOW, grace=0))
            return super().open(name)

    found = verified(Removing(store))
    assert found.report.faults == ()
    assert keys(store) == []


@pytest.mark.slow
def test_a_repair_killed_anywhere_is_finished_by_the_next(tmp_path: Path) -> None:
    pristine, place = tmp_path / "pristine", tmp_path / "store"
    store = whole(pristine)
    flip(store, layer_of(store, "other"))
    for entry in list(store.scan(layout.ENTRIES)):
        store.delete(entry.name)
    settle(pristine)

    def repair() -> None:
        mend(LocalStore(place), verified(LocalStore(place)).repair, launch="repair", now=float(NOW))

    def fresh() -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(pristine, place)

    fresh()
    repair()
    expected = contents(LocalStore(place))
    fresh()
    for _step in killed_at_every_step(repair):
        there = LocalStore(place)
        assert trees.look_up(there, factors_of("entries")).result == "exact"
        repair()
        assert contents(there) == expected
        assert all(has_layers(there, capture) for key in keys(there) for capture in captures(there, key, []))
        fresh()


def spoil(machine: Machine) -> None:
    """Flip the last bit of the only layer."""
    (layer,) = (machine.store / "layers").rglob("*.zst")
    good = layer.read_bytes()
    layer.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))


def test_verify_as_people_type_it(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    machine = fleet.machine("one")
    key = machine.run(sys.executable, fleet.program, "one")["key"]
    done = machine.cachemgr("verify")
    assert done.stdout == ""
    assert "1 capture, 1 layer" in done.stderr
    assert "0 damaged, 0 notes" in done.stderr
    spoil(machine)
    done = machine.cachemgr("verify", code=1)
    assert done.stdout.startswith(f"damage  {key[:12]}  layers/sha256/")
    done = machine.cachemgr("verify", "--deep", "--repair", "-y")
    assert "repaired: remove 1 capture, discard 1 layer" in done.stderr


@pytest.mark.slow  # a dozen commands: 8 s
def test_the_options_of_verify(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    machine = fleet.machine("one")
    key = machine.run(sys.executable, fleet.program, "one")["key"]
    spoil(machine)
    assert machine.cachemgr("verify", "--sizes").returncode == 0
    assert "needs a yes" in machine.cachemgr("verify", "--repair", code=2).stderr
    document = machine.json("verify", "--repair", "--dry-run", code=1)
    assert (len(document["repair"]["layers"]), document["left"]) == (1, None)
    machine.cachemgr("verify", "--repair", "-y")
    assert machine.run(sys.executable, fleet.program, "one")["published"]
    machine.cachemgr("verify", "--deep", "--live")
    machine.cachemgr("verify", "--deep", "--sizes", code=2)
    assert "no artifact" in machine.cachemgr("verify", "k1:ffff", code=10).stderr
    assert [row["key"] for row in machine.json("ls")["artifacts"]] == [key], "which makes the catalogue"
    shutil.rmtree(machine.store / "artifacts")
    done = machine.cachemgr("verify")
    assert f"note    {key[:12]}  {layout.artifact_prefix(Key(key))}: is in the catalogue" in done.stdout


@pytest.mark.slow  # five commands
def test_a_catalogue_that_tells_what_is_not_so_is_damaged_and_made_anew(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    machine = fleet.machine("one")
    key = machine.run(sys.executable, fleet.program, "one")["key"]
    (true,) = machine.json("ls")["artifacts"]
    with closing(sqlite3.connect(machine.home / ".cache" / "cachemgr" / "catalogue.db")) as file, file:
        file.execute("UPDATE artifact SET model = 'another'")
    assert machine.json("ls")["artifacts"][0]["model"] == "another", "a refresh believes what it has read"
    done = machine.cachemgr("verify", code=1)
    said = f"the catalogue tells other things of it: model another and not {true['model']}"
    assert f"damage  {key[:12]}  {layout.artifact_prefix(Key(key))}: {said}" in done.stdout
    assert "repaired: reindex 1 artifact" in machine.cachemgr("verify", "--repair", "-y").stderr
    assert machine.json("ls")["artifacts"] == [true]
