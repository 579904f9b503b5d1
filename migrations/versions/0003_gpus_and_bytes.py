"""How many GPUs waited for a start, and the bytes that it pulled, published and pushed.

All are empty for launches that are there already: their records do not say.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make four columns."""
    op.add_column("launch", sa.Column("gpus", sa.Integer))
    for name in ("pulled_bytes", "published_bytes", "pushed_bytes"):
        op.add_column("launch", sa.Column(name, sa.BigInteger))
