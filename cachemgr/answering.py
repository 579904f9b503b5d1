"""What a launch does when its engine asks for an entry that it is about to look up.

All ranks ask for the same one at the same time: the first question is answered by looking, the others by its answer.
"""

import threading
from functools import partial

from cachemgr import observe
from cachemgr.before import Before, Warm, units_offered
from cachemgr.fetch import Fetched, Wanted, fetch, wanted_of
from cachemgr.level import Level
from cachemgr.store.lock import held

_HERE = "here already"
_NOTHING = Fetched(None, reason="the store did not answer")


class Entries:
    """Answers the questions of one launch; called by several threads."""

    def __init__(self, before: Before, warm: Warm) -> None:
        self._before, self._warm = before, warm
        self._lock = threading.Lock()
        self._answers: dict[str, str] = {}

    def __call__(self, path: str) -> str:
        """Have the entry of `path` put into place; in one word or sentence, what became of it."""
        wanted = wanted_of(path, self._warm.room.targets)
        if wanted is None:
            return "no place that cachemgr knows"
        with self._lock:
            if wanted.unit not in self._answers:
                self._answers[wanted.unit] = self._answer(wanted)
            return self._answers[wanted.unit]

    def _answer(self, wanted: Wanted) -> str:
        if _is_there(wanted):
            return _HERE
        got, reason = self._put(wanted)
        if not got and self._before.order.waits_at_lookup and self._warm.flight is None:
            self._wait(wanted)
            got = _is_there(wanted)
            reason = "put there when another machine had compiled it" if got else reason
        return reason

    def _wait(self, wanted: Wanted) -> None:
        """Until another machine has compiled it, or it is our turn to; the engine has loaded its weights by now."""
        before, warm = self._before, self._warm
        before.take_turn(warm.started.key, warm.profile, lambda: self._put(wanted)[0] or None)
        warm.flight = before.flight

    def _put(self, wanted: Wanted) -> tuple[bool, str]:
        """Whether the entry is there now, and in one word or sentence what became of it."""
        reasons = []
        before = self._before
        end = before.clock.monotonic() + before.order.deadline
        for level in before.cache.until(end).levels:
            fetched = self._asked(level, wanted, end)
            self._set_apart(fetched)
            if fetched.restored is not None and fetched.restored.files:
                self._settle(fetched)
                return True, "put there"
            if not fetched.reason:
                return True, _HERE
            reasons.append(fetched.reason)
        return False, "; ".join(dict.fromkeys(reasons))

    def _asked(self, level: Level, wanted: Wanted, end: float) -> Fetched:
        """What one level has, if it may be asked. The engine is running: nothing may end us, `--strict` or not."""
        before, name = self._before, "fetching an entry"
        if level.closed is not None:
            return Fetched(None, reason=level.closed)
        seconds = max(0.0, end - before.clock.monotonic())

        def ask() -> Fetched:
            fetch_it = partial(self._fetch, level, wanted, end)
            return before.patience.ask(name, _NOTHING, fetch_it, seconds=seconds, store=level.store)

        return before.trouble.survive(name, _NOTHING, ask)

    def _set_apart(self, fetched: Fetched) -> None:
        before, unpacked = self._before, () if fetched.restored is None else fetched.restored.damaged
        seconds = before.order.deadline
        before.trouble.survive(
            "quarantining", None, lambda: before.set_apart(fetched.damaged, unpacked, seconds=seconds)
        )

    def _fetch(self, level: Level, wanted: Wanted, end: float) -> Fetched:
        before, profile, clock = self._before, self._warm.profile, self._before.clock
        with held(before.cache.entry_lock(wanted.entry), wait=before.order.deadline / 2):
            if _is_there(wanted):
                return Fetched(None)
            return fetch(
                level,
                wanted,
                profile.factors,
                profile.host,
                ranks=profile.ranks or wanted.ranks,
                budget=before.budget(self._warm.room),
                launch=before.order.launch,
                now_ns=clock.now_ns(),
                expired=lambda: clock.monotonic() >= end,
                without=before.without,
            )

    def _settle(self, fetched: Fetched) -> None:
        """It counts as offered, and as something whose origin is known."""
        restored, warm = fetched.restored, self._warm
        assert restored is not None, "asked only then"
        if warm.shared is not None:
            warm.shared.vouch(units_offered(warm.room.targets, restored.offered))
        warm.watch.offer(restored.offered, restored.digests)
        warm.outcome.fetched(fetched)


def _is_there(wanted: Wanted) -> bool:
    """Whether the engine will find files in it, whoever put them there."""
    return bool(observe.scan(f"{wanted.target.directory}/{wanted.unit}", lambda _path: True))
