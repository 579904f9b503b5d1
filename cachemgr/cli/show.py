"""`cachemgr show`: one artifact, with all that is known of it."""

import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial

import click
import msgspec

from cachemgr.cache import Cache
from cachemgr.capture import Launch
from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.index import asked
from cachemgr.cli.remote import not_with_a_service, service_of
from cachemgr.cli.session import cache_of, chosen_store, on_mirror, on_waiting
from cachemgr.digest import Digest
from cachemgr.errors import CacheError, CorruptError, NotFoundError
from cachemgr.factors.vllm.levels import turned_on
from cachemgr.history import NO_HISTORY, History
from cachemgr.inventory import Summary, missing_ranks, resolve, summarise
from cachemgr.key import Factor, Key, Relations, by_role
from cachemgr.quarantine import Note, notes
from cachemgr.service import Service
from cachemgr.store import Store, layout
from cachemgr.store.captures import UNASKED, Capture, Damaged, captures
from cachemgr.store.pins import pin_of

_PACKAGE = "package."
_RECENT = 5
"""Launches that are shown."""
_PLACES_SECONDS = 5.0
"""How long a mirror is asked whether it has an artifact."""


@click.command(epilog=EXIT_CODES)
@click.argument("key")
@click.option("--files", "with_files", is_flag=True, help="list every file")
@on_mirror
@on_waiting
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.pass_context
def show(ctx: click.Context, key: str, with_files: bool, mirror: bool, waiting: bool, as_json: bool) -> None:
    """Show one artifact: factors with their roles, captures, layers, and files on request. KEY may be a prefix."""
    service = service_of(ctx)
    if service is not None:
        not_with_a_service(mirror=mirror, waiting=waiting)
        _show_remote(service, key, with_files=with_files, as_json=as_json)
        return
    cache = cache_of(ctx)
    store = chosen_store(cache, mirror=mirror, waiting=waiting)
    name = resolve(store, key)
    damaged: list[Damaged] = []
    held = captures(store, name, damaged, judge=cache.trust.opinion)
    if not held and not damaged:
        raise NotFoundError(f"no artifact {name} in {store} any more", hint="cachemgr ls")
    if not held:
        raise CorruptError(f"no capture of {name} can be read: {damaged[0].reason}", hint=f"cachemgr rm {name}")
    history, recent = (NO_HISTORY, ()) if waiting else _told_of(ctx, cache, store, name)
    summary = summarise(name, held, history, pinned=pin_of(store, name) is not None)
    places = _places(cache, name)
    if as_json:
        captured = [_capture_fields(capture) for capture in held]
        output.document(artifact=summary, captures=captured, places=places, launches=recent)
    else:
        apart = partial(notes, (store, cache.apart), cache.trust)
        _print_artifact(apart, summary, held, with_files=with_files, places=places)
        _print_launches(recent)
    for each in damaged:
        output.note(f"warning: {each.reason}")


def _show_remote(service: Service, key: str, *, with_files: bool, as_json: bool) -> None:
    from cachemgr.cli import asking

    found = asking.artifact(service, key)
    held = asking.captures_of(found)
    if as_json:
        captured = [_capture_fields(capture) for capture in held]
        output.document(artifact=found.artifact, captures=captured, places=[str(service)], launches=found.launches)
    else:
        _print_artifact(lambda _capture: (), found.artifact, held, with_files=with_files, places=[str(service)])
        _print_launches(found.launches)
    for reason in found.damaged:
        output.note(f"warning: {reason}")


def _told_of(ctx: click.Context, cache: Cache, store: Store, key: Key) -> tuple[History, tuple[Launch, ...]]:
    """How an artifact has served, and the last launches that had its key or took from it."""
    from cachemgr.catalogue.artifacts import history
    from cachemgr.catalogue.launches import Asked, launches
    from cachemgr.catalogue.opened import Catalogue

    def ask(catalogue: Catalogue, source: int) -> tuple[History, tuple[Launch, ...]]:
        recent = launches(catalogue, source, Asked(about=key), limit=_RECENT)
        return history(catalogue, source, key)[0], recent.launches

    return asked(ctx, cache, store, ask, damaged=[], or_store=True)


def _places(cache: Cache, key: Key) -> list[str]:
    """The stores that have an artifact, as far as they answer soon."""
    found = []
    for level in cache.until(time.monotonic() + _PLACES_SECONDS).levels:
        try:
            there = any(level.store.scan(layout.artifact_prefix(key)))
        except CacheError as error:
            output.note(f"warning: whether {level} has it is not known: {error}")
            continue
        if there:
            found.append(str(level))
    return found


