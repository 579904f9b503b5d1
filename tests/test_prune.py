"""Pruning a store: by last use from launch records, never what is pinned or in use; bytes counted are bytes freed."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from cachemgr import digest
from cachemgr.capture import encode_manifest
from cachemgr.clock import written
from cachemgr.errors import CorruptError, NotFoundError, StoreError, UsageError
from cachemgr.key import Key
from cachemgr.process import this_process
from cachemgr.prune import artifacts
from cachemgr.prune.artifacts import Wish, carry_out, require_records
from cachemgr.prune.limits import Limits
from cachemgr.prune.superseded import Looked
from cachemgr.store import Entry, Store, layout, pins
from cachemgr.store.captures import (
    Capture,
    Damaged,
    captures,
    enter,
    has_layers,
    keys,
    no_marks,
    put_manifest,
)
from cachemgr.store.claims import InStore, Owner
from cachemgr.store.leases import STALE_SECONDS, Holder, Lease, in_use
from cachemgr.store.local import LocalStore, scratch_of
from cachemgr.store.outlines import Outlines
from cachemgr.store.pins import Pin
from cachemgr.store.removal import plan_removal, remove
from tests import trees
from tests.conftest import NOW
from tests.pruning import DAY, add, factors_of, key_of, planned, pruned, settle, use, uses
from tests.stores import ListOnce, Recording, Unreadable, contents


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def live(tmp_path: Path) -> Path:
    return tmp_path / "live"


def stored(root: Path) -> int:
    """Bytes of artifacts, layers and hints."""
    there = (path for path in root.rglob("*") if path.is_file() and "launches" not in path.parts)
    return sum(path.stat().st_size for path in there)


def whole(store: Store) -> set[Key]:
    """The artifacts of a store, each of which must be readable with all its layers."""
    for key in keys(store):
        damaged: list[Damaged] = []
        found = captures(store, key, damaged)
        assert not damaged
        assert all(has_layers(store, capture) for capture in found)
    return set(keys(store))


def test_last_use_is_what_records_tell_and_never_a_modification_time(store: Store, root: Path, live: Path) -> None:
    old = add(store, live, "old", age=50, used=[1])
    young = add(store, live, "young", age=20, used=[15])
    never = add(store, live, "never", age=30)
    settle(root)
    for entry in store.scan(layout.artifact_prefix(never)):
        os.utime(root / entry.name, (NOW, NOW))
    plan = planned(store, Limits(unused_for=10 * DAY))
    assert [gone.key for gone in plan.artifacts] == [never, young]
    assert plan.artifacts[1].why == "not used for 15 days"
    assert plan.artifacts[1].last_used == written(NOW - 15 * DAY)
    before = stored(root)
    done = pruned(store, Limits(unused_for=10 * DAY))
    assert whole(store) == {old}
    assert before - stored(root) == plan.bytes == done.bytes, "bytes counted are bytes freed"
    assert len(list(store.scan("launches/"))) == 2, "records stay"


def test_planning_changes_nothing_and_lists_everything_once(store: Store, live: Path) -> None:
    for name in ("a", "b", "c"):
        add(store, live, name)
    recording = Recording(store)
    planned(recording, Limits(max_size=0))
    assert recording.writes() == []
    prefixes = [name for verb, name in recording.calls if verb == "scan"]
    assert len(prefixes) == len(set(prefixes)), "a listing costs a request for a thousand objects"
    planned(ListOnce(store), Limits(max_size=0))


def test_layers_that_others_need_stay_and_are_not_counted(store: Store, root: Path, live: Path) -> None:
    shared = add(store, live, "a", kernels=["same"], age=9)
    other = add(store, live, "b", kernels=["same"], age=8)
    settle(root)
    (layer,) = store.scan(layout.LAYERS)
    before = stored(root)
    done = pruned(store, Limits(older_than=8.5 * DAY))
    assert [gone.key for gone in done.artifacts] == [shared]
    assert done.bytes == before - stored(root) < layer.size
    assert whole(store) == {other}
    done = pruned(store, Limits(max_size=0))
    assert done.removal.layers == (layer.name,)
    assert not list(store.scan(layout.ARTIFACTS)) + list(store.scan(layout.LAYERS))


def test_young_layers_wait_and_the_next_prune_takes_them(store: Store, root: Path, live: Path) -> None:
    add(store, live, "a")
    for path in (root / "layers").rglob("*.zst"):
        os.utime(path, (NOW - 60, NOW - 60))
    done = pruned(store, Limits(max_size=0))
    (layer,) = store.scan(layout.LAYERS)
    assert (done.later, done.removal.layers) == (layer.size, ())
    settle(root)
    assert pruned(store).removal.layers == (layer.name,)


def test_a_layer_that_is_refreshed_after_the_plan_stays(store: Store, root: Path, live: Path) -> None:
    add(store, live, "a")
    settle(root)
    plan = planned(store, Limits(max_size=0))
    (layer,) = store.scan(layout.LAYERS)
    os.utime(root / layer.name, (NOW, NOW))
    carry_out(store, plan, outlines=Outlines(), now=NOW)
    assert [entry.name for entry in store.scan(layout.LAYERS)] == [layer.name]


def test_a_layer_that_is_needed_after_the_plan_stays(store: Store, root: Path, live: Path) -> None:
    add(store, live, "a", kernels=["same"])
    settle(root)
    plan = planned(store, Limits(max_size=0))
    later = add(store, live, "b", kernels=["same"])
    settle(root)
    carry_out(store, plan, outlines=Outlines(), now=NOW)
    assert whole(store) == {later}


@pytest.mark.parametrize(
    ("pin", "kept"),
    [
        (Pin("me", "2026-01-01T00:00:00Z", "a release"), True),
        (Pin("me", "2026-01-01T00:00:00Z", until=written(NOW + DAY)), True),
        (Pin("me", "2026-01-01T00:00:00Z", until=written(NOW - DAY)), False),
        (Pin("me", "2026-01-01T00:00:00Z", keep_last=2), True),
        (Pin("me", "2026-01-01T00:00:00Z", keep_last=1), False),
        (Pin("me", "2026-01-01T00:00:00Z", until=written(NOW - DAY), keep_last=2), True),
        (Pin("me", "2026-01-01T00:00:00Z", until=written(NOW + DAY), keep_last=1), True),
        (Pin("me", "2026-01-01T00:00:00Z", until="some day"), True),
    ],
)
def test_a_pin_keeps_its_artifact_for_as_long_as_it_says(store: Store, live: Path, pin: Pin, kept: bool) -> None:
    key = add(store, live, "a", age=30)
    add(store, live, "b", age=20)
    pins.put(store, key, pin)
    done = pruned(store, Limits(max_size=0))
    assert (key in whole(store)) is kept
    assert [each.kept for each in done.kept] == ([str(pin)] if kept else [])
    assert (key in pins.pins(store)) is kept, "a pin that has ended goes with what it kept"
    assert bool(done.notes) is kept, "a limit that pins make unreachable is said"


def test_a_pin_that_cannot_be_read_holds(store: Store, live: Path) -> None:
    key = add(store, live, "a")
    store.put(layout.pin_name(key, "2026-01-01T00:00:00Z"), b"{torn")
    assert pruned(store, Limits(max_size=0)).kept[0].kept == "pinned by somebody: the pin cannot be read"
    assert whole(store) == {key}


def test_a_newer_pin_that_is_torn_gives_way_to_the_one_before(store: Store, live: Path) -> None:
    key, pin = add(store, live, "a"), Pin("me", "2026-01-01T00:00:00Z", "a release")
    pins.put(store, key, pin)
    store.put(layout.pin_name(key, "2026-01-02T00:00:00Z"), b"{torn")
    assert pins.pin_of(store, key) == pin
    assert pruned(store, Limits(max_size=0)).kept[0].kept == str(pin)
    later = Pin("me", "2026-01-01T00:00:00Z", "another")
    pins.put(store, key, later)
    assert pins.pins(store) == {key: later}, "the clock of whoever pins may be behind"
    assert len(list(store.scan(layout.PINS))) == 1


def test_pins_that_others_took_the_place_of_are_swept_and_those_that_hold_stay(store: Store, live: Path) -> None:
    kept, ended = add(store, live, "a"), add(store, live, "b")
    old = Pin("me", "2026-01-01T00:00:00Z", "older")
    for key, newer in ((kept, old), (ended, Pin("me", "2026-01-01T00:00:00Z", until="2026-01-03T00:00:00Z"))):
        store.put(layout.pin_name(key, "2026-01-01T00:00:00Z"), msgspec.json.encode(old))
        store.put(layout.pin_name(key, "2026-01-02T00:00:00Z"), msgspec.json.encode(newer))
    plan = planned(store)
    assert {scrap.why.partition(":")[0] for scrap in plan.scraps} == {"a newer pin has taken its place", "has ended"}
    done = carry_out(store, plan, outlines=Outlines(), now=NOW)
    assert done.scraps == plan.scraps
    assert [entry.name for entry in store.scan(layout.PINS)] == [layout.pin_name(kept, "2026-01-02T00:00:00Z")]


def test_a_pin_that_is_replaced_while_pins_are_read_is_seen(root: Path, live: Path) -> None:
    class Replaced(LocalStore):
        """Whose pin is replaced between the first listing and the reads after it."""

        left = 1

        def scan(self, prefix: str) -> Iterator[Entry]:
            found = list(super().scan(prefix))
            if prefix == layout.PINS and self.left:
                self.left -= 1
                pins.put(LocalStore(root), key, second)
            return iter(found)

    store, first, second = (
        Replaced(root),
        Pin("me", "2026-01-01T00:00:00Z", "one"),
        Pin("me", "2026-01-01T00:00:00Z", "two"),
    )
    key = add(store, live, "a")
    pins.put(LocalStore(root), key, first)
    assert pins.pins(store) == {key: second}


def test_a_pin_takes_the_place_of_the_one_before(store: Store) -> None:
    key, first, second = key_of("a"), Pin("me", "2026-01-01T00:00:00Z", "one"), Pin("me", "2026-01-01T00:00:00Z", "two")
    pins.put(store, key, first)
    pins.put(store, key, second)
    pins.put(store, key, second)
    assert pins.pins(store) == {key: second}
    assert pins.lift(store, key)
    assert not pins.lift(store, key)


def test_an_artifact_that_is_pinned_or_taken_into_use_after_the_plan_stays(
    store: Store, root: Path, live: Path
) -> None:
    pinned, used, free = (add(store, live, name) for name in "abc")
    settle(root)
    plan = planned(store, Limits(max_size=0))
    pins.put(store, pinned, Pin("me", "2026-01-01T00:00:00Z"))
    Lease.take(store, {used}, "launch-9", "host")
    before = stored(root)
    done = carry_out(store, plan, outlines=Outlines(), now=NOW)
    assert [gone.key for gone in done.artifacts] == [free]
    assert {kept.name for kept in done.kept} == {pinned, used}
    assert whole(store) == {pinned, used}
    assert before - stored(root) == done.bytes


class _TakenAtTheLast(LocalStore):
    """Whose artifacts somebody takes when the last look has been taken, right before their first manifest goes."""

    def __init__(self, root: Path, take: Callable[[], object]) -> None:
        super().__init__(root)
        self._take: Callable[[], object] | None = take

    def delete(self, name: str) -> bool:
        take = self._take
        if take is not None and name.endswith(layout.MANIFEST_SUFFIX):
            self._take = None
            take()
        return super().delete(name)


@pytest.mark.parametrize("how", ["lease", "pin"])
def test_what_is_taken_after_the_last_look_is_put_back(store: Store, root: Path, live: Path, how: str) -> None:
    wanted, free = add(store, live, "a", kernels=["one", "same"]), add(store, live, "b", kernels=["two", "same"])
    add(store, live, "a", kernels=["one", "same", "three"])
    for key, entry in ((wanted, "5e" * 32), (free, "5f" * 32)):
        (first, *_others) = captures(store, key, [])
        store.put(layout.origin_name(key, first.digest), b"{}")
        manifest = msgspec.structs.replace(first.manifest, entries=(entry,), launch="with an entry")
        enter(store, manifest, no_marks)
    settle(root)

    def taking() -> None:
        if how == "lease":
            Lease.take(store, {wanted}, "launch-9", "host")
        else:
            pins.keep(store, wanted, Pin("me", "2026-01-01T00:00:00Z"))

    before = contents(store)
    plan = planned(store, Limits(max_size=0), compact=False)
    assert {gone.key for gone in plan.artifacts} == {wanted, free}
    done = carry_out(_TakenAtTheLast(root, taking), plan, outlines=Outlines(), now=NOW)
    assert [gone.key for gone in done.artifacts] == [free]
    assert [(kept.name, kept.kept) for kept in done.kept] == [(wanted, "pinned or taken into use while it went")]
    assert whole(store) == {wanted}
    after = contents(store)
    own = (layout.artifact_prefix(wanted), layout.entry_name("5e" * 32, wanted))
    assert {name for name in before if name.startswith(own)} == {name for name in after if name.startswith(own)}
    gone = {name: len(data) for name, data in before.items() if name not in after}
    assert (done.bytes, done.files) == (sum(gone.values()), len(gone))


def test_who_pins_what_is_being_removed_is_told(store: Store, live: Path) -> None:
    key = add(store, live, "a")
    remove(store, plan_removal(store, [key], now=NOW))
    with pytest.raises(NotFoundError, match="somebody removed it"):
        pins.keep(store, key, Pin("me", "2026-01-01T00:00:00Z"))
    assert pins.pins(store) == {}


def test_a_removal_leaves_what_is_pinned_while_it_goes(store: Store, root: Path, live: Path) -> None:
    key = add(store, live, "a")
    settle(root)
    before = contents(store)
    late = _TakenAtTheLast(root, lambda: pins.put(store, key, Pin("me", "2026-01-01T00:00:00Z")))
    back = remove(late, plan_removal(store, [key], now=NOW), taken=lambda: pins.held(store, {key}, now=NOW))
    assert {layout.key_of(name) for name in back} == {key}
    assert {name: data for name, data in contents(store).items() if not name.startswith(layout.PINS)} == before


def test_a_lease_of_a_living_process_keeps_its_artifact_and_one_of_the_dead_is_a_scrap(
    store: Store, root: Path, live: Path
) -> None:
    key = add(store, live, "a")
    lease = Lease.take(store, {key}, "launch-9", "host")
    settle(root, days=30)
    assert "launch launch-9 on host" in pruned(store, Limits(max_size=0)).kept[0].kept
    lease.end()
    dead = msgspec.structs.replace(this_process(), started="1")
    name = layout.lease_name(key, "launch-8")
    store.put(name, msgspec.json.encode(Holder("launch-8", "host", dead)))
    done = pruned(store, Limits(max_size=0))
    assert [scrap.name for scrap in done.scraps] == [name]
    assert whole(store) == set()


@pytest.mark.parametrize(("age", "lives"), [(STALE_SECONDS - 60, True), (STALE_SECONDS + 60, False)])
def test_a_lease_of_another_container_counts_while_it_beats(store: Store, root: Path, age: float, lives: bool) -> None:
    """The process has a number that is alive here, in a namespace that is not ours (ROCm/aiter#5266)."""
    for elsewhere in ({"namespace": "pid:[1]"}, {"boot": "another"}):
        key = key_of(str(elsewhere))
        name = layout.lease_name(key, "launch-9")
        holder = Holder("launch-9", "node1", msgspec.structs.replace(this_process(), **elsewhere))
        store.put(name, msgspec.json.encode(holder))
        os.utime(root / name, (NOW - age, NOW - age))
        assert (key in in_use(store, now=NOW)) is lives


def test_what_killed_processes_left_goes_when_it_is_old(store: Store, root: Path, live: Path) -> None:
    key, gone = add(store, live, "a"), key_of("gone")
    left = [
        layout.entry_name("5e" * 32, gone),
        layout.near_name(gone, captures(store, key, [])[0].digest, "ab" * 16, "model"),
        f"{layout.artifact_prefix(key)}{'ab' * 32}.{'cd' * 16}.20260101T000000Z.sig",
        layout.claim_name(gone, 1),
    ]
    for name in left[:3]:
        store.put(name, b"")
    dead = msgspec.structs.replace(this_process(), started="1")
    assert InStore(store, gone).take(Owner("l", "h", dead), after=0) == 1
    unfinished = scratch_of(root) / "0123"
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_bytes(b"half")
    settle(root, days=0)
    assert planned(store).scraps == (), "somebody may be at it"
    settle(root)
    before = contents(store)
    done = pruned(store)
    assert {scrap.name for scrap in done.scraps} == {*left, str(unfinished.relative_to(root))}
    assert done.files == 5
    assert contents(store).keys() == before.keys() - set(left)
    assert not unfinished.exists()
    assert pruned(store).empty


def test_what_living_processes_left_stays_however_old(store: Store, root: Path) -> None:
    number = InStore(store, key_of("a")).take(Owner("l", "h", this_process()), after=0)
    settle(root, days=100)
    assert planned(store).scraps == ()
    assert number == 1


def test_foreign_objects_and_records_are_left_alone(store: Store, root: Path, live: Path) -> None:
    key = add(store, live, "a", used=[3])
    foreign = ["notes.txt", "artifacts/not-a-key/x.json.zst", "layers/sha256/ab/readme", f"claims/{key}/first.json"]
    for name in foreign:
        store.put(name.replace(":", "-"), b"mine")
    settle(root, days=90)
    done = pruned(store, Limits(max_size=0))
    assert whole(store) == set()
    there = contents(store)
    assert {name.replace(":", "-") for name in foreign} <= there.keys()
    assert done.scraps == ()
    assert any(name.startswith("launches/") for name in there)


def test_captures_that_others_cover_go_and_no_other(store: Store, root: Path, live: Path) -> None:
    """Two that published at once, before either saw the other: the older one is what readers take."""
    factors = factors_of("a")
    kept = add(store, live, "a", kernels=["one", "two"])
    for at, (kernels, complete) in enumerate([(("one",), True), (("one", "two"), False), (("three",), True)]):
        apart = LocalStore(root.parent / f"apart-{at}")
        room = live / f"apart-{at}"
        for seed in kernels:
            trees.triton_kernel(room / "triton", seed)
        draft = trees.draft(factors, created=written(NOW - at * DAY), launch=f"at-{at}", complete=complete)
        trees.publish_trees(apart, trees.live(room), msgspec.structs.replace(draft, needs=draft.needs))
        for entry in (*apart.scan(layout.LAYERS), *apart.scan(layout.ARTIFACTS)):
            store.put(entry.name, apart.read(entry.name, limit=1 << 20))
    settle(root)
    launches = {capture.manifest.launch for capture in captures(store, kept, [])}
    assert launches == {"made-a", "at-0", "at-1", "at-2"}
    done = pruned(store)
    assert len(done.captures) == 2
    assert {capture.manifest.launch for capture in captures(store, kept, [])} == {"made-a", "at-2"}
    restored = trees.restore_found(store, trees.look_up(store, factors), trees.targets(live / "after"))
    assert not restored.reasons
    assert restored.files == 3 * 8


def test_a_capture_that_somebody_answers_for_is_not_given_up_for_one_that_nobody_does(store: Store, live: Path) -> None:
    key = add(store, live, "a", kernels=["one"])
    room = live / "both"
    for seed in ("one", "two"):
        trees.triton_kernel(room / "triton", seed)
    trees.publish_trees(store, trees.live(room), trees.draft(factors_of("a"), created=written(NOW), launch="later"))
    first, second = captures(store, key, [])
    assert len(planned(store).captures) == 0, "the later one has only what is new"
    store.put(layout.signature_name(key, first.digest, "ab" * 16, "2027-01-01T00:00:00Z"), b"{}")
    assert planned(store).captures == ()
    assert second.manifest.launch == "later"


def test_a_damaged_capture_goes_and_blocks_nobody(store: Store, root: Path, live: Path) -> None:
    key, other = add(store, live, "a"), add(store, live, "b", age=90)
    name = layout.manifest_name(key, captures(store, key, [])[0].digest)
    (root / name).write_bytes(b"torn")
    settle(root)
    done = pruned(store, Limits(older_than=60 * DAY))
    assert [each.name for each in done.captures] == [name]
    assert [gone.key for gone in done.artifacts] == [other]
    assert not list(store.scan(layout.LAYERS)) + list(store.scan(layout.ARTIFACTS))


@pytest.mark.parametrize("kind", ["of a newer layout", "unreadable"])
def test_where_a_capture_cannot_be_understood_nothing_goes(store: Store, root: Path, live: Path, kind: str) -> None:
    import zstandard

    key = add(store, live, "a")
    add(store, live, "b", age=90)
    settle(root)
    seen: Store = store
    if kind == "unreadable":
        seen = Unreadable(store, layout.artifact_prefix(key))
    else:
        data = b'{"layout":2}'
        newer = layout.manifest_name(key, digest.of_bytes(data))
        store.put(newer, zstandard.compress(data))
    before = contents(store)
    said = "the test said so" if kind == "unreadable" else "layers that it needs are unknown"
    with pytest.raises(StoreError, match=said) as caught:
        pruned(seen, Limits(older_than=60 * DAY))
    assert not isinstance(caught.value, CorruptError)
    assert contents(store) == before


def test_old_versions_are_those_that_are_not_installed_here(store: Store, live: Path) -> None:
    add(store, live, "a", version="0.31.0")
    add(store, live, "b", torch="2.12.0")
    kept = add(store, live, "c")
    installed = frozenset({("vllm", "0.32.0", "2.13.0"), ("torch", "2.13.0", "2.13.0")})
    done = pruned(store, installed=installed)
    assert [gone.why for gone in done.artifacts] == [
        "vllm 0.31.0 with torch 2.13.0 is not installed here any more",
        "vllm 0.32.0 with torch 2.12.0 is not installed here any more",
    ]
    assert whole(store) == {kept}


def test_in_a_mirror_versions_are_old_that_nobody_launched(store: Store, live: Path) -> None:
    forgotten = add(store, live, "a", version="0.31.0", age=200, used=[120])
    launched = add(store, live, "b", version="0.30.0", age=200)
    use(store, key_of("another"), "elsewhere", days=3, version="0.30.0")
    made = add(store, live, "c", version="0.33.0", age=20)
    done = pruned(store, forgotten=90 * DAY)
    assert [(gone.key, gone.why) for gone in done.artifacts] == [
        (forgotten, f"vllm 0.31.0 was last launched on {written(NOW - 120 * DAY)[:10]}")
    ]
    assert whole(store) == {launched, made}


@pytest.mark.parametrize(
    ("days", "said"),
    [
        ([], "are missing"),
        ([5, 3, 1], "begin on"),
        ([40, 39, 38, 1], "no launch records in .* for the 29 days after"),
        ([40, 20], "for the 20 days after"),
        ([400, 25, 15, 1], None),
        ([31, 15, 14], None),
        ([400, 300], "for the 30 days after"),
    ],
)
def test_records_that_do_not_cover_the_time_are_no_ground_to_remove(
    store: Store, days: list[int], said: str | None
) -> None:
    for day in days:
        use(store, key_of("a"), f"launch-{day}", days=day)
    if said is None:
        require_records(store, 30 * DAY, now=NOW)
    else:
        with pytest.raises(UsageError, match=said):
            require_records(store, 30 * DAY, now=NOW)


def test_outlines_are_remembered_and_only_new_manifests_are_read(store: Store, live: Path, tmp_path: Path) -> None:
    from cachemgr.store.removal import holdings

    for name in "ab":
        add(store, live, name)
    file = tmp_path / "outlines.msgpack"
    first = holdings(store, Outlines(file))
    add(store, live, "c")
    recording = Recording(store)
    second = holdings(recording, Outlines(file))
    assert len(recording.opened()) == 1
    assert first.outlines.items() <= second.outlines.items()
    assert second.outlines == holdings(store, Outlines()).outlines
    file.write_bytes(b"torn")
    assert holdings(store, Outlines(file)).outlines == second.outlines


def test_what_is_not_gone_yet_is_not_made_up_for_by_more(store: Store, root: Path, live: Path, tmp_path: Path) -> None:
    """Young layers of what went stay for a day, and the disk stays as full: the next prune must not take the rest."""
    from cachemgr.prune.automatic import Stored, make_room
    from cachemgr.store.captures import unasked

    made = [add(store, live, name, age=age) for name, age in (("a", 3), ("b", 2), ("c", 1))]
    for path in (root / "layers").rglob("*.zst"):
        os.utime(path, (NOW - 60, NOW - 60))
    stored = Stored(store, Outlines(), unasked, tmp_path / "locks" / "prune.lock", Looked(tmp_path / "looked"))
    for _again in range(3):
        assert make_room(stored, [str(tmp_path / "vllm")], [], 1000, prune="p", now=float(NOW)) is not None
        assert whole(store) == set(made[1:])
    free = 10**9
    for _again in range(2):
        pruned(store, Limits(min_free=free + 1000))
        assert whole(store) == set(made[1:])


def test_what_is_told_to_be_freed_leaves_out_what_was_spared(store: Store, root: Path, live: Path) -> None:
    kept, free = add(store, live, "a"), add(store, live, "b")
    for path in (root / "layers").rglob("*.zst"):
        os.utime(path, (NOW - 60, NOW - 60))
    plan = planned(store, Limits(max_size=0))
    pins.put(store, kept, Pin("me", "2026-01-01T00:00:00Z"))
    before = stored(root)
    done = carry_out(store, plan, outlines=Outlines(), now=NOW)
    assert [gone.key for gone in done.artifacts] == [free]
    assert done.bytes == before - stored(root) > 0
    assert len(done.removal.manifests) == 1
    assert 0 < done.later < plan.later


def test_a_pin_that_is_renewed_after_the_plan_holds(store: Store, live: Path) -> None:
    key = add(store, live, "a")
    pins.put(store, key, Pin("me", "2026-01-01T00:00:00Z", until=written(NOW - DAY)))
    plan = planned(store, Limits(max_size=0))
    assert [gone.key for gone in plan.artifacts] == [key]
    renewed = Pin("me", "2026-01-01T00:00:00Z", until=written(NOW + DAY))
    pins.put(store, key, renewed)
    done = carry_out(store, plan, outlines=Outlines(), now=NOW)
    assert (done.artifacts, done.scraps) == ((), ())
    assert whole(store) == {key}
    assert pins.pin_of(store, key) == renewed


def test_a_lease_that_beats_again_after_the_plan_holds(store: Store, root: Path, live: Path) -> None:
    key = add(store, live, "a")
    name = layout.lease_name(key, "launch-9")
    elsewhere = msgspec.structs.replace(this_process(), boot="another")
    store.put(name, msgspec.json.encode(Holder("launch-9", "node1", elsewhere)))
    os.utime(root / name, (NOW - DAY, NOW - DAY))
    plan = planned(store, Limits(max_size=0))
    assert [scrap.name for scrap in plan.scraps] == [name]
    os.utime(root / name, (NOW, NOW))
    carry_out(store, plan, outlines=Outlines(), now=NOW)
    assert whole(store) == {key}
    assert store.has(name)


def test_a_lease_that_was_taken_for_dead_is_taken_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from cachemgr.store import leases

    lease = Lease.take(store, {key_of("a")}, "launch-9", "host")
    store.delete(layout.lease_name(key_of("a"), "launch-9"))
    lease.beat()
    assert in_use(store, now=NOW) == {}
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.0)
    lease.beat()
    assert in_use(store, now=NOW).keys() == {key_of("a")}


