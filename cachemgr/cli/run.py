"""`cachemgr run`: a command with a warm compile cache."""

import os
import uuid
from pathlib import Path
from typing import NoReturn

import click

from cachemgr import launch
from cachemgr.cache import open_cache
from cachemgr.capture import Launch, encode_launch
from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.session import PASS_THROUGH, WallClock, command_argument, new_launch, settings_of
from cachemgr.executables import resolve
from cachemgr.settings import Settings


@click.command(context_settings=PASS_THROUGH, epilog=EXIT_CODES)
@click.option("--report", metavar="FILE", help="write what happened to FILE as JSON")
@click.option("--publish", type=click.Choice(["never", "local"]), help="where to publish what is compiled")
@click.option("--read-only", is_flag=True, default=None, help="restore only, write nothing to the store")
@click.option("--strict", is_flag=True, default=None, help="exit with 125 when the cache fails, instead of going on")
@click.option("--ignore-arg", multiple=True, metavar="NAME", help="argument that does not shape what is compiled")
@click.option("--deadline", type=float, metavar="SECONDS", help="how long look-up and restore may delay the start")
@click.option("--ready-file", metavar="FILE", help="file that appears when CMD, which runs for long, is ready")
@click.option("--wait", type=float, metavar="SECONDS", help="how long to wait for a launch that compiles the same key")
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
    wait: float | None,
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
        wait=wait,
    )
    ctx.exit(_launched(settings, command))


def _launched(settings: Settings, command: tuple[str, ...]) -> int:
    order = launch.Order(
        argv=command,
        environ=dict(os.environ),
        cwd=Path.cwd(),
        launch=new_launch(),
        host=os.uname().nodename,
        publish=settings.publish,
        read_only=settings.read_only,
        strict=settings.strict,
        ignored_args=settings.ignore_arg,
        deadline=settings.deadline,
        wait=settings.wait,
        ready_file=settings.ready_file,
    )
    return launch.run(order, open_cache(settings, os.environ), WallClock(), _Teller(settings.report))


def _become(command: tuple[str, ...]) -> NoReturn:
    path = resolve(command[0], os.environ, Path.cwd())
    os.execv(path, command)  # noqa: S606 - the user's command, without a shell on purpose


class _Teller:
    """Tells a person about a launch in two lines, and a program in a report file."""

    def __init__(self, report: Path | None) -> None:
        self._report = report

    def note(self, line: str) -> None:
        output.say(line)

    def started(self, event: launch.Started) -> None:
        for line in event.trouble:
            output.say(line)
        output.say(_before(event))

    def finished(self, event: launch.Finished) -> None:
        for line in event.trouble:
            output.say(line)
        output.say(_after(event))
        if self._report is not None:
            _write_report(self._report, event.launch)


def _write_report(path: Path, launch: Launch) -> None:
    """Whole or not at all: a script that waits for the file must not read half of it."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        aside.write_bytes(encode_launch(launch) + b"\n")
        aside.rename(path)
    except OSError as error:
        output.say(f"the report cannot be written to {path}: {error.strerror or error}")


def _before(event: launch.Started) -> str:
    found, restored = event.found, event.restored
    if found.artifact is None:
        return f"no artifact yet for {output.short(event.key)} · starts cold"
    artifact = output.short(found.artifact)
    if found.result == "none":
        return " · ".join(
            [f"starts cold, nearest {artifact} differs in {output.differences(found.differs)}", *found.reasons]
        )
    parts = [f"{found.result} {artifact}"]
    if found.differs:
        parts.append(f"differs in {output.differences(found.differs)}")
    parts.append(
        f"restored {output.counted(restored.files, 'file')} ({output.size(restored.bytes)}) "
        f"in {output.seconds(event.seconds)}"
    )
    if restored.present:
        parts.append(f"{restored.present:,} in place")
    return " · ".join([*parts, *found.reasons, *restored.reasons])


def _after(event: launch.Finished) -> str:
    told, published = event.launch, event.published
    took = f"ran {output.seconds(told.phases['run'])}"
    if event.cold_seconds is not None:
        took += f" (cold {output.seconds(event.cold_seconds)})"
    parts = [
        told.verdict,
        f"{output.counted(told.restored_files + told.present_files, 'file')} offered",
        took,
        f"{sum(told.added.values()):,} added",
    ]
    if published.capture is not None:
        parts.append(
            f"captured {output.counted(published.files, 'file')} "
            f"({output.size(published.bytes)}, stored as {output.size(published.stored_bytes)})"
        )
    elif published.reason and published.reason != "nothing new to capture":
        parts.append(f"not captured: {published.reason}")
    if published.refused:
        first = published.refused[0]
        parts.append(f"{output.counted(len(published.refused), 'unit')} left out: {first.unit} {first.reason}")
    return " · ".join(parts)
