"""What each part measured, as figures and curves with names of their own, which the report and the README link to.

A name says what is compared and on what, and never how many rounds it took: `restore-made-tmpfs-tar`. So a link into
the report outlives the run that made it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import growth
import layers
import msgspec
import programs
import startup
import transfer
from measure import Paired, exponent, median


class Figure(msgspec.Struct, frozen=True):
    """One cost of ours, beside a peer's of the same rounds where there is a peer."""

    name: str
    what: str
    unit: str
    """`s`, `bytes` or `kernels`."""
    ours: tuple[float, ...]
    peer: str = ""
    theirs: tuple[float, ...] = ()
    target: float | None = None
    """What the ratio, or `added`, shall not exceed."""
    added: bool = False
    """Whether what counts is ours less the peer's, not ours over it."""

    @property
    def compared(self) -> list[float]:
        """Ours over the peer's, or what ours adds, by round; nothing without a peer, or where that took nothing."""
        if self.added:
            return [ours - theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]
        if not all(self.theirs):
            return []
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=bool(self.theirs))]

    @property
    def met(self) -> bool:
        """Whether the median is within the target."""
        return self.target is None or median(self.compared) <= self.target


class Curve(msgspec.Struct, frozen=True):
    """A cost over a size."""

    name: str
    what: str
    over: str
    """What the sizes count."""
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def exponents(self) -> tuple[float, float]:
        """Fitted over all sizes, and of the last two: where a constant no longer rules."""
        return exponent(self.sizes, self.seconds), exponent(self.sizes[-2:], self.seconds[-2:])


@dataclass(frozen=True)
class Found:
    """What a part has to say."""

    figures: tuple[Figure, ...] = ()
    curves: tuple[Curve, ...] = ()


