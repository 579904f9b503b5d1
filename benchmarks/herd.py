"""A herd: many launches of one cold key, with and without single flight. Who compiles, and when is each ready?

    python benchmarks/herd.py [--size N] [--load S] [--compile S] [--spread S] [--rounds N] [--directory DIR] [WHERE...]

The engine is a stand-in: it sleeps for its load, looks its artifact up, and if that is not there sleeps for its
compile and writes a cache tree. So nothing is contended but this machine, and what is measured is the cost of waiting
for somebody else. `--spread` is the time within which the launches arrive, one after the other: a herd of processes
never starts in one instant.

at the look-up    the stand-in itself waits at its look-up, loaded, as an engine with a hook does; the owner publishes
                  what it compiled before it serves
before the start  `cachemgr run --single-flight` waits, and loads afterwards
owner killed      at the look-up, with the owner killed by SIGKILL when it has compiled for half of its time
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import journeys
import msgspec
from made import Maker
from measure import median, table

from cachemgr.cli.session import WallClock
from cachemgr.flight import Turn, wait_for
from cachemgr.process import this_process
from cachemgr.statcache import StatCache
from cachemgr.store.captures import captures
from cachemgr.store.claims import InStore, Owner
from cachemgr.store.local import LocalStore

FILES = 20
"""Few: here all of the herd restores on one machine, in a fleet each launch has its own."""
WAIT = 600.0
WHERE = ("at the look-up", "before the start", "owner killed")
_SILENT = [(os.POSIX_SPAWN_OPEN, stream, "/dev/null", os.O_WRONLY, 0) for stream in (1, 2)]


class Task(msgspec.Struct, frozen=True):
    """What one launch of the herd does. Paths; seconds."""

    name: str
    born: float
    """When its process was started, by the monotonic clock."""
    store: str
    template: str
    live: str
    result: str
    stop: str
    load: float
    compile: float
    single_flight: float


class Ready(msgspec.Struct, frozen=True):
    """How one launch got ready."""

    seconds: float
    """Since its process was started."""
    compiled: bool


class Row(msgspec.Struct, frozen=True):
    """One herd."""

    where: str
    single_flight: bool
    ready: tuple[Ready, ...]
    killed: int = 0

    @property
    def compiled(self) -> int:
        """How many compiled, those that were killed meanwhile included."""
        return sum(each.compiled for each in self.ready) + self.killed

    def at(self, share: float) -> float:
        """Seconds within which this share of the herd was ready."""
        found = sorted(each.seconds for each in self.ready)
        return found[min(len(found) - 1, int(share * len(found)))]


def engine(task: Task) -> None:
    """A stand-in with a hook at its look-up."""
    time.sleep(task.load)
    if not task.single_flight:
        compile_tree(task)
        tell(task, compiled=True)
        return
    turn = at_the_look_up(task)
    if turn.found is not None:
        journeys.restored(sample(task.live), Path(task.store), Path(task.live))
        tell(task, compiled=False)
        return
    compile_tree(task)
    tell(task, compiled=True)
    if turn.flight is not None:
        journeys.capture(sample(task.live), Path(task.store), StatCache({}))
        turn.flight.land()


def at_the_look_up(task: Task) -> Turn[bool]:
    store = LocalStore(Path(task.store))
    return wait_for(
        InStore(store, journeys.KEY),
        store,
        journeys.KEY,
        Owner(task.name, task.name, this_process()),
        lambda: bool(captures(store, journeys.KEY, [])) or None,
        seconds=task.single_flight,
        clock=WallClock(),
        tell=lambda _line: None,
    )


def program(task: Task) -> None:
    """A stand-in that knows nothing of us, and serves until it is told to stop."""
    time.sleep(task.load)
    live = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    missing = not any(live.rglob("*.py"))
    if missing:
        compile_tree(msgspec.structs.replace(task, live=str(live)))
    tell(task, compiled=missing)
    while not os.path.exists(task.stop):
        time.sleep(0.2)


def compile_tree(task: Task) -> None:
    time.sleep(task.compile)
    shutil.copytree(task.template, task.live, dirs_exist_ok=True)


def tell(task: Task, *, compiled: bool) -> None:
    path = Path(task.result)
    aside = path.with_suffix(".tmp")
    aside.write_bytes(msgspec.json.encode(Ready(time.monotonic() - task.born, compiled)))
    aside.rename(path)


def sample(live: str) -> journeys.Sample:
    return journeys.Sample("made", live, (("inductor", "."),))


class Herd:
    """One herd in a directory of its own."""

    def __init__(self, options: argparse.Namespace, directory: Path, template: Path, *, single_flight: bool) -> None:
        self._options, self._directory, self._template = options, directory, template
        self._single_flight = WAIT if single_flight else 0.0
        self._stop = directory / "stop"
        directory.mkdir()

    def run(self, where: str) -> Row:
        """Start it, and wait until everybody is ready."""
        processes: list[int] = []
        for number in range(self._options.size):
            if number:
                time.sleep(self._options.spread / (self._options.size - 1))
            processes.append(self._started(number, wrapped=where == "before the start"))
        killed = self._kill_owner() if where == "owner killed" else 0
        results = [self._directory / f"{number}.json" for number in range(self._options.size)]
        wanted = self._options.size - killed
        while sum(result.exists() for result in results) < wanted:
            time.sleep(0.1)
        self._stop.touch()
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        assert sorted(codes) == [-signal.SIGKILL] * killed + [0] * wanted, codes
        ready = tuple(msgspec.json.decode(each.read_bytes(), type=Ready) for each in results if each.exists())
        return Row(where, bool(self._single_flight), ready, killed)

    def _started(self, number: int, *, wrapped: bool) -> int:
        """The id of its process."""
        home = self._directory / f"home-{number}"
        (home / "tmp").mkdir(parents=True)
        task = Task(
            name=f"launch-{number}",
            born=time.monotonic(),
            store=str(self._directory / "store"),
            template=str(self._template),
            live=str(home / "live"),
            result=str(self._directory / f"{number}.json"),
            stop=str(self._stop),
            load=self._options.load,
            compile=self._options.compile,
            single_flight=self._single_flight,
        )
        return _wrapped(task, home) if wrapped else _forked(task)

    def _kill_owner(self) -> int:
        store = LocalStore(self._directory / "store")
        claims = InStore(store, journeys.KEY)
        while (claim := claims.newest()) is None:
            time.sleep(0.05)
        owner = claims.owner_of(claim.number)
        assert owner is not None
        time.sleep(self._options.compile / 2)
        os.kill(owner.process.pid, signal.SIGKILL)
        return 1


def _forked(task: Task) -> int:
    """With everything imported, which an engine has long done when it looks."""
    pid = os.fork()
    if pid == 0:
        engine(task)
        os._exit(0)
    return pid


def _wrapped(task: Task, home: Path) -> int:
    """What differs between launches of one key is in a variable that is no part of it."""
    words = [sys.executable, "-m", "cachemgr", "run", "--ready-file", task.result]
    words += ["--single-flight", str(task.single_flight), "--", sys.executable, __file__, "--wrapped"]
    ours = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "CACHEMGR_STORE": task.store}
    environ = {**os.environ, **ours, "HERD_TASK": msgspec.json.encode(task).decode()}
    return os.posix_spawn(sys.executable, words, environ, file_actions=_SILENT)


def measured(options: argparse.Namespace, directory: Path) -> list[Row]:
    template = directory / "template"
    Maker().write(template, FILES)
    chosen = options.where or WHERE
    plans = [(where, flag) for where in chosen for flag in ((True,) if where == "owner killed" else (False, True))]
    rows = []
    for number in range(options.rounds):
        for at, (where, flag) in enumerate(plans):
            herd = Herd(options, directory / f"{number}-{at}", template, single_flight=flag)
            rows.append(herd.run(where))
            print(shown(rows[-1]), file=sys.stderr, flush=True)
    return rows


def shown(row: Row) -> str:
    flag = "with" if row.single_flight else "without"
    return f"{row.where}, {flag}: {row.compiled} compiled, ready p50 {row.at(0.5):.1f} s, p95 {row.at(0.95):.1f} s"


def summary(rows: Sequence[Row]) -> str:
    found = []
    for where in dict.fromkeys(row.where for row in rows):
        for flag in (False, True):
            some = [row for row in rows if (row.where, row.single_flight) == (where, flag)]
            if some:
                compiled = f"{min(row.compiled for row in some)}-{max(row.compiled for row in some)}"
                times = (f"{median([row.at(share) for row in some]):.1f}" for share in (0.5, 0.95))
                found.append((where, "with" if flag else "without", compiled, *times))
    return table(("waits", "single flight", "compiled", "ready p50, s", "ready p95, s"), found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--load", type=float, default=5.0)
    parser.add_argument("--compile", type=float, default=30.0)
    parser.add_argument("--spread", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("where", nargs="*", metavar="WHERE", help=f"some of: {', '.join(WHERE)}")
    parser.add_argument("--wrapped", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.wrapped:
        program(msgspec.json.decode(os.environ["HERD_TASK"], type=Task))
        return 0
    with tempfile.TemporaryDirectory(prefix="cachemgr-herd-", dir=options.directory) as directory:
        rows = measured(options, Path(directory))
    print(summary(rows))
    if options.json:
        options.json.write_text(json.dumps(msgspec.to_builtins(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
