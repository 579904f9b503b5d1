"""Launch records: gathered, sent in batches, rolled up by whoever comes by, and never lost or counted twice."""

import json
import time
from pathlib import Path

import pytest
import zstandard

from cachemgr import digest
from cachemgr.capture import encode_launch
from cachemgr.errors import CorruptError, StoreError
from cachemgr.store import Store
from cachemgr.store import records as kept_records
from cachemgr.store.local import LocalStore
from cachemgr.store.records import due, keep, launches, record, roll_up, send
from tests.kills import killed_at_every_step
from tests.stores import Faulty, Recording, contents
from tests.test_capture import LAUNCH, canonical, launch_named

DAY = "launches/2026-01-02/"


def _waiting(outbox: Path) -> int:
    return len(list(outbox.glob("*.json")))


def plant(store: Store, *names: str) -> set[str]:
    """One object a launch, as a host stores them in its own store."""
    for name in names:
        store.put(f"{DAY}{name}.json", encode_launch(launch_named(name)))
    return set(names)


def names_in(store: Store) -> list[str]:
    return sorted(launch.launch for launch in launches(store))


def objects(store: Store) -> list[str]:
    return sorted(entry.name for entry in store.scan("launches/"))


def test_what_is_recorded_when_ready_is_replaced_by_what_is_recorded_at_the_end(store: Store) -> None:
    ready, ended = launch_named("one", exit_code=None), launch_named("one", exit_code=137)
    record(store, ready)
    assert list(launches(store)) == [ready]
    record(store, ended)
    assert list(launches(store)) == [ended]
    roll_up(store)
    assert list(launches(store)) == [ended]
    assert len(objects(store)) == 1
    record(store, ready)
    assert list(launches(store)) == [ended], "whichever is stored last"
    roll_up(store)
    assert (list(launches(store)), len(objects(store))) == ([ended], 1)


def test_what_a_host_gathered_is_sent_as_one_object_a_day(tmp_path: Path, store: Store) -> None:
    outbox = tmp_path / "outbox"
    assert (_waiting(outbox), send(store, outbox)) == (0, 0)
    assert contents(store) == {}, "nothing is made for nothing"
    for number in range(5):
        keep(outbox, launch_named(f"l{number}"))
    keep(outbox, launch_named("l4", exit_code=None))
    keep(outbox, launch_named("m0", day="2026-01-03"))
    (outbox / "torn.json").write_bytes(b"{")
    assert _waiting(outbox) == 8
    assert send(store, outbox) == 6
    assert _waiting(outbox) == 1, "what nobody can read stays for people"
    assert names_in(store) == ["l0", "l1", "l2", "l3", "l4", "m0"]
    assert [name.rsplit("/", 1)[0] for name in objects(store)] == ["launches/2026-01-02", "launches/2026-01-03"]
    assert {launch.exit_code for launch in launches(store)} == {0}


def test_what_waits_is_due_when_it_is_much_or_old(tmp_path: Path) -> None:
    now = time.time()
    assert not due(tmp_path / "outbox", now=now)
    for number in range(15):
        keep(tmp_path / "outbox", launch_named(f"l{number}"))
    assert not due(tmp_path / "outbox", now=now)
    assert due(tmp_path / "outbox", now=now + 700)
    keep(tmp_path / "outbox", launch_named("one more"))
    assert due(tmp_path / "outbox", now=now)


def test_a_host_that_may_not_send_gathers_no_more_than_can_be_borne(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_records, "_MOST_KEPT", 3)
    for number in range(5):
        keep(tmp_path, launch_named(f"l{number}"))
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["l2", "l3", "l4"]


def test_a_sender_that_is_killed_anywhere_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    outbox, store = tmp_path / "outbox", LocalStore(tmp_path / "store")
    for number in range(3):
        keep(outbox, launch_named(f"l{number}"))
    for step in killed_at_every_step(lambda: send(LocalStore(tmp_path / "store"), outbox)):
        kept = {path.stem for path in outbox.glob("*.json")}
        assert kept | set(names_in(store)) == {"l0", "l1", "l2"}, step
        keep(outbox, launch_named("l0"))
    assert names_in(store) == ["l0", "l1", "l2"]
    assert _waiting(outbox) == 0


def test_a_roll_up_that_is_killed_anywhere_loses_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    names = plant(store, *(f"l{number}" for number in range(6)))
    for step in killed_at_every_step(lambda: roll_up(LocalStore(tmp_path / "store"))):
        assert set(names_in(store)) == names, step
        names |= plant(store, f"new{step}")
    assert len(objects(store)) == 1
    assert names_in(store) == sorted(names)


