"""A bounded soak: launches, publishers and removers at once on one store, with random kill -9.

The seed is fixed, so what is started and what is killed is the same each time; how it interleaves is not. At the end
every visible capture is whole, every start gives right answers, and only what was killed has left anything behind.
"""

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pytest

from cachemgr import layer
from cachemgr.capture import File, decode_launch
from cachemgr.errors import CorruptError, NotFoundError
from cachemgr.key import Factor, Key, derive, from_folder
from cachemgr.store import layout
from cachemgr.store.captures import GRACE_SECONDS, Capture, Damaged, captures, has_layers, keys
from cachemgr.store.local import LocalStore
from cachemgr.store.records import record
from cachemgr.store.removal import plan_removal, remove
from tests import trees
from tests.machines import Machine, install_program, install_stand_in
from tests.test_capture import LAUNCH

pytestmark = pytest.mark.slow

PYTHON = sys.executable
SEED = 20260102
ROUNDS = 9
JOBS = (("f", "g"), ("f", "h"), ("g", "sleep=0.1", "h"))
"""What the launches start: three keys with graphs in common."""


class _Nowhere:
    """Verifies what is unpacked and keeps nothing."""

    def whole(self, file: File, data: memoryview) -> None:
        assert len(data) == file.size

    def parts(self, file: File, parts: object) -> None:
        """The caller reads them to their end, which is the check."""

    def link(self, file: File, original: str) -> None:
        assert original != file.path


@dataclass
class Ended:
    """A launch that was started: its command, and its name if it ended by itself."""

    machine: Machine
    graphs: tuple[str, ...]
    launch: str | None


@dataclass
class Soak:
    """Everything that goes on around one store."""

    directory: Path
    chance: random.Random = field(default_factory=lambda: random.Random(SEED))
    ended: list[Ended] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = LocalStore(self.directory / "store")
        self.program = install_program(self.directory)
        self.variables = install_stand_in(self.directory)

    def machine(self, name: str) -> Machine:
        """A machine of the fleet; its compiler never makes the same bytes twice."""
        made = Machine(self.directory / name, self.directory / "store", {**self.variables, "NOISE": "1"})
        made.make_places()
        return made

    def command(self, graphs: tuple[str, ...]) -> tuple[str, ...]:
        return (PYTHON, self.program, *graphs)

    def start(self, machine: Machine, graphs: tuple[str, ...], name: str, kill_after: float | None) -> None:
        """One launch from its start to its end, or until it is killed."""
        report = machine.root / f"{name}.json"
        process = machine.start("run", "--report", str(report), "--", *self.command(graphs))
        try:
            out, err = process.communicate(timeout=kill_after or 60)
        except subprocess.TimeoutExpired:
            process.kill()  # the command is not killed with it, and goes on writing
            out, err = process.communicate(timeout=60)
        if process.returncode == -9:
            self.ended.append(Ended(machine, graphs, None))
            return
        self.check(process.returncode == 0, f"exit {process.returncode}: {err}")
        self.check(answers(out) == expected(graphs), f"wrong answers {out!r}")
        told = decode_launch(report.read_bytes())
        self.check(not told.errors, f"{told.errors}: {err}")
        self.ended.append(Ended(machine, graphs, told.launch))

    def publish(self, number: int, stop: threading.Event) -> None:
        """A publisher of vLLM trees: a growing live directory under one of two keys, again and again."""
        room = self.directory / f"publisher-{number}"
        factors = tuple(Factor(f.name, f"{number % 2}", f.role) if f.name == "torch" else f for f in trees.FACTORS)
        trees.build(room)
        turn = 0
        while not stop.is_set():
            turn += 1
            trees.triton_kernel(room / "triton", f"publisher {number} turn {turn}")
            draft = trees.draft(
                factors, launch=f"publisher-{number}-{turn}", created=f"2026-01-02T03:04:{turn % 60:02}Z"
            )
            trees.publish_trees(self.store, trees.live(room), draft)
            record(self.store, msgspec.structs.replace(LAUNCH, launch=f"publisher-{number}-{turn}"))
            stop.wait(0.05)

    def remove(self, chance: random.Random, stop: threading.Event) -> None:
        """A remover: any artifact, at any time, with the grace that the design gives."""
        while not stop.wait(0.3):
            known = keys(self.store)
            if known:
                remove(self.store, plan_removal(self.store, [chance.choice(known)], now=time.time()))

    def rm(self, machine: Machine, chance: random.Random) -> None:
        """A person who removes an artifact by the command."""
        known = keys(self.store)
        if known:
            done = machine.cachemgr("rm", "-y", chance.choice(known), code=None)
            self.check(done.returncode in (0, 10), f"rm: exit {done.returncode}: {done.stderr}")

    def check(self, true: bool, said: str) -> None:
        """Threads cannot fail a test; what they find is asserted at the end of their round."""
        if not true:
            self.failures.append(said)

    def round(self, number: int, *, kill: bool) -> None:
        """Launches on three roots, two publishers and two removers at once."""
        stop = threading.Event()
        launches: list[Callable[[], None]] = []
        for at in range(7):
            name, graphs = self.chance.choice("abc"), self.chance.choice(JOBS)
            after = self.chance.uniform(0.1, 1.5) if kill and self.chance.random() < 0.5 else None
            launches.append(partial(self.start, self.machine(name), graphs, f"{number}-{at}", after))
        removing, typing = random.Random(self.chance.random()), random.Random(self.chance.random())
        with ThreadPoolExecutor(12) as pool:
            beside = [
                pool.submit(self.publish, 0, stop),
                pool.submit(self.publish, 1, stop),
                pool.submit(self.remove, removing, stop),
            ]
            running = [pool.submit(each) for each in launches]
            running.append(pool.submit(self.rm, self.machine("a"), typing))
            try:
                for each in running:
                    each.result(60)
            finally:
                stop.set()
            for each in beside:
                each.result(60)
        assert self.failures == []

    def unfinished(self) -> set[str]:
        return {path.name for path in self.store.scratch().iterdir()}

    def age(self) -> None:
        """Let two days pass for the layers, so that removers may take them and publishers have to refresh them."""
        then = time.time() - 2 * GRACE_SECONDS
        for entry in self.store.scan(layout.LAYERS):
            os.utime(self.directory / "store" / entry.name, (then, then))


