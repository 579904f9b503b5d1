"""An open catalogue, wherever it is: a file of this host, a PostgreSQL of a fleet, or this process's memory.

A file that is damaged, that is none of ours or that a newer cachemgr has made is set aside under a name that says so,
and made anew. A file that cannot be written, or that another process holds for too long, is not waited for: then the
catalogue is made in memory, from the store. A server that does not answer is an error, because what a fleet knows
cannot be made up.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, false, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from cachemgr.catalogue import migrate
from cachemgr.catalogue.schema import REVISION, metadata
from cachemgr.errors import DatabaseError, UsageError
from cachemgr.places import is_special, make_directory, network_file_system
from cachemgr.sensitive import without_secrets
from cachemgr.store.lock import held

T = TypeVar("T")

FILE_NAME = "catalogue.db"
BUSY_SECONDS = 10.0
"""How long another process may hold what we want to write."""
_CONNECT_SECONDS = 5
_STATEMENT_SECONDS = 60
_ATTEMPTS = 5
_COLLIDED = frozenset({"40001", "40P01"})
"""SQLSTATE of transactions that PostgreSQL ended for the sake of others: serialization, deadlock."""
_QUOTED = re.compile(r"\n(?:LINE|CONTEXT)\b")
"""Where PostgreSQL begins to quote the statement."""
_UNKNOWN_LETTER = "22P05"
"""SQLSTATE of a text that the encoding of the database has no letters for."""
_DAMAGED = frozenset({11, 26})
"""SQLITE_CORRUPT and SQLITE_NOTADB. Python tells codes from 3.11 on; before that there are only words."""


class Catalogue:
    """Runs work in transactions. Every failure is a DatabaseError."""

    def __init__(self, engine: Engine, name: str, note: str = "") -> None:
        self.engine = engine
        self.note = note
        """What had to be done to open it, for people."""
        self._name = name

    def __str__(self) -> str:
        return self._name

    def read(self, work: Callable[[Connection], T]) -> T:
        """What `work` returns, which sees one state of the catalogue."""
        return self._run(work, writes=False)

    def write(self, work: Callable[[Connection], T]) -> T:
        """What `work` returns, all of whose changes are there afterwards or none. It may run several times."""
        return self._run(work, writes=True)

    def check(self) -> None:
        """Raises DatabaseError where it lacks a table or a column, or may not be written."""
        self.write(_touched)

    def close(self) -> None:
        """Give connections back."""
        self.engine.dispose()

    def _run(self, work: Callable[[Connection], T], *, writes: bool) -> T:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with self._connected(writes=writes) as connection, connection.begin():
                    return work(connection)
            except SQLAlchemyError as error:
                state = getattr(getattr(error, "orig", None), "sqlstate", None)
                if state not in _COLLIDED or attempt == _ATTEMPTS:
                    raise _told(self._name, error) from None
        raise AssertionError("the last attempt returns or raises")

    def _connected(self, *, writes: bool) -> Connection:
        connection = self.engine.connect().execution_options(cachemgr_writes=writes)
        if writes or self.engine.dialect.name == "sqlite":
            return connection
        # Else each statement of a transaction sees what others have committed before it.
        return connection.execution_options(isolation_level="REPEATABLE READ")


def _touched(connection: Connection) -> None:
    for table in metadata.sorted_tables:
        connection.execute(table.select().where(false()))
        connection.execute(table.delete().where(false()))


class DamagedError(DatabaseError):
    """The file of a catalogue is not what SQLite can read."""


def using(url: str | None, home: Path, ask: Callable[[Catalogue], T], say: Callable[[str], None]) -> T:
    """What `ask` says of the catalogue at `url`, or else of the one in `home`; `say` is told what had to be done.

    A file that turns out to be damaged while it is asked is set aside, and a new one asked; instead of one that cannot
    be written now, one in memory is. So `ask` may be called again.

    Raises:
        UsageError: `url` cannot be meant, or what it needs is not installed.
        DatabaseError: the server does not answer, or refuses.
    """
    path = _file_of(url, home)
    inode = None if path is None else _inode(path)
    try:
        return _asked(open_catalogue(url, home), ask, say)
    except DamagedError as error:
        if path is None:
            raise
        damage = error
    except DatabaseError as error:
        if path is None:
            raise
        return from_store(error, ask, say)
    try:
        note = _set_aside(path, inode, "damaged")
        again = open_catalogue(url, home)
    except (DatabaseError, OSError):
        return from_store(damage, ask, say)
    again.note = again.note or note
    return _asked(again, ask, say)


def from_store(error: DatabaseError, ask: Callable[[Catalogue], T], say: Callable[[str], None]) -> T:
    """What `ask` says of a catalogue in memory, because the right one failed."""
    return _asked(in_memory(_instead(str(error))), ask, say)


def _asked(catalogue: Catalogue, ask: Callable[[Catalogue], T], say: Callable[[str], None]) -> T:
    try:
        if catalogue.note:
            say(catalogue.note)
        return ask(catalogue)
    finally:
        catalogue.close()


def _instead(said: str) -> str:
    return f"{said}; everything is read from the store"


def open_catalogue(url: str | None, home: Path) -> Catalogue:
    """The catalogue at `url`, or else the one in `home`, with tables of our revision in it.

    Raises:
        UsageError, DatabaseError: as `using`.
    """
    path = _file_of(url, home)
    if path is None:
        assert url is not None, "else it is a file"
        return _on_server(_parsed(url))
    try:
        return _in_file(path)
    except DamagedError:
        raise
    except DatabaseError as error:
        return in_memory(_instead(str(error)))
    except OSError as error:
        return in_memory(_instead(f"the catalogue cannot be in {path.parent}: {error.strerror}"))


def in_memory(note: str = "") -> Catalogue:
    """An empty catalogue that ends with this process."""
    engine = _engine(make_url("sqlite://"), poolclass=StaticPool)
    event.listen(engine, "connect", _connected)
    metadata.create_all(engine)
    return Catalogue(engine, "memory", note)


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # a port that is no number is the latter
        raise UsageError(
            "`database_url` cannot be read", hint="CACHEMGR_DATABASE_URL=postgresql://cachemgr@db.example/cachemgr"
        ) from None
    return parsed if parsed.drivername == "sqlite" else parsed.set(drivername="postgresql+psycopg")


def _file_of(url: str | None, home: Path) -> Path | None:
    """The file that the catalogue is; None where it is on a server."""
    if url is None:
        return home / FILE_NAME
    parsed = _parsed(url)
    return Path(parsed.database or home / FILE_NAME) if parsed.drivername == "sqlite" else None


def _in_file(path: Path) -> Catalogue:
    make_directory(path.parent, 0o700)
    if is_special(path):  # it would be set aside, and nobody have a null device any more
        raise DatabaseError(
            f"the catalogue cannot be {path}: it is no file", hint="CACHEMGR_DATABASE_URL=sqlite:////PATH"
        )
    inode = _inode(path)
    note = ""
    try:
        fault = _fault(path)
    except DamagedError:
        fault = "damaged"
    if fault is not None:
        note = _set_aside(path, inode, fault)
    catalogue = Catalogue(_file_engine(path), str(path), note)
    try:
        if catalogue_revision(catalogue) != REVISION:
            catalogue.write(migrate.upgrade)
            with suppress(OSError):
                path.chmod(0o600)
    except BaseException:
        catalogue.close()
        raise
    return catalogue


def catalogue_revision(catalogue: Catalogue) -> str | None:
    """The revision of its tables; None where it has none."""
    try:
        with catalogue.engine.connect().execution_options(cachemgr_writes=False) as connection:
            return migrate.revision(connection)
    except SQLAlchemyError as error:
        raise _told(str(catalogue), error) from None


def _fault(path: Path) -> str | None:
    """Why a file must not be used, as a word of its name when it is set aside."""
    if not os.path.exists(path):
        return None
    catalogue = Catalogue(_engine(URL.create("sqlite", database=str(path))), str(path))
    try:  # as it is: nothing is written to a file that may be another program's
        tables, found = catalogue.read(_tables_and_revision)
        if found is None:
            return "foreign" if tables else None
        return None if found == REVISION or found in migrate.known() else "newer"
    finally:
        catalogue.close()


_TABLES = text("SELECT count(*) FROM sqlite_master")


def _tables_and_revision(connection: Connection) -> tuple[int, str | None]:
    """How many tables a file has, and their revision. Both of one moment: another process may make the tables between
    two, and its catalogue would be taken for another program's file."""
    return connection.execute(_TABLES).scalar() or 0, migrate.revision(connection)


