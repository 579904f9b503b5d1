"""Asking the catalogue on the command line, and `reindex`.

The catalogue is imported when it is asked: commands that do without cost nothing of it.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from cachemgr.cache import Cache
from cachemgr.cli import EXIT_CODES, PARTLY, output
from cachemgr.cli.session import cache_of, settings_of, store_of
from cachemgr.errors import CacheError, CorruptError, DatabaseError, NotFoundError, StoreError
from cachemgr.store import Store
from cachemgr.store.captures import Damaged

if TYPE_CHECKING:
    from cachemgr.catalogue.opened import Catalogue

T = TypeVar("T")


def asked(
    ctx: click.Context,
    cache: Cache,
    store: Store,
    ask: "Callable[[Catalogue, int], T]",
    *,
    damaged: list[Damaged],
    or_store: bool = False,
) -> T:
    """What `ask` says of the catalogue, brought up to date with `store`, and of the number that the store has in it.
    What cannot be read of the store goes to `damaged`; what had to be done to open the catalogue is said.

    With `or_store`, a server that does not answer is no failure: what the store itself tells is enough.

    Raises:
        DatabaseError: the catalogue is on a server that does not answer.
    """
    from cachemgr.catalogue.opened import from_store, using

    def fresh(catalogue: "Catalogue") -> T:
        return ask(catalogue, _refreshed(ctx, catalogue, store, damaged))

    try:
        return using(settings_of(ctx).database_url, cache.home, fresh, _warn)
    except DatabaseError as error:
        if not or_store:
            raise
        return from_store(error, fresh, _warn)


def _refreshed(ctx: click.Context, catalogue: "Catalogue", store: Store, damaged: list[Damaged]) -> int:
    """The number of a store in the catalogue, which knows all of it afterwards. `damaged` is begun anew: a catalogue
    that fails is followed by another."""
    from cachemgr.catalogue.ingest import refresh
    from cachemgr.catalogue.past import day_before, roll_up

    damaged.clear()
    source = refresh(catalogue, store, name_in(catalogue, store), damaged)
    roll_up(catalogue, source, day_before(time.time(), settings_of(ctx).launch_age))
    return source


def name_in(catalogue: "Catalogue", store: Store) -> str:
    """What a catalogue calls a store that is asked for from this host."""
    from cachemgr.catalogue.sources import source_name

    return source_name(catalogue, store, os.uname().nodename)


def _warn(line: str) -> None:
    output.note(f"warning: {line}")


class _Read(msgspec.Struct, frozen=True):
    """What was read of one store."""

    store: str
    artifacts: int
    launches: int
    damaged: int


def read_anew(ctx: click.Context, cache: Cache, store: Store, damaged: list[Damaged]) -> tuple[int, int]:
    """Make what the catalogue has of a store anew; how many artifacts and starts it has then. What cannot be read goes
    to `damaged`.

    Raises:
        DatabaseError: the catalogue is on a server that does not answer.
    """
    from cachemgr.catalogue.artifacts import artifacts
    from cachemgr.catalogue.ingest import forget
    from cachemgr.catalogue.launches import count
    from cachemgr.catalogue.opened import using

    def anew(catalogue: "Catalogue") -> tuple[int, int]:
        forget(catalogue, name_in(catalogue, store))
        source = _refreshed(ctx, catalogue, store, damaged)
        return len(artifacts(catalogue, source).artifacts), count(catalogue, source)

    return using(settings_of(ctx).database_url, cache.home, anew, _warn)


@click.command(epilog=EXIT_CODES)
@click.option("--local", is_flag=True, help="only the local store")
@click.option("--mirror", is_flag=True, help="only the mirror")
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.option("--dry-run", is_flag=True, help="say what would be read again, and stop")
@click.pass_context
def reindex(ctx: click.Context, local: bool, mirror: bool, as_json: bool, dry_run: bool) -> None:
    """Make the catalogue anew from the local store, and from the mirror if one is set. Nothing of them changes.

    A store that cannot be read keeps the other one from nothing: exit code 3.
    """
    cache = cache_of(ctx)
    either = local == mirror
    failed: list[CacheError] = []
    found = [_readable(cache, failed, mirror=False)] if local or either else []
    if mirror or (either and cache.mirror is not None):
        found.append(_readable(cache, failed, mirror=True))
    stores = [store for store in found if store is not None]
    read = [] if dry_run else _read_again(ctx, cache, stores, failed)
    if failed and len(failed) == len(found):
        raise failed[0]
    if as_json:
        output.document(stores=[{"store": str(store)} for store in stores] if dry_run else read, dry_run=dry_run)
    else:
        planned = [f"would read everything in {store} again" for store in stores if dry_run]
        for line in (*planned, *map(_line, read)):
            output.note(line)
    for error in failed:
        _warn(str(error))
    ctx.exit(PARTLY if failed else 0)


def _readable(cache: Cache, failed: list[CacheError], *, mirror: bool) -> Store | None:
    """The local store or the mirror; None where it cannot be read, and why goes to `failed`."""
    try:
        return store_of(cache, mirror=mirror)
    except (NotFoundError, StoreError, CorruptError) as error:
        failed.append(error)
        return None


def _read_again(ctx: click.Context, cache: Cache, stores: Sequence[Store], failed: list[CacheError]) -> list[_Read]:
    """What the catalogue has of each store, which it forgot first. Those that fail go to `failed`, and the catalogue is
    brought up to date with them the next time it is asked.

    Raises:
        DatabaseError: the catalogue is on a server that does not answer.
    """
    read: list[_Read] = []
    for store in stores:
        damaged: list[Damaged] = []
        try:
            found, starts = read_anew(ctx, cache, store, damaged)
        except (StoreError, CorruptError) as error:
            failed.append(error)
            continue
        for each in damaged:
            _warn(each.reason)
        read.append(_Read(str(store), found, starts, len(damaged)))
    return read


def _line(read: _Read) -> str:
    found = f"{output.counted(read.artifacts, 'artifact')} and {output.counted(read.launches, 'start')}"
    return f"read {found} in {read.store}"
