"""What operators ask for: prune as a plan and its deed, the doctor, the audit."""

from pathlib import Path

import msgspec

from cachemgr import places
from cachemgr.catalogue.service import changes
from cachemgr.doctor import examine
from cachemgr.doctor.finding import Opened, Patient
from cachemgr.errors import UsageError
from cachemgr.history import last_uses
from cachemgr.prune import artifacts as pruning
from cachemgr.prune.artifacts import Plan, Wish
from cachemgr.prune.limits import Limits
from cachemgr.server import contract as doc
from cachemgr.server.api.artifacts import name_of, require_same
from cachemgr.server.backend import Backend
from cachemgr.server.operations import Call, page_size
from cachemgr.store.records import launches


def plan_prune(backend: Backend, call: Call[doc.PruneWanted, doc.Nothing]) -> doc.PrunePlan:
    """Say what a prune with these limits takes away, and change nothing."""
    return planned(backend, call.query)


def planned(backend: Backend, wanted: doc.PruneWanted) -> doc.PrunePlan:
    """The plan for these limits.

    Raises:
        UsageError: a limit cannot be, or nobody knows what was used when.
        StoreError: the store cannot be read, so that nothing may be removed.
    """
    for name in ("max_size", "max_files", "older_than", "unused_for", "keep_last"):
        value = getattr(wanted, name)
        if value is not None and not 0 <= value < 1 << 60:
            raise UsageError(f"`{name}` is {value}, which is no limit", hint="bytes, files or seconds, from 0")
    if backend.mirrored and wanted.unused_for is not None:
        pruning.require_records(backend.store, wanted.unused_for, now=backend.now)
    limits = Limits(
        max_size=wanted.max_size,
        max_files=wanted.max_files,
        older_than=wanted.older_than,
        unused_for=wanted.unused_for,
        keep_last=wanted.keep_last,
    )
    plan = pruning.plan(
        backend.store,
        Wish(limits),
        outlines=backend.cache.outlines(backend.store),
        uses=last_uses(launches(backend.store)),
        judge=backend.cache.trust.opinion,
        root=None if backend.mirrored else Path(str(backend.store)),
        free=0 if backend.mirrored else places.free_bytes(str(backend.store)),
        now=backend.now,
    )
    return doc.PrunePlan(name=_name(plan), plan=plan)


def _name(plan: Plan) -> str:
    return name_of(*plan.removal.manifests, *plan.removal.layers, *(scrap.name for scrap in plan.scraps))


def prune(backend: Backend, call: Call[doc.Nothing, doc.PruneDeed]) -> doc.PrunePlan:
    """Prune as the plan says that was shown; refused when something else would go by now."""
    given = call.body
    fields = {name: getattr(given, name) for name in doc.PruneWanted.__struct_fields__}
    shown = planned(backend, doc.PruneWanted(**fields))
    require_same(shown.name, given.plan)
    cache = backend.cache
    outlines, judge = cache.outlines(backend.store), cache.trust.opinion
    done = pruning.carry_out(backend.store, shown.plan, outlines=outlines, judge=judge, now=backend.now)
    return msgspec.structs.replace(shown, plan=done, done=True)


def doctor(backend: Backend, _call: Call[doc.Nothing, doc.Nothing]) -> doc.Doctor:
    """Look at settings, directories, store and trust of this server."""
    patient = Patient(
        environ=backend.environ,
        cwd=Path("/"),
        host=backend.host,
        now=backend.now,
        opened=Opened(backend.settings, backend.cache),
    )
    findings = tuple(examine(patient))
    return doc.Doctor(findings=findings, healthy=not any(finding.severity == "error" for finding in findings))


def list_changes(backend: Backend, call: Call[doc.AuditWanted, doc.Nothing]) -> doc.Audit:
    """List changes that were asked for, the newest first."""
    return doc.Audit(changes=changes(backend.catalogue, limit=page_size(call.query.limit)))
