"""What launch records tell about an artifact: last use, verdicts and seconds saved, for a host or a fleet.

Records are folded one by one, so that a store with those of many months needs no memory for them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from cachemgr.capture import Launch, Verdict
from cachemgr.key import Key

T = TypeVar("T")

WARM = frozenset[Verdict]({"used", "partly used"})
"""The verdicts of starts that used what was restored."""


class Timed(msgspec.Struct, frozen=True):
    """Warm starts of which one phase was timed, in seconds, the restore before it included."""

    starts: int = 0
    total: float = 0.0


class History(msgspec.Struct, frozen=True):
    """How an artifact has served the launches that took from it."""

    uses: int = 0
    last_used: str | None = None
    """RFC 3339, UTC."""
    verdicts: dict[Verdict, int] = {}
    warm_seconds: float | None = None
    """The shortest run of a launch that added nothing."""
    timed: dict[str, Timed] = {}
    """Per phase."""
    cold: dict[str, float] = {}
    """Seconds per phase of the cold start that made it, where the teller knows."""

    def saved_seconds(self, cold: Mapping[str, float]) -> float | None:
        """What warm starts saved against one cold start with these seconds per phase; None when none can be compared.

        Less than nothing is said as such.
        """
        saved = [times.starts * cold[phase] - times.total for phase, times in self.timed.items() if phase in cold]
        return sum(saved) if saved else None


NO_HISTORY = History()


def fold(launches: Iterable[Launch]) -> dict[Key, History]:
    """The history of each artifact that launches took from."""
    found: dict[Key, History] = {}
    for launch in launches:
        if launch.artifact is not None and launch.result != "none":
            found[launch.artifact] = _with(found.get(launch.artifact, NO_HISTORY), launch)
    return found


def _with(history: History, launch: Launch) -> History:
    runs = [seconds for seconds in (history.warm_seconds, best(launch)) if seconds is not None]
    return History(
        uses=history.uses + 1,
        last_used=max(history.last_used or "", launch.started),
        verdicts=dict(Counter(history.verdicts) + Counter([launch.verdict])),
        warm_seconds=min(runs, default=None),
        timed=_timed(history.timed, launch),
    )


def _timed(held: Mapping[str, Timed], launch: Launch) -> dict[str, Timed]:
    found = timed(launch)
    if found is None:
        return dict(held)
    phase, seconds = found
    before = held.get(phase, Timed())
    return {**held, phase: Timed(before.starts + 1, before.total + seconds)}


def timed(launch: Launch) -> tuple[str, float] | None:
    """The phase of a warm start that can be compared with a cold one, and its seconds with the restore before it.

    An engine says how long its start took; the whole run of anything else that ended well is its start.
    """
    phase = "init_engine" if launch.engine == "vllm" else "run"
    ended = phase != "run" or launch.exit_code == 0
    if launch.verdict not in WARM or phase not in launch.phases or not ended:
        return None
    return phase, launch.phases[phase] + launch.restore_seconds


def best(launch: Launch) -> float | None:
    """Seconds of the run of a launch that added nothing."""
    return launch.phases.get("run") if launch.verdict == "used" else None


class LastUses(msgspec.Struct, frozen=True):
    """When things were last used by launches, as RFC 3339 in UTC."""

    artifacts: dict[Key, str] = {}
    """Taken from."""
    keys: dict[Key, str] = {}
    """Launched, so that their live directories were used."""
    entries: dict[str, str] = {}
    """The engine's own entries, by name: looked up, whether or not they were found."""
    versions: dict[tuple[str, str | None], str] = {}
    """Per engine and version: launched."""


def last_uses(launches: Iterable[Launch]) -> LastUses:
    """The last uses that launches tell."""
    found = LastUses()
    for launch in launches:
        if launch.artifact is not None and launch.result != "none":
            _later(found.artifacts, launch.artifact, launch.started)
        _later(found.keys, launch.key, launch.started)
        _later(found.versions, (launch.engine, launch.engine_version), launch.started)
        seen = launch.observed
        if seen is not None:
            directories = (name.partition("/")[0] for name in seen.compile_directories)
            for name in (*(entry.name for entry in seen.entries), *directories):
                _later(found.entries, name, launch.started)
    return found


def _later(found: dict[T, str], what: T, started: str) -> None:
    if started > found.get(what, ""):
        found[what] = started