@pytest.mark.parametrize("late", [False, True])
def test_a_roll_up_whose_store_fails_anywhere_loses_nothing(store: Store, late: bool) -> None:
    names = plant(store, *(f"l{number}" for number in range(6)))
    for allowed in range(100):
        faulty = Faulty(store, fail_after=allowed, late=late)
        try:
            roll_up(faulty)
        except StoreError:
            assert set(names_in(store)) == names
            continue
        break
    assert 0 < allowed < 20
    assert (set(names_in(store)), len(objects(store))) == (names, 1)


def test_many_starts_leave_few_objects(store: Store) -> None:
    most = 0
    for number in range(300):
        record(store, launch_named(f"l{number:03}", day=f"2026-01-0{1 + number // 100}"))
        most = max(most, len(objects(store)))
    assert most < 100
    assert len(names_in(store)) == 300
    assert len(objects(store)) < 60
    roll_up(store)
    assert len(objects(store)) == 3


class Undeletable(Faulty):
    """A store whose objects this user may not delete."""

    def delete(self, name: str) -> bool:
        raise StoreError(f"cannot delete `{name}` in {self}: the test said so")


def test_who_may_not_delete_does_not_fill_the_store_with_copies(store: Store) -> None:
    names = plant(store, *(f"l{number}" for number in range(6)))
    limited = Undeletable(store, fail_after=1000)
    for _visit in range(5):
        with pytest.raises(StoreError, match="cannot delete"):
            roll_up(limited)
    assert len(objects(store)) == 7, "one copy, and then it was known"
    assert set(names_in(store)) == names
    for number in range(100):
        record(limited, launch_named(f"m{number}"))
    assert len(objects(store)) == 107, "and recording goes on"


def test_objects_that_cannot_be_read_are_left_alone(store: Store) -> None:
    damaged = {f"{DAY}torn.json": b"{", f"{DAY}{'0' * 64}.jsonl.zst": b"not zstd"}
    for name, data in damaged.items():
        store.put(name, data)
    names = plant(store, "a", "b")
    roll_up(store)
    assert set(names_in(store)) == names
    assert len(objects(store)) == 3
    assert damaged.items() <= contents(store).items()


def test_nothing_is_deleted_for_the_sake_of_an_object_that_is_damaged(store: Store) -> None:
    plant(store, "a", "b")
    roll_up(store)
    (name,) = objects(store)
    data = store.read(name, limit=1 << 20)
    store.delete(name)
    store.put(name, data[:-7])
    names = plant(store, "a", "b")
    with pytest.raises(CorruptError, match="cannot be decompressed"):
        roll_up(store)
    assert set(names_in(store)) == names


def test_fields_of_a_later_release_survive(store: Store) -> None:
    later = json.loads(encode_launch(LAUNCH)) | {"new": 1}
    store.put(f"{DAY}later.json", canonical(later))
    store.put(f"{DAY}spread.json", json.dumps(later | {"launch": "spread"}, indent=2).encode())
    roll_up(store)
    (name,) = objects(store)
    lines = zstandard.ZstdDecompressor().decompress(store.read(name, limit=1 << 20)).splitlines()
    assert len(lines) == 2
    assert canonical(later) in lines


def test_a_record_that_a_later_release_means_otherwise_hides_no_other(store: Store) -> None:
    """It did: one unknown word in a day of a mirror, and all its launches were gone."""
    known = [canonical(json.loads(encode_launch(launch_named(name)))) for name in "ac"]
    later = canonical(json.loads(encode_launch(launch_named("b"))) | {"verdict": "lukewarm"})
    data = b"".join(line + b"\n" for line in (known[0], later, known[1]))
    name = f"{DAY}{digest.hex_of(digest.of_bytes(data))}.jsonl.zst"
    store.put(name, zstandard.ZstdCompressor(write_content_size=True).compress(data))
    assert names_in(store) == ["a", "c"]
    plant(store, "a", "d")
    roll_up(store)
    assert names_in(store) == ["a", "c", "d"]
    assert name in objects(store), "who does not understand a record may not lose it"


def test_days_that_are_rolled_up_are_not_read_again(store: Store) -> None:
    for name in ("a", "b", "c"):
        record(store, launch_named(name))
    roll_up(store)
    noted = Recording(store)
    roll_up(noted)
    assert [verb for verb, _name in noted.calls] == ["scan"]
