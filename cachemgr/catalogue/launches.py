"""Asking for launches."""

from typing import Any

import msgspec
import zstandard
from sqlalchemy import ColumnElement, Connection, Row, Select, and_, case, func, or_, select

from cachemgr.capture import Launch, decode_launch
from cachemgr.catalogue.artifacts import like
from cachemgr.catalogue.opened import Catalogue
from cachemgr.catalogue.schema import cold_start, factor_set, launch, past, told
from cachemgr.clock import written
from cachemgr.errors import NotFoundError, UsageError
from cachemgr.key import Factor

_AHEAD_SECONDS = 3600
"""By how much clocks of two hosts may differ, and nobody wonders."""
_MOST_RECORD = 64 << 20
"""Bytes of one record that is unpacked."""


class Asked(msgspec.Struct, frozen=True):
    """Which launches are asked for; the defaults ask for all. Names may have `*` in them."""

    model: str | None = None
    device: str | None = None
    host: str | None = None
    engine_version: str | None = None
    verdict: str | None = None
    miss: str | None = None
    key: str | None = None
    """Of launches that had this key."""
    about: str | None = None
    """Of launches that had this key or took from its artifact."""
    since: str | None = None
    """RFC 3339, UTC."""
    until: str | None = None
    """The same; a clock that was wrong once leaves launches that are yet to come."""


ALL_LAUNCHES = Asked()


class Launches(msgspec.Struct, frozen=True):
    """Some launches of a list, the newest first."""

    launches: tuple[Launch, ...]
    after: tuple[str, str] | None
    """What asks for those that follow; None at the end."""


def launches(
    catalogue: Catalogue, source: int, asked: Asked = ALL_LAUNCHES, *, limit: int, after: tuple[str, str] | None = None
) -> Launches:
    """Launches that a store tells of, the newest first, at most `limit`; `after` is that of the page before. One
    statement.

    Raises:
        DatabaseError: the catalogue failed.
    """

    def work(connection: Connection) -> Launches:
        statement = _told_by(source).where(*conditions(asked))
        if after is not None:
            started, name = after
            same = and_(launch.c.started == started, launch.c.launch < name)
            statement = statement.where(or_(launch.c.started < started, same))
        newest = statement.order_by(launch.c.started.desc(), launch.c.launch.desc())
        rows = connection.execute(newest.limit(limit + 1)).all()
        shown = rows[:limit]
        last = (shown[-1].started, shown[-1].launch) if len(rows) > limit else None
        return Launches(tuple(map(_launch, shown)), last)

    return catalogue.read(work)


def last(catalogue: Catalogue, source: int, asked: Asked, *, now: float) -> Launch | None:
    """The last launch of those that are asked for, as of `now` (seconds since the epoch): a host whose clock was far
    ahead when one began shows that one only where it has no other. At most two statements."""
    for each in (msgspec.structs.replace(asked, until=written(now + _AHEAD_SECONDS)), asked):
        found = launches(catalogue, source, each, limit=1).launches
        if found:
            return found[0]
    return None


def named(catalogue: Catalogue, source: int, name: str) -> Launch:
    """The launch with this name, or whose name begins so. One statement.

    Raises:
        NotFoundError: there is none.
        UsageError: there are several.
        DatabaseError: the catalogue failed.
    """
    names = launch.c.launch
    begins = names.startswith(name, autoescape=True)
    statement = _told_by(source).where(begins).order_by(func.length(names), names).limit(2)
    rows = catalogue.read(lambda connection: connection.execute(statement).all())
    if not rows:
        raise NotFoundError(f"no store tells of a launch `{name}`", hint="cachemgr stats")
    if len(rows) > 1 and rows[0].launch != name:
        raise UsageError(f"`{name}` is the beginning of several launches", hint="give more of the name")
    return _launch(rows[0])


def count(catalogue: Catalogue, source: int) -> int:
    """How many launches a store tells of, old ones with the others. One statement."""
    older = select(func.coalesce(func.sum(past.c.starts), 0)).where(past.c.source == source).scalar_subquery()
    statement = select(func.count() + older).where(told.c.source == source)
    return int(catalogue.read(lambda connection: connection.execute(statement).scalar_one()))


def _told_by(source: int) -> "Select[Any]":
    return (
        select(launch.c.launch, launch.c.started, launch.c.record, factor_set.c.factors)
        .join_from(told, launch, told.c.launch == launch.c.launch)
        .outerjoin(factor_set, factor_set.c.key == launch.c.key)
        .where(told.c.source == source)
    )


def conditions(asked: Asked) -> list[ColumnElement[bool]]:
    """What holds for the launches that are asked for."""
    found = [
        like(getattr(launch.c, name), pattern)
        for name in ("key", "model", "device", "host", "engine_version", "verdict", "miss")
        if (pattern := getattr(asked, name)) is not None
    ]
    if asked.about is not None:
        found.append(or_(launch.c.key == asked.about, launch.c.artifact == asked.about))
    if asked.since is not None:
        found.append(launch.c.started >= asked.since)
    if asked.until is not None:
        found.append(launch.c.started <= asked.until)
    return found


def saved() -> ColumnElement[float]:
    """Seconds that a launch saved against the cold start of its artifact, of the phase that both timed; NULL where they
    cannot be compared. `cold_start` must be joined."""
    cold = case(
        (launch.c.timed_phase == "run", cold_start.c.run),
        (launch.c.timed_phase == "init_engine", cold_start.c.init_engine),
    )
    return cold - launch.c.timed_seconds


def saved_by_gpus() -> ColumnElement[float]:
    """The same, once for each GPU that waited; NULL where the record does not say how many did."""
    return saved() * launch.c.gpus


def _launch(row: Row[Any]) -> Launch:
    found = decode_launch(_unpacked(row.record))
    if row.factors is None:
        return found
    factors = msgspec.json.decode(_unpacked(row.factors), type=tuple[Factor, ...])
    return msgspec.structs.replace(found, factors=factors)


def _unpacked(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=_MOST_RECORD)
