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
from cachemgr.domains import ON_REQUEST
from cachemgr.errors import UsageError
from cachemgr.executables import resolve
from cachemgr.order import Order, Started, Told
from cachemgr.settings import Settings


@click.command(context_settings=PASS_THROUGH, epilog=EXIT_CODES)
@click.option("--report", metavar="FILE", help="write what happened to FILE as JSON")
@click.option("--publish", type=click.Choice(["never", "local"]), help="where to publish what is compiled")
@click.option("--read-only", is_flag=True, default=None, help="restore only, write nothing to the store")
@click.option("--strict", is_flag=True, default=None, help="exit with 125 when the cache fails, instead of going on")
@click.option("--ignore-arg", multiple=True, metavar="NAME", help="argument that does not shape what is compiled")
@click.option("--deadline", type=float, metavar="SECONDS", help="how long look-up and restore may delay the start")
@click.option("--ready-file", metavar="FILE", help="file that appears when CMD, which runs for long, is ready")
@click.option("--also", multiple=True, metavar="DOMAIN", help="a cache that is kept on request only: startup_plan")
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
    also: tuple[str, ...],
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
        also=also or None,
        wait=wait,
    )
    ctx.exit(_launched(settings, command))


def _launched(settings: Settings, command: tuple[str, ...]) -> int:
    order = Order(
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
        also=_known(settings.also),
    )
    return launch.run(order, open_cache(settings, os.environ), WallClock(), _Teller(settings.report))


def _known(also: tuple[str, ...]) -> tuple[str, ...]:
    names = {domain.name for domain in ON_REQUEST}
    unknown = sorted(set(also) - names)
    if unknown:
        raise UsageError(
            f"`{unknown[0]}` is no cache that is kept on request", hint=f"--also {' or '.join(sorted(names))}"
        )
    return also


def _become(command: tuple[str, ...]) -> NoReturn:
    path = resolve(command[0], os.environ, Path.cwd())
    os.execv(path, command)  # noqa: S606 - the user's command, without a shell on purpose


class _Teller:
    """Tells a person about a launch in two lines, and a program in a report file."""

    def __init__(self, report: Path | None) -> None:
        self._report = report
        self._told: Told | None = None
        self._advised: set[str] = set()

    def note(self, line: str) -> None:
        output.say(line)

    def started(self, event: Started) -> None:
        for line in event.trouble:
            output.say(line)
        output.say(output.brief(_before(event)))

    def ready(self, event: Told) -> None:
        """The verdict, once the command serves. It may run for weeks, so the report is written now as well."""
        self._tell(event)
        self._told = event

    def finished(self, event: Told) -> None:
        if self._told is None or _is_news(event):
            self._tell(event)
        elif self._report is not None:
            _write_report(self._report, event.launch)

    def _tell(self, event: Told) -> None:
        for line in event.trouble:
            output.say(line)
        output.say(output.brief(_after(event)))
        for line in event.advice:
            if line not in self._advised:
                output.say(output.brief(line))
        self._advised.update(event.advice)
        if self._report is not None:
            _write_report(self._report, event.launch)


def _is_news(last: Told) -> bool:
    """Whether the end of a command says more than its verdict did."""
    return bool(last.trouble or last.published.capture or last.launch.added_after_ready)


def _write_report(path: Path, launch: Launch) -> None:
    """Whole or not at all: a script that waits for the file must not read half of it."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        aside.write_bytes(encode_launch(launch) + b"\n")
        aside.rename(path)
    except OSError as error:
        output.say(f"the report cannot be written to {path}: {error.strerror or error}")


def _before(event: Started) -> str:
    found, restored = event.found, event.restored
    if found.artifact is None:
        return " · ".join([f"no artifact yet for {output.short(event.key)} · starts cold", *event.notes])
    artifact = output.short(found.artifact)
    if found.result == "none":
        return " · ".join(
            [
                f"starts cold, nearest {artifact} differs in {output.differences(found.differs)}",
                *found.reasons,
                *event.notes,
            ]
        )
    parts = [f"{found.result} {artifact}"]
    if found.differs:
        parts.append(f"differs in {output.differences(found.differs)}")
    parts.append(_restored(event))
    return " · ".join([*parts, *found.reasons, *restored.reasons, *event.notes])


def _restored(event: Started) -> str:
    restored, seconds = event.restored, output.seconds(event.seconds)
    if restored.present and not restored.files:
        return f"{output.counted(restored.present, 'file')} in place, checked in {seconds}"
    told = f"restored {output.counted(restored.files, 'file')} ({output.size(restored.bytes)}) in {seconds}"
    return f"{told} · {restored.present:,} in place" if restored.present else told


def _after(event: Told) -> str:
    told, published = event.launch, event.published
    parts = [
        told.verdict,
        f"{output.counted(told.restored_files + told.present_files, 'file')} offered",
        _took(event),
        f"{sum(told.added.values()):,} added",
    ]
    if told.added_after_ready:
        parts.append(f"{told.added_after_ready:,} of them while serving")
    if told.exit_code:
        parts.append(f"exit code {told.exit_code}")
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


def _took(event: Told) -> str:
    """Seconds of what the engine itself calls its start where it said so, else of all."""
    phases = event.launch.phases
    phase, name = ("init_engine", "init engine") if "init_engine" in phases else ("run", "ran")
    took = f"{name} {output.seconds(phases[phase])}"
    cold = event.cold.get(phase)
    return took if cold is None else f"{took} (cold {output.seconds(cold)})"
