"""What every store promises, as one suite. A store's own test module only says how to make one.

A subclass provides the fixtures `store`, `broken` (a store whose place fails whatever is asked of it) and `age`.
"""

import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachemgr.capture import encode_launch
from cachemgr.errors import CorruptError, NotFoundError, StoreError
from cachemgr.key import Key
from cachemgr.process import this_process
from cachemgr.store import Store, records
from cachemgr.store.claims import InStore, Owner
from tests.stores import Spoilt, contents, spool
from tests.test_capture import launch_named

Age = Callable[[str, float], None]
"""Makes an object look this many seconds older."""

HOSTILE = [
    "",
    "/etc/passwd",
    "..",
    "../outside",
    "a/../../outside",
    "a/..",
    "a//b",
    "./a",
    "a/.",
    "a/",
    "a\0b",
    "a\nb",
    "a\\b",
    "\x1b[2Ja",
    "a\udcffb",
    "x" * 256,
    "/".join(["x" * 200] * 6),
    ".hidden",
    "a/.hidden",
]
LIMIT = 1 << 20
KEY = Key("k1:" + "0" * 32)


class StoreContract:
    """Test names are the contract."""

    def test_what_was_put_is_read_back(self, store: Store) -> None:
        assert store.put("layers/ab/one", b"bytes") is True
        assert store.read("layers/ab/one", limit=LIMIT) == b"bytes"
        with store.open("layers/ab/one") as stream:
            assert stream.read() == b"bytes"
        assert store.has("layers/ab/one")

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        assert store.put("entries/a/b", b"") is True
        assert store.has("entries/a/b")
        assert store.read("entries/a/b", limit=0) == b""
        assert [(entry.name, entry.size) for entry in store.scan("entries/")] == [("entries/a/b", 0)]

    def test_a_reader_can_seek_back(self, store: Store) -> None:
        store.put("a", b"0123456789")
        with store.open("a") as stream:
            assert stream.read(4) == b"0123"
            stream.seek(0)
            assert stream.read() == b"0123456789"

    def test_a_slice_is_a_part_of_an_object(self, store: Store) -> None:
        store.put("a", b"0123456789")
        assert store.slice("a", 0, 4) == b"0123"
        assert store.slice("a", 8, 4) == b"89"
        assert store.slice("a", 10, 4) == b""
        assert store.slice("a", 90, 4) == b""
        with pytest.raises(NotFoundError, match="a/b"):
            store.slice("a/b", 0, 1)

    def test_absent_is_said_as_absent(self, store: Store) -> None:
        assert store.has("a/b") is False
        assert store.delete("a/b") is False
        assert store.refresh("a/b") is False
        assert list(store.scan("a/")) == []
        with pytest.raises(NotFoundError, match="a/b"):
            store.read("a/b", limit=LIMIT)
        with pytest.raises(NotFoundError, match="a/b"):
            store.open("a/b")

    def test_neither_the_parent_nor_a_child_of_an_object_is_one(self, store: Store) -> None:
        store.put("a/b", b"bytes")
        for name in ("a", "a/b/c"):
            assert store.has(name) is False
            with pytest.raises(NotFoundError):
                store.read(name, limit=LIMIT)
            with pytest.raises(NotFoundError):
                store.open(name)
        assert list(store.scan("a/b/")) == []

    def test_the_first_writer_wins(self, store: Store) -> None:
        assert store.put("a", b"first") is True
        assert store.put("a", b"second") is False
        assert store.put_file("a", spool(store, b"third")) is False
        assert store.read("a", limit=LIMIT) == b"first"

    def test_a_file_is_taken(self, store: Store) -> None:
        won, lost = spool(store, b"won"), spool(store, b"lost")
        assert store.put_file("a/b", won) is True
        assert store.put_file("a/b", lost) is False
        assert store.read("a/b", limit=LIMIT) == b"won"
        assert not won.exists()
        assert not lost.exists()

    def test_what_happens_to_the_file_later_is_nothing_to_the_object(self, store: Store) -> None:
        path = spool(store, b"bytes")
        store.put_file("a", path)
        path.write_bytes(b"other")
        assert store.read("a", limit=LIMIT) == b"bytes"

    def test_a_large_object_survives(self, store: Store) -> None:
        data = bytes(range(256)) * (3 << 12)
        store.put_file("big", spool(store, data))
        assert store.read("big", limit=len(data)) == data

    def test_a_stream_is_taken_to_its_end(self, store: Store) -> None:
        assert store.put_stream("a/b", io.BytesIO(b"bytes")) is True
        assert store.put_stream("a/b", io.BytesIO(b"other")) is False
        assert store.put_stream("a/empty", io.BytesIO(b"")) is True
        assert contents(store) == {"a/b": b"bytes", "a/empty": b""}

    @pytest.mark.parametrize("size", [0, 1, 20 << 20])
    @pytest.mark.parametrize("failure", [CorruptError("the digest is wrong"), OSError("cable"), KeyboardInterrupt()])
    def test_a_stream_that_fails_at_its_very_end_is_no_object(
        self, store: Store, size: int, failure: BaseException
    ) -> None:
        with pytest.raises(type(failure)) as caught:
            store.put_stream("a/b", Spoilt(size, failure))
        assert caught.value is failure
        assert not store.has("a/b")
        assert contents(store) == {}
        assert store.put_stream("a/b", io.BytesIO(b"bytes")) is True

    def test_a_read_is_limited(self, store: Store) -> None:
        store.put("a", b"12345")
        assert store.read("a", limit=5) == b"12345"
        with pytest.raises(CorruptError, match="more than 4 bytes"):
            store.read("a", limit=4)

    def test_a_listing_names_what_lies_below_a_directory(self, store: Store) -> None:
        names = {"a/1", "a/b/2", "a/b/c/3", "ab/4", "b/a/5", "6"}
        for name in names:
            store.put(name, name.encode() * 3)
        assert {entry.name for entry in store.scan("a/")} == {"a/1", "a/b/2", "a/b/c/3"}
        assert {entry.name for entry in store.scan("a/b/")} == {"a/b/2", "a/b/c/3"}
        assert {entry.name for entry in store.scan("")} == names
        assert all(entry.size == 3 * len(entry.name) for entry in store.scan(""))

    def test_a_listing_does_not_show_unfinished_writes(self, store: Store) -> None:
        store.put("a", b"1")
        spool(store, b"unfinished")
        assert [entry.name for entry in store.scan("")] == ["a"]

    @pytest.mark.parametrize("prefix", ["a", "/", "/etc/", "../", "a/../", "a//", "./"])
    def test_a_listing_of_something_else_is_refused(self, store: Store, prefix: str) -> None:
        store.put("a/b", b"")
        with pytest.raises(StoreError):
            list(store.scan(prefix))

    def test_objects_may_be_deleted_while_they_are_listed(self, store: Store) -> None:
        for number in range(20):
            store.put(f"a/{number % 3}/{number}", b"")
        for entry in store.scan("a/"):
            assert store.delete(entry.name)
        assert list(store.scan("a/")) == []

    def test_deleting_leaves_the_neighbours(self, store: Store) -> None:
        store.put("a/b/1", b"1")
        store.put("a/b/2", b"2")
        assert store.delete("a/b/1") is True
        assert store.delete("a/b/1") is False
        assert contents(store) == {"a/b/2": b"2"}
        assert store.delete("a/b/2") is True
        assert contents(store) == {}

    def test_a_deleted_name_can_be_used_again(self, store: Store) -> None:
        store.put("a/b", b"1")
        store.delete("a/b")
        assert store.put("a/b", b"2") is True
        assert store.read("a/b", limit=LIMIT) == b"2"

    def test_a_refreshed_object_looks_new(self, store: Store, age: Age) -> None:
        store.put("a", b"1")
        made = next(store.scan("")).modified
        age("a", 10_000.0)
        assert next(store.scan("")).modified == pytest.approx(made - 10_000, abs=5)
        assert store.refresh("a") is True
        assert next(store.scan("")).modified == pytest.approx(made, abs=60)
        assert store.read("a", limit=LIMIT) == b"1"

    def test_putting_again_does_not_refresh(self, store: Store, age: Age) -> None:
        store.put("a", b"1")
        age("a", 10_000.0)
        before = next(store.scan("")).modified
        assert store.put("a", b"1") is False
        assert next(store.scan("")).modified == before

    @pytest.mark.parametrize("name", HOSTILE)
    def test_hostile_names_are_refused(self, store: Store, name: str) -> None:
        path = spool(store, b"x")
        attempts: list[Callable[[], object]] = [
            lambda: store.put(name, b"x"),
            lambda: store.put_file(name, path),
            lambda: store.put_stream(name, io.BytesIO(b"x")),
            lambda: store.read(name, limit=LIMIT),
            lambda: store.open(name),
            lambda: store.has(name),
            lambda: store.refresh(name),
            lambda: store.delete(name),
        ]
        for attempt in attempts:
            with pytest.raises(StoreError):
                attempt()
        assert contents(store) == {}

    def test_nothing_is_visible_after_a_failed_put(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="a/b"):
            store.put_file("a/b", tmp_path / "no such file")
        assert not store.has("a/b")
        assert contents(store) == {}
        assert store.put("a/b", b"1") is True

    def test_a_failing_store_is_not_an_empty_one(self, broken: Store, tmp_path: Path) -> None:
        attempts: list[Callable[[], object]] = [
            lambda: broken.read("a/b", limit=LIMIT),
            lambda: broken.open("a/b"),
            lambda: broken.slice("a/b", 0, 1),
            lambda: broken.has("a/b"),
            lambda: list(broken.scan("a/")),
            lambda: broken.put("a/b", b"x"),
            lambda: broken.put_file("a/b", tmp_path / "file"),
            lambda: broken.put_stream("a/b", io.BytesIO(b"x")),
            lambda: broken.refresh("a/b"),
            lambda: broken.delete("a/b"),
        ]
        (tmp_path / "file").write_bytes(b"x")
        for attempt in attempts:
            with pytest.raises(StoreError) as caught:
                attempt()
            assert str(broken) in str(caught.value)

    def test_of_many_putters_one_wins_and_every_reader_sees_whole_bytes(self, store: Store) -> None:
        payloads = [bytes([number]) * 300_000 for number in range(8)]
        barrier = threading.Barrier(len(payloads))

        def race(payload: bytes) -> tuple[bool, bytes]:
            barrier.wait()
            take_file = payload[0] % 2
            won = store.put_file("a/b", spool(store, payload)) if take_file else store.put("a/b", payload)
            return won, store.read("a/b", limit=LIMIT)

        with ThreadPoolExecutor(len(payloads)) as pool:
            results = list(pool.map(race, payloads))
        winners = [payload for payload, (won, _seen) in zip(payloads, results, strict=True) if won]
        assert len(winners) == 1
        assert {seen for _won, seen in results} == set(winners)

    def test_putters_and_removers_of_one_directory_do_not_disturb_each_other(self, store: Store) -> None:
        def churn(number: int) -> None:
            for _round in range(60):
                assert store.put(f"deep/er/dir/{number}", b"x") is True
                assert store.delete(f"deep/er/dir/{number}") is True

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(churn, range(4)))
        assert contents(store) == {}

    def test_of_many_who_take_a_claim_one_has_it_and_of_many_who_take_it_over_one(self, store: Store) -> None:
        owners = [Owner(f"launch-{number}", "host", this_process()) for number in range(8)]
        for number in (1, 2):
            barrier = threading.Barrier(len(owners))

            def race(owner: Owner, barrier: threading.Barrier = barrier, after: int = number - 1) -> int | None:
                barrier.wait()
                return InStore(store, KEY).take(owner, after=after)

            with ThreadPoolExecutor(len(owners)) as pool:
                taken = list(pool.map(race, owners))
            ((winner, won),) = [pair for pair in zip(owners, taken, strict=True) if pair[1] is not None]
            newest = InStore(store, KEY).newest()
            assert newest is not None
            assert newest.number == won == number
            assert store.has(f"claims/{KEY.replace(':', '-')}/0000000{number}.json")
            assert InStore(store, KEY).owner_of(number) == winner

    def test_a_claim_beats_until_it_is_given_up_with_those_before_it(self, store: Store) -> None:
        owner = Owner("launch", "host", this_process())
        claims = InStore(store, KEY)
        assert [claims.take(owner, after=0), claims.take(owner, after=1)] == [1, 2]
        assert claims.beat(2) is True
        newest = claims.newest()
        assert newest is not None
        assert newest.number == 2
        claims.give_up(2)
        assert claims.newest() is None
        assert claims.beat(2) is False
        assert claims.owner_of(2) is None
        assert contents(store) == {}

    def test_while_many_roll_up_records_none_is_ever_missing(self, store: Store) -> None:
        names = {f"launch-{number:02}" for number in range(24)}
        for name in names:
            store.put(f"launches/2026-01-02/{name}.json", encode_launch(launch_named(name)))

        def work(number: int) -> None:
            if number % 2:
                records.roll_up(store)
            else:
                assert {launch.launch for launch in records.launches(store)} == names

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        records.roll_up(store)
        assert len(list(store.scan("launches/"))) == 1
        assert sorted(launch.launch for launch in records.launches(store)) == sorted(names)

    def test_a_store_says_where_it_is(self, store: Store) -> None:
        assert str(store)
