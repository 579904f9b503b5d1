"""The report of a run: `report.json` with every value, `report.md` with a row and an anchor for each, drawings.

    python benchmarks/report.py [--readme] [DIR]     writes report.md and drawings again from DIR/report.json

`--readme` also writes the table of the README, which quotes nothing that has no row here.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from curves import log_log
from figures import Curve, Figure
from measure import median, spread, table

from cachemgr.bench.chart import drawn

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "benchmarks" / "report"
BEGIN, END = "<!-- figures: written by benchmarks/report.py --readme -->\n", "<!-- end of figures -->\n"
Status = Literal["measured", "failed", "not proven"]

NOT_PROVEN = """
- Red Hat's Model Cache Manager (`mcv`): it is not on PyPI, its documentation builds it from Go sources with the headers
  of gpgme and btrfs, and it was not built here.
- PyTorch's mega-cache and b10-transfer on a GPU: what they carry there (Triton kernels, autotuning) is something else.
- b10-transfer with Baseten's own shared file system: its directory was a local one here.
- Cold page caches, network file systems, and buckets on another machine.
"""
"""What no part measures."""

QUOTED = (
    ("restore-vllm026-pinned-tmpfs-tar", "restore of an 8B model's cache"),
    ("restore-made-tmpfs-tar", "restore of 20,000 files"),
    ("capture-vllm026-pinned-tmpfs-tar", "capture of an 8B model's cache"),
    ("up-vllm026-pinned-s5cmd", "that cache to a bucket"),
    ("down-vllm026-pinned-s5cmd", "that cache from a bucket"),
    ("down-vllm026-pinned-tar-zstd-s5cmd", "that cache from a bucket"),
    ("program-seconds-cold-as-it-is", "a torch.compile program on another machine"),
    ("program-seconds-mega-cache-as-it-is", "a torch.compile program on another machine"),
    ("program-seconds-b10-transfer-as-it-is", "a torch.compile program on another machine"),
    ("start-restored-elsewhere-init-engine-cold", "vLLM on a CPU on another machine, init engine"),
    ("gpu-start-restored-elsewhere-init-engine-cold", "vLLM on an H200 of another machine, 8B model, init engine"),
    ("gpu-start-restored-elsewhere-init-engine-second-in-place", "the same beside its best start in place"),
    ("exact-100000", "look-up among 100,000 artifacts"),
    ("ls-100000", "`cachemgr ls` of 100,000 artifacts"),
    ("prune-100000", "plan of a prune of 100,000 artifacts"),
)
"""What the README has of it: names and words of its own."""


class Part(msgspec.Struct, frozen=True):
    """One script, what it measured, and how that went."""

    name: str
    title: str
    status: Status
    reason: str
    """Why it is not measured, or what it was measured with."""
    seconds: float
    load: tuple[float, float]
    """Of the machine in the minute before it began, and before it ended; ours is in the second."""
    date: str
    """When it began."""
    commit: str
    """What was measured."""
    figures: tuple[Figure, ...] = ()
    curves: tuple[Curve, ...] = ()
    elsewhere: dict[str, str] = {}
    """What was another one than the report's where it was measured: of the machine, and versions."""


class Report(msgspec.Struct, frozen=True):
    """A run."""

    schema: int
    quick: bool
    """Whether this was only to see that everything runs: then no figure means anything."""
    machine: dict[str, str]
    versions: dict[str, str]
    parts: tuple[Part, ...]

    @property
    def date(self) -> str:
        """Of the newest of its parts."""
        return max((part.date for part in self.parts), default="")

    def figure(self, name: str) -> Figure | None:
        """The figure of this name."""
        return next((figure for part in self.parts for figure in part.figures if figure.name == name), None)


def read(place: Path) -> Report:
    """The report in a directory."""
    return msgspec.json.decode((place / "report.json").read_bytes(), type=Report)


