"""The outcome of a launch: the capture of what its command used or made, and the record of how it went."""

import os
from collections.abc import Iterable, Mapping

import msgspec

from cachemgr import __version__, observed
from cachemgr.budget import Budget
from cachemgr.cache import Cache
from cachemgr.capture import LAYOUT, Launch, Manifest, Provenance, Verdict
from cachemgr.child import Ended
from cachemgr.clock import Clock
from cachemgr.desk import Facts
from cachemgr.digest import Digest
from cachemgr.examine import units_of
from cachemgr.factors.profile import Profile
from cachemgr.fetch import Fetched
from cachemgr.key import Key
from cachemgr.lookup import Found, kept_out
from cachemgr.publish import Published, publish
from cachemgr.seen import Seen
from cachemgr.statcache import StatCache
from cachemgr.store.captures import Capture
from cachemgr.store.lock import held
from cachemgr.warm import Restored
from cachemgr.watch import Work

REPORT_SCHEMA = 1
_PUBLISHER_WAIT = 30.0

NOT_PUBLISHED = Published(None, 0, 0, 0, (), "")


class Start(msgspec.Struct, frozen=True):
    """How a launch began."""

    launch: str
    host: str
    began: str
    key: Key
    profile: Profile
    found: Found
    restored: Restored
    seconds: float
    """Until the command could start."""


class Ran(msgspec.Struct, frozen=True):
    """A command that has ended, or runs still."""

    ended: Ended | None
    seconds: float
    ready_work: Work | None
    """What it had done when its ready sign was seen and it had come to rest."""
    captured: Published
    """What was published while it ran."""
    seen: Seen | None = None
    """What its engine said."""
    facts: Facts | None = None
    """What processes of its engine said themselves."""

    @property
    def code(self) -> int:
        """The exit code of a command that has ended."""
        assert self.ended is not None, "asked only then"
        return self.ended.code

    @property
    def left_behind(self) -> bool:
        """Whether processes that the command started are still running."""
        return self.ended is not None and self.ended.left_behind

    @property
    def complete(self) -> bool:
        """Whether it compiled all that a start of it compiles."""
        if self.ready_work is not None or (self.seen is not None and self.seen.ready_at is not None):
            return True
        return self.ended is not None and self.ended.code == 0 and not self._told_to_end

    @property
    def _told_to_end(self) -> bool:
        """Whether an engine began and none was ready: one that is told to end meanwhile may say that all is well."""
        return self.seen is not None and self.seen.version is not None and not self.seen.engines_ready


