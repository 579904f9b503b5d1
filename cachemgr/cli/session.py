"""What every command needs from outside: settings, the opened cache, the clock, the environment."""

import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import click

import cachemgr
from cachemgr.cache import Cache, open_cache
from cachemgr.cli import output
from cachemgr.clock import written
from cachemgr.errors import NotFoundError, UsageError
from cachemgr.places import absolute
from cachemgr.settings import Settings, Value, load
from cachemgr.store import Remote, Store, layout
from cachemgr.store.incoming import Incoming

ASK_A_SERVICE = ("ls", "show", "why", "diff", "stats", "lookup")
"""Commands that `--server` has ask a service instead of the stores of this machine."""


class WallClock:
    """The real time, for `cachemgr.clock.Clock`."""

    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def text(self) -> str:
        return written(time.time())


def settings_of(ctx: click.Context, **flags: Value | None) -> Settings:
    """The settings of this invocation; `flags` are those of the command."""
    given = ctx.find_root().obj
    config: str | None = given["config"]
    everywhere: Mapping[str, Value | None] = given["flags"]
    return load(os.environ, {**everywhere, **flags}, config=None if config is None else Path(config))


def cache_of(ctx: click.Context) -> Cache:
    """The cache of this invocation. What its settings name and cannot be read is said.

    Raises:
        UsageError: a service is to be asked instead, which this command cannot.
    """
    settings = settings_of(ctx)
    if settings.origins["server"] == "flag":
        hint = f"leave out --server, or ask it with {', '.join(ASK_A_SERVICE)}"
        raise UsageError(f"`{ctx.info_name}` is about the stores of this machine", hint=hint)
    return opened(settings)


def opened(settings: Settings) -> Cache:
    """The cache of these settings. What they name and cannot be read is said."""
    cache = open_cache(settings, os.environ)
    for said in cache.notes:
        output.note(f"warning: {said}")
    return cache


def on_mirror(function: output.F) -> output.F:
    """The option of commands about a store that can be about the mirror instead."""
    return click.option("--mirror", is_flag=True, help="the mirror instead of the local store")(function)


def on_waiting(function: output.F) -> output.F:
    """The option of commands about a store that can be about what waits in it instead."""
    return click.option("--waiting", is_flag=True, help="what waits for a signature instead, see `cachemgr sign`")(
        function
    )


def mirror_of(cache: Cache) -> Remote:
    """The mirror, for a command that cannot do without.

    Raises:
        UsageError: there is none.
    """
    if cache.mirror is None:
        raise UsageError(
            "no mirror is set, or --offline leaves it alone",
            hint="cachemgr --mirror s3://BUCKET/PREFIX …, or set CACHEMGR_MIRROR",
        )
    return cache.mirror


def store_of(cache: Cache, *, mirror: bool) -> Store:
    """The local store or the mirror.

    Raises:
        NotFoundError: the local one is no directory.
        CorruptError: it is not one of ours, or one that only a newer cachemgr can read.
    """
    store: Store = mirror_of(cache) if mirror else cache.store
    if not mirror and os.path.exists(str(store)) and not os.path.isdir(str(store)):
        raise NotFoundError(f"{store} is no store: it is no directory", hint="--store DIR, see cachemgr dir")
    layout.read_layout(store)
    return store


def chosen_store(cache: Cache, *, mirror: bool, waiting: bool) -> Store:
    """The local store or the mirror, or what waits in it. Raises as `store_of`."""
    store = store_of(cache, mirror=mirror)
    return Incoming(store) if waiting else store


_FROM_HERE = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]; from cachemgr.__main__ import main; main()"
)
"""Starts us from where we are, and never from the working directory, which may have a module of our name."""


def ourselves(ctx: click.Context) -> tuple[str, ...]:
    """The words that start cachemgr in another process, with the settings file of this invocation. Its other settings
    go there as variables: `Settings.of_flags`."""
    config: str | None = ctx.find_root().obj["config"]
    chosen = () if config is None else ("--config", absolute(config))
    return (sys.executable, "-c", _FROM_HERE, str(Path(cachemgr.__file__).parent.parent), *chosen)


def confirm(question: str, doing: str) -> None:
    """Ask before something is lost; `doing` names it where nobody can be asked.

    Raises:
        UsageError: there is nobody to ask.
        click.Abort: the answer is no.
    """
    if not sys.stdin.isatty():
        raise UsageError(f"{doing} needs a yes", hint="add -y, or look first with --dry-run")
    click.confirm(question, abort=True, err=True)


def new_launch() -> str:
    """A name for a launch. Those of one machine sort by time, which is in it to a quarter of a millisecond."""
    now = datetime.now(timezone.utc)
    return f"{now:%Y%m%dT%H%M%S}-{now.microsecond * 4096 // 1_000_000:03x}{secrets.randbits(28):07x}"


def command_argument(function: output.F) -> output.F:
    """`-- CMD ARG...` at the end of a command line, taken as it is."""
    return click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD [ARG]...")(
        function
    )


@contextmanager
def talk_apart() -> Iterator[None]:
    """What commands write to stdout meanwhile goes to stderr: stdout is for what we answer."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


PASS_THROUGH = {"allow_interspersed_args": False}
"""Context settings of a command that ends in `command_argument`."""
