"""`reporter`: sends what launches left to be told to the service, as their child in the background."""

import os
import random
import time
from pathlib import Path

import click
import msgspec

from cachemgr.cache import open_cache
from cachemgr.cli import output
from cachemgr.cli.remote import connected
from cachemgr.cli.session import settings_of
from cachemgr.errors import CacheError
from cachemgr.outbox import reports
from cachemgr.service import RefusedError, Service
from cachemgr.store import records
from cachemgr.store.lock import held

_COURTESY = 10
"""By how much it is nicer than the command that it runs beside."""
_WAIT = 60.0
"""Seconds that it waits for the one before it, which may have looked before our record was there."""
_PATIENCE = 120.0
"""Seconds for which it asks a service that fails."""
_PAUSE, _LONGEST_PAUSE = 1.0, 20.0
_MOST = 200
"""Launches in one report."""


class _Taken(msgspec.Struct, frozen=True):
    """How many launches the service has taken."""

    taken: int


@click.command(hidden=True)
@click.pass_context
def reporter(ctx: click.Context) -> None:
    """Send what launches left to be told to the service."""
    os.nice(_COURTESY)
    settings = settings_of(ctx)
    service, cache = connected(settings), open_cache(settings, os.environ)
    assert settings.server is not None, "there is a service"
    waiting = reports(cache.home, settings.server)
    with held(waiting.with_suffix(".lock"), wait=_WAIT) as alone:
        if alone:
            _send(service, waiting)


def _send(service: Service, waiting: Path) -> None:
    """Send until nothing waits. What the service will never take is said, and dropped."""
    begun, pause = time.monotonic(), _PAUSE
    while paths := records.kept(waiting)[:_MOST]:
        try:
            _report(service, paths)
        except RefusedError as error:
            for path in paths:
                _alone(service, path, str(error))
        except CacheError:
            if time.monotonic() - begun + pause > _PATIENCE:
                raise
            time.sleep(pause * (0.5 + random.random()))  # noqa: S311 - nodes must not come back at once
            pause = min(2 * pause, _LONGEST_PAUSE)


def _report(service: Service, paths: list[Path]) -> None:
    told = [data for path in paths if (data := _read(path)) is not None]
    if told:
        service.post("/v1/launches", b'{"launches":[' + b",".join(told) + b"]}", _Taken)
    for path in paths:
        path.unlink(missing_ok=True)


def _alone(service: Service, path: Path, why: str) -> None:
    """One of several that were refused together."""
    try:
        _report(service, [path])
    except RefusedError:
        output.note(f"warning: never reported: {path.name}: {why}")
        path.unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:  # a later record of the same launch took its place, or it was too old to keep
        return None
