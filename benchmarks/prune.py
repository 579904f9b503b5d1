"""What pruning costs: planning in a store of many artifacts, and making room after a publish.

    python benchmarks/prune.py [--artifacts 1000 --artifacts 10000] [--files 200] [--publishes 40]

Prints what a plan costs with nothing remembered and with what the plan before remembered, over real manifests and
records (two captures an artifact), and the deed per artifact; then what a publish costs with room made by itself
against one without, in pairs that take turns; and what share of a publish rounds of making room in the large stores
come to, which free a ninth of what is there. All in seconds of CPU, so that other work on the machine does not count,
and plans in seconds of the clock as well.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from lookup import filled
from made import Maker

from cachemgr.budget import ENOUGH, NEARLY, Budget
from cachemgr.capture import LAYOUT, Launch, Manifest, Provenance
from cachemgr.digest import base32_name
from cachemgr.domains.torch import INDUCTOR
from cachemgr.examine import Tree
from cachemgr.history import last_uses
from cachemgr.key import Factor, Relations, derive
from cachemgr.observe import scan
from cachemgr.prune.artifacts import Wish, carry_out, plan
from cachemgr.prune.automatic import Stored, make_room
from cachemgr.prune.limits import Limits
from cachemgr.prune.superseded import Looked
from cachemgr.publish import publish
from cachemgr.statcache import StatCache
from cachemgr.store import records
from cachemgr.store.captures import unasked
from cachemgr.store.local import LocalStore
from cachemgr.store.outlines import Outlines


class Taken(NamedTuple):
    """Seconds."""

    cpu: float
    clock: float


DAY = 86400.0
_FULL = 30
_FREED = (NEARLY - ENOUGH) / NEARLY
"""The share of a store that a round frees, and that publishes fill until the next."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--artifacts", type=int, action="append", help="how many artifacts the store has")
    arguments.add_argument("--files", type=int, default=200, help="how many files each capture lists")
    arguments.add_argument("--publishes", type=int, default=40, help="how many publishes of each kind")
    given = arguments.parse_args()
    counts: Sequence[int] = given.artifacts or (1000, 10_000)
    print(f"{'artifacts':>10} {'first plan s':>13} {'next plan s':>12} {'deed ms each':>13}   CPU (clock)")
    each: dict[int, float] = {}
    for count in counts:
        first, after, deed = planned(count, given.files)
        each[count] = after.cpu / (count * _FREED) + deed.cpu / count * 2
        shown = f"{first.cpu:.2f} ({first.clock:.2f})", f"{after.cpu:.2f} ({after.clock:.2f})"
        print(f"{count:>10} {shown[0]:>13} {shown[1]:>12} {deed.cpu / count * 2e3:>13.2f}")
    without, made, rounds = published(given.publishes)
    share = (made - without) / without
    print(f"publish {without * 1e3:.1f} ms of CPU, with room made {made * 1e3:.1f} ms ({rounds} times): {share:+.1%}")
    for count, cost in each.items():
        print(f"of {count} artifacts, each publish of one pays {cost * 1e3:.2f} ms for rounds: {cost / without:+.1%}")


