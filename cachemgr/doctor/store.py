"""Checks of our own state and of the local store."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from cachemgr import places, sizes
from cachemgr.budget import NEARLY, Budget
from cachemgr.doctor.finding import Finding, Opened, Patient, note, ok, warning
from cachemgr.domains import of_engine
from cachemgr.key import Key
from cachemgr.live import live_root, planned
from cachemgr.store import layout

_SCARCE_BYTES = 100_000_000
"""A few captures of a large model."""
_SCARCE_INODES = 1_000


def home(_patient: Patient, opened: Opened) -> Iterator[Finding]:
    """Our own state can be kept, and nobody else changes it."""
    place = opened.cache.home
    for said in opened.cache.notes:
        if said in opened.cache.trust.faults:
            continue
        if place.is_relative_to(opened.settings.home):  # a directory of our own in a volume that everybody can write
            yield note("home", said)
        else:
            yield warning("home", said, "set CACHEMGR_HOME to a directory that can be written")
    yield from _kept("home", place)
    yield from _room("home", place, "make room there, or set CACHEMGR_HOME to a directory on another volume")


def local_store(_patient: Patient, opened: Opened) -> Iterator[Finding]:
    """The store can be read, is one of ours, and can be written if something is to be published."""
    store, settings = opened.cache.store, opened.settings
    place = settings.store
    found = layout.read_layout(store)  # says by itself what is wrong
    publishes = settings.publish != "never" and not settings.read_only
    if publishes and not places.usable(place):
        said = f"{store} cannot be written, so nothing is published"
        yield warning("store", said, "make it writable for this user, or set CACHEMGR_PUBLISH=never")
    elif found is None:
        yield note("store", f"{store} has nothing yet" + ("" if publishes else ", and publishing is off"))
    yield from _kept("store", place)
    yield from _room("store", place, "cachemgr prune --max-size SIZE, or set CACHEMGR_STORE to another volume")
    network = places.network_file_system(place)
    if network is not None:
        yield note("store", f"{store} is on {network}; its size does not count toward the budget")


def _kept(about: str, place: Path) -> Iterator[Finding]:
    """Restored files are code: who can write them runs code in our engines."""
    try:
        status = place.stat()
    except (FileNotFoundError, NotADirectoryError):
        yield ok(about, f"{place} (not made yet)")
        return
    if status.st_uid not in {0, os.geteuid()}:
        hint = f"share it only with users that you would let run code here, or chown {os.geteuid()} {place}"
        yield warning(about, f"{place} belongs to user id {status.st_uid}, who can replace what engines load", hint)
    elif status.st_mode & stat.S_IWOTH:
        yield from _open_to_all(about, place)
    else:
        yield ok(about, str(place))


def _room(about: str, place: Path, hint: str) -> Iterator[Finding]:
    """Where there is none, launches start all the same, and nothing is kept."""
    left, inodes = places.free(places.nearest(place))
    if left < _SCARCE_BYTES:
        yield warning(about, f"{sizes.spell(left)} are free on the file system of {place}", hint)
    elif inodes is not None and inodes < _SCARCE_INODES:
        yield warning(about, f"{inodes:,} inodes are free on the file system of {place}", hint)


def _open_to_all(about: str, place: Path) -> Iterator[Finding]:
    if place.is_mount():  # a volume of Kubernetes has mode 0777; only this container sees it
        yield note(about, f"{place} is a volume that everybody in this container can write", "name a directory in it")
    else:
        yield warning(about, f"everybody can write {place}, and so replace what engines load", f"chmod o-w {place}")


def rest(patient: Patient, opened: Opened) -> Iterator[Finding]:
    """A store that did not answer is left alone for a while."""
    for level in opened.cache.levels:
        seconds = opened.cache.rests(level.store, patient.now)
        if seconds:
            hint = f"see whether it answers: ls {level.store}"
            yield warning("store", f"{level.store} did not answer and is left alone for {seconds:.0f} s", hint)


def avoided(patient: Patient, opened: Opened) -> Iterator[Finding]:
    """Captures that this host does not use."""
    apart = sorted(opened.cache.avoided(patient.host))
    if apart:
        many = "1 capture is" if len(apart) == 1 else f"{len(apart)} captures are"
        said = f"{many} not used here, because of damage or because an engine died of it"
        yield note("quarantine", said, "cachemgr ls, then cachemgr show KEY says which and why")


def budget(patient: Patient, opened: Opened) -> Iterator[Finding]:
    """What the caches may take of this host's disks, and do take."""
    limit, home_place = opened.settings.budget, opened.cache.home
    if not limit:
        yield note("budget", "there is none: caches grow until the disk is full", "set CACHEMGR_BUDGET, such as 20GB")
        return
    disk = os.statvfs(places.nearest(home_place))
    if disk.f_blocks * disk.f_frsize < limit:
        said = f"{sizes.spell(limit)} is more than the file system of {home_place} has"
        yield note("budget", said, "set CACHEMGR_BUDGET below the size limit of the volume")
    live_ones = [target.directory for target in planned(patient.environ, of_engine("vllm"), Key("none"))]
    counted = [*map(str, opened.cache.places), f"{live_root(patient.environ)}/cachemgr", *live_ones]
    used = Budget(limit, counted, home_place / "usage", lambda: int(patient.now * 1e9)).used()
    told = f"{sizes.spell(used)} of {sizes.spell(limit)} used"
    if used > limit * NEARLY:
        yield warning(
            "budget",
            f"{told}: little more is restored or published",
            "cachemgr prune --max-size SIZE, or a larger CACHEMGR_BUDGET",
        )
    else:
        yield ok("budget", told)
