"""Commands about what the store holds: `ls`, `show`, `size`, `dir`, `rm`."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone

import click
import msgspec

from cachemgr import digest
from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.session import cache_of
from cachemgr.digest import Digest
from cachemgr.errors import CacheError, CorruptError, UsageError
from cachemgr.inventory import Summary, resolve, summaries, summarise, totals
from cachemgr.key import Factor, by_role
from cachemgr.live import live_root
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, Damaged, Removal, captures, launches, plan_removal, remove

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
@output.listing
@click.pass_context
def ls(ctx: click.Context, sort: str, limit: int | None, form: str, as_json: bool, quiet: bool) -> None:
    """List artifacts, the newest first."""
    store = cache_of(ctx).store
    layout.read_layout(store)
    damaged: list[Damaged] = []
    found = sorted(summaries(store, damaged), key=_SORTS[sort], reverse=True)[:limit]
    chosen = output.chosen(form, as_json=as_json, quiet=quiet)
    if chosen == "json":
        output.document(artifacts=found)
    elif chosen == "quiet":
        output.lines([summary.key for summary in found])
    elif found:
        _print_artifacts(found)
    else:
        output.note(f"no artifacts in {store}")
    for each in damaged:
        output.note(f"warning: {each.reason}")


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
            _ago(summary.created, now),
            str(summary.uses),
        )
        for summary in found
    ]
    headers = ("KEY", "MODEL", "ENGINE", "DEVICE", "FILES", "SIZE", "AGE", "USES")
    output.table(headers, rows, right=("FILES", "SIZE", "AGE", "USES"), flexible="MODEL")


def _ago(text: str, now: float) -> str:
    try:
        then = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return "?"
    return output.age(now - then.timestamp())


_PACKAGE = "package."
_MOST_NOTE = 1 << 16
"""Bytes of a note about a quarantine that are read."""


class Apart(msgspec.Struct, frozen=True, order=True):
    """That a host does not use a capture."""

    host: str
    reason: str = "no reason can be read"
    since: str = "?"


@click.command(epilog=EXIT_CODES)
@click.argument("key")
@click.option("--files", "with_files", is_flag=True, help="list every file")
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.pass_context
def show(ctx: click.Context, key: str, with_files: bool, as_json: bool) -> None:
    """Show one artifact: factors with their roles, captures, layers, and files on request. KEY may be a prefix."""
    cache = cache_of(ctx)
    store = cache.store
    layout.read_layout(store)
    name = resolve(store, key)
    damaged: list[Damaged] = []
    held = captures(store, name, damaged)
    if not held:
        raise CorruptError(f"no capture of {name} can be read: {damaged[0].reason}", hint=f"cachemgr rm {name}")
    used = [launch for launch in launches(store) if launch.artifact == name]
    summary = summarise(name, held, used, pinned=store.has(layout.pin_name(name)))
    if as_json:
        output.document(artifact=summary, captures=[_capture_fields(capture) for capture in held])
    else:
        _print_artifact((store, cache.apart), summary, held, with_files=with_files)
    for each in damaged:
        output.note(f"warning: {each.reason}")


def _capture_fields(capture: Capture) -> dict[str, object]:
    return {"digest": capture.digest, **msgspec.structs.asdict(capture.manifest)}


def _print_artifact(notes: Sequence[Store], summary: Summary, held: Sequence[Capture], *, with_files: bool) -> None:
    """`notes` are where quarantines may be noted."""
    first = held[0].manifest
    facts = [
        ("key", summary.key),
        ("model", summary.model),
        ("engine", f"{summary.engine} {summary.engine_version or 'unknown'}"),
        ("device", summary.device),
        ("complete", "yes" if summary.complete else "no: its launches ended before they were done"),
        ("files", f"{summary.files:,} ({output.size(summary.bytes)}, stored as {output.size(summary.stored_bytes)})"),
        ("command", " ".join(first.provenance.command)),
        ("uses", f"{summary.uses}" + (f", last {summary.last_used}" if summary.last_used else "")),
    ]
    if summary.cold_seconds is not None:
        warm = "" if summary.warm_seconds is None else f", best warm {output.seconds(summary.warm_seconds)}"
        facts.append(("cold", output.seconds(summary.cold_seconds) + warm))
    output.record(facts)
    output.heading("factors")
    _print_factors(by_role(first.factors))
    for capture in held:
        apart = [each for store in notes for each in _apart(store, capture.digest)]
        _print_capture(capture, apart, with_files=with_files)


def _apart(store: Store, capture: Digest) -> list[Apart]:
    """The hosts that do not use a capture; one whose note cannot be read is named all the same."""
    found = []
    for entry in store.scan(f"{layout.QUARANTINE}{digest.hex_of(capture)}/"):
        host = entry.name.rsplit("/", 1)[-1].removesuffix(".json")
        try:
            with store.open(entry.name) as stream:
                found.append(Apart(host, **msgspec.json.decode(stream.read(_MOST_NOTE), type=dict[str, str])))
        except (CacheError, msgspec.DecodeError, TypeError):
            found.append(Apart(host))
    return sorted(found)


def _print_factors(factors: Sequence[Factor]) -> None:
    """One row a factor; packages that are not installed share one, or they would be half of all."""
    absent = [factor for factor in factors if factor.name.startswith(_PACKAGE) and factor.value == "none"]
    rows = [
        (f"  {factor.role:<5}  {factor.name}", output.factor_value(factor.value))
        for factor in factors
        if factor not in absent
    ]
    output.record(rows)
    if absent:
        output.record([("  not installed", " ".join(factor.name.removeprefix(_PACKAGE) for factor in absent))])


def _print_capture(capture: Capture, apart: Sequence[Apart], *, with_files: bool) -> None:
    manifest = capture.manifest
    state = "" if manifest.complete else " · incomplete"
    output.heading(f"capture {output.short(capture.digest)} · {manifest.created} on {manifest.provenance.host}{state}")
    output.lines([f"  in quarantine on {each.host} since {each.since}: {each.reason}" for each in apart])
    for layer in manifest.layers:
        output.record([(f"  layer {output.short(layer.digest)}", f"stored as {output.size(layer.size)}")])
        for section in layer.sections:
            files = list(section.files())
            counts = f"{output.counted(len(section.units), 'unit')}, {output.counted(len(files), 'file')}"
            output.record([(f"    {section.domain}", f"{counts}, {output.size(sum(file.size for file in files))}")])
            if with_files:
                output.record([(f"      {file.path}", output.size(file.size)) for file in files])


@click.command(epilog=EXIT_CODES)
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.option("-q", "--quiet", is_flag=True, help="only the stored bytes, as a number")
@click.pass_context
def size(ctx: click.Context, as_json: bool, quiet: bool) -> None:
    """Say how much the store holds."""
    store = cache_of(ctx).store
    layout.read_layout(store)
    held = totals(store, summaries(store, []))
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
@click.option("--json", "as_json", is_flag=True, help="the plan as one JSON document")
@click.pass_context
def rm(ctx: click.Context, keys: tuple[str, ...], dry_run: bool, yes: bool, as_json: bool) -> None:
    """Remove artifacts from the local store. Live directories of engines are left alone."""
    store = cache_of(ctx).store
    layout.read_layout(store)
    plan = plan_removal(store, [resolve(store, key) for key in keys], now=time.time())
    if as_json:
        output.document(plan=plan, dry_run=dry_run)
    if dry_run:
        if not as_json:
            output.note(f"would remove {_told(plan)}")
        return
    if not yes:
        _confirm(plan, store)
    remove(store, plan)
    output.note(f"removed {_told(plan)}")


def _confirm(plan: Removal, store: Store) -> None:
    if not sys.stdin.isatty():
        raise UsageError(f"removing from {store} needs a yes", hint="add -y, or look first with --dry-run")
    click.confirm(f"Remove {_told(plan)}?", abort=True, err=True)


def _told(plan: Removal) -> str:
    told = f"{output.counted(len(plan.keys), 'artifact')} ({output.size(plan.freed)})"
    if plan.later:
        told += f"; {output.size(plan.later)} of layers can go once they are a day old"
    return told
