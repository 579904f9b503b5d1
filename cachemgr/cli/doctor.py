"""`cachemgr doctor`: what stands in the way of a warm start on this machine."""

import os
import time
from collections import Counter
from collections.abc import Sequence

import click

from cachemgr.cache import open_cache
from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.session import PASS_THROUGH, settings_of
from cachemgr.doctor import examine
from cachemgr.doctor.finding import Finding, Opened, Patient
from cachemgr.errors import UsageError
from cachemgr.places import working_directory


@click.command(context_settings=PASS_THROUGH, epilog=EXIT_CODES)
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.option("-q", "--quiet", is_flag=True, help="warnings and errors only")
@click.option("--user", type=click.IntRange(min=0), metavar="UID", help="whether this user could write, who will serve")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD [ARG]...]")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, quiet: bool, user: int | None, command: tuple[str, ...]) -> None:
    """Look at settings, directories, variables and plugin, as CMD would find them, and say what to change.

    Run it as the user, in the image and with the variables of the engine. Exit code 1 if there is an error.
    """
    patient = Patient(
        environ=dict(os.environ),
        cwd=working_directory(),
        host=os.uname().nodename,
        now=time.time(),
        opened=_opened(ctx),
        argv=command,
        uid=-1 if user is None else user,
    )
    findings = examine(patient)
    broken = any(finding.severity == "error" for finding in findings)
    if as_json:
        output.document(findings=findings, healthy=not broken)
    else:
        _print([finding for finding in findings if not quiet or finding.severity in {"warning", "error"}])
    ctx.exit(1 if broken else 0)


def _opened(ctx: click.Context) -> Opened | UsageError:
    try:
        settings = settings_of(ctx)
    except UsageError as error:
        return error
    return Opened(settings, open_cache(settings, os.environ))


def _print(findings: Sequence[Finding]) -> None:
    rows = []
    for finding in findings:
        rows.append((f"{finding.severity:<7}  {finding.about}", finding.what))
        if finding.hint:
            rows.append(("", f"hint: {finding.hint}"))
    if rows:
        output.record(rows)
    found = Counter(finding.severity for finding in findings)
    output.note(f"{output.counted(found['error'], 'error')}, {output.counted(found['warning'], 'warning')}")
