"""What cachemgr costs before it does anything: `--help`, `ls`, the plugin, and `run` before the child starts, whether
it hits or misses.

    python benchmarks/startup.py [--rounds N] [--json FILE]

Whole processes, paired. The child that is started is `date`, or a Python that prints the time; its own start is
measured beside it in each round and taken off. For a hit that Python has a torch by all that is looked at, and finds a
made tree restored into a new root each time.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import journeys
import msgspec
from made import FILES_PER_PROGRAM, Maker
from measure import Paired, median, paired, spread, table, timed

from cachemgr.key import Factor
from cachemgr.statcache import StatCache

HEAVY = frozenset(
    {"alembic", "boto3", "botocore", "cryptography", "numpy", "sqlalchemy", "starlette", "torch", "urllib3", "vllm"}
)
CATALOGUE = frozenset({"alembic", "sqlalchemy"})
"""What `ls` asks; whoever keeps the tables has to load it."""
OTHER_ARTIFACTS = 20
FILES_IN_EACH = 25 * FILES_PER_PROGRAM
_CACHEMGR = (sys.executable, "-m", "cachemgr")
_SHIM = "import cachemgr.plugin; cachemgr.plugin.register()"
_STAMP = "import time; print(time.time_ns())"
_PROGRAM = """\
import os, shutil, sys, time
print(time.time_ns())
root = os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.devnull)
found = [os.path.join(place, name) for place, _, names in os.walk(root) for name in names]
for path in found:
    open(path, "rb").read(1)
if root != os.devnull and not found:
    shutil.copytree(sys.argv[1], root, dirs_exist_ok=True)
"""
"""Compiles nothing: it takes what it would compile from a made tree."""


class Row(msgspec.Struct, frozen=True):
    """One comparison: a ratio, or seconds added, against its target."""

    name: str
    cost: Paired
    added: bool
    target: float
    heavy: tuple[str, ...]
    """Heavy modules that the command imported and has no business with; should be none."""

    @property
    def values(self) -> list[float]:
        """Round by round, what the target is about."""
        return self.cost.added if self.added else self.cost.ratios


class Document(msgspec.Struct, frozen=True):
    """Every value of a run."""

    schema: int
    rows: list[Row]


class _Home:
    """A private HOME, so that nothing of this user is read or written."""

    def __init__(self, root: Path) -> None:
        keep = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        self.environ = keep | {"HOME": str(root), "CACHEMGR_HOME": str(root / "state")}
        self.store = root / "state" / "store"

    def whole(self, *command: str) -> Callable[[], float]:
        """Seconds of a whole process."""
        return lambda: timed(
            lambda: subprocess.run(
                command, env=self.environ, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        )

    def until_child(self, *command: str, roots: Iterator[Path] | None = None) -> Callable[[], float]:
        """Seconds until the innermost command, which prints the time in nanoseconds, runs. `roots` has what holds the
        live caches of each start, where it is not the usual one."""

        def step() -> float:
            environ = self.environ if roots is None else self.environ | {"VLLM_CACHE_ROOT": str(next(roots))}
            begun = time.time_ns()
            printed = subprocess.run(
                command, env=environ, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ).stdout
            return (int(printed) - begun) / 1e9

        return step

    def heavy(self, *arguments: str) -> tuple[str, ...]:
        """Which heavy modules `cachemgr` with these arguments imports, by the interpreter's own log."""
        return self.imported(*_CACHEMGR[1:], *arguments)

    def imported(self, *words: str) -> tuple[str, ...]:
        """Which heavy modules an interpreter with these words imports."""
        command = [sys.executable, "-X", "importtime", *words]
        log = subprocess.run(command, env=self.environ, check=True, capture_output=True, text=True).stderr
        imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in log.splitlines() if "|" in line}
        assert "cachemgr" in imported, "the import log says nothing"
        return tuple(sorted(imported & HEAVY))


def _fill(home: _Home, scratch: Path) -> None:
    """Artifacts of other programs, which a miss has to compare itself with."""
    Maker().write(scratch / "tree" / "inductor", FILES_IN_EACH)
    sample = journeys.Sample("made", str(scratch / "tree"), (("inductor", "inductor"),))
    for number in range(OTHER_ARTIFACTS):
        factors = (*journeys.FACTORS, Factor("number", str(number), "match"))
        journeys.capture(sample, home.store, StatCache({}), factors=factors)


