"""A crowd on one store: many processes publish, push, pull, remove, prune, verify and record at once, and are killed at
random.

    python -m tests.crowd --directory DIR [--seconds S] [--seed N] [--publishers N] [--grace S]
        [--kill-every S] [--at-least N]
        [--endpoint URL --bucket NAME --prefix PREFIX]

It goes on for so many seconds, and on a busy machine until so many captures were published and pulled, and as many
processes killed. Without an endpoint the store is a directory below DIR. What each process has finished is in its
own journal, which a kill cannot take back: at the end everything that was finished must be there, and every byte that
can be seen be right.
Artifacts of half of the keys are removed again and again, and share layers with those that nobody may lose.

Prints what happened as JSON; exits with 1 if anything was lost, incomplete, or wrong.
"""

import argparse
import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cachemgr import digest, layer
from cachemgr.capture import File
from cachemgr.errors import MirrorError, NotFoundError
from cachemgr.history import LastUses
from cachemgr.key import Factor, Key, derive
from cachemgr.prune import artifacts
from cachemgr.prune.artifacts import Wish
from cachemgr.prune.limits import Limits
from cachemgr.store import Store, layout, pins, records, transfer
from cachemgr.store import captures as store_captures
from cachemgr.store.captures import Capture, Damaged, captures
from cachemgr.store.local import LocalStore
from cachemgr.store.outlines import Outlines
from cachemgr.store.pins import Pin
from cachemgr.store.removal import plan_removal, remove
from cachemgr.store.s3 import Bucket, S3Store
from cachemgr.store.transfer import Transfer
from cachemgr.verify import verify
from tests import trees
from tests.stores import Dying, Slow
from tests.test_capture import launch_named

MODELS = 6
KEPT = 3
"""Artifacts of the first so many models are never removed."""
SETS = 8
"""Sets of kernels that any publisher may compile for any model, so that their artifacts share layers."""


@dataclass(frozen=True)
class Place:
    """Where the crowd meets, and where its members keep what is their own."""

    directory: Path
    grace: float
    bucket: Bucket | None

    def store(self, name: str) -> Store:
        """The store, opened by one process."""
        if self.bucket is None:
            return LocalStore(self.directory / "store")
        return S3Store(self.bucket, self.directory / "scratch" / name)

    def own(self, name: str) -> Path:
        return self.directory / "own" / name

    def note(self, kind: str, name: str, *rows: str) -> None:
        """A line that survives whatever happens to its writer."""
        path = self.directory / "journal" / kind / name
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, (" ".join(rows) + "\n").encode())
        os.close(descriptor)

    def noted(self, kind: str) -> list[list[str]]:
        paths = sorted((self.directory / "journal" / kind).glob("*"))
        return [line.split() for path in paths for line in path.read_text().splitlines()]


def factors_of(model: int) -> tuple[Factor, ...]:
    return trees.changed("vllm.max_model_len", str(1000 + model))


KEYS = [derive(factors_of(model)) for model in range(MODELS)]


class _Nowhere:
    """Verifies what is unpacked and keeps nothing."""

    def whole(self, file: File, data: memoryview) -> None:
        assert digest.of_bytes(data) == file.digest

    def parts(self, file: File, parts: Iterator[memoryview]) -> None:
        """The caller reads them to their end, which is the check."""

    def link(self, file: File, original: str) -> None:
        assert original != file.path


def check(store: Store, capture: Capture) -> int:
    """Read every byte of a capture; how many files those were. Raises what `layer.unpack` raises, and NotFoundError."""
    nowhere = _Nowhere()
    for held in capture.manifest.layers:
        with store.open(layout.layer_name(held.digest)) as packed:
            layer.unpack(held, packed, lambda _domain, _unit: nowhere)
    return sum(1 for held in capture.manifest.layers for _file in held.files())


def publish(place: Place, name: str, chance: random.Random) -> None:
    """Launches that compile some kernels that others compile too, and some that nobody else does; every other process
    publishes into a store of its own and pushes from there."""
    store: Store = Slow(place.store(name), seconds=chance.uniform(0, 0.03))
    if chance.random() < 0.5:
        store = Dying(store, after=chance.randint(0, 6))
    pushes = int(name.split("-")[1]) % 2 == 1
    room, local = place.own(name), LocalStore(place.own(name) / "store")
    for turn in itertools.count():
        model = chance.randrange(MODELS)
        same = chance.randrange(SETS) if chance.random() < 0.4 else None
        live = room / (f"turn-{turn}" if same is None else f"set-{same}")
        trees.triton_kernel(live / "triton", f"only {name} {turn}" if same is None else f"kernel {same}")
        launch = f"{name}-{turn}"
        draft = trees.draft(
            factors_of(model), launch=launch, created=f"2026-01-02T03:{turn // 60 % 60:02}:{turn % 60:02}Z"
        )
        published = trees.publish_trees(local if pushes else store, trees.live(live), draft)
        if pushes:
            moving = Transfer(local, store, expired=lambda: False, hints=True)
            moved = moving.carry(moving.plan([KEYS[model]], now=time.time()))
            for failure in moved.failures:
                raise failure.error
            for capture in moved.captures:
                place.note("published", name, KEYS[model], capture)
        elif published.capture is not None:
            place.note("published", name, KEYS[model], published.capture)
        if chance.random() < 0.5:
            records.record(store, launch_named(launch))
        else:
            records.keep(room / "records", launch_named(launch))
            records.send(store, room / "records")
        place.note("recorded", name, launch)


