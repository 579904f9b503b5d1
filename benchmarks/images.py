"""Images beside stores and skopeo: what exporting and importing a cache costs, and restoring it from a mounted image.

    python benchmarks/images.py --trees DIR [--dir DIR] [--rounds N]

Export and import of an image layout take turns with `skopeo copy` of the same image, which hashes and writes the same
blobs. A restore from the unpacked image takes turns with one from the store: it reads files and writes a tar of them
in memory instead of decompressing a layer. Needs skopeo, which also unpacks the image, as podman and CRI-O do.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import journeys
from journeys import KEY, Sample
from measure import median, paired, spread, table, timed

from cachemgr.export import Export
from cachemgr.oci.directory import Directory
from cachemgr.oci.images import ImageStore
from cachemgr.oci.unpacked import UnpackedStore
from cachemgr.statcache import StatCache
from cachemgr.store import Store
from cachemgr.store.captures import unasked
from cachemgr.store.local import LocalStore
from cachemgr.store.transfer import Transfer

_NOW = 2e9


class Bench:
    """One tree, as a store and as an image."""

    def __init__(self, sample: Sample, scratch: Path, rounds: int) -> None:
        self._sample, self._scratch, self._rounds = sample, scratch, rounds
        self._store, self._layout = scratch / "store", scratch / "layout"
        journeys.capture(sample, self._store, StatCache({}))
        self._export(self._layout)
        self._root = _unpacked(self._layout, scratch)

    def rows(self) -> Iterator[list[str]]:
        """One row a journey: seconds of both sides, and their ratio."""
        out = self._scratch / "out"
        yield self._row("export, beside skopeo copy", partial(self._export, out), partial(self._copy, out))
        yield self._row("import, beside skopeo copy", partial(self._import, out), partial(self._copy, out))
        mounted, stored = UnpackedStore(self._root), LocalStore(self._store)
        yield self._row(
            "restore from the mounted image, beside the store",
            partial(self._restore, mounted, out),
            partial(self._restore, stored, out),
        )

    def _row(self, what: str, ours: "partial[None]", peer: "partial[None]") -> list[str]:
        pair = paired(lambda: self._once(ours), lambda: self._once(peer), rounds=self._rounds)
        times = (f"{median(pair.ours):.3f} s", f"{median(pair.peer):.3f} s")
        return [f"{self._sample.name}: {what}", *times, spread(pair.ratios)]

    def _once(self, step: "partial[None]") -> float:
        shutil.rmtree(self._scratch / "out", ignore_errors=True)
        return timed(step)

    def _export(self, target: Path) -> None:
        journey = Export(LocalStore(self._store), Directory(target), judge=unasked)
        journey.carry(journey.plan([KEY]))

    def _import(self, target: Path) -> None:
        transfer = Transfer(ImageStore(Directory(self._layout)), LocalStore(target), judge=unasked)
        moved = transfer.carry(transfer.plan([KEY], now=_NOW))
        assert not moved.failures, moved.failures

    def _copy(self, target: Path) -> None:
        subprocess.run(["skopeo", "copy", "-q", f"oci:{self._layout}", f"oci:{target}:x"], check=True)

    def _restore(self, store: Store, target: Path) -> None:
        journeys.restored(self._sample, store, target)


def _unpacked(layout: Path, scratch: Path) -> Path:
    place = f"containers-storage:[vfs@{scratch}/graph+{scratch}/run]x/y:z"
    subprocess.run(["skopeo", "copy", "-q", f"oci:{layout}", place], check=True)
    layers = json.loads((scratch / "graph" / "vfs-layers" / "layers.json").read_text())
    (top,) = {layer["id"] for layer in layers} - {layer.get("parent") for layer in layers}
    return scratch / "graph" / "vfs" / "dir" / str(top)


def main() -> None:
    """Print a table for each tree."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trees", type=Path, required=True)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.dir) as scratch:
        rows = []
        for number, sample in enumerate(journeys.extracted(chosen.trees, Path(scratch))):
            place = Path(scratch) / str(number)
            place.mkdir()
            rows += list(Bench(sample, place, chosen.rounds).rows())
        sys.stdout.write(table(("journey", "ours", "peer", "ours / peer"), rows) + "\n")


if __name__ == "__main__":
    main()
