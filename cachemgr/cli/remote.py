"""Which service a command asks or tells, by its settings."""

import click

from cachemgr.cli.session import settings_of
from cachemgr.errors import UsageError
from cachemgr.service import Service
from cachemgr.settings import Settings


def service_of(ctx: click.Context) -> Service | None:
    """The service that `--server` on the command line asks instead of the stores of this machine. One that is only
    configured is reported to, and not asked."""
    settings = settings_of(ctx)
    if settings.server is None or settings.origins["server"] != "flag":
        return None
    return connected(settings)


def not_with_a_service(**flags: object) -> None:
    """Refuse flags that choose among the stores of this machine.

    Raises:
        UsageError: one of them is given.
    """
    for name, value in flags.items():
        if value:
            raise UsageError(f"--server asks a service, which has no `--{name}`", hint=f"leave out --{name}")


def connected(settings: Settings) -> Service:
    """The service of these settings.

    Raises:
        UsageError: there is none.
    """
    if settings.server is None:
        raise UsageError("no service is set", hint="cachemgr --server URL …, or set CACHEMGR_SERVER")
    return Service(settings.server, settings.server_token)
