"""Bringing the tables of a catalogue to the newest revision: the only use of alembic, which is imported when needed."""

from pathlib import Path

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

_VERSION = text("SELECT version_num FROM cachemgr_version")
_LOCK = 0x63616368656D6772
"""The advisory lock under which one process of a fleet migrates; `cachemgr` in hexadecimal."""


def scripts() -> Path:
    """Where the migrations are: inside the package as it is installed, beside it in a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def revision(connection: Connection) -> str | None:
    """The revision of a database; None where it has none. One statement, in a transaction of its own."""
    try:
        found = connection.execute(_VERSION).scalar()
    except DBAPIError as error:
        connection.rollback()
        if _says_no_table(error):
            return None
        raise
    connection.rollback()
    return None if found is None else str(found)


def _says_no_table(error: DBAPIError) -> bool:
    """SQLite has one code for all errors of a statement; PostgreSQL says `undefined_table`."""
    return "no such table" in str(error.orig) or getattr(error.orig, "sqlstate", None) == "42P01"


def known() -> frozenset[str]:
    """Every revision that this cachemgr can read."""
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", _escaped(scripts()))
    return frozenset(each.revision for each in ScriptDirectory.from_config(config).walk_revisions())


def upgrade(connection: Connection, to: str = "head") -> None:
    """Make the tables, or bring them from any revision to `to`, in the transaction of `connection`.

    One at a time: whoever waited finds that nothing is left to do.
    """
    from alembic import command
    from alembic.config import Config

    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    config = Config()
    config.set_main_option("script_location", _escaped(scripts()))
    config.attributes["connection"] = connection
    command.upgrade(config, to)


def _escaped(path: Path) -> str:
    """A path for a value that is interpolated."""
    return str(path).replace("%", "%%")