def answers(out: str) -> list[str]:
    """The graphs that a stand-in program printed the right code of."""
    return [
        line.removeprefix("machine code of ")[0] for line in out.splitlines() if line.startswith("machine code of ")
    ]


def expected(graphs: tuple[str, ...]) -> list[str]:
    return [graph for graph in graphs if "=" not in graph]


def visible(soak: Soak) -> dict[Key, tuple[Capture, ...]]:
    """Every capture that a reader sees, each of them whole to the last byte."""
    found: dict[Key, tuple[Capture, ...]] = {}
    for key in keys(soak.store):
        damaged: list[Damaged] = []
        found[key] = captures(soak.store, key, damaged)
        assert damaged == []
    nowhere = _Nowhere()
    for capture in (capture for each in found.values() for capture in each):
        assert has_layers(soak.store, capture), "a manifest without its layers"
        for held in capture.manifest.layers:
            with soak.store.open(layout.layer_name(held.digest)) as packed:
                layer.unpack(held, packed, lambda _domain, _unit: nowhere)
    return found


def hints_that_outlived(soak: Soak, found: dict[Key, tuple[Capture, ...]]) -> list[str]:
    lost = []
    for entry in soak.store.scan("entries/"):
        _entries, name, folder = entry.name.split("/")
        key = from_folder(folder)
        held = found.get(key, ()) if key else ()
        if not any(name in capture.manifest.entries for capture in held):
            lost.append(entry.name)
    return lost


