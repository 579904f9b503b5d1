"""Reading a store into the catalogue: what is new in it, exactly once.

Launches are known by their names, so a record that is read twice, from two stores or by two processes, is one row.
The objects that records were read from are remembered in the same transaction, and artifacts are read again only when
the listing of their manifests changed: both cost what has changed. Killed anywhere, the next one goes on.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import msgspec
import zstandard
from sqlalchemy import Connection, Table, delete, select, update

from cachemgr import digest
from cachemgr.capture import Launch
from cachemgr.catalogue import schema
from cachemgr.catalogue.opened import Catalogue
from cachemgr.explain import miss
from cachemgr.history import NO_HISTORY, best, timed
from cachemgr.inventory import Summary, cold_seconds, layers_of, summarise
from cachemgr.key import Factor, Key, derive
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, Damaged, listed_captures, listing
from cachemgr.store.records import News, since

T = TypeVar("T")

_LAUNCHES = 500
"""Launches in one transaction: it must not keep others waiting."""
_ARTIFACTS = 16
"""Artifacts that are read at once: their manifests may list hundreds of thousands of files, and all of them are in
memory. As many as a remote store is asked for side by side, so fewer would take longer."""
_NAMES = 500
"""Names in one statement."""
_INDEXED = frozenset({"launch", "name", "key", "artifact", "host", "started", "created"})
_MOST_LETTERS = 300
"""Of a text in an index: PostgreSQL takes 2,704 bytes in one, which may have two of them."""
_MOST_SMALL = 2**31 - 1
_MOST_NUMBER = 2**50
"""More than any real count or size, and little enough for sums to fit into 64 bits."""
_MOST_SECONDS = 1e12
"""The same for durations: PostgreSQL adds up nothing that has no end."""

Row = dict[str, Any]


def refresh(catalogue: Catalogue, store: Store, name: str, damaged: list[Damaged]) -> int:
    """Bring the catalogue up to date with a store, which it knows by `name`; the number that it has there.

    What cannot be read is appended to `damaged`, and read again the next time.

    Raises:
        StoreError: the store failed.
        DatabaseError: the catalogue did.
    """
    source = number_of(catalogue, name)
    _take_launches(catalogue, store, source)
    _take_artifacts(catalogue, store, source, damaged)
    return source


def number_of(catalogue: Catalogue, name: str) -> int:
    """The number that a store called `name` has in the catalogue, which it gets now if it has none.

    Raises:
        DatabaseError: the catalogue failed.
    """
    source = catalogue.read(lambda connection: _number(connection, name))
    return catalogue.write(lambda connection: _named(connection, name)) if source is None else source


def forget(catalogue: Catalogue, name: str) -> None:
    """Forget what is known of a store, so that the next `refresh` reads all of it. Launches of which no store tells any
    more go as well."""

    def work(connection: Connection) -> None:
        connection.execute(delete(schema.source).where(schema.source.c.name == _storable("name", name)))
        connection.execute(delete(schema.launch).where(schema.launch.c.launch.not_in(select(schema.told.c.launch))))

    catalogue.write(work)


def _number(connection: Connection, name: str) -> int | None:
    named = select(schema.source.c.id).where(schema.source.c.name == _storable("name", name))
    return connection.execute(named).scalar()


def _named(connection: Connection, name: str) -> int:
    _add(connection, schema.source, [{"name": name}], keys=("name",))
    found = _number(connection, name)
    assert found is not None, "it was just added"
    return found


def _take_launches(catalogue: Catalogue, store: Store, source: int) -> None:
    listed = schema.listed
    known = set(
        catalogue.read(
            lambda connection: (
                connection.execute(select(listed.c.name).where(listed.c.source == source)).scalars().all()
            )
        )
    )
    there: set[str] = set()
    for news in since(store, known):
        there.update(news.listed)
        take_news(catalogue, source, news)
    gone = sorted(known - there)  # rolled up into others
    if gone:
        catalogue.write(lambda connection: _drop(connection, listed, source, listed.c.name, gone))


def take_news(catalogue: Catalogue, source: int, news: News) -> None:
    """Add what some objects of a store hold. They are remembered after the last of their launches is there.

    Raises:
        DatabaseError: the catalogue failed.
    """
    for some in _batches(sorted(news.launches, key=lambda launch: launch.launch), _LAUNCHES):
        catalogue.write(lambda connection, some=some: enter(connection, source, some))  # type: ignore[misc]
    if news.read:
        rows = [{"source": source, "name": name} for name in sorted(news.read)]
        catalogue.write(lambda connection: _add(connection, schema.listed, rows, keys=("source", "name")))


def enter(connection: Connection, source: int, launches: Sequence[Launch]) -> None:
    """Add launches that a store tells of, sorted by name, so that who adds the same ones at once waits and does not
    cross. The record of one that has ended replaces that of when it was ready. Those that are too old for a row of
    their own (`cachemgr.catalogue.past`) are left out: they are counted, or too late for that."""
    launches = _not_past(connection, source, launches)
    table = schema.launch
    _add(
        connection,
        table,
        [_launch_row(launch) for launch in launches],
        keys=("launch",),
        replace=_ends,
    )
    rows = [{"source": source, "launch": launch.launch} for launch in launches]
    _add(connection, schema.told, rows, keys=("source", "launch"))
    errors = [
        {"launch": launch.launch, "name": name, "count": _small(count)}
        for launch in launches
        for name, count in sorted(launch.errors.items())
    ]
    _add(
        connection,
        schema.launch_error,
        errors,
        keys=("launch", "name"),
        replace=_counts_more,
    )
    _add_factors(connection, [(launch.key, launch.factors) for launch in launches if launch.factors])


def _not_past(connection: Connection, source: int, launches: Sequence[Launch]) -> Sequence[Launch]:
    """The row of the source is ours until the transaction ends, so that nobody adds up launches between this question
    and what is done by its answer."""
    found = select(schema.source.c.rolled).where(schema.source.c.id == source).with_for_update(read=True)
    rolled = connection.execute(found).scalar()
    return launches if rolled is None else [launch for launch in launches if launch.started[:10] >= rolled]


def _launch_row(launch: Launch) -> Row:
    phase, seconds = timed(launch) or (None, None)
    why = miss(launch)
    rest = msgspec.json.encode(msgspec.structs.replace(launch, factors=()))
    return {
        "launch": launch.launch,
        "started": launch.started,
        "host": launch.host,
        "key": launch.key,
        "result": launch.result,
        "artifact": launch.artifact,
        "found_in": launch.where,
        "verdict": launch.verdict,
        "ended": launch.exit_code is not None,
        "exit_code": None if launch.exit_code is None else _small(launch.exit_code),
        "engine": launch.engine,
        "engine_version": launch.engine_version,
        "model": launch.model,
        "device": launch.device,
        "miss": None if why is None else why.word,
        "blamed": None if why is None else why.factor,
        "restored_files": launch.restored_files,
        "restored_bytes": launch.restored_bytes,
        "restore_seconds": launch.restore_seconds,
        "added": sum(launch.added.values()),
        "added_after_ready": launch.added_after_ready,
        "timed_phase": phase,
        "timed_seconds": seconds,
        "best_seconds": best(launch),
        "published": launch.published,
        "publish_seconds": launch.phases.get("publish"),
        "gpus": None if launch.gpus is None else _small(launch.gpus),
        "pulled_bytes": launch.pulled_bytes,
        "published_bytes": launch.published_bytes,
        "pushed_bytes": launch.pushed_bytes,
        "record": packed(rest),
    }


def _add_factors(connection: Connection, sets: Iterable[tuple[Key, Sequence[Factor]]]) -> None:
    """Factors that make another key than the one they came with would explain the launches of others wrongly."""
    sound: dict[Key, Sequence[Factor]] = {}
    for key, factors in sets:
        if key not in sound and len({factor.name for factor in factors}) == len(factors) and derive(factors) == key:
            sound[key] = factors
    rows = [{"key": key, "factors": packed(msgspec.json.encode(sound[key]))} for key in sorted(sound)]
    _add(connection, schema.factor_set, rows, keys=("key",))


def packed(data: bytes) -> bytes:
    """Bytes as the catalogue keeps them."""
    return zstandard.ZstdCompressor(level=3, write_content_size=True).compress(data)


def _take_artifacts(catalogue: Catalogue, store: Store, source: int, damaged: list[Damaged]) -> None:
    artifact = schema.artifact
    columns = select(artifact.c.key, artifact.c.manifests, artifact.c.pinned).where(artifact.c.source == source)
    known = {
        row.key: (row.manifests, row.pinned)
        for row in catalogue.read(lambda connection: connection.execute(columns).all())
    }
    by_key: dict[Key, dict[str, tuple[Key, Collection[str]]]] = {}
    for name, there in listing(store).items():
        by_key.setdefault(there[0], {})[name] = there
    pins = {layout.pinned(entry.name) for entry in store.scan(layout.PINS)}
    pinned = {key: key in pins for key in by_key}
    stale = [key for key in sorted(by_key) if known.get(key, ("",))[0] != digest.fingerprint_of(by_key[key])]
    for keys in _batches(stale, _ARTIFACTS):
        held = listed_captures(store, {name: there for key in keys for name, there in by_key[key].items()}, damaged)
        catalogue.write(lambda connection, keys=keys, held=held: _put(connection, source, keys, held, pinned))  # type: ignore[misc]
    gone = sorted(known.keys() - by_key.keys())
    fresh = pinned.keys() - set(stale)
    moved = {key: pinned[key] for key in sorted(fresh) if key in known and known[key][1] != pinned[key]}
    if gone or moved:
        catalogue.write(lambda connection: _tidy(connection, source, gone, moved))


def _put(
    connection: Connection,
    source: int,
    keys: Sequence[Key],
    held: Mapping[Key, Sequence[Capture]],
    pinned: Mapping[Key, bool],
) -> None:
    """Replace what is known of these artifacts."""
    _forget_artifacts(connection, source, keys)
    found = [(summarise(key, held[key], NO_HISTORY, pinned=pinned[key]), held[key]) for key in keys if key in held]
    _add(
        connection,
        schema.artifact,
        [_artifact_row(source, summary, captures) for summary, captures in found],
        keys=("source", "key"),
    )
    layers = [
        {"source": source, "key": summary.key, "layer": layer.digest, "size": layer.size, "tar_size": layer.tar_size}
        for summary, captures in found
        for layer in sorted(layers_of(captures), key=lambda layer: layer.digest)
    ]
    _add(connection, schema.layer, layers, keys=("source", "key", "layer"))
    colds = [(summary.key, cold_seconds(captures)) for summary, captures in found]
    rows = [{"key": key, "run": cold.get("run"), "init_engine": cold.get("init_engine")} for key, cold in colds if cold]
    _add(connection, schema.cold_start, rows, keys=("key",), replace=_always)
    _add_factors(connection, [(summary.key, captures[0].manifest.factors) for summary, captures in found])


def _artifact_row(source: int, summary: Summary, captures: Sequence[Capture]) -> Row:
    return {
        "source": source,
        "key": summary.key,
        "manifests": digest.fingerprint_of(layout.manifest_name(summary.key, capture.digest) for capture in captures),
        "engine": summary.engine,
        "engine_version": summary.engine_version,
        "model": summary.model,
        "device": summary.device,
        "domains": " ".join(summary.domains),
        "files": summary.files,
        "bytes": summary.bytes,
        "stored_bytes": summary.stored_bytes,
        "captures": summary.captures,
        "complete": summary.complete,
        "created": summary.created,
        "pinned": summary.pinned,
        "cold_seconds": summary.cold_seconds,
    }


def _tidy(connection: Connection, source: int, gone: Sequence[str], moved: Mapping[Key, bool]) -> None:
    _forget_artifacts(connection, source, gone)
    artifact = schema.artifact
    for pin in (True, False):
        keys = sorted(key for key, now in moved.items() if now == pin)
        for some in _batches(keys, _NAMES):
            where = (artifact.c.source == source, artifact.c.key.in_(some))
            connection.execute(update(artifact).where(*where).values(pinned=pin))


def _forget_artifacts(connection: Connection, source: int, keys: Sequence[str]) -> None:
    for table in (schema.artifact, schema.layer):
        _drop(connection, table, source, table.c.key, keys)


def _drop(connection: Connection, table: Table, source: int, column: Any, values: Sequence[str]) -> None:
    for some in _batches(values, _NAMES):
        connection.execute(delete(table).where(table.c.source == source, column.in_(some)))


def _add(
    connection: Connection,
    table: Table,
    rows: Sequence[Row],
    *,
    keys: Sequence[str],
    replace: Callable[[Any], Any] | None = None,
) -> None:
    """Insert rows. One whose `keys` are there already is left alone, or replaced where the condition `replace` of the
    new row holds (None: always)."""
    if not rows:
        return
    storable = [{name: _storable(name, value) for name, value in row.items()} for row in rows]
    connection.execute(_statement(connection.dialect.name, table, tuple(keys), replace), storable)


def _storable(name: str, value: Any) -> Any:
    """What a column can hold of a value. Records of a mirror may have anything in them, and one that does not fit must
    not keep the others out."""
    if type(value) is int:
        return max(-_MOST_NUMBER, min(value, _MOST_NUMBER))
    if isinstance(value, float):
        return max(-_MOST_SECONDS, min(value, _MOST_SECONDS))
    if isinstance(value, str):
        text = value.replace("\0", "\ufffd")  # which PostgreSQL has in no text
        return _shortened(text) if name in _INDEXED and len(text) > _MOST_LETTERS else text
    return value


def _shortened(text: str) -> str:
    """As much of a long text as an index takes, with what tells it from others that begin alike."""
    end = f"~{digest.fingerprint(text.encode())}"
    return text[: _MOST_LETTERS - len(end)] + end


def _small(number: int) -> int:
    """A number for a column of 32 bits."""
    return max(-_MOST_SMALL, min(number, _MOST_SMALL))


@cache
def _statement(dialect: str, table: Table, keys: tuple[str, ...], replace: Callable[[Any], Any] | None) -> Any:
    """Made once each: it has a construct for every column, which costs more than to run it."""
    statement = _insert(dialect, table)
    if replace is None:
        return statement.on_conflict_do_nothing(index_elements=keys)
    others = [column.name for column in table.columns if column.name not in keys]
    values = {name: statement.excluded[name] for name in others}
    return statement.on_conflict_do_update(index_elements=keys, set_=values, where=replace(statement.excluded))


def _ends(excluded: Any) -> Any:
    """The record of a launch that has ended replaces that of when it was ready."""
    return ~schema.launch.c.ended & excluded.ended


def _counts_more(excluded: Any) -> Any:
    return excluded["count"] > schema.launch_error.c.count


def _always(_excluded: Any) -> Any:
    return None


def _insert(dialect: str, table: Table) -> Any:
    """Both dialects know `ON CONFLICT`, each by a construct of its own."""
    if dialect == "postgresql":
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table)
    from sqlalchemy.dialects import sqlite

    return sqlite.insert(table)


def _batches(values: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    rest = iter(values)
    while some := list(islice(rest, size)):
        yield some