def _hit(home: _Home, scratch: Path, rounds: int) -> Row:
    """A start that is restored in a root of its own, as on another machine."""
    tree, program, site = scratch / "hit", scratch / "program.py", scratch / "site"
    Maker().write(tree, FILES_IN_EACH)
    program.write_text(_PROGRAM)
    info = site / "torch-2.13.0+cpu.dist-info"
    for path, text in (
        (site / "torch" / "version.py", "__version__ = '2.13.0+cpu'\ncuda = None\nhip = None\n"),
        (info / "METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n"),
        (info / "RECORD", "torch/version.py,sha256=x,1\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    home.environ["PYTHONPATH"] = str(site)
    child = (sys.executable, str(program), str(tree))
    run = (*_CACHEMGR, "run")
    roots = (scratch / f"root-{number}" for number in count())
    report = scratch / "report.json"
    for _cold_then_warm in range(2):
        home.until_child(*run, "--report", str(report), "--", *child, roots=roots)()
    said = msgspec.json.decode(report.read_bytes())
    assert (said["result"], said["verdict"], said["restored_files"]) == ("exact", "used", FILES_IN_EACH), said
    row = Row(
        f"`run -- python …` on a hit, {FILES_IN_EACH} files restored, seconds before the child",
        paired(home.until_child(*run, "--", *child, roots=roots), home.until_child(*child), rounds=rounds),
        added=True,
        target=0.4,
        heavy=home.heavy("run", "--", *child),
    )
    del home.environ["PYTHONPATH"]
    return row


def _others(home: _Home, rounds: int) -> list[Row]:
    """What is asked between starts, and what every process of an engine loads."""
    python, enabled = (sys.executable, "-c"), ("env", "CACHEMGR_ENABLE=1")
    return [
        Row(
            f"`cachemgr ls` of {OTHER_ARTIFACTS} artifacts over `import click, sqlalchemy`",
            paired(home.whole(*_CACHEMGR, "ls"), home.whole(*python, "import click, sqlalchemy"), rounds=rounds),
            added=False,
            target=2,
            heavy=tuple(sorted(set(home.heavy("ls")) - CATALOGUE)),
        ),
        Row(
            "the plugin in a process of an engine, seconds added",
            paired(home.whole(*enabled, *python, _SHIM), home.whole(*enabled, *python, "pass"), rounds=rounds),
            added=True,
            target=0.1,
            heavy=home.imported("-c", _SHIM),
        ),
    ]


def _rows(home: _Home, rounds: int, when: str) -> list[Row]:
    run, off = (*_CACHEMGR, "run"), ("--publish", "never", "--")
    date, python = ("date", "+%s%N"), (sys.executable, "-c", _STAMP)
    return [
        Row(
            f"`run --publish never -- date` {when}, seconds before the child",
            paired(home.until_child(*run, *off, *date), home.until_child(*date), rounds=rounds),
            added=True,
            target=0.4,
            heavy=home.heavy("run", *off, "/bin/true"),
        ),
        Row(
            f"`run -- python -c …` {when}, seconds before the child",
            paired(home.until_child(*run, "--", *python), home.until_child(*python), rounds=rounds),
            added=True,
            target=0.4,
            heavy=home.heavy("run", "--", sys.executable, "-c", "pass"),
        ),
    ]


def _help(home: _Home, rounds: int) -> list[Row]:
    click = home.whole(sys.executable, "-c", "import click")
    true = home.whole("/bin/true")
    return [
        Row(
            "`cachemgr --help` over `import click`",
            paired(home.whole(*_CACHEMGR, "--help"), click, rounds=rounds),
            added=False,
            target=2,
            heavy=home.heavy("--help"),
        ),
        Row(
            "`run --publish never -- /bin/true` in an empty store, whole process, seconds added",
            paired(home.whole(*_CACHEMGR, "run", "--publish", "never", "--", "/bin/true"), true, rounds=rounds),
            added=True,
            target=0.4,
            heavy=home.heavy("run", "--publish", "never", "--", "/bin/true"),
        ),
    ]


def _report(rows: Sequence[Row]) -> str:
    return table(
        ("what", "ours, s", "peer, s", "median (min-max)", "target", "met", "heavy imports"),
        [
            (
                row.name,
                f"{median(row.cost.ours):.3f}",
                f"{median(row.cost.peer):.3f}",
                spread(row.values, ".3f" if row.added else ".2f"),
                f"{row.target:g}",
                "yes" if median(row.values) <= row.target and not row.heavy else "no",
                ", ".join(row.heavy) or "none",
            )
            for row in rows
        ],
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="pairs that count (default 15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measured value, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cachemgr-bench-") as name:
        home = _Home(Path(name) / "home")
        rows = _help(home, options.rounds) + _rows(home, options.rounds, "in an empty store")
        _fill(home, Path(name))
        rows += _rows(home, options.rounds, f"among {OTHER_ARTIFACTS} artifacts of {FILES_IN_EACH} files")
        rows += [*_others(home, options.rounds), _hit(home, Path(name), options.rounds)]
    print(_report(rows))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.encode(Document(1, rows)))


if __name__ == "__main__":
    main()
