"""Places: what can be written, a spare directory that nobody else can enter, and file systems of the network."""

import os
from pathlib import Path

import pytest

from cachemgr.places import network_file_system, spare, usable

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /home rw shared:2 - nfs4 server:/export rw,vers=4.2
31 30 0:27 / /home/local\\040disk rw shared:3 - xfs /dev/sdb rw
32 22 0:28 / /bucket rw - fuse.mountpoint-s3 mountpoint-s3 rw
33 22 0:29 / /overlay rw - fuse.fuse-overlayfs fuse-overlayfs rw
34 22 0:30 / /scratch rw - lustre mgs@tcp:/scratch rw
35 22 0:31 / /twice rw - nfs4 server:/a rw
36 22 0:32 / /twice rw - tmpfs tmpfs rw
malformed
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS.replace("malformed\n", ""))
    return path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/cache", None),
        ("/home/me/.cache", "nfs4"),
        ("/home", "nfs4"),
        ("/homework", None),
        ("/home/local disk/x", None),
        ("/bucket/x", "fuse.mountpoint-s3"),
        ("/overlay/x", None),
        ("/scratch/x", "lustre"),
        ("/twice/x", None),
    ],
)
def test_the_innermost_mount_decides(mounts: Path, path: str, kind: str | None) -> None:
    assert network_file_system(path, mounts) == kind


def test_without_a_mount_table_everything_is_local(tmp_path: Path) -> None:
    assert network_file_system("/home", tmp_path / "missing") is None


def test_this_machine_has_a_readable_mount_table() -> None:
    assert network_file_system("/proc") is None


def test_a_directory_that_can_be_made_is_usable(tmp_path: Path) -> None:
    assert usable(tmp_path)
    assert usable(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    assert not usable(tmp_path / "file")
    assert not usable(tmp_path / "file" / "below")


def test_the_spare_directory_is_private(tmp_path: Path) -> None:
    path = spare({"TMPDIR": str(tmp_path)})
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o700
    assert spare({"TMPDIR": str(tmp_path)}) == path


def test_a_squatted_spare_directory_is_refused(tmp_path: Path) -> None:
    name = f"cachemgr-{os.geteuid()}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / name).symlink_to(elsewhere)
    assert spare({"TMPDIR": str(tmp_path)}) is None
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir(mode=0o755)
    assert spare({"TMPDIR": str(tmp_path)}) is None
    (tmp_path / name).rmdir()
    (tmp_path / name).write_text("")
    assert spare({"TMPDIR": str(tmp_path)}) is None
    assert spare({"TMPDIR": str(tmp_path / "missing")}) is None
