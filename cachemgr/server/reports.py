"""Launches that nodes report: durable before they are acknowledged, and many at once where many come.

The record in the store is what counts. Whoever comes while another one writes waits, and what has gathered meanwhile
is written as one object. The catalogue is told as well, so that pages show a launch at once; if it cannot be, it reads
the object later as any other.
"""

import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from cachemgr.capture import MAX_CAPTURE_BYTES, MAX_FILES, Launch, encode_launch
from cachemgr.catalogue.ingest import take_news
from cachemgr.catalogue.opened import Catalogue
from cachemgr.clock import epoch
from cachemgr.digest import is_digest
from cachemgr.errors import DatabaseError, UsageError
from cachemgr.key import is_key
from cachemgr.store import Store
from cachemgr.store.records import News, record_all

MOST = 1000
"""Launches in one report."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_AHEAD_SECONDS = 86400
"""By how much the clock of a node may be ahead."""
_TOGETHER = 16 << 20
"""Bytes of records after which no further report goes into the same object: readers refuse one that is too large."""
_MOST_GPUS = 1 << 20
_MOST_NAMES = 1000
"""Phases, errors, reasons and the like of one launch."""


@dataclass
class _Report:
    launches: Sequence[Launch]
    size: int
    kept: bool = False
    error: Exception | None = None


class Reports:
    """Takes reports for one store and its source in the catalogue."""

    def __init__(self, store: Store, catalogue: Catalogue, source: int) -> None:
        self._store, self._catalogue, self._source = store, catalogue, source
        self._gathering, self._writing = threading.Lock(), threading.Lock()
        self._waiting: list[_Report] = []

    def keep(self, launches: Sequence[Launch]) -> None:
        """Keep launches, which `check` has passed. When this returns, they are in the store.

        Raises:
            StoreError, CorruptError: the store failed. Some may have been kept; they may be reported again.
        """
        report = _Report(launches, sum(len(encode_launch(launch)) for launch in launches))
        with self._gathering:
            self._waiting.append(report)
        with self._writing:
            while not report.kept and report.error is None:
                self._write(self._next())
        if report.error is not None:
            raise report.error

    def _next(self) -> Sequence[_Report]:
        """The reports that are written together now, the oldest first."""
        with self._gathering:
            count = size = 0
            for report in self._waiting:
                if count and size + report.size > _TOGETHER:
                    break
                count, size = count + 1, size + report.size
            together, self._waiting = self._waiting[:count], self._waiting[count:]
            return together

    def _write(self, together: Sequence[_Report]) -> None:
        launches = [launch for report in together for launch in report.launches]
        try:
            names = tuple(record_all(self._store, launches))
        except Exception as error:  # noqa: BLE001 - whatever it was, none of them may take it for success
            for report in together:
                report.error = error
            return
        for report in together:
            report.kept = True
        with suppress(DatabaseError):
            take_news(self._catalogue, self._source, News(_each_once(launches), names, names))


def _each_once(launches: Sequence[Launch]) -> tuple[Launch, ...]:
    """The one that has ended, where two tell of one launch."""
    found: dict[str, Launch] = {}
    for launch in launches:
        held = found.get(launch.launch)
        if held is None or held.exit_code is None:
            found[launch.launch] = launch
    return tuple(found.values())


def check(launches: Sequence[Launch], *, now: float) -> None:
    """Refuse what no cachemgr would report. `now` is in seconds since the epoch.

    Raises:
        UsageError: a launch has a name, key or time that cannot be.
    """
    if not 0 < len(launches) <= MOST:
        raise UsageError(
            f"a report has {len(launches)} launches; it may have 1 to {MOST}", hint="send them in several reports"
        )
    for launch in launches:
        fault = _fault(launch, now)
        if fault is not None:
            raise UsageError(f"launch `{launch.launch[:200]}` cannot be: {fault}", hint="see `run --report`")


def _fault(launch: Launch, now: float) -> str | None:
    if _NAME.fullmatch(launch.launch) is None:
        return "its name has other letters than a-z, 0-9, `.`, `_` and `-`, or too many"
    if not is_key(launch.key) or (launch.artifact is not None and not is_key(launch.artifact)):
        return "its key is none"
    try:
        started = epoch(launch.started)
    except ValueError as error:
        return f"`started` {error}"
    if not 0 <= started < now + _AHEAD_SECONDS:
        return "it started at a time that has not come"
    return _number_fault(launch)


def _number_fault(launch: Launch) -> str | None:
    files = [launch.restored_files, launch.present_files, launch.added_after_ready, sum(launch.added.values())]
    if not all(0 <= count <= MAX_FILES for count in (*files, *launch.added.values())):
        return "a number of files is negative or impossibly large"
    for name in ("restored_bytes", "pulled_bytes", "published_bytes", "pushed_bytes"):
        if not 0 <= (getattr(launch, name) or 0) <= MAX_CAPTURE_BYTES:
            return f"`{name}` is negative or impossibly large"
    return _count_fault(launch)


def _count_fault(launch: Launch) -> str | None:
    if not 0 <= (launch.gpus or 0) <= _MOST_GPUS:
        return "its number of GPUs is negative or impossibly large"
    if not all(0 <= count < 1 << 31 for count in launch.errors.values()):
        return "a count is negative or impossibly large"
    if launch.exit_code is not None and abs(launch.exit_code) >= 1 << 31:
        return "its exit code is none"
    if not all(0 <= seconds < 1e9 for seconds in (launch.restore_seconds, *launch.phases.values())):
        return "a duration is negative or impossibly long"
    return _text_fault(launch)


def _text_fault(launch: Launch) -> str | None:
    blamed = (difference.factor for difference in launch.differs)
    texts = (launch.engine, launch.engine_version or "", launch.model, launch.device, launch.host)
    names = (*launch.errors, *launch.phases, *launch.added, *blamed)
    if not all(text.isprintable() and len(text) <= 1024 for text in (*texts, *names)):
        return "a name in it cannot be printed or is too long"
    if launch.published is not None and not is_digest(launch.published):
        return "what it published has no digest as its name"
    many = (launch.errors, launch.phases, launch.added, launch.differs, launch.reasons)
    if any(len(each) > _MOST_NAMES for each in many):
        return f"it has more than {_MOST_NAMES} phases, errors or reasons"
    return None
