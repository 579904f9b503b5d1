"""Making room beside a launch, when what it published leaves the budget of this host nearly full."""

from collections.abc import Sequence

from cachemgr import live, sizes
from cachemgr.cache import Cache
from cachemgr.clock import Clock
from cachemgr.domains import Target
from cachemgr.order import Order
from cachemgr.places import network_file_system
from cachemgr.trouble import Trouble


def make_room(
    order: Order, cache: Cache, clock: Clock, trouble: Trouble, *, targets: Sequence[Target], needed: int
) -> bool:
    """Free so many bytes by what was not used for the longest time, and say what went. Whether anything did.

    `targets` are the live directories of the launch; those that it shares with others have entries that may go.

    Raises:
        StoreError: as `cachemgr.prune.automatic.make_room`.
    """
    from cachemgr.prune import automatic, superseded  # most launches have room

    stored = automatic.Stored(
        cache.store,
        cache.outlines(cache.store),
        cache.trust.opinion,
        cache.home / "locks" / "prune.lock",
        superseded.Looked(cache.looked(cache.store)),
        counts=network_file_system(str(cache.store)) is None,
    )
    freed = automatic.make_room(
        stored,
        live.roots(order.environ),
        [target for target in targets if not target.ours],
        needed,
        prune=f"{order.launch}-prune",
        now=clock.now_ns() / 1e9,
    )
    if freed is None:
        return False
    went = f"{freed.artifacts} artifacts and {freed.directories} live directories or entries went"
    if freed.bytes:
        trouble.say(f"made room: {sizes.spell(freed.bytes)} freed, {went}")
    for note in freed.notes:
        trouble.say(f"the budget is nearly full: {note}; set CACHEMGR_BUDGET")
    return freed.bytes > 0
