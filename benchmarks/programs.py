"""One torch.compile program, cold and warm elsewhere: by cachemgr, by PyTorch's mega-cache and by b10-transfer.

    python benchmarks/programs.py [--b10 DIR] [--rounds N] [--json FILE] [--] [PROGRAM ARGUMENT...]

Needs torch in this environment and a C++ compiler. `--b10` is a directory with the published package:
`pip install --no-deps --target DIR b10-transfer`. Every start has a HOME, a TMPDIR and an Inductor cache of its own, as
on another machine, and all of them take turns within a round. A C++ compiler that writes down how it is called counts
what is compiled again. b10-transfer keeps to `/cache` and would want a hundred gigabytes there; it gets a `/cache` that
only it sees (a mount namespace), and room for one save by its own documented settings; nothing else of it is changed.

Each tool is measured as it is, and with TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=0, which `cachemgr run` sets by
itself: without it every machine compiles 147 MB of headers before it looks at what it has.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from compiled import Told
from measure import median, spread, table

HERE = Path(__file__).resolve().parent
PROGRAM = (str(HERE.parent / "tests" / "programs" / "several_graphs.py"), "48")
AS_IT_IS, NO_HEADERS = "as it is", "no precompiled headers"
VARIANTS: dict[str, dict[str, str]] = {AS_IT_IS: {}, NO_HEADERS: {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}}
OURS, MEGA, B10, COLD, SECOND = "cachemgr", "mega-cache", "b10-transfer", "cold", "second start in place"

_COMPILER = """\
#!/bin/sh
printf '%s\\n' "$*" >> "$HOME/compiler-calls"
exec {real} "$@"
"""
_SANDBOX = """\
set -e
root=$1 cache=$2 model=$3; shift 3
mount -t tmpfs tmpfs "$root"
for each in /*; do
  if [ -L "$each" ]; then cp -P "$each" "$root/"; elif [ -d "$each" ]; then
    if [ "$each" != /cache ]; then mkdir "$root$each"; mount --rbind "$each" "$root$each"; fi
  fi
done
mkdir "$root/cache"
mount --rbind "$cache" "$root/cache"
mount --rbind "$model" "$root/cache/model"
exec chroot "$root" "$@"
"""
_B10_SETTINGS = {
    "BASETEN_FS_ENABLED": "1",
    "B10FS_CACHE_DIR": "/cache/model/compile_cache",
    "LOCAL_WORK_DIR": "/cache/work",
    "MAX_CONCURRENT_SAVES": "1",
    "MIN_B10FS_SPACE_MB": "1024",
}
_DROPPED = ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTHONPATH")


class Start(msgspec.Struct, frozen=True):
    """One start of the program."""

    tool: str
    variant: str
    seconds: float
    """Of the whole process. What a tool needs to save after a cold start is not in it."""
    load_seconds: float
    save_seconds: float
    compiled: int
    """Kernels for which the C++ compiler was called."""
    headers: int
    """Header files that were compiled."""
    carried: int
    """Bytes that were kept of the cold start: what another machine has to fetch."""
    parts: dict[str, int]
    """What is in it, by the tool's own words."""


class Programs:
    """Starts of one program in rooms of their own."""

    def __init__(self, scratch: Path, program: Sequence[str], b10: Path | None) -> None:
        self._scratch, self._program, self._b10 = scratch, tuple(program), b10
        self._tools = scratch / "tools"
        self._tools.mkdir()
        for name in ("g++", "c++"):
            if (real := shutil.which(name)) is not None:
                (self._tools / name).write_text(_COMPILER.format(real=real))
                (self._tools / name).chmod(0o755)
        self._printed: bytes | None = None

    def round(self, number: int) -> list[Start]:
        """All starts, in their order."""
        found = []
        for variant in VARIANTS:
            found += self._peers(f"{number}-{'abc'[list(VARIANTS).index(variant)]}", variant)
        return [*found, *self._ours(number)]

    def _peers(self, room: str, variant: str) -> list[Start]:
        more, mega = VARIANTS[variant], self._scratch / room / "mega"
        model = self._scratch / room / "model"
        words, where = [f"--mega-save={mega}"], _Room(self._scratch / room / "cold", model)
        if self._b10 is not None:
            words.append("--b10-save")
        told, cold = self._start(where, words, more, boxed=True)
        saved = told.mega_save_seconds + told.b10_save_seconds
        found = [self._row(COLD, variant, cold - saved, told, where)]
        calls = where.calls()
        told, seconds = self._start(where, [], more, boxed=True)
        found.append(self._row(SECOND, variant, seconds, told, where, before=calls))
        away = _Room(self._scratch / room / "elsewhere", model)
        loaded, seconds = self._start(away, [f"--mega-load={mega}"], more, boxed=False)
        found.append(self._row(MEGA, variant, seconds, loaded, away, carried=mega.stat().st_size))
        if self._b10 is not None:
            away = _Room(self._scratch / room / "elsewhere-too", model)
            loaded, seconds = self._start(away, ["--b10-load"], more, boxed=True)
            found.append(self._row(B10, variant, seconds, loaded, away, carried=_size(model)))
        shutil.rmtree(self._scratch / room)
        return found

    def _ours(self, number: int) -> list[Start]:
        """Under `cachemgr run`, cold and on another machine."""
        found = list[Start]()
        store = self._scratch / f"{number}-store"
        for tool in (f"{OURS}, {COLD}", OURS):
            room = _Room(self._scratch / f"{number}-{len(found)}", self._scratch / "no-model")
            report = room.root / "report.json"
            words = [sys.executable, "-m", "cachemgr", "run", "--report", str(report), "--", sys.executable]
            seconds = self._timed([*words, *self._program], room, {"CACHEMGR_STORE": str(store)})
            told = json.loads(report.read_bytes())
            parts = {"restored files": told["restored_files"], "added files": sum(told["added"].values())}
            row = self._row(tool, AS_IT_IS, seconds, Told(), room, carried=_size(store), parts=parts)
            found.append(msgspec.structs.replace(row, load_seconds=told["restore_seconds"] or 0.0))
            shutil.rmtree(room.root)
        shutil.rmtree(store)
        return found

    def _row(
        self,
        tool: str,
        variant: str,
        seconds: float,
        told: Told,
        room: "_Room",
        *,
        before: tuple[int, int] = (0, 0),
        carried: int = 0,
        parts: dict[str, int] | None = None,
    ) -> Start:
        kernels, headers = room.calls()
        return Start(
            tool,
            variant,
            seconds,
            told.mega_load_seconds + told.b10_load_seconds,
            told.mega_save_seconds + told.b10_save_seconds,
            kernels - before[0],
            headers - before[1],
            carried,
            parts or told.mega_loaded,
        )

    def _start(
        self, room: "_Room", words: Sequence[str], more: Mapping[str, str], *, boxed: bool
    ) -> tuple[Told, float]:
        """The program with tools around it: what they told, and seconds of the process."""
        told = room.root / "told.json"
        command = [sys.executable, str(HERE / "compiled.py"), *words, f"--told={told}", *self._program]
        extra = dict(more)
        if boxed and self._b10 is not None:
            command = [*box(room.root / "root", room.cache, room.model), *command]
            extra |= {**_B10_SETTINGS, "PYTHONPATH": str(self._b10), "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor"}
        seconds = self._timed(command, room, extra)
        said = msgspec.json.decode(told.read_bytes(), type=Told)
        assert said.load_compile_cache == said.save_compile_cache == "SUCCESS", f"b10-transfer did not work: {said}"
        return said, seconds

    def _timed(self, command: Sequence[str], room: "_Room", more: Mapping[str, str]) -> float:
        environ = {name: value for name, value in os.environ.items() if name not in _DROPPED}
        environ |= {"HOME": str(room.home), "TMPDIR": str(room.tmp), "PATH": f"{self._tools}:{os.environ['PATH']}"}
        begun = time.perf_counter()
        done = subprocess.run(command, env=environ | dict(more), capture_output=True, check=False, cwd=room.root)
        seconds = time.perf_counter() - begun
        if done.returncode:
            raise SystemExit(f"exit code {done.returncode}: {done.stderr.decode(errors='replace')[-2000:]}")
        self._printed = done.stdout if self._printed is None else self._printed
        assert done.stdout == self._printed, "a start computed something else"
        return seconds


class _Room:
    """A machine: HOME, TMPDIR, and what it sees as /cache. `model` is shared with others."""

    def __init__(self, root: Path, model: Path) -> None:
        self.root, self.home, self.tmp, self.cache, self.model = (
            root,
            root / "home",
            root / "tmp",
            root / "cache",
            model,
        )
        below = [self.cache / name for name in ("work", "inductor", "model")]
        for each in (self.home, self.tmp, root / "root", *below, model / "compile_cache"):
            each.mkdir(parents=True, exist_ok=True)

    def calls(self) -> tuple[int, int]:
        """How often kernels and headers were compiled so far."""
        log = self.home / "compiler-calls"
        lines = log.read_text().splitlines() if log.exists() else []
        return sum(_of_kernel(line) for line in lines), sum(".gch" in line for line in lines)


def _of_kernel(line: str) -> bool:
    return ".main.so" in line


def box(root: Path, cache: Path, model: Path) -> list[str]:
    """The words before a command that then sees `cache` as /cache, and `model` as /cache/model."""
    words = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", _SANDBOX, "box"]
    return [*words, str(root), str(cache), str(model)]


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def shown(starts: Sequence[Start]) -> str:
    """A table."""
    rows = []
    for name in dict.fromkeys((start.variant, start.tool) for start in starts):
        some = [start for start in starts if (start.variant, start.tool) == name]
        rows.append(
            (
                *name,
                spread([start.seconds for start in some], ".1f"),
                f"{median([start.load_seconds for start in some]):.2f}",
                f"{median([start.compiled for start in some]):.0f}",
                f"{median([start.headers for start in some]):.0f}",
                f"{median([start.carried for start in some]):,.0f}",
                ", ".join(f"{count} {kind}" for kind, count in some[-1].parts.items()),
            )
        )
    return table(("variant", "start", "s", "load, s", "kernels compiled", "headers", "bytes carried", "parts"), rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--b10", type=Path, help="directory with the package b10_transfer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("program", nargs="*", default=PROGRAM)
    options = parser.parse_args()
    starts: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="cachemgr-bench-") as name:
        programs = Programs(Path(name), options.program, options.b10 and options.b10.resolve())
        for number in range(options.rounds):
            starts += programs.round(number)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    print(shown(starts))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(starts)))


if __name__ == "__main__":
    main()
