"""What launches add up to, by day, when they are too old to be kept one by one.

The row of a launch has everything about it and takes more than a kilobyte, and a fleet has a million of them in a year.
Once they are old, those of a day that agree in what statistics ask for become one row of `past`, in the transaction
that deletes them, and the source remembers the day before which it takes no launch any more. So each counts once
whatever is killed, and none comes back when the records of a store are read again. Only `reindex`, which forgets the
source with its past, counts them anew.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    Table,
    and_,
    case,
    cast,
    delete,
    false,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from cachemgr.catalogue.artifacts import like
from cachemgr.catalogue.launches import Asked, saved, saved_by_gpus
from cachemgr.catalogue.opened import Catalogue
from cachemgr.catalogue.schema import artifact, cold_start, factor_set, launch, launch_error, past, past_error, told
from cachemgr.catalogue.schema import source as source_table
from cachemgr.clock import written

RESTORE_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
PUBLISH_BUCKETS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds in seconds; what took longer is in none. `past` has a column for each, so that others need others."""
_TOGETHER = 20_000
"""Launches in one transaction, and the rest of their day: it must not keep others waiting."""
_DAY = func.substr(launch.c.started, 1, 10)
_ABOUT = ("model", "device", "engine_version")
_SHARED = (*_ABOUT, "result", "verdict", "artifact", "miss", "blamed", "timed_phase")
"""What launches that become one row have in common, beside their day. Hosts are not: pods have a new name each."""


def live(*names: str) -> list[ColumnElement[Any]]:
    """These sums over launches; `cold_start` must be joined."""
    return [_SUMS[name].label(name) for name in names]


def kept(*names: str) -> list[ColumnElement[Any]]:
    """The same sums over what launches added up to: those that can be added once more."""
    return [_of_past(name).label(name) for name in names]


def timings(what: str, bounds: tuple[float, ...]) -> tuple[str, ...]:
    """The names of the sums of a histogram: how many, their total, and how many within each bound."""
    return (f"{what}_count", f"{what}_total", *(f"{what}_{number}" for number in range(len(bounds))))


def _histogram(what: str, seconds: Any, counts: ColumnElement[bool], bounds: tuple[float, ...]) -> dict[str, Any]:
    known = and_(counts, seconds.is_not(None))
    sums = (
        func.count(case((known, 1))),
        func.coalesce(func.sum(case((known, seconds))), 0.0),
        *(func.count(case((and_(known, seconds <= bound), 1))) for bound in bounds),
    )
    return dict(zip(timings(what, bounds), sums, strict=True))


def _sent(way: str) -> dict[str, Any]:
    told_bytes = launch.c[f"{way}_bytes"]
    return {f"{way}_bytes": func.coalesce(func.sum(told_bytes), 0), f"{way}_starts": func.count(told_bytes)}


_SUMS: dict[str, Any] = {
    "starts": func.count(),
    "saved": func.sum(saved()),
    "timed": func.count(saved()),
    "gpu_saved": func.sum(saved_by_gpus()),
    "gpu_timed": func.count(saved_by_gpus()),
    "files": func.sum(launch.c.restored_files),
    "bytes": func.sum(launch.c.restored_bytes),
    "seconds": func.sum(launch.c.restore_seconds),
    "added": func.sum(launch.c.added),
    **_sent("pulled"),
    **_sent("published"),
    **_sent("pushed"),
    "timed_seconds": func.sum(launch.c.timed_seconds),
    "best": func.min(launch.c.best_seconds),
    "last": func.max(launch.c.started),
    **_histogram("restore", launch.c.restore_seconds, launch.c.restored_files > 0, RESTORE_BUCKETS),
    **_histogram("publish", launch.c.publish_seconds, launch.c.published.is_not(None), PUBLISH_BUCKETS),
}


def _of_past(name: str) -> Any:
    column = past.c[name]
    total = func.sum(column)
    # PostgreSQL adds whole numbers up to decimal ones.
    return cast(total, BigInteger) if isinstance(column.type, BigInteger) else total


def day_before(now: float, age: float) -> str:
    """The day (`YYYY-MM-DD`, in UTC) that was `age` seconds before `now`, or the first one that computers count."""
    return written(max(0.0, now - age))[:10]


