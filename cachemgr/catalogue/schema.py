"""The tables. What `migrations/` builds up to `REVISION` is what stands here; a test compares the two.

Times are RFC 3339 in UTC, which sort as texts; sizes are bytes, durations are seconds.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)

REVISION = "0004"
"""The newest revision of `migrations/`."""

metadata = MetaData(
    naming_convention={"ix": "ix_%(table_name)s_%(column_0_N_name)s", "fk": "fk_%(table_name)s_%(column_0_name)s"}
)


def _source() -> "Column[int]":
    return Column("source", ForeignKey("source.id", ondelete="CASCADE"), primary_key=True)


source = Table(
    "source",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("rolled", Text),
)
"""The stores that were read, by the names of `cachemgr.catalogue.sources`. Launches that started before the day
`rolled` are in `past`, and are not taken any more."""

listed = Table("listed", metadata, _source(), Column("name", Text, primary_key=True), sqlite_with_rowid=False)
"""Objects of launch records that are in the catalogue. They never change, so none is read twice."""

launch = Table(
    "launch",
    metadata,
    Column("launch", Text, primary_key=True),
    Column("started", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("result", Text, nullable=False),
    Column("artifact", Text),
    Column("found_in", Text),
    Column("verdict", Text, nullable=False),
    Column("ended", Boolean, nullable=False),
    Column("exit_code", Integer),
    Column("engine", Text, nullable=False),
    Column("engine_version", Text),
    Column("model", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("miss", Text),
    Column("blamed", Text),
    Column("restored_files", BigInteger, nullable=False),
    Column("restored_bytes", BigInteger, nullable=False),
    Column("restore_seconds", Float, nullable=False),
    Column("added", BigInteger, nullable=False),
    Column("added_after_ready", BigInteger, nullable=False),
    Column("timed_phase", Text),
    Column("timed_seconds", Float),
    Column("best_seconds", Float),
    Column("published", Text),
    Column("publish_seconds", Float),
    Column("gpus", Integer),
    Column("pulled_bytes", BigInteger),
    Column("published_bytes", BigInteger),
    Column("pushed_bytes", BigInteger),
    Column("record", LargeBinary, nullable=False),
    Index(None, "started", "launch"),
    Index(None, "host", "started"),
    Index(None, "artifact"),
)
"""Starts. `miss` and `blamed` say why one was not warm (`cachemgr.explain.miss`); `timed_phase` and `timed_seconds` are
what can be compared with a cold start (`cachemgr.history.timed`); `gpus` and the bytes that a start pulled, published
and pushed are NULL where its record does not say; `record` is the rest, as compressed JSON."""

told = Table(
    "told",
    metadata,
    _source(),
    Column("launch", ForeignKey("launch.launch", ondelete="CASCADE"), primary_key=True),
    sqlite_with_rowid=False,
)
"""Which store has the record of which launch."""

launch_error = Table(
    "launch_error",
    metadata,
    Column("launch", ForeignKey("launch.launch", ondelete="CASCADE"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("count", Integer, nullable=False),
)
"""What was swallowed, by name."""

_COUNTS = (
    *("starts", "timed", "gpu_timed", "files", "bytes", "added"),
    *("pulled_bytes", "pulled_starts", "published_bytes", "published_starts", "pushed_bytes", "pushed_starts"),
    *(f"{what}_{each}" for what in ("restore", "publish") for each in ("count", *range(8))),
)

past = Table(
    "past",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("source", ForeignKey("source.id", ondelete="CASCADE"), nullable=False),
    Column("day", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("engine_version", Text),
    Column("result", Text, nullable=False),
    Column("verdict", Text, nullable=False),
    Column("artifact", Text),
    Column("miss", Text),
    Column("blamed", Text),
    Column("timed_phase", Text),
    Column("last", Text, nullable=False),
    *(Column(name, BigInteger, nullable=False) for name in _COUNTS),
    *(Column(name, Float, nullable=False) for name in ("seconds", "restore_total", "publish_total")),
    *(Column(name, Float) for name in ("saved", "gpu_saved", "timed_seconds", "best")),
    Index(None, "source", "day"),
    Index(None, "artifact"),
)
"""What old launches of one day add up to that have all of the texts in common (`cachemgr.catalogue.past`)."""

past_error = Table(
    "past_error",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("source", ForeignKey("source.id", ondelete="CASCADE"), nullable=False),
    Column("day", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("engine_version", Text),
    Column("name", Text, nullable=False),
    Column("count", BigInteger, nullable=False),
    Index(None, "source", "day"),
)
"""What old launches have swallowed, by name."""

factor_set = Table(
    "factor_set", metadata, Column("key", Text, primary_key=True), Column("factors", LargeBinary, nullable=False)
)
"""What keys were made of, as compressed JSON: once a key, however many launches it had."""

cold_start = Table(
    "cold_start",
    metadata,
    Column("key", Text, primary_key=True),
    Column("run", Float),
    Column("init_engine", Float),
)
"""Seconds of the cold start that made an artifact. They stay when the artifact goes, so that what it saved does."""

artifact = Table(
    "artifact",
    metadata,
    _source(),
    Column("key", Text, primary_key=True),
    Column("manifests", Text, nullable=False),
    Column("engine", Text, nullable=False),
    Column("engine_version", Text),
    Column("model", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("domains", Text, nullable=False),
    Column("files", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("stored_bytes", BigInteger, nullable=False),
    Column("captures", Integer, nullable=False),
    Column("complete", Boolean, nullable=False),
    Column("created", Text, nullable=False),
    Column("pinned", Boolean, nullable=False),
    Column("cold_seconds", Float),
    Index(None, "source", "created", "key"),
)
"""Artifacts of a store; `manifests` is a print of the names of their manifests, so that a change shows in a listing."""

layer = Table(
    "layer",
    metadata,
    _source(),
    Column("key", Text, primary_key=True),
    Column("layer", Text, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("tar_size", BigInteger, nullable=False),
)
"""Layers that artifacts refer to; `size` is of the compressed object, `tar_size` of what is in it."""

token = Table(
    "token",
    metadata,
    Column("name", Text, primary_key=True),
    Column("digest", Text, nullable=False, unique=True),
    Column("role", Text, nullable=False),
    Column("created", Text, nullable=False),
    Column("expires", Text),
    Column("revoked", Text),
)
"""Tokens of the service: only digests of them."""

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", Text, nullable=False),
    Column("who", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("what", Text, nullable=False),
    Column("about", Text, nullable=False),
    Column("outcome", Text, nullable=False),
)
"""Each change that somebody asked the service for."""

turn = Table(
    "turn",
    metadata,
    Column("name", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("until", Float, nullable=False),
)
"""Which replica of the service does what needs to be done once, until when (seconds since the epoch)."""
