"""A line for each change: on stderr as JSON, for whoever gathers logs, and as a row in the database."""

from collections.abc import Callable
from contextlib import suppress

import msgspec

from cachemgr.catalogue.service import Change, note
from cachemgr.errors import DatabaseError
from cachemgr.server.access import Visitor
from cachemgr.server.backend import Backend

Say = Callable[[str], None]


class Audit:
    """Keeps the lines."""

    def __init__(self, backend: Backend, say: Say) -> None:
        self._backend, self._say = backend, say

    def note(self, visitor: Visitor, *, address: str, what: str, about: str, status: int) -> None:
        """Somebody asked for a change, and this is how it ended. A database that fails costs the row, not the line."""
        # What a database cannot hold must not keep the line out of it.
        path = "".join(letter if letter.isprintable() else "\ufffd" for letter in about[:1000])
        change = Change(self._backend.clock.text(), visitor.name, address, what, path, str(status))
        self._say(msgspec.json.encode({"audit": change}).decode())
        with suppress(DatabaseError):
            note(self._backend.catalogue, change)
