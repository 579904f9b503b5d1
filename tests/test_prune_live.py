"""Pruning live directories: what a launch holds or a process has open stays, nothing is half gone, no root is left."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from cachemgr import live, open_files
from cachemgr.domains import TABLE, Domain, Target, of_engine
from cachemgr.domains.vllm import TORCH_COMPILE
from cachemgr.history import LastUses
from cachemgr.hold import FOLDER, Hold, Holder
from cachemgr.key import folder
from cachemgr.live import Claim
from cachemgr.process import this_process
from cachemgr.prune.limits import Limits
from cachemgr.prune.live import LivePlan, plan
from cachemgr.prune.taking import carry_out
from tests import trees
from tests.conftest import MakeDisk
from tests.kills import killed_at_every_step
from tests.pruning import key_of

NOW = time.time()
DAY = 86400.0


class Place:
    """One root with its directories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shared = Target(TORCH_COMPILE, f"{root}/torch_compile_cache", ours=False)

    def own(self, name: str, *, days: float = 3, launch: str = "") -> Path:
        """The directory of a key with one kernel, last used so many days ago."""
        directory = self.root / "cachemgr" / (folder(key_of(name)) + (f".{launch}" if launch else ""))
        trees.triton_kernel(directory / "triton", name)
        self.age(directory, days)
        return directory

    def entries(self, *, days: float = 3) -> list[str]:
        """What vLLM wrote into the directory that all launches share; the names of its units."""
        trees.torch_compile(self.shared.directory)
        for path in Path(self.shared.directory).rglob("*.tmp"):
            path.unlink()
        self.age(Path(self.shared.directory), days)
        return [trees.TEN_HEX, f"torch_aot_compile/{trees.AOT_NAME}"]

    @staticmethod
    def age(directory: Path, days: float) -> None:
        for path in (directory, *directory.rglob("*")):
            os.utime(path, (NOW - days * DAY,) * 2, follow_symlinks=False)

    def plan(self, limits: Limits | None = None, **more: object) -> LivePlan:
        arguments = {"uses": LastUses(), "now": NOW, **more}
        return plan([str(self.root)], [self.shared], limits or Limits(), **arguments)  # type: ignore[arg-type]

    def prune(self, limits: Limits | None = None, **more: object) -> LivePlan:
        return carry_out(self.plan(limits, **more), prune="prune-1", now=NOW)

    def holding(self, directory: Path, launch: str = "launch-1", sight: str | None = None) -> Hold:
        return Hold.take(str(directory), Holder(launch, "warm", this_process(), sight))


@pytest.mark.parametrize("domain", [each for each in TABLE if not each.in_place], ids=lambda domain: domain.name)
def test_of_a_home_that_somebody_chose_for_a_cache_nothing_goes(domain: Domain, tmp_path: Path) -> None:
    home = tmp_path / "home"
    trees.write_home(home)
    Place.age(home, 90)
    shared = [Target(domain, str(home), ours=False)]
    limits = Limits(max_size=0, max_files=0, unused_for=DAY)
    assert plan([], shared, limits, uses=LastUses(), covered=(), now=NOW).goners == ()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "vllm")


