"""What launches and artifacts add up to, for a store: whether its cache pays."""

from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, func, select, union_all

from cachemgr.catalogue.launches import ALL_LAUNCHES, Asked, conditions
from cachemgr.catalogue.opened import Catalogue
from cachemgr.catalogue.past import conditions as past_conditions
from cachemgr.catalogue.past import kept, live
from cachemgr.catalogue.schema import artifact, cold_start, launch, launch_error, layer, past, past_error, told
from cachemgr.history import WARM

By = Literal["model", "gpu", "host", "day"]
_MOST_GROUPS = 1000
_MOST_REASONS = 100


class Sent(msgspec.Struct, frozen=True):
    """Bytes that went one way, of objects as they are stored."""

    bytes: int = 0
    starts: int = 0
    """Those whose record says how many: older ones do not, and a launch does not know what others send for it."""


class Starts(msgspec.Struct, frozen=True):
    """Starts, added up. Seconds are those of a start, however many GPUs waited for it, unless they are said to be
    seconds of GPUs."""

    starts: int
    verdicts: dict[str, int]
    hit_rate: float | None
    """The share of warm starts (`used`, `partly used`) among those that are known; None where none is."""
    saved_seconds: float | None
    """What warm starts saved against the cold start that made their artifact, where both were timed."""
    timed: int
    """The starts that `saved_seconds` is about."""
    restored_files: int
    restored_bytes: int
    restore_seconds: float
    added: int
    """Files that were compiled anew."""
    saved_gpu_seconds: float | None = None
    """What was saved, once for each GPU that waited, over the starts whose record says how many did; None where none
    does."""
    gpu_timed: int = 0
    """The starts that `saved_gpu_seconds` is about: some of those that are `timed`."""
    pulled: Sent = Sent()
    """From a mirror."""
    published: Sent = Sent()
    """Of layers, into the store of the launch."""
    pushed: Sent = Sent()
    """To a mirror, by the launches themselves."""


class Group(msgspec.Struct, frozen=True):
    """The starts of one model, GPU, host or day (in UTC)."""

    name: str
    starts: Starts


class Missed(msgspec.Struct, frozen=True):
    """Starts that were not wholly warm for one reason (`cachemgr.explain`), by the first factor that differed."""

    reason: str
    factor: str | None
    starts: int


class Stored(msgspec.Struct, frozen=True):
    """What the store holds, in bytes."""

    artifacts: int
    captures: int
    files: int
    bytes: int
    """Of the files that a restore of every artifact would place."""
    packed_bytes: int
    """Of the tars that artifacts refer to, each as often as it is referred to."""
    unique_bytes: int
    """The same, each tar once."""
    layer_bytes: int
    """Of the compressed layers, each once."""

    @property
    def dedup(self) -> float | None:
        """How many times a layer is referred to, by bytes."""
        return self.packed_bytes / self.unique_bytes if self.unique_bytes else None

    @property
    def compression(self) -> float | None:
        """How many times larger a tar is than its layer."""
        return self.unique_bytes / self.layer_bytes if self.layer_bytes else None


class Statistics(msgspec.Struct, frozen=True):
    """All of it."""

    total: Starts
    missed: tuple[Missed, ...]
    """The most frequent reasons first."""
    errors: dict[str, int]
    """What was swallowed, by name."""
    stored: Stored
    groups: tuple[Group, ...] = ()
    """The largest first."""


_WAYS = ("pulled", "published", "pushed")
_COLUMNS: dict[By, ColumnElement[str]] = {
    "model": launch.c.model,
    "gpu": launch.c.device,
    "host": launch.c.host,
    "day": func.substr(launch.c.started, 1, 10),
}
_PAST: dict[By | None, ColumnElement[str]] = {"model": past.c.model, "gpu": past.c.device, "day": past.c.day}
_SUMS = ("starts", "saved", "timed", "files", "bytes", "seconds", "added", "gpu_saved", "gpu_timed")
ROLLED_UP = "rolled up"
"""The name of the group of old launches by host, which nobody knows any more."""


def statistics(catalogue: Catalogue, source: int, asked: Asked = ALL_LAUNCHES, *, by: By | None = None) -> Statistics:
    """What the launches that are asked for add up to, and what the store holds. Six statements, eight with `by`.

    Raises:
        DatabaseError: the catalogue failed.
    """

    def work(connection: Connection) -> Statistics:
        total = _starts(connection, source, asked)
        return Statistics(
            total=total.get("", _NONE),
            missed=_missed(connection, source, asked),
            errors=_errors(connection, source, asked),
            stored=_stored(connection, source),
            groups=() if by is None else _groups(_starts(connection, source, asked, by)),
        )

    return catalogue.read(work)


_NONE = Starts(0, {}, None, None, 0, 0, 0, 0.0, 0)


def _groups(found: dict[str, Starts]) -> tuple[Group, ...]:
    largest = sorted(found, key=lambda name: (-found[name].starts, name))[:_MOST_GROUPS]
    return tuple(Group(name, found[name]) for name in largest)


def _of_source(statement: "Select[Any]", source: int, asked: Asked) -> "Select[Any]":
    joined = statement.join_from(told, launch, told.c.launch == launch.c.launch)
    return joined.where(told.c.source == source, *conditions(asked))


