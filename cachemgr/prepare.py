"""Preparing live directories for a launch: take them, and let its engine find nothing damaged and nothing strange.

What another launch uses stays as it is; then this launch gets directories of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cachemgr import heal, live, stage
from cachemgr.domains import Domain, Target
from cachemgr.live import Claim, Room
from cachemgr.observe import Snapshot
from cachemgr.origins import Shared
from cachemgr.statcache import StatCache


class Prepared:
    """The live directories of one launch, ready for a restore."""

    def __init__(self, room: Room, claim: Claim, now_ns: Callable[[], int]) -> None:
        self.room = room
        self._launch, self._now_ns = claim.launch, now_ns
        self.shared = Shared(room.root, room.targets, claim.sight, claim.launch) if room.root else None

    def made_elsewhere(self, target: Target, new: Snapshot) -> frozenset[str]:
        """The units among new files that are another launch's.

        Two that compile never share a root: what nobody vouches for yet is its own who compiles.
        """
        if self.shared is None or self.room.root is None or not new:
            return frozenset()
        beside = () if self.room.compiles else live.sharers(self.room.root, self._launch, now=self._now_ns() / 1e9)
        unknown = any(other.purpose == "compiling" for other in beside)
        return self.shared.made_elsewhere(target, new, unknown=unknown)

    def leave(self) -> None:
        """There will be no launch after all."""
        if self.shared is not None:
            self.shared.put_back()
        self.room.leave(in_use=False)


class Preparation:
    """What preparing needs to know: `closed` asks for directories that no other user can write to, `notes` takes what
    had to be done differently."""

    def __init__(
        self,
        environ: Mapping[str, str],
        domains: Sequence[Domain],
        claim: Claim,
        *,
        closed: bool = False,
        now_ns: Callable[[], int],
        notes: list[str],
    ) -> None:
        self._environ, self._domains, self._claim = environ, domains, claim
        self._closed, self._now_ns, self._notes = closed, now_ns, notes

    def enter(self) -> Prepared:
        """Take the live directories."""
        return self._cleared(Prepared(self._room(alone=False), self._claim, self._now_ns))

    def heal(self, prepared: Prepared, remembered: Path, expired: Callable[[], bool]) -> Prepared:
        """Set aside what is damaged. `remembered` is the file of the stat cache.

        Raises:
            OSError: a directory could not be looked at.
            DeadlineError: `expired` was true before everything was read; the next start goes on from there.
        """
        stat_cache = StatCache.load(remembered)
        targets, now_ns = prepared.room.targets, self._now_ns()
        try:
            ailing = heal.look(
                targets, stat_cache, now_ns=now_ns, left_overs=not self._in_use(prepared), expired=expired
            )
        finally:
            stat_cache.save(remembered)
        self._notes.extend(heal.stale_locks(targets, now_ns=now_ns))
        for target in targets:
            stage.remove_abandoned(target, now_ns=now_ns)
        if not ailing:
            return prepared
        if self._in_use(prepared):  # by now
            return self._apart(prepared, "the live directory is damaged and in use, so this launch gets one of its own")
        for each in ailing:
            self._notes.extend(heal.set_aside(each, self._claim.launch))
        return prepared

    def _cleared(self, prepared: Prepared) -> Prepared:
        """Without entries that the engine could take for the right ones."""
        room, shared = prepared.room, prepared.shared
        if shared is None or room.root is None:
            return prepared
        living = live.sharers(room.root, self._claim.launch, now=self._now())
        if not living:  # the engine of another launch may not have looked yet
            shared.recover({self._claim.launch})
        strange = shared.strange()
        if not strange:
            return prepared
        if living:
            return self._apart(
                prepared, f"{room.root} holds entries of unknown origin and is in use, so this launch gets its own"
            )
        left = shared.set_aside(strange)
        if left:
            return self._apart(prepared, f"{left[0]} cannot be set aside, so this launch gets a root of its own")
        word = "entry" if len(strange) == 1 else "entries"
        self._notes.append(f"{len(strange)} {word} of another or unknown origin set aside until the engine has looked")
        return prepared

    def _apart(self, prepared: Prepared, why: str) -> Prepared:
        self._notes.append(why)
        prepared.leave()
        return Prepared(self._room(alone=True), self._claim, self._now_ns)

    def _room(self, *, alone: bool) -> Room:
        return live.enter(
            self._environ,
            self._domains,
            self._claim,
            alone=alone,
            closed=self._closed,
            now=self._now(),
            notes=self._notes,
        )

    def _in_use(self, prepared: Prepared) -> bool:
        return prepared.room.shared(self._claim.launch, now=self._now())

    def _now(self) -> float:
        return self._now_ns() / 1e9
