"""What launches add up to for `/metrics`: counts, sums and histograms by engine version, GPU, result and verdict."""

from typing import Any

import msgspec
from sqlalchemy import Connection, Select, func, select, union_all

from cachemgr.catalogue.opened import Catalogue
from cachemgr.catalogue.past import PUBLISH_BUCKETS, RESTORE_BUCKETS, kept, live, timings
from cachemgr.catalogue.schema import cold_start, launch, launch_error, past, past_error, token, told

_SUMS = (
    *("starts", "saved", "gpu_saved", "bytes", "pulled_bytes", "published_bytes", "pushed_bytes", "added"),
    *timings("restore", RESTORE_BUCKETS),
    *timings("publish", PUBLISH_BUCKETS),
)
OTHER = "other"
"""The name of all engine versions or GPUs beyond the most frequent ones."""


class Timing(msgspec.Struct, frozen=True):
    """A histogram of durations, in seconds. `within` counts those that took at most as long as each bound."""

    count: int
    total: float
    within: tuple[int, ...]


class Measure(msgspec.Struct, frozen=True):
    """Launches of one engine version, GPU, result and verdict."""

    engine_version: str
    gpu: str
    result: str
    verdict: str
    starts: int
    saved_seconds: float
    saved_gpu_seconds: float
    """Once for each GPU that waited, over the starts whose record says how many did."""
    restored_bytes: int
    pulled_bytes: int
    published_bytes: int
    pushed_bytes: int
    """Each over the starts whose record says it."""
    added_files: int
    restore: Timing
    publish: Timing


class Measures(msgspec.Struct, frozen=True):
    """All of them, and what was swallowed, by name."""

    launches: tuple[Measure, ...]
    errors: dict[str, int]
    tokens: int
    """That are not revoked."""


def measures(catalogue: Catalogue, source: int, *, most: int) -> Measures:
    """What the launches add up to of which a store tells. Names of engine versions and of GPUs are the `most` frequent
    ones each; the rest is `other`. Four statements.

    Raises:
        DatabaseError: the catalogue failed.
    """

    def work(connection: Connection) -> Measures:
        found = [_measure(row) for statement in _launches(source) for row in connection.execute(statement)]
        recent = select(launch_error.c.name, launch_error.c.count.label("times"))
        both = union_all(
            recent.join_from(told, launch_error, told.c.launch == launch_error.c.launch).where(told.c.source == source),
            select(past_error.c.name, past_error.c.count.label("times")).where(past_error.c.source == source),
        ).subquery()
        times = func.sum(both.c.times).label("total")
        errors = select(both.c.name, times).group_by(both.c.name).order_by(times.desc(), both.c.name).limit(most)
        counted = {row.name: int(row.total) for row in connection.execute(errors)}
        held = connection.execute(select(func.count()).where(token.c.revoked.is_(None))).scalar() or 0
        return Measures(_bounded(found, most), counted, held)

    return catalogue.read(work)


def _launches(source: int) -> "tuple[Select[Any], Select[Any]]":
    """Of launches that are kept one by one, and of those that are added up: a metric must not fall when one of the
    first becomes one of the second."""
    by = (launch.c.engine_version, launch.c.device, launch.c.result, launch.c.verdict)
    recent = select(*by, *live(*_SUMS)).join_from(told, launch, told.c.launch == launch.c.launch)
    recent = recent.outerjoin(cold_start, cold_start.c.key == launch.c.artifact).where(told.c.source == source)
    days = (past.c.engine_version, past.c.device, past.c.result, past.c.verdict)
    older = select(*days, *kept(*_SUMS)).where(past.c.source == source)
    return recent.group_by(*by), older.group_by(*days)


def _measure(row: Any) -> Measure:
    return Measure(
        engine_version=row.engine_version or "unknown",
        gpu=row.device or "unknown",
        result=row.result,
        verdict=row.verdict,
        starts=row.starts,
        saved_seconds=float(row.saved or 0.0),
        saved_gpu_seconds=float(row.gpu_saved or 0.0),
        restored_bytes=int(row.bytes),
        pulled_bytes=int(row.pulled_bytes),
        published_bytes=int(row.published_bytes),
        pushed_bytes=int(row.pushed_bytes),
        added_files=int(row.added),
        restore=_timing(row, "restore", len(RESTORE_BUCKETS)),
        publish=_timing(row, "publish", len(PUBLISH_BUCKETS)),
    )


def _timing(row: Any, name: str, bounds: int) -> Timing:
    within = tuple(int(getattr(row, f"{name}_{number}")) for number in range(bounds))
    return Timing(getattr(row, f"{name}_count"), float(getattr(row, f"{name}_total")), within)


def _bounded(found: list[Measure], most: int) -> tuple[Measure, ...]:
    versions = _frequent([(each.engine_version, each.starts) for each in found], most)
    gpus = _frequent([(each.gpu, each.starts) for each in found], most)
    merged: dict[tuple[str, str, str, str], Measure] = {}
    for each in found:
        version = each.engine_version if each.engine_version in versions else OTHER
        gpu = each.gpu if each.gpu in gpus else OTHER
        named = msgspec.structs.replace(each, engine_version=version, gpu=gpu)
        name = (version, gpu, each.result, each.verdict)
        merged[name] = _together(merged[name], named) if name in merged else named
    return tuple(merged[name] for name in sorted(merged))


def _frequent(named: list[tuple[str, int]], most: int) -> frozenset[str]:
    counts: dict[str, int] = {}
    for name, starts in named:
        counts[name] = counts.get(name, 0) + starts
    return frozenset(sorted(counts, key=lambda name: (-counts[name], name))[:most])


def _together(one: Measure, other: Measure) -> Measure:
    return msgspec.structs.replace(
        one,
        starts=one.starts + other.starts,
        saved_seconds=one.saved_seconds + other.saved_seconds,
        saved_gpu_seconds=one.saved_gpu_seconds + other.saved_gpu_seconds,
        restored_bytes=one.restored_bytes + other.restored_bytes,
        pulled_bytes=one.pulled_bytes + other.pulled_bytes,
        published_bytes=one.published_bytes + other.published_bytes,
        pushed_bytes=one.pushed_bytes + other.pushed_bytes,
        added_files=one.added_files + other.added_files,
        restore=_both(one.restore, other.restore),
        publish=_both(one.publish, other.publish),
    )


def _both(one: Timing, other: Timing) -> Timing:
    within = tuple(map(sum, zip(one.within, other.within, strict=True)))
    return Timing(one.count + other.count, one.total + other.total, within)
