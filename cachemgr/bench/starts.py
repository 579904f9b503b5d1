"""The starts of a benchmark, each in a root of its own, with a store that nobody else has.

What is measured is what the engine's log says, so a server is told to end when it is ready, and is asked nothing.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from cachemgr.bench.variants import GIVEN, Planned
from cachemgr.cache import Cache
from cachemgr.capture import Verdict
from cachemgr.order import Order
from cachemgr.prewarm.passes import Machinery, Options, Visit, start
from cachemgr.prewarm.starting import starting
from cachemgr.store.local import LocalStore

_WARM_SHARE = 0.5
"""Of a cold start, what any other takes; for an estimate."""


class Row(msgspec.Struct, frozen=True):
    """What one start took. Seconds; None where the engine's log did not say, or there is no engine."""

    variant: str
    kind: str
    code: int
    failed: bool
    seconds: float
    """Of everything: until a server was told to end and had ended."""
    ready: float | None
    """Until a server could be asked, or an engine was ready."""
    phases: dict[str, float]
    verdict: Verdict | None
    added: int
    graph_gib: float | None
    kv_cache_tokens: int | None
    graph_mode: str | None
    entries: tuple[str, ...]
    same_as: str | None = None
    """An earlier start of this kind whose engine came to the same entries and graph mode."""

    @property
    def took(self) -> float:
        """What people wait for."""
        return self.seconds if self.ready is None else self.ready


class Bench(msgspec.Struct, frozen=True):
    """What all starts of a benchmark have in common."""

    template: Order
    machinery: Machinery
    options: Options
    place: Path
    """An empty directory."""


def run(planned: Sequence[Planned], bench: Bench, *, done: Callable[[Row, int], None]) -> tuple[Row, ...]:
    """Make the starts. `done` is told each row, and how many are left.

    Raises:
        NoSuchCommandError, CannotExecuteError, StoreError: a start cannot be made.
    """
    rows: list[Row] = []
    for number, each in enumerate(planned, start=1):
        row = _marked(_started(number, each, bench), rows)
        rows.append(row)
        done(row, len(planned) - number)
    return tuple(rows)


def _started(number: int, planned: Planned, bench: Bench) -> Row:
    machinery, options, place = bench.machinery, bench.options, bench.place
    variant = planned.variant
    store = GIVEN if planned.kind == "near" else variant.name
    folder = {"cold": "first", "second": "first"}.get(planned.kind, planned.kind)
    root = place / _folder(variant.name) / folder
    cache = Cache(LocalStore(place / _folder(store) / "store"), place / "home", trust=machinery.cache.trust)
    order = msgspec.structs.replace(bench.template, argv=variant.argv, publish="local", read_only=False, sender=None)
    made = starting(order.argv, order.environ, order.cwd, port=machinery.free_port(), real_weights=options.real_weights)
    visit = Visit(made.server, machinery.clock, machinery.clock.monotonic() + options.limit, asks=False)
    ours = msgspec.structs.replace(machinery, cache=cache)
    each = start(number, order, made, visit, ours, root=root)
    if planned.kind != "cold":
        shutil.rmtree(root, ignore_errors=True)
    report = each.report
    seen = None if report is None else report.observed
    return Row(
        variant=variant.name,
        kind=planned.kind,
        code=each.code,
        failed=visit.failed(each.code),
        seconds=each.seconds,
        ready=None if report is None else report.phases.get("ready"),
        phases={} if report is None else report.phases,
        verdict=None if report is None else report.verdict,
        added=sum(each.added.values()),
        graph_gib=None if seen is None else seen.graph_gib,
        kv_cache_tokens=None if seen is None else seen.kv_cache_tokens,
        graph_mode=None if seen is None else seen.graph_mode,
        entries=() if seen is None else tuple(sorted({entry.name for entry in seen.entries})),
    )


def _folder(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _marked(row: Row, rows: Sequence[Row]) -> Row:
    """An engine without entries says nothing about what it came to."""
    if not row.entries:
        return row
    alike = (
        other.variant
        for other in rows
        if (other.kind, other.entries, other.graph_mode, other.graph_gib)
        == (row.kind, row.entries, row.graph_mode, row.graph_gib)
    )
    return msgspec.structs.replace(row, same_as=next(alike, None))


def expected(planned: Sequence[Planned], cold: float) -> float:
    """Seconds that these starts will take, where a cold one takes `cold`."""
    return sum(cold if each.kind == "cold" else cold * _WARM_SHARE for each in planned)