@contextmanager
def reader(path: Path, *, mapped: bool = False) -> Iterator[int]:
    """A process that has a file open, or only mapped."""
    code = "import mmap,sys,time\nf=open(sys.argv[1],'rb')\n"
    code += "m=mmap.mmap(f.fileno(),0,prot=mmap.PROT_READ)\nf.close()\n" if mapped else ""
    child = subprocess.Popen(
        [sys.executable, "-c", code + "print('open',flush=True)\ntime.sleep(600)", str(path)], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def du(path: Path) -> int:
    done = subprocess.run(["du", "-s", "-B1", "--apparent-size", str(path)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def test_the_least_recently_used_directories_go_by_our_records(place: Place) -> None:
    old, young, used = place.own("old", days=9), place.own("young", days=2), place.own("used", days=30)
    uses = LastUses(keys={key_of("used"): time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW - DAY))})
    before = sum(file.stat().st_blocks * 512 for file in place.root.rglob("*") if file.is_file())
    done = place.prune(Limits(unused_for=5 * DAY), uses=uses)
    assert [gone.path for gone in done.goners] == [old.name]
    after = sum(file.stat().st_blocks * 512 for file in place.root.rglob("*") if file.is_file())
    assert before - after == done.bytes > 0
    assert not old.exists()
    assert young.is_dir()
    assert used.is_dir()
    assert sorted(os.listdir(place.root / "cachemgr")) == sorted([young.name, used.name]), "nothing of ours is left"


def test_planning_changes_nothing(place: Place) -> None:
    own = place.own("a")
    dead = msgspec.structs.replace(this_process(), started="1")
    Hold.take(str(own), Holder("dead", "warm", dead))
    place.entries()
    before = trees.state(place.root)
    assert len(place.plan(Limits(max_size=0)).goners) == 3
    assert trees.state(place.root) == before


def test_what_a_launch_holds_stays(place: Place) -> None:
    own = place.own("a")
    held = place.holding(own)
    done = place.prune(Limits(max_size=0))
    assert done.goners == ()
    assert done.kept[0].kept == "in use by launch launch-1"
    held.release()
    place.age(own, 3)
    assert [gone.path for gone in place.prune(Limits(max_size=0)).goners] == [own.name]


def test_a_launch_that_comes_after_the_plan_keeps_its_directory(place: Place) -> None:
    own = place.own("a")
    planned = place.plan(Limits(max_size=0))
    place.holding(own)
    before = trees.read(own)
    done = carry_out(planned, prune="prune-1", now=NOW)
    assert done.goners == ()
    assert done.bytes == 0
    assert "in use by launch launch-1" in done.kept[0].kept
    assert trees.read(own) == before, "and our own hold is gone"


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_files_that_a_process_has_open_are_left(place: Place, mapped: bool, late: bool) -> None:
    own, other = place.own("a"), place.own("b")
    place.entries()
    graph = next(path for path in Path(place.shared.directory).rglob("*") if path.name == "computation_graph.py")
    planned = place.plan(Limits(max_size=0))
    with (
        reader(next(own.rglob("*.cubin")), mapped=mapped) as pid,
        reader(graph, mapped=mapped),
    ):
        before = trees.read(own)
        done = carry_out(planned, prune="p", now=NOW) if late else place.prune(Limits(max_size=0))
        assert f"process {pid} has " in " ".join(kept.kept for kept in done.kept)
        assert {gone.path for gone in done.goners} == {other.name, f"torch_aot_compile/{trees.AOT_NAME}"}
        assert trees.read(own) == before
        assert graph.exists()


@pytest.mark.parametrize("late", [False, True])
def test_a_record_with_the_inode_of_an_open_file_keeps_nothing(place: Place, tmp_path: Path, late: bool) -> None:
    """Ours may get that of a file which was open when we looked, and has been deleted since; here by a second name."""
    own = place.own("a")
    planned = place.plan(Limits(max_size=0))
    opened, record = tmp_path / "opened", own / FOLDER / "other.json"
    opened.write_bytes(b"of another program")
    record.parent.mkdir()
    os.link(opened, record)
    place.age(own, 3)
    with reader(opened):
        done = carry_out(planned, prune="p", now=NOW) if late else place.prune(Limits(max_size=0))
    assert [gone.path for gone in done.goners] == [own.name]
    assert not own.exists()


def test_a_directory_in_which_a_process_works_is_left(place: Place) -> None:
    """Deep in it, with no file open: what it does next, it does there."""
    own, other = place.own("a"), place.own("b")
    working = next(own.rglob("*.cubin")).parent
    child = subprocess.Popen([sys.executable, "-c", "print(1,flush=True);input()"], cwd=working, stdout=-1, stdin=-1)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        done = place.prune(Limits(max_size=0))
        assert [gone.path for gone in done.goners] == [other.name]
        assert done.kept[0].kept.startswith(f"process {child.pid} has ")
    finally:
        child.kill()
        child.communicate()


def test_what_is_opened_between_the_look_and_the_rename_is_put_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process opens the file, and the first look of the deed is answered as it was before."""
    place.entries()
    before = trees.read(place.shared.directory)
    looks = iter([open_files.look(), open_files.look()])
    real = open_files.look
    monkeypatch.setattr(open_files, "look", lambda: next(looks, None) or real())
    planned = place.plan(Limits(max_size=0))
    index = next(Path(place.shared.directory, trees.TEN_HEX).rglob("vllm_compile_cache.py"))
    with reader(index) as pid:
        done = carry_out(planned, prune="p", now=NOW)
    assert [gone.path for gone in done.goners] == [f"torch_aot_compile/{trees.AOT_NAME}"]
    assert f"process {pid} has" in done.kept[0].kept
    left = trees.read(place.shared.directory)
    assert left == {path: data for path, data in before.items() if path.startswith(trees.TEN_HEX)}


def test_a_launch_that_starts_during_a_prune_gets_directories_of_its_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both for its key and for what all share: at the moment between the look and the rename."""
    own = place.own("a")
    place.entries()
    planned = place.plan(Limits(max_size=0))
    environ = {"VLLM_CACHE_ROOT": str(place.root), "HOME": str(place.root.parent)}
    rooms: list[live.Room] = []
    real = open_files.look

    def look() -> open_files.Opened:
        if not rooms:
            claim = Claim(key_of("b"), "launch-2", "warm", "sight")
            rooms.append(live.enter(environ, of_engine("vllm"), claim, now=NOW, notes=[]))
        return real()

    monkeypatch.setattr(open_files, "look", look)
    done = carry_out(planned, prune="p", now=NOW)
    assert rooms[0].private
    assert len(done.goners) == 3
    assert not own.exists()
    rooms[0].leave(in_use=False)
    assert trees.read(place.root) == {}


def test_what_launches_share_stays_while_one_of_them_lives(place: Place) -> None:
    place.entries()
    other = place.own("b")
    place.holding(place.own("a"), sight="anything")
    done = place.prune(Limits(max_size=0))
    assert [gone.path for gone in done.goners] == [other.name]
    assert {kept.kept for kept in done.kept} == {"in use by launch launch-1"}
    assert len(trees.read(place.shared.directory)) > 5


def test_entries_that_no_artifact_has_go_when_asked_for(place: Place) -> None:
    ten, aot = place.entries()
    covered = {(TORCH_COMPILE.name, ten)}
    assert place.plan(covered=None).goners == ()
    done = place.prune(covered=covered)
    assert [(gone.path, gone.why) for gone in done.goners] == [(aot, "no artifact has it")]
    assert Path(place.shared.directory, ten).is_dir()
    assert not Path(place.shared.directory, aot).exists()
    place.entries(days=0)
    assert place.plan(covered=covered).goners == (), "an engine may be about to publish it"


def test_the_last_use_of_an_entry_is_when_an_engine_looked_it_up(place: Place) -> None:
    ten, aot = place.entries(days=30)
    uses = LastUses(entries={aot.rsplit("/", 1)[-1]: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW - DAY))})
    assert [gone.path for gone in place.plan(Limits(unused_for=5 * DAY), uses=uses).goners] == [ten]


