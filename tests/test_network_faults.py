"""Stores on network file systems: stale handles, busy files, late visibility, refused renames, lost answers.

No file system here misbehaves on request, so plain wrappers around a real store do. The command always starts, each
error is counted under the name of what was tried, nothing is half placed, and the next start heals what was missed.
"""

import errno
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cachemgr import launch
from cachemgr.cache import Cache
from cachemgr.capture import Launch
from cachemgr.cli.session import WallClock
from cachemgr.domains import TABLE
from cachemgr.errors import CorruptError, LaunchError, StoreError
from cachemgr.key import derive
from cachemgr.observe import STAGE_PREFIX
from cachemgr.order import Order, Started, Told
from cachemgr.store import Store, layout
from cachemgr.store.captures import captures, commit, has_layers
from cachemgr.store.local import LocalStore
from cachemgr.store.records import launches, record
from cachemgr.store.removal import plan_removal, remove
from tests import trees
from tests.machines import Machine, install_program, install_stand_in
from tests.store_contract import Age, StoreContract
from tests.stores import Faulty, Late, Nameless, Slow, Stale, contents
from tests.test_capture import LAUNCH
from tests.test_store_local import aged

pytestmark = pytest.mark.slow

PYTHON = sys.executable
ROOT = Path(__file__).parent.parent
KEY = derive(trees.FACTORS)
NOW = trees.NOW_NS / 1e9


# A wrapper that lets everything through must be a store, or what these tests show is about the wrapper.

PASSING: dict[str, Callable[[Store], Store]] = {
    "faulty": lambda store: Faulty(store, fail_after=1 << 30),
    "late": lambda store: Late(store, after=0),
    "nameless": lambda store: Nameless(store, times=0),
    "slow": lambda store: Slow(store, seconds=0.0001),
    "stale": lambda store: Stale(store, "read", "open", "scan", "has", times=0),
}


class TestPassingWrappers(StoreContract):
    @pytest.fixture(params=PASSING)
    def wrap(self, request: pytest.FixtureRequest) -> Callable[[Store], Store]:
        return PASSING[request.param]

    @pytest.fixture
    def store(self, wrap: Callable[[Store], Store], tmp_path: Path) -> Store:
        return wrap(LocalStore(tmp_path / "store"))

    @pytest.fixture
    def age(self, store: Store) -> Age:
        return lambda name, seconds: aged(Path(str(store)), name, seconds)

    @pytest.fixture
    def broken(self, wrap: Callable[[Store], Store], tmp_path: Path) -> Store:
        (tmp_path / "loop").symlink_to("loop")
        return wrap(LocalStore(tmp_path / "loop" / "store"))


# Journeys.


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def full(local: LocalStore, tmp_path: Path) -> LocalStore:
    """A store with one capture of every domain."""
    trees.publish_trees(local, trees.build(tmp_path / "made"))
    return local


def whole(store: Store) -> int:
    """The number of captures that a reader sees; all of them must be whole."""
    damaged: list[object] = []
    found = captures(store, KEY, damaged)  # type: ignore[arg-type]
    assert not damaged
    assert all(has_layers(store, capture) for capture in found)
    return len(found)


def heals(store: LocalStore, tmp_path: Path) -> None:
    """A publisher and a reader without faults find a store that they can use, and no left-over of the attempt."""
    trees.publish_trees(store, trees.live(tmp_path / "made"))
    assert whole(store) == 1
    found = trees.look_up(store)
    assert found.result == "exact"
    assert trees.restore_found(store, found, trees.targets(tmp_path / "healed")).reasons == ()
    assert list(store.scratch().iterdir()) == []


BUSY = (errno.ESTALE, errno.EBUSY)


