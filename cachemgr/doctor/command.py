"""Checks of a command line: what it would compile, and what cannot be known about it."""

from collections.abc import Iterator

from cachemgr import lint
from cachemgr.doctor.finding import Finding, Opened, Patient, note, ok, warning
from cachemgr.factors import describe, reason_to_leave_alone


def engine(patient: Patient, opened: Opened) -> Iterator[Finding]:
    """What is understood of the command, and the guards that could not be read."""
    argv, environ, cwd = patient.argv, patient.environ, patient.cwd
    if not argv:
        return
    reason = reason_to_leave_alone(argv, environ, cwd)
    if reason is not None:
        yield note("command", reason)
        return
    profile = describe(argv, environ, cwd=cwd, ignored_args=opened.settings.ignore_arg)
    yield ok("command", f"{profile.engine} {profile.engine_version or 'of an unknown version'} on {profile.device}")
    for said in profile.notes:
        yield note("command", said)
    for hazard in lint.unreadable(profile):
        yield warning(hazard.about, hazard.what, hazard.fix)
