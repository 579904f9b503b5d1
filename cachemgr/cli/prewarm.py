"""`cachemgr prewarm`: fill the cache before anybody waits for it."""

import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from cachemgr.cache import Cache, open_cache
from cachemgr.cli import EXIT_CODES, output, share
from cachemgr.cli.bake import bake as bake_seed
from cachemgr.cli.bake import finish, for_targets, left_out, ready
from cachemgr.cli.bake import say as say_baked
from cachemgr.cli.fleet import Given, elsewhere, is_told, on_cluster
from cachemgr.cli.proof import keep, proven, say, verify_seed
from cachemgr.cli.session import PASS_THROUGH, WallClock, new_launch, settings_of, talk_apart
from cachemgr.cli.starts import Telling, free_port, template_of, told_to_end
from cachemgr.cli.telling import sender_of
from cachemgr.cli.transfer import send_queued
from cachemgr.digest import fingerprint
from cachemgr.errors import CacheError, UsageError
from cachemgr.order import Order
from cachemgr.places import working_directory
from cachemgr.prewarm.entries import Planned, Record, plan, prewarm_all
from cachemgr.prewarm.passes import MAX_PASSES, Machinery, Options, Result
from cachemgr.prewarm.proof import Proof
from cachemgr.prewarm.seed import Baked
from cachemgr.settings import Settings
from cachemgr.signature import Signer
from cachemgr.spec import DEFAULT_LIMIT, Entry, Spec, load, seconds
from cachemgr.store.local import LocalStore

_ONE = "command"
"""The name of the one entry that a command line stands for."""


@click.command(context_settings=PASS_THROUGH, epilog=EXIT_CODES)
@click.option("--spec", metavar="FILE", help="many commands, as TOML or YAML")
@click.option("--entry", "entries", multiple=True, metavar="NAME", help="only these entries of the spec")
@click.option("--max-passes", type=click.IntRange(1, 20), default=MAX_PASSES, show_default=True, help="starts at most")
@click.option("--real-weights", is_flag=True, help="load the model's weights, where random ones would do")
@click.option("--limit", metavar="TIME", help="how long all starts of a command may take: 45min, 2h")
@click.option("--state", metavar="FILE", help="what became of the entries of a spec, so that it can be resumed")
@click.option("--again", is_flag=True, help="also entries that are done")
@click.option("--if-missing", is_flag=True, help="leave out what a look-up finds whole already, whoever made it")
@click.option("--publish", type=click.Choice(["local", "mirror"]), help="where to publish what is compiled")
@click.option("--ignore-arg", multiple=True, metavar="NAME", help="argument that does not shape what is compiled")
@click.option("--bake", metavar="DIR", help="a seed for an image: what is warm, laid out as a store that is only read")
@click.option("--target", "targets", multiple=True, metavar="FILE", help="start nothing: bake what that machine needs")
@click.option("--sign-key", metavar="WHERE", help="sign the seed: a file, env:NAME or command:WORDS")
@click.option("--verify", is_flag=True, help="start from the seed alone, without a network, and insist on 0 added")
@click.option("--seed", metavar="DIR", help="with --verify: a seed that is there, and nothing else is done")
@elsewhere
@click.option("--dry-run", is_flag=True, help="say what would be started, and stop")
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD [ARG]...]")
@click.pass_context
def prewarm(
    ctx: click.Context,
    /,
    spec: str | None,
    entries: tuple[str, ...],
    max_passes: int,
    real_weights: bool,
    limit: str | None,
    state: str | None,
    again: bool,
    if_missing: bool,
    publish: str | None,
    ignore_arg: tuple[str, ...],
    bake: str | None,
    targets: tuple[str, ...],
    sign_key: str | None,
    verify: bool,
    seed: str | None,
    dry_run: bool,
    as_json: bool,
    command: tuple[str, ...],
    **fleet: str | int | tuple[str, ...] | None,
) -> None:
    """Start CMD, or each command of a spec, until a start adds nothing, and publish what was compiled.

    Weights are random where the engine allows, so that none is downloaded. Exit code 1 when CMD is not warm, or not
    baked or verified where that is asked for; of a spec 3 when that holds of some entries, and 1 when of all.
    """
    settings = settings_of(ctx, publish=publish, ignore_arg=ignore_arg or None, sign_key=sign_key)
    _refuse_what_means_nothing(spec=spec, state=state, again=again, sign_key=sign_key, bake=bake)
    if seed is not None:
        if not verify or bake is not None or targets:
            raise UsageError("--seed goes with --verify", hint="cachemgr prewarm --verify --seed DIR")
        own = _spec(spec, entries, command, limit) if spec is not None or command else None
        place = working_directory() / seed
        ctx.exit(verify_seed(ctx, settings, place, own, real_weights=real_weights, as_json=as_json, dry_run=dry_run))
    wanted = _spec(spec, entries, command, limit)
    is_elsewhere = fleet["on"] is not None or fleet["emit"] is not None
    options = Options(max_passes, real_weights, if_missing=if_missing or (is_elsewhere and not again))
    here = verify or bake is not None or bool(targets)
    if is_told(wanted, settings, fleet, options, dry_run=dry_run, as_json=as_json, here=here):
        return
    cache = open_cache(settings, os.environ)
    if targets:
        ctx.exit(for_targets(wanted, targets, settings, cache, bake, verify=verify, dry_run=dry_run, as_json=as_json))
    work = _Work(
        ctx,
        settings,
        wanted,
        template_of(settings, sender=sender_of(ctx, settings)),
        Machinery(cache, WallClock(), Telling(None), new_launch, free_port),
        options,
        None if spec is None else _record(spec, state, cache.home, wanted, again=again),
        fleet,
        seed=None if bake is None else working_directory() / bake,
        verify=verify,
    )
    if dry_run:
        _print_plan(plan(wanted, work.template, work.machinery, work.options, work.record), as_json=as_json)
        return
    with told_to_end():
        code = _done(work, as_json=as_json)
    ctx.exit(code)