@pytest.mark.parametrize("error", BUSY)
@pytest.mark.parametrize("verb", ["read", "scan"])
def test_a_look_up_fails_loudly_and_the_next_one_finds_it(
    full: LocalStore, verb: str, error: int, tmp_path: Path
) -> None:
    flaky = Stale(full, verb, times=1, error=error)  # type: ignore[arg-type]
    with pytest.raises(StoreError):
        trees.look_up(flaky)
    assert trees.look_up(flaky).result == "exact"
    with pytest.raises(StoreError):
        trees.look_up(Stale(full, verb, error=error))  # type: ignore[arg-type]
    heals(full, tmp_path)


@pytest.mark.parametrize("error", BUSY)
def test_a_restore_whose_layer_cannot_be_opened_places_nothing_and_blames_nobody(
    full: LocalStore, error: int, tmp_path: Path
) -> None:
    flaky = Stale(full, "open", prefix=layout.LAYERS, times=1, error=error)
    room = tmp_path / "room"
    outcome = trees.restore_found(flaky, trees.look_up(full), trees.targets(room))
    assert outcome.files == 0
    assert outcome.damaged == (), "bytes that cannot be read are not damaged bytes"
    assert len(outcome.reasons) == len(TABLE)
    assert trees.read(room) == {}
    again = trees.restore_found(flaky, trees.look_up(full), trees.targets(room))
    assert again.reasons == ()
    assert again.files > 0


@pytest.mark.parametrize("verb", ["read", "scan", "has"])
@pytest.mark.parametrize("times", [1, None])
def test_a_publish_that_cannot_look_writes_nothing_visible(
    local: LocalStore, verb: str, times: int | None, tmp_path: Path
) -> None:
    live = trees.build(tmp_path / "made")
    trees.publish_trees(local, trees.live(tmp_path / "made"), trees.draft(complete=False))
    before = contents(local)
    flaky = Stale(local, verb, times=times)  # type: ignore[arg-type]
    with pytest.raises(StoreError):
        trees.publish_trees(flaky, live)
    assert contents(local) == before
    assert list(local.scratch().iterdir()) == []
    trees.publish_trees(local, live)
    assert whole(local) == 2


def test_a_commit_and_a_record_that_cannot_read_the_layout_write_nothing(local: LocalStore) -> None:
    flaky = Stale(local, "read")
    with pytest.raises(StoreError):
        commit(flaky, trees.draft(), {}, now=NOW)
    with pytest.raises(StoreError):
        record(flaky, LAUNCH)
    assert contents(local) == {}
    record(local, LAUNCH)
    assert list(launches(local)) == [LAUNCH]


@pytest.mark.parametrize("after", range(6))
def test_a_publish_to_a_store_that_shows_things_late_is_whole_or_said(
    local: LocalStore, after: int, tmp_path: Path
) -> None:
    live = trees.build(tmp_path / "made")
    late = Late(local, after=after)
    try:
        assert trees.publish_trees(late, live).capture is not None
    except CorruptError as error:
        assert "does not keep what is written to it" in str(error)  # noqa: PT017 - both ends are right
    assert whole(local) <= 1
    heals(local, tmp_path)


@pytest.mark.parametrize("after", range(1, 6))
def test_a_capture_that_is_not_visible_yet_is_a_miss_and_never_half_a_hit(
    local: LocalStore, after: int, tmp_path: Path
) -> None:
    layout.ensure_layout(local)
    late = Late(local, after=after)
    trees.publish_trees(late, trees.build(tmp_path / "made"))
    room = tmp_path / "room"
    found = trees.look_up(late)
    while found.result != "exact":
        assert {each.kind for each in found.damaged} <= {"absent"}, "late is not damaged"
        assert trees.restore_found(late, found, trees.targets(room)).files == 0
        found = trees.look_up(late)
    outcome = trees.restore_found(late, found, trees.targets(room))
    while outcome.reasons:
        assert outcome.damaged == ()
        assert trees.read(room) == {}
        outcome = trees.restore_found(late, found, trees.targets(room))
    assert outcome.files > 0


