"""Time as an argument: below the command line nobody asks the system what time it is."""

import re
from datetime import datetime, timezone
from typing import Protocol

_TEXT = "%Y-%m-%dT%H:%M:%SZ"
_SPELLED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)


def epoch(text: str) -> float:
    """Seconds since the epoch of an RFC 3339 time in UTC and whole seconds, as we write them.

    Raises:
        ValueError: it is written otherwise.
    """
    if not _SPELLED.fullmatch(text):
        raise ValueError("must be a time such as 2027-01-31T12:00:00Z")
    return datetime.fromisoformat(text.removesuffix("Z") + "+00:00").timestamp()


def written(seconds: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime(_TEXT)


def moment(text: str) -> float:
    """Like `epoch`; a time that cannot be read is as old as can be."""
    try:
        return epoch(text)
    except ValueError:
        return 0.0


_AGES = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min"))


def age_of(text: str, now: float) -> str:
    """How long ago a time was, for people: in the largest unit that gives at least 1; `?` where it cannot be read."""
    try:
        value = now - epoch(text)
    except ValueError:
        return "?"
    for width, unit in _AGES:
        if value >= width:
            return f"{int(value // width)} {unit}"
    return f"{max(int(value), 0)} s"


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