def _starts(connection: Connection, source: int, asked: Asked, by: By | None = None) -> dict[str, Starts]:
    """By name of the group, or under no name: one row for each verdict."""
    sums = (*_SUMS, *(f"{way}_{each}" for way in _WAYS for each in ("bytes", "starts")))
    groups = [launch.c.verdict, *(() if by is None else (_COLUMNS[by].label("name"),))]
    recent = _of_source(select(*groups, *live(*sums)), source, asked)
    recent = recent.outerjoin(cold_start, cold_start.c.key == launch.c.artifact).group_by(*groups)
    days = [past.c.verdict, *((_PAST[by].label("name"),) if by in _PAST else ())]
    older = select(*days, *kept(*sums)).where(past.c.source == source, *past_conditions(past, asked)).group_by(*days)
    found: dict[str, Starts] = {}
    for statement in (recent, older):
        for row in connection.execute(statement):
            name = "" if by is None else getattr(row, "name", ROLLED_UP)
            found[name] = _with(found.get(name, _NONE), row)
    return found


def _with(held: Starts, row: Any) -> Starts:
    verdicts = {**held.verdicts, row.verdict: held.verdicts.get(row.verdict, 0) + row.starts}
    known = sum(count for verdict, count in verdicts.items() if verdict != "unknown")
    warm = sum(count for verdict, count in verdicts.items() if verdict in WARM)
    return Starts(
        starts=held.starts + row.starts,
        verdicts=verdicts,
        hit_rate=warm / known if known else None,
        saved_seconds=_sum(held.saved_seconds, row.saved),
        timed=held.timed + row.timed,
        restored_files=held.restored_files + int(row.files),
        restored_bytes=held.restored_bytes + int(row.bytes),
        restore_seconds=held.restore_seconds + row.seconds,
        added=held.added + int(row.added),
        saved_gpu_seconds=_sum(held.saved_gpu_seconds, row.gpu_saved),
        gpu_timed=held.gpu_timed + row.gpu_timed,
        pulled=_sent(held.pulled, row, "pulled"),
        published=_sent(held.published, row, "published"),
        pushed=_sent(held.pushed, row, "pushed"),
    )


def _sum(held: float | None, more: float | None) -> float | None:
    """None where neither is known."""
    known = [seconds for seconds in (held, more) if seconds is not None]
    return float(sum(known)) if known else None


def _sent(held: Sent, row: Any, way: str) -> Sent:
    more = getattr(row, f"{way}_bytes")
    return Sent(held.bytes + int(more or 0), held.starts + int(getattr(row, f"{way}_starts")))


def _missed(connection: Connection, source: int, asked: Asked) -> tuple[Missed, ...]:
    by = (launch.c.miss, launch.c.blamed)
    recent = _of_source(select(*by, func.count().label("starts")), source, asked)
    older = select(past.c.miss, past.c.blamed, *kept("starts")).where(past.c.source == source)
    both = union_all(
        recent.where(launch.c.miss.is_not(None)).group_by(*by),
        older.where(past.c.miss.is_not(None), *past_conditions(past, asked)).group_by(past.c.miss, past.c.blamed),
    ).subquery()
    starts = func.sum(both.c.starts).label("total")
    statement = select(both.c.miss, both.c.blamed, starts).group_by(both.c.miss, both.c.blamed)
    ordered = statement.order_by(starts.desc(), both.c.miss, both.c.blamed).limit(_MOST_REASONS)
    return tuple(Missed(row.miss, row.blamed, int(row.total)) for row in connection.execute(ordered))


def _errors(connection: Connection, source: int, asked: Asked) -> dict[str, int]:
    recent = _of_source(select(launch_error.c.name, launch_error.c.count.label("times")), source, asked)
    older = select(past_error.c.name, past_error.c.count.label("times")).where(past_error.c.source == source)
    both = union_all(
        recent.join(launch_error, launch_error.c.launch == launch.c.launch),
        older.where(*past_conditions(past_error, asked)),
    ).subquery()
    times = func.sum(both.c.times).label("total")
    statement = select(both.c.name, times).group_by(both.c.name).order_by(times.desc(), both.c.name)
    return {row.name: int(row.total) for row in connection.execute(statement)}


def _stored(connection: Connection, source: int) -> Stored:
    held = connection.execute(
        select(
            func.count().label("artifacts"),
            func.coalesce(func.sum(artifact.c.captures), 0).label("captures"),
            func.coalesce(func.sum(artifact.c.files), 0).label("files"),
            func.coalesce(func.sum(artifact.c.bytes), 0).label("bytes"),
        ).where(artifact.c.source == source)
    ).one()
    each = (
        select(
            func.max(layer.c.size).label("size"), func.max(layer.c.tar_size).label("tar"), func.count().label("times")
        )
        .where(layer.c.source == source)
        .group_by(layer.c.layer)
        .subquery()
    )
    layers = connection.execute(
        select(
            func.coalesce(func.sum(each.c.tar * each.c.times), 0).label("packed"),
            func.coalesce(func.sum(each.c.tar), 0).label("whole"),
            func.coalesce(func.sum(each.c.size), 0).label("stored"),
        )
    ).one()
    return Stored(
        artifacts=held.artifacts,
        captures=int(held.captures),
        files=int(held.files),
        bytes=int(held.bytes),
        packed_bytes=int(layers.packed),
        unique_bytes=int(layers.whole),
        layer_bytes=int(layers.stored),
    )
