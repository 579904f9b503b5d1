"""What a look-up costs in a store of many artifacts: exact, near with remembered heads, near for the first time.

    python benchmarks/lookup.py [--artifacts 10 --artifacts 1000 ...] [--files 200]

Prints medians in milliseconds of the ready client, and the exponent of a near look-up over the number of artifacts.
"""

import argparse
import io
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cachemgr import digest, layer
from cachemgr.capture import LAYOUT, File, Layer, Manifest, Provenance, Section, Unit
from cachemgr.key import Factor, Key, Relations, derive
from cachemgr.level import Level
from cachemgr.lookup import Found, find
from cachemgr.store import Store
from cachemgr.store.captures import commit
from cachemgr.store.local import LocalStore

ROUNDS = 7


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--artifacts", type=int, action="append", help="how many artifacts the store has")
    arguments.add_argument("--files", type=int, default=200, help="how many files each capture has")
    given = arguments.parse_args()
    counts: Sequence[int] = given.artifacts or (10, 100, 1000, 10_000)
    print(f"{'artifacts':>10} {'exact ms':>10} {'near ms':>10} {'first near ms':>14}")
    near: list[tuple[int, float]] = []
    for count in counts:
        exact, remembered, first = measured(count, given.files)
        near.append((count, remembered))
        print(f"{count:>10} {exact * 1e3:>10.1f} {remembered * 1e3:>10.1f} {first * 1e3:>14.1f}")
    print(f"near look-ups grow with the {exponent(near):.2f}th power of the number of artifacts")


def measured(count: int, files: int) -> tuple[float, float, float]:
    """Seconds of an exact look-up, of a near one with remembered heads, and of the first near one."""
    with tempfile.TemporaryDirectory() as directory:
        store = LocalStore(Path(directory) / "store")
        keys = filled(store, count, files)
        heads = Path(directory) / "heads"
        wanted = factors(count)
        first = seconds(lambda: looked(store, wanted, heads, "near"), 1)
        remembered = seconds(lambda: looked(store, wanted, heads, "near"), ROUNDS)
        exact = seconds(lambda: looked(store, factors(count // 2), heads, "exact"), ROUNDS)
        assert len(keys) == count
    return exact, remembered, first


def looked(store: Store, wanted: tuple[Factor, ...], heads: Path, expected: str) -> Found:
    found = find([Level("local", store, "off", heads)], derive(wanted), wanted, Relations())
    assert found.result == expected, found.result
    return found


def seconds(step: Callable[[], object], rounds: int) -> float:
    taken = []
    for _round in range(rounds):
        begun = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def filled(store: Store, count: int, files: int, *, captures: int = 1) -> set[Key]:
    """A store with `count` artifacts of so many captures, which share one small layer and list `files` files each, of
    which no two captures of an artifact have one."""
    aside = store.scratch() / "layer"
    keys = set()
    for turn in range(captures):
        shared, packed = described(files, turn)
        aside.write_bytes(packed)
        for number in range(count):
            manifest = manifest_of(factors(number), shared)
            commit(store, manifest, {shared.digest: aside} if number == turn == 0 else {}, now=time.time())
            keys.add(manifest.key)
    return keys


def described(files: int, turn: int = 0) -> tuple[Layer, bytes]:
    """A layer that says it has so many files, of which no two turns have one, and its bytes, which have one file."""
    unit, packed = small_layer()
    listed = tuple(
        Unit(f"aotautograd/a{turn}{number:05d}", (File(f"aotautograd/a{turn}{number:05d}/x", 1, unit.digest),))
        for number in range(files)
    )
    return Layer(digest.of_bytes(packed), len(packed), unit.digest, 0, (Section("inductor", listed),)), packed


def small_layer() -> tuple[File, bytes]:
    file = File("aotautograd/a/x", 1, digest.of_bytes(b"x"))
    target = io.BytesIO()
    layer.pack((Section("inductor", (Unit("aotautograd/a", (file,)),)),), lambda _domain, _file: iter((b"x",)), target)
    return file, target.getvalue()


def factors(number: int) -> tuple[Factor, ...]:
    """As many as a real launch has, different in one argument."""
    guards = tuple(Factor(f"guard.{index}", f"value {index} " * 5, "guard") for index in range(20))
    return (*guards, Factor("program.args", f"[{number}]", "match"))


def manifest_of(named: tuple[Factor, ...], its: Layer) -> Manifest:
    return Manifest(
        layout=LAYOUT,
        key=derive(named),
        factors=named,
        needs=Relations(),
        engine="torch",
        engine_version="2.13.0",
        model="train.py",
        device="cpu",
        created="2026-01-01T00:00:00Z",
        launch="x",
        complete=True,
        layers=(its,),
        provenance=Provenance("0", "benchmark"),
    )


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """The slope of a least-squares line through the logarithms; of the larger half, where constants no longer rule."""
    logs = [(math.log(count), math.log(taken)) for count, taken in points[len(points) // 2 :]]
    if len(logs) < 2:
        return math.nan
    mean_x, mean_y = statistics.mean(x for x, _y in logs), statistics.mean(y for _x, y in logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _y in logs)


if __name__ == "__main__":
    main()
