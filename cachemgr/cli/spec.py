"""`cachemgr spec`: the commands of artifacts, for the next prewarm."""

import time

import click

from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.session import cache_of, on_mirror, store_of
from cachemgr.filters import FIELDS, parse
from cachemgr.inventory import summaries
from cachemgr.spec import dump, of_captures
from cachemgr.store.captures import Damaged, captures


@click.command(epilog=EXIT_CODES)
@click.option("-f", "--filter", "filters", multiple=True, metavar="FILTER", help=f"artifacts by {', '.join(FIELDS)}")
@on_mirror
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.pass_context
def spec(ctx: click.Context, filters: tuple[str, ...], mirror: bool, as_json: bool) -> None:
    """Write the commands that artifacts were made of as a spec (YAML), so that `prewarm` makes them anew.

    On upgrade day: `cachemgr spec -f engine_version=0.31.0 > next.yaml` in the old image, `cachemgr prewarm --spec
    next.yaml` in the new one. Variables of an entry are yours to add: a capture has no more than their digests.
    """
    store = store_of(cache_of(ctx), mirror=mirror)
    fits = parse(filters, now=time.time())
    damaged: list[Damaged] = []
    wanted = [each.key for each in summaries(store, damaged) if fits(each)]
    held = [capture.manifest for key in wanted for capture in captures(store, key, damaged)]
    for each in damaged:
        output.note(f"warning: {each.reason}")
    entries, without = of_captures(held)
    for line in without:
        output.note(f"left out: {line}")
    if as_json:
        output.document(entries=entries, left_out=without)
    elif entries:
        click.echo(dump(entries), nl=False)
    else:
        output.note("no artifact has a command that can be started")
    ctx.exit(0 if entries else 1)