def test_what_is_published_after_the_plan_is_found_by_its_hints(store: Store, root: Path, live: Path) -> None:
    """The plan knows the captures of its day; another one of the same artifact has the same hints."""
    key = add(store, live, "a")
    entry = "5e" * 32
    name, hint = layout.manifest_name(key, captures(store, key, [])[0].digest), layout.entry_name(entry, key)
    store.put(hint, b"")
    settle(root)
    plan = planned(store, Limits(max_size=0))
    plan = msgspec.structs.replace(plan, removal=msgspec.structs.replace(plan.removal, hints=(hint,)))
    manifest = msgspec.structs.replace(captures(store, key, [])[0].manifest, launch="later", entries=(entry,))
    assert put_manifest(store, Capture(digest.of_bytes(encode_manifest(manifest)), manifest, 0))
    carry_out(store, plan, outlines=Outlines(), now=NOW)
    assert not store.has(name)
    assert [capture.manifest.launch for capture in captures(store, key, [])] == ["later"]
    assert whole(store) == {key}
    assert store.has(hint)


class _Republishes(Recording):
    """A store into which somebody puts a manifest again, as soon as it is removed: what lies beside it, he finds."""

    def delete(self, name: str) -> bool:
        again = b"" if not name.endswith(layout.MANIFEST_SUFFIX) else self.read(name, limit=1 << 20)
        gone = super().delete(name)
        if again and not self.again:
            self.again = True
            self.put(name, again)
        return gone

    again = False