def pull(place: Place, name: str, chance: random.Random) -> None:
    """Fresh machines that take what they see; what nobody removes is only ever more."""
    store = place.store(name)
    seen: dict[Key, frozenset[str]] = {}
    for turn in itertools.count():
        key = chance.choice(KEYS)
        local = LocalStore(place.own(name) / f"machine-{turn}")
        moving = Transfer(store, local, expired=lambda: False)
        plan = moving.plan([key], now=time.time())
        assert not plan.damaged, plan.damaged
        moved = moving.carry(plan)
        kept = KEYS.index(key) < KEPT
        for failure in moved.failures:
            if kept or not isinstance(failure.error, NotFoundError):
                raise failure.error
        held = captures(local, key, damaged := list[Damaged]())
        assert not damaged, damaged
        assert {capture.digest for capture in held} == set(moved.captures)
        files = sum(check(local, capture) for capture in held)
        if kept:
            names = frozenset(capture.digest for capture in held)
            assert names >= seen.get(key, frozenset()), "something was lost on the way"
            seen[key] = names
        place.note("pulled", name, key, str(files))


def take_away(place: Place, name: str, chance: random.Random) -> None:
    """People who remove artifacts, with the grace that publishers count on."""
    store = place.store(name)
    while True:
        time.sleep(0.1)
        key = chance.choice(KEYS[KEPT:])
        plan = plan_removal(store, [key], now=time.time(), grace=place.grace)
        remove(store, plan)
        place.note("removed", name, key, str(len(plan.layers)))


def prune(place: Place, name: str, chance: random.Random) -> None:
    """Operators who prune all that is not pinned, several at once; what plans say is freed has to be gone."""
    store = place.store(name)
    wish = Wish(Limits(max_size=chance.choice([0, 20_000])), compact=False)
    while True:
        outlines, now = Outlines(place.own(name) / "outlines"), time.time()
        plan = artifacts.plan(store, wish, outlines=outlines, uses=LastUses(), now=now)
        assert {gone.key for gone in plan.artifacts}.isdisjoint(KEYS[:KEPT]), "these are pinned"
        artifacts.carry_out(store, plan, outlines=outlines, now=now)
        place.note("pruned", name, str(len(plan.artifacts)), str(len(plan.removal.layers)))
        time.sleep(chance.uniform(0, 0.5))


def look_after(place: Place, name: str, chance: random.Random) -> None:
    """Operators who verify: whatever the others do, nothing that is visible is ever damaged."""
    store = place.store(name)
    while True:
        found = verify(store, depth=chance.choice(["sizes", "digests", "deep"]), now=time.time())
        assert not found.report.damaged, found.report.faults
        place.note("verified", name, str(found.report.captures))
        time.sleep(chance.uniform(0, 0.5))


def count(place: Place, name: str, _chance: random.Random) -> None:
    """Somebody who rolls launch records up and asks for them; none that was seen may vanish."""
    store = place.store(name)
    seen: set[str] = set()
    while True:
        found = [launch.launch for launch in records.launches(store)]
        assert len(found) == len(set(found))
        assert seen <= set(found), f"{len(seen - set(found))} launch records vanished"
        seen = set(found)
        records.roll_up(store)
        place.note("counted", name, str(len(seen)))
        time.sleep(0.3)


Role = Callable[[Place, str, random.Random], None]


@dataclass
class Crowd:
    """The processes, and who started them."""

    place: Place
    chance: random.Random
    running: dict[int, tuple[Role, str]] = field(default_factory=dict)
    started: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def start(self, role: Role) -> None:
        word = role.__name__
        name = f"{word}-{self.started[word]}"
        self.started[word] += 1
        seed = self.chance.random()
        pid = os.fork()
        if pid == 0:
            os._exit(self._member(role, name, random.Random(seed)))
        self.running[pid] = (role, name)

    def _member(self, role: Role, name: str, chance: random.Random) -> int:
        try:
            role(self.place, name, chance)
        except MirrorError as error:  # a server under load, which is no lie
            self.place.note("gave_up", name, type(error).__name__, error.word, str(error))
            return 0
        except BaseException:  # noqa: BLE001 - told by the parent
            self.place.note("failed", name, json.dumps(traceback.format_exc()))
            return 1
        return 0

    def reap(self) -> None:
        """Replace those that are gone."""
        for pid, (role, name) in list(self.running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.running[pid]
                self.killed[role.__name__] += os.WIFSIGNALED(status)
                if os.WIFEXITED(status) and os.WEXITSTATUS(status):
                    self.failures.append(name)
                self.start(role)

    def done(self) -> int:
        """How often each thing was done at least."""
        noted = (len(self.place.noted(kind)) for kind in ("published", "pulled", "recorded"))
        if not self.place.noted("pruned") or not self.place.noted("verified"):
            return 0
        return min(*noted, self.killed["publish"])

    def end(self) -> None:
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)
        for pid in self.running:
            os.waitpid(pid, 0)


