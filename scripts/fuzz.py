"""Look for inputs that a reader neither reads nor refuses: `scripts/fuzz MINUTES [TARGET...]`.

Each target gets its share of the time. An input that reaches a line of ours which no other one reached is kept in
`tests/data/fuzz/<target>/`, so that the next search begins there; one that fails is made as small as can be and kept,
too. The exit code says whether anything failed.
"""

import hashlib
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.fuzz_targets import CORPUS, TARGETS, Target, inputs

_OURS = str(Path(__file__).resolve().parent.parent / "cachemgr") + "/"
_BATCH = 2000
_MOST = 4096
"""Bytes of an input that is kept because of the lines it reached."""


class Reached:
    """Lines of ours that were executed."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()

    def new(self, step: Callable[[], None]) -> int:
        """How many lines `step` is the first to reach."""
        before = len(self.lines)
        sys.settrace(self._call)
        try:
            step()
        finally:
            sys.settrace(None)
        return len(self.lines) - before

    def _call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(_OURS) else None

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


class Search:
    """One target under search for so many seconds."""

    def __init__(self, target: Target, seconds: float) -> None:
        self.target, self._seconds = target, seconds
        self._reached = Reached()
        self.tried = self.kept = 0

    def run(self) -> bytes | None:
        """The smallest input found that fails, or None."""
        end = time.monotonic() + self._seconds
        for data in self.target.corpus():
            self._reached.new(lambda data=data: self.target.run(data))  # type: ignore[misc]
        while time.monotonic() < end:
            failed = self._batch(end)
            if failed is not None:
                _keep(self.target, failed)
                return failed
        return None

    def _batch(self, end: float) -> bytes | None:
        last = b""

        @seed(random.randrange(1 << 60))
        @settings(
            max_examples=_BATCH,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(inputs(self.target))
        def attempt(data: bytes) -> None:
            nonlocal last
            if time.monotonic() > end + 60:
                return  # shrinking, too, comes to an end
            last = data
            self._attempt(data)

        try:
            attempt()
        except Exception as error:  # noqa: BLE001 - whatever it is, a reader should not have raised it
            print(f"{self.target.name}: {type(error).__name__}: {error}", file=sys.stderr)
            return last
        return None

    def _attempt(self, data: bytes) -> None:
        self.tried += 1
        if self._reached.new(lambda: self.target.run(data)) and len(data) <= _MOST:
            self.kept += 1
            _keep(self.target, data)


def _keep(target: Target, data: bytes) -> None:
    path = CORPUS / target.name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def main(minutes: str, *names: str) -> int:
    """Search, and say what was tried and found."""
    chosen = [target for target in TARGETS if not names or target.name in names]
    unknown = set(names) - {target.name for target in chosen}
    if unknown:
        print(f"no target {sorted(unknown)}; there are {[target.name for target in TARGETS]}", file=sys.stderr)
        return 2
    failures = 0
    for target in chosen:
        search = Search(target, float(minutes) * 60 / len(chosen))
        failed = search.run()
        failures += failed is not None
        told = "nothing failed" if failed is None else f"FAILED on {failed[:200]!r}"
        print(f"{target.name}: {search.tried:,} inputs, {search.kept} kept, {told}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(*sys.argv[1:]))