def named(*words: str) -> str:
    """A name, also of an anchor: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def of_startup(file: Path) -> Found:
    """What `cachemgr` costs before it does anything."""
    rows = msgspec.json.decode(file.read_bytes(), type=startup.Document).rows
    return Found(
        tuple(
            Figure(
                named("startup", row.name),
                row.name.replace("seconds ", ""),
                "s",
                row.cost.ours,
                "without cachemgr" if row.added else "`import click`",
                row.cost.peer,
                row.target,
                row.added,
            )
            for row in rows
        )
    )


def of_layers(file: Path) -> Found:
    """Capture and restore of a tree."""
    found = msgspec.json.decode(file.read_bytes(), type=layers.Document)
    figures = [figure for each in found.figures for figure in _of_tree(each)]
    figures.append(
        Figure(
            named("imports of a restore", found.figures[0].place),
            "imports of a restore, a process",
            "s",
            found.startup.ours,
            "a bare interpreter",
            found.startup.peer,
        )
    )
    curves = []
    for line in found.lines:
        for what, seconds in (("capture", line.capture), ("restore", line.restore)):
            curves.append(
                Curve(named("growth", what, line.place), f"{what} on {line.place}", "files", line.sizes, seconds)
            )
    return Found(tuple(figures), tuple(curves))


def _of_tree(each: layers.Figures) -> Iterator[Figure]:
    on = f"{each.sample} ({each.files:,} files, {each.bytes / 1e6:.0f} MB) on {each.place}"
    packed, unpacked = "`tar \\| zstd -10 --long=27`", "`zstd -d \\| tar -x`"

    def pair(what: str, cost: Paired, peer: str, short: str, target: float | None = None) -> Figure:
        name = named(what, each.sample, each.place, short)
        return Figure(name, f"{what} of {on}", "s", cost.ours, peer, cost.peer, target)

    yield pair("capture", each.capture, packed, "tar", 1.3)
    yield pair("restore", each.restore, unpacked, "tar", 1.2)
    yield pair("restore", each.copy, "`cp -a`", "cp")
    yield pair("restore as a whole process", each.whole_restore, unpacked, "tar")
    for what, ours, theirs, target in (
        ("stored", each.stored, each.stored_peer, 1.05),
        ("peak memory of a restore", each.peaks["restore"], each.peaks["tar-restore"], None),
        ("peak memory of a capture", each.peaks["capture"], each.peaks["tar-capture"], None),
    ):
        peer = packed if what == "stored" or "capture" in what else unpacked
        name = named(what, each.sample, each.place)
        yield Figure(name, f"{what}, {on}", "bytes", (float(ours),), peer, (float(theirs),), target)


_MOST = {"s5cmd": 1 / 3, "aws": 1 / 10, transfer.FLOOR: 1.5}
"""Of the time of others, up and down, for real trees: the made ones are there to compare."""


def of_transfer(file: Path) -> Found:
    """Trees to a bucket and back."""
    figures = []
    for each in msgspec.json.decode(file.read_bytes(), type=list[transfer.Figures]):
        on = f"{each.sample} ({each.files:,} files, {each.bytes / 1e6:.0f} MB, stored as {each.stored / 1e6:.1f} MB)"
        most = {} if each.sample in (transfer.MADE, transfer.NOISE) else _MOST
        for way, seconds, journey in (("up", each.up, "capture and push"), ("down", each.down, "pull and restore")):
            for tool, taken in seconds.items():
                packed = tool == transfer.PACKED
                if tool in (transfer.OURS, transfer.OURS_PACKED):
                    continue
                ours = seconds[transfer.OURS_PACKED if packed else transfer.OURS]
                what = f"{'push' if way == 'up' else 'pull'} of the layer of {on}" if packed else f"{journey}: {on}"
                target = 1.25 if packed else most.get(tool)
                figures.append(
                    Figure(named(way, each.sample, tool), what, "s", tuple(ours), tool, tuple(taken), target)
                )
    return Found(tuple(figures))


def of_growth(file: Path) -> Found:
    """Look-ups, `ls` and pruning over the size of the store."""
    rows = msgspec.json.decode(file.read_bytes(), type=list[growth.Row])
    figures = tuple(
        Figure(
            named(row.operation, str(row.artifacts)), f"{row.operation}, {row.artifacts:,} artifacts", "s", row.seconds
        )
        for row in rows
    )
    curves = []
    for operation in dict.fromkeys(row.operation for row in rows):
        some = [row for row in rows if row.operation == operation]
        if len(some) > 1:
            sizes, costs = tuple(row.artifacts for row in some), tuple(median(row.seconds) for row in some)
            curves.append(Curve(named("growth", operation), operation, "artifacts", sizes, costs))
    return Found(figures, tuple(curves))


def of_programs(file: Path) -> Found:
    """One torch.compile program, cold and warm elsewhere."""
    starts = msgspec.json.decode(file.read_bytes(), type=list[programs.Start])

    def some(tool: str, variant: str) -> list[programs.Start]:
        return [start for start in starts if (start.tool, start.variant) == (tool, variant)]

    ours = some(programs.OURS, programs.AS_IT_IS)
    figures = []
    for variant, tool in dict.fromkeys((start.variant, start.tool) for start in starts if start.tool != programs.OURS):
        theirs = some(tool, variant)
        peer = f"{tool}, {variant}"
        for what, unit, each in (
            ("a torch.compile program elsewhere", "s", "seconds"),
            ("kernels compiled again", "kernels", "compiled"),
            ("carried to the other machine", "bytes", "carried"),
        ):
            values = [[float(getattr(start, each)) for start in found] for found in (ours, theirs)]
            if each == "seconds" or tool in (programs.MEGA, programs.B10):
                name = named("program", each, tool, variant)
                kinds = ", ".join(f"{count} {kind}" for kind, count in theirs[0].parts.items())
                told = f"{peer} ({kinds})" if each == "carried" and kinds else peer
                figures.append(Figure(name, what, unit, tuple(values[0]), told, tuple(values[1])))
    return Found(tuple(figures))


class _Start(msgspec.Struct, frozen=True):
    """A line of what `starts.py` writes."""

    step: str
    code: int
    wall: float
    init_engine: float | None = None
    result: str | None = None
    added: dict[str, int] | None = None


_TARGETS = {
    "gpu-start-restored-elsewhere-init-engine-cold": 0.35,
    "gpu-start-restored-elsewhere-init-engine-second-in-place": 1.15,
    "gpu-start-near-init-engine-cold": 0.65,
}


def of_starts_on_a_gpu(file: Path) -> Found:
    """Like `of_starts`, by names of their own."""
    return of_starts(file, "gpu-start")


def of_starts(file: Path, first: str = "start") -> Found:
    """Starts of an engine: the first of all is cold and bare, the second the same again in place.

    Raises:
        ValueError: one of them failed.
    """
    rows = [msgspec.json.decode(line, type=_Start) for line in file.read_bytes().splitlines()]
    if failed := [row.step for row in rows if row.code]:
        raise ValueError(f"these starts failed: {', '.join(failed)}")
    bare = {"cold": rows[0], "second in place": rows[1]}
    figures: list[Figure] = []
    for kind, result in (("restored elsewhere", "exact"), ("near", "near"), ("cold with `cachemgr run`", "none")):
        some = [row for row in rows if row.result == result]
        for peer, start in bare.items():
            figures += _of_kind(first, kind, some, peer, start)
        added = tuple(float(sum(row.added.values())) for row in some if row.added is not None)
        if added:
            figures.append(Figure(named(first, kind, "added"), f"{kind}: files added", "files", added))
    return Found(tuple(figures))


def _of_kind(first: str, kind: str, rows: Sequence[_Start], peer: str, bare: _Start) -> Iterator[Figure]:
    """Against the same one bare start, round by round."""
    for what, ours, theirs in (
        ("init engine", [row.init_engine for row in rows], bare.init_engine),
        ("the whole command", [row.wall for row in rows], bare.wall),
    ):
        values = tuple(value for value in ours if value is not None)
        if values and theirs is not None:
            name = named(first, kind, what, peer)
            beside = f"without cachemgr, {peer}"
            yield Figure(name, f"{kind}: {what}", "s", values, beside, (theirs,) * len(values), _TARGETS.get(name))
