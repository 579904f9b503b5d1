"""An order to launch a command, and what those are told who listen."""

from pathlib import Path
from typing import Literal, Protocol

import msgspec

from cachemgr.capture import Launch
from cachemgr.key import Key
from cachemgr.lookup import Found
from cachemgr.publish import Published
from cachemgr.warm import Restored

LAUNCH_VARIABLE = "CACHEMGR_LAUNCH"
KEY_VARIABLE = "CACHEMGR_KEY"
PINNED_VARIABLE = "CACHEMGR_PINNED"


class Order(msgspec.Struct, frozen=True):
    """What to launch, and how. Everything that the outside world decides is in here."""

    argv: tuple[str, ...]
    environ: dict[str, str]
    cwd: Path
    launch: str
    host: str
    publish: Literal["never", "local"]
    read_only: bool
    strict: bool
    ignored_args: tuple[str, ...]
    deadline: float
    wait: float
    ready_file: Path | None
    also: tuple[str, ...] = ()
    """Names of domains that are kept on request only."""

    @property
    def publishes(self) -> bool:
        return self.publish != "never" and not self.read_only


class Started(msgspec.Struct, frozen=True):
    """What is known when the command is about to start."""

    key: Key
    found: Found
    restored: Restored
    seconds: float
    trouble: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What a person should know about how the command was read, and about captures that this host does not use."""


class Told(msgspec.Struct, frozen=True):
    """What is known when the command is ready and has come to rest, or has ended, and its capture is stored."""

    launch: Launch
    published: Published
    cold: dict[str, float]
    """Seconds per phase of a cold start of the same."""
    trouble: tuple[str, ...]
    advice: tuple[str, ...] = ()
    """What somebody should do about it."""


class Listener(Protocol):
    """Who tells a person about a launch."""

    def note(self, line: str) -> None: ...
    def started(self, event: Started) -> None: ...
    def ready(self, event: Told) -> None: ...
    def finished(self, event: Told) -> None: ...