def test_a_capture_never_forgets_where_it_was_taken_from(store: Store, root: Path, live: Path) -> None:
    key = add(store, live, "a")
    found = captures(store, key, [])[0].digest
    store.put(layout.origin_name(key, found), b"{}")
    pruned(_Republishes(store), Limits(max_size=0))
    assert keys(store) == [], "its origin went with the removal"
    mark = layout.origin_name(key, found)
    store.put(mark, b"{}")
    settle(root)
    plan = planned(store)
    assert [scrap.name for scrap in plan.scraps] == [mark]
    add(store, live, "a")
    carry_out(store, plan, outlines=Outlines(), now=NOW)
    assert keys(store) == [key]
    assert store.has(mark)


def test_a_capture_stays_when_what_covered_it_went_or_a_launch_uses_it(store: Store, root: Path, live: Path) -> None:
    key = add(store, live, "a", kernels=["one"])
    apart = LocalStore(root.parent / "apart")
    for seed in ("one", "two"):
        trees.triton_kernel(live / "both" / "triton", seed)
    draft = trees.draft(factors_of("a"), created=written(NOW), launch="both")
    trees.publish_trees(apart, trees.live(live / "both"), msgspec.structs.replace(draft, model="llama"))
    for entry in (*apart.scan(layout.LAYERS), *apart.scan(layout.ARTIFACTS)):
        store.put(entry.name, apart.read(entry.name, limit=1 << 20))
    settle(root)
    small, both = captures(store, key, [])
    plan = planned(store)
    name = layout.manifest_name(key, small.digest)
    assert [each.name for each in plan.captures] == [name]
    lease = Lease.take(store, {key}, "launch-9", "host")
    assert carry_out(store, plan, outlines=Outlines(), now=NOW).captures == ()
    lease.end()
    store.put(layout.quarantine_name(both.digest, "host"), b"{}")
    done = carry_out(store, plan, outlines=Outlines(), now=NOW)
    assert (done.captures, done.files, done.bytes) == ((), 0, 0)
    assert store.has(name)
    store.delete(layout.quarantine_name(both.digest, "host"))
    assert [each.name for each in carry_out(store, plan, outlines=Outlines(), now=NOW).captures] == [name]
    assert whole(store) == {key}


