"""The pull journey: what a look-up found on the mirror comes into the local store before it is restored.

It is verified while it streams, and the next start here needs no network for it. Where the local store takes nothing,
the mirror itself is restored from.
"""

from collections.abc import Callable

import msgspec

from cachemgr.capture import Where
from cachemgr.errors import CorruptError, MirrorError, StoreError
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, Marks
from cachemgr.store.transfer import Failure, Transfer
from cachemgr.trust import Origin
from cachemgr.warm import Damage, Restored


class Pulled(msgspec.Struct, frozen=True):
    """Where to restore from, and what."""

    store: Store
    captures: tuple[Capture, ...]
    failures: tuple[Failure, ...] = ()
    """Captures that did not arrive."""
    damaged: tuple[Damage, ...] = ()
    """Those among them that never will."""
    note: str = ""
    """Why nothing is kept in the local store."""
    pulled_bytes: int | None = 0
    """What was moved to it; None where it failed midway."""
    mirrored: bool = False
    """Whether it is restored from the mirror itself."""

    def added_to(self, restored: Restored) -> Restored:
        """What was restored, with what could not be because it did not arrive, and with what came from the mirror."""
        pulled = None if self.pulled_bytes is None else self.pulled_bytes + restored.read_bytes * self.mirrored
        reasons = dict.fromkeys(f"not fetched from the mirror: {failure.error}" for failure in self.failures)
        return msgspec.structs.replace(
            restored,
            reasons=(*restored.reasons, *reasons),
            damaged=(*restored.damaged, *self.damaged),
            pulled_bytes=pulled,
        )


def pull(
    mirror: Store,
    local: Store,
    captures: tuple[Capture, ...],
    *,
    since: str,
    now: float,
    left: int | None,
    expired: Callable[[], bool],
) -> Pulled:
    """Bring captures that were read on the mirror into the local store, with the note that they come from there.

    Args:
        since: the time, RFC 3339 in UTC; `now`: the same in seconds since the epoch.
        left: bytes that the local store may still take; None for as much as there is.
        expired: asked between pieces; once true, what has not arrived stays away.

    Raises:
        DeadlineError: the time was over before it began.
    """
    transfer = Transfer(mirror, local, expired=expired, marks=came_from(mirror, since))
    try:
        plan = transfer.plan_found(captures, now=now)
        if left is not None and plan.bytes > left:
            note = f"not kept in {local}: its budget leaves {left:,} bytes"
            return Pulled(mirror, captures, note=note, mirrored=True)
        moved = transfer.carry(plan)
    except (StoreError, CorruptError) as error:
        return Pulled(mirror, captures, note=f"not kept in {local}: {error}", pulled_bytes=None, mirrored=True)
    failures, pulled = moved.failures, moved.bytes
    own = next((failure.error for failure in failures if _is_ours(failure)), None)
    if own is not None:
        return Pulled(mirror, captures, note=f"not kept in {local}: {own}", pulled_bytes=pulled, mirrored=True)
    failed = {failure.capture: failure.error for failure in failures}
    arrived = tuple(capture for capture in captures if capture.digest not in failed)
    damaged = tuple(
        Damage(capture.digest, layer.digest, str(failed[capture.digest]))
        for capture in captures
        if isinstance(failed.get(capture.digest), CorruptError)
        for layer in capture.manifest.layers
    )
    return Pulled(local, arrived, failures, damaged, pulled_bytes=pulled)


def came_from(store: Store, since: str, where: Where = "mirror") -> Marks:
    """The note that captures were taken from there: what the policy of that asks of them is asked for ever."""
    origin = Origin(where, str(store), since).encoded()
    return lambda key, capture: {layout.origin_name(key, capture): origin}


def _is_ours(failure: Failure) -> bool:
    """Whether it is the local store that failed."""
    return isinstance(failure.error, StoreError) and not isinstance(failure.error, MirrorError)