class Outcome:
    """Captures and records of one launch.

    `refusal` says why nothing may be captured, or None; captures in `without` are in quarantine here.
    """

    def __init__(
        self,
        cache: Cache,
        clock: Clock,
        start: Start,
        *,
        refusal: str | None,
        without: frozenset[Digest],
        budget: Budget | None,
    ) -> None:
        self._cache, self._clock, self._start, self._budget = cache, clock, start, budget
        self._refusal, self._without = refusal, without
        self._fetched: tuple[Fetched, ...] = ()
        self._published_bytes = 0

    def fetched(self, fetched: Fetched) -> None:
        """An entry was put into place while the engine waited for it."""
        self._fetched = (*self._fetched, fetched)

    def capture(self, work: Work, ran: Ran) -> Published:
        """Publish what is new in `work`. One publisher per host and key.

        Raises:
            StoreError, CorruptError: as `cachemgr.publish.publish`.
        """
        refusal = self._needless(work) or self._refusal
        if refusal:
            return msgspec.structs.replace(NOT_PUBLISHED, reason=refusal)
        key, found = self._start.key, self._start.found
        remembered = self._cache.stat_cache(key)
        stat_cache = StatCache.load(remembered)
        with held(self._cache.lock(key, "publish"), wait=_PUBLISHER_WAIT):
            published = publish(
                self._cache.store,
                self._draft(ran, work),
                work.trees,
                stat_cache,
                near=self.captures(),
                ranks=self._start.profile.ranks,
                budget=self._budget,
                now_ns=self._clock.now_ns(),
                without=self._without,
                judge=self._cache.judge_of("local"),  # what waits to be verified need not be published again
                marks=self._cache.trust.marks(found.captures, found.where, found.store),
            )
            self._published_bytes += published.stored_bytes
        stat_cache.save(remembered)
        return published

    def excess(self, published: Published) -> int:
        """Bytes that should go now that this was published, so that the budget has room again."""
        return 0 if self._budget is None else self._budget.excess(published.stored_bytes)

    def captures(self) -> tuple[Capture, ...]:
        """Those that files were taken from, before the start and since."""
        return (*self._start.found.captures, *(each for fetched in self._fetched for each in fetched.captures))

    def offered(self) -> dict[str, frozenset[str]]:
        """Per domain, the files of artifacts that were put into place, before the start and since."""
        merged = dict(self._start.restored.offered)
        for fetched in self._fetched:
            for domain, paths in (fetched.restored.offered if fetched.restored is not None else {}).items():
                merged[domain] = merged.get(domain, frozenset()) | paths
        return merged

    def _needless(self, work: Work) -> str | None:
        found, offered = self._start.found, self._start.restored.offered
        covered = all(tree.touched <= offered.get(tree.domain.name, frozenset()) for tree in work.trees)
        idle = found.result == "exact" and not work.grown and covered and not self._start.restored.damaged
        return "nothing new to capture" if idle else None

    def _draft(self, ran: Ran, work: Work) -> Manifest:
        start, profile = self._start, self._start.profile
        return Manifest(
            layout=LAYOUT,
            key=start.key,
            factors=tuple(sorted(profile.factors)),
            needs=profile.needs,
            engine=profile.engine,
            engine_version=profile.engine_version,
            model=profile.model,
            device=profile.device,
            created=start.began,
            launch=start.launch,
            complete=ran.complete,
            layers=(),
            provenance=Provenance(__version__, start.host, profile.command),
            timings=_timings(ran) if start.found.result == "none" and ran.complete else {},
            ranks=profile.ranks or _ranks(work),
            world=profile.world,
        )

    def launch(
        self,
        ran: Ran,
        work: Work,
        published: Published,
        *,
        publish_seconds: float,
        pushed_bytes: int | None,
        errors: Mapping[str, int],
    ) -> Launch:
        """The launch record, which is also the report."""
        start, profile = self._start, self._start.profile
        found, restored = start.found, start.restored
        later = [fetched.restored for fetched in self._fetched if fetched.restored is not None]
        ready = ran.ready_work
        return Launch(
            schema=REPORT_SCHEMA,
            launch=start.launch,
            key=start.key,
            result=found.result,
            artifact=found.artifact,
            where=found.where,
            verdict=_verdict(work, ran.seen),
            reasons=self._reasons(ran, work, published),
            restored_files=restored.files + sum(each.files for each in later),
            restored_bytes=restored.bytes + sum(each.bytes for each in later),
            restore_seconds=round(start.seconds, 3),
            present_files=restored.present,
            added=work.added,
            added_after_ready=0 if ready is None else max(0, work.grown - ready.grown),
            phases={
                **_timings(ran),
                "restore": round(start.seconds, 3),
                "publish": round(publish_seconds, 3),
            },
            published=published.capture or ran.captured.capture,
            errors=dict(errors),
            started=start.began,
            exit_code=None if ran.ended is None else ran.ended.code,
            engine=profile.engine,
            engine_version=profile.engine_version,
            model=profile.model,
            device=profile.device,
            host=start.host,
            differs=found.differs,
            observed=None if ran.seen is None else observed.observation(ran.seen, ran.facts),
            factors=profile.factors,
            gpus=profile.gpus,
            pulled_bytes=_sum(each.pulled_bytes for each in (restored, *later)),
            published_bytes=self._published_bytes,
            pushed_bytes=pushed_bytes,
        )

    def _reasons(self, ran: Ran, work: Work, published: Published) -> tuple[str, ...]:
        found, restored = self._start.found, self._start.restored
        damaged = [f"{capture.kind} capture: {capture.reason}" for capture in found.damaged]
        doubts = [f"used all the same: {doubt}" for doubt in found.doubts]
        running = ["processes that the command started are still running"] if ran.left_behind else []
        # An exact artifact should be all that a start needs, so whoever reads this will ask what was missing.
        growth = [f"added {path}" for path in work.examples] if found.result == "exact" else []
        said = [] if ran.seen is None else [*observed.reasons(ran.seen), *_elsewhere(ran.seen, work)]
        said += [] if ran.facts is None else observed.desk_reasons(ran.facts)
        said += [_told(fetched) for fetched in self._fetched]
        refused = [f"{unit.domain} {unit.unit} not captured: {unit.reason}" for unit in published.refused]
        unpublished = [f"nothing published: {published.reason}"] if published.reason else []
        apart = () if found.result == "exact" else kept_out(found, self._start.key)
        notes = (*self._start.profile.notes, *apart)
        before = (*notes, *found.ignored, *found.reasons, *restored.reasons, *damaged, *doubts)
        return (*before, *said, *growth, *running, *refused, *unpublished)


def _sum(sizes: Iterable[int | None]) -> int | None:
    """None where one of them is not known."""
    found = list(sizes)
    return None if None in found else sum(size or 0 for size in found)


def _told(fetched: Fetched) -> str:
    where = ", ".join(sorted({capture.manifest.key[:12] for capture in fetched.captures}))
    return f"an entry that the engine asked for came from {where}"


def _ranks(work: Work) -> tuple[str, ...]:
    """The ranks that ran here where nobody knew them before: those that have something in the live directories."""
    found: set[str] = set()
    for tree in work.trees:
        for unit, paths in units_of(tree.domain, tree.seen).items():
            if not tree.touched.isdisjoint(paths):
                found |= tree.domain.ranks_of(unit, paths)
    return tuple(sorted(found))


def _verdict(work: Work, seen: Seen | None) -> Verdict:
    """What the directories prove, where they are not contradicted by what the engine said of its entries."""
    if seen is None:
        return work.verdict
    said = {entry.verdict for entry in seen.aot_entries}
    if work.verdict == "used" and said - {"loaded"}:
        return "partly used"
    if work.verdict == "unknown" and "loaded" in said:
        return "partly used" if work.grown or "rejected" in said else "used"
    return work.verdict


def _elsewhere(seen: Seen, work: Work) -> list[str]:
    """The first entry that the engine keeps where nothing is restored, as a plugin that moves its root makes it."""
    ours = tuple(f"{os.path.realpath(tree.directory)}/" for tree in work.trees)
    paths = [entry.path for entry in seen.aot_entries if not os.path.realpath(entry.path).startswith(ours)]
    return [f"the engine keeps {path}, which is no place that cachemgr knows" for path in paths[:1]]


def _timings(ran: Ran) -> dict[str, float]:
    """Seconds until the command ended, and of the phases that its engine told."""
    told = {} if ran.seen is None else ran.seen.phases
    return {phase: round(seconds, 3) for phase, seconds in {**told, "run": ran.seconds}.items()}
