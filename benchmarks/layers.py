"""Capture and restore against `tar | zstd -10 --long=27`, `zstd -d | tar -x` and `cp -a`, paired in one run.

    python benchmarks/layers.py --trees DIR --dir DISK --dir /dev/shm [--made FILES] [--rounds N] [--json FILE]

What is compared, and how to read it, is in README.md beside this file.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import journeys
import msgspec
from journeys import Again, Sample, Spent
from made import FILES_PER_PROGRAM, Maker
from measure import Paired, exponent, median, paired, spread, table, timed

from cachemgr.statcache import StatCache

T = TypeVar("T")

MADE_FILES = 20_000
_SHARES = (8, 4, 2, 1)
"""Of the largest made tree, the sizes over which cost is fitted."""
_INDUCTOR = "inductor"
_HERE = Path(__file__).parent


class Figures(msgspec.Struct, frozen=True):
    """Everything measured of one sample on one file system."""

    sample: str
    place: str
    files: int
    bytes: int
    capture: Paired
    """Both durable: ours commits with fsync, the peer's file gets the same."""
    capture_unflushed: Paired
    """The same rounds without the seconds spent in fsync on either side."""
    restore: Paired
    whole_restore: Paired
    """Whole processes: the interpreter starts and imports, too."""
    copy: Paired
    """The restore against `cp -a` of the tree itself: nothing fetched, unpacked or checked."""
    stored: int
    """Bytes of the store, manifest included."""
    stored_peer: int
    """One tar of the whole tree."""
    stored_by_domain: int
    """One tar of each domain, as the store keeps one layer of each."""
    peaks: dict[str, int]
    again: Again


class Line(msgspec.Struct, frozen=True):
    """Cost over number of files."""

    place: str
    sizes: tuple[int, ...]
    capture: tuple[float, ...]
    restore: tuple[float, ...]

    @property
    def exponents(self) -> tuple[float, float]:
        """Of capture and restore."""
        return exponent(self.sizes, self.capture), exponent(self.sizes, self.restore)


class Document(msgspec.Struct, frozen=True):
    """Every value of a run."""

    schema: int
    figures: list[Figures]
    lines: list[Line]
    startup: Paired
    """The imports of a restore, and a bare interpreter."""


