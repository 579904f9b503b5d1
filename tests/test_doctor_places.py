"""The doctor on caches, their users and what was left: every domain in one line, and who could not write it."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cachemgr.cache import open_cache
from cachemgr.doctor import domains, machine, plugin, store, use
from cachemgr.doctor.finding import Finding, Opened, Patient
from cachemgr.doctor.serving import may_write, missing_way
from cachemgr.domains import VLLM
from cachemgr.hold import Hold, Holder
from cachemgr.key import folder
from cachemgr.process import this_process
from cachemgr.settings import load
from cachemgr.store import pins
from cachemgr.store.leases import Lease
from cachemgr.store.pins import Pin
from tests import trees
from tests.conftest import MakeDisk
from tests.machines import Fleet, install_stand_in
from tests.pruning import add, key_of

NOW = time.time()


def patient(home: Path, *, uid: int = -1, **variables: str) -> tuple[Patient, Opened]:
    environ = {"HOME": str(home), "TMPDIR": str(home), "PATH": os.environ["PATH"], **variables}
    settings = load(environ, {})
    opened = Opened(settings, open_cache(settings, environ))
    return Patient(environ, home, "host", NOW, opened, uid=uid), opened


def about(findings: "list[Finding]", name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.about == name]
    return found


def test_every_cache_has_a_line_with_what_decides_it(home: Path) -> None:
    asked, opened = patient(home, TRITON_CACHE_DIR=f"{home}/mine")
    found = list(domains.domains(asked, opened))
    assert [finding.about for finding in found] == [f"cache {domain.name}" for domain in VLLM]
    assert {finding.severity for finding in found} == {"ok"}
    mine = about(found, "cache triton").what
    assert mine.startswith(f"{home}/mine (TRITON_CACHE_DIR from the environment; ")
    assert f"user {os.geteuid()}, mode 0" in mine
    assert "free" in mine
    assert "pinned for each key" in about(found, "cache inductor").what
    assert "default, VLLM_CACHE_ROOT is not set" in about(found, "cache torch_compile").what


@pytest.mark.skipif(os.geteuid() != 0, reason="directories are given to another user")
def test_what_the_serving_user_could_not_write_is_an_error_with_the_directory_in_the_way(home: Path) -> None:
    asked, opened = patient(home, uid=12345)
    found = list(domains.domains(asked, opened))
    assert {finding.severity for finding in found} == {"error"}
    assert found[0].what.startswith("user 12345 cannot write ")
    assert "chown 12345 /" in found[0].hint
    for place in (home, *home.parents):
        if str(place).startswith(("/tmp", "/var", "/private")) and place != Path("/tmp"):
            os.chmod(place, 0o755)
    root = home / ".cache"
    root.mkdir()
    os.chown(root, 12345, 12345)
    assert about(list(domains.domains(asked, opened)), "cache torch_compile").severity == "ok"


@pytest.mark.parametrize(
    ("mode", "owner", "group", "uid", "writes"),
    [
        (0o700, 12345, 0, 12345, True),
        (0o700, 0, 0, 12345, False),
        (0o770, 0, 12345, 12345, True),
        (0o775, 0, 54321, 12345, False),
        (0o777, 0, 54321, 12345, True),
        (0o070, 12345, 12345, 12345, False),
        (0o000, 0, 0, 0, True),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="directories are given to another user")
def test_modes_are_read_as_the_kernel_does(
    tmp_path: Path, mode: int, owner: int, group: int, uid: int, writes: bool
) -> None:
    """The kernel is asked as well: a child becomes that user and tries."""
    for place in (tmp_path, *tmp_path.parents):
        if str(place) != "/" and place.stat().st_uid == os.geteuid():
            place.chmod(place.stat().st_mode | 0o011)
    place = tmp_path / "place"
    place.mkdir()
    os.chown(place, owner, group)
    place.chmod(mode)
    assert may_write(str(place), uid) is writes
    assert (missing_way(str(place), uid) == "") is writes
    pid = os.fork()
    if pid == 0:
        os.setgroups([uid])
        os.setgid(uid)
        os.setuid(uid)
        os._exit(0 if os.access(place, os.W_OK | os.X_OK) else 1)
    assert (os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0) is writes


def test_little_room_and_a_cache_in_memory_are_said(home: Path, small_disk: MakeDisk) -> None:
    disk = small_disk(8 << 20)
    asked, opened = patient(home, VLLM_CACHE_ROOT=f"{disk}/vllm")
    found = about(list(domains.domains(asked, opened)), "cache torch_compile")
    assert (found.severity, "MB are free" in found.what) == ("warning", True)
    (memory,) = domains.memory(asked, opened)
    assert "is on tmpfs: it counts as memory" in memory.what


def test_a_store_or_a_home_without_room_is_said(home: Path, small_disk: MakeDisk) -> None:
    disk = small_disk(8 << 20)
    asked, opened = patient(home, CACHEMGR_STORE=f"{disk}/store", CACHEMGR_HOME=f"{disk}/home")
    for check, variable in ((store.local_store, "CACHEMGR_STORE"), (store.home, "CACHEMGR_HOME")):
        (found,) = [each for each in check(asked, opened) if each.severity == "warning"]
        assert re.match(r"8\.\d MB are free on the file system of ", found.what)
        assert variable in found.hint
    asked, opened = patient(home)
    assert not [each for each in store.home(asked, opened) if each.severity == "warning"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system is mounted")
def test_a_cache_root_on_the_layer_of_a_container_goes_with_it(home: Path, small_disk: MakeDisk) -> None:
    """On an overlay, as the root of a container is; a volume in there is none."""
    disk = small_disk(8 << 20)
    for name in ("lower", "upper", "work", "root"):
        (disk / name).mkdir()
    root = disk / "root"
    layers = f"lowerdir={disk}/lower,upperdir={disk}/upper,workdir={disk}/work"
    mounted = subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", str(root)], check=False)
    if mounted.returncode:
        pytest.skip("this kernel mounts no overlay here")
    try:
        asked, opened = patient(home, VLLM_CACHE_ROOT=f"{root}/vllm")
        (found,) = domains.memory(asked, opened)
        assert (found.severity, found.about) == ("note", "VLLM_CACHE_ROOT")
        assert "in the container's own layer, and goes with the container" in found.what
        assert found.hint == "mount a volume there; the store is what lasts"
        (root / "vllm").mkdir()
        subprocess.run(["mount", "--bind", str(home), str(root / "vllm")], check=True)
        try:
            assert not list(domains.memory(asked, opened))
        finally:
            subprocess.run(["umount", str(root / "vllm")], check=True)
    finally:
        subprocess.run(["umount", str(root)], check=True)


def test_two_caches_in_one_directory_are_said(home: Path) -> None:
    asked, opened = patient(home, TRITON_CACHE_DIR=f"{home}/one", TORCHINDUCTOR_CACHE_DIR=f"{home}/one")
    (found,) = domains.conflicts(asked, opened)
    assert (found.severity, found.about) == ("warning", "cache triton")
    assert "is the directory of inductor as well" in found.what


def test_who_uses_what_and_what_the_dead_left(home: Path) -> None:
    asked, opened = patient(home)
    store = opened.cache.store
    key = add(store, home / "live", "a")
    own = home / ".cache/vllm/cachemgr" / folder(key)
    Hold.take(str(own), Holder("launch-1", "warm", this_process()))
    Lease.take(store, {key}, "launch-1", "host")
    (holder,) = use.holders(asked, opened)
    assert f"launch launch-1 (process {os.getpid()}, warm) uses {own}" == holder.what
    (lease,) = use.leased(asked, opened)
    assert lease.what == f"launch launch-1 on host (process {os.getpid()}) uses {key[:12]}"
    assert list(use.debris(asked, opened)) == []
    trees.write(own / "triton", {"tmp.pid_999999999_ab/kernel.cubin": b"half"})
    assert list(use.debris(asked, opened)) == [], "a launch holds it"
    trees.write(own.with_name(f"{folder(key)}.launch-0"), {"triton/x": b"half"})
    assert list(use.debris(asked, opened)) == [], "what it started may run on"
    os.utime(own.with_name(f"{folder(key)}.launch-0"), (NOW - 7200, NOW - 7200))
    (left,) = use.debris(asked, opened)
    assert "its launch launch-0 is gone" in left.what
    assert left.hint == "cachemgr prune --live"
    shutil.rmtree(own.with_name(f"{folder(key)}.launch-0"))
    killed = opened.cache.home / "prewarm" / "launch-2"
    trees.write(killed / "triton", {"x": b"half"})
    os.utime(killed, (NOW - 7200, NOW - 7200))
    (left,) = use.debris(asked, opened)
    assert left.what.endswith("launch-2: the command that made it for a start was killed")
    assert [finding.severity for finding in use.locks(asked, opened)] == ["ok"]
    assert not list((home / ".cache/cachemgr/locks").glob("*"))


def test_pins_that_keep_nothing_or_too_much_are_said(home: Path) -> None:
    asked, opened = patient(home, CACHEMGR_BUDGET="3kB")
    store = opened.cache.store
    pins.put(store, add(store, home / "live", "a"), Pin("me", "2026-01-01T00:00:00Z"))
    pins.put(store, add(store, home / "live", "b"), Pin("me", "2026-01-01T00:00:00Z", until="2026-01-01T00:00:00Z"))
    pins.put(store, key_of("gone"), Pin("me", "2026-01-01T00:00:00Z"))
    said = {finding.what.split(" ", 1)[1]: finding.severity for finding in use.pinned(asked, opened)}
    assert said["is pinned by me until 2026-01-01T00:00:00Z, which has ended"] == "note"
    assert said["is pinned by me, and is not in the store"] == "note"
    assert "warning" in said.values()


def test_what_is_installed_is_told(home: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python").symlink_to(sys.executable)
    asked, _opened = patient(
        home, PATH=f"{tools}:{os.environ['PATH']}", PYTHONPATH=install_stand_in(tmp_path)["PYTHONPATH"]
    )
    said = [finding.what for finding in machine.versions(asked)]
    assert any(line.startswith("torch 2.13.0+cpu, Python ") and line.endswith("on cpu") for line in said), said
    nothing, _opened = patient(home, PATH=str(tmp_path / "nowhere"))
    assert [finding.severity for finding in machine.versions(nothing)] == ["ok", "note"]


def test_another_version_beside_the_engine_is_said(home: Path, tmp_path: Path) -> None:
    site = Path(install_stand_in(tmp_path)["PYTHONPATH"])
    info = site / "cachemgr-0.0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cachemgr\nVersion: 0.0.9\n")
    asked, opened = patient(home, PYTHONPATH=str(site))
    import msgspec

    asked = msgspec.structs.replace(asked, argv=(sys.executable, "-c", ""))
    (found,) = plugin.shim(asked, opened)
    assert found.severity == "warning"
    assert "0.0.9 is installed in" in found.what


def test_the_doctor_takes_a_user(tmp_path: Path) -> None:
    one = Fleet(tmp_path).machine("one")
    document = one.json("doctor", "--user", "12345", code=1)
    assert any(each["what"].startswith("user 12345 cannot write") for each in document["findings"])
