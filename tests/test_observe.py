"""Observing: proof of use comes from directories, and from real reads of real processes."""

import os
import subprocess
from pathlib import Path

import pytest

from cachemgr.capture import Verdict
from cachemgr.layer import read_file
from cachemgr.observe import (
    STAGE_PREFIX,
    Seen,
    Snapshot,
    forget_reads,
    growth,
    keeps_access_times,
    scan,
    verdict,
)
from tests.trees import write


def everything(_path: str) -> bool:
    return True


def before_a_start(root: Path) -> Snapshot:
    return forget_reads(str(root), scan(str(root), everything))


def test_a_scan_sees_regular_files_that_travel(tmp_path: Path) -> None:
    write(tmp_path, {"a/1": b"1", "a/b/2": b"22", "3": b"", "a/x.lock": b"", ".hidden/4": b"4"})
    write(tmp_path, {f"{STAGE_PREFIX}l-n/tree/5": b"", f"a/{STAGE_PREFIX}atime-1": b""})
    (tmp_path / "link").symlink_to("3")
    (tmp_path / "dir").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).write_bytes(b"")
    found = scan(str(tmp_path), lambda path: not path.endswith(".lock"))
    assert set(found) == {"a/1", "a/b/2", "3", ".hidden/4"}
    status = (tmp_path / "a/b/2").stat()
    assert found["a/b/2"] == Seen(2, status.st_mtime_ns, status.st_ino, status.st_atime_ns)


@pytest.mark.parametrize("there", [False, True])
def test_no_directory_is_nothing_seen(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "x").write_bytes(b"a file")
    assert scan(str(tmp_path / "x"), everything) == {}


def test_a_real_read_is_proof_of_use(tmp_path: Path) -> None:
    root = tmp_path / "live"
    write(root, {"read": b"1", "not read": b"2", "d/mapped": b"3"})
    if not keeps_access_times(str(root)):
        pytest.skip("this file system keeps no access times")
    before = before_a_start(root)
    subprocess.run(["cat", "read", "d/mapped"], cwd=root, stdout=subprocess.DEVNULL, check=True)
    found = growth(before, scan(str(root), everything), access_times=True)
    assert found.read == frozenset({"read", "d/mapped"})
    assert found.added == frozenset()


def test_our_own_reads_are_no_use(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"1"})
    before = before_a_start(tmp_path)
    assert b"".join(read_file(str(tmp_path / "a"))) == b"1"
    assert growth(before, scan(str(tmp_path), everything), access_times=True).read == frozenset()


def test_what_is_new_or_changed_was_added(tmp_path: Path) -> None:
    write(tmp_path, {"same": b"1", "longer": b"1", "rewritten": b"1", "replaced": b"1", "touched": b"1", "gone": b"1"})
    before = before_a_start(tmp_path)
    kept = (tmp_path / "same").stat().st_mtime_ns
    write(tmp_path, {"new": b"1"}, old=False)
    (tmp_path / "longer").write_bytes(b"22")
    (tmp_path / "rewritten").write_bytes(b"2")
    (tmp_path / "aside").write_bytes(b"2")
    os.utime(tmp_path / "aside", ns=(0, kept))
    (tmp_path / "aside").rename(tmp_path / "replaced")
    os.utime(tmp_path / "touched")
    (tmp_path / "gone").unlink()
    found = growth(before, scan(str(tmp_path), everything), access_times=False)
    assert found.added == {"new", "longer", "rewritten", "replaced", "touched"}
    assert found.read is None


def test_forgetting_reads_keeps_everything_else(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"1", "b": b"2"})
    os.utime(tmp_path / "b", ns=(0, 5))
    seen = scan(str(tmp_path), everything)
    forgotten = before_a_start(tmp_path)
    assert {path: row.atime_ns for path, row in forgotten.items()} == {"a": 0, "b": 0}
    assert forgotten == scan(str(tmp_path), everything)
    assert all(forgotten[path].same_bytes(seen[path]) for path in seen)


def test_a_file_that_vanished_meanwhile_is_no_trouble(tmp_path: Path) -> None:
    seen = {"gone": Seen(1, 2, 3, 4)}
    assert forget_reads(str(tmp_path), seen) == seen
    assert growth(seen, {}, access_times=True) == growth({}, {}, access_times=True)


def test_probing_for_access_times_leaves_nothing(tmp_path: Path) -> None:
    assert keeps_access_times(str(tmp_path)) in (True, False)
    assert list(tmp_path.iterdir()) == []
    assert keeps_access_times(str(tmp_path / "nowhere")) is False


def test_a_mount_without_access_times_is_recognised(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "noatime,size=64k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a file system")
    try:
        assert keeps_access_times(str(tmp_path)) is False
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("offered", "read", "added", "word"),
    [
        (0, 0, 0, "cold"),
        (0, 0, 9, "cold"),
        (0, None, 9, "cold"),
        (9, None, 0, "unknown"),
        (9, None, 9, "unknown"),
        (9, 0, 0, "inert"),
        (9, 0, 9, "inert"),
        (9, 1, 0, "used"),
        (9, 9, 0, "used"),
        (9, 1, 1, "partly used"),
        (9, 9, 1, "partly used"),
    ],
)
def test_the_verdict(offered: int, read: int | None, added: int, word: Verdict) -> None:
    assert verdict(offered, read, added) == word