LEFT = {
    "tmp.pid_999999999_0a1b/kernel.cubin": "was left by a writer that died",
    "abc/kernel.json.tmp.pid_999999999_7": "was left by a writer that died",
    "torch_aot_compile/x/rank_0_0/model.999999999.tmp": "was left by a writer that died",
    ".cachemgr-gone-x/unit/file": "a prune was killed here",
    ".cachemgr-aside-launch-0/unit/file": "set aside more than a week ago",
}


@pytest.mark.parametrize("path", LEFT)
def test_what_writers_that_died_left_goes_and_its_neighbours_stay(place: Place, path: str) -> None:
    own = place.own("a")
    trees.write(own / "triton", {path: b"half"})
    kept = {each for each in trees.read(own) if not each.endswith(path)}
    place.age(own, 8)
    done = place.prune()
    assert [(gone.kind, gone.why) for gone in done.goners] == [("left-over", LEFT[path])]
    assert set(trees.read(own)) == kept


@pytest.mark.parametrize(
    ("path", "days"),
    [
        ("tmp.pid_999999999_0a1b/kernel.cubin", 0.02),
        (".staging_0a1b/kernel.so", 0.02),
        (f"tmp.pid_{os.getpid()}_0a1b/kernel.cubin", 0.2),
        (".cachemgr-aside-launch-0/unit/file", 6),
    ],
    ids=["of a process that is gone", "staged", "of a process that lives", "set aside"],
)
def test_what_a_writer_may_still_need_stays(place: Place, path: str, days: float) -> None:
    own = place.own("a")
    trees.write(own / "triton", {path: b"half"})
    place.age(own, days)
    assert place.plan().goners == ()


