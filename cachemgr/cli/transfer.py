"""`push` and `pull`: artifacts between the local store and the mirror."""

import os
import time
from collections.abc import Collection, Sequence
from functools import partial

import click

from cachemgr.cache import Cache
from cachemgr.cli import EXIT_CODES, PARTLY, output
from cachemgr.cli.progress import Progress
from cachemgr.cli.session import WallClock, cache_of, mirror_of
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, StoreError, UntrustedError, UsageError
from cachemgr.factors import describe_here
from cachemgr.filters import FIELDS, parse
from cachemgr.inventory import resolve, summaries
from cachemgr.key import Key, guard_print
from cachemgr.places import working_directory
from cachemgr.pull import came_from
from cachemgr.quarantine import spread
from cachemgr.send import Ways, by_signature, send, straight
from cachemgr.store import Remote, Store, layout
from cachemgr.store.captures import Damaged, near
from cachemgr.store.captures import keys as artifact_keys
from cachemgr.store.lock import held
from cachemgr.store.transfer import Moved, Plan, Transfer, joined, together

_SENDER_WAIT = 60.0
"""Seconds that a sender waits for the one before it, which may have looked before our capture was there."""
_SENDER_PATIENCE = 900.0
"""Seconds for which a sender asks a mirror that fails."""
_COURTESY = 10
"""By how much a sender is nicer than the command that it runs beside."""


