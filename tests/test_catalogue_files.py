"""Tables of every revision come to be those of today with their rows; a file that cannot be used is never fatal."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, MetaData, insert, text

from cachemgr.catalogue import migrate, schema
from cachemgr.catalogue import opened as opening
from cachemgr.catalogue.artifacts import artifacts
from cachemgr.catalogue.ingest import refresh
from cachemgr.catalogue.launches import launches
from cachemgr.catalogue.opened import Catalogue, DamagedError, open_catalogue, using
from cachemgr.catalogue.statistics import Sent, statistics
from cachemgr.errors import DatabaseError, UsageError
from cachemgr.inventory import Summary, summaries
from cachemgr.store import Store
from tests.databases import DATABASES
from tests.test_catalogue import stocked
from tests.test_records import plant

ROOT = Path(__file__).parent.parent
ROWS = Path(__file__).parent / "data" / "catalogue"
REVISIONS = sorted(migrate.known())


def rows_of(revision: str) -> dict[str, list[dict[str, object]]]:
    """Rows as a release with this revision wrote them; bytes are in hexadecimal."""
    tables: dict[str, list[dict[str, object]]] = json.loads((ROWS / f"{revision}.json").read_text())
    blobs = {"record", "factors"}
    return {
        table: [
            {name: bytes.fromhex(str(value)) if name in blobs else value for name, value in row.items()} for row in rows
        ]
        for table, rows in tables.items()
    }


def fill(catalogue: Catalogue, revision: str) -> None:
    """Tables of a revision, with its rows."""

    def work(connection: Connection) -> None:
        migrate.upgrade(connection, revision)
        tables = MetaData()
        tables.reflect(connection)
        for table, rows in rows_of(revision).items():
            connection.execute(insert(tables.tables[table]), rows)

    catalogue.write(work)


def raw(database: str) -> Catalogue:
    """A database without any table."""
    url = opening._parsed(database)
    if url.drivername == "sqlite":
        path = Path(url.database or "")
        path.parent.mkdir(parents=True)
        return Catalogue(opening._file_engine(path), str(path))
    return Catalogue(opening._engine(url), "server")


def test_every_revision_has_rows_that_were_written_with_it() -> None:
    assert sorted(path.stem for path in ROWS.glob("*.json")) == REVISIONS
    assert REVISIONS[-1] == schema.REVISION, "revisions sort by name"
    for revision in REVISIONS:
        assert min(len(rows) for rows in rows_of(revision).values()) > 0


@pytest.mark.parametrize("revision", REVISIONS)
def test_rows_of_every_revision_can_be_asked_for(database: str, tmp_path: Path, revision: str) -> None:
    old = raw(database)
    fill(old, revision)
    old.close()
    catalogue = open_catalogue(database, tmp_path / "home")
    assert catalogue.note == ""
    assert opening.catalogue_revision(catalogue) == schema.REVISION
    (summary,) = artifacts(catalogue, 1).artifacts
    assert (summary.uses, summary.pinned, summary.domains) == (1, False, ("modelinfos", "triton"))
    found = launches(catalogue, 1, limit=9).launches
    assert [(launch.launch, launch.verdict) for launch in found] == [("warm", "used"), ("cold", "cold")]
    assert found[0].factors
    told = statistics(catalogue, 1)
    assert (told.total.saved_seconds, told.errors, told.missed[0].reason) == (33.0, {"mirror denied": 1}, "denied")
    knows = revision >= "0003"
    assert (told.total.saved_gpu_seconds, told.total.gpu_timed) == ((8 * 33.0, 1) if knows else (None, 0))
    older = statistics(catalogue, 2)
    sums = (older.total.starts, older.total.saved_seconds, older.errors, [each.starts for each in older.missed])
    assert sums == ((5, 132.0, {"mirror denied": 7}, [5]) if revision >= "0004" else (0, None, {}, []))
    assert (told.total.pulled, told.total.pushed) == ((Sent(7998, 2), Sent(0, 1)) if knows else (Sent(), Sent()))
    catalogue.close()


def test_migrations_make_the_tables_that_are_asked(catalogue: Catalogue) -> None:
    with catalogue.engine.connect() as connection:
        options = {"version_table": "cachemgr_version", "compare_type": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, schema.metadata) == []


def test_alembic_is_loaded_where_tables_are_old_and_nowhere_else(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cachemgr.catalogue.opened import open_catalogue;"
        "open_catalogue(None, Path(sys.argv[1])).close(); print('alembic' in sys.modules)"
    )
    told = [
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True).stdout
        for _time in range(2)
    ]
    assert told == ["True\n", "False\n"]


@pytest.mark.slow
def test_the_wheel_has_the_migrations_and_the_pages(tmp_path: Path) -> None:
    """Built as pip builds it, which fetches what builds it."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No matching distribution found for hatchling" in built.stderr:
        pytest.skip("what builds the wheel cannot be fetched")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    expected = {f"cachemgr/{path.relative_to(ROOT)}" for path in (ROOT / "migrations").rglob("*.py")}
    served = (ROOT / "cachemgr" / "server").rglob("*.*")
    expected |= {str(path.relative_to(ROOT)) for path in served if path.suffix in {".html", ".css", ".svg"}}
    assert expected <= names
    code = "from pathlib import Path; from cachemgr.catalogue import migrate, opened; print(migrate.scripts());"
    code += f"opened.open_catalogue(None, Path({str(tmp_path / 'home')!r})).close()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path / "installed")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{tmp_path / 'installed'}/cachemgr/migrations\n"