def test_a_temporary_that_is_open_stays_however_old(place: Place) -> None:
    own = place.own("a")
    trees.write(own / "triton", {".staging_0a1b/kernel.so": b"half"})
    place.age(own, 3)
    with reader(own / "triton/.staging_0a1b/kernel.so"):
        done = place.prune()
    assert done.goners == ()
    assert "has triton/.staging_0a1b/kernel.so open" in done.kept[0].kept


def test_the_directory_of_one_launch_goes_when_that_is_gone(place: Place) -> None:
    gone, held = place.own("a", launch="launch-7"), place.own("a", launch="launch-8")
    place.holding(held, "launch-8")
    done = place.prune()
    assert [each.path for each in done.goners] == [gone.name]
    assert held.is_dir()


def outside(tmp_path: Path) -> Path:
    """Something that is not ours, with a file of the same user in it (diffusers-torchao#31)."""
    trees.triton_kernel(tmp_path / "outside", "precious")
    (tmp_path / "outside" / "agent.sock").write_bytes(b"")
    return tmp_path / "outside"


def test_symbolic_links_are_never_followed(place: Place, tmp_path: Path) -> None:
    precious = outside(tmp_path)
    before = trees.state(precious)
    own = place.own("a")
    (own / "triton" / "link").symlink_to(precious)
    (own / "triton" / "file").symlink_to(precious / "agent.sock")
    (place.root / "cachemgr" / folder(key_of("linked"))).symlink_to(precious)
    place.entries()
    Path(place.shared.directory, "0123456789").symlink_to(precious)
    done = place.prune(Limits(max_size=0))
    assert own.name in {gone.path for gone in done.goners}
    assert trees.state(precious) == before
    assert (place.root / "cachemgr" / folder(key_of("linked"))).is_symlink()
    assert Path(place.shared.directory, "0123456789").is_symlink()


def test_other_file_systems_are_never_entered(place: Place, small_disk: MakeDisk) -> None:
    disk = small_disk(1 << 20)
    trees.triton_kernel(disk, "precious")
    own = place.own("a")
    mounted = own / "triton" / "mounted"
    mounted.mkdir()
    subprocess.run(["mount", "--bind", str(disk), str(mounted)], check=True)
    try:
        before = trees.read(mounted)
        done = place.prune(Limits(max_size=0))
        assert done.goners == ()
        assert "triton/mounted is mounted there" in done.kept[0].kept
        assert trees.read(mounted) == before
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_other_users_are_left(place: Place) -> None:
    own, other = place.own("a"), place.own("b")
    os.chown(next(own.rglob("*.cubin")), 12345, 12345)
    os.chown(other / "triton", 12345, 12345)
    done = place.prune(Limits(max_size=0))
    assert done.goners == ()
    assert {kept.kept.split(" ", 1)[1] for kept in done.kept} >= {"is mounted there or belongs to another user"}
    assert any("belongs to user 12345" in kept.kept for kept in done.kept)
    assert own.is_dir()


