"""How look-ups, `ls` and pruning grow with a store: the same operations at 10, 1,000 and 100,000 artifacts.

    python benchmarks/growth.py [--artifacts N]... [--files N] [--rounds N] [--dir DIR] [--json FILE]

One store grows from size to size, so that 100,000 artifacts are made once: real manifests of `--files` files (40 unless
told) that share one small layer, each with 21 factors. Whole processes for `ls`, the ready client for everything else.

exact           a look-up of a key that is there
near            a look-up of a key that is not there, the heads of all captures remembered from one before
first near      the same with nothing remembered: every manifest is read
first ls        `cachemgr ls -q` that reads what is new in the store into the catalogue
ls              `cachemgr ls -q` after it
ls --json       `cachemgr ls --json` after it
first prune     a plan over all captures, nothing remembered; it asks for fewer files in the store than there are
prune           the same plan again, over what the first remembered
deed            removing what it chose, which is half of the store; the last thing that is done to the largest store
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import lookup
import msgspec
from measure import exponent, median, table

from cachemgr.history import last_uses
from cachemgr.prune.artifacts import Wish, carry_out, plan
from cachemgr.prune.limits import Limits
from cachemgr.store.captures import commit
from cachemgr.store.local import LocalStore
from cachemgr.store.outlines import Outlines

SIZES = (10, 1_000, 100_000)
FILES = 40
_DAY = 86_400.0


class Row(msgspec.Struct, frozen=True):
    """One operation at one size of the store. Seconds by the clock."""

    operation: str
    artifacts: int
    seconds: tuple[float, ...]


class Growth:
    """A store in a home of its own."""

    def __init__(self, place: Path, files: int, rounds: int) -> None:
        self._home, self._heads, self._remembered = place / "home", place / "heads", place / "outlines"
        self._rounds, self.count = rounds, 0
        self._store = LocalStore(self._home / "store")
        self._layer, self._packed = lookup.described(files)

    def grow(self, count: int) -> None:
        """Until there are so many artifacts."""
        aside = self._store.scratch() / "layer"
        for number in range(self.count, count):
            if number == 0:
                aside.write_bytes(self._packed)
            manifest = lookup.manifest_of(lookup.factors(number), self._layer)
            commit(self._store, manifest, {self._layer.digest: aside} if number == 0 else {}, now=time.time())
        self.count = count

    def rows(self) -> list[Row]:
        """Every operation that leaves the store as it is."""
        absent, present = lookup.factors(10**9), lookup.factors(self.count // 2)
        for remembered in (self._heads, self._remembered):
            remembered.unlink(missing_ok=True)
        return [
            self._row("first near", lambda: lookup.looked(self._store, absent, self._heads, "near"), once=True),
            self._row("near", lambda: lookup.looked(self._store, absent, self._heads, "near")),
            self._row("exact", lambda: lookup.looked(self._store, present, self._heads, "exact")),
            self._row("first ls", lambda: self._cachemgr("ls", "-q"), once=True),
            self._row("ls", lambda: self._cachemgr("ls", "-q")),
            self._row("ls --json", lambda: self._cachemgr("ls", "--json")),
            self._row("first prune", self._plan, once=True),
            self._row("prune", self._plan),
        ]

    def deed(self) -> Row:
        """Half of the artifacts go; their shared layer stays."""
        outlines = Outlines(self._remembered)
        wish = Wish(Limits(max_files=max(self.count // 2, 1)))
        doomed = plan(self._store, wish, outlines=outlines, uses=last_uses(()), now=time.time() + 2 * _DAY)
        assert len(doomed.artifacts) >= self.count // 3, f"only {len(doomed.artifacts)} of {self.count} would go"
        seconds = _clocked(lambda: carry_out(self._store, doomed, outlines=outlines, now=time.time()))
        return Row("deed, per artifact", self.count, (seconds / len(doomed.artifacts),))

    def _plan(self) -> None:
        wish = Wish(Limits(max_files=self.count))
        made = plan(
            self._store,
            wish,
            outlines=Outlines(self._remembered),
            uses=last_uses(()),
            root=Path(str(self._store)),
            now=time.time() + 2 * _DAY,
        )
        assert made is not None

    def _cachemgr(self, *words: str) -> None:
        environ = {"PATH": os.environ["PATH"], "HOME": str(self._home), "CACHEMGR_HOME": str(self._home)}
        command = [sys.executable, "-m", "cachemgr", *words]
        done = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE)
        assert done.stdout, "ls says nothing"

    def _row(self, operation: str, step: Callable[[], object], *, once: bool = False) -> Row:
        row = Row(operation, self.count, tuple(_clocked(step) for _round in range(1 if once else self._rounds)))
        print(f"{self.count:>8,} {operation}: {median(row.seconds):.3f} s", file=sys.stderr, flush=True)
        return row


def _clocked(step: Callable[[], object]) -> float:
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def measured(sizes: Sequence[int], files: int, rounds: int, directory: Path) -> list[Row]:
    """All rows of all sizes, which are in growing order."""
    with tempfile.TemporaryDirectory(prefix="cachemgr-bench-", dir=directory) as name:
        growth = Growth(Path(name), files, rounds)
        rows = []
        for size in sizes:
            rows.append(Row("publish, per artifact", size, (_filling(growth, size),)))
            rows += growth.rows()
        return [*rows, growth.deed()]


def _filling(growth: Growth, size: int) -> float:
    """Seconds for each artifact that was added."""
    before = growth.count
    return _clocked(lambda: growth.grow(size)) / (size - before)


def shown(rows: Sequence[Row]) -> str:
    """A table: operations down, sizes across, and exponents over all sizes and over the last two."""
    sizes = sorted({row.artifacts for row in rows})
    lines = []
    for operation in dict.fromkeys(row.operation for row in rows):
        of = {row.artifacts: median(row.seconds) for row in rows if row.operation == operation}
        cells = [f"{of[size]:.4f}" if size in of else "" for size in sizes]
        powers = [f"{exponent(some, [of[n] for n in some]):.2f}" for some in (list(of), list(of)[-2:]) if len(of) > 1]
        lines.append((operation, *cells, *(powers or ("", ""))))
    return table(("operation, s", *(f"{size:,}" for size in sizes), "exponent", "of the last two"), lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifacts", type=int, action="append", help="sizes of the store, at least 4")
    parser.add_argument("--files", type=int, default=FILES, help="how many files each capture lists")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where to work")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measured(sorted(options.artifacts or SIZES), options.files, options.rounds, options.dir)
    print(shown(rows))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))


if __name__ == "__main__":
    main()