def meet(
    place: Place, *, seconds: float, seed: int, publishers: int, kill_every: float, at_least: int
) -> tuple[Crowd, list[str]]:
    """Let the crowd loose; what went wrong."""
    store_captures.GRACE_SECONDS = place.grace
    transfer.GRACE_SECONDS = place.grace  # type: ignore[attr-defined] # its own name for the same
    layout.ensure_layout(place.store("first"))
    crowd = Crowd(place, random.Random(seed))
    for key in KEYS[:KEPT]:
        pins.put(place.store("first"), key, Pin("the crowd", "2026-01-01T00:00:00Z"))
    for role in (*([publish] * publishers), pull, pull, pull, *([take_away] * 2), prune, prune, look_after, count):
        crowd.start(role)
    # One of those who remove lives, or none would ever get through a store that has become large.
    spared = next(pid for pid, (role, _name) in crowd.running.items() if role is take_away)
    end = time.monotonic() + seconds
    while not crowd.failures and (time.monotonic() < end or crowd.done() < at_least):
        time.sleep(crowd.chance.uniform(0, 2 * kill_every))
        victim = crowd.chance.choice(sorted(crowd.running))
        if crowd.running[victim][0] is not count and victim != spared:
            os.kill(victim, signal.SIGKILL)
        crowd.reap()
    crowd.end()
    wrong = [f"{name}: {json.loads(said)}" for name, said in _failures(place)]
    return crowd, wrong or judge(place)


def _failures(place: Place) -> list[tuple[str, str]]:
    paths = sorted((place.directory / "journal" / "failed").glob("*"))
    return [(path.name, path.read_text().splitlines()[0]) for path in paths]


def judge(place: Place) -> list[str]:
    """What is wrong with a store that is at rest."""
    store, wrong = place.store("judge"), list[str]()
    finished = {(key, capture) for key, capture in place.noted("published") if KEYS.index(Key(key)) < KEPT}
    there = set()
    for key in KEYS:
        damaged: list[Damaged] = []
        for capture in captures(store, key, damaged):
            there.add((str(key), str(capture.digest)))
            try:
                check(store, capture)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is what we look for
                wrong.append(f"{key[:12]} {capture.digest[:16]}: {type(error).__name__}: {error}")
        wrong += [f"{each.name}: {each.reason}" for each in damaged]
    wrong += [f"lost: {key} {capture}" for key, capture in sorted(finished - there)]
    told = [launch.launch for launch in records.launches(store)]
    missing = {launch for (launch,) in place.noted("recorded")} - set(told)
    wrong += [f"launch record lost: {launch}" for launch in sorted(missing)]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--publishers", type=int, default=16)
    parser.add_argument("--kill-every", type=float, default=0.1)
    parser.add_argument("--at-least", type=int, default=0)
    parser.add_argument("--grace", type=float, default=8.0)
    parser.add_argument("--endpoint")
    parser.add_argument("--bucket")
    parser.add_argument("--prefix", default="crowd")
    options = parser.parse_args()
    bucket = None
    if options.endpoint:
        bucket = Bucket(options.bucket, options.prefix, endpoint=options.endpoint, region="us-east-1")
    place = Place(options.directory, options.grace, bucket)
    crowd, wrong = meet(
        place,
        seconds=options.seconds,
        seed=options.seed,
        publishers=options.publishers,
        kill_every=options.kill_every,
        at_least=options.at_least,
    )
    store = place.store("last")
    pulled = place.noted("pulled")
    told = {
        "store": str(store),
        "seed": options.seed,
        "started": dict(crowd.started),
        "killed": dict(crowd.killed),
        "gave_up": len(place.noted("gave_up")),
        "published": len(place.noted("published")),
        "pulled": len(pulled),
        "files_checked": sum(int(row[1]) for row in pulled),
        "removed": len(place.noted("removed")),
        "pruned": len(place.noted("pruned")),
        "layers_pruned": sum(int(row[1]) for row in place.noted("pruned")),
        "verified": len(place.noted("verified")),
        "layers_removed": sum(int(row[1]) for row in place.noted("removed")),
        "recorded": len(place.noted("recorded")),
        "record_objects": len(list(store.scan(layout.LAUNCHES))),
        "captures": len(list(store.scan(layout.ARTIFACTS))),
        "wrong": wrong,
    }
    print(json.dumps(told, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
