"""Transfer between two stores: what moves, in which order, what a failure leaves, and how many requests it costs."""

import io
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import pytest

from cachemgr import digest
from cachemgr.capture import encode_manifest
from cachemgr.errors import CorruptError, DeadlineError, StoreError
from cachemgr.key import Key, derive
from cachemgr.parallel import side_by_side
from cachemgr.store import Entry, Source, Store, layout
from cachemgr.store.captures import GRACE_SECONDS, captures
from cachemgr.store.local import LocalStore
from cachemgr.store.removal import plan_removal, remove
from cachemgr.store.transfer import Moved, Plan, Transfer
from tests.kills import killed_at_every_step
from tests.stores import Breaking, Corrupting, Faulty, MemoryStore, Recording, Unreadable, Wrapper, contents
from tests.test_crash import visible
from tests.trees import FACTORS, FEW, NOW_NS, build, changed, draft, publish_trees, triton_kernel, write

NOW = NOW_NS / 1e9
KEY = derive(FACTORS)
OTHER = changed("vllm.max_model_len", "4096")
OTHER_KEY = derive(OTHER)


def never() -> bool:
    return False


def transferred(
    source: Store, target: Store, keys: Sequence[Key] = (KEY, OTHER_KEY), *, hints: bool = True
) -> tuple[Plan, Moved]:
    transfer = Transfer(source, target, expired=never, hints=hints)
    plan = transfer.plan(keys, now=NOW)
    return plan, transfer.carry(plan)


@pytest.fixture
def source(tmp_path: Path) -> LocalStore:
    """Two artifacts; the first has two captures, and the second shares a layer with the first of them."""
    store = LocalStore(tmp_path / "source")
    trees = build(tmp_path / "live", FEW)
    publish_trees(store, trees)
    publish_trees(store, trees, draft(OTHER), near=captures(store, KEY, []))
    triton_kernel(tmp_path / "live" / "triton", "later")
    publish_trees(store, build(tmp_path / "live", ()), draft(launch="launch-2", created="2026-01-03T00:00:00Z"))
    assert len(captures(store, KEY, [])) == 2
    assert len(list(store.scan("layers/"))) == 2
    return store


@pytest.fixture
def target(tmp_path: Path) -> MemoryStore:
    return MemoryStore(tmp_path / "target-scratch")


def without_near(store: Store) -> dict[str, bytes]:
    """All objects but those that a store makes for itself."""
    own = ("layout.json", "CACHEDIR.TAG", layout.NEAR)
    return {name: data for name, data in contents(store).items() if not name.startswith(own)}


def test_the_target_has_afterwards_what_the_source_has(source: LocalStore, target: MemoryStore) -> None:
    plan, moved = transferred(source, target)
    assert without_near(target) == without_near(source)
    assert len(moved.captures) == 3
    assert (moved.objects, moved.bytes) == (plan.objects, plan.bytes)
    assert plan.objects == 2 + 3, "a shared layer counts once"
    assert plan.bytes == sum(e.size for p in ("layers/", "artifacts/") for e in source.scan(p))
    assert moved.failures == ()


def test_what_is_there_is_skipped_and_counted(source: LocalStore, target: MemoryStore) -> None:
    first, _moved = transferred(source, target, [KEY])
    plan, moved = transferred(source, target)
    assert (plan.objects, plan.whole) == (1, 2), "only the manifest: the other artifact has the same layer"
    assert (plan.skipped_objects, plan.skipped_bytes) == (first.objects, first.bytes)
    assert len(moved.captures) == 1
    again, nothing = transferred(source, target)
    assert (again.loads, again.whole, nothing.objects) == ((), 3, 0)


def test_layers_are_written_first_then_the_manifest_then_hints(source: LocalStore, target: MemoryStore) -> None:
    recording = Recording(target)
    transferred(source, recording, [OTHER_KEY])
    kinds = [name.split("/")[0] for _verb, name in recording.writes()]
    assert list(dict.fromkeys(kinds)) == ["layout.json", "CACHEDIR.TAG", "layers", "artifacts", "entries", "near"]
    assert kinds[-1] == "near"


