"""Pruning and verifying where disks fill up, stores are read-only, and files belong to others."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from cachemgr.errors import StoreError
from cachemgr.prune.limits import Limits
from cachemgr.store import layout, pins
from cachemgr.store.captures import keys
from cachemgr.store.local import LocalStore
from cachemgr.store.pins import Pin
from cachemgr.verify import mend, verify
from tests.conftest import NOW, MakeDisk
from tests.pruning import add, key_of, planned, pruned, settle
from tests.stores import contents


def fill(disk: Path) -> None:
    """Take every byte that is left."""
    descriptor = os.open(disk / "full", os.O_WRONLY | os.O_CREAT, 0o600)
    with suppress(OSError):
        while True:
            os.write(descriptor, bytes(4096))
    os.close(descriptor)


def test_a_full_disk_can_be_pruned(small_disk: MakeDisk, tmp_path: Path) -> None:
    """Removing writes nothing, so that it works when nothing else does."""
    disk = small_disk(4 << 20)
    store = LocalStore(disk / "store")
    for name in ("a", "b", "c"):
        add(store, tmp_path / "live", name)
    settle(disk / "store")
    fill(disk)
    assert os.statvfs(disk).f_bavail == 0
    with pytest.raises(StoreError):
        pins.put(store, key_of("a"), Pin("me", "2026-01-01T00:00:00Z"))
    free = os.statvfs(disk)
    done = pruned(store, Limits(max_files=4))
    assert len(done.artifacts) >= 1
    after = os.statvfs(disk)
    assert (after.f_bavail - free.f_bavail) * after.f_frsize >= done.bytes > 0
    assert not verify(store, depth="deep", now=float(NOW)).report.damaged


def test_a_read_only_store_can_be_verified_and_planned_and_says_why_it_cannot_be_pruned(
    small_disk: MakeDisk, tmp_path: Path
) -> None:
    disk = small_disk(4 << 20)
    store = LocalStore(disk / "store")
    add(store, tmp_path / "live", "a")
    settle(disk / "store")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    before = contents(store)
    found = verify(store, depth="deep", now=float(NOW))
    assert not found.report.damaged
    assert len(planned(store, Limits(max_size=0)).artifacts) == 1
    with pytest.raises(StoreError, match="Read-only file system") as caught:
        pruned(store, Limits(max_size=0))
    assert "writable" in (caught.value.hint or "")
    mend(store, found.repair, launch="repair", now=float(NOW))
    assert contents(store) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="a child becomes another user")
def test_a_store_of_another_user_is_left_as_it_is(tmp_path: Path) -> None:
    """He may read it all, and remove nothing: said at the first thing that should go."""
    for place in (tmp_path, *tmp_path.parents):
        if str(place) != "/" and place.stat().st_uid == 0:
            place.chmod(place.stat().st_mode | 0o055)
    root = tmp_path / "store"
    store = LocalStore(root)
    add(store, tmp_path / "live", "a")
    root.chmod(0o755)
    settle(root)
    before = contents(store)
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(12345)
        os.setuid(12345)
        try:
            pruned(LocalStore(root), Limits(max_size=0))
        except StoreError as error:
            os._exit(7 if "Permission denied" in str(error) else 8)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert contents(store) == before
    assert keys(store) == [key_of("a")]


def test_links_and_devices_in_a_store_are_left_alone(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    root = tmp_path / "store"
    store = LocalStore(root)
    add(store, tmp_path / "live", "a")
    (root / "layers" / "sha256" / "ff").symlink_to(outside)
    (root / "artifacts" / "k1-00000000000000000000000000000000").symlink_to(outside)
    (root / "tmp" / str(os.geteuid()) / "link").symlink_to(outside / "precious")
    os.mkfifo(root / "layers" / "sha256" / "pipe")
    settle(root)
    pruned(store, Limits(max_size=0))
    assert (outside / "precious").read_bytes() == b"x"
    assert (root / "layers" / "sha256" / "ff").is_symlink()
    assert (root / "layers" / "sha256" / "pipe").exists()
    assert list(store.scan(layout.ARTIFACTS)) == []
