"""Artifacts: list, show, pin, unpin, and removal as a plan and its deed."""

import msgspec

from cachemgr import digest
from cachemgr.catalogue.artifacts import artifacts, history
from cachemgr.catalogue.launches import Asked, launches
from cachemgr.clock import written as time_text
from cachemgr.errors import CorruptError, NotFoundError
from cachemgr.inventory import resolve, summarise
from cachemgr.key import Key
from cachemgr.server import contract as doc
from cachemgr.server.backend import Backend
from cachemgr.server.operations import Call, cursor, page_size, plain, written
from cachemgr.server.problems import RefusedError
from cachemgr.store import pins
from cachemgr.store.captures import UNASKED, Capture, Damaged, captures
from cachemgr.store.pins import Pin
from cachemgr.store.removal import holdings, plan_removal, remove

_DAY = 86400
_RECENT = 20


def list_artifacts(backend: Backend, call: Call[doc.ArtifactsWanted, doc.Nothing]) -> doc.Artifacts:
    """List artifacts, the newest first."""
    wanted = call.query
    plain(wanted)
    found = artifacts(
        backend.catalogue, backend.source, wanted, limit=page_size(wanted.limit), after=cursor(wanted.after)
    )
    return doc.Artifacts(artifacts=found.artifacts, after=written(found.after))


def show_artifact(backend: Backend, call: Call[doc.Nothing, doc.Nothing]) -> doc.Artifact:
    """Show one artifact: factors, captures, layers, files, history. The key may be a beginning."""
    return shown(backend, named(backend, call.path["key"]))


def shown(backend: Backend, key: Key) -> doc.Artifact:
    """One artifact with everything that is in it.

    Raises:
        NotFoundError: it is gone.
        CorruptError: nothing of it can be read.
    """
    damaged: list[Damaged] = []
    held = captures(backend.store, key, damaged, judge=backend.cache.trust.opinion)
    if not held and not damaged:
        raise NotFoundError(f"no artifact {key} in {backend.store} any more", hint="cachemgr ls")
    if not held:
        raise CorruptError(f"no capture of {key} can be read: {damaged[0].reason}", hint=f"cachemgr rm {key}")
    told, _cold = history(backend.catalogue, backend.source, key)
    pin = pins.pin_of(backend.store, key)
    return doc.Artifact(
        artifact=summarise(key, held, told, pinned=pin is not None),
        pin=pin,
        captures=tuple(map(_capture, held)),
        damaged=tuple(each.reason for each in damaged),
        launches=launches(backend.catalogue, backend.source, Asked(about=key), limit=_RECENT).launches,
    )


def _capture(capture: Capture) -> doc.HeldCapture:
    standing = capture.standing or UNASKED
    trust = doc.Trusted(standing.by or None, standing.doubt or None)
    return doc.HeldCapture(capture.digest, capture.stored, trust, capture.manifest)


def named(backend: Backend, text: str) -> Key:
    """The key that a beginning means.

    Raises:
        NotFoundError, UsageError: none, or several.
    """
    return resolve(backend.store, text)


def pin_artifact(backend: Backend, call: Call[doc.Nothing, doc.PinWanted]) -> doc.Pinned:
    """Keep an artifact from every prune."""
    key, wanted = named(backend, call.path["key"]), call.body
    for name in ("keep_days", "keep_last"):
        value = getattr(wanted, name)
        if value is not None and not 0 < value < 100_000:
            raise RefusedError(400, f"`{name}` is {value}; it may be 1 to 99999", hint=f"leave out `{name}` for ever")
    if not wanted.reason.isprintable() or len(wanted.reason) > 1000:
        raise RefusedError(400, "`reason` cannot be printed or is too long", hint="at most 1000 letters")
    until = None if wanted.keep_days is None else time_text(backend.now + wanted.keep_days * _DAY)
    made = Pin(f"{call.visitor.name} by the service", backend.clock.text(), wanted.reason, until, wanted.keep_last)
    pins.keep(backend.store, key, made)
    return doc.Pinned(key=key, pin=made)


def unpin_artifact(backend: Backend, call: Call[doc.Nothing, doc.Nothing]) -> doc.Pinned:
    """Let an artifact go when its time has come."""
    key = named(backend, call.path["key"])
    if not pins.lift(backend.store, key):
        raise NotFoundError(f"{key} is not pinned", hint=f"cachemgr pin {key[:12]}")
    return doc.Pinned(key=key, pin=None)


def plan_of_removal(backend: Backend, call: Call[doc.Nothing, doc.Nothing]) -> doc.RemovalPlan:
    """Say what removing an artifact takes away, and change nothing.

    Raises:
        InUseError: it is pinned.
    """
    return _plan(backend, named(backend, call.path["key"]))


def remove_artifact(backend: Backend, call: Call[doc.PlanNamed, doc.Nothing]) -> doc.RemovalPlan:
    """Remove an artifact as the plan says that was shown; refused when something else would go by now."""
    key = named(backend, call.path["key"])
    plan = _plan(backend, key)
    require_same(plan.name, call.query.plan)
    outlines = backend.cache.outlines(backend.store)
    if remove(backend.store, plan.removal, outlines, taken=lambda: pins.held(backend.store, [key], now=backend.now)):
        pins.require_unpinned(backend.store, [key], now=backend.now)
    return msgspec.structs.replace(plan, done=True)


def _plan(backend: Backend, key: Key) -> doc.RemovalPlan:
    pins.require_unpinned(backend.store, [key], now=backend.now)
    held = holdings(backend.store, backend.cache.outlines(backend.store))
    removal = plan_removal(backend.store, [key], now=backend.now, held=held)
    return doc.RemovalPlan(name=name_of(*removal.manifests, *removal.layers), removal=removal)


def name_of(*things: str) -> str:
    """A name of a plan that takes these things away."""
    return digest.fingerprint_of(things)


def require_same(now: str, shown_before: str) -> None:
    """Refuse a deed whose plan is another one by now.

    Raises:
        RefusedError: it is.
    """
    if now != shown_before:
        raise RefusedError(409, "something else would go by now than the plan said", hint="ask for the plan again")
