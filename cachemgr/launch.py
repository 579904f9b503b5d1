"""One launch: find and restore, start the command with its caches pinned, watch what it used, publish what it made.

The command comes first. Whatever fails in here is counted by name, said in one line and left behind: the command starts
cold, with its own exit code, unless `--strict` asked for the opposite. Launches inside a launch step aside: the
outermost one owns the caches.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec

from cachemgr import __version__, observe
from cachemgr.cache import Cache
from cachemgr.capture import LAYOUT, Launch, Manifest, Provenance, Verdict
from cachemgr.child import Child, Ended
from cachemgr.domains import TORCH_PROGRAM
from cachemgr.errors import CacheError, CannotExecuteError, LaunchError, NoSuchCommandError
from cachemgr.factors import Profile, describe
from cachemgr.heads import Heads
from cachemgr.key import Key, derive, folder
from cachemgr.live import live_root, live_target, pins
from cachemgr.publish import Published, Tree, publish
from cachemgr.statcache import StatCache
from cachemgr.store import layout
from cachemgr.store.captures import record
from cachemgr.store.lock import held
from cachemgr.warm import NOTHING, Found, Restored, Target, find, restore

T = TypeVar("T")

REPORT_SCHEMA = 1
LINGER_SECONDS = 5.0
"""How long processes that outlive the command are waited for before its capture is made."""
LAUNCH_VARIABLE = "CACHEMGR_LAUNCH"
KEY_VARIABLE = "CACHEMGR_KEY"
PINNED_VARIABLE = "CACHEMGR_PINNED"

NOT_RESTORED = Restored(0, 0, 0, {}, {}, ())
NOT_PUBLISHED = Published(None, 0, 0, 0, (), "")


class Clock(Protocol):
    """Time, as an argument."""

    def now_ns(self) -> int:
        """Nanoseconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds that only grow."""

    def text(self) -> str:
        """Now, as RFC 3339 in UTC."""


class Order(msgspec.Struct, frozen=True):
    """What to launch, and how. Everything that the outside world decides is in here."""

    argv: tuple[str, ...]
    environ: dict[str, str]
    cwd: Path
    launch: str
    host: str
    publish: Literal["never", "local"]
    read_only: bool
    strict: bool
    ignored_args: tuple[str, ...]
    deadline: float
    wait: float


class Started(msgspec.Struct, frozen=True):
    """What is known when the command is about to start."""

    key: Key
    found: Found
    restored: Restored
    seconds: float
    targets: tuple[Target, ...]
    trouble: tuple[str, ...]


class Finished(msgspec.Struct, frozen=True):
    """What is known when the command has ended and its capture is stored."""

    launch: Launch
    published: Published
    cold_seconds: float | None
    trouble: tuple[str, ...]


class Listener(Protocol):
    """Who tells a person about a launch."""

    def started(self, event: Started) -> None: ...
    def finished(self, event: Finished) -> None: ...


def is_nested(environ: Mapping[str, str]) -> bool:
    """Whether another launch is in charge of this process already."""
    return bool(environ.get(LAUNCH_VARIABLE))


def run(order: Order, cache: Cache, clock: Clock, listener: Listener) -> int:
    """Launch a command and return its exit code.

    Raises:
        NoSuchCommandError, CannotExecuteError: the command cannot be started.
        LaunchError: the cache failed and `order.strict` is set; before the command starts if it failed before.
    """
    begun = clock.monotonic()
    swallow = _Swallow(strict=order.strict)
    profile = _described(order, cache, swallow)
    if profile is None:
        return Child.start(order.argv, order.environ, order.cwd).wait(linger=LINGER_SECONDS).code
    with ExitStack() as cold:
        launch = _Launch(order, cache, clock, swallow, profile)
        warm = launch.warm(cold, begun)
        listener.started(warm.started)
        ran = launch.execute(warm)
        finished = launch.settle(warm, ran)
    listener.finished(finished)
    return ran.ended.code


class _Swallow:
    """Failures that must not stop the command: counted by name and said once; raised when strict."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._lines: list[str] = []
        self.errors: Counter[str] = Counter()

    def attempt(self, name: str, default: T, step: Callable[[], T]) -> T:
        """What `step` returns, or `default` when it fails."""
        try:
            return step()
        except (NoSuchCommandError, CannotExecuteError):
            raise
        except Exception as error:  # noqa: BLE001 - the engine starts even when cachemgr has a bug (design, rule 3)
            self._note(name, error)
            return default

    def _note(self, name: str, error: Exception) -> None:
        reason = str(error) if isinstance(error, CacheError) else f"{type(error).__name__}: {error}"
        if self._strict:
            hint = error.hint if isinstance(error, CacheError) else None
            raise LaunchError(f"{name} failed: {reason}", hint=hint) from error
        self.errors[name] += 1
        self._lines.append(f"{name} failed: {reason}")

    def lines(self) -> tuple[str, ...]:
        """What happened since this was last asked."""
        lines, self._lines = tuple(self._lines), []
        return lines


