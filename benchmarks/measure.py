"""Paired timing: A and B take turns in one run, so that both meet the same noise, and their ratio is taken per pair."""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Step = Callable[[], float]
"""Does one thing once and returns what it cost, mostly seconds."""


@dataclass(frozen=True)
class Paired:
    """What A and B cost in each round."""

    ours: tuple[float, ...]
    peer: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """A over B, round by round, sorted."""
        return sorted(a / b for a, b in zip(self.ours, self.peer, strict=True))

    @property
    def added(self) -> list[float]:
        """A minus B, round by round, sorted."""
        return sorted(a - b for a, b in zip(self.ours, self.peer, strict=True))


def paired(ours: Step, peer: Step, *, rounds: int) -> Paired:
    """A B A B …, after one pair that warms caches and does not count."""
    pairs = [(ours(), peer()) for _ in range(rounds + 1)][1:]
    return Paired(tuple(a for a, _b in pairs), tuple(b for _a, b in pairs))


def timed(step: Callable[[], object]) -> float:
    """Seconds that `step` takes once what others left to write is on disk."""
    os.sync()
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """`median (min-max)`."""
    return f"{median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The k of cost = c * size**k by least squares over logarithms: 1 is linear."""
    return statistics.linear_regression([math.log(n) for n in sizes], [math.log(c) for c in costs]).slope


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