def _refuse_what_means_nothing(
    *, spec: str | None, state: str | None, again: bool, sign_key: str | None, bake: str | None
) -> None:
    """Options that change nothing without another one: whoever gives them believes otherwise.

    Raises:
        UsageError: there is one.
    """
    if sign_key is not None and bake is None:
        raise UsageError("--sign-key signs what --bake makes", hint="--bake DIR, or `cachemgr sign` for artifacts")
    if spec is None and (again or state is not None):
        raise UsageError(f"{'--again' if again else '--state'} goes with --spec")


@dataclass(frozen=True)
class _Work:
    """What is to be done."""

    ctx: click.Context
    settings: Settings
    spec: Spec
    template: Order
    machinery: Machinery
    options: Options
    record: Record | None
    """None for a command that is in no spec."""
    fleet: Given
    seed: Path | None
    """Where to bake what is warm."""
    verify: bool

    @property
    def cache(self) -> Cache:
        return self.machinery.cache


def _done(work: _Work, *, as_json: bool) -> int:
    """Start everything; send, bake, verify and sign what is warm; tell. The exit code.

    Raises:
        UsageError: there is no place for a seed.
        CacheError: what was started was told, and then something went wrong.
    """
    signer = None if work.seed is None else ready(work.seed, work.settings)
    results = _started(work)
    try:
        baked, proofs = _baked_and_proven(work, results, signer)
    except CacheError:
        _print(results, None, (), as_json=as_json)
        raise
    _print(results, baked, proofs, as_json=as_json)
    return _code(results, left_out(baked), proofs, of_spec=work.record is not None)


def _started(work: _Work) -> tuple[Result, ...]:
    """What became of each entry, here or where the options of a fleet say."""
    spec = work.spec
    if work.fleet["on"] is not None:
        return on_cluster(spec, work.settings, work.record, work.fleet, work.options)

    def begin(entry: Entry) -> None:
        if len(spec.entries) > 1:
            output.note(f"{entry.name} ({spec.entries.index(entry) + 1} of {len(spec.entries)})")

    with talk_apart():
        return prewarm_all(spec, work.template, work.machinery, work.options, work.record, begin=begin)


