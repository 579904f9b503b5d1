"""Levels: the stores that a look-up goes through, in order: `local`, then each `seed`, then the `mirror`.

A seed is a store that only gives: one in an image or on a read-only volume. What a launch makes goes to the local
store. An artifact has the same key in every level: values of unknown names are sealed alike everywhere
(`cachemgr.digest.sealed`), so a launch is described once, without asking any store, and captures travel between levels
as they are, under the key and the digest that they have.
"""

from pathlib import Path

import msgspec

from cachemgr.capture import Where
from cachemgr.store import Store
from cachemgr.store.captures import Judge, unasked
from cachemgr.trust import Policy


class Level(msgspec.Struct, frozen=True):
    """One store that a look-up reads, and how much what lies in it is believed."""

    where: Where
    store: Store
    policy: Policy
    heads: Path | None = None
    """The file that remembers the heads of its captures; None where nothing is remembered."""
    judge: Judge = unasked
    """Who decides by that policy which of its captures may be used."""
    because: str = ""
    """Why more is asked of it than one would think, for people."""
    closed: str | None = None
    """Why it is not read at all; None for one that is."""

    def __str__(self) -> str:
        return f"the {self.where} store {self.store}" if self.where == "local" else f"{self.where} {self.store}"
