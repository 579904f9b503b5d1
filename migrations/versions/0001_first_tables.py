"""The first tables: stores, artifacts, launches.

Every revision that was released stays as it is; `tests/data/catalogue` has rows of each.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make all tables."""
    op.create_table(
        "source",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
    )
    op.create_table("listed", _source("listed"), sa.Column("name", sa.Text, primary_key=True), sqlite_with_rowid=False)
    _launches()
    _artifacts()


def _source(table: str) -> sa.Column[int]:
    key = sa.ForeignKey("source.id", name=f"fk_{table}_source", ondelete="CASCADE")
    return sa.Column("source", sa.Integer, key, primary_key=True)


def _launch(table: str) -> sa.Column[str]:
    key = sa.ForeignKey("launch.launch", name=f"fk_{table}_launch", ondelete="CASCADE")
    return sa.Column("launch", sa.Text, key, primary_key=True)


def _launches() -> None:
    op.create_table(
        "launch",
        sa.Column("launch", sa.Text, primary_key=True),
        sa.Column("started", sa.Text, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("result", sa.Text, nullable=False),
        sa.Column("artifact", sa.Text),
        sa.Column("found_in", sa.Text),
        sa.Column("verdict", sa.Text, nullable=False),
        sa.Column("ended", sa.Boolean, nullable=False),
        sa.Column("exit_code", sa.Integer),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("engine_version", sa.Text),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("miss", sa.Text),
        sa.Column("blamed", sa.Text),
        sa.Column("restored_files", sa.BigInteger, nullable=False),
        sa.Column("restored_bytes", sa.BigInteger, nullable=False),
        sa.Column("restore_seconds", sa.Float, nullable=False),
        sa.Column("added", sa.BigInteger, nullable=False),
        sa.Column("added_after_ready", sa.BigInteger, nullable=False),
        sa.Column("timed_phase", sa.Text),
        sa.Column("timed_seconds", sa.Float),
        sa.Column("best_seconds", sa.Float),
        sa.Column("published", sa.Text),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_launch_started_launch", "launch", ["started", "launch"])
    op.create_index("ix_launch_host_started", "launch", ["host", "started"])
    op.create_index("ix_launch_artifact", "launch", ["artifact"])
    op.create_table("told", _source("told"), _launch("told"), sqlite_with_rowid=False)
    op.create_table(
        "launch_error",
        _launch("launch_error"),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("count", sa.Integer, nullable=False),
    )
    op.create_table(
        "factor_set",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("factors", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "cold_start",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("run", sa.Float),
        sa.Column("init_engine", sa.Float),
    )


def _artifacts() -> None:
    op.create_table(
        "artifact",
        _source("artifact"),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("manifests", sa.Text, nullable=False),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("engine_version", sa.Text),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("domains", sa.Text, nullable=False),
        sa.Column("files", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("stored_bytes", sa.BigInteger, nullable=False),
        sa.Column("captures", sa.Integer, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("created", sa.Text, nullable=False),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("cold_seconds", sa.Float),
    )
    op.create_index("ix_artifact_source_created_key", "artifact", ["source", "created", "key"])
    op.create_table(
        "layer",
        _source("layer"),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("layer", sa.Text, primary_key=True),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("tar_size", sa.BigInteger, nullable=False),
    )
