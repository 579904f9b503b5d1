"""Warm: put what was found where the engine will look, whole or not at all. `test_lookup.py` has how it is found."""

import io
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from cachemgr.capture import File, Layer, Manifest, Section, Unit, encode_manifest
from cachemgr.digest import of_bytes
from cachemgr.domains import TABLE, Domain, Target
from cachemgr.domains.torch import INDUCTOR
from cachemgr.domains.triton import TRITON
from cachemgr.key import derive
from cachemgr.layer import pack
from cachemgr.lookup import Found
from cachemgr.observe import STAGE_PREFIX
from cachemgr.store import Store, layout
from cachemgr.store.captures import commit
from cachemgr.warm import choose
from tests.conftest import MakeDisk
from tests.stores import Breaking, Corrupting, Recording, Unreadable, spool
from tests.trees import (
    FACTORS,
    NOW_NS,
    OLD_NS,
    TEN_HEX,
    Publisher,
    assert_moved,
    build,
    changed,
    draft,
    elf,
    inductor,
    inductor_files,
    live,
    look_up,
    noise,
    publish_apart,
    publish_trees,
    read,
    restore_found,
    state,
    targets,
    torch_compile,
    tree_of,
    triton,
    triton_kernel,
    unit,
    write,
)

KEY = derive(FACTORS)
NEAR = changed("vllm.max_model_len", "4096")
BLIND = changed("speculative.tokens", "5")
GUARDED = changed("torch", "2.12.0")


def triton_at(root: Path, *, ours: bool = True) -> list[Target]:
    return [Target(TRITON, str(root), ours)]


def leftovers(root: Path) -> list[str]:
    """Staging directories anywhere below `root`."""
    return [str(path) for path in root.rglob(f"{STAGE_PREFIX}*")]


# Restoring into an empty place


@pytest.mark.parametrize(
    "name", ["new", "live-and-more", "live/deeper", 'a b/it\'s "quoted"', "ünï/文", "x" * 200, "with\nnewline", "@dir@"]
)
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "the user's"])
def test_what_was_captured_arrives_under_any_other_root(tmp_path: Path, store: Store, name: str, ours: bool) -> None:
    old, new = tmp_path / "live", tmp_path / name / "root"
    publish_trees(store, build(old))
    restored = restore_found(store, look_up(store), targets(new, ours=ours))
    assert restored.reasons == ()
    relocated = {domain.name: assert_moved(domain, old / domain.name, new / domain.name) for domain in TABLE}
    counted = {name: count for name, count in relocated.items() if count}
    assert counted == {"torch_compile": 3, "inductor": 1, "triton": 2}
    arrived = {domain.name: set(read(new / domain.name)) for domain in TABLE}
    assert restored.files == sum(len(paths) for paths in arrived.values())
    assert restored.offered == {name: frozenset(paths) for name, paths in arrived.items()}
    assert restored.present == 0
    assert leftovers(tmp_path) == []


def test_restored_trees_can_be_published_and_restored_again(tmp_path: Path, store: Store) -> None:
    publish_trees(store, build(tmp_path / "1"))
    restore_found(store, look_up(store), targets(tmp_path / "2"))
    published = publish_trees(store, live(tmp_path / "2"), draft(NEAR))
    assert published.refused == ()
    first, second = look_up(store).captures[0], look_up(store, NEAR).captures[0]
    assert first.manifest.layers == second.manifest.layers
    assert publish_trees(store, live(tmp_path / "2"), draft(launch="b")).capture is None


def test_restored_files_look_unread_whole_and_new(tmp_path: Path, store: Store) -> None:
    old, new = tmp_path / "live", tmp_path / "new"
    build(old)
    tool = next((old / "triton").rglob("*.so"))
    tool.chmod(0o755)
    publish_trees(store, live(old))
    restore_found(store, look_up(store), targets(new))
    for path in [path for path in new.rglob("*") if path.is_file()]:
        status = path.stat()
        assert status.st_atime_ns == 0, path
        kept = path.relative_to(new).parts[0] in {domain.name for domain in TABLE if domain.keeps_mtimes}
        assert status.st_mtime_ns == (OLD_NS if kept else NOW_NS)
        assert status.st_nlink == 1
        assert bool(status.st_mode & 0o100) == (path.name == tool.name and "triton" in str(path.parent.parent))
        assert status.st_uid == os.geteuid()


