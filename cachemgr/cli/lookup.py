"""Commands about a command line that has not been started: `lookup` and `env`."""

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import click

from cachemgr import lint
from cachemgr.cache import Cache
from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.remote import service_of
from cachemgr.cli.session import PASS_THROUGH, command_argument, opened, settings_of
from cachemgr.domains import of_engine
from cachemgr.errors import CacheError
from cachemgr.factors import describe, reason_to_leave_alone
from cachemgr.factors.profile import Profile
from cachemgr.factors.target import Target
from cachemgr.factors.target import load as load_target
from cachemgr.key import Key, derive
from cachemgr.level import Level
from cachemgr.live import pins, planned
from cachemgr.lookup import Found, find, kept_out
from cachemgr.order import KEY_VARIABLE
from cachemgr.places import working_directory
from cachemgr.service import Service
from cachemgr.settings import Settings

T = TypeVar("T")


def profile_of(settings: Settings, command: tuple[str, ...], target: Target | None = None) -> Profile:
    """What a command would compile here, or as on the machine that `target` describes."""
    environ = os.environ if target is None else {}
    return describe(command, environ, cwd=working_directory(), ignored_args=settings.ignore_arg, target=target)


def is_left_alone(command: tuple[str, ...]) -> bool:
    """Whether `run` would give no cache to this command, which is said then."""
    reason = reason_to_leave_alone(command, os.environ, working_directory())
    if reason is not None:
        output.note(reason)
    return reason is not None


@click.command(context_settings=PASS_THROUGH, epilog=EXIT_CODES)
@click.option("--target", metavar="FILE", help="as on that machine, of which `cachemgr target` wrote FILE")
@click.option("--require-verified", is_flag=True, default=None, help="only what was verified (prewarm --verify)")
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@command_argument
@click.pass_context
def lookup(
    ctx: click.Context, target: str | None, require_verified: bool | None, as_json: bool, command: tuple[str, ...]
) -> None:
    """Say whether CMD would start warm here, and what differs if not. Exit code 0 only for an exact artifact.

    With --target, as on a machine that this one only has a description of: before it is rented. Nothing of this machine
    counts then but its stores, and the model's configuration where the target does not have it.
    """
    if is_left_alone(command):
        if as_json:
            output.document(result="none", key=None, artifact=None, differs=(), relations=(), where=None)
        ctx.exit(1)
    settings = settings_of(ctx, require_verified=require_verified)
    chosen = None if target is None else load_target(Path(target))
    service = service_of(ctx)
    if service is None:
        profile, key, found = looked_up(settings, opened(settings), command, chosen)
    else:
        profile, key, found = _asked(service, profile_of(settings, command, chosen))
    unread = [hazard.what for hazard in lint.unreadable(profile)]
    notes = (*profile.notes, *unread, *(() if found.result == "exact" else kept_out(found, key)))
    if as_json:
        output.document(
            result=found.result,
            key=key,
            artifact=found.artifact,
            differs=found.differs,
            relations=found.relations,
            where=found.where,
        )
        for name, text in (*_asides(found), *(("note", note) for note in notes)):
            output.note(f"{name}: {text}")
    else:
        _print(found, key, notes)
    ctx.exit(0 if found.result == "exact" else 1)


def _asked(service: Service, profile: Profile) -> tuple[Profile, Key, Found]:
    """What the service has for a command."""
    from cachemgr.cli import asking

    return profile, derive(profile.factors), asking.look_up(service, profile.factors, profile.host)


def looked_up(
    settings: Settings, cache: Cache, command: tuple[str, ...], target: Target | None = None
) -> tuple[Profile, Key, Found]:
    """What a command would compile, its key, and the artifact that it would start from."""
    profile = profile_of(settings, command, target)
    key = derive(profile.factors)
    without = cache.avoided(os.uname().nodename)
    found = find(cache.levels, key, profile.factors, profile.host, model=profile.model, without=without, ask=_look_in)
    return profile, key, found


def _look_in(level: Level, step: Callable[[], T], /) -> T | None:
    """A level behind the local one that fails is said, and passed over."""
    try:
        return step()
    except CacheError as error:
        if level.where == "local":
            raise
        output.note(f"warning: {error}")
        return None


def _print(found: Found, key: str, notes: Sequence[str]) -> None:
    pairs = [("result", found.result), ("key", key)]
    if found.where is not None and found.where != "local":
        pairs.append(("where", f"{found.where} {found.store}"))
    if found.artifact is not None:
        pairs.append(("nearest" if found.result == "none" else "artifact", found.artifact))
    pairs.extend(("differs", output.difference(differs)) for differs in output.telling(found.differs))
    pairs.extend(("because", reason) for reason in found.reasons)
    pairs.extend(_asides(found))
    pairs.extend(("note", note) for note in notes)
    output.record(pairs)


def _asides(found: Found) -> list[tuple[str, str]]:
    """What was left out, or should have been: the word for it, and why."""
    return [
        *((capture.kind, capture.reason) for capture in found.damaged),
        *(("doubt", doubt) for doubt in found.doubts),
        *(("ignored", level) for level in found.ignored),
    ]


@click.command(context_settings=PASS_THROUGH, epilog=EXIT_CODES)
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@command_argument
@click.pass_context
def env(ctx: click.Context, as_json: bool, command: tuple[str, ...]) -> None:
    """Print the variables that `cachemgr run -- CMD` would set, as `export` lines for a shell."""
    if is_left_alone(command):
        if as_json:
            output.document(key=None, variables={})
        return
    profile = profile_of(settings_of(ctx), command)
    key = derive(profile.factors)
    pinned = {**profile.pins, **pins(planned(os.environ, of_engine(profile.engine), key))}
    variables = {**profile.constants, **pinned, KEY_VARIABLE: key}
    if as_json:
        output.document(key=key, variables=variables)
    else:
        output.lines([f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())])