def roll_up(catalogue: Catalogue, source: int, before: str) -> int:
    """Add up the launches of a source that started before this day (`YYYY-MM-DD`, in UTC); how many those were.

    The source must have been read to its end (`cachemgr.catalogue.ingest.refresh`) just before: what it takes later of
    those days is not counted, such as a report of a node that could not send it for as long.

    Raises:
        DatabaseError: the catalogue failed. What was not added up is there still.
    """
    count = 0
    while catalogue.read(lambda connection: _is_due(connection, source, before)):  # which keeps nobody waiting
        more = catalogue.write(lambda connection: _some(connection, source, before))
        count += more
        if not more:  # somebody else did it
            break
    return count


def _oldest_first(source: int) -> "Select[Any]":
    return _told(select(launch.c.started)).where(told.c.source == source).order_by(launch.c.started)


def _is_due(connection: Connection, source: int, before: str) -> bool:
    oldest = connection.execute(_oldest_first(source).limit(1)).scalar()
    return oldest is not None and oldest[:10] < before


def _some(connection: Connection, source: int, before: str) -> int:
    """Add up the oldest launches, by whole days. All of it or nothing is done."""
    oldest_first = _oldest_first(source)
    far = connection.execute(oldest_first.offset(_TOGETHER).limit(1)).scalar()
    upto = before if far is None else far[:10]
    old = before > _DAY if upto >= before else upto >= _DAY
    rest = connection.execute(oldest_first.where(~old).limit(1)).scalar()
    _take_no_more(connection, source, before if rest is None else min(rest[:10], before))
    of_source = and_(told.c.source == source, old)
    count = connection.execute(_told(select(func.count())).where(of_source)).scalar_one()
    _keep_sums(connection, source, of_source)
    connection.execute(
        delete(told).where(told.c.source == source, told.c.launch.in_(select(launch.c.launch).where(old)))
    )
    connection.execute(delete(launch).where(old, launch.c.launch.not_in(select(told.c.launch))))
    nobodys = [factor_set.c.key.not_in(select(table.c.key)) for table in (launch, artifact)]
    connection.execute(delete(factor_set).where(*nobodys))
    return int(count)


def _take_no_more(connection: Connection, source: int, before: str) -> None:
    """Before anything else is changed: whoever adds launches of the source meanwhile waits for its row, and then leaves
    out those that are added up."""
    held = source_table.c.rolled
    later = case((or_(held.is_(None), held < before), before), else_=held)
    connection.execute(update(source_table).where(source_table.c.id == source).values(rolled=later))


def _told(statement: "Select[Any]") -> "Select[Any]":
    return statement.join_from(told, launch, told.c.launch == launch.c.launch)


def _keep_sums(connection: Connection, source: int, of_source: ColumnElement[bool]) -> None:
    day = _DAY.label("day")
    shared = [launch.c[name] for name in _SHARED]
    sums = _told(select(literal(source), day, *shared, *live(*_SUMS)))
    sums = sums.outerjoin(cold_start, cold_start.c.key == launch.c.artifact).where(of_source).group_by(day, *shared)
    connection.execute(insert(past).from_select(["source", "day", *_SHARED, *_SUMS], sums))
    about = [launch.c[name] for name in _ABOUT]
    swallowed = (
        _told(select(literal(source), day, *about, launch_error.c.name, func.sum(launch_error.c.count)))
        .join(launch_error, launch_error.c.launch == launch.c.launch)
        .where(of_source)
        .group_by(day, *about, launch_error.c.name)
    )
    connection.execute(insert(past_error).from_select(["source", "day", *_ABOUT, "name", "count"], swallowed))


def conditions(table: Table, asked: Asked) -> list[ColumnElement[bool]]:
    """What holds for the rows of `past` or `past_error` that are asked for. None are of a certain host; of the first
    day all are."""
    if asked.host is not None:
        return [false()]
    found = [like(table.c[name], pattern) for name in _ABOUT if (pattern := getattr(asked, name)) is not None]
    return found if asked.since is None else [*found, table.c.day >= asked.since[:10]]
