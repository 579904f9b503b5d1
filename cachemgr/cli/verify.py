"""`verify`: whether the local store, the mirror or the live directories are whole, and the repair of what is not."""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial

import click

from cachemgr import verify as journey
from cachemgr.cache import Cache
from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.index import name_in, read_anew
from cachemgr.cli.progress import Progress
from cachemgr.cli.session import cache_of, chosen_store, confirm, new_launch, on_mirror, on_waiting, settings_of
from cachemgr.domains import TABLE
from cachemgr.errors import DatabaseError, UsageError
from cachemgr.inventory import Indexed, resolve
from cachemgr.key import Key
from cachemgr.live import live_targets
from cachemgr.places import working_directory
from cachemgr.store import Store, layout
from cachemgr.verify import Depth, Fault, Repair, Verified


@click.command(epilog=EXIT_CODES)
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--deep", is_flag=True, help="unpack every layer and check every file in it")
@click.option("--sizes", is_flag=True, help="only what a listing tells: no layer is read")
@click.option("--seed", metavar="DIR", help="start a seed's commands from it alone, without a network: 0 added")
@click.option("--live", is_flag=True, help="the live directories of this environment as well")
@on_waiting
@click.option("--repair", is_flag=True, help="remove what is damaged, write the hints that are missing")
@click.option("--dry-run", is_flag=True, help="with --repair, say what it would do, and stop")
@click.option("-y", "--yes", is_flag=True, help="do not ask")
@on_mirror
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.pass_context
def verify(
    ctx: click.Context,
    keys: tuple[str, ...],
    deep: bool,
    sizes: bool,
    seed: str | None,
    live: bool,
    waiting: bool,
    repair: bool,
    dry_run: bool,
    yes: bool,
    mirror: bool,
    as_json: bool,
) -> None:
    """Read every layer and compare it with its manifest; find layers, hints and pins that belong to nothing.

    Exit code 1 if anything is damaged and was not repaired. What only takes space is a note.

    With --seed, as `prewarm --verify` did when the seed was made, and in the image or on the machine where it will be
    used: its commands are started, so it takes as long as they do.
    """
    if seed is not None:
        others = bool(keys) or any((deep, sizes, live, waiting, repair, mirror))
        ctx.exit(_started_from(ctx, seed, others=others, as_json=as_json))
    if deep and sizes:
        raise UsageError("--deep and --sizes exclude each other", hint="--sizes reads no layer, --deep all of them")
    cache = cache_of(ctx)
    store = chosen_store(cache, mirror=mirror, waiting=waiting)
    catalogued = partial(_catalogued, ctx, cache, store) if not (keys or waiting) else dict[Key, Indexed]
    depth: Depth = "deep" if deep else "sizes" if sizes else "digests"
    wanted = {resolve(store, key) for key in keys} if keys else None
    look = partial(_verified, store, wanted, depth, catalogued, live=live)
    found = look()
    if not as_json:
        _print(found)
    left, mended = found, repair and not dry_run and not found.repair.empty
    if mended:
        if not yes:
            confirm(f"{_told(found.repair)}?", f"repairing {store}")
        _mend(ctx, cache, store, found.repair)
        left = look()
    if as_json:
        output.document(report=found.report, repair=found.repair, dry_run=dry_run, left=left.report if mended else None)
    elif repair and not found.repair.empty:
        output.note(f"{'repaired' if mended else 'would repair'}: {_told(found.repair)}")
    ctx.exit(1 if left.report.damaged else 0)


def _started_from(ctx: click.Context, seed: str, *, others: bool, as_json: bool) -> int:
    from cachemgr.cli.proof import verify_seed

    if others:
        raise UsageError("--seed goes with --json only", hint=f"to read its bytes: cachemgr --store {seed} verify")
    return verify_seed(ctx, settings_of(ctx), working_directory() / seed, None, real_weights=False, as_json=as_json)


def _mend(ctx: click.Context, cache: Cache, store: Store, repair: Repair) -> None:
    journey.mend(store, repair, launch=new_launch(), now=time.time())
    if repair.indexed:
        read_anew(ctx, cache, store, [])


def _catalogued(ctx: click.Context, cache: Cache, store: Store) -> Mapping[Key, Indexed]:
    """The artifacts of a store by the catalogue as it was left: brought up to date, it would tell what the store tells.
    None where nobody has made one; one that does not answer is said, and keeps nobody from looking at the store."""
    from cachemgr.catalogue.artifacts import indexed
    from cachemgr.catalogue.ingest import number_of
    from cachemgr.catalogue.opened import FILE_NAME, Catalogue, using

    url = settings_of(ctx).database_url
    if url is None and not os.path.exists(cache.home / FILE_NAME):
        return {}

    def told(catalogue: Catalogue) -> Mapping[Key, Indexed]:
        return indexed(catalogue, number_of(catalogue, name_in(catalogue, store)))

    try:
        return using(url, cache.home, told, output.note)
    except DatabaseError as error:
        output.note(f"note: {error}")
        return {}


def _verified(
    store: Store,
    wanted: set[Key] | None,
    depth: Depth,
    catalogued: Callable[[], Mapping[Key, Indexed]],
    *,
    live: bool,
) -> Verified:
    known, targets = catalogued(), live_targets(os.environ, TABLE) if live else ()
    progress = Progress()
    total = 0 if depth == "sizes" else sum(entry.size for entry in store.scan(layout.LAYERS))
    with progress.of(total):
        return journey.verify(
            store, wanted, depth=depth, known=known, live=targets, read=progress.moved, now=time.time()
        )


def _print(found: Verified) -> None:
    report = found.report
    for fault in sorted(report.faults, key=lambda fault: (fault.severity, fault.key or "", fault.name)):
        output.lines([_line(fault)])
    damaged = sum(fault.severity == "damage" for fault in report.faults)
    what = f"{output.counted(report.captures, 'capture')}, {output.counted(report.layers, 'layer')}"
    read = f", {output.size(report.bytes)} read" if report.bytes else ""
    notes = len(report.faults) - damaged
    output.note(f"{report.store}: {what}{read}: {damaged} damaged, {output.counted(notes, 'note')}")


def _line(fault: Fault) -> str:
    about = "" if fault.key is None else f"{output.short(fault.key)}  "
    return f"{fault.severity:<6}  {about}{fault.name}: {fault.what}"


def _told(repair: Repair) -> str:
    parts = [
        f"{verb} {output.counted(count, noun)}"
        for verb, count, noun in (
            ("remove", len(repair.manifests), "capture"),
            ("discard", len(repair.layers), "layer"),
            ("write", len(repair.hints), "hint"),
            ("remove", len(repair.dangling), "dangling hint"),
            ("reindex", len(repair.indexed), "artifact"),
            ("set aside", sum(len(each.faults) for each in repair.aside), "live unit"),
        )
        if count
    ]
    return ", ".join(parts)
