"""Making room on this host after a publish, so that the budget holds without anybody's doing; the mirror's never.

It begins when more than `budget.NEARLY` of the budget is used and ends at less, so that what one prune costs, which
is a listing of the store and a look at what is new in it, is paid for by what it removes. Live directories go first,
as far as an artifact can restore them: losing one costs a restore. Then artifacts, the least recently used ones first:
losing one costs a compile.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cachemgr.domains import Target
from cachemgr.history import last_uses
from cachemgr.prune import artifacts, live, taking
from cachemgr.prune.artifacts import Wish
from cachemgr.prune.limits import Limits
from cachemgr.prune.live import Restorable
from cachemgr.prune.superseded import Looked
from cachemgr.store import Store, records
from cachemgr.store.captures import Judge
from cachemgr.store.lock import held
from cachemgr.store.outlines import Outlines
from cachemgr.store.removal import holdings


class Freed(msgspec.Struct, frozen=True):
    """What was made room by. Sizes in bytes."""

    bytes: int
    directories: int
    artifacts: int
    later: int
    """Of layers that go when they are a day old."""
    notes: tuple[str, ...]


class Stored(msgspec.Struct, frozen=True):
    """The local store, and who tells what its captures are worth."""

    store: Store
    outlines: Outlines
    judge: Judge
    lock: Path
    """Of those who prune on this host by themselves."""
    looked: Looked
    counts: bool = True
    """Whether its bytes are part of the budget; one on a network's disks has other bounds, and many users."""


def make_room(
    stored: Stored, roots: Sequence[str], shared: Sequence[Target], needed: int, *, prune: str, now: float
) -> Freed | None:
    """Free so many bytes of the live directories and the local store. None where another process is about it.

    Raises:
        StoreError: the store cannot be pruned; live directories have been.
    """
    store, outlines = stored.store, stored.outlines
    with held(stored.lock, wait=0) as alone:
        if not alone:
            return None
        uses = last_uses(records.launches(store))
        there = holdings(store, outlines)
        restorable = Restorable(
            frozenset(outline.key for outline in there.outlines.values()),
            frozenset(entry for outline in there.outlines.values() for entry in outline.entries),
        )
        found = live.plan(roots, shared, Limits(free_up=needed), uses=uses, restorable=restorable, now=now)
        taken = found if found.empty else taking.carry_out(found, prune=prune, now=now)
        if not stored.counts:
            return Freed(taken.bytes, len(taken.goners), 0, 0, taken.notes)
        wish = Wish(Limits(free_up=max(0, needed - taken.bytes)))
        plan = artifacts.plan(
            store,
            wish,
            outlines=outlines,
            uses=uses,
            judge=stored.judge,
            root=Path(str(store)),
            held=there,
            looked=stored.looked,
            now=now,
        )
        done = plan if plan.empty else artifacts.carry_out(store, plan, outlines=outlines, judge=stored.judge, now=now)
        return Freed(taken.bytes + done.bytes, len(taken.goners), len(done.artifacts), done.later, done.notes)
