"""Time as an argument: below the command line nobody asks the system what time it is."""

from typing import Protocol


class Clock(Protocol):
    """What a launch needs of time; the real one is in `cachemgr.cli.session`."""

    def now_ns(self) -> int:
        """Nanoseconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds that only grow."""

    def text(self) -> str:
        """Now, as RFC 3339 in UTC."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