def planned(count: int, files: int) -> tuple[Taken, Taken, Taken]:
    """What a first plan takes, a second, and the deed of half of the artifacts."""
    with tempfile.TemporaryDirectory() as directory:
        store, remembered = LocalStore(Path(directory) / "store"), Path(directory) / "outlines"
        keys = sorted(filled(store, count, files, captures=2))
        looked = Looked(Path(directory) / "looked")
        for number, key in enumerate(keys[: count // 10]):
            records.record(store, launch_of(key, number))

        def once() -> object:
            return plan(
                store,
                Wish(Limits(max_files=count)),
                outlines=Outlines(remembered),
                uses=last_uses(records.launches(store)),
                root=Path(str(store)),
                looked=looked,
                now=time.time() + 2 * DAY,
            )

        first, after = taken_by(once), min(taken_by(once) for _round in range(3))
        outlines = Outlines(remembered)
        doomed = plan(store, Wish(Limits(max_files=count // 2)), outlines=outlines, uses=last_uses(()), now=time.time())
        deed = taken_by(lambda: carry_out(store, doomed, outlines=outlines, now=time.time()))
        assert len(doomed.artifacts) >= count // 3
    return first, after, deed


def published(count: int) -> tuple[float, float, int]:
    """CPU seconds of a publish without and with room made by itself, on average over so many of each once the store is
    full, and how often room was made. Both publish the same, taking turns; the store has room for 30 of them."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    rounds = 0
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        Maker().write(place / "live", 400)
        stores = {room: LocalStore(place / f"store-{room}") for room in taken}
        limit = 0
        for turn in range(_FULL + count):
            tree = grown(place / "live", turn)
            for room in (False, True) if turn % 2 else (True, False):
                begun = time.process_time()
                publish(stores[room], draft_of(turn), [tree], StatCache({}), near=(), now_ns=time.time_ns())
                rounds += room and made_room(stores[room], place, limit)
                if turn >= _FULL:
                    taken[room].append(time.process_time() - begun)
                settle(Path(str(stores[room])))
            limit = limit or _FULL * sum(entry.size for entry in stores[True].scan(""))
    return statistics.mean(taken[False]), statistics.mean(taken[True]), rounds


def grown(live: Path, turn: int) -> Tree:
    """The tree with one more entry, so that no two publishes are of the same bytes."""
    data = f"entry {turn}".encode() * 1000
    entry = live / "aotautograd" / f"a{base32_name(str(turn).encode())}" / base32_name(data)
    entry.parent.mkdir(parents=True)
    entry.write_bytes(data)
    seen = scan(str(live), INDUCTOR.travels)
    return Tree(INDUCTOR, str(live), seen, frozenset(seen))


def made_room(store: LocalStore, place: Path, limit: int) -> bool:
    """As a launch does after each publish."""
    needed = Budget(limit, [str(store)], place / "usage", time.time_ns).excess(0)
    if not needed:
        return False
    stored = Stored(store, Outlines(place / "outlines"), unasked, place / "prune.lock", Looked(place / "looked"))
    make_room(stored, [str(place / "no-live")], [], needed, prune="benchmark", now=time.time())
    return True


def settle(root: Path) -> None:
    """Let layers look two days old, so that they may go."""
    old = time.time() - 2 * DAY
    for path in (root / "layers").rglob("*.zst"):
        os.utime(path, (old, old))


def draft_of(number: int) -> Manifest:
    factors = (Factor("engine", "torch", "guard"), Factor("program", str(number), "match"))
    complete = True
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Manifest(
        LAYOUT, derive(factors), factors, Relations(), "torch", "2.13.0", "benchmark", "cpu", created,
        f"launch-{number}", complete, (), Provenance("0", "host"),
    )  # fmt: skip


def launch_of(key: object, number: int) -> Launch:
    fields = {
        "schema": 1, "launch": f"launch-{number:06}", "key": key, "result": "exact", "artifact": key, "where": "local",
        "verdict": "used", "reasons": [], "restored_files": 1, "restored_bytes": 1, "restore_seconds": 0.1,
        "present_files": 0, "added": {}, "added_after_ready": 0, "phases": {}, "published": None, "errors": {},
        "started": f"2026-11-{number % 28 + 1:02}T00:00:00Z", "exit_code": 0, "engine": "vllm",
        "engine_version": "0.32.0", "model": "llama", "device": "NVIDIA H200", "host": "host",
    }  # fmt: skip
    return msgspec.convert(fields, Launch)


def taken_by(step: Callable[[], object]) -> Taken:
    cpu, clock = time.process_time(), time.perf_counter()
    step()
    return Taken(time.process_time() - cpu, time.perf_counter() - clock)


if __name__ == "__main__":
    main()