def test_who_looks_again_reads_only_what_changed(store: Store, root: Path, live: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        for kernels in (["one"], ["one", "two"]):
            add(store, live, name, kernels=kernels)
    settle(root)
    asked, outlines = Recording(store), Outlines(tmp_path / "outlines")

    def read() -> set[Key | None]:
        asked.calls.clear()
        looked = Looked(tmp_path / "looked")
        artifacts.plan(asked, Wish(Limits()), outlines=outlines, uses=uses(store), looked=looked, now=NOW)
        return {layout.key_of(name) for name in asked.opened()}

    assert read() == {key_of("a"), key_of("b")}
    assert read() == set()
    add(store, live, "b", kernels=["one", "two", "three"])
    assert read() == {key_of("b")}
    (tmp_path / "looked").write_bytes(b"torn")
    assert read() == {key_of("a"), key_of("b")}
    again = msgspec.structs.replace(captures(store, key_of("a"), [])[0].manifest, launch="another")
    put_manifest(store, Capture(digest.of_bytes(encode_manifest(again)), again, 0))
    for _round in range(2):
        assert read() == {key_of("a")}, "what is superseded is looked at until it is gone"


def test_a_manifest_that_reads_well_at_a_second_look_stays(store: Store, root: Path, live: Path) -> None:
    """A file server that answered with other bytes once, or a repair meanwhile."""
    key = add(store, live, "a")
    path = root / layout.manifest_name(key, captures(store, key, [])[0].digest)
    data = path.read_bytes()
    path.write_bytes(b"torn")
    settle(root)
    plan = planned(store)
    assert len(plan.captures) == 1
    path.write_bytes(data)
    assert carry_out(store, plan, outlines=Outlines(), now=NOW).captures == ()
    assert whole(store) == {key}


def test_a_version_that_nobody_knows_is_not_old(store: Store, live: Path) -> None:
    add(store, live, "a", version=None)
    gone = add(store, live, "b", version="0.1.0")
    held = planned(store, installed=frozenset({("vllm", "0.32.0", "2.13.0")}))
    assert [gone.key for gone in held.artifacts] == [gone]