def test_a_second_publisher_that_does_not_see_the_first_yet_adds_no_second_layer(
    local: LocalStore, tmp_path: Path
) -> None:
    layout.ensure_layout(local)
    late = Late(local, after=100)
    live = trees.build(tmp_path / "made")
    first = trees.publish_trees(late, live)
    second = trees.publish_trees(late, live)
    assert first.capture == second.capture
    assert len(list(local.scan(layout.LAYERS))) == 1
    heals(local, tmp_path)


def test_a_publish_without_renames_leaves_nothing_and_the_next_one_works(local: LocalStore, tmp_path: Path) -> None:
    live = trees.build(tmp_path / "made")
    with pytest.raises(StoreError, match="not implemented"):
        trees.publish_trees(Nameless(local), live)
    assert whole(local) == 0
    assert list(local.scratch().iterdir()) == []
    heals(local, tmp_path)


@pytest.mark.parametrize("writes", range(8))
def test_an_answer_that_is_lost_at_any_write_of_a_publish_is_healed_by_the_next(
    local: LocalStore, writes: int, tmp_path: Path
) -> None:
    live = trees.build(tmp_path / "made")
    lossy = Faulty(local, fail_after=writes, late=True)
    try:
        trees.publish_trees(lossy, live)
    except (StoreError, CorruptError):
        assert lossy.failed
    assert whole(local) <= 1
    heals(local, tmp_path)


@pytest.mark.parametrize("late", [True, False])
def test_a_removal_whose_answers_are_lost_can_be_repeated_until_it_is_done(full: LocalStore, late: bool) -> None:
    for attempt in range(40):
        lossy = Faulty(full, fail_after=attempt, late=late)
        try:
            remove(lossy, plan_removal(full, [KEY], now=NOW, grace=0))
        except StoreError:
            assert whole(full) <= 1
        else:
            break
    assert [entry.name for prefix in ("artifacts/", "entries/", "layers/") for entry in full.scan(prefix)] == []


@pytest.mark.parametrize("verb", ["read", "scan"])
def test_a_removal_that_cannot_look_removes_nothing(full: LocalStore, verb: str) -> None:
    before = contents(full)
    flaky = Stale(full, verb)  # type: ignore[arg-type]
    with pytest.raises(StoreError):
        remove(flaky, plan_removal(flaky, [KEY], now=NOW, grace=0))
    assert contents(full) == before


# Launches.


@dataclass
class Notes:
    """A listener that remembers."""

    said: list[str] = field(default_factory=list)
    started_with: Started | None = None
    launch: Launch | None = None

    def note(self, line: str) -> None:
        self.said.append(line)

    def started(self, event: Started) -> None:
        self.said.extend(event.trouble)
        self.started_with = event

    def ready(self, event: Told) -> None:
        self.finished(event)

    def finished(self, event: Told) -> None:
        self.said.extend(event.trouble)
        self.launch = event.launch


