"""What a check looks at, and what it says."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from cachemgr.cache import Cache
from cachemgr.errors import CacheError
from cachemgr.settings import Settings

Severity = Literal["ok", "note", "warning", "error"]
"""`error`: something that was asked for does not work; `warning`: it works worse than it could, or less safely;
`note`: worth knowing."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that a check saw."""

    severity: Severity
    about: str
    """The thing: a setting, a variable, a directory."""
    what: str
    hint: str = ""
    """What to type or write, if there is something to do: always in warnings and errors."""


class Opened(msgspec.Struct, frozen=True):
    """Settings that could be read, and the cache that they describe."""

    settings: Settings
    cache: Cache


class Patient(msgspec.Struct, frozen=True):
    """A machine as one command would find it."""

    environ: Mapping[str, str]
    cwd: Path
    host: str
    now: float
    """Seconds since the epoch."""
    opened: Opened | CacheError
    """The error says why settings cannot be read."""
    argv: tuple[str, ...] = ()
    """The command line that is asked about; empty for none."""
    uid: int = -1
    """The user who will serve; ourselves unless told."""

    @property
    def serving(self) -> int:
        """The id of the user who will serve."""
        return os.geteuid() if self.uid < 0 else self.uid


def ok(about: str, what: str) -> Finding:
    """It is as it should be."""
    return Finding("ok", about, what)


def note(about: str, what: str, hint: str = "") -> Finding:
    """Worth knowing."""
    return Finding("note", about, what, hint)


def warning(about: str, what: str, hint: str) -> Finding:
    """It works worse than it could; the hint says what to type."""
    return Finding("warning", about, what, hint)


def error(about: str, what: str, hint: str) -> Finding:
    """It does not work; the hint says what to type."""
    return Finding("error", about, what, hint)