def _sqlite(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def _cut(path: Path) -> None:
    open_catalogue(None, path.parent).close()
    path.write_bytes(path.read_bytes()[:5000])


def _scribbled(path: Path) -> None:
    """Damage that only shows when its pages are read."""
    open_catalogue(None, path.parent).close()
    data = path.read_bytes()
    path.write_bytes(data[:8192] + b"\xff" * (len(data) - 8192))


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "noise": (lambda path: path.write_bytes(b"not a database" * 999), "damaged"),
    "cut": (_cut, "damaged"),
    "scribbled": (_scribbled, "damaged"),
    "another program's": (lambda path: _sqlite(path, "CREATE TABLE music (title TEXT)"), "foreign"),
    "newer": (
        lambda path: _sqlite(
            path, "CREATE TABLE cachemgr_version (version_num TEXT)", "INSERT INTO cachemgr_version VALUES ('9999')"
        ),
        "newer",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_file_that_cannot_be_used_is_set_aside_and_made_anew(tmp_path: Path, store: Store, kind: str) -> None:
    make, word = UNUSABLE[kind]
    home = tmp_path / "home"
    home.mkdir()
    path = home / "catalogue.db"
    make(path)
    before = path.read_bytes()
    (key,) = stocked(store, tmp_path, "1")
    said: list[str] = []

    def ask(catalogue: Catalogue) -> list[str]:
        source = refresh(catalogue, store, "one", [])
        return [summary.key for summary in artifacts(catalogue, source).artifacts]

    assert using(None, home, ask, said.append) == [key]
    (line,) = said
    assert line.endswith(f"it is catalogue.db.{word} now, and made anew from the store")
    assert (home / f"catalogue.db.{word}").read_bytes() == before
    assert using(None, home, ask, said.append) == [key]
    assert len(said) == 1, "said once"


def test_a_catalogue_that_another_process_makes_meanwhile_is_not_taken_for_another_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was, where the other one made its tables between two looks, and everything in it was lost."""
    (tmp_path / "catalogue.db").touch()
    other = threading.Thread(target=lambda: open_catalogue(None, tmp_path).close())
    said = migrate.revision

    def look(connection: Connection) -> str | None:
        found = said(connection)
        if other.ident is None:
            other.start()
            other.join(1)  # it has to wait where our look has not ended
        return found

    monkeypatch.setattr(migrate, "revision", look)
    catalogue = open_catalogue(None, tmp_path)
    other.join()
    assert catalogue.note == ""
    assert [path.name for path in tmp_path.glob("*.foreign")] == []
    catalogue.close()


def test_what_another_program_has_in_its_log_goes_aside_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA journal_mode=WAL")
    other.execute("CREATE TABLE music (title TEXT)")
    other.execute("INSERT INTO music VALUES ('one')")
    catalogue = open_catalogue(None, tmp_path)
    assert catalogue.note.startswith(f"{path} is no catalogue of cachemgr; it is catalogue.db.foreign now")
    catalogue.close()
    with closing(sqlite3.connect(f"{path}.foreign")) as aside:
        assert aside.execute("SELECT title FROM music").fetchall() == [("one",)]
    other.execute("INSERT INTO music VALUES ('two')")
    other.close()
    with closing(sqlite3.connect(f"{path}.foreign")) as aside:
        assert aside.execute("SELECT count(*) FROM music").fetchall() == [(2,)]


def test_a_damaged_file_that_cannot_be_set_aside_is_done_without(tmp_path: Path, store: Store) -> None:
    open_catalogue(None, tmp_path).close()
    (tmp_path / "catalogue.db.damaged" / "in the way").mkdir(parents=True)
    stocked(store, tmp_path, "1")
    said: list[str] = []

    def ask(opened: Catalogue) -> list[Summary]:
        if str(opened) != "memory":
            raise DamagedError("a page of it is damaged")
        return list(artifacts(opened, refresh(opened, store, "one", [])).artifacts)

    assert using(None, tmp_path, ask, said.append) == summaries(store, [])
    assert [line.endswith("everything is read from the store") for line in said] == [True]


def test_an_empty_file_is_a_new_catalogue(tmp_path: Path) -> None:
    (tmp_path / "catalogue.db").touch()
    catalogue = open_catalogue(None, tmp_path)
    assert catalogue.note == ""
    catalogue.close()
    assert [path.name for path in tmp_path.glob("*.damaged")] == []


def test_a_home_that_cannot_be_written_needs_none(tmp_path: Path, store: Store) -> None:
    (tmp_path / "file").write_text("in the way")
    stocked(store, tmp_path, "1")
    catalogue = open_catalogue(None, tmp_path / "file" / "home")
    assert catalogue.note.endswith("everything is read from the store")
    source = refresh(catalogue, store, "one", [])
    assert list(artifacts(catalogue, source).artifacts) == summaries(store, [])


def test_a_file_that_is_held_is_not_waited_for_longer_than_it_takes(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "BUSY_SECONDS", 0.1)
    stocked(store, tmp_path, "1")
    catalogue = open_catalogue(None, tmp_path)
    holder = sqlite3.connect(tmp_path / "catalogue.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    again = open_catalogue(None, tmp_path)
    assert again.note == "", "who only reads does not wait for who writes"
    again.close()
    with pytest.raises(DatabaseError, match="database is locked"):
        refresh(catalogue, store, "one", [])

    said: list[str] = []

    def ask(opened: Catalogue) -> list[Summary]:
        return list(artifacts(opened, refresh(opened, store, "one", [])).artifacts)

    assert using(None, tmp_path, ask, said.append) == summaries(store, [])
    assert [line.partition("cannot be used: ")[2] for line in said] == [
        "database is locked; everything is read from the store"
    ]
    holder.execute("ROLLBACK")
    assert using(None, tmp_path, ask, said.append) == summaries(store, [])
    assert len(said) == 1
    holder.close()
    catalogue.close()


def test_readers_do_not_wait_for_a_writer(tmp_path: Path, store: Store) -> None:
    plant(store, "a")
    catalogue = open_catalogue(None, tmp_path)
    source = refresh(catalogue, store, "one", [])
    writes, over = threading.Event(), threading.Event()

    def write(connection: Connection) -> None:
        connection.execute(text("DELETE FROM launch"))
        writes.set()
        over.wait(60)

    writer = threading.Thread(target=lambda: catalogue.write(write))
    writer.start()
    assert writes.wait(60)
    assert len(launches(catalogue, source, limit=9).launches) == 1
    over.set()
    writer.join()
    assert len(launches(catalogue, source, limit=9).launches) == 0
    catalogue.close()


def test_a_server_that_does_not_answer_is_one_sentence_without_its_password(tmp_path: Path) -> None:
    url = "postgresql://user:hunter2@127.0.0.1:1/fleet?application_name=hunter3"
    with pytest.raises(DatabaseError) as raised:
        open_catalogue(url, tmp_path)
    assert raised.value.exit_code == 13
    assert "the catalogue postgresql://127.0.0.1:1/fleet cannot be used" in str(raised.value)
    assert "hunter" not in str(raised.value)
    with pytest.raises(UsageError, match="cannot be read"):
        open_catalogue("postgresql://host:port/x", tmp_path)


def test_sessions_of_a_server_are_left_as_they_were(postgres: str, tmp_path: Path) -> None:
    """A pooler gives the next transaction another session, and this one to somebody else."""
    from tests.databases import made

    with closing(open_catalogue(made(postgres), tmp_path)) as catalogue:
        for run in (catalogue.read, catalogue.write):
            for _time in range(9):
                held = run(lambda connection: connection.execute(LIMITS).one())
                assert tuple(held) == ("10s", "1min")
        with catalogue.engine.connect() as connection:
            session = connection.connection.dbapi_connection
            assert session is not None
            cursor = session.cursor()
            cursor.execute(str(LIMITS))
            assert cursor.fetchone() == ("0", "0")
            cursor.execute("SELECT count(*) FROM pg_prepared_statements")
            assert cursor.fetchone() == (0,)


LIMITS = text("SELECT current_setting('lock_timeout'), current_setting('statement_timeout')")


def test_a_server_with_a_newer_catalogue_is_left_alone(postgres: str, tmp_path: Path) -> None:
    from tests.databases import made

    url = made(postgres)
    catalogue = open_catalogue(url, tmp_path)
    catalogue.write(lambda connection: connection.execute(text("UPDATE cachemgr_version SET version_num = '9999'")))
    catalogue.close()
    with pytest.raises(DatabaseError, match="made by a newer cachemgr"):
        open_catalogue(url, tmp_path)


def test_the_suite_has_both_kinds_of_database() -> None:
    assert DATABASES == ("sqlite", "postgresql")


def test_a_device_is_not_set_aside(store: Store, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    said: list[str] = []
    assert using(f"sqlite:///{tmp_path}/pipe", tmp_path, str, said.append) == "memory"
    assert said == [f"the catalogue cannot be {tmp_path}/pipe: it is no file; everything is read from the store"]
    assert (tmp_path / "pipe").is_fifo()