def _described(order: Order, cache: Cache, swallow: _Swallow) -> Profile | None:
    writable = order.publish != "never" and not order.read_only
    salt = swallow.attempt("opening the store", "", lambda: store_salt(cache, writable=writable))
    return swallow.attempt(
        "deriving the key",
        None,
        lambda: describe(order.argv, order.environ, cwd=order.cwd, ignored_args=order.ignored_args, salt=salt),
    )


def store_salt(cache: Cache, *, writable: bool) -> str:
    """The salt of the local store; a store that does not exist yet gets one if it may be written."""
    if writable:
        return layout.ensure_layout(cache.store).salt
    found = layout.read_layout(cache.store)
    return found.salt if found else ""


class _Warm(msgspec.Struct, frozen=True):
    """A launch that is ready to start."""

    started: Started
    before: tuple[observe.Snapshot, ...]
    """Per target, what lies there now, with access times forgotten."""

    @property
    def targets(self) -> tuple[Target, ...]:
        return self.started.targets


class _Ran(msgspec.Struct, frozen=True):
    """A command that has ended."""

    ended: Ended
    began: str
    seconds: float


class _Seen(msgspec.Struct, frozen=True):
    """What a finished command is known to have done."""

    added: dict[str, int]
    verdict: Verdict
    published: Published
    phases: dict[str, float]


