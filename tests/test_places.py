"""Places: what can be written, a spare directory that nobody else can enter, and file systems of the network."""

import os
from pathlib import Path

import pytest

from cachemgr.places import exported_place, exposure, is_special, network_file_system, spare, usable

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /home rw shared:2 - nfs4 server:/export rw,vers=4.2
31 30 0:27 / /home/local\\040disk rw shared:3 - xfs /dev/sdb rw
32 22 0:28 / /bucket rw - fuse.mountpoint-s3 mountpoint-s3 rw
33 22 0:29 / /overlay rw - fuse.fuse-overlayfs fuse-overlayfs rw
34 22 0:30 / /scratch rw - lustre mgs@tcp:/scratch rw
35 22 0:31 / /twice rw - nfs4 server:/a rw
36 22 0:32 / /twice rw - tmpfs tmpfs rw
37 22 0:33 /team/a /pods rw - ceph mon1,mon2:/volumes rw
38 22 0:34 / /tunnel rw - nfs4 127.0.0.1:/ rw
39 22 0:35 / /share rw - cifs //server/share rw
40 22 0:36 / /nameless rw -  tmpfs  rw
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


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/me/.cache", "server:/export/me/.cache"),
        ("/home", "server:/export"),
        ("/scratch/x", "mgs@tcp:/scratch/x"),
        ("/pods/store", "mon1,mon2:/volumes/team/a/store"),
        ("/share/x", "//server/share/x"),
        ("/tunnel/x", None),  # to any server
        ("/bucket/x", None),  # of any bucket
        ("/home/local disk/x", None),
        ("/twice/x", None),
        ("/nameless/x", None),
        ("/var/cache", None),
    ],
)
def test_what_hosts_share_has_one_name_wherever_they_mount_it(mounts: Path, path: str, name: str | None) -> None:
    assert exported_place(path, mounts) == name


def test_without_a_mount_table_everything_is_local(tmp_path: Path) -> None:
    assert network_file_system("/home", tmp_path / "missing") is None
    assert exported_place("/home", tmp_path / "missing") is None


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


@pytest.mark.parametrize(
    ("modes", "said"),
    [
        ({"a": 0o755, "a/b": 0o755}, None),
        ({"a": 0o777, "a/b": 0o700}, "a can be written by everybody"),
        ({"a": 0o1777, "a/b": 0o700}, None),
        ({"a": 0o755, "a/b": 0o1777}, "a/b can be written by everybody"),
        ({"a": 0o755, "a/b": 0o777}, "a/b can be written by everybody"),
        ({"a": 0o1777}, None),
        ({"a": 0o777}, "a can be written by everybody"),
    ],
)
def test_a_directory_is_exposed_by_itself_or_by_one_on_the_way(
    tmp_path: Path, modes: dict[str, int], said: str | None
) -> None:
    for name, mode in modes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    assert exposure(tmp_path / "a/b") == (None if said is None else f"{tmp_path}/{said}")


def test_what_lies_on_the_way_does_not_count_where_it_is_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a").chmod(0o777)
    assert exposure(tmp_path / "a/b", way=False) is None
    (tmp_path / "a/b").chmod(0o777)
    assert exposure(tmp_path / "a/b", way=False) == f"{tmp_path}/a/b can be written by everybody"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_belongs_to_somebody_else_is_exposed_and_so_is_what_a_link_of_theirs_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 4321, 0)
    assert exposure(tmp_path / "theirs/x") == f"{tmp_path}/theirs belongs to user 4321"
    (tmp_path / "link").symlink_to("real")
    assert exposure(tmp_path / "link") is None
    os.chown(tmp_path / "link", 4321, 0, follow_symlinks=False)
    assert exposure(tmp_path / "link") == f"{tmp_path}/link belongs to user 4321"
    (tmp_path / "real").chmod(0o775)
    os.chown(tmp_path / "real", 0, 4321)
    assert exposure(tmp_path / "real") == f"{tmp_path}/real can be written by group 4321"


def test_links_that_lead_round_and_round_are_given_up(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert exposure(tmp_path / "a") == f"{tmp_path}/a leads through too many links"


def test_a_device_a_pipe_and_what_a_process_has_open_do_not_give_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    special = ["/dev/null", "/dev/stdout", "/dev/none", "/proc/self/fd/1", str(tmp_path / "pipe"), str(tmp_path)]
    plain = [str(tmp_path / "file"), str(tmp_path / "new"), str(tmp_path / "no" / "way"), "/dev/shm/cachemgr-none"]
    assert [path for path in special + plain if is_special(Path(path))] == special
