"""`cachemgr serve` and `cachemgr token`: the service and who may ask it."""

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import click

from cachemgr.cache import open_cache
from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.session import WallClock, settings_of
from cachemgr.clock import written
from cachemgr.errors import NotFoundError, UsageError
from cachemgr.settings import typed_age

if TYPE_CHECKING:
    from cachemgr.catalogue.opened import Catalogue
    from cachemgr.catalogue.tokens import Role, Token

T = TypeVar("T")

PORT = 8420
_ROLES = ("read", "report", "admin")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(epilog=EXIT_CODES)
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen on")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0 takes a free one")
@click.option("--tls-cert", type=_FILE, metavar="FILE", help="certificate chain, PEM")
@click.option("--tls-key", type=_FILE, metavar="FILE", help="its private key, PEM")
@click.option("--insecure-public", is_flag=True, help="answer other hosts without TLS, behind a proxy; needs tokens")
@click.option("--read-only", is_flag=True, default=None, help="change nothing: no reports, pins, prunes")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="how often the store is read",
)
@click.pass_context
def serve(
    ctx: click.Context,
    host: str,
    port: int,
    tls_cert: Path | None,
    tls_key: Path | None,
    insecure_public: bool,
    read_only: bool | None,
    interval: float,
) -> None:
    """Show a fleet whether its cache pays: a page for people, an API for programs, metrics for Prometheus.

    It serves the mirror if there is one, or else the local store. On the loopback, who has no token may read.
    """
    try:
        from cachemgr.server.limits import Bounds
        from cachemgr.server.serving import Bind, backend_of
        from cachemgr.server.serving import serve as run_server
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the service needs `{error.name}`, which is not installed", hint="pip install 'cachemgr[server]'"
        ) from None

    bind = Bind(host, port, tls_cert, tls_key, insecure_public=insecure_public)
    bind.check()
    settings = settings_of(ctx, read_only=read_only)
    cache = open_cache(settings, os.environ)
    for note in cache.notes:
        output.note(f"warning: {note}")
    name = os.uname().nodename
    backend = backend_of(
        settings,
        cache,
        environ=dict(os.environ),
        clock=WallClock(),
        host=name,
        replica=f"{name}-{secrets.token_hex(4)}",
    )
    if backend.catalogue.note:
        output.note(f"warning: {backend.catalogue.note}")
    run_server(backend, bind, interval=interval, bounds=Bounds(), say=output.note)


@click.group(epilog=EXIT_CODES)
def token() -> None:
    """Make, list and revoke the tokens that the service asks for. They are kept in the catalogue's database."""


@token.command(epilog=EXIT_CODES)
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(_ROLES),
    required=True,
    help="read: see everything; report: what a node needs; admin: everything",
)
@click.option("--expires", metavar="AGE", help="after which it counts no more, such as 90d")
@click.option("--dry-run", is_flag=True, help="say what would be made, and stop")
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.pass_context
def create(ctx: click.Context, name: str, role: str, expires: str | None, dry_run: bool, as_json: bool) -> None:
    """Make a token and print it. It is shown this once: only its digest is kept."""
    from cachemgr.catalogue import tokens

    if not name.isprintable() or not 0 < len(name) <= 100:
        raise UsageError("a token needs a name of 1 to 100 letters that can be printed", hint="… create grafana")
    made = tokens.Token(name, cast("Role", role), WallClock().text(), None if expires is None else _end(expires))
    secret = tokens.secret_of(secrets.token_bytes(32))
    if not dry_run:
        _asked(ctx, lambda catalogue: tokens.create(catalogue, made, secret))
    if as_json:
        output.document(token=made, secret=None if dry_run else secret, dry_run=dry_run)
    elif dry_run:
        output.note(f"would make token `{name}` with the role {role}")
    else:
        output.lines([secret])
        output.note(f"token `{name}` with the role {role}; it is shown this once")


def _end(text: str) -> str:
    try:
        return written(time.time() + typed_age(text))
    except ValueError as error:
        raise UsageError(f"`--expires {text}` {error}", hint="--expires 90d") from None


@token.command(name="list", epilog=EXIT_CODES)
@output.listing
@click.pass_context
def list_(ctx: click.Context, form: str, as_json: bool, quiet: bool) -> None:
    """List tokens, the oldest first. Nobody can see their secrets."""
    from cachemgr.catalogue import tokens

    found = list(_asked(ctx, tokens.tokens).values())
    chosen = output.chosen(form, as_json=as_json, quiet=quiet)
    if chosen == "json":
        output.document(tokens=found)
    elif chosen == "quiet":
        output.lines([each.name for each in found])
    elif found:
        now = WallClock().text()
        rows = [(each.name, each.role, each.created, each.expires or "-", _state(each, now)) for each in found]
        output.table(("NAME", "ROLE", "CREATED", "EXPIRES", "STATE"), rows, flexible="NAME")
    else:
        output.note("no tokens")


def _state(each: "Token", now: str) -> str:
    if each.revoked is not None:
        return f"revoked {each.revoked[:10]}"
    return "counts" if each.holds(now) else "expired"


@token.command(epilog=EXIT_CODES)
@click.argument("name")
@click.option("--dry-run", is_flag=True, help="say which one would be revoked, and stop")
@click.pass_context
def revoke(ctx: click.Context, name: str, dry_run: bool) -> None:
    """Let a token open nothing any more; servers notice within five seconds."""
    from cachemgr.catalogue import tokens

    if dry_run:
        known = _asked(ctx, tokens.tokens).values()
        if name not in {each.name for each in known}:
            raise NotFoundError(f"there is no token `{name}`", hint="cachemgr token list")
        output.note(f"would revoke token `{name}`")
        return
    found = _asked(ctx, lambda catalogue: tokens.revoke(catalogue, name, WallClock().text()))
    output.note(f"token `{found.name}` is revoked since {found.revoked}")


def _asked(ctx: click.Context, ask: "Callable[[Catalogue], T]") -> T:
    from cachemgr.catalogue.opened import using

    settings = settings_of(ctx)
    cache = open_cache(settings, os.environ)
    return using(settings.database_url, cache.home, ask, lambda line: output.note(f"warning: {line}"))