def test_modes_do_not_depend_on_who_captured(tmp_path: Path, store: Store) -> None:
    write(tmp_path / "live", {"K/x": b"1"})
    (tmp_path / "live/K/x").chmod(0o600)
    publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    before = os.umask(0o022)
    try:
        restore_found(store, look_up(store), triton_at(tmp_path / "new"))
    finally:
        os.umask(before)
    assert (tmp_path / "new/K/x").stat().st_mode & 0o777 == 0o644


def test_an_empty_directory_of_the_target_is_no_obstacle(tmp_path: Path, store: Store) -> None:
    publish_trees(store, build(tmp_path / "live"))
    for target in targets(tmp_path / "new"):
        os.makedirs(target.directory)
    assert restore_found(store, look_up(store), targets(tmp_path / "new")).reasons == ()
    for domain in TABLE:
        assert_moved(domain, tmp_path / "live" / domain.name, tmp_path / "new" / domain.name)


# Restoring beside what is there


@pytest.fixture
def two_kernels(tmp_path: Path, store: Store) -> list[str]:
    """The names of two kernels that the store has."""
    keys = [triton_kernel(tmp_path / "live", seed) for seed in ("one", "two")]
    publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    return keys


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "the user's"])
def test_a_unit_that_is_there_already_stays_and_counts_as_offered(
    tmp_path: Path, store: Store, two_kernels: list[str], ours: bool
) -> None:
    new = tmp_path / "new"
    triton_kernel(new, "one")
    before = state(new)
    restored = restore_found(store, look_up(store), triton_at(new, ours=ours))
    assert (restored.files, restored.present, restored.reasons) == (8, 8, ())
    assert {path.split("/")[0] for path in restored.offered["triton"]} == set(two_kernels)
    after = state(new)
    assert {path: after[path] for path in before} == before
    assert_moved(TRITON, tmp_path / "live", new)
    assert leftovers(tmp_path) == []


def test_a_second_restore_places_nothing(tmp_path: Path, store: Store, two_kernels: list[str]) -> None:
    restore_found(store, look_up(store), triton_at(tmp_path / "new"))
    before = state(tmp_path / "new")
    recording = Recording(store)
    restored = restore_found(recording, look_up(store), triton_at(tmp_path / "new"))
    assert (restored.files, restored.present, restored.reasons) == (0, 16, ())
    assert state(tmp_path / "new") == before
    assert recording.opened() == []


def keep_one(unit: Path) -> None:
    for path in unit.iterdir():
        if path.suffix != ".ptx":
            path.unlink()


DIFFERENT: dict[str, Callable[[Path], object]] = {
    "one file missing": lambda unit: (unit / "add_kernel.ptx").unlink(),
    "only one file there": keep_one,
    "another size": lambda unit: (unit / "add_kernel.ptx").write_bytes(b"longer than it was" * 99),
    "an empty file": lambda unit: (unit / "add_kernel.ptx").write_bytes(b""),
}


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "the user's"])
@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_a_unit_that_is_there_otherwise_is_left_as_it_is_and_said(
    tmp_path: Path, store: Store, two_kernels: list[str], change: Callable[[Path], object], ours: bool
) -> None:
    new = tmp_path / "new"
    triton_kernel(new, "one")
    change(new / two_kernels[0])
    before = state(new)
    restored = restore_found(store, look_up(store), triton_at(new, ours=ours))
    assert restored.reasons == ("triton: 1 units left as they are, the live directory has other ones",)
    assert {path.split("/")[0] for path in restored.offered["triton"]} == {two_kernels[1]}
    after = state(new)
    assert {path: after[path] for path in before} == before
    assert {path.split("/")[0] for path in after.keys() - before.keys()} == {two_kernels[1]}


def test_foreign_files_of_the_live_directory_stay(tmp_path: Path, store: Store, two_kernels: list[str]) -> None:
    new = tmp_path / "new"
    write(new, {"mine/notes.txt": b"1", "loose": b"2", "K.lock": b"", ".hidden/x": b"3"})
    before = state(new)
    restore_found(store, look_up(store), triton_at(new))
    after = state(new)
    assert {path: after[path] for path in before} == before
    assert set(two_kernels) < {path.split("/")[0] for path in after}


def test_a_directory_of_the_engine_without_its_files_yet_is_not_replaced(
    tmp_path: Path, store: Store, two_kernels: list[str]
) -> None:
    """A kernel directory with only a lock or a temporary in it belongs to a compile that is going on."""
    new = tmp_path / "new"
    write(new, {f"{two_kernels[0]}/tmp.pid_7_ab/add_kernel.cubin": b"half"})
    restored = restore_found(store, look_up(store), triton_at(new))
    assert {path.split("/")[0] for path in restored.offered["triton"]} == {two_kernels[1]}
    assert set(read(new / two_kernels[0])) == {"tmp.pid_7_ab/add_kernel.cubin"}


