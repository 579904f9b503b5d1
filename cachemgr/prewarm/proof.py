"""Proof that a seed is enough: a start from it alone adds nothing, and no compiler runs.

Root, temporary directory and state are new; the seed is the only store, and nothing is published. Whether a machine
trusts the seed is another question, which its signatures answer: here it is believed, and what is in it is executed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from cachemgr import __version__, places
from cachemgr.cache import Cache
from cachemgr.capture import Launch, Verdict
from cachemgr.digest import Digest
from cachemgr.errors import CacheError, StoreError
from cachemgr.key import Key
from cachemgr.order import Order, Started
from cachemgr.prewarm import isolation
from cachemgr.prewarm.entries import missing_gpus, order_of_entry
from cachemgr.prewarm.passes import Machinery, Options, Pass, Telling, Visit, grown, start
from cachemgr.prewarm.starting import starting
from cachemgr.spec import Entry
from cachemgr.store.local import LocalStore
from cachemgr.trust import Trust, policies_of
from cachemgr.verified import SCHEMA, Verified

Network = Literal["none", "no proxy"]
"""How a start is kept from the network: in one of its own with nothing in it, or by variables that most heed."""
_MOST = 5


class Proof(msgspec.Struct, frozen=True):
    """What one start from a seed showed."""

    name: str
    holds: bool
    faults: tuple[str, ...]
    """Why it does not hold, or could not be tried."""
    key: Key | None = None
    captures: tuple[Digest, ...] = ()
    """What it was given."""
    verdict: Verdict | None = None
    added: dict[str, int] = {}
    compilers: tuple[str, ...] = ()
    """What compilers compiled: the name of each, and its input."""
    device: str = ""
    engine: str = ""
    engine_version: str | None = None
    seconds: float = 0.0
    network: Network = "none"

    def record(self, host: str, at: str) -> Verified:
        """The record to keep of a proof that holds."""
        assert self.key is not None, "it holds"
        return Verified(
            schema=SCHEMA,
            key=self.key,
            captures=self.captures,
            device=self.device,
            host=host,
            at=at,
            engine=self.engine,
            engine_version=self.engine_version,
            added=0,
            compilers=0,
            network=self.network,
            cachemgr=__version__,
        )


class Trial(msgspec.Struct, frozen=True):
    """Where and how starts are watched."""

    seed: Path
    place: Path
    """An empty directory of this user."""
    network: Network


def prove(entry: Entry, template: Order, trial: Trial, machinery: Machinery, options: Options) -> Proof:
    """Start an entry from a seed alone, and watch it. Whatever goes wrong is in the answer."""
    order = order_of_entry(entry, template)
    lack = missing_gpus(entry, order.environ)
    if lack:
        return Proof(entry.name, holds=False, faults=(lack,), network=trial.network)
    try:
        return _proven(entry, order, trial, machinery, options)
    except CacheError as error:
        return Proof(entry.name, holds=False, faults=(str(error),), network=trial.network)


def _proven(entry: Entry, order: Order, trial: Trial, machinery: Machinery, options: Options) -> Proof:
    place = trial.place
    tmp = place / "tmp"
    try:
        places.make_directory(tmp, 0o700)
        watched = isolation.watch_compilers(place, order.environ, order.cwd)
    except OSError as error:
        raise StoreError(f"{place} cannot be written: {error.strerror}", hint="set TMPDIR") from None
    away = isolation.no_proxy_answers() if trial.network == "no proxy" else {}
    alone = msgspec.structs.replace(
        order, environ={**order.environ, **away, **watched, "TMPDIR": str(tmp)}, publish="never", read_only=True
    )
    trust = Trust(policies_of(("off",), private=True))
    cache = Cache(LocalStore(place / "store"), place / "home", seeds=(LocalStore(trial.seed),), trust=trust)
    heard = _Found(machinery.telling)
    made = starting(alone.argv, alone.environ, alone.cwd, port=machinery.free_port(), real_weights=options.real_weights)
    visit = Visit(made.server, machinery.clock, machinery.clock.monotonic() + entry.limit)
    each = start(1, alone, made, visit, msgspec.structs.replace(machinery, cache=cache, telling=heard))
    if each.report is None:
        reason = f"nothing is known about its start, exit code {each.code}"
        return Proof(entry.name, holds=False, faults=(reason,), network=trial.network)
    compilers = tuple(isolation.compiled(place))
    report = each.report
    faults = _faults(each, report, visit, compilers, isolation.left_in(tmp))
    return Proof(
        entry.name,
        holds=not faults,
        faults=faults,
        key=report.key,
        captures=heard.captures,
        verdict=report.verdict,
        added=each.added,
        compilers=compilers,
        device=report.device,
        engine=report.engine,
        engine_version=report.engine_version,
        seconds=each.seconds,
        network=trial.network,
    )


class _Found:
    """Hears what a start was given, and passes everything on."""

    def __init__(self, telling: Telling) -> None:
        self.note, self.ready, self.finished = telling.note, telling.ready, telling.finished
        self.passed = telling.passed
        self._started = telling.started
        self.captures: tuple[Digest, ...] = ()

    def started(self, event: Started) -> None:
        self.captures = tuple(capture.digest for capture in event.found.captures)
        self._started(event)


def _faults(
    each: Pass, report: Launch, visit: Visit, compilers: Sequence[str], outside: Sequence[str]
) -> tuple[str, ...]:
    nearest = ", ".join(map(str, report.differs[:_MOST]))
    ran = f"{len(compilers)} compilers ran: {', '.join(compilers[:_MOST])}"
    faults = (
        (report.result != "exact", f"the seed has no exact artifact for it{f': {nearest}' if nearest else ''}"),
        (report.result == "exact" and report.where != "seed", f"it was found in {report.where}, not in the seed"),
        (visit.failed(each.code), f"exit code {each.code}"),
        (bool(each.added), f"added {grown(each)}"),
        (bool(compilers), ran),
        (bool(outside), f"left caches in the temporary directory: {', '.join(outside)}"),
        (report.result == "exact" and report.verdict not in {"used", "unknown"}, f"verdict {report.verdict}"),
    )
    return tuple(text for holds, text in faults if holds)
