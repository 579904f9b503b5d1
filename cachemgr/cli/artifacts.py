"""Commands about what the store holds: `ls`, `size`, `dir`, `rm`."""

import os
import time
from collections.abc import Callable, Sequence

import click

from cachemgr.cache import Cache
from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.index import asked
from cachemgr.cli.remote import not_with_a_service, service_of
from cachemgr.cli.session import cache_of, chosen_store, confirm, on_mirror, on_waiting, store_of
from cachemgr.clock import age_of
from cachemgr.digest import Digest
from cachemgr.filters import FIELDS, parse
from cachemgr.inventory import Summary, resolve, summaries, totals
from cachemgr.live import live_root
from cachemgr.quarantine import noted
from cachemgr.store import Store, pins
from cachemgr.store.captures import Damaged
from cachemgr.store.removal import Removal, plan_removal, remove

_SORTS: dict[str, Callable[[Summary], str | int]] = {
    "created": lambda summary: summary.created,
    "last_used": lambda summary: summary.last_used or "",
    "bytes": lambda summary: summary.bytes,
    "files": lambda summary: summary.files,
    "uses": lambda summary: summary.uses,
}
"""What `ls --sort` knows; the largest or newest comes first."""


@click.command(epilog=EXIT_CODES)
@click.option("--sort", type=click.Choice(list(_SORTS)), default="created", show_default=True, help="what comes first")
@click.option("--limit", type=click.IntRange(min=1), help="at most so many")
@click.option(
    "-f", "--filter", "filters", multiple=True, metavar="FILTER", help=f"only artifacts by {', '.join(FIELDS)}"
)
@on_mirror
@on_waiting
@output.listing
@click.pass_context
def ls(
    ctx: click.Context,
    sort: str,
    limit: int | None,
    filters: tuple[str, ...],
    mirror: bool,
    waiting: bool,
    form: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """List artifacts, the newest first."""
    fits = parse(filters, now=time.time())
    damaged: list[Damaged] = []
    listed, place, apart = _listed(ctx, mirror=mirror, waiting=waiting, damaged=damaged)
    found = sorted(filter(fits, listed), key=_SORTS[sort], reverse=True)[:limit]
    chosen = output.chosen(form, as_json=as_json, quiet=quiet)
    if chosen == "json":
        output.document(artifacts=found)
    elif chosen == "quiet":
        output.lines([summary.key for summary in found])
    elif found:
        _print_artifacts(found)
    else:
        output.note(f"no artifacts in {place}{' that fit' if filters else ''}")
    for each in damaged:
        output.note(f"warning: {each.reason}")
    if chosen == "table" and found and apart:
        output.note(f"{output.counted(apart, 'capture')} in quarantine: cachemgr show KEY says which and why")


def _listed(
    ctx: click.Context, *, mirror: bool, waiting: bool, damaged: list[Damaged]
) -> tuple[Sequence[Summary], str, int]:
    """All artifacts of a store, or of the service that is asked instead, where that is, and how many captures of the
    store are in quarantine."""
    service = service_of(ctx)
    if service is not None:
        not_with_a_service(mirror=mirror, waiting=waiting)
        from cachemgr.cli import asking

        return asking.artifacts(service), str(service), 0
    cache = cache_of(ctx)
    store = chosen_store(cache, mirror=mirror, waiting=waiting)
    apart = len(set[Digest]().union(noted(store, cache.trust), noted(cache.apart, cache.trust)))
    return _summaries(ctx, cache, store, waiting=waiting, damaged=damaged), str(store), apart


def _summaries(
    ctx: click.Context, cache: Cache, store: Store, *, waiting: bool, damaged: list[Damaged]
) -> Sequence[Summary]:
    """All artifacts, from the catalogue. What waits for a signature is not in it: that is looked at once."""
    if waiting:
        return summaries(store, damaged)
    from cachemgr.catalogue.artifacts import artifacts
    from cachemgr.catalogue.opened import Catalogue

    def ask(catalogue: Catalogue, source: int) -> Sequence[Summary]:
        return artifacts(catalogue, source).artifacts

    return asked(ctx, cache, store, ask, damaged=damaged, or_store=True)


def _print_artifacts(found: Sequence[Summary]) -> None:
    now = time.time()
    rows = [
        (
            output.short(summary.key),
            summary.model,
            f"{summary.engine} {summary.engine_version or 'unknown'}",
            summary.device,
            f"{summary.files:,}",
            output.size(summary.bytes),
            age_of(summary.created, now),
            str(summary.uses),
        )
        for summary in found
    ]
    headers = ("KEY", "MODEL", "ENGINE", "DEVICE", "FILES", "SIZE", "AGE", "USES")
    output.table(headers, rows, right=("FILES", "SIZE", "AGE", "USES"), flexible="MODEL")


@click.command(epilog=EXIT_CODES)
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.option("-q", "--quiet", is_flag=True, help="only the stored bytes, as a number")
@on_mirror
@click.pass_context
def size(ctx: click.Context, as_json: bool, quiet: bool, mirror: bool) -> None:
    """Say how much the store holds."""
    store = store_of(cache_of(ctx), mirror=mirror)
    damaged: list[Damaged] = []
    held = totals(store, damaged)
    if as_json:
        output.document(size=held)
    elif quiet:
        output.lines([str(held.stored_bytes)])
    else:
        output.record(
            [
                ("stored", output.size(held.stored_bytes)),
                ("files", f"{held.files:,} ({output.size(held.bytes)} when restored)"),
                ("artifacts", f"{held.artifacts:,} ({output.counted(held.captures, 'capture')})"),
            ]
        )
    for each in damaged:
        output.note(f"warning: {each.reason}")


@click.command(name="dir", epilog=EXIT_CODES)
@click.option("--live", is_flag=True, help="where launches of this environment keep their live directories instead")
@click.pass_context
def dir(ctx: click.Context, live: bool) -> None:  # noqa: A001 - the name of the command
    """Print where the local store is."""
    output.lines([f"{live_root(os.environ)}/cachemgr" if live else str(cache_of(ctx).store)])


@click.command(epilog=EXIT_CODES)
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@click.option("--dry-run", is_flag=True, help="say what would go, and stop")
@click.option("-y", "--yes", is_flag=True, help="do not ask")
@on_waiting
@click.option("--json", "as_json", is_flag=True, help="the plan as one JSON document")
@on_mirror
@click.pass_context
def rm(
    ctx: click.Context,
    keys: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    as_json: bool,
    mirror: bool,
    waiting: bool,
) -> None:
    """Remove artifacts from the local store, or from the mirror. Live directories of engines are left alone.

    A pinned artifact is refused: `cachemgr unpin KEY` comes first.
    """
    store = chosen_store(cache_of(ctx), mirror=mirror, waiting=waiting)
    plan = plan_removal(store, [resolve(store, key) for key in keys], now=time.time())
    pins.require_unpinned(store, plan.keys, now=time.time())
    if as_json:
        output.document(plan=plan, dry_run=dry_run)
    if dry_run:
        if not as_json:
            output.note(f"would remove {_told(plan)}")
        return
    if not yes:
        confirm(f"Remove {_told(plan)}?", f"removing from {store}")
        pins.require_unpinned(store, plan.keys, now=time.time())  # a person may have thought for long
    if remove(store, plan, taken=lambda: pins.held(store, plan.keys, now=time.time())):
        pins.require_unpinned(store, plan.keys, now=time.time())
    output.note(f"removed {_told(plan)}")


def _told(plan: Removal) -> str:
    told = f"{output.counted(len(plan.keys), 'artifact')} ({output.size(plan.freed)})"
    if plan.later:
        told += f"; {output.later(plan.later)}"
    return told