class _Bench:
    """One sample in one scratch directory."""

    def __init__(self, sample: Sample, scratch: Path, *, rounds: int) -> None:
        self._sample, self._rounds = sample, rounds
        self._store, self._file, self._target = scratch / "store", scratch / "peer.tar.zst", scratch / "restored"
        self._described = scratch / "sample.json"
        self._described.write_bytes(msgspec.json.encode(sample))
        self._unflushed: list[float] = []
        self._unflushed_peer: list[float] = []

    def run(self, place: str) -> Figures:
        """Measure everything."""
        seen = [entry for tree in journeys.trees(self._sample) for entry in tree.seen.values()]
        capture = paired(self._capture, self._tar_capture, rounds=self._rounds)
        unflushed = Paired(tuple(self._unflushed[1:]), tuple(self._unflushed_peer[1:]))
        self._check_restore()
        peaks = {
            journey: self._child(journey, place, Spent).peak
            for journey, place in (
                ("restore", self._store),
                ("tar-restore", self._file),
                ("capture", self._other_store()),
                ("tar-capture", self._file),
            )
        }
        return Figures(
            sample=self._sample.name,
            place=place,
            files=len(seen),
            bytes=sum(entry.size for entry in seen),
            capture=capture,
            capture_unflushed=unflushed,
            restore=paired(self._restore, self._tar_restore, rounds=self._rounds),
            whole_restore=paired(self._whole_restore, self._tar_restore, rounds=self._rounds),
            copy=paired(self._restore, self._copy, rounds=self._rounds),
            stored=sum(path.stat().st_size for path in self._store.rglob("*") if path.is_file()),
            stored_peer=self._file.stat().st_size,
            stored_by_domain=sum(self._tar_size_of(below) for _domain, below in self._sample.each()),
            peaks=peaks,
            again=self._child("again", self._other_store(), Again),
        )

    def capture_and_restore(self) -> tuple[float, float]:
        """Ours alone, once."""
        return self._capture(), self._restore()

    def _capture(self) -> float:
        shutil.rmtree(self._store, ignore_errors=True)
        with _seconds_in_fsync() as flushing:
            seconds = timed(lambda: journeys.capture(self._sample, self._store, StatCache({})))
        self._unflushed.append(seconds - sum(flushing))
        return seconds

    def _tar_capture(self) -> float:
        self._file.unlink(missing_ok=True)
        seconds = timed(lambda: journeys.tar_capture(self._sample, self._file))
        self._unflushed_peer.append(seconds)
        begun = time.perf_counter()
        journeys.settle(self._file)
        return seconds + time.perf_counter() - begun

    def _restore(self) -> float:
        self._clear()
        return timed(lambda: journeys.restored(self._sample, self._store, self._target))

    def _tar_restore(self) -> float:
        self._clear()
        return timed(lambda: journeys.tar_restore(self._file, self._target))

    def _whole_restore(self) -> float:
        self._clear()
        return timed(lambda: self._child("restore", self._store, Spent))

    def _copy(self) -> float:
        self._clear()
        return timed(lambda: subprocess.run(["cp", "-a", self._sample.root, self._target], check=True))

    def _tar_size_of(self, below: str) -> int:
        journeys.tar_capture(self._sample, self._file, below)
        return self._file.stat().st_size

    def _clear(self) -> None:
        shutil.rmtree(self._target, ignore_errors=True)

    def _other_store(self) -> Path:
        other = self._store.with_name("other")
        shutil.rmtree(other, ignore_errors=True)
        return other

    def _child(self, journey: str, place: Path, kind: type[T]) -> T:
        self._clear()
        command = [sys.executable, _HERE / "journeys.py", journey, self._described, place, self._target]
        done = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE)
        return msgspec.json.decode(done.stdout, type=kind)

    def _check_restore(self) -> None:
        """What is timed must be right: every file back, its access forgotten, and equal unless it was relocated."""
        self._clear()
        done = journeys.restored(self._sample, self._store, self._target)
        for domain, below in self._sample.each():
            for path in done.offered[domain.name]:
                original, copy = f"{self._sample.root}/{below}/{path}", f"{self._target}/{below}/{path}"
                assert os.stat(copy).st_atime_ns == 0, f"{copy} looks read"
                relocated = domain.relocation_of(path) is not None
                assert relocated or Path(copy).read_bytes() == Path(original).read_bytes(), f"{copy} differs"


@contextmanager
def _seconds_in_fsync() -> Iterator[list[float]]:
    """The seconds of each `os.fsync` that happens inside."""
    real, seconds = os.fsync, list[float]()

    def measured(descriptor: int) -> None:
        begun = time.perf_counter()
        real(descriptor)
        seconds.append(time.perf_counter() - begun)

    os.fsync = measured  # type: ignore[assignment]
    try:
        yield seconds
    finally:
        os.fsync = real


