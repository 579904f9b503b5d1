"""Commands about a command line that has not been started: `lookup` and `env`."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.session import PASS_THROUGH, cache_of, command_argument, settings_of
from cachemgr.domains import of_engine
from cachemgr.factors import describe, reason_to_leave_alone
from cachemgr.factors.profile import Profile
from cachemgr.heads import Heads
from cachemgr.key import derive
from cachemgr.live import pins, planned
from cachemgr.lookup import Found, find, kept_out
from cachemgr.order import KEY_VARIABLE


def _profile(ctx: click.Context, command: tuple[str, ...]) -> Profile:
    settings = settings_of(ctx)
    salt = cache_of(ctx).salt(writable=False)
    return describe(command, os.environ, cwd=Path.cwd(), ignored_args=settings.ignore_arg, salt=salt)


def _is_left_alone(command: tuple[str, ...]) -> bool:
    """Whether `run` would give no cache to this command, which is said then."""
    reason = reason_to_leave_alone(command, os.environ, Path.cwd())
    if reason is not None:
        output.note(reason)
    return reason is not None


@click.command(context_settings=PASS_THROUGH, epilog=EXIT_CODES)
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@command_argument
@click.pass_context
def lookup(ctx: click.Context, as_json: bool, command: tuple[str, ...]) -> None:
    """Say whether CMD would start warm here, and what differs if not. Exit code 0 only for an exact artifact."""
    if _is_left_alone(command):
        if as_json:
            output.document(result="none", key=None, artifact=None, differs=(), relations=(), where=None)
        ctx.exit(1)
    profile = _profile(ctx, command)
    key = derive(profile.factors)
    cache = cache_of(ctx)
    without = cache.avoided(os.uname().nodename)
    found = find(cache.store, key, profile.factors, profile.host, Heads(cache.heads()), without=without)
    notes = (*profile.notes, *(() if found.result == "exact" else kept_out(cache.store, key, without)))
    if as_json:
        output.document(
            result=found.result,
            key=key,
            artifact=found.artifact,
            differs=found.differs,
            relations=found.relations,
            where=found.where,
        )
        for note in notes:
            output.note(f"note: {note}")
    else:
        _print(found, key, notes)
    ctx.exit(0 if found.result == "exact" else 1)


def _print(found: Found, key: str, notes: Sequence[str]) -> None:
    pairs = [("result", found.result), ("key", key)]
    if found.artifact is not None:
        pairs.append(("nearest" if found.result == "none" else "artifact", found.artifact))
    pairs.extend(("differs", output.difference(differs)) for differs in output.telling(found.differs))
    pairs.extend(("because", reason) for reason in found.reasons)
    pairs.extend(("damaged", capture.reason) for capture in found.damaged)
    pairs.extend(("note", note) for note in notes)
    output.record(pairs)


@click.command(context_settings=PASS_THROUGH, epilog=EXIT_CODES)
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@command_argument
@click.pass_context
def env(ctx: click.Context, as_json: bool, command: tuple[str, ...]) -> None:
    """Print the variables that `cachemgr run -- CMD` would set, as `export` lines for a shell."""
    if _is_left_alone(command):
        if as_json:
            output.document(key=None, variables={})
        return
    profile = _profile(ctx, command)
    key = derive(profile.factors)
    pinned = {**profile.pins, **pins(planned(os.environ, of_engine(profile.engine), key))}
    variables = {**profile.constants, **pinned, KEY_VARIABLE: key}
    if as_json:
        output.document(key=key, variables=variables)
    else:
        output.lines([f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())])
