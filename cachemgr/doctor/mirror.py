"""Checks of the mirror: it may be used as the settings want to use it, with the prefix that they name."""

import time
import uuid
from collections.abc import Iterator

from cachemgr import digest
from cachemgr.doctor.finding import Finding, Opened, Patient, error, note, ok, warning
from cachemgr.errors import CacheError
from cachemgr.store import Remote, layout

_SECONDS = 8.0
_TIDY_SECONDS = 5.0
_SKEW_SECONDS = 60.0
_HINT = "try it by other means: aws s3 ls; or set CACHEMGR_MIRROR to another bucket"


def mirror(_patient: Patient, opened: Opened) -> Iterator[Finding]:
    """The mirror is there, and does what is asked of it: list and read; where launches publish to it, create, create
    only once, and delete. Nothing is left there."""
    settings, remote = opened.settings, opened.cache.mirror
    publishes = settings.publish == "mirror" and not settings.read_only
    if remote is None:
        yield from _without(publishes=publishes, offline=settings.offline, url=settings.mirror)
        return
    hurried = remote.until(time.monotonic() + _SECONDS)
    try:
        yield from _readable(hurried, publishes=publishes)
    except CacheError as failure:
        yield _failed(failure)
        return
    if publishes:
        waits = opened.cache.level_of("mirror", remote).policy == "require"
        yield from _writable(hurried, remote, layout.INCOMING if waits else "")


def _without(*, publishes: bool, offline: bool, url: str | None) -> Iterator[Finding]:
    if offline and url is not None:
        yield note("mirror", f"{url} is left alone, because `offline` is set")
    elif publishes:
        said = "launches publish to the mirror, and there is none"
        yield error("mirror", said, "set CACHEMGR_MIRROR=s3://BUCKET/PREFIX")


def _readable(remote: Remote, *, publishes: bool) -> Iterator[Finding]:
    found = layout.read_layout(remote)
    first = next(iter(remote.scan(layout.ARTIFACTS)), None)
    if first is not None:
        remote.slice(first.name, 0, 1)
    if found is not None:
        yield ok("mirror", f"{remote} can be listed and read")
    elif not publishes:
        yield note("mirror", f"{remote} can be listed and has nothing yet, so reading could not be tried")


def _writable(remote: Remote, unhurried: Remote, below: str) -> Iterator[Finding]:
    """With a layer that nothing refers to, `below` where launches publish: should this process be killed here, a prune
    takes it away."""
    data = f"written by cachemgr doctor {uuid.uuid4().hex}".encode()
    name = below + layout.layer_name(digest.of_bytes(data))
    try:
        yield _written(remote, name, data)
        yield from _clock(remote, name, time.time())
    except CacheError as failure:
        yield _failed(failure)
    try:
        unhurried.until(time.monotonic() + _TIDY_SECONDS).delete(name)
    except CacheError as failure:
        yield warning("mirror", f"{failure}; what was written to try may stay until a prune", failure.hint or _HINT)


def _written(remote: Remote, name: str, data: bytes) -> Finding:
    remote.put(name, data)
    if remote.put(name, data) or remote.read(name, limit=len(data)) != data:
        return error("mirror", f"{remote} does not keep what is written to it", _HINT)
    if not remote.conditional():
        said = f"{remote} has no conditional writes: of two that create one object, the last one wins"
        return note("mirror", said, "with --single-flight, two may compile where one would do")
    return ok("mirror", f"{remote} can be published to")


def _clock(remote: Remote, name: str, now: float) -> Iterator[Finding]:
    """By when the server says that it stored what was just written: ages and signatures count by these two clocks."""
    stored = next((entry.modified for entry in remote.scan(name.rpartition("/")[0] + "/") if entry.name == name), now)
    off = now - stored
    if abs(off) > _SKEW_SECONDS:
        said = f"this clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} that of {remote}"
        yield warning("clock", said, "synchronise it: chronyc makestep, or timedatectl set-ntp true")
    else:
        yield ok("clock", f"within {_SKEW_SECONDS:.0f} s of that of {remote}")


def _failed(failure: CacheError) -> Finding:
    return error("mirror", str(failure), failure.hint or _HINT)