class Site:
    """Machines whose launches run in this process, on whatever store they are given."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.local = LocalStore(directory / "store")
        self.variables = install_stand_in(directory)
        self.program = install_program(directory)
        self._launches = 0

    def machine(self, name: str) -> Machine:
        return Machine(self.directory / name, self.directory / "store", self.variables)

    def run(self, name: str, store: Store, *graphs: str, strict: bool = False, deadline: float = 30.0) -> Notes:
        """One launch on the machine `name`."""
        self._launches += 1
        machine = self.machine(name)
        order = Order(
            argv=(PYTHON, self.program, *graphs),
            environ=machine.environ,
            cwd=self.directory,
            launch=f"launch-{self._launches}",
            host=name,
            publish="local",
            read_only=False,
            strict=strict,
            ignored_args=(),
            deadline=deadline,
            wait=0.0,
            ready_file=None,
        )
        notes = Notes()
        code = launch.run(order, Cache(store, machine.home / "state"), WallClock(), notes)
        assert code == 0
        assert notes.launch is not None
        return notes

    def half_placed(self, name: str) -> list[str]:
        """What a launch must not leave: stages, private directories, unfinished writes."""
        stages = [str(path) for path in self.machine(name).home.rglob(f"{STAGE_PREFIX}launch*")]
        private = [str(path) for path in self.machine(name).home.rglob("cachemgr/k1-*.*") if path.is_dir()]
        return [*stages, *private, *(str(path) for path in self.local.scratch().iterdir())]


@pytest.fixture
def site(tmp_path: Path, in_process: None) -> Site:
    return Site(tmp_path)


FAULTS: dict[str, tuple[Callable[[Store], Store], set[str]]] = {
    "no read works": (lambda s: Stale(s, "read"), {"opening the store", "looking up"}),
    "the first read fails": (lambda s: Stale(s, "read", times=1), {"opening the store"}),
    "no listing works": (lambda s: Stale(s, "scan"), {"looking up", "publishing"}),
    "one listing fails": (lambda s: Stale(s, "scan", times=1), {"looking up"}),
    "manifests are busy": (
        lambda s: Stale(s, "read", prefix="artifacts/", error=errno.EBUSY),
        {"looking up", "publishing"},
    ),
    "no layer opens": (lambda s: Stale(s, "open", prefix=layout.LAYERS), set()),
    "a layer opens late": (lambda s: Stale(s, "open", prefix=layout.LAYERS, times=1), set()),
    "no layer can be asked for": (lambda s: Stale(s, "has", prefix=layout.LAYERS), {"looking up", "publishing"}),
    "nothing gets its name": (Nameless, set()),
    "no write works": (lambda s: Faulty(s, fail_after=0), {"recording"}),
    "every answer is lost": (lambda s: Faulty(s, fail_after=0, late=True), {"recording"}),
    "all is slow": (lambda s: Slow(s, seconds=0.02), set()),
    "all is late": (lambda s: Late(s, after=3), set()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_start_on_a_full_store_that_misbehaves_runs_and_the_next_heals(
    fault: str, site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    wrap, names = FAULTS[fault]
    first = site.run("one", site.local, "f", "g").launch
    hurt = site.run("two", wrap(site.local), "f", "g")
    assert hurt.launch is not None
    assert hurt.launch.errors.keys() >= names
    assert all(any(line.startswith(f"{name} failed: ") for line in hurt.said) for name in hurt.launch.errors)
    assert site.half_placed("two") == []
    healed = site.run("two", site.local, "f", "g").launch
    fresh = site.run("three", site.local, "f", "g").launch
    assert first is not None
    for each in (healed, fresh):
        assert each is not None
        assert (each.result, each.verdict, each.added["inductor"], each.errors) == ("exact", "used", 0, {})
        assert each.key == first.key
    assert capfd.readouterr().out.count("machine code of f") == 4, "the right answer each time"


WRITE_FAULTS: dict[str, tuple[Callable[[Store], Store], set[str]]] = {
    "no read works": (lambda s: Stale(s, "read"), {"opening the store", "looking up"}),
    "the first read fails": (lambda s: Stale(s, "read", times=1), {"opening the store"}),
    "no listing works": (lambda s: Stale(s, "scan"), {"publishing"}),
    "nothing gets its name": (Nameless, {"publishing"}),
    "the first file gets no name": (lambda s: Nameless(s, times=1), {"publishing"}),
    "no write works": (lambda s: Faulty(s, fail_after=0), {"opening the store"}),
    **{
        f"the answer to write {number} is lost": (
            lambda s, number=number: Faulty(s, fail_after=number, late=True),  # type: ignore[misc]
            {"opening the store"} if number < 2 else {"recording"},
        )
        for number in range(5)
    },
    "what is put shows late": (lambda s: Late(s, after=3), {"opening the store"}),
}


@pytest.mark.parametrize("fault", WRITE_FAULTS)
def test_a_cold_start_on_an_empty_store_that_misbehaves_runs_and_the_next_heals(
    fault: str, site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    wrap, names = WRITE_FAULTS[fault]
    hurt = site.run("one", wrap(site.local), "f").launch
    assert hurt is not None
    assert hurt.errors.keys() >= names
    assert hurt.verdict == "cold"
    assert site.half_placed("one") == []
    site.run("one", site.local, "f")
    warm = site.run("two", site.local, "f").launch
    assert warm is not None
    assert (warm.result, warm.verdict, warm.added["inductor"], warm.errors) == ("exact", "used", 0, {})
    assert capfd.readouterr().out.count("machine code of f") == 3


def test_a_start_that_could_not_open_the_store_derives_its_key_and_leaves_the_store_alone(site: Site) -> None:
    site.variables["TORCHINDUCTOR_SITE_SHAPE"] = "a value that is sealed"
    first = site.run("one", site.local, "f").launch
    hurt = site.run("two", Stale(site.local, "read", times=1), "f").launch
    assert first is not None
    assert hurt is not None
    assert hurt.key == first.key
    assert hurt.published is None
    assert any("nothing published" in reason for reason in hurt.reasons)
    assert [path.name for path in (site.directory / "store" / "artifacts").iterdir()] == [first.key.replace(":", "-")]


def test_a_strict_launch_stops_before_the_command(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match="opening the store failed"):
        site.run("one", Stale(site.local, "read"), "f", strict=True)
    assert "machine code" not in capfd.readouterr().out


# Without hard links.

WITHOUT_LINKS = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from cachemgr.store.captures import keys
from cachemgr.store.removal import plan_removal, remove
from cachemgr.store.local import LocalStore
from cachemgr.store.records import record
from tests import trees
from tests.stores import deny_hard_links
from tests.test_capture import LAUNCH
if not deny_hard_links():
    print("cannot")
    raise SystemExit
root = Path(sys.argv[1])
store = LocalStore(root / "store")
live = trees.build(root / "made")
assert trees.publish_trees(store, live).capture is not None
assert trees.publish_trees(store, live).capture is None
record(store, LAUNCH)
record(store, LAUNCH)
for target in trees.targets(root / "room"):
    Path(target.directory).mkdir(parents=True)
    (Path(target.directory) / "neighbour").write_bytes(b"in the way of one rename")
found = trees.look_up(store)
assert found.result == "exact"
outcome = trees.restore_found(store, found, trees.targets(root / "room"))
assert outcome.reasons == (), outcome.reasons
for target in trees.targets(root / "room"):
    (Path(target.directory) / "neighbour").unlink()
    trees.assert_moved(target.domain, root / "made" / target.domain.name, target.directory)
again = trees.restore_found(store, trees.look_up(store), trees.targets(root / "room"))
assert (again.files, again.present) == (0, outcome.files)
assert list(store.scratch().iterdir()) == []
remove(store, plan_removal(store, keys(store), now=trees.NOW_NS / 1e9, grace=0))
assert [entry.name.split("/")[0] for entry in store.scan("") if "/" in entry.name] == ["launches"]
print("done")
"""


def test_publish_restore_and_remove_work_without_hard_links(tmp_path: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-c", WITHOUT_LINKS, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "cannot":
        pytest.skip("this kernel does not let a process give up its hard links")
    assert done.stdout.strip() == "done"


def test_launches_work_on_machines_without_hard_links(tmp_path: Path) -> None:
    site = Site(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.stores import deny_hard_links\n"
        "print('denied' if deny_hard_links() else 'cannot', flush=True)\n"
        "from cachemgr.cli import main\n"
        "main()\n"
    )

    def run(name: str) -> str:
        words = [PYTHON, "-c", code, "run", "--", PYTHON, site.program, "f", "g"]
        machine = site.machine(name)
        done = subprocess.run(
            words, env=machine.environ, cwd=machine.root, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        if done.stdout.startswith("cannot"):
            pytest.skip("this kernel does not let a process give up its hard links")
        assert done.stdout.count("machine code of") == 2
        return done.stderr

    assert "captured 2 files" in run("one")
    warm = run("two")
    assert "compiled" not in warm
    assert "cachemgr: used" in warm
