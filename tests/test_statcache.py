"""The stat cache: it may save a read, and never hand out what a file was before."""

import os
from pathlib import Path

import msgspec
import pytest

from cachemgr import digest
from cachemgr.capture import File
from cachemgr.observe import Seen, scan
from cachemgr.statcache import StatCache
from tests.trees import write

OLD = 1_700_000_000_000_000_000
LATER = OLD + 10_000_000_000
SEEN = Seen(3, OLD, 77, 0)
FILE = File("K/a", 3, digest.of_bytes(b"abc"), relocated=True)


THERE = __file__
"""A path at which there is a file."""


def filled() -> StatCache:
    cache = StatCache({})
    cache.put(THERE, SEEN, FILE, now_ns=LATER)
    return cache


def test_an_unchanged_file_is_known() -> None:
    assert filled().get(THERE, SEEN) == FILE
    assert filled().get(THERE, SEEN._replace(atime_ns=99)) == FILE


@pytest.mark.parametrize("seen", [SEEN._replace(size=4), SEEN._replace(mtime_ns=OLD + 1), SEEN._replace(inode=78)])
def test_a_file_that_changed_is_not(seen: Seen) -> None:
    assert filled().get(THERE, seen) is None


def test_another_file_is_not() -> None:
    assert filled().get(THERE + "x", SEEN) is None


@pytest.mark.parametrize(("age", "remembered"), [(-5, False), (0, False), (1.999, False), (2, True), (3600, True)])
def test_a_file_that_changed_just_now_is_not_remembered(age: float, remembered: bool) -> None:
    cache = StatCache({})
    cache.put("/a", SEEN, FILE, now_ns=OLD + int(age * 1e9))
    assert (cache.get("/a", SEEN) is not None) == remembered
    assert cache.changed == remembered


def test_it_survives_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "made" / "later" / "x.msgpack"
    filled().save(path)
    again = StatCache.load(path)
    assert again.get(THERE, SEEN) == FILE
    assert again.changed is False
    assert [entry.name for entry in path.parent.iterdir()] == ["x.msgpack"]


def test_it_is_written_only_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    StatCache({}).save(path)
    assert not path.exists()
    filled().save(path)
    inode = path.stat().st_ino
    StatCache.load(path).save(path)
    assert path.stat().st_ino == inode


@pytest.mark.parametrize(
    "data", [b"", b"\x81", b"\xc0", b"\x81\xa1a\x01", b"\xff" * 100, b"\x81\xa1a\x94\x01\x02\x03\x04"]
)
def test_a_torn_one_is_an_empty_one(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    assert StatCache.load(tmp_path / "x").get(THERE, SEEN) is None
    assert StatCache.load(tmp_path).get(THERE, SEEN) is None
    assert StatCache.load(tmp_path / "nowhere").get(THERE, SEEN) is None


def test_every_cut_of_one_is_an_empty_one(tmp_path: Path) -> None:
    filled().save(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for end in range(len(data)):
        (tmp_path / "cut").write_bytes(data[:end])
        assert StatCache.load(tmp_path / "cut").get(THERE, SEEN) is None


def test_where_it_cannot_be_written_nothing_happens(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    filled().save(tmp_path / "file" / "x")
    assert (tmp_path / "file").read_bytes() == b""


def test_a_file_with_a_kept_time_keeps_it(tmp_path: Path) -> None:
    cache = StatCache({})
    file = msgspec.structs.replace(FILE, mtime_ns=5, mode=0o755)
    cache.put(THERE, SEEN, file, now_ns=LATER)
    cache.save(tmp_path / "x")
    assert StatCache.load(tmp_path / "x").get(THERE, SEEN) == file


def test_files_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"abc", "b": b"abc"})
    cache = StatCache({})
    for name in "ab":
        cache.put(f"{tmp_path}/{name}", SEEN, FILE, now_ns=LATER)
    (tmp_path / "a").unlink()
    cache.save(tmp_path / "x")
    again = StatCache.load(tmp_path / "x")
    assert again.get(f"{tmp_path}/a", SEEN) is None
    assert again.get(f"{tmp_path}/b", SEEN) == FILE


def test_real_files_are_known_until_they_change(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"abc"})
    cache = StatCache({})

    def seen() -> Seen:
        return scan(str(tmp_path), lambda _path: True)["a"]

    cache.put(f"{tmp_path}/a", seen(), FILE, now_ns=LATER)
    assert cache.get(f"{tmp_path}/a", seen()) == FILE
    (tmp_path / "b").write_bytes(b"xyz")
    os.utime(tmp_path / "b", ns=(OLD, OLD))
    (tmp_path / "b").rename(tmp_path / "a")
    assert cache.get(f"{tmp_path}/a", seen()) is None