def test_what_another_launch_places_meanwhile_stays(tmp_path: Path, store: Store, two_kernels: list[str]) -> None:
    new = tmp_path / "new"

    def meanwhile() -> bool:
        if not (new / two_kernels[0]).exists():
            write(new, {f"{two_kernels[0]}/add_kernel.cubin": b"of the other launch", f"{two_kernels[1]}/x": b"too"})
        return False

    restored = restore_found(store, look_up(store), triton_at(new), meanwhile)
    assert restored.files == 0
    assert read(new) == {f"{two_kernels[0]}/add_kernel.cubin": b"of the other launch", f"{two_kernels[1]}/x": b"too"}
    assert leftovers(tmp_path) == []


def test_files_of_a_unit_among_others_are_placed_beside_them(tmp_path: Path, store: Store) -> None:
    inductor(tmp_path / "live")
    publish_trees(store, [tree_of(INDUCTOR, tmp_path / "live")])
    new = tmp_path / "new"
    write(new, {"qa/cqaother.py": b"x = 1\n", "aotautograd/other/y": b"2"})
    before = state(new)
    restored = restore_found(store, look_up(store), [Target(INDUCTOR, str(new), ours=True)])
    assert restored.reasons == ()
    after = state(new)
    assert {path: after[path] for path in before if "/" in path[3:]} == {
        path: before[path] for path in before if "/" in path[3:]
    }
    assert set(inductor_files()) <= set(read(new))


def test_a_unit_beside_a_directory_of_its_name_is_placed(tmp_path: Path, store: Store) -> None:
    write(tmp_path / "live", {"qa/cqa.py": b"x = 1\n", "qa/cqa/inner.bin": b"2"})
    publish_trees(store, [tree_of(INDUCTOR, tmp_path / "live")])
    for number, there in enumerate([{}, {"zz/czz.py": b"y = 1\n"}]):
        new = tmp_path / f"new-{number}"
        write(new, there)
        restored = restore_found(store, look_up(store), [Target(INDUCTOR, str(new), ours=False)])
        assert read(new) == {"qa/cqa.py": b"x = 1\n", "qa/cqa/inner.bin": b"2", **there}
        assert restored.offered["inductor"] == {"qa/cqa.py", "qa/cqa/inner.bin"}


def test_two_restores_at_once_leave_one_whole_tree(tmp_path: Path, store: Store) -> None:
    publish_trees(store, build(tmp_path / "live"))
    found = look_up(store)
    new = tmp_path / "new"
    barrier = threading.Barrier(4)
    reasons: list[tuple[str, ...]] = []

    def race(number: int) -> None:
        from cachemgr.warm import restore

        barrier.wait()
        now, held = NOW_NS, found.captures
        done = restore(store, held, targets(new), trees=True, launch=f"l{number}", now_ns=now, expired=lambda: False)
        reasons.append(done.reasons)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert reasons == [()] * 4
    for domain in TABLE:
        assert_moved(domain, tmp_path / "live" / domain.name, new / domain.name)
    assert leftovers(tmp_path) == []


# Restoring what is not in order