def _baked_and_proven(
    work: _Work, results: Sequence[Result], signer: Signer | None
) -> tuple[Baked | None, tuple[Proof, ...]]:
    cache, here = work.cache, work.fleet["on"] is None
    if here and work.template.sender is not None and cache.mirror is not None:
        send_queued(cache, cache.mirror)  # a pod or a task takes its disk with it
    warm = work.spec.only([result.name for result in results if result.warm])
    if not warm.entries:
        return None, ()
    baked = None if work.seed is None else bake_seed(warm, work.template, cache, work.seed)
    there = Spec(tuple(entry for entry in warm.entries if entry.name not in left_out(baked)))
    proofs: tuple[Proof, ...] = ()
    if work.verify and there.entries:
        place = working_directory() / str(cache.store) if work.seed is None else work.seed
        proofs = proven(work.ctx, work.settings, place, there, real_weights=work.options.real_weights)
        keep(LocalStore(place), proofs)
    if baked is not None and baked.artifacts:
        finish(baked, signer, cache)
    return baked, proofs


def _spec(path: str | None, names: Sequence[str], command: tuple[str, ...], limit: str | None) -> Spec:
    if (path is None) == (not command):
        raise UsageError("prewarm takes a command or a spec", hint="cachemgr prewarm -- CMD, or --spec FILE")
    if path is not None:
        if limit is not None:
            raise UsageError("the entries of a spec have their own limits", hint="`limit` in its [defaults]")
        found = load(Path(path))
        return found.only(names) if names else found
    if names:
        raise UsageError("--entry goes with --spec", hint="cachemgr prewarm --spec FILE --entry NAME")
    try:
        return Spec((Entry(_ONE, command, limit=DEFAULT_LIMIT if limit is None else seconds(limit)),))
    except ValueError as error:
        raise UsageError(f"`--limit` {error}, not `{limit}`", hint="--limit 45min") from None


def _record(spec: str, state: str | None, home: Path, wanted: Spec, *, again: bool) -> Record:
    """What became of the entries of a spec; nothing yet of those that are wanted `again`."""
    usual = home / "prewarm" / f"{fingerprint(str(working_directory() / spec).encode())}.json"
    record = Record(usual if state is None else working_directory() / state)
    if again:
        record.forget(wanted.entries)
    return record


def _code(results: Sequence[Result], left_out: Collection[str], proofs: Sequence[Proof], *, of_spec: bool) -> int:
    bad = {proof.name for proof in proofs if not proof.holds}.union(left_out)
    good = sum(result.warm and result.name not in bad for result in results)
    return share(good, len(results)) if of_spec else int(good < len(results))


def _print(results: Sequence[Result], baked: Baked | None, proofs: Sequence[Proof], *, as_json: bool) -> None:
    if as_json:
        output.document(entries=results, baked=baked, proofs=proofs)
    else:
        headers = ("ENTRY", "STATE", "KEY", "STARTS", "TOOK", "NOTE")
        output.table(headers, [_row(result) for result in results], right=("STARTS", "TOOK"), flexible="NOTE")
    if baked is not None:
        say_baked(baked)
    say(proofs)


def _row(result: Result) -> tuple[str, ...]:
    return (
        result.name,
        result.state,
        "" if result.key is None else output.short(result.key),
        str(len(result.passes)),
        output.seconds(sum(each.seconds for each in result.passes)),
        "; ".join([*([result.reason] if result.reason else []), *result.notes]),
    )


def _print_plan(planned: Sequence[Planned], *, as_json: bool) -> None:
    if as_json:
        output.document(plan=planned, dry_run=True)
        return
    rows = [
        (
            each.name,
            each.action,
            "" if each.key is None else output.short(each.key),
            each.found or "",
            each.note,
            shlex.join(each.command),
        )
        for each in planned
    ]
    output.table(("ENTRY", "ACTION", "KEY", "FOUND", "NOTE", "COMMAND"), rows, flexible="COMMAND")
