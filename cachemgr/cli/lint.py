"""`cachemgr lint`: what a launch has that would cost it its cache."""

import os

import click

from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.lookup import is_left_alone, profile_of
from cachemgr.cli.session import PASS_THROUGH, command_argument, settings_of
from cachemgr.factors.environment import without_ours
from cachemgr.lint import hazards


@click.command(context_settings=PASS_THROUGH, epilog=EXIT_CODES)
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@command_argument
@click.pass_context
def lint(ctx: click.Context, as_json: bool, command: tuple[str, ...]) -> None:
    """Name variables and flags of CMD that would fragment or poison its cache with this version of its engine, each
    with the line that pins or unsets it. Exit code 1 if there is any."""
    if is_left_alone(command):
        if as_json:
            output.document(engine=None, engine_version=None, hazards=())
        return
    profile = profile_of(settings_of(ctx), command)
    found = hazards(without_ours(os.environ), profile)
    if as_json:
        output.document(engine=profile.engine, engine_version=profile.engine_version, hazards=found)
    else:
        for hazard in found:
            output.record([(f"{hazard.kind:<9}  {hazard.about}", hazard.what), ("", f"hint: {hazard.fix}")])
        engine = f"{profile.engine} {profile.engine_version or 'of an unknown version'}"
        output.note(f"{output.counted(len(found), 'hazard')} for {engine}")
    ctx.exit(1 if found else 0)
