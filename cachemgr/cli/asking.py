"""What `--server URL` asks instead of the stores of this machine, in the terms of the API (`cachemgr.server.contract`).

Imported by the commands that ask when they do, because the contract brings the types of the catalogue with it.
"""

from collections.abc import Sequence

import msgspec

from cachemgr.catalogue.statistics import Statistics
from cachemgr.explain import Account
from cachemgr.inventory import Summary
from cachemgr.key import Factor, Relations
from cachemgr.lookup import NOTHING, Found
from cachemgr.server import contract
from cachemgr.service import Service, segment
from cachemgr.store.captures import Capture, Standing

_PAGE = 1000


def artifacts(service: Service) -> Sequence[Summary]:
    """Every artifact, the newest first.

    Raises:
        CacheError: as `Service.get`; so do the others here.
    """
    found: list[Summary] = []
    after: str | None = None
    while True:
        page = service.get("/v1/artifacts", contract.Artifacts, limit=_PAGE, after=after)
        found += page.artifacts
        after = page.after
        if after is None:
            return found


def artifact(service: Service, key: str) -> contract.Artifact:
    """One artifact, by its key or the beginning of it."""
    return service.get(f"/v1/artifacts/{segment(key)}", contract.Artifact)


def captures_of(found: contract.Artifact) -> list[Capture]:
    """Its captures, with what the service says of their trust."""
    return [
        Capture(each.digest, each.manifest, each.stored, Standing(by=each.trust.by or "", doubt=each.trust.doubt or ""))
        for each in found.captures
    ]


def statistics(service: Service, *, since: str | None, by: str | None) -> Statistics:
    """Whether the cache pays."""
    told = service.get("/v1/stats", contract.Stats, since=since, by=by)
    return Statistics(told.total, told.missed, told.errors, told.stored, told.groups)


def why(service: Service, *, launch: str | None = None, key: str | None = None, host: str | None = None) -> Account:
    """Why a launch was not warm."""
    return service.get("/v1/why", contract.Why, launch=launch, key=key, host=host).why


def why_before(service: Service, factors: Sequence[Factor], host: Relations) -> Account:
    """Why a launch of these factors would not be."""
    return service.post("/v1/why", _question(factors, host), contract.Why).why


def look_up(service: Service, factors: Sequence[Factor], host: Relations) -> Found:
    """What the service's store has for a launch."""
    told = service.post("/v1/lookup", _question(factors, host), contract.Looked)
    return msgspec.structs.replace(
        NOTHING,
        result=told.result,
        artifact=told.artifact,
        differs=told.differs,
        relations=told.relations,
        reasons=tuple(map(str, told.relations)),
        where=told.where,
    )


def _question(factors: Sequence[Factor], host: Relations) -> bytes:
    return msgspec.json.encode(contract.LookupWanted(factors=tuple(factors), host=host))