_ASIDE = {
    "damaged": "is damaged",
    "foreign": "is no catalogue of cachemgr",
    "newer": "was made by a newer cachemgr",
}


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _set_aside(path: Path, inode: int | None, why: str) -> str:
    """Rename a file unless somebody else has done so meanwhile; what a person should know. What was aside goes.

    Its log goes with it: what others have committed there is nowhere else, and they may have it open.
    """
    aside = path.with_name(f"{path.name}.{why}")
    with held(path.with_name(f"{path.name}.lock"), wait=BUSY_SECONDS):
        if inode is None or _inode(path) != inode:
            return ""
        for suffix in ("-wal", "-shm"):
            Path(f"{aside}{suffix}").unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{aside}{suffix}")
        os.replace(path, aside)
    return f"{path} {_ASIDE[why]}; it is {aside.name} now, and made anew from the store"


def _on_server(url: URL) -> Catalogue:
    name = URL.create("postgresql", host=url.host, port=url.port, database=url.database).render_as_string()
    # A pooler between us and the server (PgBouncer) may give each transaction another session: it takes no options of a
    # session, and finds no statement there that was prepared in another one.
    # The encoding of a database is another question: one in SQL_ASCII answers in bytes to who does not name any.
    arguments = {
        "connect_timeout": _CONNECT_SECONDS,
        "application_name": "cachemgr",
        "client_encoding": "utf8",
        "prepare_threshold": None,
    }
    try:
        engine = _engine(url, connect_args=arguments)
    except (ImportError, NoSuchModuleError):
        raise UsageError(
            "PostgreSQL needs psycopg, which is not installed", hint="pip install 'cachemgr[postgres]'"
        ) from None
    catalogue = Catalogue(engine, name)
    try:
        _migrate(catalogue)
    except BaseException:
        catalogue.close()
        raise
    return catalogue