def test_what_a_prune_at_work_has_put_aside_is_its_own(place: Place) -> None:
    """It may have to put it back: another one that took it for a left-over would lose it."""
    place.entries()
    aside = place.root / "cachemgr" / ".cachemgr-gone-other"
    held = Hold.take(str(aside), Holder("other", "compiling", this_process(), "prune"))
    trees.write(place.shared.directory, {".cachemgr-gone-other/0123456789/computation_graph.py": b"x"})
    assert place.plan().goners == ()
    held.release()
    assert {gone.why for gone in place.plan().goners} == {"a prune was killed here"}


@pytest.mark.slow
def test_a_prune_killed_anywhere_leaves_units_whole_and_the_next_one_finishes(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "look", lambda: open_files.Opened({}, {}, 0))  # half of the time, and no change
    pristine = place.root.parent / "pristine"
    place.own("a")
    place.own("b", days=1)
    shutil.rmtree(Path(place.shared.directory, place.entries()[1]))
    shutil.copytree(place.root, pristine)
    whole = {path.rsplit("/", 1)[0]: 0 for path in trees.read(pristine)}
    for path in trees.read(pristine):
        whole[path.rsplit("/", 1)[0]] += 1
    for _step in killed_at_every_step(lambda: place.prune(Limits(unused_for=2 * DAY))):
        there = [path for path in trees.read(place.root) if ".cachemgr-" not in path]
        for directory, count in whole.items():
            left = [path for path in there if path.rsplit("/", 1)[0] == directory]
            assert len(left) in (0, count), f"{directory} is half gone"
        for own in (place.root / "cachemgr").glob(folder(key_of("a"))):
            place.age(own, 3)  # that somebody held it is a use
        carry_out(place.plan(Limits(unused_for=2 * DAY)), prune="the-next", now=NOW)
        carry_out(place.plan(), prune="one-more", now=NOW)
        left = [path for path in trees.read(place.root) if "/.cachemgr-held/" not in path]
        assert all(folder(key_of("b")) in path for path in left), left
        shutil.rmtree(place.root)
        shutil.copytree(pristine, place.root)


def test_two_prunes_at_once_take_each_thing_once(place: Place) -> None:
    for number in range(6):
        place.own(f"k{number}")
    planned = place.plan(Limits(max_size=0))
    pids = []
    for number in range(3):
        pid = os.fork()
        if pid == 0:
            carry_out(planned, prune=f"prune-{number}", now=NOW)
            os._exit(0)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0, 0]
    carry_out(place.plan(Limits(max_size=0)), prune="last", now=NOW)
    assert trees.read(place.root) == {}


def test_a_read_only_root_is_said_and_nothing_is_lost(place: Place, small_disk: MakeDisk) -> None:
    disk = small_disk(1 << 20)
    own = Place(disk / "vllm").own("a")
    place = Place(disk / "vllm")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    before = trees.read(own)
    done = place.prune(Limits(max_size=0))
    assert done.goners == ()
    assert "Read-only file system" in done.kept[0].kept
    assert trees.read(own) == before


def test_what_is_bound_from_elsewhere_on_the_same_disk_is_left(place: Place, small_disk: MakeDisk) -> None:
    """A bind mount has the device number of the file system around it; before the plan, and after it."""
    disk = small_disk(1 << 20)
    precious = disk / "precious"
    trees.write(precious, {"weights": b"x"})
    place = Place(disk / "vllm")
    own = place.own("a")
    planned = place.plan(Limits(max_size=0))
    bound = own / "triton" / "bound"
    bound.mkdir()
    subprocess.run(["mount", "--bind", str(precious), str(bound)], check=True)
    try:
        assert os.stat(bound).st_dev == os.stat(own).st_dev
        place.age(own, 3)
        done = place.prune(Limits(max_size=0))
        assert (done.goners, [kept.kept[:18] for kept in done.kept]) == ((), ["triton/bound is mo"])
        carry_out(planned, prune="late", now=NOW)
        assert (precious / "weights").read_bytes() == b"x"
    finally:
        subprocess.run(["umount", *map(str, disk.rglob("bound"))], check=True)