def _sizes(made: int) -> tuple[int, ...]:
    """Whole programs each."""
    return tuple(made // share // FILES_PER_PROGRAM * FILES_PER_PROGRAM for share in _SHARES)


def _line(maker: Maker, scratch: Path, place: str, *, made: int, rounds: int) -> Line:
    """Sizes take turns within each round, so that noise does not bend the line."""
    benches, sizes = [], _sizes(made)
    for size in sizes:
        own = scratch / str(size)
        maker.write(own / "tree" / _INDUCTOR, size)
        benches.append(_Bench(_made(own / "tree"), own, rounds=rounds))
    costs = [[bench.capture_and_restore() for bench in benches] for _ in range(rounds + 1)][1:]
    captures, restores = ([median(each) for each in _columns(costs, at)] for at in (0, 1))
    return Line(place, sizes, tuple(captures), tuple(restores))


def _columns(costs: Sequence[Sequence[tuple[float, float]]], at: int) -> list[list[float]]:
    return [[pair[at] for pair in column] for column in zip(*costs, strict=True)]


def _samples(archives: Path | None, maker: Maker, made: int, scratch: Path) -> Iterator[Sample]:
    yield from journeys.extracted(archives, scratch)
    root = scratch / "trees" / "made"
    maker.write(root / _INDUCTOR, _sizes(made)[-1])
    yield _made(root)


def _made(root: Path) -> Sample:
    return Sample("made", str(root), (("inductor", _INDUCTOR),))


def _file_system(directory: Path) -> str:
    command = ["df", "--output=fstype", str(directory)]
    return subprocess.check_output(command, text=True).split()[-1]


def _measure(directory: Path, options: argparse.Namespace) -> tuple[list[Figures], Line]:
    place, maker = _file_system(directory), Maker()
    with tempfile.TemporaryDirectory(prefix="cachemgr-bench-", dir=directory) as name:
        scratch = Path(name)
        figures = []
        for sample in _samples(options.trees, maker, options.made, scratch):
            figures.append(_Bench(sample, scratch, rounds=options.rounds).run(place))
            print(f"measured {sample.name} on {place}", file=sys.stderr)
        line = _line(maker, scratch / "line", place, made=options.made, rounds=options.rounds)
    return figures, line


def _startup(rounds: int) -> Paired:
    """What a whole-process restore pays before the journey starts, over an interpreter that does nothing."""

    def start(code: str) -> Callable[[], float]:
        return lambda: timed(lambda: subprocess.run([sys.executable, "-c", code], check=True))

    return paired(start("import cachemgr.warm, cachemgr.store.local"), start("pass"), rounds=rounds)


def _report(figures: Sequence[Figures], lines: Sequence[Line], startup: Paired) -> str:
    speed = table(
        (
            "tree",
            "on",
            "files",
            "capture s",
            "ratio",
            "ratio without fsync",
            "restore s",
            "ratio",
            "whole process",
            "to cp -a",
        ),
        [
            (
                each.sample,
                each.place,
                f"{each.files:,}",
                f"{median(each.capture.ours):.3f}",
                spread(each.capture.ratios),
                spread(each.capture_unflushed.ratios),
                f"{median(each.restore.ours):.3f}",
                spread(each.restore.ratios),
                f"{median(each.whole_restore.ours):.3f} s, {spread(each.whole_restore.ratios)}",
                spread(each.copy.ratios),
            )
            for each in figures
        ],
    )
    space = table(
        (
            "tree",
            "on",
            "bytes",
            "stored",
            "to one tar",
            "to a tar per domain",
            *(f"peak of {name}, MB" for name in figures[0].peaks),
        ),
        [
            (
                each.sample,
                each.place,
                f"{each.bytes:,}",
                f"{each.stored:,}",
                f"{each.stored / each.stored_peer:.3f}",
                f"{each.stored / each.stored_by_domain:.3f}",
                *(f"{peak / 1e6:.0f}" for peak in each.peaks.values()),
            )
            for each in figures
        ],
    )
    again = table(
        ("tree", "on", "opened at first", "again s", "opened", "written", "other key s", "opened", "written"),
        [(each.sample, each.place, *_again_cells(each.again)) for each in figures],
    )
    linear = table(
        ("on", *(f"{size:,}" for size in lines[0].sizes), "exponent of capture", "exponent of restore"),
        [
            (
                each.place,
                *(f"{a:.2f} / {b:.2f} s" for a, b in zip(each.capture, each.restore, strict=True)),
                *(f"{power:.2f}" for power in each.exponents),
            )
            for each in lines
        ],
    )
    start = f"Imports of a restore: {median(startup.ours):.3f} s; bare interpreter: {median(startup.peer):.3f} s."
    return f"{speed}\n\n{space}\n\n{again}\n\n{linear}\n\n{start}"


def _again_cells(again: Again) -> list[str]:
    values: tuple[int | float, ...] = msgspec.structs.astuple(again)
    return [f"{value:.3f}" if isinstance(value, float) else f"{value:,}" for value in values]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--trees", type=Path, metavar="DIR", help="real trees: a directory with *.tar.xz")
    parser.add_argument("--dir", type=Path, action="append", metavar="DIR", help="where to work; give disk and tmpfs")
    parser.add_argument("--made", type=int, default=MADE_FILES, help="files of the largest made tree, at least 160")
    parser.add_argument("--rounds", type=int, default=7, help="pairs that count (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measured value, too")
    options = parser.parse_args()
    measured = [_measure(directory, options) for directory in options.dir or [Path(tempfile.gettempdir())]]
    figures = [each for found, _line_of in measured for each in found]
    lines = [line for _found, line in measured]
    startup = _startup(options.rounds)
    print(_report(figures, lines, startup))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.encode(Document(1, figures, lines, startup)))


if __name__ == "__main__":
    main()
