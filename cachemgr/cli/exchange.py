"""`export` and `import`: artifacts as OCI images, in directories, tar files and registries."""

import os
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cachemgr.cli import EXIT_CODES, PARTLY, output
from cachemgr.cli.progress import Progress
from cachemgr.cli.session import WallClock, cache_of
from cachemgr.cli.transfer import Job, named, transfer_options
from cachemgr.errors import UntrustedError, UsageError
from cachemgr.export import Export, Plan
from cachemgr.oci.archive import Archive, NewArchive
from cachemgr.oci.directory import Directory
from cachemgr.oci.images import Blobs, ImageStore
from cachemgr.oci.place import Reference, Target, path, reference
from cachemgr.places import is_special
from cachemgr.pull import came_from
from cachemgr.store import layout
from cachemgr.store.captures import keys as artifact_keys
from cachemgr.store.transfer import Transfer

if TYPE_CHECKING:
    from cachemgr.oci.registry import Registry

_plain_http = click.option(
    "--plain-http", is_flag=True, help="ask the registry without TLS; one on this machine always is"
)


@click.command(epilog=EXIT_CODES)
@transfer_options
@click.option("--oci", metavar="DIR|REGISTRY/REPOSITORY:TAG", help="to an OCI image layout, or to a registry")
@click.option("--tar", metavar="FILE", help="to one tar file, which is replaced if it is there")
@_plain_http
@click.pass_context
def export(
    ctx: click.Context,
    keys: tuple[str, ...],
    filters: tuple[str, ...],
    oci: str | None,
    tar: str | None,
    plain_http: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write artifacts as OCI images, one each: those named, those that a filter finds, or all.

    The layers are those of the store, byte for byte, so a registry keeps a layer that artifacts share once. Equal
    captures make equal images: their digests change with what is in them, and with nothing else. Signatures travel.
    """
    if bool(oci) == bool(tar):
        raise UsageError("an export goes to one place", hint="--oci DIR, --oci REGISTRY/REPOSITORY:TAG or --tar FILE")
    cache = cache_of(ctx)
    layout.read_layout(cache.store)
    place = None if oci is None else reference(oci)
    wanted = named(cache.store, keys, filters) if keys or filters else artifact_keys(cache.store)
    if place is not None and len(wanted) > 1:
        raise UsageError(f"one tag is one image, and {len(wanted)} artifacts are meant", hint="name one key")
    progress = Progress()
    begun = time.monotonic()
    with _target(place, oci, tar, plain_http=plain_http, written=bool(wanted) and not dry_run) as target:
        journey = Export(cache.store, target, judge=cache.local.judge, moved=progress.moved)
        plan = journey.plan(wanted)
        if not dry_run:
            with progress.of(plan.bytes):
                journey.carry(plan)
    _tell(plan, time.monotonic() - begun, dry_run=dry_run, as_json=as_json)
    ctx.exit(PARTLY if plan.damaged else 0)


def _target(
    place: Reference | None, oci: str | None, tar: str | None, *, plain_http: bool, written: bool
) -> AbstractContextManager[Target]:
    if tar:
        file = Path(tar).expanduser()
        if os.path.isdir(file):  # which no error of a path stops
            raise UsageError(f"{file} is a directory", hint="--tar FILE, or --oci DIR")
        if is_special(file):
            raise UsageError(f"{file} is no file that could be replaced", hint="--tar FILE, in a directory of yours")
        archive = NewArchive(file)
        return archive if written else nullcontext(archive)
    assert oci is not None, "one of both is given"
    return nullcontext(Directory(Path(path(oci)).expanduser()) if place is None else _registry(place, plain_http))


def _registry(place: Reference, plain_http: bool) -> "Registry":
    from cachemgr.oci.registry import Registry

    return Registry(place, os.environ, plain_http=plain_http)


def _tell(plan: Plan, seconds: float, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        output.document(plan=plan, dry_run=dry_run)
    elif not plan.images:
        output.note(f"nothing to export from {plan.source}")
    else:
        output.lines([f"{each.key}  {each.digest}" for each in plan.images])
        told = f"{output.counted(len(plan.images), 'image')} ({output.counted(plan.objects, 'blob')}, "
        told += f"{output.size(plan.bytes)}) to {plan.target}"
        output.note(f"would export {told}" if dry_run else f"exported {told} in {output.seconds(seconds)}")
        output.skipped(plan.skipped_objects, "blob", plan.skipped_bytes)
    for each in plan.damaged:
        output.note(f"warning: {each.reason}")


@click.command("import", epilog=EXIT_CODES)
@click.argument("source", metavar="DIR|FILE|REGISTRY/REPOSITORY:TAG")
@transfer_options
@_plain_http
@click.pass_context
def import_(
    ctx: click.Context,
    source: str,
    keys: tuple[str, ...],
    filters: tuple[str, ...],
    plain_http: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Take artifacts from OCI images into the local store: those named, those that a filter finds, or all.

    They are verified like what comes from a mirror: by the signature of a trusted key, or, with trust=image=off, by
    digests alone. What asked for a signature here asks for it at every start.
    """
    cache = cache_of(ctx)
    images = ImageStore(_blobs(source, plain_http))
    level = cache.level_of("image", images)
    if level.closed is not None:
        raise UntrustedError(f"{level} ignored: {level.closed}")
    marks = came_from(images, WallClock().text(), "image")
    transfer = partial(Transfer, images, cache.store, judge=level.judge, marks=marks)
    job = Job("import", images, cache.store, [(transfer, None)], dry_run=dry_run, as_json=as_json)
    ctx.exit(job.done(named(images, keys, filters) if keys or filters else artifact_keys(images)))


def _blobs(source: str, plain_http: bool) -> Blobs:
    place = reference(source)
    if place is not None:
        return _registry(place, plain_http)
    where = Path(path(source)).expanduser()
    return Directory(where) if os.path.isdir(where) else Archive(where)  # no error of a path stops it