@pytest.mark.parametrize("cut", [False, True], ids=["flipped", "cut"])
@pytest.mark.parametrize("at", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("there", [False, True], ids=["empty", "populated"])
def test_a_corrupt_layer_leaves_the_live_directory_as_it_was(
    tmp_path: Path, store: Store, two_kernels: list[str], at: float, cut: bool, there: bool
) -> None:
    new = tmp_path / "place" / "new"
    (tmp_path / "place").mkdir()
    if there:
        triton_kernel(new, "another")
    before = state(tmp_path / "place")
    corrupt = Corrupting(store, "layers/", at=at, cut=cut)
    restored = restore_found(corrupt, look_up(store), triton_at(new))
    assert (restored.files, restored.offered["triton"]) == (0, frozenset())
    assert len(restored.reasons) == 1
    assert restored.reasons[0].startswith("triton not restored: layer sha256:")
    assert state(tmp_path / "place") == before


def crafted(
    store: Store, domain: Domain, units: list[Unit], bodies: Mapping[str, bytes], manifest: Manifest | None = None
) -> Found:
    """What a hostile publisher with a good archiver would put there."""
    target = io.BytesIO()
    sections = (Section(domain.name, tuple(units)),)
    made = pack(sections, lambda _domain, file: iter([bodies[file.path]]), target)
    found = msgspec.structs.replace(manifest or draft(), layers=(made,))
    commit(store, found, {made.digest: spool(store, target.getvalue())}, now=NOW_NS / 1e9)
    return look_up(store)


def draft_with(layer: Layer, *, created: str) -> Manifest:
    return msgspec.structs.replace(draft(created=created, launch=created), layers=(layer,))


FOREIGN: dict[str, tuple[Domain, Unit]] = {
    "a file of another unit": (TRITON, unit("K1", {"K2/x": b"1"})),
    "a temporary": (TRITON, unit("K1", {"K1/tmp.pid_1_a/x": b"1"})),
    "byte-code": (INDUCTOR, unit("qa/cqa", {"qa/__pycache__/cqa.cpython-311.pyc": b"1"})),
    "a lock": (INDUCTOR, unit("locks/c", {"locks/c.lock": b"1"})),
    "a unit of another name": (INDUCTOR, unit("qa", {"qa/cqa.py": b"1"})),
    "something that vLLM never wrote": (TABLE[0], unit("evil", {"evil/x": b"1"})),
}


@pytest.mark.parametrize(("domain", "foreign"), FOREIGN.values(), ids=FOREIGN.keys())
def test_a_unit_that_its_domain_would_not_have_is_left_out(
    tmp_path: Path, store: Store, domain: Domain, foreign: Unit
) -> None:
    good = {"triton": "zz/x", "inductor": "zz/czz.py", "torch_compile": f"{TEN_HEX}/x"}[domain.name]
    fine = unit(domain.unit_of(good), {good: b"1"})
    bodies = {file.path: b"1" for row in (foreign, fine) for file in row.files}
    found = crafted(store, domain, sorted([foreign, fine], key=lambda row: row.name), bodies)
    restored = restore_found(store, found, [Target(domain, str(tmp_path / "new"), ours=True)])
    assert set(read(tmp_path / "new")) == {good}
    assert restored.offered == {domain.name: frozenset({good})}
    assert restored.reasons == (f"{domain.name}: 1 units left out, {domain.name} has no such files",)


@pytest.mark.parametrize("body", [b"[" * 3000, b"{", b"\xff", b'{"a": "@dir@/../../x"}', b'"' + b"9" * 50])
def test_a_relocated_file_that_cannot_be_relocated_stops_its_domain(tmp_path: Path, store: Store, body: bytes) -> None:
    group = File("K1/__grp__add.json", len(body), of_bytes(body), relocated=True)
    found = crafted(store, TRITON, [Unit("K1", (group,))], {group.path: body})
    restored = restore_found(store, found, triton_at(tmp_path / "new"))
    assert len(restored.reasons) == 1
    assert restored.reasons[0].startswith("triton not restored: `K1/__grp__add.json` cannot be relocated")
    assert [damage.capture for damage in restored.damaged] == [found.captures[0].digest]
    assert not (tmp_path / "new").exists()
    assert leftovers(tmp_path) == []


def test_a_large_relocated_file_arrives(tmp_path: Path, store: Store) -> None:
    members = {f"{number:05}{'x' * 80}": b"" for number in range(20_000)}
    rows = ",".join(f'"{name}": "@dir@/{name}"' for name in members)
    body = ('{"child_paths": {' + rows + "}}").encode()
    assert len(body) > 1 << 20
    group = File("K1/__grp__add.json", len(body), of_bytes(body), relocated=True)
    found = crafted(store, TRITON, [Unit("K1", (group,))], {group.path: body})
    assert restore_found(store, found, triton_at(tmp_path / "new")).reasons == ()
    placed = (tmp_path / "new/K1/__grp__add.json").read_text()
    assert placed.count(f"{tmp_path}/new/K1/") == 20_000


def test_a_damaged_capture_does_not_keep_another_one_out(tmp_path: Path, store: Store) -> None:
    triton_kernel(tmp_path / "first/triton", "one")
    triton_kernel(tmp_path / "second/triton", "two")
    inductor(tmp_path / "second/inductor")
    for day, name in enumerate(("first", "second"), start=1):
        manifest = draft(created=f"2026-01-{day:02}T00:00:00Z", launch=name)
        publish_trees(store, live(tmp_path / name), manifest)
    found = look_up(store)
    held = found.captures[0].manifest.section("triton")
    assert held is not None
    corrupt = Corrupting(store, layout.layer_name(held[0].digest))
    restored = restore_found(corrupt, found, targets(tmp_path / "new"))
    assert len(restored.reasons) == 1
    assert [damage.capture for damage in restored.damaged] == [found.captures[0].digest]
    assert not (tmp_path / "new/triton").exists(), "half of a domain is none"
    assert_moved(INDUCTOR, tmp_path / "second/inductor", tmp_path / "new/inductor")


def test_a_damaged_layer_keeps_out_all_that_is_in_it(tmp_path: Path, store: Store) -> None:
    publish_trees(store, build(tmp_path / "live"))
    triton_kernel(tmp_path / "new/triton", "another")
    before = state(tmp_path / "new")
    found = look_up(store)
    restored = restore_found(Corrupting(store, "layers/"), found, targets(tmp_path / "new"))
    assert sorted(reason.split(":")[0] for reason in restored.reasons) == sorted(
        f"{domain.name} not restored" for domain in TABLE
    )
    (layer,) = found.captures[0].manifest.layers
    assert [(damage.capture, damage.layer) for damage in restored.damaged] == [(found.captures[0].digest, layer.digest)]
    assert (restored.files, set(restored.offered.values())) == (0, {frozenset()})
    assert state(tmp_path / "new") == before


def test_a_damaged_layer_of_a_capture_does_not_keep_its_other_layers_out(tmp_path: Path, store: Store) -> None:
    publish_apart(store, build(tmp_path / "live"))
    found = look_up(store)
    held = found.captures[0].manifest.section("triton")
    assert held is not None
    corrupt = Corrupting(store, layout.layer_name(held[0].digest))
    restored = restore_found(corrupt, found, targets(tmp_path / "new"))
    assert len(restored.reasons) == 1
    assert [(damage.capture, damage.layer) for damage in restored.damaged] == [
        (found.captures[0].digest, held[0].digest)
    ]
    assert not (tmp_path / "new/triton").exists()
    for domain in TABLE:
        if domain is not TRITON:
            assert_moved(domain, tmp_path / "live" / domain.name, tmp_path / "new" / domain.name)


def test_a_capture_that_tells_lies_about_the_layer_of_another_one_hurts_itself_only(
    tmp_path: Path, store: Store
) -> None:
    """Two manifests may describe one object of the store, and not alike. Nothing is offered that is not there."""
    honest = unit("K1", {"K1/x": b"1"})
    found = crafted(store, TRITON, [honest], {"K1/x": b"1"})
    (layer,) = found.captures[0].manifest.layers
    more = (Section("triton", (honest, unit("K2", {"K2/x": b"2"}))),)
    lie = msgspec.structs.replace(layer, sections=more)
    commit(store, draft_with(lie, created="2026-02-01T00:00:00Z"), {}, now=NOW_NS / 1e9)
    found = look_up(store)
    assert len(found.captures) == 2
    restored = restore_found(store, found, triton_at(tmp_path / "new"))
    assert set(read(tmp_path / "new")) == restored.offered["triton"] == set()
    assert [damage.capture for damage in restored.damaged] == [found.captures[1].digest]
    without = msgspec.structs.replace(found, captures=found.captures[:1])
    assert restore_found(store, without, triton_at(tmp_path / "new")).offered == {"triton": frozenset({"K1/x"})}


def test_a_directory_that_cannot_be_used_does_not_keep_other_domains_out(tmp_path: Path, store: Store) -> None:
    publish_trees(store, build(tmp_path / "live"))
    (tmp_path / "new").mkdir()
    (tmp_path / "blocked").write_text("a file")
    places = [
        Target(domain, str(tmp_path / "blocked/x" if domain is TRITON else tmp_path / "new" / domain.name), ours=True)
        for domain in TABLE
    ]
    restored = restore_found(store, look_up(store), places)
    assert len(restored.reasons) == 1
    assert restored.reasons[0].startswith("triton not restored: ")
    assert restored.damaged == ()
    for domain in TABLE:
        if domain is not TRITON:
            assert_moved(domain, tmp_path / "live" / domain.name, tmp_path / "new" / domain.name)


@pytest.mark.parametrize("at", [0, 1], ids=["at once", "in the middle"])
def test_a_layer_whose_reading_breaks_off_is_said(
    tmp_path: Path, store: Store, two_kernels: list[str], at: int
) -> None:
    """As on a dead file server; the object may be all right, so that nothing is called damaged."""
    restored = restore_found(Breaking(store, "layers/", after=at), look_up(store), triton_at(tmp_path / "new"))
    assert len(restored.reasons) == 1
    assert restored.reasons[0].startswith("triton not restored: cannot read layer sha256:")
    assert restored.reasons[0].endswith(": Input/output error")
    assert restored.damaged == ()
    assert not (tmp_path / "new").exists()
    assert leftovers(tmp_path) == []


def test_a_layer_that_vanished_or_cannot_be_read_is_said(tmp_path: Path, store: Store, two_kernels: list[str]) -> None:
    found = look_up(store)
    restored = restore_found(Unreadable(store, "layers/"), found, triton_at(tmp_path / "new"))
    assert "the test said so" in restored.reasons[0]
    for entry in store.scan("layers/"):
        store.delete(entry.name)
    restored = restore_found(store, found, triton_at(tmp_path / "new"))
    assert restored.reasons[0].startswith("triton not restored: no `layers/")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("after", [0, 1, 5, 15, 16])
def test_after_the_deadline_nothing_is_placed(tmp_path: Path, store: Store, two_kernels: list[str], after: int) -> None:
    triton_kernel(tmp_path / "new", "another")
    before = state(tmp_path / "new")
    asked = 0

    def expired() -> bool:
        nonlocal asked
        asked += 1
        return asked > after

    restored = restore_found(store, look_up(store), triton_at(tmp_path / "new"), expired)
    assert restored.reasons == ("triton not restored: the deadline has passed",)
    assert state(tmp_path / "new") == before
    assert leftovers(tmp_path) == []


def test_after_the_deadline_no_domain_is_placed_and_no_more_is_read(tmp_path: Path, store: Store) -> None:
    """Whoever waited for it has gone on, and the engine writes to these directories now."""
    inductor(tmp_path / "live/inductor")
    write(tmp_path / "live/triton", {f"K{number}/x": noise(f"{number}", 1 << 20) for number in range(20)})
    publish_trees(store, live(tmp_path / "live"))
    first = len(inductor_files()) + 8
    for after in (first - 1, first, first + 1):
        asked = 0

        def expired() -> bool:
            nonlocal asked
            asked += 1
            return asked > after  # noqa: B023 - called in this round only

        restored = restore_found(store, look_up(store), targets(tmp_path / "new"), expired)
        assert set(restored.reasons) == {
            f"{name} not restored: the deadline has passed" for name in ("inductor", "triton")
        }
        assert asked == after + 1, "nothing is unpacked for nobody"
        assert restored.damaged == ()
        assert read(tmp_path / "new") == {}
        assert leftovers(tmp_path) == []


def test_a_place_without_room_is_said_before_anything_is_written(
    tmp_path: Path, store: Store, two_kernels: list[str], small_disk: MakeDisk
) -> None:
    place = small_disk(1 << 20)
    recording = Recording(store)
    restored = restore_found(recording, look_up(store), triton_at(place / "new"))
    assert recording.opened() == []
    assert restored.reasons == (f"triton not restored: no space on the file system of {place}",)
    assert list(place.iterdir()) == []


def test_a_disk_that_fills_up_in_the_middle_of_a_large_file_stops_its_domain_only(
    tmp_path: Path, store: Store, small_disk: MakeDisk
) -> None:
    """What follows in the layer, of the same domain and of others, is where it was."""
    write(tmp_path / "live/inductor", {"aa/1.bin": noise("large", 8 << 20), "aa/2.bin": noise("next", 3 << 20)})
    inductor(tmp_path / "live/inductor")
    triton(tmp_path / "live/triton")
    publish_trees(store, live(tmp_path / "live"))
    place = small_disk(80 << 20)
    asked = 0

    def fill() -> bool:
        nonlocal asked
        asked += 1
        if asked == 1:
            with (place / "of somebody else").open("wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, 74 << 20)
        return False

    places = [
        Target(domain, str(place / "new" if domain is INDUCTOR else tmp_path / "new" / domain.name), ours=True)
        for domain in TABLE
    ]
    restored = restore_found(store, look_up(store), places, fill)
    assert restored.reasons == (f"inductor not restored: No space left on device ({place}/new)",)
    assert restored.damaged == ()
    assert [path.name for path in place.iterdir()] == ["of somebody else"]
    assert_moved(TRITON, tmp_path / "live/triton", tmp_path / "new/triton")


def test_a_place_that_is_a_file_is_said(tmp_path: Path, store: Store, two_kernels: list[str]) -> None:
    (tmp_path / "file").write_bytes(b"")
    restored = restore_found(store, look_up(store), triton_at(tmp_path / "file" / "new"))
    assert len(restored.reasons) == 1
    assert restored.reasons[0].startswith("triton not restored: Not a directory (")


def test_a_symbolic_link_as_root_is_followed_and_one_inside_is_not_replaced(
    tmp_path: Path, store: Store, two_kernels: list[str]
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "new").symlink_to("real")
    (tmp_path / "real" / two_kernels[0]).symlink_to(tmp_path / "outside")
    restored = restore_found(store, look_up(store), triton_at(tmp_path / "new"))
    assert {path.split("/")[0] for path in restored.offered["triton"]} == {two_kernels[1]}
    assert (tmp_path / "new").is_symlink()
    assert list((tmp_path / "outside").iterdir()) == []
    assert len(read(tmp_path / "real" / two_kernels[1])) == 8


# Several domains in one layer


def layers_opened(recording: Recording) -> list[str]:
    return [name for name in recording.opened() if name.startswith("layers/")]


def test_all_domains_come_from_one_pass_over_their_layer(tmp_path: Path, store: Store) -> None:
    publish_trees(store, build(tmp_path / "live"))
    found = look_up(store)
    recording = Recording(store)
    assert restore_found(recording, found, targets(tmp_path / "new")).reasons == ()
    (layer,) = found.captures[0].manifest.layers
    assert layers_opened(recording) == [layout.layer_name(layer.digest)]
    for domain in TABLE:
        assert_moved(domain, tmp_path / "live" / domain.name, tmp_path / "new" / domain.name)


@pytest.mark.parametrize("domain", TABLE, ids=[domain.name for domain in TABLE])
def test_a_domain_that_is_wanted_alone_is_restored_alone(tmp_path: Path, store: Store, domain: Domain) -> None:
    publish_trees(store, build(tmp_path / "live"))
    place = Target(domain, str(tmp_path / "new" / domain.name), ours=True)
    restored = restore_found(store, look_up(store), [place])
    assert (restored.reasons, set(restored.offered)) == ((), {domain.name})
    assert_moved(domain, tmp_path / "live" / domain.name, place.directory)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [domain.name]


@pytest.mark.parametrize("domain", TABLE, ids=[domain.name for domain in TABLE])
def test_a_domain_that_is_there_already_is_not_placed_again_with_the_others(
    tmp_path: Path, store: Store, domain: Domain
) -> None:
    publish_trees(store, build(tmp_path / "live"))
    found = look_up(store)
    for target in targets(tmp_path / "new"):
        if target.domain is domain:
            restore_found(store, found, [target])
    before = state(tmp_path / "new" / domain.name)
    restored = restore_found(store, found, targets(tmp_path / "new"))
    assert (restored.reasons, restored.present) == ((), len(read(tmp_path / "new" / domain.name)))
    assert state(tmp_path / "new" / domain.name) == before
    for other in TABLE:
        assert_moved(other, tmp_path / "live" / other.name, tmp_path / "new" / other.name)


def test_the_domains_of_a_near_artifact_that_may_not_be_used_are_passed_over(tmp_path: Path, store: Store) -> None:
    """They lie between the others in the layer."""
    publish_trees(store, build(tmp_path / "live"))
    recording = Recording(store)
    restore_found(recording, look_up(store, BLIND), targets(tmp_path / "new"))
    assert len(layers_opened(recording)) == 1
    for domain in TABLE:
        if domain.content_keyed:
            assert_moved(domain, tmp_path / "live" / domain.name, tmp_path / "new" / domain.name)
        else:
            assert not (tmp_path / "new" / domain.name).exists()


def test_equal_paths_of_two_domains_do_not_meet(tmp_path: Path, store: Store) -> None:
    for name in ("inductor", "triton"):
        write(tmp_path / "live" / name, {"qa/x.bin": name.encode(), "qa/y.bin": b"equal"})
    publish_trees(store, live(tmp_path / "live"))
    assert restore_found(store, look_up(store), targets(tmp_path / "new")).files == 4
    assert read(tmp_path / "new") == read(tmp_path / "live")


def test_captures_of_either_kind_are_restored_together(tmp_path: Path, store: Store) -> None:
    """One with a layer a domain and one with a layer for all; each layer that is needed is opened once."""
    build(tmp_path / "live")
    publishers: list[Publisher] = [publish_apart, publish_trees]
    for number, publisher in enumerate(publishers, start=1):
        manifest = draft(created=f"2026-01-0{number}T00:00:00Z", launch=f"launch-{number}")
        publisher(store, live(tmp_path / "live"), manifest)
        triton_kernel(tmp_path / "live/triton", "later")
        write(tmp_path / "live/inductor", {"zz/czz.main.so": elf("later")})
    found = look_up(store)
    assert [len(capture.manifest.layers) for capture in found.captures] == [len(TABLE), 1]
    recording = Recording(store)
    restored = restore_found(recording, found, targets(tmp_path / "new"))
    assert restored.reasons == ()
    assert len(layers_opened(recording)) == len(set(layers_opened(recording))) == len(TABLE) + 1
    for domain in TABLE:
        assert_moved(domain, tmp_path / "live" / domain.name, tmp_path / "new" / domain.name)


# Several captures of one key


def publish_as(store: Store, root: Path, day: int, *, complete: bool = True) -> None:
    manifest = draft(created=f"2026-01-{day:02}T00:00:00Z", launch=f"launch-{day}", complete=complete)
    publish_trees(store, [tree_of(TRITON, root)], manifest)


def test_captures_with_different_units_are_restored_as_their_union(tmp_path: Path, store: Store) -> None:
    keys = [triton_kernel(tmp_path / seed, seed) for seed in ("one", "two")]
    publish_as(store, tmp_path / "one", 1)
    publish_as(store, tmp_path / "two", 2)
    assert len(look_up(store).captures) == 2
    restored = restore_found(store, look_up(store), triton_at(tmp_path / "new"))
    assert {path.split("/")[0] for path in read(tmp_path / "new")} == set(keys)
    assert (restored.files, restored.reasons) == (16, ())


def test_of_one_unit_the_oldest_capture_wins_unless_a_later_one_has_more(tmp_path: Path, store: Store) -> None:
    for number, files in enumerate(
        [
            {"K/a": b"first", "L/a": b"first"},
            {"K/a": b"second", "K/b": b"second"},
            {"K/a": b"third", "K/c": b"third", "L/b": b"third"},
        ],
        start=1,
    ):
        units = [unit(name, {p: d for p, d in files.items() if p[0] == name}) for name in sorted({p[0] for p in files})]
        manifest = draft(created=f"2026-01-0{number}T00:00:00Z", launch=f"launch-{number}")
        crafted(store, TRITON, units, files, manifest)
    found = look_up(store)
    chosen = {
        name: {file.path for file in row.files} for name, (_layer, row) in choose(found.captures, "triton").items()
    }
    assert chosen == {"K": {"K/a", "K/b"}, "L": {"L/a"}}
    restored = restore_found(store, found, triton_at(tmp_path / "new"))
    assert restored.reasons == ()
    assert read(tmp_path / "new") == {"K/a": b"second", "K/b": b"second", "L/a": b"first"}


def test_an_incomplete_capture_is_never_exact_and_gives_way_to_a_complete_one(tmp_path: Path, store: Store) -> None:
    triton_kernel(tmp_path / "one", "one")
    publish_as(store, tmp_path / "one", 1, complete=False)
    found = look_up(store)
    assert (found.result, found.artifact, found.differs) == ("near", KEY, ())
    assert found.reasons == ("only incomplete captures: their launch ended before it was done",)
    assert restore_found(store, found, triton_at(tmp_path / "new")).files == 8
    triton_kernel(tmp_path / "two", "two")
    publish_as(store, tmp_path / "two", 2)
    found = look_up(store)
    assert found.result == "exact"
    assert [capture.manifest.launch for capture in found.captures] == ["launch-2"]


def test_a_manifest_with_a_layer_of_an_unknown_domain_still_serves_the_known_ones(tmp_path: Path, store: Store) -> None:
    triton(tmp_path / "live")
    publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    known = look_up(store).captures[0].manifest
    name = known.layers[0].digest
    row = Layer(name, 1, name, 1, (Section("future", (unit("x", {"x/y": b"1"}),)),))
    later = msgspec.structs.replace(known, layers=(row, *known.layers), launch="later")
    commit(store, later, {}, now=NOW_NS / 1e9)
    for entry in list(store.scan("artifacts/")):
        if of_bytes(encode_manifest(known))[7:] in entry.name:
            store.delete(entry.name)
    restored = restore_found(store, look_up(store), targets(tmp_path / "new"))
    assert restored.reasons == ()
    assert_moved(TRITON, tmp_path / "live", tmp_path / "new/triton")


def test_a_live_index_that_was_moved_by_hand_is_offered_as_it_is(tmp_path: Path, store: Store) -> None:
    """Relocated files differ in size from their stored form; they do not make a unit another one."""
    torch_compile(tmp_path / "live")
    publish_trees(store, [tree_of(TABLE[0], tmp_path / "live")])
    shutil.copytree(tmp_path / "live", tmp_path / "new")
    restored = restore_found(store, look_up(store), [Target(TABLE[0], str(tmp_path / "new"), ours=True)])
    assert (restored.files, restored.reasons) == (0, ())
    assert restored.present == len(restored.offered["torch_compile"]) > 20
