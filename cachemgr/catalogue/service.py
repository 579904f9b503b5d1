"""What replicas of the service have in common beside the index: an audit of changes, and turns."""

import msgspec
from sqlalchemy import Connection, delete, insert, or_, select, update

from cachemgr.catalogue.opened import Catalogue
from cachemgr.catalogue.schema import audit, turn


class Change(msgspec.Struct, frozen=True):
    """A change that somebody asked for. `at` is RFC 3339 in UTC."""

    at: str
    who: str
    """The name of the token."""
    address: str
    what: str
    """Which operation."""
    about: str
    """The path that was asked for."""
    outcome: str
    """The status of the answer."""


def note(catalogue: Catalogue, change: Change) -> None:
    """Keep a line about a change."""
    row = msgspec.structs.asdict(change)
    catalogue.write(lambda connection: connection.execute(insert(audit), [row]))


def forget_changes(catalogue: Catalogue, *, before: str, most: int) -> int:
    """Forget lines about changes: those before this time (RFC 3339, UTC), and the oldest beyond the `most` newest ones;
    how many. Two statements."""

    def work(connection: Connection) -> int:
        newest = select(audit.c.id).order_by(audit.c.id.desc()).offset(most).limit(1)
        last = connection.execute(newest).scalar()
        old = audit.c.at < before
        gone = connection.execute(delete(audit).where(old if last is None else or_(old, audit.c.id <= last)))
        return gone.rowcount

    return catalogue.write(work)


def changes(catalogue: Catalogue, *, limit: int) -> tuple[Change, ...]:
    """The newest changes first. One statement."""
    statement = select(audit).order_by(audit.c.id.desc()).limit(limit)
    rows = catalogue.read(lambda connection: connection.execute(statement).all())
    return tuple(Change(row.at, row.who, row.address, row.what, row.about, row.outcome) for row in rows)


def take_turn(catalogue: Catalogue, name: str, owner: str, *, now: float, seconds: float) -> bool:
    """Whether `owner` is the one who does `name` until `seconds` from `now` (since the epoch). Two whose clocks differ
    may both be told so: a turn saves work, and nothing depends on it.

    Raises:
        DatabaseError: the catalogue failed, or somebody else took the first turn at the same moment.
    """

    def work(connection: Connection) -> bool:
        if connection.execute(select(turn.c.name).where(turn.c.name == name)).first() is None:
            connection.execute(insert(turn), [{"name": name, "owner": owner, "until": now + seconds}])
            return True
        free = or_(turn.c.owner == owner, turn.c.until < now)
        taken = update(turn).where(turn.c.name == name, free).values(owner=owner, until=now + seconds)
        return connection.execute(taken).rowcount == 1

    return catalogue.write(work)
