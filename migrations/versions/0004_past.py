"""Old launches, added up by day, and the day from which a store's launches are kept one by one."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_COUNTS = (
    *("starts", "timed", "gpu_timed", "files", "bytes", "added"),
    *("pulled_bytes", "pulled_starts", "published_bytes", "published_starts", "pushed_bytes", "pushed_starts"),
    *(f"{what}_{each}" for what in ("restore", "publish") for each in ("count", *range(8))),
)


def upgrade() -> None:
    """Make two tables and a column."""
    op.add_column("source", sa.Column("rolled", sa.Text))
    op.create_table(
        "past",
        sa.Column("id", sa.Integer, primary_key=True),
        _source("past"),
        sa.Column("day", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("engine_version", sa.Text),
        sa.Column("result", sa.Text, nullable=False),
        sa.Column("verdict", sa.Text, nullable=False),
        sa.Column("artifact", sa.Text),
        sa.Column("miss", sa.Text),
        sa.Column("blamed", sa.Text),
        sa.Column("timed_phase", sa.Text),
        sa.Column("last", sa.Text, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in _COUNTS),
        *(sa.Column(name, sa.Float, nullable=False) for name in ("seconds", "restore_total", "publish_total")),
        *(sa.Column(name, sa.Float) for name in ("saved", "gpu_saved", "timed_seconds", "best")),
    )
    op.create_index("ix_past_source_day", "past", ["source", "day"])
    op.create_index("ix_past_artifact", "past", ["artifact"])
    op.create_table(
        "past_error",
        sa.Column("id", sa.Integer, primary_key=True),
        _source("past_error"),
        sa.Column("day", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("engine_version", sa.Text),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("count", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_past_error_source_day", "past_error", ["source", "day"])


def _source(table: str) -> sa.Column[int]:
    key = sa.ForeignKey("source.id", name=f"fk_{table}_source", ondelete="CASCADE")
    return sa.Column("source", sa.Integer, key, nullable=False)