def _capture_fields(capture: Capture) -> dict[str, object]:
    standing = capture.standing or UNASKED
    trust = {"by": standing.by or None, "doubt": standing.doubt or None}
    return {"digest": capture.digest, "trust": trust, **msgspec.structs.asdict(capture.manifest)}


def _print_artifact(
    apart: Callable[[Digest], Sequence[Note]],
    summary: Summary,
    held: Sequence[Capture],
    *,
    with_files: bool,
    places: Sequence[str],
) -> None:
    """`apart` says who does not use a capture."""
    first = held[0].manifest
    facts = [
        ("key", summary.key),
        ("model", summary.model),
        ("engine", f"{summary.engine} {summary.engine_version or 'unknown'}"),
        ("device", summary.device),
        ("complete", _completeness(summary, held)),
        ("files", f"{summary.files:,} ({output.size(summary.bytes)}, stored as {output.size(summary.stored_bytes)})"),
        ("command", shlex.join(first.provenance.command)),
        ("uses", _uses(summary)),
        ("pinned", "yes" if summary.pinned else "no"),
        ("where", ", ".join(places) or "nowhere that answers"),
        *turned_on(first.factors),
    ]
    if summary.cold_seconds is not None:
        warm = "" if summary.warm_seconds is None else f", best warm {output.seconds(summary.warm_seconds)}"
        saved = "" if summary.saved_seconds is None else f", saved {output.seconds(summary.saved_seconds)}"
        facts.append(("cold", output.seconds(summary.cold_seconds) + warm + saved))
    output.record(facts)
    output.heading("factors")
    _print_factors(by_role(first.factors))
    needs = _needs(first.needs)
    if needs:
        output.heading("relations")
        output.record(needs)
    for capture in held:
        _print_capture(capture, apart(capture.digest), with_files=with_files)


def _needs(needs: Relations) -> list[tuple[str, str]]:
    """What a host must have for a capture."""
    ordinals = " ".join(f"{rank}:{ordinal}" for rank, ordinal in sorted(needs.ordinals.items()))
    named = (
        ("  CPU features", " ".join(needs.cpu_features)),
        ("  CUDA runtime", needs.cuda_runtime or ""),
        ("  made under a driver for CUDA", needs.driver_cuda or ""),
        ("  device ordinals", ordinals),
    )
    return [(name, value) for name, value in named if value]


def _print_launches(recent: Sequence[Launch]) -> None:
    if not recent:
        return
    output.heading("last launches")
    rows = [
        (launch.launch, launch.started, launch.host, launch.result, launch.verdict, _added(launch)) for launch in recent
    ]
    output.table(("LAUNCH", "STARTED", "HOST", "RESULT", "VERDICT", "ADDED"), rows, right=("ADDED",), flexible="HOST")


def _added(launch: Launch) -> str:
    return f"{sum(launch.added.values()):,}"


def _uses(summary: Summary) -> str:
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(summary.verdicts.items()))
    return f"{summary.uses} ({verdicts}), last {summary.last_used}" if summary.uses else "0"


def _completeness(summary: Summary, held: Sequence[Capture]) -> str:
    if summary.complete:
        return "yes"
    part = missing_ranks(held)
    return f"no: it has {part}, nodes publish their own" if part else "no: its launches ended before they were done"


def _print_factors(factors: Sequence[Factor]) -> None:
    """One row a factor; packages that are not installed share one, or they would be half of all."""
    absent = [factor for factor in factors if factor.name.startswith(_PACKAGE) and factor.value == "none"]
    rows = [
        (f"  {factor.role:<5}  {factor.name}", output.factor_value(factor.value))
        for factor in factors
        if factor not in absent
    ]
    output.record(rows)
    if absent:
        output.record([("  not installed", " ".join(factor.name.removeprefix(_PACKAGE) for factor in absent))])


def _print_capture(capture: Capture, apart: Sequence[Note], *, with_files: bool) -> None:
    manifest = capture.manifest
    state = "" if manifest.complete else " · incomplete"
    output.heading(f"capture {output.short(capture.digest)} · {manifest.created} on {manifest.provenance.host}{state}")
    standing = capture.standing or UNASKED
    output.record([("", f"answered for by {standing.by}" if standing.by else standing.doubt)])
    for each in apart:
        output.record([("", f"in quarantine on {each.where} since {each.since}: {each.reason}")])
    for layer in manifest.layers:
        output.record([(f"  layer {output.short(layer.digest)}", f"stored as {output.size(layer.size)}")])
        for section in layer.sections:
            files = list(section.files())
            counts = f"{output.counted(len(section.units), 'unit')}, {output.counted(len(files), 'file')}"
            output.record([(f"    {section.domain}", f"{counts}, {output.size(sum(file.size for file in files))}")])
            if with_files:
                output.record([(f"      {file.path}", output.size(file.size)) for file in files])
