"""Reading through: a look-up in a mirror of any size costs few requests, and what it finds arrives checked."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cachemgr.errors import CacheError, CorruptError, DeadlineError, MirrorError, NotFoundError, StoreError
from cachemgr.key import Key, Relations, derive, guard_print
from cachemgr.level import Level
from cachemgr.lookup import Found, find
from cachemgr.pull import Pulled, came_from, pull
from cachemgr.store import Entry, Source, Store, layout
from cachemgr.store.captures import captures, unasked
from cachemgr.store.local import LocalStore
from cachemgr.store.transfer import Transfer
from cachemgr.trust import Origin
from cachemgr.warm import restore, sources
from tests.stores import Corrupting, MemoryStore, Recording, Unreadable, Wrapper
from tests.test_crash import visible
from tests.test_transfer import KEY, NOW, OTHER, OTHER_KEY, never
from tests.trees import FACTORS, FEW, NOW_NS, assert_moved, build, changed, draft, publish_trees, targets

SINCE = "2027-01-15T08:00:00Z"


def pushed(source: Store, mirror: Store, *keys: str) -> None:
    transfer = Transfer(source, mirror, expired=never, hints=True)
    transfer.carry(transfer.plan(keys or (KEY, OTHER_KEY), now=NOW))  # type: ignore[arg-type]


@pytest.fixture
def mirror(tmp_path: Path) -> MemoryStore:
    """A mirror with one artifact."""
    made = MemoryStore(tmp_path / "mirror-scratch")
    source = LocalStore(tmp_path / "source")
    publish_trees(source, build(tmp_path / "live", FEW))
    pushed(source, made, KEY)
    return made


def looked_up(mirror: Store, factors=FACTORS, *, heads: Path | None = None, model: str = "llama") -> Found:  # type: ignore[no-untyped-def]
    level = Level("mirror", mirror, "off", heads)
    return find([level], derive(factors), factors, Relations(), model=model)


def pulled(mirror: Store, local: Store, *, left: int | None = None, key: str = KEY) -> Pulled:
    found = captures(mirror, key, [], judge=unasked)  # type: ignore[arg-type]
    return pull(mirror, local, found, since=SINCE, now=NOW, left=left, expired=never)


def test_an_exact_artifact_costs_one_listing_its_manifests_and_its_layers(mirror: MemoryStore, tmp_path: Path) -> None:
    recording, local = Recording(mirror), LocalStore(tmp_path / "local")
    found = looked_up(recording)
    assert (found.result, found.where) == ("exact", "mirror")
    done = pull(recording, local, found.captures, since=SINCE, now=NOW, left=None, expired=never)
    assert [verb for verb, _name in recording.calls] == ["scan", "read", "open"]
    assert done.store is local
    assert visible(local) == visible(mirror)


def test_what_arrived_is_restored_and_says_where_it_is_from(mirror: MemoryStore, tmp_path: Path) -> None:
    local = LocalStore(tmp_path / "local")
    done = pulled(mirror, local)
    restored = restore(
        done.store, done.captures, targets(tmp_path / "new"), trees=True, launch="l", now_ns=NOW_NS, expired=never
    )
    assert done.added_to(restored).reasons == ()
    for target in targets(tmp_path / "new"):
        if target.domain.name in FEW:
            assert_moved(target.domain, tmp_path / "live" / target.domain.name, target.directory)
    (capture,) = captures(local, KEY, [])
    note = local.read(layout.origin_name(KEY, capture.digest), limit=1 << 10)
    assert msgspec.json.decode(note, type=Origin) == Origin("mirror", str(mirror), SINCE)


def test_the_origin_is_there_before_the_manifest(mirror: MemoryStore, tmp_path: Path) -> None:
    recording = Recording(MemoryStore(tmp_path / "local"))
    pulled(mirror, recording)
    own = [name.split(".", 1)[1] for _verb, name in recording.writes() if name.startswith("artifacts/")]
    assert own == ["origin.json", "json.zst"]


def test_only_captures_that_something_is_taken_from_are_needed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "racers")
    for launch in ("1", "2", "3"):  # they compiled the same at once
        alone = LocalStore(tmp_path / launch)
        publish_trees(alone, build(tmp_path / "live", FEW), draft(launch=launch, created=f"2026-01-0{launch}"))
        pushed(alone, store, KEY)
    found = captures(store, KEY, [])
    assert len(found) == 3
    domains = [target.domain for target in targets(tmp_path)]
    assert sources(found, domains, ()) == found[:1]


@pytest.mark.parametrize("left", [0, 1000])
def test_what_has_no_room_in_the_local_store_is_restored_from_the_mirror(
    mirror: MemoryStore, tmp_path: Path, left: int
) -> None:
    local = LocalStore(tmp_path / "local")
    done = pulled(mirror, local, left=left)
    assert (done.store, done.failures) == (mirror, ())
    assert len(done.captures) == 1
    assert "its budget leaves" in done.note
    assert not (tmp_path / "local").exists()


class Full(Wrapper):
    """A disk that is full after so many objects."""

    def __init__(self, inner: Store, *, after: int) -> None:
        super().__init__(inner)
        self._left = after

    def _take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise StoreError(f"cannot write in {self}: No space left on device")

    def put(self, name: str, data: bytes) -> bool:
        self._take()
        return super().put(name, data)

    def put_stream(self, name: str, source: Source) -> bool:
        self._take()
        return super().put_stream(name, source)


@pytest.mark.parametrize("after", range(5))
def test_a_local_store_that_takes_nothing_more_does_not_keep_the_start_cold(
    mirror: MemoryStore, tmp_path: Path, after: int
) -> None:
    local = MemoryStore(tmp_path / "local")
    done = pulled(mirror, Full(local, after=after))
    assert (done.store, done.failures) == (mirror, ())
    assert "No space left" in done.note
    assert visible(local) == []


@pytest.mark.parametrize(
    ("error", "damaged"),
    [
        (MirrorError("slow down", word="throttled"), 0),
        (NotFoundError("no layer"), 0),
        (CorruptError("other bytes"), 1),
        (DeadlineError("over"), 0),
    ],
)
def test_what_does_not_arrive_is_said_and_only_what_is_damaged_is_never_tried_again(
    mirror: MemoryStore, tmp_path: Path, error: CacheError, damaged: int
) -> None:
    class Failing(Wrapper):
        def open(self, name: str):  # type: ignore[no-untyped-def]
            raise error

    local = LocalStore(tmp_path / "local")
    done = pulled(Failing(mirror), local)
    assert (done.store, done.captures) == (local, ())
    assert [failure.error for failure in done.failures] == [error]
    assert len(done.damaged) == damaged
    nothing = restore(local, (), [], trees=True, launch="l", now_ns=NOW_NS, expired=never)
    assert done.added_to(nothing).reasons == (f"not fetched from the mirror: {error}",)
    assert visible(local) == []


def test_a_swapped_layer_is_refused(mirror: MemoryStore, tmp_path: Path) -> None:
    done = pulled(Corrupting(mirror, "layers/"), LocalStore(tmp_path / "local"))
    assert [damage.capture for damage in done.damaged] == visible(mirror)


def test_a_note_of_where_captures_came_from_is_for_each_of_them(mirror: MemoryStore) -> None:
    marks = came_from(mirror, SINCE)
    (capture,) = captures(mirror, KEY, [])
    assert set(marks(KEY, capture.digest)) == {layout.origin_name(KEY, capture.digest)}


# Near artifacts of a mirror


def filled(mirror: MemoryStore, tmp_path: Path, count: int, *, model: str = "llama") -> None:
    """So many artifacts that differ in one argument, without their layers: nobody opens them here."""
    source = LocalStore(tmp_path / f"many-{model}")
    trees = build(tmp_path / "live-many", ["modelinfos"])
    keys: list[Key] = []
    for number in range(count):
        factors = changed("vllm.max_model_len", f"{model} {number}")
        made = msgspec.structs.replace(draft(factors), model=model)
        publish_trees(source, trees, made, near=captures(source, keys[0], []) if keys else ())
        keys.append(derive(factors))
    pushed(source, mirror, *keys)


def test_a_near_look_up_reads_a_few_manifests_of_many_and_remembers_them(tmp_path: Path) -> None:
    mirror = MemoryStore(tmp_path / "mirror")
    filled(mirror, tmp_path, 60)
    recording, heads = Recording(mirror), tmp_path / "heads"
    found = looked_up(recording, heads=heads)
    assert (found.result, found.where) == ("near", "mirror")
    verbs = [verb for verb, _name in recording.calls]
    assert (verbs.count("scan"), verbs.count("read")) == (3, 17), (
        "own key, hints, candidate; new manifests and it again"
    )
    again = Recording(mirror)
    looked_up(again, heads=heads)
    assert len([verb for verb, _name in again.calls if verb == "read"]) == 17, "16 more are known now"
    for _look in range(3):
        looked_up(mirror, heads=heads)
    known = Recording(mirror)
    looked_up(known, heads=heads)
    assert [verb for verb, _name in known.calls] == ["scan", "scan", "scan", "read"]


def test_artifacts_of_the_same_model_come_first(tmp_path: Path) -> None:
    mirror = MemoryStore(tmp_path / "mirror")
    filled(mirror, tmp_path, 2)
    filled(mirror, tmp_path, 20, model="qwen")
    recording = Recording(mirror)
    found = looked_up(recording, model="llama")
    assert found.captures[0].manifest.model == "llama"
    assert len([verb for verb, _name in recording.calls if verb == "read"]) == 3
    other = looked_up(mirror, model="mistral")
    assert other.result == "near", "where there is none of the same model, kernels of another are better than nothing"


def test_other_or_unknown_guards_ask_for_no_manifest(mirror: MemoryStore) -> None:
    for factors in (changed("torch", "2.14.0"), changed("torch", None)):
        recording = Recording(mirror)
        assert looked_up(recording, factors).result == "none"
        assert [verb for verb, _name in recording.calls if verb != "scan"] == []


def test_a_hint_without_its_manifest_and_a_strange_one_are_passed_over(mirror: MemoryStore, tmp_path: Path) -> None:
    filled(mirror, tmp_path, 3)
    guards = guard_print(FACTORS)
    mirror.put(f"near/{guards}/x/not-a-key/{'0' * 64}", b"")
    mirror.put(f"{layout.near_prefix(guards, 'llama')}odd", b"")
    for entry in list(mirror.scan("artifacts/"))[1:]:
        mirror.delete(entry.name)
    left = {entry.name for entry in mirror.scan("artifacts/")}
    found = looked_up(mirror, changed("vllm.max_model_len", "other"))
    assert found.result == "near"
    assert layout.manifest_name(found.captures[0].manifest.key, found.captures[0].digest) in left


def test_a_mirror_that_fails_is_not_an_empty_one(mirror: MemoryStore) -> None:
    with pytest.raises(StoreError):
        looked_up(Unreadable(mirror, "artifacts/"), OTHER)

    class Unlisted(Wrapper):
        def scan(self, prefix: str) -> Iterator[Entry]:
            raise MirrorError("denied", word="denied")

    with pytest.raises(MirrorError):
        looked_up(Unlisted(mirror))
