"""Failures that must not stop the command: counted by name, said once, raised only when the order is strict."""

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from cachemgr.bounded import within
from cachemgr.cache import Cache
from cachemgr.clock import Clock
from cachemgr.errors import (
    CacheError,
    CannotExecuteError,
    DeadlineError,
    LaunchError,
    MirrorError,
    NoSuchCommandError,
    in_words,
)
from cachemgr.store import Store

T = TypeVar("T")


class Trouble:
    """What went wrong in one launch."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._lines: list[str] = []
        self._said: set[str] = set()
        self.errors: Counter[str] = Counter()

    def attempt(self, name: str, default: T, step: Callable[[], T]) -> T:
        """What `step` returns, or `default` when it fails.

        Raises:
            NoSuchCommandError, CannotExecuteError: these are about the command, not about us.
            LaunchError: it failed, and the order is strict.
        """
        try:
            return step()
        except (NoSuchCommandError, CannotExecuteError, LaunchError):
            raise
        except Exception as error:
            if self._strict:
                hint = error.hint if isinstance(error, CacheError) else None
                raise LaunchError(f"{name} failed: {in_words(error)}", hint=hint) from error
            self._note(name, error)
            return default

    def survive(self, name: str, default: T, step: Callable[[], T]) -> T:
        """Like `attempt`, and never raises: for what happens beside a running command, which a failure of ours must not
        leave alone."""
        try:
            return step()
        except Exception as error:  # noqa: BLE001 - as above
            self._note(name, error)
            return default

    def _note(self, name: str, error: Exception) -> None:
        self.errors[name] += 1
        if isinstance(error, DeadlineError):
            self.errors[error.word] += 1  # too late is not broken, and `why` tells them apart
        self.say(f"{name} failed: {in_words(error)}")

    def say(self, line: str) -> None:
        """Something that a person should read with the next line of the launch; the same again is said already."""
        if line not in self._said:
            self._said.add(line)
            self._lines.append(line)

    def lines(self) -> tuple[str, ...]:
        """What was said since this was last asked."""
        lines, self._lines = tuple(self._lines), []
        return lines

    def tell(self, note: Callable[[str], None]) -> None:
        """Have a person told, where there is nothing else to say."""
        for line in self.lines():
            self.survive("telling", None, lambda line=line: note(line))  # type: ignore[misc]


_SILENT = frozenset({"unreachable", "unresolved", "stalled", "no credentials"})
"""What a mirror answers that cost its time, and will the next time."""


class Patience:
    """Asks a store, for so long and no longer; once it did not answer, not again for a while."""

    def __init__(self, cache: Cache, clock: Clock, trouble: Trouble) -> None:
        self._cache, self._clock, self._trouble = cache, clock, trouble
        self._rests: dict[str, bool] = {}

    def ask(self, name: str, default: T, step: Callable[[], T], *, seconds: float, store: Store | None = None) -> T:
        """What `step` returns, or `default` when it fails, takes longer than `seconds`, or the store is left alone:
        `store`, or else the local one."""
        asked = store or self._cache.store
        if self.rests(asked):
            return default
        return self._trouble.attempt(name, default, lambda: self._within(name, step, seconds, asked))

    def rests(self, store: Store) -> bool:
        """Whether a store is left alone; said once."""
        if str(store) not in self._rests:
            left = self._cache.rests(store, self._clock.now_ns() / 1e9)
            self._rests[str(store)] = left > 0
            if left > 0:
                self._trouble.say(f"{store} did not answer in time and is left alone for {left:.0f} s")
                self._trouble.errors["store left alone"] += 1
        return self._rests[str(store)]

    def _within(self, name: str, step: Callable[[], T], seconds: float, store: Store) -> T:
        if seconds <= 0:  # somebody else took the time
            raise DeadlineError(f"no time is left for {name}")
        try:
            return within(seconds, f"{name} in {store}", step)
        except (DeadlineError, MirrorError) as error:
            if isinstance(error, MirrorError) and error.word not in _SILENT:
                raise
            self._rests[str(store)] = True
            self._cache.let_rest(store, self._clock.now_ns() / 1e9)
            raise
