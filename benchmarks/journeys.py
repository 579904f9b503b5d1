"""The journeys under measurement, ours and the peers', over one sample tree. As a command, one of them in a process.

The command exists because a peak of memory belongs to a process, and because a whole process is what a user waits for:
`python journeys.py capture|restore|tar-capture|tar-restore|again SAMPLE.json STORE_OR_FILE [TARGET]`.
"""

import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from cachemgr import __version__, observe
from cachemgr.capture import LAYOUT, Manifest, Provenance
from cachemgr.domains import Domain, Target, by_name
from cachemgr.examine import Tree
from cachemgr.key import Factor, Relations, derive
from cachemgr.level import Level
from cachemgr.lookup import find
from cachemgr.publish import Published, publish
from cachemgr.statcache import StatCache
from cachemgr.store import Store
from cachemgr.store.captures import Capture, Judge, Marks, captures, no_marks, unasked
from cachemgr.store.local import LocalStore
from cachemgr.warm import Restored, restore

FACTORS = (Factor("benchmark", "layers", "guard"),)
KEY = derive(FACTORS)
OTHER_FACTORS = (*FACTORS, Factor("argument", "2", "match"))

_TRITON_KEY = re.compile(r"[A-Z2-7]{52}")
_NEVER = 1e9


class Sample(msgspec.Struct, frozen=True):
    """A tree with what is cached in it: pairs of a domain's name and its directory below `root`."""

    name: str
    root: str
    domains: tuple[tuple[str, str], ...]

    def each(self) -> Iterator[tuple[Domain, str]]:
        """Each domain with its relative directory."""
        for name, directory in self.domains:
            domain = by_name(name)
            assert domain is not None, f"no domain {name}"
            yield domain, directory


def extracted(archives: Path | None, scratch: Path) -> Iterator[Sample]:
    """The real trees in a directory of `*.tar.xz`, each unpacked below `scratch`; none without one."""
    for archive in sorted(archives.glob("*.tar.xz")) if archives else ():
        name = archive.name.removesuffix(".tar.xz")
        root = scratch / "trees" / name
        root.mkdir(parents=True)
        subprocess.run(["tar", "-xf", str(archive), "-C", str(root), "--no-same-owner"], check=True)
        yield detect(name, root)


def detect(name: str, root: Path) -> Sample:
    """Find the domains in an unpacked tree by the shape of their directories, wherever they lie.

    Raises:
        SystemExit: files lie outside of them, so that a tar of the tree would hold more than a capture.
    """
    found = tuple(sorted(_domains(root)))
    sample = Sample(name, str(root), found)
    covered = sum(len(tree.seen) for tree in trees(sample))
    files = sum(len(names) for _directory, _below, names in os.walk(root))
    if covered != files:
        raise SystemExit(f"{name}: {files} files, of which only {covered} belong to a domain and travel")
    return sample


def _domains(root: Path) -> Iterator[tuple[str, str]]:
    for directory, below, _names in os.walk(root):
        relative = os.path.relpath(directory, root)
        if os.path.basename(directory) in ("torch_compile_cache", "modelinfos"):
            yield os.path.basename(directory).replace("_cache", ""), relative
            below.clear()
        elif any(_TRITON_KEY.fullmatch(name) for name in below):
            yield "triton", relative
            below.clear()


def trees(sample: Sample) -> list[Tree]:
    """The live tree as a launch sees it that used every file."""
    found = []
    for domain, below in sample.each():
        directory = f"{sample.root}/{below}"
        seen = observe.scan(directory, domain.travels)
        found.append(Tree(domain, directory, seen, frozenset(seen)))
    return found


def capture(
    sample: Sample,
    store: Path,
    cache: StatCache,
    *,
    factors: tuple[Factor, ...] = FACTORS,
    near: tuple[Capture, ...] = (),
    marks: Marks = no_marks,
) -> Published:
    """Scan, check, hash, pack and commit."""
    draft = Manifest(
        layout=LAYOUT,
        key=derive(factors),
        factors=tuple(sorted(factors)),
        needs=Relations(),
        engine="benchmark",
        engine_version=None,
        model=sample.name,
        device="cpu",
        created="2026-11-29T00:00:00Z",
        launch="benchmark",
        complete=True,
        layers=(),
        provenance=Provenance(__version__, "benchmark"),
    )
    done = publish(LocalStore(store), draft, trees(sample), cache, near=near, now_ns=time.time_ns(), marks=marks)
    assert not done.refused, f"{sample.name}: {done.refused[0]}"
    return done