def _migrate(catalogue: Catalogue) -> None:
    """Bring tables to our revision, unless they are newer."""
    found = catalogue_revision(catalogue)
    if found == REVISION:
        return
    if found is not None and found not in migrate.known():
        raise DatabaseError(f"the catalogue {catalogue} was made by a newer cachemgr", hint="upgrade cachemgr")
    catalogue.write(migrate.upgrade)


def _engine(url: URL, **options: Any) -> Engine:
    """Parameters are hidden from errors: they have names of models and hosts in them."""
    engine = create_engine(url, hide_parameters=True, **options)
    event.listen(engine, "begin", _begin if engine.dialect.name == "sqlite" else _bound)
    return engine


def _file_engine(path: Path) -> Engine:
    engine = _engine(URL.create("sqlite", database=str(path)), connect_args={"timeout": BUSY_SECONDS})
    # A log beside the file is shared memory, which machines do not share.
    journal = "WAL" if network_file_system(path) is None else "TRUNCATE"

    def journalled(connection: Any, _record: object) -> None:
        for pragma in (f"journal_mode={journal}", "synchronous=NORMAL"):
            connection.execute(f"PRAGMA {pragma}")

    event.listen(engine, "connect", _connected)
    event.listen(engine, "connect", journalled)
    return engine


def _connected(connection: Any, _record: object) -> None:
    """SQLite is to do as PostgreSQL does: rows that refer to others go with them, and `LIKE` tells cases apart."""
    connection.isolation_level = None  # transactions begin in `_begin`, DDL among them
    for pragma in ("foreign_keys=ON", "case_sensitive_like=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    """Who will write says so at once: a reader that turns writer fails where others have written meanwhile."""
    writes = connection.get_execution_options().get("cachemgr_writes", True)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _bound(connection: Connection) -> None:
    """For this transaction only: the session may be another client's next."""
    connection.exec_driver_sql(
        f"SELECT set_config('lock_timeout', '{BUSY_SECONDS:.0f}s', true),"
        f" set_config('statement_timeout', '{_STATEMENT_SECONDS}s', true)"
    )


def _told(name: str, error: SQLAlchemyError) -> DatabaseError:
    """An error in one sentence, without its statement."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    sentence = _QUOTED.split(str(cause))[0]
    said = without_secrets(" ".join(sentence.split())) or type(error).__name__
    code = getattr(cause, "sqlite_errorcode", None)
    if (code is not None and code & 0xFF in _DAMAGED) or "malformed" in said or "not a database" in said:
        return DamagedError(f"the catalogue {name} is damaged: {said}", hint="cachemgr reindex")
    hint = "make its database with ENCODING 'UTF8'" if getattr(cause, "sqlstate", "") == _UNKNOWN_LETTER else None
    return DatabaseError(f"the catalogue {name} cannot be used: {said}", hint=hint or "cachemgr doctor")
