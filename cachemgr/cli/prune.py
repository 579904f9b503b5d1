"""`prune`: what goes from the local store, the mirror, or the live directories of this host."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from cachemgr import places, sizes
from cachemgr.cache import Cache
from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.session import cache_of, chosen_store, confirm, new_launch, on_mirror, on_waiting
from cachemgr.domains import TABLE
from cachemgr.errors import CorruptError, UsageError
from cachemgr.factors import describe_here
from cachemgr.history import last_uses
from cachemgr.key import Key
from cachemgr.live import bases, planned, roots
from cachemgr.places import working_directory
from cachemgr.prune import artifacts, taking
from cachemgr.prune import live as live_directories
from cachemgr.prune.artifacts import Plan, Version, Wish, require_records
from cachemgr.prune.limits import Limits
from cachemgr.prune.live import LivePlan
from cachemgr.prune.merging import Merge
from cachemgr.settings import typed_age
from cachemgr.store import Store, layout
from cachemgr.store.captures import Damaged, all_captures, no_marks, units_in
from cachemgr.store.records import launches

_FORGOTTEN = "90d"
_SHOWN = 20
"""Things of a plan that people are shown one by one."""


def _sized(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else sizes.parse(value)
    except ValueError as error:
        raise UsageError(f"`{value}` is no size: it {error}", hint="50GB, or 50GiB") from None


def _aged(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    try:
        return None if value is None else typed_age(value)
    except ValueError as error:
        raise UsageError(f"`{value}` is no age: it {error}", hint="30d, or 12h") from None


def _limits(function: output.F) -> output.F:
    """The options that say how much may stay."""
    for option in (
        click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="so many per model and device"),
        click.option("--unused-for", callback=_aged, metavar="AGE", help="what no launch has used for so long goes"),
        click.option("--older-than", callback=_aged, metavar="AGE", help="what was made longer ago goes"),
        click.option("--min-free", callback=_sized, metavar="SIZE", help="bytes that the file system must have free"),
        click.option("--max-files", type=click.IntRange(min=0), metavar="N", help="files that may stay"),
        click.option("--max-size", callback=_sized, metavar="SIZE", help="bytes that may stay"),
    ):
        function = option(function)
    return function


@click.command(epilog=EXIT_CODES)
@_limits
@click.option(
    "--old-versions",
    is_flag=False,
    flag_value=_FORGOTTEN,
    callback=_aged,
    metavar="[AGE]",
    help="what was compiled with an engine or torch that is not installed here any more; in the mirror, that was "
    f"launched nowhere for AGE ({_FORGOTTEN} unless told)",
)
@click.option(
    "--env",
    "environments",
    multiple=True,
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="another Python environment whose versions count as installed",
)
@click.option(
    "--live", is_flag=True, help="the live directories of this environment instead, see `cachemgr dir --live`"
)
@click.option("--uncovered", is_flag=True, help="with --live, entries that an engine wrote and no artifact has")
@on_waiting
@click.option("--dry-run", is_flag=True, help="say what would go, and stop")
@click.option("-y", "--yes", is_flag=True, help="do not ask")
@on_mirror
@click.option("--json", "as_json", is_flag=True, help="the plan, and what was done, as one JSON document")
@click.pass_context
def prune(
    ctx: click.Context,
    max_size: int | None,
    max_files: int | None,
    min_free: int | None,
    older_than: float | None,
    unused_for: float | None,
    keep_last: int | None,
    old_versions: float | None,
    environments: tuple[str, ...],
    live: bool,
    uncovered: bool,
    waiting: bool,
    dry_run: bool,
    yes: bool,
    mirror: bool,
    as_json: bool,
) -> None:
    """Remove what is not needed any more: damaged and superseded captures, layers that nothing refers to, what killed
    processes left behind, and with limits the artifacts that were not used for the longest time.

    Pinned artifacts stay, and so does what a launch uses now.
    """
    limits = Limits(max_size, max_files, min_free, older_than, unused_for, keep_last)
    cache = cache_of(ctx)
    asked = _Asked(dry_run=dry_run, yes=yes, as_json=as_json)
    if live or uncovered:
        if mirror or waiting or old_versions is not None or environments or uncovered > live:
            raise UsageError(
                "--live goes without --mirror, --waiting, --old-versions and --env, and --uncovered with it",
                hint="cachemgr prune --live --uncovered",
            )
        _prune_live(cache, limits, asked, uncovered=uncovered)
        return
    store = chosen_store(cache, mirror=mirror, waiting=waiting)
    outlines = cache.outlines(store)
    marks = no_marks if mirror or waiting else cache.trust.marks((), None, None)
    wish = _wish(store, limits, old_versions, environments, mirror=mirror)
    plan = artifacts.plan(
        store,
        wish,
        outlines=outlines,
        uses=last_uses(launches(store)),
        judge=cache.trust.opinion,
        marks=marks,
        root=None if mirror or waiting else Path(str(cache.store)),
        free=0 if mirror else places.free_bytes(str(cache.store)),
        now=time.time(),
    )
    if asked.agreed(plan, plan.store, _freed(plan), lambda: _print(plan)):
        judge = cache.trust.opinion
        done = artifacts.carry_out(store, plan, outlines=outlines, judge=judge, marks=marks, now=time.time())
        asked.tell(plan, done)


def _prune_live(cache: Cache, limits: Limits, asked: "_Asked", *, uncovered: bool) -> None:
    damaged: list[Damaged] = []
    known = all_captures(cache.store, damaged) if uncovered or limits.keep_last is not None else {}
    if damaged and uncovered:
        raise CorruptError(f"{damaged[0].reason}, so nobody knows what it covers", hint="cachemgr verify --repair")
    places_of_key = roots(os.environ)
    plan = live_directories.plan(
        places_of_key,
        [target for target in planned(os.environ, TABLE, Key("none")) if not target.ours],
        limits,
        uses=last_uses(launches(cache.store)),
        models={key: f"{held[0].manifest.model} on {held[0].manifest.device}" for key, held in known.items()},
        covered=units_in(each for held in known.values() for each in held) if uncovered else None,
        bases=bases(cache.home, os.environ),
        free=places.free_bytes(places_of_key[0]),
        now=time.time(),
    )
    said = f"{output.size(plan.bytes)} in {output.counted(plan.files, 'file')}"
    if asked.agreed(plan, "the live directories", said, lambda: _print_live(plan)):
        asked.tell(plan, taking.carry_out(plan, prune=new_launch(), now=time.time()))


def _print_live(plan: LivePlan) -> None:
    rows = [(f"{gone.place}/{gone.path}", output.size(gone.bytes), gone.why) for gone in plan.goners]
    if rows:
        output.table(("WHAT", "SIZE", "WHY"), rows, right=("SIZE",), flexible="WHAT")


def _wish(
    store: Store, limits: Limits, old_versions: float | None, environments: Sequence[str], *, mirror: bool
) -> Wish:
    """Raises UsageError for what cannot be known of this store."""
    now = time.time()
    if environments and (mirror or old_versions is None):
        raise UsageError(
            "--env goes with --old-versions of the local store", hint="cachemgr prune --old-versions --env DIR"
        )
    if not mirror:
        return Wish(limits, None if old_versions is None else _installed(environments))
    if limits.min_free is not None:
        raise UsageError("a bucket has no free bytes to count", hint="--max-size bounds what it holds")
    for seconds in (limits.unused_for, old_versions):
        if seconds is not None:
            require_records(store, seconds, now=now)
    return Wish(limits, forgotten=old_versions)


def _installed(environments: Sequence[str]) -> frozenset[Version]:
    """What PATH and these environments have.

    Raises:
        UsageError: nothing, so that everything would go.
    """
    paths = [os.environ.get("PATH", ""), *(f"{directory}/bin" for directory in environments)]
    profiles = [each for path in paths for each in describe_here({**os.environ, "PATH": path}, working_directory())]
    torches = [(each, [factor.value for factor in each.factors if factor.name == "torch"]) for each in profiles]
    found = {(each.engine, each.engine_version, values[0]) for each, values in torches if values and values[0]}
    if not found:
        raise UsageError(
            "no engine and no torch is installed where PATH leads, so nobody knows which versions are old",
            hint="--env DIR names an environment that has them",
        )
    return frozenset(found)


class _Asked:
    """What a person wants to be shown and asked."""

    def __init__(self, *, dry_run: bool, yes: bool, as_json: bool) -> None:
        self._dry_run, self._yes, self._as_json = dry_run, yes, as_json

    def agreed(self, plan: Plan | LivePlan, where: str, freed: str, show: Callable[[], None]) -> bool:
        """Show a plan, and ask where it does anything. Whether it is to be done."""
        if self._dry_run or plan.empty:
            if self._as_json:
                output.document(plan=plan, dry_run=self._dry_run, done=None)
                return False
            show()
            output.note(f"nothing to prune in {where}" if plan.empty else f"would free {freed}")
            _notes(plan)
            return False
        if not self._yes:
            if not self._as_json:
                show()
            confirm(f"Free {freed}?", f"pruning {where}")
        return True

    def tell(self, plan: Plan | LivePlan, done: Plan | LivePlan) -> None:
        """Say what was done."""
        if self._as_json:
            output.document(plan=plan, dry_run=False, done=done)
            return
        output.note(f"freed {output.size(done.bytes)} in {output.counted(done.files, 'file')}")
        for each in done.merges if isinstance(done, Plan) else ():
            output.note(f"merged {_several(each)} of {output.short(each.key)} into one")
        _notes(done)


def _freed(plan: Plan) -> str:
    parts = [
        output.counted(count, noun)
        for count, noun in (
            (len(plan.artifacts), "artifact"),
            (len(plan.captures), "capture"),
            (len(plan.removal.layers), "layer"),
            (len(plan.scraps), "left-over"),
        )
        if count
    ]
    if plan.merges:
        many = sum(len(each.captures) for each in plan.merges)
        parts.append(f"and what merging {many} captures into {len(plan.merges)} frees")
    return f"{output.size(plan.bytes)} in {output.counted(plan.files, 'file')} ({', '.join(parts)})"


def _print(plan: Plan) -> None:
    rows = [
        (output.short(gone.key), gone.model, gone.device, output.size(gone.bytes), gone.last_used[:10], gone.why)
        for gone in plan.artifacts
    ]
    if rows:
        output.table(("KEY", "MODEL", "DEVICE", "SIZE", "LAST USE", "WHY"), rows, right=("SIZE",), flexible="WHY")
    others = [
        *((f"capture {layout.short(each.name)}", each.why) for each in plan.captures),
        *((output.short(each.key), f"{_several(each)} become one") for each in plan.merges),
        *((each.name, each.why) for each in plan.scraps),
    ]
    if others:
        output.record(others[:_SHOWN])
    if len(others) > _SHOWN:
        output.lines([f"and {len(others) - _SHOWN:,} more"])


def _several(merge: Merge) -> str:
    return f"{len(merge.captures)} captures ({output.size(merge.bytes)})"


def _notes(plan: Plan | LivePlan) -> None:
    for kept in plan.kept:
        name = kept.name if isinstance(plan, LivePlan) else output.short(kept.name)
        output.note(f"kept {name} ({kept.why}): {kept.kept}")
    if isinstance(plan, Plan) and plan.later:
        output.note(output.later(plan.later))
    for note in plan.notes:
        output.note(f"note: {note}")
