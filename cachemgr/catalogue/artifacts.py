"""Asking for artifacts, and for what launches made of them."""

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Select, and_, func, or_, select

from cachemgr.catalogue.opened import Catalogue
from cachemgr.catalogue.schema import artifact, cold_start, launch, past, told
from cachemgr.history import NO_HISTORY, History, Timed
from cachemgr.inventory import Indexed, Summary
from cachemgr.key import Key


class Wanted(msgspec.Struct, frozen=True):
    """Which artifacts are asked for; the defaults ask for all. Names may have `*` in them."""

    key: str | None = None
    model: str | None = None
    device: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    complete: bool | None = None


ALL_ARTIFACTS = Wanted()


class Page(msgspec.Struct, frozen=True):
    """Some artifacts of a list, the newest first."""

    artifacts: tuple[Summary, ...]
    after: tuple[str, str] | None
    """What asks for those that follow; None at the end."""


def artifacts(
    catalogue: Catalogue,
    source: int,
    wanted: Wanted = ALL_ARTIFACTS,
    *,
    limit: int | None = None,
    after: tuple[str, str] | None = None,
) -> Page:
    """Artifacts of a store, the newest first, at most `limit`; `after` is that of the page before. Three statements.

    Raises:
        DatabaseError: the catalogue failed.
    """

    def work(connection: Connection) -> Page:
        conditions = [artifact.c.source == source, *_conditions(wanted)]
        if after is not None:
            created, key = after
            older = and_(artifact.c.created == created, artifact.c.key < key)
            conditions.append(or_(artifact.c.created < created, older))
        statement = select(artifact).where(*conditions).order_by(artifact.c.created.desc(), artifact.c.key.desc())
        rows = connection.execute(statement if limit is None else statement.limit(limit + 1)).all()
        shown = rows if limit is None else rows[:limit]
        histories = _histories(connection, source, None if limit is None else [row.key for row in shown])
        found = tuple(_summary(row, histories.get(row.key, NO_HISTORY)) for row in shown)
        more = len(rows) > len(shown)
        return Page(found, (shown[-1].created, shown[-1].key) if more else None)

    return catalogue.read(work)


def indexed(catalogue: Catalogue, source: int) -> dict[Key, Indexed]:
    """What the catalogue has of the manifests of a store, as it was left. One statement.

    Raises:
        DatabaseError: the catalogue failed.
    """

    def work(connection: Connection) -> dict[Key, Indexed]:
        rows = connection.execute(select(artifact).where(artifact.c.source == source))
        return {row.key: Indexed(row.manifests, _summary(row, NO_HISTORY)) for row in rows}

    return catalogue.read(work)


def history(catalogue: Catalogue, source: int, key: Key) -> tuple[History, dict[str, float]]:
    """How one artifact has served, and the seconds per phase of the cold start that made it. Three statements."""

    def work(connection: Connection) -> tuple[History, dict[str, float]]:
        told_of = _histories(connection, source, [key]).get(key, NO_HISTORY)
        row = connection.execute(select(cold_start).where(cold_start.c.key == key)).first()
        return told_of, {} if row is None else _cold(row.run, row.init_engine)

    return catalogue.read(work)


def _conditions(wanted: Wanted) -> list[ColumnElement[bool]]:
    found = [
        like(getattr(artifact.c, name), pattern)
        for name in ("key", "model", "device", "engine", "engine_version")
        if (pattern := getattr(wanted, name)) is not None
    ]
    return found if wanted.complete is None else [*found, artifact.c.complete == wanted.complete]


def like(column: Any, pattern: str) -> ColumnElement[bool]:
    """Whether a column fits a pattern with `*`, the same on every database."""
    if "*" not in pattern:
        return column == pattern  # type: ignore[no-any-return]
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_").replace("*", "%")
    return column.like(escaped, escape="\\")  # type: ignore[no-any-return]


def _histories(connection: Connection, source: int, keys: Sequence[str] | None) -> dict[str, History]:
    """How artifacts have served the launches that a store tells of: one row for each way in which they did."""
    some: list[ColumnElement[bool]] = [] if keys is None else [launch.c.artifact.in_(keys)]
    by = (launch.c.artifact, launch.c.verdict, launch.c.timed_phase, cold_start.c.run, cold_start.c.init_engine)
    recent = (
        select(
            *by,
            func.count().label("starts"),
            func.max(launch.c.started).label("last"),
            func.min(launch.c.best_seconds).label("best"),
            func.sum(launch.c.timed_seconds).label("seconds"),
        )
        .join_from(told, launch, told.c.launch == launch.c.launch)
        .outerjoin(cold_start, cold_start.c.key == launch.c.artifact)
        .where(told.c.source == source, launch.c.artifact.is_not(None), launch.c.result != "none", *some)
        .group_by(*by)
    )
    found: dict[str, History] = {}
    for statement in (recent, _older(source, keys)):
        for row in connection.execute(statement):
            found[row.artifact] = _with(found.get(row.artifact, NO_HISTORY), row)
    return found


def _older(source: int, keys: Sequence[str] | None) -> "Select[Any]":
    """The same of launches that are added up."""
    some: list[ColumnElement[bool]] = [] if keys is None else [past.c.artifact.in_(keys)]
    by = (past.c.artifact, past.c.verdict, past.c.timed_phase, cold_start.c.run, cold_start.c.init_engine)
    return (
        select(
            *by,
            func.sum(past.c.starts).label("starts"),
            func.max(past.c.last).label("last"),
            func.min(past.c.best).label("best"),
            func.sum(past.c.timed_seconds).label("seconds"),
        )
        .join_from(past, cold_start, cold_start.c.key == past.c.artifact, isouter=True)
        .where(past.c.source == source, past.c.artifact.is_not(None), past.c.result != "none", *some)
        .group_by(*by)
    )


def _with(history: History, row: Row[Any]) -> History:
    starts = int(row.starts)
    timed, cold = dict(history.timed), {**history.cold, **_cold(row.run, row.init_engine)}
    if row.timed_phase is not None:
        held = timed.get(row.timed_phase, Timed())
        timed[row.timed_phase] = Timed(held.starts + starts, held.total + row.seconds)
    bests = [seconds for seconds in (history.warm_seconds, row.best) if seconds is not None]
    return History(
        uses=history.uses + starts,
        last_used=max(history.last_used or "", row.last),
        verdicts={**history.verdicts, row.verdict: history.verdicts.get(row.verdict, 0) + starts},
        warm_seconds=min(bests, default=None),
        timed=timed,
        cold=cold,
    )


def _cold(run: float | None, init_engine: float | None) -> dict[str, float]:
    named = {"run": run, "init_engine": init_engine}
    return {phase: seconds for phase, seconds in named.items() if seconds is not None}


def _summary(row: Row[Any], history: History) -> Summary:
    return Summary(
        key=row.key,
        engine=row.engine,
        engine_version=row.engine_version,
        model=row.model,
        device=row.device,
        domains=tuple(row.domains.split()),
        files=row.files,
        bytes=row.bytes,
        stored_bytes=row.stored_bytes,
        captures=row.captures,
        complete=row.complete,
        created=row.created,
        last_used=history.last_used,
        uses=history.uses,
        pinned=row.pinned,
        cold_seconds=row.cold_seconds,
        warm_seconds=history.warm_seconds,
        verdicts=history.verdicts,
        saved_seconds=history.saved_seconds(history.cold),
    )