def test_a_directory_that_became_a_link_after_the_plan_leads_nowhere(place: Place) -> None:
    outside = place.root.parent / "outside"
    trees.write(outside, {"tmp.pid_999999999_0a1b/kernel.cubin": b"precious"})
    own = place.own("a")
    trees.write(own, {"triton/x/tmp.pid_999999999_0a1b/kernel.cubin": b"half"})
    place.age(own, 3)
    planned = place.plan()
    assert [gone.kind for gone in planned.goners] == ["left-over"]
    shutil.rmtree(own / "triton" / "x")
    (own / "triton" / "x").symlink_to(outside)
    assert carry_out(planned, prune="p", now=NOW).goners == ()
    assert len(trees.read(outside)) == 1


def test_roots_of_starts_that_were_killed_go_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    place, home, temporary = Place(tmp_path / "vllm"), tmp_path / "home", tmp_path / "tmp"
    found = live.bases(home, {"TMPDIR": str(temporary)})

    def root(name: Path, *, days: float = 1) -> Path:
        directory = name / "cachemgr" / folder(key_of("a"))
        trees.triton_kernel(directory / "triton", "a")
        place.age(name, days)
        return directory

    def aged(hold: Hold, name: Path) -> Hold:
        place.age(name, 1)
        return hold

    gone = [home / "prewarm" / "killed", temporary / "cachemgr-bench-x", temporary / "cachemgr-v-x" / "1"]
    for name in gone:
        root(name)
    dead = msgspec.structs.replace(this_process(), started="1")
    Hold.take(str(root(gone[0], days=0)), Holder("killed", "compiling", dead))
    place.age(temporary / "cachemgr-v-x", 1)
    alive = home / "prewarm" / "alive"
    Hold.take(str(root(alive)), Holder("alive", "compiling", dead))
    left = subprocess.Popen(["sleep", "600"], env={"VLLM_CACHE_ROOT": str(alive)})
    (home / "prewarm" / "spec.json").write_bytes(b"{}")
    running, young, others = home / "prewarm" / "running", temporary / "cachemgr-bench-y", temporary / "tmp-of-others"
    held = aged(Hold.take(str(root(running)), Holder("running", "compiling", this_process())), running)
    root(young, days=0.01)
    root(others)
    opened = temporary / "cachemgr-v-y"
    kernel = next(path for path in root(opened).rglob("*") if path.is_file())
    try:
        with reader(kernel) as pid:
            done = place.prune(bases=found)
    finally:
        left.kill()
        left.wait()
    assert {gone.why for gone in done.goners} == {"the command that made it for a start was killed"}
    assert sorted(f"{gone.place}/{gone.path}" for gone in done.goners) == sorted(
        str(each) for each in (gone[0], gone[1], temporary / "cachemgr-v-x")
    )
    assert {Path(kept.name).name: kept.kept.partition(" has ")[0] for kept in done.kept} == {
        "alive": f"process {left.pid} was started for it",
        "running": "in use by launch running",
        "cachemgr-v-y": f"process {pid}",
    }
    assert sorted(path.name for path in (*home.glob("prewarm/*"), *temporary.iterdir())) == [
        "alive",
        "cachemgr-bench-y",
        "cachemgr-v-y",
        "running",
        "spec.json",
        "tmp-of-others",
    ]
    held.release()
    place.age(running, 1)
    assert {Path(gone.path).name for gone in place.prune(bases=found).goners} == {"alive", "running", "cachemgr-v-y"}
