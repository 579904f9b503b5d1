"""What trust adds: the MAC of a capture, its signature, and both looked at before a restore, beside the same without.

    python benchmarks/trust.py --trees DIR --dir DIR [--rounds N]

Whole journeys take turns, with and without, in processor seconds, which other work on the machine disturbs less. What
is added is smaller than even their noise, so the added calls are timed by themselves as well, by the clock and in the
same store: the least of many.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import journeys
from journeys import KEY, Sample
from measure import median, paired, spread, table

from cachemgr.clock import written
from cachemgr.machine import Machine
from cachemgr.signature import Signer, new_private_key
from cachemgr.statcache import StatCache
from cachemgr.store import layout
from cachemgr.store.captures import captures, listing
from cachemgr.store.local import LocalStore
from cachemgr.trust import Trust, TrustedKey, policies_of

_TIMES = 50


class Bench:
    """One tree, a signer, and machines that do or do not trust."""

    def __init__(self, sample: Sample, scratch: Path, rounds: int) -> None:
        self._sample, self._scratch, self._rounds = sample, scratch, rounds
        self._signer = Signer(new_private_key(), where="a benchmark")
        self._machine = Machine(scratch / "machine.key")
        keys = {self._signer.public.id: TrustedKey(self._signer.public)}
        self._signed = Trust(policies_of(("require",), private=True), None, keys=keys)
        self._own = Trust(policies_of(("require",), private=True), self._machine)
        self._store = scratch / "store"
        self._number = 0

    def rows(self) -> Iterator[list[str]]:
        """One row a journey and mark: the ratio to the same without, and what the added calls take alone."""
        name, rounds = self._sample.name, self._rounds
        for mark, with_it, alone in (
            ("MAC", self._captured_marked, self._mark),
            ("signature", self._captured_signed, self._sign),
        ):
            pair = paired(with_it, self._captured, rounds=rounds)
            yield self._row(f"{name}: capture with {mark}", pair.ratios, pair.peer, alone)
        self._captured_signed()
        self._mark()
        for mark, trust in (("MAC", self._own), ("signature", self._signed)):
            judge = partial(trust.standing, "require")
            pair = paired(lambda judge=judge: self._restored(judge), self._restored_plainly, rounds=rounds)  # type: ignore[misc]
            yield self._row(
                f"{name}: restore under require, {mark}", pair.ratios, pair.peer, partial(self._judge, trust)
            )

    def _row(self, what: str, ratios: list[float], plain: tuple[float, ...], alone: Callable[[], object]) -> list[str]:
        seconds = min(_bare(alone) for _round in range(_TIMES))
        return [
            what,
            f"{median(plain):.3f} s",
            spread(ratios),
            f"{1e3 * seconds:.2f} ms",
            f"{seconds / median(plain):.2%}",
        ]

    def _captured(self) -> float:
        shutil.rmtree(self._store, ignore_errors=True)
        return _spent(lambda: journeys.capture(self._sample, self._store, StatCache({})))

    def _captured_marked(self) -> float:
        shutil.rmtree(self._store, ignore_errors=True)
        marks = self._machine.mark
        return _spent(lambda: journeys.capture(self._sample, self._store, StatCache({}), marks=marks))

    def _captured_signed(self) -> float:
        shutil.rmtree(self._store, ignore_errors=True)

        def step() -> None:
            journeys.capture(self._sample, self._store, StatCache({}))
            self._sign()

        return _spent(step)

    def _restored(self, judge: Callable[..., object]) -> float:
        with self._room() as room:
            return _spent(lambda: journeys.restored(self._sample, self._store, room, judge))  # type: ignore[arg-type]

    def _restored_plainly(self) -> float:
        with self._room() as room:
            return _spent(lambda: journeys.restored(self._sample, self._store, room))

    @contextmanager
    def _room(self) -> Iterator[Path]:
        self._number += 1
        room = self._scratch / f"room-{self._number}"
        yield room
        shutil.rmtree(room)

    def _sign(self) -> None:
        """As `cachemgr sign` does after it has verified everything."""
        store = LocalStore(self._store)
        for capture in captures(store, KEY, []):
            signed = written(time.time())
            name = layout.signature_name(KEY, capture.digest, self._signer.public.id, signed)
            store.delete(name)
            store.put(name, self._signer.sign(capture.digest, KEY, signed=signed))

    def _mark(self) -> None:
        store = LocalStore(self._store)
        for capture in captures(store, KEY, []):
            for name, data in self._machine.mark(KEY, capture.digest).items():
                store.delete(name)
                store.put(name, data)

    def _judge(self, trust: Trust) -> None:
        store = LocalStore(self._store)
        for name, (key, beside) in listing(store, layout.artifact_prefix(KEY)).items():
            capture = layout.capture_of(name)
            assert capture is not None
            assert trust.standing("require", store, key, capture, beside).by


def _spent(step: Callable[[], object]) -> float:
    """Processor seconds of this process, all threads."""
    begun = time.process_time()
    step()
    return time.process_time() - begun


def _bare(step: Callable[[], object]) -> float:
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def _import_seconds(rounds: int) -> float:
    """What the first signature of a process costs more: importing `cryptography`, in interpreters of their own."""
    code = "from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey"
    importing = partial(subprocess.run, [sys.executable, "-c", code], check=True)
    plain = partial(subprocess.run, [sys.executable, "-c", ""], check=True)
    return median(paired(lambda: _bare(importing), lambda: _bare(plain), rounds=rounds).added)


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", type=Path, required=True, help="directory with *.tar.xz of real caches")
    parser.add_argument("--dir", type=Path, required=True, help="where to work")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        scratch = Path(directory)
        samples = journeys.extracted(options.trees, scratch)
        rows = [row for each in samples for row in Bench(each, scratch, options.rounds).rows()]
    headers = ("journey", "without (CPU)", "ratio, with to without", "what is added, alone", "of the journey")
    print(table(headers, rows))
    importing = 1e3 * _import_seconds(options.rounds)
    print(f"\nImporting cryptography, once in a process that verifies or signs: {importing:.0f} ms")


if __name__ == "__main__":
    main()