class _Launch:
    """The stages of one launch, in order: warm, execute, settle."""

    def __init__(self, order: Order, cache: Cache, clock: Clock, swallow: _Swallow, profile: Profile) -> None:
        self._order, self._cache, self._clock, self._swallow, self._profile = order, cache, clock, swallow, profile
        self._key = derive(profile.factors)

    def warm(self, cold: ExitStack, begun: float) -> _Warm:
        """Look up and restore. `cold` keeps what a compiling launch holds until it has published."""
        found = self._find()
        alone = False
        if found.result != "exact":
            alone = cold.enter_context(held(self._cache.lock(self._key, "cold"), wait=self._order.wait))
            found = self._find() if alone and self._order.wait else found
        with held(self._cache.lock(self._key, "restore"), wait=self._order.deadline / 2):
            if found.result == "exact":
                alone = self._nobody_compiles()
            targets = self._targets(cold, alone=alone)
            restored = self._swallow.attempt("restoring", NOT_RESTORED, lambda: self._restore(found, targets, begun))
        before = tuple(
            observe.forget_reads(target.directory, observe.scan(target.directory, target.domain.travels))
            for target in targets
        )
        seconds = self._clock.monotonic() - begun
        lines = self._swallow.lines()
        return _Warm(Started(self._key, found, restored, seconds, targets, lines), before)

    def _find(self) -> Found:
        return self._swallow.attempt("looking up", NOTHING, self._looked_up)

    def _looked_up(self) -> Found:
        profile, heads = self._profile, Heads(self._cache.heads())
        return find(self._cache.store, self._key, profile.factors, profile.host, heads)

    def _nobody_compiles(self) -> bool:
        with held(self._cache.lock(self._key, "cold"), wait=0) as free:
            return free

    def _targets(self, cold: ExitStack, *, alone: bool) -> tuple[Target, ...]:
        """Each domain with its directory for this launch.

        Two launches that both compile never share a directory: not every engine writes its index atomically. The first
        takes `<key>/`, others take `<key>.<launch>/` and lose it again when they have published.
        """
        name = folder(self._key) if alone else f"{folder(self._key)}.{self._order.launch}"
        own = f"{live_root(self._order.environ)}/cachemgr/{name}"
        if not alone:
            cold.callback(shutil.rmtree, own, ignore_errors=True)
        return tuple(live_target(domain, self._order.environ, own) for domain in TORCH_PROGRAM)

    def _restore(self, found: Found, targets: Sequence[Target], begun: float) -> Restored:
        if found.result == "none":
            return NOT_RESTORED
        end = begun + self._order.deadline
        return restore(
            self._cache.store,
            found,
            targets,
            launch=self._order.launch,
            now_ns=self._clock.now_ns(),
            expired=lambda: self._clock.monotonic() > end,
        )

    def execute(self, warm: _Warm) -> _Ran:
        """Start the command with its caches pinned, and wait for it."""
        pinned = pins(warm.targets)
        environ = self._order.environ | self._profile.constants | pinned
        environ[LAUNCH_VARIABLE] = self._order.launch
        environ[KEY_VARIABLE] = self._key
        environ[PINNED_VARIABLE] = ":".join(sorted(pinned))
        began, start = self._clock.text(), self._clock.monotonic()
        ended = Child.start(self._order.argv, environ, self._order.cwd).wait(linger=LINGER_SECONDS)
        return _Ran(ended, began, self._clock.monotonic() - start)

    def settle(self, warm: _Warm, ran: _Ran) -> Finished:
        """What the command used and added, the verdict, the capture and the launch record."""
        trees, added, verdict = self._observed(warm)
        begun = self._clock.monotonic()
        published = self._swallow.attempt("publishing", NOT_PUBLISHED, lambda: self._publish(warm, ran, trees, added))
        phases = {
            "restore": round(warm.started.seconds, 3),
            "run": round(ran.seconds, 3),
            "publish": round(self._clock.monotonic() - begun, 3),
        }
        launch = self._record(warm, ran, _Seen(added, verdict, published, phases))
        if not self._order.read_only:
            self._swallow.attempt("recording", None, lambda: record(self._cache.store, launch))
        return Finished(launch, published, _cold_seconds(warm.started.found), self._swallow.lines())

    def _observed(self, warm: _Warm) -> tuple[list[Tree], dict[str, int], Verdict]:
        trees: list[Tree] = []
        added: dict[str, int] = {}
        offered = read = 0
        known = True
        for target, before in zip(warm.targets, warm.before, strict=True):
            after = observe.scan(target.directory, target.domain.travels)
            kept = not before or observe.keeps_access_times(target.directory)
            growth = observe.growth(before, after, access_times=kept)
            name = target.domain.name
            ours = warm.started.restored.offered.get(name, frozenset())
            added[name] = len(growth.added)
            offered += len(ours)
            known = known and growth.read is not None
            read += len(ours & (growth.read or frozenset()))
            trees.append(Tree(target.domain, target.directory, after, _touched(target, growth, after)))
        return trees, added, observe.verdict(offered, read if known else None, sum(added.values()))

    def _publish(self, warm: _Warm, ran: _Ran, trees: Sequence[Tree], added: Mapping[str, int]) -> Published:
        found, restored = warm.started.found, warm.started.restored
        refusal = self._no_publish(found, restored, trees, added)
        if refusal:
            return msgspec.structs.replace(NOT_PUBLISHED, reason=refusal)
        stat_cache = StatCache.load(self._cache.stat_cache(self._key))
        with held(self._cache.lock(self._key, "publish"), wait=self._order.deadline):
            published = publish(
                self._cache.store,
                self._draft(warm, ran),
                trees,
                stat_cache,
                near=found.captures if found.artifact != self._key else (),
                now_ns=self._clock.now_ns(),
            )
        stat_cache.save(self._cache.stat_cache(self._key))
        return published

    def _no_publish(
        self, found: Found, restored: Restored, trees: Sequence[Tree], added: Mapping[str, int]
    ) -> str | None:
        if self._order.publish == "never" or self._order.read_only:
            return "publishing is off"
        unknown = [factor.name for factor in self._profile.factors if factor.role == "guard" and factor.value is None]
        if unknown:
            return f"{', '.join(unknown)} could not be read, so that no start could use it"
        covered = all(tree.touched <= restored.offered.get(tree.domain.name, frozenset()) for tree in trees)
        if found.result == "exact" and not any(added.values()) and covered:
            return "nothing new to capture"
        return None

    def _draft(self, warm: _Warm, ran: _Ran) -> Manifest:
        profile = self._profile
        return Manifest(
            layout=LAYOUT,
            key=self._key,
            factors=tuple(sorted(profile.factors)),
            needs=profile.needs,
            engine=profile.engine,
            engine_version=profile.engine_version,
            model=profile.model,
            device=profile.device,
            created=ran.began,
            launch=self._order.launch,
            complete=ran.ended.code == 0,
            layers=(),
            provenance=Provenance(__version__, self._order.host, profile.command),
            timings={"run": round(ran.seconds, 3)} if warm.started.found.result == "none" else {},
        )

    def _record(self, warm: _Warm, ran: _Ran, seen: "_Seen") -> Launch:
        found, restored, profile = warm.started.found, warm.started.restored, self._profile
        published = seen.published
        refused = [f"{unit.domain} {unit.unit} not captured: {unit.reason}" for unit in published.refused]
        unpublished = [f"nothing published: {published.reason}"] if published.reason else []
        damaged = [f"damaged capture: {capture.reason}" for capture in found.damaged]
        running = ["processes that the command started are still running"] if ran.ended.left_behind else []
        return Launch(
            schema=REPORT_SCHEMA,
            launch=self._order.launch,
            key=self._key,
            result=found.result,
            artifact=found.artifact,
            where=found.where,
            verdict=seen.verdict,
            reasons=(*found.reasons, *restored.reasons, *damaged, *running, *refused, *unpublished),
            restored_files=restored.files,
            restored_bytes=restored.bytes,
            restore_seconds=seen.phases["restore"],
            present_files=restored.present,
            added=seen.added,
            added_after_ready=0,
            phases=seen.phases,
            published=published.capture,
            errors=dict(self._swallow.errors),
            started=ran.began,
            exit_code=ran.ended.code,
            engine=profile.engine,
            engine_version=profile.engine_version,
            model=profile.model,
            device=profile.device,
            host=self._order.host,
            differs=found.differs,
        )


def _touched(target: Target, growth: observe.Growth, after: observe.Snapshot) -> frozenset[str]:
    """Without access times, everything in a directory of ours counts as used: better a unit too many than a start that
    compiles it again. A directory of the user's may hold the caches of many programs, so there only what is new."""
    if growth.read is None:
        return frozenset(after) if target.ours else growth.added
    return growth.added | growth.read


def _cold_seconds(found: Found) -> float | None:
    seconds = [capture.manifest.timings["run"] for capture in found.captures if "run" in capture.manifest.timings]
    return seconds[0] if seconds else None