@pytest.mark.parametrize("late", [False, True])
def test_a_write_that_fails_leaves_whole_captures_and_the_next_transfer_goes_on(
    source: LocalStore, tmp_path: Path, late: bool
) -> None:
    number, failed = 0, True
    while failed:
        target = MemoryStore(tmp_path / f"scratch-{number}")
        faulty = Faulty(target, fail_after=number, late=late)
        transfer = Transfer(source, faulty, expired=never, hints=True)
        plan = transfer.plan([KEY, OTHER_KEY], now=NOW)
        try:
            moved = transfer.carry(plan)
        except StoreError:
            assert number < 2, "only a store that cannot be begun raises"
            moved = Moved((), 0, 0, ())
        failed = faulty.failed
        assert failed == (len(moved.captures) < 3)
        assert set(moved.captures) <= set(visible(target))
        transferred(source, target)
        assert without_near(target) == without_near(source), "the next one goes on"
        number += 1
    assert number > 10


@pytest.mark.slow
def test_kill_9_at_every_step_leaves_whole_captures(source: LocalStore, tmp_path: Path) -> None:
    root = tmp_path / "target"
    for _step in killed_at_every_step(lambda: transferred(source, LocalStore(root), [KEY])):
        visible(LocalStore(root))
    assert len(visible(LocalStore(root))) == 2


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("at", [0.0, 0.5, 0.999])
def test_a_layer_with_other_bytes_becomes_no_object_and_others_arrive(
    source: LocalStore, target: MemoryStore, at: float, cut: bool
) -> None:
    own = captures(source, KEY, [])[1]
    (layer,) = own.manifest.layers
    lying = Corrupting(source, layout.layer_name(layer.digest), at=at, cut=cut)
    _plan, moved = transferred(lying, target)
    (failure,) = moved.failures
    assert (failure.key, failure.capture) == (KEY, own.digest)
    assert isinstance(failure.error, CorruptError)
    assert layer.digest in str(failure.error)
    assert not target.has(layout.layer_name(layer.digest))
    assert len(visible(target)) == 2


