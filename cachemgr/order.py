"""An order to launch a command, and what those are told who listen."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from cachemgr.capture import Launch
from cachemgr.key import Factor, Key
from cachemgr.lookup import Found
from cachemgr.publish import Published
from cachemgr.warm import Restored

LAUNCH_VARIABLE = "CACHEMGR_LAUNCH"
KEY_VARIABLE = "CACHEMGR_KEY"
PINNED_VARIABLE = "CACHEMGR_PINNED"


class Sender(msgspec.Struct, frozen=True):
    """The command that sends what waits for the mirror."""

    argv: tuple[str, ...]
    environ: dict[str, str]


class Reporter(msgspec.Struct, frozen=True):
    """The command that tells a service about launches."""

    server: str
    """The URL of the service."""
    argv: tuple[str, ...]
    environ: dict[str, str]


class Part(msgspec.Struct, frozen=True):
    """One node's part of a launch that another machine is in charge of."""

    of: str
    """The name of that launch."""
    desk: str
    """The name that the workers of this node know."""
    ranks: tuple[str, ...]
    """Some of the ranks of this node."""
    factors: tuple[Factor, ...]
    """Those of the launch; its guards are this machine's affair."""


class Order(msgspec.Struct, frozen=True):
    """What to launch, and how. Everything that the outside world decides is in here."""

    argv: tuple[str, ...]
    environ: dict[str, str]
    cwd: Path
    launch: str
    host: str
    publish: Literal["never", "local", "mirror"]
    read_only: bool
    strict: bool
    ignored_args: tuple[str, ...]
    deadline: float
    """Seconds that what we do may take, each time that somebody waits for it."""
    wait: float
    ready_file: Path | None
    also: tuple[str, ...] = ()
    """Names of domains that are kept on request only."""
    single_flight: float = 0.0
    """Seconds to wait for another machine that compiles the same key; 0 asks nobody."""
    waits_at_lookup: bool = False
    """Whether that is when the engine asks for an entry, with its weights loaded, and not before it starts."""
    sender: Sender | None = None
    """None where nothing goes to a mirror."""
    reporter: Reporter | None = None
    """None where no service is told about the launch."""
    left: float | None = None
    """What is left of the deadline before the start, where somebody has been waiting already; None for all of it."""
    engine_args: dict[str, object] | None = None
    """What a program asked vLLM for, where the command line does not say it."""
    budget: int = 0
    """Bytes that store and live directories may take of this host's disks; 0 is no limit."""
    auto_prune: bool = True
    """Whether room is made when that is nearly full."""
    never_publish: tuple[str, ...] = ()
    """Patterns of names of models and programs."""
    part: Part | None = None
    executes: tuple[str, ...] | None = None
    """What is started in place of `argv`, where that differs from it only in what does not shape what is compiled:
    weights that mean nothing, another port. `argv` is what the key and the capture are of."""

    @property
    def command(self) -> tuple[str, ...]:
        """What is started."""
        return self.argv if self.executes is None else self.executes

    @property
    def publishes(self) -> bool:
        return self.publish != "never" and not self.read_only

    def withholds(self, model: str) -> str | None:
        """The pattern for which nothing about a model is written to a store, or None."""
        name = model.lower()  # names of a hub differ in more than case
        return next((pattern for pattern in self.never_publish if fnmatchcase(name, pattern.lower())), None)


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


@dataclass(frozen=True)
class UnderWay:
    """A command that runs, for somebody who goes along with it."""

    pid: int
    ended: threading.Event
    """Set when it has ended."""
    ready: Callable[[], bool]
    """Whether it has given its ready sign; never for a command whose engine nobody knows."""


Companion = Callable[[UnderWay], None]
"""Goes along with a command, in a thread of its own: asks a server, waits, tells it to end. What it raises is said, and
stops nothing. It has to return soon after the command has ended."""
