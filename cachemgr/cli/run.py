"""`cachemgr run`: a command with a warm compile cache."""

import os
import signal
from typing import NoReturn

import click
import msgspec

from cachemgr import launch
from cachemgr.cache import open_cache
from cachemgr.cli import EXIT_CODES
from cachemgr.cli.session import PASS_THROUGH, WallClock, command_argument, settings_of
from cachemgr.cli.telling import Teller, order_of, reporter_of, sender_of
from cachemgr.errors import CannotExecuteError, NoProcessError
from cachemgr.executables import resolve
from cachemgr.order import Reporter, Sender
from cachemgr.places import working_directory
from cachemgr.settings import Settings


@click.command(context_settings=PASS_THROUGH, epilog=EXIT_CODES)
@click.option("--report", metavar="FILE", help="write what happened to FILE as JSON")
@click.option("--publish", type=click.Choice(["never", "local", "mirror"]), help="where to publish what is compiled")
@click.option("--read-only", is_flag=True, default=None, help="restore only, write nothing to the store")
@click.option("--strict", is_flag=True, default=None, help="exit with 125 when the cache fails, instead of going on")
@click.option("--ignore-arg", multiple=True, metavar="NAME", help="argument that does not shape what is compiled")
@click.option("--deadline", type=float, metavar="SECONDS", help="how long look-up and restore may delay the start")
@click.option("--ready-file", metavar="FILE", help="file that appears when CMD, which runs for long, is ready")
@click.option("--also", multiple=True, metavar="DOMAIN", help="a cache that is kept on request only: startup_plan")
@click.option("--wait", type=float, metavar="SECONDS", help="how long to wait for a launch that compiles the same key")
@click.option("--require-verified", is_flag=True, default=None, help="use only what was verified (prewarm --verify)")
@click.option("--single-flight", type=float, metavar="WAIT", help="seconds to wait for any machine that compiles it")
@command_argument
@click.pass_context
def run(
    ctx: click.Context,
    report: str | None,
    publish: str | None,
    read_only: bool | None,
    strict: bool | None,
    ignore_arg: tuple[str, ...],
    deadline: float | None,
    ready_file: str | None,
    also: tuple[str, ...],
    wait: float | None,
    single_flight: float | None,
    require_verified: bool | None,
    command: tuple[str, ...],
) -> None:
    """Run CMD with a warm compile cache, and capture what it compiles.

    Standard streams, signals and the exit code pass through (128+n when signal n ended CMD, 125 when cachemgr itself
    failed, 126 or 127 when CMD cannot be executed). Inside another `cachemgr run`, CMD is simply executed.
    """
    if launch.is_nested(os.environ):
        _become(command)
    settings = settings_of(
        ctx,
        report=report,
        publish=publish,
        read_only=read_only,
        strict=strict,
        ignore_arg=ignore_arg or None,
        deadline=deadline,
        ready_file=ready_file,
        also=also or None,
        wait=wait,
        single_flight=single_flight,
        require_verified=require_verified,
    )
    ctx.exit(_launched(settings, command, sender_of(ctx, settings), reporter_of(ctx, settings)))


def _launched(settings: Settings, command: tuple[str, ...], sender: Sender | None, reporter: Reporter | None) -> int:
    order = order_of(settings, command, environ=dict(os.environ), cwd=working_directory(), sender=sender)
    order = msgspec.structs.replace(order, reporter=reporter)
    teller = Teller(settings.report)
    try:
        return launch.run(order, open_cache(settings, os.environ), WallClock(), teller)
    except NoProcessError as error:
        if settings.strict:
            raise
        teller.note(f"{error}: the command gets this one, without us")
        _become(command)


def _become(command: tuple[str, ...]) -> NoReturn:
    path = resolve(command[0], os.environ, working_directory())
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them for itself
    try:
        os.execv(path, command)  # noqa: S606 - the user's command, without a shell on purpose
    except OSError as error:
        raise CannotExecuteError(f"`{path}` cannot be executed: {error.strerror}") from None
