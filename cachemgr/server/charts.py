"""Charts as SVG that the server draws: bars over days, stacked bars of phases. Each is beside a table that says the
same, which is what a screen reader reads."""

from collections.abc import Mapping, Sequence

import msgspec

WIDTH = 720.0
HEIGHT = 140.0
_GAP = 0.2
_PHASES = ("publish", "run")
"""Phases that do not belong to a start: after it, or all of it."""


class Bar(msgspec.Struct, frozen=True):
    """One rectangle; lengths are in the units of the drawing."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    """A class of the style sheet."""
    says: str
    """What a pointer that rests on it is told."""


def over_days(values: Sequence[tuple[str, float | None, str]], *, most: float | None = None) -> tuple[Bar, ...]:
    """A bar for each day: its name, its value and what it says. `most` is the value of a full bar, the largest one
    unless told."""
    top = max([value for _day, value, _says in values if value is not None and value > 0], default=0.0)
    top = top if most is None else most
    if not values or top <= 0:
        return ()
    step = min(WIDTH / len(values), WIDTH / 14)
    bars = []
    for number, (_day, value, says) in enumerate(values):
        height = HEIGHT * max(0.0, min((value or 0.0) / top, 1.0))
        if value is not None:
            bars.append(Bar(number * step, HEIGHT - height, step * (1 - _GAP), height, "value", says))
    return tuple(bars)


class Part(msgspec.Struct, frozen=True):
    """A share of a stacked bar."""

    name: str
    seconds: float
    bar: Bar


def stacked(phases: Mapping[str, float], restore_seconds: float) -> tuple[Part, ...]:
    """The phases of one start side by side, as long as they took, the restore first."""
    named = {"restore": restore_seconds, **{name: each for name, each in phases.items() if name not in _PHASES}}
    if len(named) == 1 and "run" in phases:
        named["run"] = phases["run"]
    found = [(name, seconds) for name, seconds in named.items() if seconds > 0]
    total = sum(seconds for _name, seconds in found)
    parts, at = [], 0.0
    for number, (name, seconds) in enumerate(found):
        width = WIDTH * seconds / total
        parts.append(Part(name, seconds, Bar(at, 0, width, 24, f"part-{number % 8}", f"{name} {seconds:.1f} s")))
        at += width
    return tuple(parts)


def against(cold: float | None, warm: float | None) -> tuple[Bar, ...]:
    """Two bars: seconds of a cold start, and of a warm one."""
    if cold is None or warm is None or max(cold, warm) <= 0:
        return ()
    longest = max(cold, warm)
    return tuple(
        Bar(0, at * 30, WIDTH * seconds / longest, 24, kind, f"{kind} {seconds:.1f} s")
        for at, (kind, seconds) in enumerate((("cold", cold), ("warm", warm)))
    )
