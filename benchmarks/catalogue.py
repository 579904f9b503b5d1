"""What `ls`, `stats` and `why` cost with many artifacts and launches, whole processes.

    python benchmarks/catalogue.py [--artifacts N] [--launches N] [--rounds N] [--json FILE]

The store is made: real manifests of made files, one launch object for each thousand starts. Each count is measured
twice, at half of it as well, so that the ratio says whether cost grows linearly. Bytes of the database are told.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from measure import spread, table

from cachemgr.capture import LAYOUT, File, Launch, Layer, Manifest, Provenance, Section, Unit, encode_launch
from cachemgr.clock import written
from cachemgr.digest import Digest
from cachemgr.key import Factor, Key, Relations, derive
from cachemgr.store import Store, records
from cachemgr.store.captures import commit
from cachemgr.store.local import LocalStore

FILES = 40
_BEGAN = 1_790_000_000
_COMMANDS = (
    ("ls -q", ("ls", "-q")),
    ("ls", ("ls",)),
    ("ls --json", ("ls", "--json")),
    ("stats --by model", ("stats", "--by", "model")),
    ("why", ("why",)),
    ("--help", ("--help",)),
)


class Row(msgspec.Struct, frozen=True):
    """Seconds of one command, the first time (the store is read) left out."""

    command: str
    artifacts: int
    launches: int
    seconds: tuple[float, ...]
    cpu: tuple[float, ...]
    """Of all its threads: what is left of it on a machine that others use as well."""


def _digest(number: int) -> Digest:
    return Digest(f"sha256:{number:064x}")


def _factors(number: int) -> tuple[Factor, ...]:
    shared = [Factor(f"package.p{index}", f"1.{index}", "guard") for index in range(60)]
    return (*shared, Factor("flags.max-model-len", str(number), "match"))


def _manifest(number: int) -> Manifest:
    files = tuple(File(f"K{index:04}/kernel.cubin", 4000, _digest(number * FILES + index)) for index in range(FILES))
    units = tuple(Unit(file.path.split("/")[0], (file,)) for file in files)
    layer = Layer(_digest(number), 20_000, _digest(10**9 + number), 200_000, (Section("triton", units),))
    factors = _factors(number)
    return Manifest(
        layout=LAYOUT,
        key=derive(factors),
        factors=tuple(sorted(factors)),
        needs=Relations(),
        engine="vllm",
        engine_version="0.32.0",
        model=f"acme/model-{number % 37}",
        device="NVIDIA H200",
        created=written(_BEGAN + number),
        launch=f"made-{number}",
        complete=True,
        layers=(layer,),
        provenance=Provenance("0.1.0", "made", ("vllm", "serve")),
        timings={"run": 60.0, "init_engine": 45.0},
    )


def _launch(number: int, key: Key, host: str) -> Launch:
    warm = number % 5 > 0
    return Launch(
        schema=1,
        launch=f"{number:012}",
        key=key,
        result="exact" if warm else "none",
        artifact=key if warm else None,
        where="local" if warm else None,
        verdict="used" if warm else "cold",
        reasons=(),
        restored_files=FILES if warm else 0,
        restored_bytes=FILES * 4000,
        restore_seconds=0.3,
        present_files=0,
        added={} if warm else {"triton": FILES},
        added_after_ready=0,
        phases={"run": 70.0, "init_engine": 12.0},
        published=None,
        errors={} if number % 50 else {"mirror throttled": 1},
        started=written(_BEGAN + number * 60),
        exit_code=0,
        engine="vllm",
        engine_version="0.32.0",
        model=f"acme/model-{number % 37}",
        device="NVIDIA H200",
        host=host if number % 100 == 0 else f"host-{number % 100}",
    )


def fill(store: Store, artifacts: int, launches: int) -> None:
    """Make a store with so many of both."""
    keys = []
    for number in range(artifacts):
        manifest = _manifest(number)
        commit(store, manifest, {}, now=_BEGAN)
        keys.append(manifest.key)
    host, by_day = os.uname().nodename, dict[str, dict[str, bytes]]()
    for number in range(launches):
        launch = _launch(number, keys[number % len(keys)], host)
        by_day.setdefault(launch.started[:10], {})[launch.launch] = encode_launch(launch)
    for day, rows in by_day.items():
        records._store(store, day, rows)  # noqa: SLF001 - as a roll-up leaves them


def measured(artifacts: int, launches: int, rounds: int) -> tuple[list[Row], int, float]:
    """The rows, the bytes of the database, and the seconds of the first reading."""
    with tempfile.TemporaryDirectory() as place:
        home = Path(place) / "home"
        fill(LocalStore(home / "store"), artifacts, launches)
        environ = {"PATH": os.environ["PATH"], "HOME": place, "CACHEMGR_HOME": str(home)}
        first, _cpu = _timed(("ls", "-q"), environ)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name, _words in _COMMANDS}
        for _round in range(rounds):
            for name, words in _COMMANDS:
                found[name].append(_timed(words, environ))
        rows = [
            Row(name, artifacts, launches, tuple(wall for wall, _cpu in costs), tuple(cpu for _wall, cpu in costs))
            for name, costs in found.items()
        ]
        return rows, (home / "catalogue.db").stat().st_size, first


def _timed(words: tuple[str, ...], environ: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    began, used = time.perf_counter(), _used()
    command = [sys.executable, "-m", "cachemgr", *words]
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began, _used() - used


def _used() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifacts", type=int, default=10_000)
    parser.add_argument("--launches", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    half, half_bytes, half_first = measured(given.artifacts // 2, given.launches // 2, given.rounds)
    whole, whole_bytes, first = measured(given.artifacts, given.launches, given.rounds)
    lines = [
        (row.command, *(spread(costs) for costs in (less.seconds, row.seconds, less.cpu, row.cpu)))
        for less, row in zip(half, whole, strict=True)
    ]
    print(table(("command", "half, s", "whole, s", "half, CPU s", "whole, CPU s"), lines))
    print(f"first reading {half_first:.1f} s and {first:.1f} s; database {half_bytes:,} and {whole_bytes:,} bytes")
    if given.json:
        given.json.write_bytes(msgspec.json.encode(whole))


if __name__ == "__main__":
    main()
