"""`cachemgr bench`: what each kind of start costs."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec

from cachemgr.bench.chart import bars, svg
from cachemgr.bench.starts import Bench, Row, expected, run
from cachemgr.bench.tool import Figures, command_of, measure
from cachemgr.bench.variants import VARY, Planned, Variant, plan
from cachemgr.cache import Cache, open_cache
from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.session import PASS_THROUGH, WallClock, command_argument, new_launch, settings_of, talk_apart
from cachemgr.cli.starts import Telling, free_port, template_of, told_to_end
from cachemgr.errors import CannotExecuteError, NoSuchCommandError, UsageError
from cachemgr.factors import describe, reason_to_leave_alone
from cachemgr.factors.profile import Profile
from cachemgr.factors.program import shown
from cachemgr.key import derive
from cachemgr.live import BENCH_PREFIX
from cachemgr.lookup import find
from cachemgr.places import working_directory
from cachemgr.prewarm.passes import Machinery, Options
from cachemgr.prewarm.starting import surroundings, without_build_variables
from cachemgr.spec import DEFAULT_LIMIT

_HEADERS = {
    "restore": "RESTORE",
    "model_load": "LOAD",
    "compile": "COMPILE",
    "capture": "CAPTURE",
    "init_engine": "INIT",
    "ready": "READY",
}
"""Of phases, in their order, short enough for a terminal."""
_PHASES = tuple(_HEADERS)


@click.command(context_settings=PASS_THROUGH, epilog=EXIT_CODES)
@click.option("--vary", multiple=True, type=click.Choice(list(VARY)), help="also a cold and a restored start of each")
@click.option("--real-weights", is_flag=True, help="load the model's weights, where random ones would do")
@click.option("--startup", is_flag=True, help="also the figures of `vllm bench startup`, by that tool itself")
@click.option("--chart", metavar="FILE", help="draw the seconds into FILE, as SVG")
@click.option("--dry-run", is_flag=True, help="say what would be started, and stop")
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@command_argument
@click.pass_context
def bench(
    ctx: click.Context,
    vary: tuple[str, ...],
    real_weights: bool,
    startup: bool,
    chart: str | None,
    dry_run: bool,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Start CMD cold, again, restored and near, and say what each start took.

    In roots and a store of its own, which are removed; with random weights where the engine allows. A server is told to
    end when it is ready. Exit code 1 when a start failed.
    """
    settings = settings_of(ctx)
    template = template_of(settings, sender=None)
    environ = without_build_variables(template.environ)
    if (reason := reason_to_leave_alone(command, environ, template.cwd)) is not None:
        raise UsageError(reason)
    if startup:
        command_of(command, environ, template.cwd, Path(os.devnull))  # now, and not after all starts
    variants, planned = plan(command, dict.fromkeys(vary), environ, template.cwd, settings.ignore_arg)
    if chart is not None:
        _require_place(working_directory() / chart)
    cache = open_cache(settings, os.environ)
    known = _known_cold(cache, describe(command, environ, cwd=template.cwd, ignored_args=settings.ignore_arg))
    _say_beforehand(variants, planned, known)
    if dry_run:
        _print_plan(variants, planned, as_json=as_json)
        return
    machinery = Machinery(cache, WallClock(), Telling(None), new_launch, free_port)

    def done(row: Row, left: int) -> None:
        output.note(f"{row.variant} · {row.kind}: {output.seconds(row.took)}" + (" · failed" if row.failed else ""))
        if known is None and row.kind == "cold" and left and len(planned) - left == 1:
            output.note(f"the other {left} will take about {_minutes(expected(planned[-left:], row.seconds))}")

    with told_to_end(), tempfile.TemporaryDirectory(prefix=BENCH_PREFIX, ignore_cleanup_errors=True) as made:
        place = Path(made)
        with talk_apart():
            options = Options(real_weights=real_weights, limit=DEFAULT_LIMIT)
            order = msgspec.structs.replace(template, environ=environ)
            rows = run(planned, Bench(order, machinery, options, place), done=done)
            figures = _figures(command, surroundings(environ, place / "tool"), template.cwd, place) if startup else None
    _print(variants, rows, figures, as_json=as_json)
    if chart is not None:
        _draw(Path(chart), command, rows)
    ctx.exit(1 if any(row.failed for row in rows) or (startup and figures is None) else 0)