class Endless(Wrapper):
    """Layers that never end."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.given = 0

    def open(self, name: str) -> BinaryIO:
        return _EndlessStream(self)


class _EndlessStream(io.BytesIO):
    def __init__(self, owner: Endless) -> None:
        super().__init__()
        self._owner = owner

    def read(self, size: int | None = -1) -> bytes:
        self._owner.given += size or 0
        return bytes(size or 0)


def test_a_layer_that_never_ends_is_cut_off_at_its_size(source: LocalStore, target: MemoryStore) -> None:
    endless = Endless(source)
    _plan, moved = transferred(endless, target, [KEY])
    assert all("goes on after its" in str(failure.error) for failure in moved.failures)
    assert len(moved.failures) == 2
    assert endless.given < 10 << 20
    assert list(target.scan("layers/")) == []


def test_a_source_that_breaks_off_stops_the_transfer(source: LocalStore, target: MemoryStore) -> None:
    _plan, moved = transferred(Breaking(source, "layers/", after=0), target)
    assert moved.captures == ()
    assert moved.failures
    assert all("Input/output error" in str(failure.error) for failure in moved.failures)
    assert visible(target) == []


def test_a_damaged_manifest_stays_behind_and_is_said(source: LocalStore, target: MemoryStore) -> None:
    name = next(entry.name for entry in source.scan(layout.artifact_prefix(OTHER_KEY)))
    plan, moved = transferred(Corrupting(source, name), target)
    assert [damaged.name for damaged in plan.damaged] == [name]
    assert plan.damaged[0].kind == "damaged"
    assert len(moved.captures) == 2


def test_a_store_that_fails_is_not_an_empty_one(source: LocalStore, target: MemoryStore) -> None:
    with pytest.raises(StoreError):
        transferred(Unreadable(source, "artifacts/"), target)


def test_the_deadline_ends_it_in_the_middle_of_a_layer(source: LocalStore, target: MemoryStore) -> None:
    passed = threading.Event()
    transfer = Transfer(source, target, expired=passed.is_set, moved=lambda _count: passed.set(), hints=True)
    plan = transfer.plan([OTHER_KEY], now=NOW)
    moved = transfer.carry(plan)
    assert [type(failure.error) for failure in moved.failures] == [DeadlineError]
    assert visible(target) == []
    with pytest.raises(DeadlineError):
        Transfer(source, target, expired=passed.is_set).plan([KEY], now=NOW)


def test_a_layer_that_a_prune_might_take_is_refreshed_before_the_manifest(
    source: LocalStore, target: MemoryStore
) -> None:
    transferred(source, target, [KEY])
    for entry in list(target.scan("layers/")):
        target.set_modified(entry.name, NOW - GRACE_SECONDS)
    recording = Recording(target)
    plan, _moved = transferred(source, recording, [OTHER_KEY])
    (load,) = plan.loads
    (layer,) = captures(source, OTHER_KEY, [])[0].manifest.layers
    assert load.aged == (layout.layer_name(layer.digest),)
    assert [verb for verb, name in recording.writes() if name.startswith(("layers/", "artifacts/"))] == [
        "refresh",
        "put",
    ]


class Vanishing(Wrapper):
    """Loses its layers right after they were listed."""

    def scan(self, prefix: str) -> Iterator[Entry]:
        for entry in list(super().scan(prefix)):
            if prefix.startswith("layers/"):
                self.inner.delete(entry.name)
            yield entry


def test_a_layer_that_is_pruned_meanwhile_is_moved_after_all(source: LocalStore, target: MemoryStore) -> None:
    transferred(source, target, [KEY])
    remove(target, plan_removal(target, [KEY], now=NOW))
    for entry in list(target.scan("layers/")):
        target.set_modified(entry.name, NOW - GRACE_SECONDS)
    _plan, moved = transferred(source, Vanishing(target), [OTHER_KEY])
    assert len(moved.captures) == 1
    assert len(visible(target)) == 1


def test_a_missing_layer_of_a_manifest_that_is_there_is_moved(source: LocalStore, target: MemoryStore) -> None:
    transferred(source, target)
    lost = next(target.scan("layers/")).name
    target.delete(lost)
    plan, _moved = transferred(source, target)
    assert {piece.name for load in plan.loads for piece in load.pieces()} == {lost}
    assert without_near(target) == without_near(source)


@pytest.mark.parametrize("left", [b"", b"half"])
def test_what_a_client_that_died_left_under_a_name_is_made_whole(
    source: LocalStore, target: MemoryStore, left: bytes
) -> None:
    (layer,) = captures(source, OTHER_KEY, [])[0].manifest.layers
    target.put(layout.layer_name(layer.digest), left)
    _plan, moved = transferred(source, target)
    assert moved.failures == ()
    assert without_near(target) == without_near(source)


def test_a_manifest_that_lies_about_a_size_takes_no_good_layer_away(source: LocalStore, tmp_path: Path) -> None:
    transferred(source, target := LocalStore(tmp_path / "target"), [KEY])
    (capture,) = captures(source, OTHER_KEY, [])
    (layer,) = capture.manifest.layers
    lying = msgspec.structs.replace(capture.manifest, layers=(msgspec.structs.replace(layer, size=5),))
    capture = msgspec.structs.replace(capture, manifest=lying, digest=digest.of_bytes(encode_manifest(lying)))
    transfer = Transfer(source, target, expired=never)
    moved = transfer.carry(transfer.plan_found([capture], now=NOW))
    assert "has another size than its manifest says" in str(moved.failures[0].error)
    assert len(visible(target)) == 2


def test_an_empty_manifest_is_none(source: LocalStore, target: MemoryStore) -> None:
    (capture,) = captures(source, OTHER_KEY, [])
    target.put(layout.manifest_name(OTHER_KEY, capture.digest), b"")
    plan, _moved = transferred(source, target)
    assert plan.whole == 0


def test_what_lies_beside_a_manifest_travels_before_it_and_also_when_it_is_late(
    source: LocalStore, target: MemoryStore
) -> None:
    (capture,) = captures(source, OTHER_KEY, [])
    name = layout.manifest_name(OTHER_KEY, capture.digest).removesuffix(layout.MANIFEST_SUFFIX)
    source.put(f"{name}.one.sig", b"first")
    recording = Recording(target)
    transferred(source, recording, [OTHER_KEY])
    artifacts = [written for _verb, written in recording.writes() if written.startswith("artifacts/")]
    assert artifacts == [f"{name}.one.sig", f"{name}{layout.MANIFEST_SUFFIX}"]
    source.put(f"{name}.two.sig", b"second")
    plan, _moved = transferred(source, target, [OTHER_KEY])
    assert [piece.name for load in plan.loads for piece in load.pieces()] == [f"{name}.two.sig"]
    assert without_near(target)[f"{name}.two.sig"] == b"second"


def test_who_verified_a_capture_travels_and_what_is_of_this_machine_does_not(
    source: LocalStore, target: MemoryStore
) -> None:
    (capture,) = captures(source, OTHER_KEY, [])
    note = layout.verified_name(OTHER_KEY, capture.digest, "2026-11-30T00:00:00Z")
    own = (layout.mac_name(OTHER_KEY, capture.digest, "here"), layout.origin_name(OTHER_KEY, capture.digest))
    for name in (note, *own):
        source.put(name, b"{}")
    transferred(source, target, [OTHER_KEY])
    assert target.has(note)
    assert [name for name in own if target.has(name)] == []


def test_a_hint_that_was_not_written_is_written_by_the_next_transfer(source: LocalStore, target: MemoryStore) -> None:
    transferred(source, target, [OTHER_KEY])
    (hint,) = [entry.name for entry in target.scan(layout.NEAR)]
    target.delete(hint)
    plan, _moved = transferred(source, target, [OTHER_KEY])
    assert (plan.objects, plan.loads[0].hints[-1]) == (0, hint)
    assert target.has(hint)
    remove(target, plan_removal(target, [OTHER_KEY], now=NOW))
    assert list(target.scan(layout.NEAR)) == []


class Counting(Recording):
    """Counts what a bucket would be asked: one request for every answer of up to a thousand names."""

    def requests(self) -> Counter[str]:
        return Counter(verb for verb, _name in self.calls)


def test_requests_do_not_depend_on_the_number_of_files(source: LocalStore, tmp_path: Path) -> None:
    many = LocalStore(tmp_path / "many")
    triton = tmp_path / "live-many" / "triton"
    for number in range(300):
        triton_kernel(triton, f"kernel {number}")
    write(tmp_path / "live-many" / "modelinfos", {})
    publish_trees(many, build(tmp_path / "live-many", ()), draft(OTHER))
    counts = []
    for store in (source, many):
        up = Counting(MemoryStore(tmp_path / f"up-{store}".replace("/", "-")))
        transferred(store, up, [OTHER_KEY])
        down = Counting(up.inner)
        transferred(down, MemoryStore(tmp_path / "down"), [OTHER_KEY], hints=False)
        counts.append((up.requests(), down.requests()))
    (few_up, few_down), (many_up, many_down) = counts
    assert few_down == many_down == Counter(scan=1, read=1, open=1)
    entries = 2  # of the tree with compile directories
    assert few_up - Counter(put=entries) == many_up
    assert many_up == Counter(scan=3, read=2, put=4, put_stream=1)
    # Listings of the artifact, its layers' directory and its hints; the layout, twice because it is new, which is
    # written with a tag; the layer; the manifest and a hint.


class _Together(Wrapper):
    """Answers a listing once so many are asked for."""

    def __init__(self, inner: Store, count: int) -> None:
        super().__init__(inner)
        self._meeting = threading.Barrier(count, timeout=20)

    def scan(self, prefix: str) -> Iterator[Entry]:
        self._meeting.wait()
        return super().scan(prefix)


def test_what_a_plan_asks_of_the_target_is_asked_at_once(source: LocalStore, target: MemoryStore) -> None:
    """The artifact, the directory of its layer and the hints: together they take the time of one request."""
    transferred(source, target, [KEY])
    transfer = Transfer(source, _Together(target, 3), expired=never, hints=True)
    plan = transfer.plan([OTHER_KEY], now=NOW)
    assert (plan.objects, plan.skipped_objects) == (1, 1)


def test_many_artifacts_are_listed_at_once(source: LocalStore, target: MemoryStore, tmp_path: Path) -> None:
    trees = build(tmp_path / "live-more", ["modelinfos"])
    wanted: list[Key] = []
    for number in range(40):
        factors = changed("vllm.max_model_len", str(number))
        publish_trees(source, trees, draft(factors), near=captures(source, wanted[0], []) if wanted else ())
        wanted.append(derive(factors))
    up = Counting(target)
    transferred(source, up, wanted)
    assert up.requests()["scan"] <= 3
    assert len(visible(target)) == 40
    assert len(list(target.scan("layers/"))) == 1, "shared, and moved once"


def test_of_concurrent_transfers_to_one_target_all_see_it_whole(source: LocalStore, target: MemoryStore) -> None:
    threads = [threading.Thread(target=transferred, args=(source, target)) for _each in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert without_near(target) == without_near(source)


class _Interrupting(Wrapper):
    def put_stream(self, name: str, source: Source) -> bool:
        raise KeyboardInterrupt


def test_an_interrupt_is_an_interrupt(source: LocalStore, target: MemoryStore) -> None:
    with pytest.raises(KeyboardInterrupt):
        transferred(source, _Interrupting(target))
    assert visible(target) == []


def test_steps_side_by_side_keep_their_order_and_raise_the_first_failure() -> None:
    assert side_by_side(lambda number: number * 2, range(100), threads=7) == [number * 2 for number in range(100)]
    assert side_by_side(lambda number: number, [], threads=7) == []
    begun: list[int] = []

    def step(number: int) -> None:
        begun.append(number)
        raise IndexError(number)

    with pytest.raises(IndexError):
        side_by_side(step, range(1000), threads=4)
    assert len(begun) <= 4