def transfer_options(function: output.F) -> output.F:
    """What push and pull have in common."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="the plan and what was done as one JSON document"),
        click.option("--dry-run", is_flag=True, help="say what would move, and stop"),
        click.option(
            "-f", "--filter", "filters", multiple=True, metavar="FILTER", help=f"artifacts by {', '.join(FIELDS)}"
        ),
        click.argument("keys", nargs=-1, metavar="[KEY]..."),
    ):
        function = option(function)
    return function


@click.command(epilog=EXIT_CODES)
@transfer_options
@click.option("--queued", is_flag=True, hidden=True, help="what launches left to be sent")
@click.pass_context
def push(
    ctx: click.Context,
    keys: tuple[str, ...],
    filters: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    queued: bool,
) -> None:
    """Copy artifacts from the local store to the mirror: those named, those that a filter finds, or all.

    What the mirror has already is skipped.
    """
    cache = cache_of(ctx)
    mirror = mirror_of(cache)
    if queued:
        os.nice(_COURTESY)
        send_queued(cache, mirror, wait=_SENDER_WAIT)
        return
    wanted = named(cache.store, keys, filters) if keys or filters else artifact_keys(cache.store)
    made = [
        (partial(Transfer, cache.store, way.target, judge=cache.local.judge, hints=way.hints), way.only)
        for way in _ways(cache, mirror)(wanted)
    ]
    ctx.exit(Job("push", cache.store, mirror, made, dry_run=dry_run, as_json=as_json).done(wanted))


@click.command(epilog=EXIT_CODES)
@transfer_options
@click.option("--all", "everything", is_flag=True, help="every artifact, also those that this machine cannot use")
@click.pass_context
def pull(
    ctx: click.Context, keys: tuple[str, ...], filters: tuple[str, ...], everything: bool, dry_run: bool, as_json: bool
) -> None:
    """Copy artifacts from the mirror to the local store: those named, those that a filter finds, or all.

    Without any of these: what this machine could use, because its Python, its packages and its device have the versions
    that it was compiled with.
    """
    if everything and (keys or filters):
        raise UsageError("--all goes without keys and filters", hint="cachemgr pull --all")
    cache = cache_of(ctx)
    mirror = mirror_of(cache)
    level = cache.level_of("mirror", mirror)
    if level.closed is not None:
        raise UntrustedError(f"{level} ignored: {level.closed}")
    _spread(cache, mirror)
    marks = came_from(mirror, WallClock().text())
    transfer = partial(Transfer, mirror, cache.store, judge=level.judge, marks=marks)
    job = Job("pull", mirror, cache.store, [(transfer, None)], dry_run=dry_run, as_json=as_json)
    if keys or filters:
        ctx.exit(job.done(named(mirror, keys, filters)))
    ctx.exit(job.done(artifact_keys(mirror) if everything else _usable(mirror)))


def named(store: Store, texts: Sequence[str], filters: Sequence[str]) -> list[Key]:
    """The artifacts that these keys name, as far as the filters let them through; without keys all that they do."""
    fits = parse(filters, now=time.time())
    named = {resolve(store, text) for text in texts}
    if not filters:
        return sorted(named)
    damaged: list[Damaged] = []
    found = [each.key for each in summaries(store, damaged) if (not texts or each.key in named) and fits(each)]
    for each in damaged:
        output.note(f"warning: {each.reason}")
    return found


def _usable(mirror: Store) -> list[Key]:
    """What has the guards that commands of this machine have.

    Raises:
        UsageError: they cannot be told.
    """
    layout.read_layout(mirror)
    profiles = describe_here(os.environ, working_directory())
    prints = {guard_print(profile.factors) for profile in profiles} - {""}
    if not prints:
        raise UsageError(
            "what this machine could use cannot be told: no Python with torch is on its PATH",
            hint="name keys, filter with -f, or add --all",
        )
    return sorted({key for guards in sorted(prints) for key, _name in near(mirror, guards)})


def _ways(cache: Cache, mirror: Remote) -> Ways:
    """A mirror that requires signatures gets what has none where it waits for one."""
    if cache.level_of("mirror", mirror).policy == "require":
        return by_signature(cache.store, mirror, cache.trust)
    return straight(mirror)


class Job:
    """One push or pull, and how it is told."""

    def __init__(
        self,
        verb: str,
        source: Store,
        target: Store,
        made: Sequence["tuple[partial[Transfer], frozenset[Digest] | None]"],
        *,
        dry_run: bool,
        as_json: bool,
    ) -> None:
        """`made`: transfers, with the captures that each is for."""
        self._verb, self._source, self._target, self._made = verb, source, target, made
        self._dry_run, self._as_json = dry_run, as_json

    def done(self, wanted: Collection[Key]) -> int:
        """Move these artifacts; the exit code.

        Raises:
            CacheError: nothing could be moved of what had to.
        """
        layout.read_layout(self._source)
        progress = Progress()
        begun = time.monotonic()
        transfers = [(made(moved=progress.moved), only) for made, only in self._made]
        plans = [transfer.plan(wanted, now=time.time(), only=only) for transfer, only in transfers]
        plan = joined(self._source, self._target, plans)
        if self._dry_run:
            self._tell_plan(plan)
            return 0
        with progress.of(plan.bytes):
            moved = together([transfer.carry(own) for (transfer, _only), own in zip(transfers, plans, strict=True)])
        self._tell(plan, moved, time.monotonic() - begun)
        return self._code(plan, moved)

    def _tell_plan(self, plan: Plan) -> None:
        if self._as_json:
            output.document(plan=plan, dry_run=True, moved=None)
            return
        for load in plan.loads:
            size = output.size(sum(piece.size for piece in load.pieces()))
            output.lines([f"{load.key}  capture {output.short(load.capture)}  {size}"])
        output.note(f"would {self._verb} {_counted(len(plan.loads), plan.objects, plan.bytes)} to {plan.target}")
        self._tell_rest(plan)

    def _tell(self, plan: Plan, moved: Moved, seconds: float) -> None:
        if self._as_json:
            failures = [
                {"key": each.key, "capture": each.capture, "word": each.error.word, "reason": str(each.error)}
                for each in moved.failures
            ]
            done = {"captures": moved.captures, "objects": moved.objects, "bytes": moved.bytes, "failures": failures}
            output.document(plan=plan, dry_run=False, moved=done)
        elif plan.loads:
            told = _counted(len(moved.captures), moved.objects, moved.bytes)
            output.note(f"{self._verb}ed {told} to {plan.target} in {output.seconds(seconds)}")
        elif not plan.whole and not plan.damaged:
            output.note(f"nothing to {self._verb} from {plan.source}")
        self._tell_rest(plan)
        for reason in dict.fromkeys(str(each.error) for each in moved.failures):
            output.note(f"warning: {reason}")

    def _tell_rest(self, plan: Plan) -> None:
        output.skipped(plan.skipped_objects, "object", plan.skipped_bytes)
        for each in plan.damaged:
            output.note(f"warning: {each.reason}")

    def _code(self, plan: Plan, moved: Moved) -> int:
        some = bool(moved.captures or plan.whole)
        if moved.failures and not some:
            raise moved.failures[0].error
        if plan.damaged and not some:
            kind = UntrustedError if plan.damaged[0].kind == "untrusted" else CorruptError
            raise kind(f"nothing could be {self._verb}ed: {plan.damaged[0].reason}")
        return PARTLY if moved.failures or plan.damaged else 0


def _counted(captures: int, objects: int, size: int) -> str:
    return f"{output.counted(captures, 'capture')} ({output.counted(objects, 'object')}, {output.size(size)})"


def _spread(cache: Cache, mirror: Remote) -> None:
    """Learn what the fleet has put into quarantine since; without a trusted key nothing of it would be believed."""
    if not cache.trust.keys:
        return
    try:
        spread(mirror, cache.store, cache.trust)
    except StoreError as error:
        output.note(f"warning: what is in quarantine cannot be learnt: {error}")


def send_queued(cache: Cache, mirror: Remote, *, wait: float = _SENDER_PATIENCE) -> None:
    """Send what launches left to be sent, after whoever does that now, if he is done in `wait` seconds.

    Raises:
        CacheError: it cannot be sent.
    """
    outbox = cache.outbox
    assert outbox is not None, "there is a mirror"
    with held(outbox.lock, wait=wait) as alone:
        if alone:
            ways = _ways(cache, mirror)
            sent = send(outbox, cache.store, mirror, clock=WallClock(), patience=_SENDER_PATIENCE, ways=ways)
            for reason in sent.dropped:
                output.note(f"warning: never sent: {reason}")
            _spread(cache, mirror)