def write(report: Report, place: Path) -> None:
    """Everything, into a directory that is made."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    for old in place.glob("*.svg"):
        old.unlink()
    for part in report.parts:
        for name, drawing in drawings(part):
            (place / name).write_text(drawing)
    (place / "report.md").write_text(markdown(report))


def markdown(report: Report) -> str:
    """The report for people."""
    lines = [
        "# Figures",
        "",
        "Written by `benchmarks/run`. Seconds are medians of rounds (least to most). Ratios are taken per round: less",
        "than 1 is faster or smaller. Loads are of the minute before a part began and of the one before it ended.",
        "How it is measured: [benchmarks](../README.md).",
        "",
    ]
    if report.quick:
        lines += ["**A smoke run: it shows that everything runs, and its figures mean nothing.**", ""]
    lines += [table(("", ""), [*report.machine.items(), *report.versions.items()]), ""]
    outcomes = [
        (
            f"[{part.title}](#{part.name})",
            part.date,
            part.commit,
            part.status,
            f"{part.seconds:.0f} s",
            " to ".join(map("{:.1f}".format, part.load)),
            part.reason,
        )
        for part in report.parts
    ]
    lines += [table(("part", "began", "commit", "status", "took", "load", ""), outcomes), ""]
    for part in report.parts:
        lines += _section(part)
    unmeasured = [f"{part.title}: {part.reason}" for part in report.parts if part.status != "measured"]
    lines += ['## <a id="not-proven"></a>Not proven', "", *(f"- {each}" for each in unmeasured), NOT_PROVEN.strip()]
    return "\n".join(lines) + "\n"


def _section(part: Part) -> list[str]:
    if part.status != "measured":
        return [f'## <a id="{part.name}"></a>{part.title}', "", f"{part.status}: {part.reason}", ""]
    lines = [f'## <a id="{part.name}"></a>{part.title}', ""]
    if part.elsewhere:
        lines += ["Measured on another machine, or with other versions:", ""]
        lines += [table(("", ""), list(part.elsewhere.items())), ""]
    rows = [_row(figure) for figure in part.figures if not _in_a_curve(figure, part)]
    if rows:
        lines += [table(("what", "cachemgr", "peer", "its", "cachemgr to it", "target"), rows), ""]
    for over in dict.fromkeys(curve.over for curve in part.curves):
        lines += [_curve_table(part, over), ""]
    lines += [f"![{part.title}]({name})" for name, _drawing in drawings(part)]
    return [*lines, ""]


def _in_a_curve(figure: Figure, part: Part) -> bool:
    """Whether the table of curves has it as one of its cells."""
    return not figure.peer and any(figure.name in cells_of(curve) for curve in part.curves)


def cells_of(curve: Curve) -> dict[str, float]:
    """The name of each value of a curve."""
    stem = curve.name.removeprefix("growth-")
    return {f"{stem}-{size:.0f}": seconds for size, seconds in zip(curve.sizes, curve.seconds, strict=True)}


def _row(figure: Figure) -> tuple[str, ...]:
    return (
        f'<a id="{figure.name}"></a>{figure.what}',
        shown(figure.ours, figure.unit),
        figure.peer,
        shown(figure.theirs, figure.unit),
        compared(figure),
        "" if figure.target is None else f"{figure.target:.3g}, {'met' if figure.met else 'not met'}",
    )


def _curve_table(part: Part, over: str) -> str:
    curves = [curve for curve in part.curves if curve.over == over]
    sizes = sorted({size for curve in curves for size in curve.sizes})
    rows = []
    for curve in curves:
        of = {size: (name, seconds) for size, (name, seconds) in zip(curve.sizes, cells_of(curve).items(), strict=True)}
        cells = [f'<a id="{of[size][0]}"></a>{shown((of[size][1],), "s")}' if size in of else "" for size in sizes]
        powers = (f"{power:.2f}" for power in curve.exponents)
        rows.append((f'<a id="{curve.name}"></a>{curve.what}', *cells, *powers))
    return table((over, *(f"{size:,.0f}" for size in sizes), "exponent", "of the last two"), rows)


def shown(values: Sequence[float], unit: str) -> str:
    """Values as people read them: the median, and what the others were."""
    if not values:
        return ""
    if unit == "s":
        form = ".4f" if median(values) < 0.1 else ".2f" if median(values) < 10 else ".1f"
        return f"{spread(values, form) if len(values) > 1 else format(values[0], form)} s"
    if unit == "bytes":
        return f"{median(values):,.0f} B"
    return f"{median(values):,.0f}"


def compared(figure: Figure) -> str:
    """The ratio or what is added, over the rounds."""
    if not figure.compared:
        return ""
    values = figure.compared
    form = ".2f" if not figure.added else ".3f"
    said = spread(values, form) if len(values) > 1 else format(values[0], form)
    return f"{said} s more" if figure.added else said


def drawings(part: Part) -> Iterator[tuple[str, str]]:
    """The name and the text of each drawing."""
    beside = [figure for figure in part.figures if figure.unit == "s" and figure.peer]
    bars: dict[str, float] = {}
    for figure in beside:
        bars[f"{figure.what} · cachemgr"] = median(figure.ours)
        bars[f"{figure.what} · {figure.peer}"] = median(figure.theirs)
    if bars:
        labels = [label.replace("`", "").replace("\\", "") for label in bars]
        left = 7 * max(map(len, labels)) + 10
        yield (
            f"{part.name}.svg",
            drawn(part.title, list(zip(labels, bars.values(), strict=True)), left=left, form=".3f"),
        )
    for over in dict.fromkeys(curve.over for curve in part.curves):
        curves = [(curve.what, curve.sizes, curve.seconds) for curve in part.curves if curve.over == over]
        yield f"{part.name}-over-{over}.svg", log_log(f"seconds over {over}", over, curves)


def readme_table(report: Report) -> str:
    """What the README quotes, each with a link to its row."""
    rows = []
    others = {figure.name for part in report.parts if part.elsewhere for figure in part.figures}
    for name, what in QUOTED:
        if (figure := report.figure(name)) is not None:
            beside = (
                f"{shown(figure.theirs[:0] or (median(figure.theirs),), figure.unit)}, {figure.peer}"
                if figure.peer
                else ""
            )
            link = f"[{what}](benchmarks/report/report.md#{name})"
            link += "\\*" if name in others else ""
            rows.append((link, shown((median(figure.ours),), figure.unit), beside, compared(figure)))
    said = f"From the report of {report.date[:10]}" + (
        ", a smoke run whose figures mean nothing" if report.quick else ""
    )
    machine = f"{report.machine['cores']} cores, {report.machine['processor']}"
    busiest = max((part.load[0] for part in report.parts), default=0.0)
    if busiest > int(report.machine["cores"]) + 2:  # one for each core, and what the part before it leaves behind
        machine += f", which did other work as well: a load of up to {busiest:.0f}"
    if others:
        machine += "; lines with \\* on other machines, which their part describes"
    return (
        f"{said} ({machine}); every line leads to its row:\n\n"
        + table(("", "cachemgr", "beside", "ratio"), rows)
        + "\n"
    )


def write_readme(report: Report, page: Path) -> None:
    """The table between its marks."""
    text = page.read_text()
    before, _mark, rest = text.partition(BEGIN)
    _old, _end, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}{readme_table(report)}{END}{after}")


def main() -> None:
    """Write it again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true")
    parser.add_argument("directory", type=Path, nargs="?", default=PLACE)
    options = parser.parse_args()
    report = read(options.directory)
    write(report, options.directory)
    if options.readme:
        write_readme(report, ROOT / "README.md")


if __name__ == "__main__":
    main()
