"""What every command needs from outside: settings, the opened cache, the clock, the environment."""

import os
import secrets
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import click

from cachemgr.cache import Cache, open_cache
from cachemgr.settings import Settings, Value, load

F = TypeVar("F", bound=Callable[..., None])


class WallClock:
    """The real time, for `cachemgr.clock.Clock`."""

    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def text(self) -> str:
        return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def settings_of(ctx: click.Context, **flags: Value | None) -> Settings:
    """The settings of this invocation; `flags` are those of the command."""
    given: dict[str, str | None] = ctx.find_root().obj
    config = given["config"]
    everywhere: Mapping[str, Value | None] = {"store": given["store"], "home": given["home"]}
    return load(os.environ, {**everywhere, **flags}, config=None if config is None else Path(config))


def cache_of(ctx: click.Context) -> Cache:
    """The cache of this invocation."""
    return open_cache(settings_of(ctx), os.environ)


def new_launch() -> str:
    """A name for a launch that sorts by time."""
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


def command_argument(function: F) -> F:
    """`-- CMD ARG...` at the end of a command line, taken as it is."""
    return click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD [ARG]...")(
        function
    )


PASS_THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Context settings of a command that ends in `command_argument`."""