def restored(sample: Sample, store: Path | Store, target: Path, judge: Judge = unasked) -> Restored:
    """Look up and restore into `target`, verified and relocated."""
    local = LocalStore(store) if isinstance(store, Path) else store
    found = find([Level("local", local, "off", judge=judge)], KEY, FACTORS, Relations())
    assert found.result == "exact", f"{sample.name}: the look-up found {found.result}"
    targets = [Target(domain, f"{target}/{below}", ours=True) for domain, below in sample.each()]
    deadline = time.monotonic() + _NEVER
    done = restore(
        local,
        found.captures,
        targets,
        trees=found.trees,
        launch="benchmark",
        now_ns=time.time_ns(),
        expired=lambda: time.monotonic() > deadline,
    )
    assert not done.reasons, f"{sample.name}: {done.reasons[0]}"
    return done


def tar_capture(sample: Sample, file: Path, below: str = ".") -> None:
    """The peer's capture. It is not durable yet: `settle` makes it so."""
    tar = f"tar -cf - -C {shlex.quote(sample.root)} {shlex.quote(below)}"
    _shell(f"{tar} | zstd -q -10 --long=27 -f -o {shlex.quote(str(file))}")


def settle(file: Path) -> None:
    """Make a file and its name durable, as a commit to a store does."""
    for path in (file, file.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def tar_restore(file: Path, target: Path) -> None:
    """The peer's restore. No owners: that is what tar does for anybody but root, and it saves it a call per file."""
    target.mkdir(parents=True)
    _shell(f"zstd -q -d --long=27 -c {shlex.quote(str(file))} | tar -x --no-same-owner -C {shlex.quote(str(target))}")


def _shell(command: str) -> None:
    subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True)


class Spent(msgspec.Struct, frozen=True):
    """What a journey cost in a process of its own."""

    seconds: float
    """Of the journey alone, without starting the interpreter."""
    peak: int
    """Bytes of memory: of this process for ours, of the largest child (zstd, not tar) for a peer."""


class Again(msgspec.Struct, frozen=True):
    """A second publish of an unchanged tree, counted from outside of the code under test."""

    first_opened: int
    """Files of the tree that the first publish opened, once each: proof that the count counts."""
    seconds: float
    opened: int
    """Files of the tree that were opened: audit events of the interpreter."""
    written: int
    """Bytes given to write calls: the kernel's count for this process."""
    other_key_seconds: float
    """The same tree under a key that differs in one match factor: a capture with the layers that exist."""
    other_key_opened: int
    other_key_written: int


def _spent(step: Callable[[], object], *, children: bool) -> Spent:
    begun = time.perf_counter()
    step()
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10 if children else _own_peak()
    return Spent(seconds, peak)


def _own_peak() -> int:
    """Not `ru_maxrss` of this process: across fork and exec that starts with the peak of the parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


class _Opened:
    """Counts opens below a directory. Audit hooks cannot be removed, so this belongs into a process of its own."""

    def __init__(self, root: str) -> None:
        self.count = 0
        self._root = root
        sys.addaudithook(self._hear)

    def _hear(self, event: str, details: tuple[object, ...]) -> None:
        if event == "open" and isinstance(details[0], str) and details[0].startswith(self._root):
            self.count += 1


def _written() -> int:
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


def _again(sample: Sample, store: Path) -> Again:
    saved = store.with_name(store.name + ".stat")
    first = StatCache({})
    opened = _Opened(sample.root)
    capture(sample, store, first)
    first.save(saved)
    first_opened = opened.count
    costs: list[tuple[float, int, int]] = []
    for factors in (FACTORS, OTHER_FACTORS):
        opened_before, written_before, begun = opened.count, _written(), time.perf_counter()
        near = captures(LocalStore(store), KEY, []) if factors is not FACTORS else ()
        capture(sample, store, StatCache.load(saved), factors=factors, near=near)
        costs.append((time.perf_counter() - begun, opened.count - opened_before, _written() - written_before))
    saved.unlink()
    return Again(first_opened, *costs[0], *costs[1])


def main(journey: str, described: str, place: str, target: str = "") -> None:
    """One journey in this process; prints what it cost as JSON."""
    sample = msgspec.json.decode(Path(described).read_bytes(), type=Sample)
    where, into = Path(place), Path(target)
    steps: dict[str, Callable[[], Spent | Again]] = {
        "capture": lambda: _spent(lambda: capture(sample, where, StatCache({})), children=False),
        "restore": lambda: _spent(lambda: restored(sample, where, into), children=False),
        "tar-capture": lambda: _spent(lambda: tar_capture(sample, where), children=True),
        "tar-restore": lambda: _spent(lambda: tar_restore(where, into), children=True),
        "again": lambda: _again(sample, where),
    }
    print(msgspec.json.encode(steps[journey]()).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