def wait_for_orphans(soak: Soak) -> None:
    """Commands of killed launches are short; they must have ended before what they left is judged."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        lines = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _mentions(path, soak.program)]
        if not lines:
            return
        time.sleep(0.1)
    raise AssertionError("a command of a killed launch never ended")


def _mentions(path: Path, program: str) -> bool:
    try:
        return program.encode() in path.read_bytes()
    except OSError:
        return False


def test_launches_publishers_and_removers_at_once_leave_a_store_that_is_whole(tmp_path: Path) -> None:
    soak = Soak(tmp_path)
    for number in range(ROUNDS):
        before = soak.unfinished()
        kill = number % 2 == 1
        soak.round(number, kill=kill)
        if not kill:
            assert soak.unfinished() <= before, "a process that ended by itself left an unfinished write"
        wait_for_orphans(soak)
        soak.age()
    killed = sum(ended.launch is None for ended in soak.ended)
    assert killed, "nothing was killed"
    assert len(soak.unfinished()) <= 2 * killed

    found = visible(soak)
    assert hints_that_outlived(soak, found) == []
    private = {path.name for path in tmp_path.glob("?/home/.cache/vllm/cachemgr/*") if "." in path.name}
    assert private.isdisjoint({f"{folder.split('.')[0]}.{ended.launch}" for folder in private for ended in soak.ended})
    stages = {path.name for path in tmp_path.glob("?/home/.cache/vllm/cachemgr/.cachemgr-*")}
    assert not [name for name in stages for ended in soak.ended if ended.launch and ended.launch in name]

    for key, held in found.items():
        factors = held[0].manifest.factors
        if key == derive(factors) and held[0].manifest.engine == "vllm":
            restored = trees.restore_found(
                soak.store, trees.look_up(soak.store, factors), trees.targets(tmp_path / f"restored-{key[3:9]}")
            )
            assert restored.reasons == ()
            assert restored.files > 0

    for at, graphs in enumerate(JOBS):
        fresh = soak.machine(f"fresh-{at}").run(*soak.command(graphs))
        assert answers(fresh["stdout"]) == expected(graphs)
        assert fresh["errors"] == {}
        if fresh["key"] in found:
            assert fresh["result"] == "exact"
        else:
            assert fresh["result"] in ("near", "none"), "removed"
        calm = soak.machine(f"calm-{at}").run(*soak.command(graphs))
        assert answers(calm["stdout"]) == expected(graphs)
        assert (calm["result"], calm["verdict"], calm["added"]["inductor"]) == ("exact", "used", 0)
        for name in "abc":
            again = soak.machine(name).run(*soak.command(graphs))
            assert answers(again["stdout"]) == expected(graphs), "what killed launches left is no obstacle"
            assert again["errors"] == {}


def test_removers_of_old_layers_and_publishers_of_the_same_ones_leave_no_manifest_without_layers(
    tmp_path: Path,
) -> None:
    """The narrowest place: the layer that a publisher counts on is old enough to be removed."""
    store = LocalStore(tmp_path / "store")
    live = trees.build(tmp_path / "live")
    other = trees.changed("vllm.max_model_len", "4096")
    layout.ensure_layout(store)
    failed: list[str] = []

    def publish(factors: tuple[Factor, ...]) -> None:
        try:
            trees.publish_trees(store, live, trees.draft(factors))
        except (CorruptError, NotFoundError) as error:
            failed.append(str(error))

    end = time.monotonic() + 4
    while time.monotonic() < end:
        publish(trees.FACTORS)
        then = time.time() - 2 * GRACE_SECONDS
        for entry in store.scan(layout.LAYERS):
            os.utime(tmp_path / "store" / entry.name, (then, then))
        # A person looks at the plan for a while before saying yes; meanwhile another launch needs the same layer.
        plan = plan_removal(store, [derive(trees.FACTORS)], now=time.time())
        publish(other)
        remove(store, plan)
        (capture,) = captures(store, derive(other), [])
        assert has_layers(store, capture), "the plan was older than the capture"
        found = trees.look_up(store, other)
        assert trees.restore_found(store, found, trees.targets(tmp_path / "room")).reasons == ()
        shutil.rmtree(tmp_path / "room")
        remove(store, plan_removal(store, [derive(other)], now=time.time()))
    assert failed == []
