"""Ordering a launch, and telling people about it in two lines and programs in a report."""

import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import click

from cachemgr.capture import Launch, encode_launch
from cachemgr.cli import output
from cachemgr.cli.session import new_launch, ourselves
from cachemgr.domains import ON_REQUEST
from cachemgr.errors import UsageError
from cachemgr.lookup import Found
from cachemgr.order import Order, Reporter, Sender, Started, Told
from cachemgr.places import is_special
from cachemgr.settings import Settings


def sender_of(ctx: click.Context, settings: Settings) -> Sender | None:
    """The command that sends to the mirror what a launch publishes; None where nothing goes there.

    Raises:
        UsageError: something should, and there is no mirror.
    """
    if settings.publish != "mirror" or settings.read_only or settings.offline:
        return None
    if settings.mirror is None:
        raise UsageError("`publish` is `mirror`, and no mirror is set", hint="set CACHEMGR_MIRROR, or --publish local")
    return Sender((*ourselves(ctx), "push", "--queued"), {**os.environ, **settings.of_flags()})


def reporter_of(ctx: click.Context, settings: Settings) -> Reporter | None:
    """The command that tells the service about launches; None where no service is set."""
    if settings.server is None or settings.read_only or settings.offline:
        return None
    return Reporter(settings.server, (*ourselves(ctx), "reporter"), {**os.environ, **settings.of_flags()})


def order_of(
    settings: Settings, command: tuple[str, ...], *, environ: Mapping[str, str], cwd: Path, sender: Sender | None
) -> Order:
    """The order to launch `command` with these settings."""
    return Order(
        argv=command,
        environ=dict(environ),
        cwd=cwd,
        launch=new_launch(),
        host=os.uname().nodename,
        publish=settings.publish,
        never_publish=settings.never_publish,
        read_only=settings.read_only,
        strict=settings.strict,
        ignored_args=settings.ignore_arg,
        deadline=settings.deadline,
        wait=settings.wait,
        ready_file=settings.ready_file,
        also=_known(settings.also),
        single_flight=settings.single_flight,
        sender=sender,
        budget=settings.budget,
        auto_prune=settings.auto_prune,
    )


def _known(also: tuple[str, ...]) -> tuple[str, ...]:
    names = {domain.name for domain in ON_REQUEST}
    unknown = sorted(set(also) - names)
    if unknown:
        raise UsageError(
            f"`{unknown[0]}` is no cache that is kept on request", hint=f"--also {' or '.join(sorted(names))}"
        )
    return also


class Teller:
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
    data = encode_launch(launch) + b"\n"
    try:
        if is_special(path):
            _append(path, data)
        else:
            _put(path, data)
    except OSError as error:
        output.say(f"the report cannot be written to {path}: {error.strerror or error}")


def _append(path: Path, data: bytes) -> None:
    """To a device, a pipe or a stream of ours (`/dev/stdout`), whose place no file may take."""
    # Nobody may read the pipe, or not fast enough: the launch does not wait for them.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _put(path: Path, data: bytes) -> None:
    """Whole or not at all: a script that waits for the file must not read half of it. A link to it stays one."""
    place = Path(os.path.realpath(path))
    aside = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
    try:
        aside.write_bytes(data)
        aside.rename(place)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


def _before(event: Started) -> str:
    found, restored = event.found, event.restored
    if found.artifact is None:
        kept = any(each.key == event.key for each in (*found.untrusted, *found.unreadable, *found.broken))
        nothing = "" if kept else f"no artifact yet for {output.short(event.key)} · "
        return " · ".join([f"{nothing}starts cold", *_left_out(found), *event.notes])
    artifact = output.short(found.artifact)
    differs = [f"differs in {output.differences(found.differs)}"] if found.differs else []
    if found.result == "none":
        nearest = " ".join([f"starts cold, nearest {artifact}", *differs])
        return " · ".join([nearest, *found.reasons, *_left_out(found), *event.notes])
    parts = [f"{found.result} {artifact}", *differs]
    parts.append(_restored(event))
    if found.where != "local":
        parts.append(f"from the {found.where}")
    return " · ".join([*parts, *found.reasons, *restored.reasons, *_left_out(found), *event.notes])


def _left_out(found: Found) -> list[str]:
    """What was left out, or used in spite of doubts: the first of each kind, and how many there are."""
    told = [
        f"{word}: {_first([each.reason for each in captures])}"
        for word, captures in (
            ("untrusted", found.untrusted),
            ("unreadable", found.unreadable),
            ("damaged", found.broken),
        )
        if captures
    ]
    if found.doubts:
        told.append(f"used although {_first(found.doubts)}")
    return told


def _first(reasons: Sequence[str]) -> str:
    return reasons[0] if len(reasons) == 1 else f"{reasons[0]} and {len(reasons) - 1} more"


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
