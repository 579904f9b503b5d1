"""Limits and the choice: which of many things have to go so that all limits hold, the least recently used ones first.

Pure. Things may share parts (layers, which several artifacts refer to); a part goes with the last thing that has it, so
what is counted is what is freed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from cachemgr import sizes


class Limits(msgspec.Struct, frozen=True):
    """What a person or a setting asks for; each is one more reason to go. Sizes in bytes, ages in seconds."""

    max_size: int | None = None
    max_files: int | None = None
    min_free: int | None = None
    """Of the file system."""
    older_than: float | None = None
    """Since it was made."""
    unused_for: float | None = None
    keep_last: int | None = None
    """Per model and device, by last use."""
    free_up: int | None = None
    """Bytes that are to go."""


class Part(NamedTuple):
    """Bytes that go together; two things that name the same part share it."""

    name: str
    bytes: int
    files: int


class Item(msgspec.Struct, frozen=True):
    """One thing that may go. Times in seconds since the epoch."""

    name: str
    group: str
    """Among which `keep_last` counts: its model and device."""
    created: float
    used: float
    """Last use by our own records; when it was made, if none tells."""
    parts: tuple[Part, ...]
    kept: str = ""
    """Why it stays whatever the limits say; empty where it need not."""
    unfit: str = ""
    """Why it goes whatever the limits say; empty where it need not."""


class Goner(msgspec.Struct, frozen=True):
    """A thing that goes, and why. `bytes` and `files` are what that frees."""

    name: str
    why: str
    bytes: int
    files: int


class Kept(msgspec.Struct, frozen=True):
    """A thing that would go, and why it stays."""

    name: str
    why: str
    kept: str


class Choice(msgspec.Struct, frozen=True):
    """What goes, in the order in which it was chosen; what stays although a limit asks for it; limits that cannot be
    reached."""

    goners: tuple[Goner, ...]
    kept: tuple[Kept, ...]
    notes: tuple[str, ...]


def ranks(items: Iterable[Item]) -> dict[str, int]:
    """Per thing, how many of its group were used later."""
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups[item.group].append(item)
    return {
        item.name: rank
        for group in groups.values()
        for rank, item in enumerate(sorted(group, key=lambda item: (-item.used, item.name)))
    }


def choose(items: Sequence[Item], limits: Limits, *, now: float, free: int = 0, going: int = 0) -> Choice:
    """What has to go. `free` is how many bytes the file system has now, `going` how many more it will have anyway: what
    was chosen before and is not gone yet must not be made up for by more."""
    return _Choosing(items, limits, now, free, going).choice()


class _Choosing:
    def __init__(self, items: Sequence[Item], limits: Limits, now: float, free: int, going: int) -> None:
        self._items, self._limits, self._now = items, limits, now
        self._shares = Counter(part.name for item in items for part in set(item.parts))
        parts = {part.name: part for item in items for part in item.parts}.values()
        self._bytes, self._files = sum(part.bytes for part in parts), sum(part.files for part in parts)
        self._free, self._freed = free + going, going
        self._goners: list[Goner] = []
        self._kept: list[Kept] = []

    def choice(self) -> Choice:
        ranked = ranks(self._items) if self._limits.keep_last is not None else {}
        reasons = {item.name: self._reason(item, ranked) for item in self._items}
        order = sorted(self._items, key=lambda item: (item.used, item.created, item.name))
        for item in order:
            if reasons[item.name]:
                self._settle(item, reasons[item.name])
        for item in order:
            why = "" if reasons[item.name] else self._excess()
            if why:
                self._settle(item, why)
        excess = self._excess()
        notes = (f"{excess}, and what is left is kept",) if excess else ()
        return Choice(tuple(self._goners), tuple(self._kept), notes)

    def _settle(self, item: Item, why: str) -> None:
        if item.kept:
            self._kept.append(Kept(item.name, why, item.kept))
        else:
            self._take(item, why)

    def _take(self, item: Item, why: str) -> None:
        freed = [part for part in set(item.parts) if self._shares[part.name] == 1]
        self._shares.subtract(part.name for part in set(item.parts))
        goner = Goner(item.name, why, sum(part.bytes for part in freed), sum(part.files for part in freed))
        self._bytes -= goner.bytes
        self._files -= goner.files
        self._free += goner.bytes
        self._freed += goner.bytes
        self._goners.append(goner)

    def _reason(self, item: Item, ranked: Mapping[str, int]) -> str:
        limits, now = self._limits, self._now
        if item.unfit:
            return item.unfit
        if limits.older_than is not None and now - item.created > limits.older_than:
            return f"made {_days(now - item.created)} ago"
        if limits.unused_for is not None and now - item.used > limits.unused_for:
            return f"not used for {_days(now - item.used)}"
        if limits.keep_last is not None and ranked[item.name] >= limits.keep_last:
            return f"{limits.keep_last} others of its model and device were used later"
        return ""

    def _excess(self) -> str:
        limits = self._limits
        if limits.max_size is not None and self._bytes > limits.max_size:
            return f"{sizes.spell(self._bytes)} are more than {sizes.spell(limits.max_size)}"
        if limits.max_files is not None and self._files > limits.max_files:
            return f"{self._files:,} files are more than {limits.max_files:,}"
        if limits.min_free is not None and self._free < limits.min_free:
            return f"{sizes.spell(self._free)} free are less than {sizes.spell(limits.min_free)}"
        if limits.free_up is not None and self._freed < limits.free_up:
            return f"{sizes.spell(limits.free_up - self._freed)} more should go"
        return ""


def _days(seconds: float) -> str:
    return f"{seconds / 86400:.0f} days" if seconds >= 2 * 86400 else f"{seconds / 3600:.0f} h"
