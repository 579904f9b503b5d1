"""What is kept and what is kept out: `pin` and `unpin`, `quarantine` and `unquarantine`."""

import os
import pwd
import time

import click

from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.session import WallClock, cache_of, on_mirror, settings_of, store_of
from cachemgr.cli.trust import signing_key
from cachemgr.clock import written
from cachemgr.errors import NotFoundError, UsageError
from cachemgr.inventory import resolve
from cachemgr.key import Key
from cachemgr.quarantine import against, bring_back, named, notes, report
from cachemgr.store import Store, pins
from cachemgr.store.pins import Pin

_DAY = 86400
_MOST_LETTERS = 1000


@click.command(epilog=EXIT_CODES)
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@click.option("--keep-days", type=click.IntRange(1, 99_999), metavar="N", help="for so many days")
@click.option(
    "--keep-last", type=click.IntRange(min=1), metavar="N", help="while it is among the last N of its model and device"
)
@click.option("--reason", default="", metavar="TEXT", help="why, for those who wonder")
@click.option("--dry-run", is_flag=True, help="say what would be pinned, and stop")
@on_mirror
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.pass_context
def pin(
    ctx: click.Context,
    keys: tuple[str, ...],
    keep_days: int | None,
    keep_last: int | None,
    reason: str,
    dry_run: bool,
    mirror: bool,
    as_json: bool,
) -> None:
    """Keep artifacts from every prune, also automatic ones, on all machines that share the store; for ever, or for as
    long as one of the options says. A new pin takes the place of the old one."""
    if not reason.isprintable() or len(reason) > _MOST_LETTERS:
        raise UsageError(
            "the reason cannot be printed or is too long", hint=f"at most {_MOST_LETTERS} letters, in a line"
        )
    store = store_of(cache_of(ctx), mirror=mirror)
    until = None if keep_days is None else written(time.time() + keep_days * _DAY)
    made = Pin(_who(), WallClock().text(), reason, until, keep_last)
    named = sorted({resolve(store, key) for key in keys})
    for key in () if dry_run else named:
        pins.keep(store, key, made)
    if as_json:
        output.document(pinned=named, pin=made, dry_run=dry_run)
        return
    for key in named:
        output.note(f"{'would pin' if dry_run else 'pinned'} {key}: {made}")


@click.command(epilog=EXIT_CODES)
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@click.option("--dry-run", is_flag=True, help="say which pins would go, and stop")
@on_mirror
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.pass_context
def unpin(ctx: click.Context, keys: tuple[str, ...], dry_run: bool, mirror: bool, as_json: bool) -> None:
    """Let artifacts go when their time has come. Exit code 1 if none of them was pinned."""
    store = store_of(cache_of(ctx), mirror=mirror)
    named = sorted({_pinned(store, key) for key in keys})
    held = {key: made for key in named if (made := pins.pin_of(store, key)) is not None}
    for key in () if dry_run else held:
        pins.lift(store, key)
    if as_json:
        output.document(unpinned=held, dry_run=dry_run)
    else:
        for key in named:
            said = f"{'would unpin' if dry_run else 'unpinned'} {key}: {held[key]}" if key in held else f"{key} is not"
            output.note(said if key in held else f"{said} pinned")
    ctx.exit(0 if held else 1)


def _pinned(store: Store, text: str) -> Key:
    """The artifact that is meant, also one that is gone and has left its pin behind."""
    try:
        return resolve(store, text)
    except NotFoundError:
        beginning = f"k1:{text.removeprefix('k1').removeprefix(':')}"
        left = [key for key in pins.placed(store) if key.startswith(beginning)]
        if len(left) != 1:
            raise
        return left[0]


@click.command(epilog=EXIT_CODES)
@click.argument("names", nargs=-1, required=True, metavar="KEY|CAPTURE...")
@click.option("--reason", required=True, metavar="TEXT", help="why, for those who wonder")
@click.option("--key", "sign_key", metavar="WHERE", help="private key: a file, env:NAME or command:WORDS")
@click.option("--dry-run", is_flag=True, help="say what would be reported, and stop")
@on_mirror
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.pass_context
def quarantine(
    ctx: click.Context,
    names: tuple[str, ...],
    reason: str,
    sign_key: str | None,
    dry_run: bool,
    mirror: bool,
    as_json: bool,
) -> None:
    """Report that nobody should use these captures any more, signed, so that every machine that trusts the key and asks
    this store leaves them alone. They stay where they are.

    KEY may be a prefix; a capture is named by sha256: and the beginning of its digest.
    """
    signer = signing_key(settings_of(ctx, sign_key=sign_key).sign_key, os.environ)
    cache = cache_of(ctx)
    store = store_of(cache, mirror=mirror)
    found = sorted({each for name in names for each in named(store, name)})
    for key, capture in () if dry_run else found:
        report(store, key, capture, signer, reason=reason, signed=WallClock().text())
    if as_json:
        rows = [{"key": key, "capture": capture} for key, capture in found]
        output.document(reported=rows, signer=signer.public.id, reason=reason, dry_run=dry_run)
        return
    for key, capture in found:
        verb = "would put" if dry_run else "put"
        output.note(f"{verb} capture {output.short(capture)} of {output.short(key)} into quarantine: {reason}")
    if not cache.trust.heeds(signer.public.id):
        output.note(f"warning: this machine does not trust key {signer.public.id}, so it goes on using them")
        output.note(f"hint: CACHEMGR_TRUSTED_KEYS={signer.public}")


@click.command(epilog=EXIT_CODES)
@click.argument("names", nargs=-1, required=True, metavar="KEY|CAPTURE...")
@click.option("--all-hosts", is_flag=True, help="also what other hosts have noted for themselves in this store")
@click.option("--dry-run", is_flag=True, help="say what would be forgotten, and stop")
@on_mirror
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.pass_context
def unquarantine(
    ctx: click.Context, names: tuple[str, ...], all_hosts: bool, dry_run: bool, mirror: bool, as_json: bool
) -> None:
    """Let captures be used again: forget what this host noted against them, and every report in this store. Exit code 1
    if nothing was said against them."""
    cache = cache_of(ctx)
    store = store_of(cache, mirror=mirror)
    found = sorted({each for name in names for each in named(store, name)})
    said = {capture: notes((store, cache.apart), cache.trust, capture) for _key, capture in found}
    host, act = None if all_hosts else os.uname().nodename, against if dry_run else bring_back
    gone = [name for place in (store, cache.apart) for name in act(place, found, host=host)]
    if as_json:
        output.document(captures=said, removed=gone, dry_run=dry_run)
    else:
        for capture, own in said.items():
            for each in own:
                output.note(f"capture {output.short(capture)} was in quarantine on {each.where}: {each.reason}")
        output.note(f"{'would remove' if dry_run else 'removed'} {output.counted(len(gone), 'note')}")
    ctx.exit(0 if gone else 1)


def _who() -> str:
    """For people, and nobody believes it."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = str(os.geteuid())
    return f"{name}@{os.uname().nodename}"