def _figures(command: Sequence[str], environ: Mapping[str, str], cwd: Path, place: Path) -> Figures | None:
    """What the tool measures; None where it fails, which is said: the other starts were worth their time."""
    try:
        return measure(command, environ, cwd, place, seconds=DEFAULT_LIMIT)
    except (UsageError, NoSuchCommandError, CannotExecuteError) as error:
        output.note(f"warning: {error}")
        return None


def _known_cold(cache: Cache, profile: Profile) -> float | None:
    """Seconds of a cold start of the same command, or of one near to it, that some store remembers."""
    key = derive(profile.factors)
    found = find((cache.local,), key, profile.factors, profile.host, model=profile.model)
    known = [capture.manifest.timings for capture in found.captures if "run" in capture.manifest.timings]
    return known[0].get("ready", known[0]["run"]) if known else None


def _say_beforehand(variants: Sequence[Variant], planned: Sequence[Planned], known: float | None) -> None:
    same = [variant for variant in variants if variant.same_as is not None]
    for variant in same:
        output.note(f"{variant.name} comes to the same key as {variant.same_as}")
    starts = output.counted(len(planned), "start")
    if known is None:
        output.note(f"{starts}; how long that takes is known when the first has ended")
    else:
        output.note(f"{starts}, about {_minutes(expected(planned, known))}")


def _minutes(value: float) -> str:
    return output.seconds(value) if value < 120 else f"{value / 60:.0f} min"


def _print_plan(variants: Sequence[Variant], planned: Sequence[Planned], *, as_json: bool) -> None:
    if as_json:
        rows = [{"variant": each.variant.name, "kind": each.kind} for each in planned]
        output.document(variants=_variants(variants), plan=rows, dry_run=True)
        return
    told = [(each.variant.name, each.kind, " ".join(shown(each.variant.argv))) for each in planned]
    output.table(("SETTING", "START", "COMMAND"), told, flexible="COMMAND")


def _variants(variants: Sequence[Variant]) -> list[dict[str, object]]:
    return [
        {"name": each.name, "command": shown(each.argv), "key": each.key, "same_as": each.same_as} for each in variants
    ]


def _print(variants: Sequence[Variant], rows: Sequence[Row], figures: Figures | None, *, as_json: bool) -> None:
    if as_json:
        output.document(variants=_variants(variants), starts=rows, startup=figures)
        return
    _print_rows(rows)
    if figures is not None:
        for when, startup, compilation in (
            ("cold", figures.cold_startup, figures.cold_compilation),
            ("warm", figures.warm_startup, figures.warm_compilation),
        ):
            told = f"startup {output.seconds(startup)}, compilation {output.seconds(compilation)}"
            output.note(f"vllm bench startup, {when}: {told}")


def _print_rows(rows: Sequence[Row]) -> None:
    """A table as narrow as can be: what nothing is known of has no column, and a bar has what is left."""
    seconds = {
        _HEADERS[phase]: [f"{row.phases[phase]:.1f}" if phase in row.phases else "" for row in rows]
        for phase in _PHASES
    }
    more = {
        "GRAPHS": ["" if row.graph_gib is None else f"{row.graph_gib:.2f} GiB" for row in rows],
        "KV TOKENS": ["" if row.kv_cache_tokens is None else f"{row.kv_cache_tokens:,}" for row in rows],
    }
    numbers = {
        **{header: cells for header, cells in seconds.items() if any(cells)},
        "TOOK": [f"{row.took:.1f}" for row in rows],
        "ADDED": [str(row.added) for row in rows],
        **{header: cells for header, cells in more.items() if any(cells)},
    }
    drawn = [
        bar + ("" if row.same_as is None else f" as {row.same_as}") for row, bar in zip(rows, bars(rows), strict=True)
    ]
    table = [
        (row.variant, "failed" if row.failed else row.kind, *(cells[at] for cells in numbers.values()), drawn[at])
        for at, row in enumerate(rows)
    ]
    output.table(("SETTING", "START", *numbers, ""), table, right=tuple(numbers), flexible="")


def _draw(path: Path, command: Sequence[str], rows: Sequence[Row]) -> None:
    try:
        path.write_text(svg(" ".join(shown(command)), rows))
    except OSError as error:
        raise _undrawn(path, error.strerror or str(error)) from None


def _require_place(path: Path) -> None:
    """That a chart can be drawn there, which is said before hours of starts.

    Raises:
        UsageError: it cannot.
    """
    if path.is_dir():
        raise _undrawn(path, "it is a directory")
    if not path.parent.is_dir():
        raise _undrawn(path, "no such directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _undrawn(path, "permission denied")


def _undrawn(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} cannot be written: {why}", hint="--chart FILE, in a directory of yours")
