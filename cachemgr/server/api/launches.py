"""Launches: reported in, listed out, explained and added up; and look-ups before a launch."""

from cachemgr.capture import Launch
from cachemgr.catalogue.launches import Asked, last, launches
from cachemgr.catalogue.launches import named as launch_named
from cachemgr.catalogue.statistics import statistics
from cachemgr.clock import epoch
from cachemgr.errors import NotFoundError, UsageError
from cachemgr.explain import Account, Case, account, of_launch
from cachemgr.key import is_key
from cachemgr.server import contract as doc
from cachemgr.server import reports
from cachemgr.server.backend import Backend
from cachemgr.server.index import require_factors
from cachemgr.server.operations import Call, cursor, page_size, plain, written


def report_launches(backend: Backend, call: Call[doc.Nothing, doc.Reported]) -> doc.Taken:
    """Take launches; the answer comes when they are in the store. Reporting one again changes nothing."""
    reports.check(call.body.launches, now=backend.now)
    backend.reports.keep(call.body.launches)
    return doc.Taken(taken=len(call.body.launches))


def list_launches(backend: Backend, call: Call[doc.LaunchesWanted, doc.Nothing]) -> doc.Launches:
    """List launches, the newest first."""
    wanted = call.query
    plain(wanted)
    _check_times(wanted)
    found = launches(
        backend.catalogue, backend.source, wanted, limit=page_size(wanted.limit), after=cursor(wanted.after)
    )
    return doc.Launches(launches=found.launches, after=written(found.after))


def _check_times(wanted: Asked) -> None:
    for name, given in (("since", wanted.since), ("until", wanted.until)):
        if given is None:
            continue
        try:
            epoch(given)
        except ValueError as error:
            raise UsageError(f"`{name}` {error}", hint=f"{name}=2027-01-31T12:00:00Z") from None


def show_launch(backend: Backend, call: Call[doc.Nothing, doc.Nothing]) -> doc.OneLaunch:
    """Show one launch. The name may be a beginning."""
    return doc.OneLaunch(launch=named(backend, call.path["launch"]))


def named(backend: Backend, name: str) -> Launch:
    """The launch of which this is the name, or the beginning of it.

    Raises:
        NotFoundError, UsageError: none, or several.
    """
    if not name.isprintable():
        raise NotFoundError("no launch has such a name", hint="GET /v1/launches lists them")
    return launch_named(backend.catalogue, backend.source, name)


def why_launch(backend: Backend, call: Call[doc.WhyWanted, doc.Nothing]) -> doc.Why:
    """Say why a launch was not warm: one by name, or the last one of a key or host."""
    plain(call.query)
    return doc.Why(why=explained(backend, _wanted(backend, call.query)))


def _wanted(backend: Backend, wanted: doc.WhyWanted) -> Launch:
    if wanted.launch is not None:
        return named(backend, wanted.launch)
    key = wanted.key
    if key is not None and not is_key(key):
        raise UsageError(f"`{key}` is no whole key", hint="cachemgr ls --json has whole ones")
    asked = Asked(host=wanted.host, key=key)
    found = last(backend.catalogue, backend.source, asked, now=backend.now)
    if found is None:
        raise NotFoundError(f"{backend.store} tells of no such launch", hint="cachemgr why -- CMD, before a start")
    return found


def explained(backend: Backend, launch: Launch) -> Account:
    """Why a launch was as warm as it was."""
    nearest = () if launch.artifact is None else backend.index.factors_of(launch.artifact)
    return of_launch(launch, nearest=nearest)


def look_up(backend: Backend, call: Call[doc.Nothing, doc.LookupWanted]) -> doc.Looked:
    """Say what the store has for a launch: exact, near or none, and what differs."""
    require_factors(call.body.factors)
    return backend.index.look_up(call.body.factors, call.body.host)


def why_before(backend: Backend, call: Call[doc.Nothing, doc.LookupWanted]) -> doc.Why:
    """Say why a launch of these factors would not be warm."""
    require_factors(call.body.factors)
    looked = backend.index.look_up(call.body.factors, call.body.host)
    reasons = tuple(map(str, looked.relations))
    case = Case(looked.key, looked.result, looked.artifact, looked.differs, call.body.factors, reasons)
    nearest = () if looked.artifact is None else backend.index.factors_of(looked.artifact)
    return doc.Why(why=account(case, nearest=nearest))


def add_up(backend: Backend, call: Call[doc.StatsWanted, doc.Nothing]) -> doc.Stats:
    """Say whether the cache pays: hit rate, verdicts, reasons, seconds saved, bytes."""
    wanted = call.query
    plain(wanted)
    _check_times(wanted)
    found = statistics(backend.catalogue, backend.source, wanted, by=wanted.by)
    return doc.Stats(
        total=found.total,
        missed=found.missed,
        errors=found.errors,
        stored=found.stored,
        dedup=found.stored.dedup,
        compression=found.stored.compression,
        groups=found.groups,
    )
