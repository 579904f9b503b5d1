"""Checks of who uses what now, and of what those left who are gone."""

import os
import shlex
from collections.abc import Iterator

from cachemgr import heal, hold, places, sizes
from cachemgr.doctor.finding import Finding, Opened, Patient, note, ok, warning
from cachemgr.domains import TABLE
from cachemgr.history import LastUses
from cachemgr.inventory import summaries
from cachemgr.live import bases, live_targets, roots
from cachemgr.prune.limits import Limits
from cachemgr.prune.live import plan
from cachemgr.store.leases import leases
from cachemgr.store.lock import held
from cachemgr.store.pins import pins

_MANY_PINS = 0.8


def holders(patient: Patient, _opened: Opened) -> Iterator[Finding]:
    """Launches that use live directories."""
    for root in roots(patient.environ):
        place = f"{root}/cachemgr"
        for name in sorted(os.listdir(place)) if os.path.isdir(place) else ():
            for holder in hold.living(f"{place}/{name}", now=patient.now):
                said = f"launch {holder.launch} (process {holder.process.pid}, {holder.purpose}) uses {place}/{name}"
                yield ok("in use", said)


def leased(patient: Patient, opened: Opened) -> Iterator[Finding]:
    """Leases on artifacts: whose they are, and those of the dead."""
    gone = 0
    for lease in leases(opened.cache.store, now=patient.now):
        if lease.lives:
            yield ok("lease", f"{lease} uses {lease.key[:12]}")
        else:
            gone += 1
    if gone:
        many = "1 lease is of a launch that is" if gone == 1 else f"{gone} leases are of launches that are"
        yield note("lease", f"{many} gone", "cachemgr prune")


def locks(_patient: Patient, opened: Opened) -> Iterator[Finding]:
    """Locks work where our state lies: without them two launches do the same work, and no result is wrong."""
    probe = opened.cache.home / "locks" / "doctor.lock"
    if not places.usable(opened.cache.home) or not opened.cache.home.is_dir():
        return
    with held(probe, wait=0) as first, held(probe, wait=0) as second:
        probe.unlink(missing_ok=True)
        if not first:
            said = f"{opened.cache.home} takes no file locks, so launches on this host may do the same work twice"
            yield warning("locks", said, "set CACHEMGR_HOME to a directory on a local disk")
        elif second:
            said = f"two can hold one lock in {opened.cache.home}: locks are not enforced there"
            yield warning("locks", said, "set CACHEMGR_HOME to a directory on a local disk")
        else:
            yield ok("locks", f"{opened.cache.home} takes file locks")


def stale_locks(patient: Patient, _opened: Opened) -> Iterator[Finding]:
    """Locks that an engine waits for until somebody removes them (pytorch#189245)."""
    for said in heal.stale_locks(live_targets(patient.environ, TABLE), now_ns=int(patient.now * 1e9)):
        yield warning("stale lock", said, f"rm {shlex.quote(said.partition(' is ')[0])}")


def debris(patient: Patient, opened: Opened) -> Iterator[Finding]:
    """What writers, launches, prunes and commands that died left in live directories, and where starts have others."""
    shared = [target for target in live_targets(patient.environ, TABLE) if not target.ours]
    where = roots(patient.environ), shared, Limits()
    found = plan(*where, uses=LastUses(), bases=bases(opened.cache.home, patient.environ), now=patient.now)
    if found.goners:
        said = f"{sizes.spell(found.bytes)} in {found.files:,} files, such as {found.goners[0].path}"
        yield note("debris", f"{said}: {found.goners[0].why}", "cachemgr prune --live")


def pinned(patient: Patient, opened: Opened) -> Iterator[Finding]:
    """Pins of artifacts that are gone, that have ended, or that leave no room within the budget."""
    store, budget = opened.cache.store, opened.settings.budget
    made = pins(store)
    if not made:
        return
    listed = {summary.key: summary for summary in summaries(store, [])}
    for key, pin in sorted(made.items()):
        if key not in listed:
            yield note("pin", f"{key[:12]} is {pin}, and is not in the store", f"cachemgr unpin {key}")
        elif not pin.holds(now=patient.now, rank=None):
            yield note("pin", f"{key[:12]} is {pin}, which has ended", f"cachemgr unpin {key}")
    size = sum(listed[key].stored_bytes for key in made if key in listed)
    if budget and size > budget * _MANY_PINS:
        said = f"pinned artifacts take {sizes.spell(size)} of the budget of {sizes.spell(budget)}: little else fits"
        yield warning("pin", said, "cachemgr unpin KEY, or a larger CACHEMGR_BUDGET")
