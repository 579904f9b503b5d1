"""Nothing breaks a start: dead stores, locks that lie, damage on both sides, odd places, foreign users, full disks.

Each test starts the real command on a real file system; the engine always starts, its exit code is its own, and what
went wrong is said.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import preload, trees
from tests.machines import Fleet, Machine

pytestmark = pytest.mark.slow

PYTHON = sys.executable
ROOT = Path(__file__).parent.parent
MakeDisk = Callable[[int], Path]


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def live_of(machine: Machine, report: dict[str, Any]) -> Path:
    key: str = report["key"]
    return Path(machine.cachemgr("dir", "--live").stdout.strip()) / key.replace(":", "-")


# A store that does not answer.


def test_a_store_that_hangs_costs_the_deadline_once_and_is_then_left_alone(fleet: Fleet) -> None:
    hanging = preload.misbehaving("opens hang", fleet.directory) | {"HANGING_PATH": str(fleet.directory / "store")}
    machine = fleet.machine("one", **hanging)
    begun = time.monotonic()
    first = machine.run(*fleet.command("f"), options=("--deadline", "1.5"))
    assert time.monotonic() - begun < 12
    assert first["exit_code"] == 0
    assert "compiled f" in first["stderr"]
    assert "took longer than" in first["stderr"]
    second = machine.run(*fleet.command("f"), options=("--deadline", "1.5"))
    assert second["errors"] == {"store left alone": 1}, "not asked again"
    assert "left alone for" in second["stderr"]
    (rest,) = (machine.home / ".cache" / "cachemgr" / "rest").iterdir()
    os.utime(rest, (1, 1))
    healed = fleet.machine("one").run(*fleet.command("f"))
    assert healed["errors"] == {}
    assert healed["published"] is not None


def test_a_file_that_takes_longer_than_the_deadline_to_read_does_not_keep_the_command(fleet: Fleet) -> None:
    machine, words = fleet.machine("one"), fleet.command("f")
    first = machine.run(*words)
    (entry,) = (live_of(machine, first) / "inductor" / "aotautograd").iterdir()
    with open(entry / "huge", "wb") as file:
        file.truncate(1 << 42)
    begun = time.monotonic()
    second = machine.run(*words, options=("--deadline", "2"))
    assert time.monotonic() - begun < 30
    assert second["exit_code"] == 0
    assert "machine code of f" in second["stdout"]
    assert "the deadline has passed while `" in second["stderr"]
    assert second["errors"]["deadline"] >= 1


# Locks that lie, and many at once.


@pytest.mark.parametrize("locks", [None, "flock does nothing", "flock is missing", "flock finds no locks"])
def test_eight_cold_launches_on_one_root_leave_one_warm_artifact(fleet: Fleet, locks: str | None) -> None:
    variables = {} if locks is None else preload.misbehaving(locks, fleet.directory)
    machine = fleet.machine("one", NOISE="1", **variables)
    machine.make_places()
    words = ("run", "--", *fleet.command("f", "sleep=0.3", "g", "h"))
    racing = [machine.start(*words) for _each in range(8)]
    for process in racing:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.count("machine code of") == 3
    calm = fleet.machine("two", NOISE="1")
    later = calm.run(*fleet.command("f", "sleep=0.3", "g", "h"))
    assert (later["result"], later["verdict"], later["added"]["inductor"]) == ("exact", "used", 0)
    live = Path(machine.cachemgr("dir", "--live").stdout.strip())
    assert [entry.name for entry in live.iterdir() if "." in entry.name] == [], "private directories are gone"


def test_launches_of_different_keys_at_once_do_not_meet(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    machine.make_places()
    racing = [machine.start("run", "--", *fleet.command("f", f"g{number}")) for number in range(8)]
    for process in racing:
        _out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert len(machine.json("ls")["artifacts"]) == 8
    for number in range(8):
        warm = fleet.machine("two").run(*fleet.command("f", f"g{number}"))
        assert (warm["result"], warm["added"]["inductor"]) == ("exact", 0)


def test_eight_warm_launches_share_one_directory(fleet: Fleet) -> None:
    fleet.machine("one").run(*fleet.command("f", "sleep=0.5"))
    machine = fleet.machine("two")
    machine.make_places()
    words = fleet.command("f", "sleep=0.5")
    racing = [machine.start("run", "--report", f"{number}.json", "--", *words) for number in range(8)]
    for process in racing:
        _out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    reports = [json.loads((machine.root / f"{number}.json").read_text()) for number in range(8)]
    assert {report["result"] for report in reports} == {"exact"}
    assert sum(report["added"]["inductor"] for report in reports) == 0
    assert sum(report["restored_files"] for report in reports) == 1, "restored once, in place for the others"


# Long-lived commands.


def test_a_command_that_runs_on_is_captured_after_its_ready_sign(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    ready = fleet.directory / "ready"
    process = machine.start("run", "--ready-file", str(ready), "--", *fleet.command("f", "sleep=60"))
    assert process.stdout is not None
    while process.stdout.readline() != "sleeping\n":
        pass
    ready.touch()
    end = time.monotonic() + 40
    while not machine.json("ls")["artifacts"]:
        assert time.monotonic() < end, "never captured"
        time.sleep(0.5)
    (artifact,) = machine.json("ls")["artifacts"]
    assert artifact["complete"]
    process.kill()
    process.communicate()
    other = fleet.machine("two")
    assert other.json("lookup", "--", *fleet.command("f", "sleep=60"))["result"] == "exact"
    subprocess.run(["pkill", "-f", str(fleet.program)], check=False)


# Damage in the store.


def layer_of(machine: Machine) -> Path:
    (path,) = (machine.store / "layers").rglob("*.zst")
    return path


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_layer_is_refused_quarantined_and_replaced(fleet: Fleet, damage: str) -> None:
    fleet.machine("one").run(*fleet.command("f", "g"))
    machine = fleet.machine("two")
    path = layer_of(machine)
    good = path.read_bytes()
    middle = len(good) // 2
    path.write_bytes(
        {"cut": good[:middle], "flipped": good[:middle] + b"\x99" + good[middle + 1 :], "empty": b""}[damage]
    )
    hurt = machine.run(*fleet.command("f", "g"))
    assert (hurt["verdict"], hurt["restored_files"], hurt["added"]["inductor"]) == ("cold", 0, 2)
    assert any("other bytes than its name says" in reason for reason in hurt["reasons"])
    assert hurt["published"] is not None, "what it had is published again"
    assert len(list((machine.store / "quarantine").glob("*/*.json"))) == 1
    healed = fleet.machine("three").run(*fleet.command("f", "g"))
    assert (healed["result"], healed["verdict"], healed["added"]["inductor"]) == ("exact", "used", 0)
    assert not [reason for reason in healed["reasons"] if "other bytes" in reason], "said once, not for ever"


def test_a_damaged_manifest_is_said_once(fleet: Fleet) -> None:
    first = fleet.machine("one").run(*fleet.command("f"))
    (manifest,) = (fleet.directory / "store" / "artifacts").rglob("*.zst")
    manifest.write_bytes(manifest.read_bytes()[:-5])
    hurt = fleet.machine("two").run(*fleet.command("f"))
    assert hurt["verdict"] == "cold"
    assert any("damaged capture" in reason for reason in hurt["reasons"])
    healed = fleet.machine("three").run(*fleet.command("f"))
    assert (healed["key"], healed["result"], healed["verdict"]) == (first["key"], "exact", "used")
    assert not any("damaged" in reason for reason in healed["reasons"])


# Damage in the live directory.


def test_a_damaged_unit_is_set_aside_before_the_start_and_restored(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    first = machine.run(*fleet.command("f", "g"))
    live = live_of(machine, first)
    victim = next(live.rglob("aotautograd/*/*"))
    victim.write_bytes(victim.read_bytes()[:-3])
    again = machine.run(*fleet.command("f", "g"))
    assert (again["verdict"], again["restored_files"], again["present_files"]) == ("used", 1, 1)
    assert "set aside inductor aotautograd/" in again["stderr"]
    assert "has other bytes than its name says" in again["stderr"]
    assert again["exit_code"] == 0


@pytest.mark.parametrize(
    ("path", "data", "said"),
    [
        ("inductor/ab/cab.so", b"\x7fELF cut", "is no ELF file"),
        ("inductor/ab/cab.so", trees.elf("x")[:-20], "is cut off"),
        ("inductor/ab/cab.py", b"def broken(:\n", "is no complete Python file"),
        ("inductor/cache/44136", b'{"half": ', "is no complete JSON"),
        ("triton/KERNEL/__grp__add.json", b'{"child_paths": {', "is no complete JSON"),
        ("triton/KERNEL/cuda_utils.so", b"", "is no ELF file"),
        ("triton/KERNEL/add.cubin", trees.elf("x"), "has a binary and no group file"),
        ("triton/KERNEL/add.ptx", b"", "is empty"),
    ],
)
def test_every_kind_of_damage_is_found(fleet: Fleet, path: str, data: bytes, said: str) -> None:
    machine = fleet.machine("one")
    first = machine.run(*fleet.command("f"))
    live = live_of(machine, first)
    trees.write(live, {path: data})
    again = machine.run(*fleet.command("f"))
    assert said in again["stderr"]
    assert not (live / path).exists()
    assert [found.read_bytes() for found in live.rglob(f"*aside*/**/{Path(path).name}")] == [data], "kept as evidence"
    assert again["verdict"] == "used"
    quiet = machine.run(*fleet.command("f"))
    assert "set aside" not in quiet["stderr"]


def test_left_overs_of_dead_writers_are_set_aside_when_they_are_old(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    live = live_of(machine, machine.run(*fleet.command("f")))
    trees.write(live, {"triton/K/tmp.pid_9_ab/add.ptx": b"half", "inductor/ab/.7.8.tmp": b"half"})
    trees.write(live, {"triton/K/tmp.pid_77_cd/add.ptx": b"young"}, old=False)
    again = machine.run(*fleet.command("f"))
    assert again["stderr"].count("was left by a writer that died") == 2
    assert (live / "triton/K/tmp.pid_77_cd/add.ptx").exists(), "its writer may be alive"


def test_a_damaged_unit_that_a_live_launch_holds_stays_and_the_launch_goes_elsewhere(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    words = fleet.command("f", "sleep=20")
    machine.make_places()
    fleet.machine("zero").cachemgr("run", "--", *fleet.command("f", "sleep=0"), code=0)
    holder = machine.start("run", "--", *words)
    assert holder.stdout is not None
    while holder.stdout.readline() != "sleeping\n":
        pass
    live = Path(machine.cachemgr("dir", "--live").stdout.strip())
    (victim,) = live.rglob("aotautograd/*/*")
    victim.write_bytes(b"damaged")
    second = machine.start("run", "--", *fleet.command("f", "sleep=20"))
    assert second.stdout is not None
    while second.stdout.readline() != "sleeping\n":
        pass
    assert victim.read_bytes() == b"damaged", "not ours to move"
    assert len({path.parts[len(live.parts)] for path in live.rglob("aotautograd")}) == 2
    for process in (holder, second):
        process.terminate()
        process.communicate(timeout=30)


def test_a_crash_of_the_launch_leaves_no_holder_behind(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    process = machine.start("run", "--", *fleet.command("f", "sleep=2"))
    assert process.stdout is not None
    while process.stdout.readline() != "sleeping\n":
        pass
    process.kill()
    process.wait()
    process.communicate()
    report = machine.run(*fleet.command("f", "sleep=2"))
    live = Path(machine.cachemgr("dir", "--live").stdout.strip())
    assert [entry.name for entry in live.iterdir()] == [report["key"].replace(":", "-")], "the same place again"
    assert report["added"]["inductor"] == 0, "what the killed launch compiled was there"
    assert report["published"] is not None, "and is captured now"


# Places.


@pytest.mark.parametrize("name", ["with space", "quo'te\"s", "ünïcödé", "dollar$HOME", "-dash"])
def test_roots_of_any_name_work(fleet: Fleet, name: str) -> None:
    odd = fleet.directory / name
    odd.mkdir()
    store = str(odd / "store")
    cold = Machine(odd / "one", odd / "store", fleet.variables).run(*fleet.command("f"))
    warm = Machine(odd / "two", odd / "store", fleet.variables).run(*fleet.command("f"))
    assert (cold["verdict"], warm["verdict"]) == ("cold", "used")
    assert Path(store).is_dir()


def test_a_symbolic_link_as_root_is_followed(fleet: Fleet) -> None:
    real = fleet.directory / "real"
    real.mkdir()
    (fleet.directory / "link").symlink_to(real)
    root = str(fleet.directory / "link" / "vllm")
    fleet.machine("one").run(*fleet.command("f"))
    warm = fleet.machine("two", VLLM_CACHE_ROOT=root).run(*fleet.command("f"))
    assert warm["verdict"] == "used"
    assert (real / "vllm" / "cachemgr").is_dir()


@pytest.mark.parametrize("umask", ["000", "077"])
def test_any_umask_works_and_nothing_becomes_writable_for_all(fleet: Fleet, umask: str) -> None:
    machine = fleet.machine("one")
    machine.make_places()
    words = [PYTHON, "-m", "cachemgr", "run", "--", *fleet.command("f")]
    shell = ["sh", "-c", f'umask {umask}; exec "$@"', "sh", *words]
    subprocess.run(shell, env=machine.environ, cwd=machine.root, check=True, capture_output=True)
    subprocess.run(shell, env=machine.environ, cwd=machine.root, check=True, capture_output=True)
    ours = [machine.store, machine.home / ".cache" / "cachemgr"]
    open_to_all = [path for root in ours for path in root.rglob("*") if path.stat().st_mode & 0o002]
    assert open_to_all == []


def test_home_unset_or_root_is_no_obstacle(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    environ = {name: value for name, value in machine.environ.items() if name != "HOME"}
    done = subprocess.run(
        [PYTHON, "-m", "cachemgr", "run", "--", *fleet.command("f")],
        env=environ | {"VLLM_CACHE_ROOT": str(machine.root / "v"), "CACHEMGR_HOME": str(machine.root / "h")},
        cwd=machine.root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "captured 1 file" in done.stderr


class Nobody:
    """A user without a name or a home, and a Python that such a user can run."""

    def __init__(self) -> None:
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            pytest.skip("becoming another user needs root and setpriv")
        self.words = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups", "--"]
        self.path = os.pathsep.join(
            entry for entry in (str(ROOT), *sys.path) if "site-packages" in entry or entry == str(ROOT)
        )
        candidates = (PYTHON, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
        self.python = next((python for python in candidates if self._can_run(python)), "")
        if not self.python:
            pytest.skip("another user can run no Python of this version")

    def _can_run(self, python: str) -> bool:
        # The shell is there because the first program still has what root may do.
        shell = ["sh", "-c", 'exec "$0" -c "import cachemgr.launch"', python]
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": self.path}
        return not subprocess.run([*self.words, *shell], env=environ, capture_output=True, check=False).returncode

    def run(self, machine: Machine, *words: str, program: str, **more: str) -> "subprocess.CompletedProcess[str]":
        """`cachemgr run -- PYTHON PROGRAM WORDS` as this user; the report is `r.json` in the machine's TMPDIR."""
        machine.make_places()
        machine.tmp.chmod(0o777)
        report = str(machine.tmp / "r.json")
        path = f"{machine.variables['PYTHONPATH']}:{self.path}"
        done = subprocess.run(
            [*self.words, self.python, "-m", "cachemgr", "run", "--report", report, "--", self.python, program, *words],
            env={**machine.environ, "PYTHONPATH": path, **more},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done


@pytest.fixture
def nobody() -> Nobody:
    return Nobody()


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that every user may enter, unlike pytest's own."""
    made = Path(tempfile.mkdtemp(prefix="cachemgr-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def as_nobody_sees(nobody: Nobody, owner: Machine, fleet: Fleet, *words: str) -> dict[str, Any]:
    """A launch by root whose factors are those of the other user's."""
    path = f"{owner.variables['PYTHONPATH']}:{nobody.path}"
    return owner.run(nobody.python, fleet.program, *words, PYTHONPATH=path)


def test_an_unknown_user_without_a_home_works_in_a_private_spare_directory(reachable: Path, nobody: Nobody) -> None:
    fleet = Fleet(reachable)
    machine = Machine(reachable / "one", reachable / "no" / "store", fleet.variables)
    done = nobody.run(machine, "f", program=fleet.program, HOME="/", CACHEMGR_STORE="")
    assert "cannot be written, so" in done.stderr
    spare = machine.tmp / "cachemgr-12345"
    assert spare.stat().st_mode & 0o777 == 0o700
    again = nobody.run(machine, "f", program=fleet.program, HOME="/", CACHEMGR_STORE="")
    report = json.loads((machine.tmp / "r.json").read_text())
    assert report["verdict"] == "used", again.stderr


def test_a_home_of_somebody_else_that_is_closed_is_no_obstacle(reachable: Path, nobody: Nobody) -> None:
    fleet = Fleet(reachable)
    closed = reachable / "root"
    closed.mkdir(mode=0o700)
    machine = Machine(reachable / "one", reachable / "no" / "store", fleet.variables)
    done = nobody.run(machine, "f", program=fleet.program, HOME=str(closed), CACHEMGR_STORE="")
    assert f"{closed}/.cache/cachemgr cannot be written, so" in done.stderr
    assert json.loads((machine.tmp / "r.json").read_text())["verdict"] == "cold"


def test_a_store_of_another_user_is_read_and_not_written(reachable: Path, nobody: Nobody) -> None:
    fleet = Fleet(reachable)
    owner = Machine(reachable / "owner", reachable / "store", fleet.variables)
    as_nobody_sees(nobody, owner, fleet, "f")
    for path in (owner.store, *owner.store.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    machine = Machine(reachable / "one", owner.store, fleet.variables)
    before = trees.state(owner.store)
    nobody.run(machine, "f", program=fleet.program, HOME=str(machine.tmp))
    report = json.loads((machine.tmp / "r.json").read_text())
    assert (report["result"], report["verdict"]) == ("exact", "used")
    assert trees.state(owner.store) == before


def test_a_private_store_of_another_user_is_said_and_the_start_goes_on(reachable: Path, nobody: Nobody) -> None:
    fleet = Fleet(reachable)
    owner = Machine(reachable / "owner", reachable / "store", fleet.variables)
    as_nobody_sees(nobody, owner, fleet, "f")
    machine = Machine(reachable / "one", owner.store, fleet.variables)
    done = nobody.run(machine, "f", program=fleet.program, HOME=str(machine.tmp))
    assert "Permission denied" in done.stderr
    assert "compiled f" in done.stderr


def test_unreadable_captures_of_another_user_do_not_hide_readable_ones(reachable: Path, nobody: Nobody) -> None:
    fleet = Fleet(reachable)
    owner = Machine(reachable / "owner", reachable / "store", fleet.variables)
    as_nobody_sees(nobody, owner, fleet, "f")
    hidden = as_nobody_sees(nobody, owner, fleet, "f", "other")
    for path in (owner.store, *owner.store.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (manifest,) = (owner.store / "artifacts" / hidden["key"].replace(":", "-")).glob("*.zst")
    manifest.chmod(0o600)
    machine = Machine(reachable / "one", owner.store, fleet.variables)
    nobody.run(machine, "f", "third", program=fleet.program, HOME=str(machine.tmp))
    report = json.loads((machine.tmp / "r.json").read_text())
    assert report["result"] == "near", report["reasons"]


def test_a_read_only_live_root_is_replaced_and_said(reachable: Path, nobody: Nobody) -> None:
    fleet = Fleet(reachable)
    root = reachable / "read-only"
    root.mkdir(mode=0o555)
    machine = Machine(reachable / "one", reachable / "one" / "tmp" / "store", fleet.variables)
    variables = {"HOME": str(machine.tmp), "VLLM_CACHE_ROOT": str(root)}
    done = nobody.run(machine, "f", program=fleet.program, **variables)
    assert f"{root} cannot be written, so" in done.stderr
    nobody.run(machine, "f", program=fleet.program, **variables)
    assert json.loads((machine.tmp / "r.json").read_text())["verdict"] == "used"


def test_nowhere_to_write_means_off_and_said(reachable: Path, nobody: Nobody) -> None:
    fleet = Fleet(reachable)
    machine = Machine(reachable / "one", reachable / "none" / "store", fleet.variables)
    machine.make_places()
    (machine.tmp / "r.json").touch()
    elsewhere = {"HOME": "/", "TMPDIR": "/proc/nowhere", "TORCHINDUCTOR_CACHE_DIR": str(machine.tmp)}
    done = nobody.run(machine, "f", program=fleet.program, **elsewhere)
    assert "no directory can be written" in done.stderr
    assert "compiled f" in done.stderr


def test_an_open_mount_root_is_normal(fleet: Fleet) -> None:
    root = fleet.directory / "emptydir"
    root.mkdir()
    root.chmod(0o777)
    fleet.machine("one").run(*fleet.command("f"))
    assert fleet.machine("two", VLLM_CACHE_ROOT=str(root)).run(*fleet.command("f"))["verdict"] == "used"


def in_a_namespace(script: str) -> list[str]:
    """Words that run SCRIPT with its arguments in a mount namespace of its own, where this user may make one."""
    words = ["unshare", "--mount", "sh", "-c"]
    if subprocess.run([*words, "mount -t tmpfs tmpfs /mnt"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us mount anything")
    return [*words, script]


def test_a_store_on_a_read_only_mount_is_read(fleet: Fleet) -> None:
    fleet.machine("one").run(*fleet.command("f"))
    machine = fleet.machine("two")
    machine.make_places()
    bind = f'mount --bind "{machine.store}" "{machine.store}"'
    script = f'{bind} && mount -o remount,ro,bind "{machine.store}" && exec "$0" "$@"'
    words = [*in_a_namespace(script), PYTHON, "-m", "cachemgr", "run", "--report", "r.json", "--", *fleet.command("f")]
    done = subprocess.run(words, env=machine.environ, cwd=machine.root, capture_output=True, text=True, check=False)
    report = json.loads((machine.root / "r.json").read_text())
    assert (done.returncode, report["result"], report["verdict"]) == (0, "exact", "used"), done.stderr
    assert report["errors"] == {"recording": 1}
    assert "Read-only file system" in done.stderr


def test_a_live_root_on_a_network_moves_to_local_scratch(fleet: Fleet) -> None:
    """The mount table of the launch says that its root is on NFS; everything else is as it is."""
    fleet.machine("one").run(*fleet.command("f"))
    root = fleet.directory / "network"
    root.mkdir()
    table = fleet.directory / "mountinfo"
    table.write_text(
        "22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n"
        f"30 22 0:26 / {root} rw shared:2 - nfs4 server:/export rw,vers=4.2\n"
    )
    machine = fleet.machine("two", VLLM_CACHE_ROOT=str(root))
    machine.make_places()
    words = in_a_namespace(f'mount --bind "{table}" /proc/$$/mountinfo && exec "$0" "$@"')
    command = [PYTHON, "-m", "cachemgr", "run", "--report", "r.json", "--", *fleet.command("f")]
    done = subprocess.run(
        [*words, *command], env=machine.environ, cwd=machine.root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"{root} is on nfs4, so {machine.tmp}/cachemgr-" in done.stderr
    assert json.loads((machine.root / "r.json").read_text())["verdict"] == "used"
    assert list(root.iterdir()) == []


# Full disks.


def test_a_full_disk_under_the_store_is_said_and_leaves_nothing_half(fleet: Fleet, small_disk: MakeDisk) -> None:
    disk = small_disk(64 << 10)
    machine = Machine(fleet.directory / "one", disk / "store", fleet.variables)
    machine.run(*fleet.command("f"))
    (disk / "ballast").write_bytes(os.urandom(1 << 20)[: _free(disk)])
    report = machine.run(*fleet.command("f", "g"))
    assert report["exit_code"] == 0
    assert report["published"] is None
    assert "No space left" in report["stderr"]
    assert "hint: free space" in machine.cachemgr("run", "--strict", "--", *fleet.command("h"), code=125).stderr
    (disk / "ballast").unlink()
    assert len(machine.json("ls")["artifacts"]) == 1
    assert machine.run(*fleet.command("f", "g"))["published"] is not None


def _free(disk: Path) -> int:
    space = os.statvfs(disk)
    return space.f_bavail * space.f_frsize


def test_a_full_disk_under_the_live_root_starts_cold_and_says_why(fleet: Fleet, small_disk: MakeDisk) -> None:
    fleet.machine("one").run(*fleet.command("f"))
    disk = small_disk(1 << 20)
    report = fleet.machine("two", VLLM_CACHE_ROOT=str(disk)).run(*fleet.command("f"))
    assert (report["exit_code"], report["restored_files"]) == (0, 0)
    assert any("no space on the file system" in reason for reason in report["reasons"])


def test_a_disk_without_inodes_starts_cold_and_says_why(fleet: Fleet) -> None:
    if os.geteuid() != 0:
        pytest.skip("this user cannot mount a file system")
    place = fleet.directory / "disk"
    place.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=200m,nr_inodes=40", "tmpfs", str(place)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a file system")
    try:
        fleet.machine("one").run(*fleet.command("f"))
        report = fleet.machine("two", VLLM_CACHE_ROOT=str(place)).run(*fleet.command("f"))
        assert any("no inodes on the file system" in reason for reason in report["reasons"])
        assert report["exit_code"] == 0
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_live_root_on_tmpfs_works(fleet: Fleet, small_disk: MakeDisk) -> None:
    fleet.machine("one").run(*fleet.command("f"))
    disk = small_disk(200 << 20)
    assert fleet.machine("two", VLLM_CACHE_ROOT=str(disk)).run(*fleet.command("f"))["verdict"] == "used"
