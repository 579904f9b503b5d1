"""`cachemgr stats`: whether the cache pays."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import click
import msgspec

from cachemgr import sizes
from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.index import asked
from cachemgr.cli.remote import not_with_a_service, service_of
from cachemgr.cli.session import cache_of, on_mirror, store_of
from cachemgr.clock import written
from cachemgr.errors import UsageError
from cachemgr.settings import typed_age
from cachemgr.store.captures import Damaged

if TYPE_CHECKING:
    from cachemgr.catalogue.statistics import By, Group, Sent, Starts, Statistics, Stored


@click.command(epilog=EXIT_CODES)
@click.option("--since", metavar="AGE", help="only starts of the last AGE, such as 7d or 12h")
@click.option("--by", type=click.Choice(["model", "gpu", "host"]), help="one row for each of these as well")
@on_mirror
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.pass_context
def stats(ctx: click.Context, since: str | None, by: str | None, mirror: bool, as_json: bool) -> None:
    """Say whether the cache pays: hit rate, verdicts, why starts missed, seconds saved, bytes, swallowed errors."""
    start = None if since is None else written(time.time() - _age(since))
    damaged: list[Damaged] = []
    found = _found(ctx, start, by, mirror=mirror, damaged=damaged)
    if as_json:
        output.document(since=start, by=by, **_fields(found))
    else:
        _print(found, by)
    for each in damaged:
        output.note(f"warning: {each.reason}")


def _found(
    ctx: click.Context, since: str | None, by: str | None, *, mirror: bool, damaged: list[Damaged]
) -> "Statistics":
    """What the catalogue of a store says, or the service that is asked instead."""
    service = service_of(ctx)
    if service is not None:
        not_with_a_service(mirror=mirror)
        from cachemgr.cli import asking

        return asking.statistics(service, since=since, by=by)
    from cachemgr.catalogue.launches import Asked
    from cachemgr.catalogue.statistics import statistics

    cache = cache_of(ctx)
    wanted, grouping = Asked(since=since), cast("By | None", by)
    return asked(
        ctx,
        cache,
        store_of(cache, mirror=mirror),
        lambda catalogue, source: statistics(catalogue, source, wanted, by=grouping),
        damaged=damaged,
    )


def _age(text: str) -> float:
    try:
        return typed_age(text)
    except ValueError as error:
        raise UsageError(f"`--since {text}` {error}", hint="--since 7d") from None


def _fields(found: "Statistics") -> dict[str, object]:
    stored = {**msgspec.structs.asdict(found.stored), "dedup": found.stored.dedup}
    return {
        "total": found.total,
        "missed": found.missed,
        "errors": found.errors,
        "stored": {**stored, "compression": found.stored.compression},
        "groups": found.groups,
    }


def _print(found: "Statistics", by: str | None) -> None:
    total = found.total
    output.record(
        [
            ("starts", f"{total.starts:,}"),
            ("hit rate", _rate(total)),
            ("verdicts", _counts(total.verdicts) or "none"),
            ("saved", _saved(total)),
            ("GPU time", _gpu_time(total)),
            ("restored", _restored(total)),
            ("moved", _moved(total)),
            ("compiled", f"{output.counted(total.added, 'file')} anew"),
            ("stored", _stored(found.stored)),
            ("errors", _counts(found.errors) or "none"),
        ]
    )
    if found.missed:
        output.heading("not wholly warm")
        rows = [(each.reason, each.factor or "", f"{each.starts:,}") for each in found.missed]
        output.table(("REASON", "FIRST FACTOR", "STARTS"), rows, right=("STARTS",), flexible="FIRST FACTOR")
    if by is not None and found.groups:
        output.heading(f"by {by}")
        _print_groups(found.groups, by.upper())


def _print_groups(groups: "tuple[Group, ...]", name: str) -> None:
    rows = [
        (
            group.name,
            f"{group.starts.starts:,}",
            sizes.percent(group.starts.hit_rate),
            _whole(group.starts.saved_seconds),
            _whole(group.starts.saved_gpu_seconds),
            output.size(group.starts.restored_bytes),
        )
        for group in groups
    ]
    headers = (name, "STARTS", "HIT RATE", "SAVED", "GPU TIME", "RESTORED")
    output.table(headers, rows, right=headers[1:], flexible=name)


def _whole(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:,.0f} s"


def _rate(total: "Starts") -> str:
    return "nothing is known yet" if total.hit_rate is None else f"{total.hit_rate:.1%} of the starts that are known"


def _saved(total: "Starts") -> str:
    if total.saved_seconds is None:
        return "not known: no warm start has a cold one to compare with"
    return f"{total.saved_seconds:,.1f} s of starts, over {output.counted(total.timed, 'timed start')}"


def _gpu_time(total: "Starts") -> str:
    if total.saved_gpu_seconds is None:
        return "not known: no timed start says how many GPUs waited for it"
    told = f"{total.saved_gpu_seconds:,.1f} s saved, over {output.counted(total.gpu_timed, 'timed start')}"
    silent = total.timed - total.gpu_timed
    return f"{told}; {silent:,} more {'does' if silent == 1 else 'do'} not say how many GPUs waited" if silent else told


def _moved(total: "Starts") -> str:
    """A way that no record tells of is not nothing."""
    ways = (("pulled", total.pulled), ("published", total.published), ("pushed", total.pushed))
    return ", ".join(f"{name} {_sent(sent, total.starts)}" for name, sent in ways)


def _sent(sent: "Sent", starts: int) -> str:
    if not sent.starts:
        return "not known"
    told = output.size(sent.bytes)
    return told if sent.starts == starts else f"{told} by {sent.starts:,} of {output.counted(starts, 'start')}"


def _restored(total: "Starts") -> str:
    files = output.counted(total.restored_files, "file")
    return f"{output.size(total.restored_bytes)} in {files}, {output.seconds(total.restore_seconds)} before starts"


def _stored(stored: "Stored") -> str:
    held = f"{output.counted(stored.artifacts, 'artifact')}: {output.size(stored.layer_bytes)} of layers"
    if stored.dedup is None or stored.compression is None:
        return held
    shared = f"compressed {stored.compression:.1f} to 1, shared {stored.dedup:.2f} times"
    return f"{held} for {output.size(stored.bytes)}, {shared}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{count:,} {name}" for name, count in sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    )
