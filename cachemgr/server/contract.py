"""What the API takes and answers. Sizes are in bytes, durations in seconds, times RFC 3339 in UTC."""

from typing import Literal

import msgspec

from cachemgr.capture import Launch, Manifest, Where
from cachemgr.catalogue.artifacts import Wanted
from cachemgr.catalogue.launches import Asked
from cachemgr.catalogue.service import Change
from cachemgr.catalogue.statistics import By, Group, Missed, Starts, Stored
from cachemgr.digest import Digest
from cachemgr.doctor.finding import Finding
from cachemgr.explain import Account
from cachemgr.inventory import Summary
from cachemgr.key import Broken, Difference, Factor, Key, Relations, Result
from cachemgr.prune.artifacts import Plan
from cachemgr.store.claims import Owner
from cachemgr.store.pins import Pin
from cachemgr.store.removal import Removal

NO_RELATIONS = Relations()


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a query, or a body: what is not known is refused."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """An answer."""

    schema: int = 1


class Nothing(Question, frozen=True):
    """No parameters, or no body."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why something is not answered (RFC 9457), in the sentence of the command line."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    hint: str | None = None
    word: str = "failed"
    exit_code: int = 1
    """What the command line would exit with."""


class ArtifactsWanted(Wanted, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which artifacts; names may have `*` in them."""

    limit: int = 100
    """At most 1000."""
    after: str | None = None
    """`after` of the page before."""


class Artifacts(Document, frozen=True, kw_only=True):
    """A page of artifacts, the newest first."""

    artifacts: tuple[Summary, ...]
    after: str | None
    """What asks for those that follow; null at the end."""


class Trusted(msgspec.Struct, frozen=True):
    """Who answers for a capture, or why it should not be used, as this server sees it."""

    by: str | None
    doubt: str | None


class HeldCapture(msgspec.Struct, frozen=True):
    """A capture as the store has it."""

    digest: Digest
    stored: int
    trust: Trusted
    manifest: Manifest


class Artifact(Document, frozen=True, kw_only=True):
    """One artifact with everything that is in it."""

    artifact: Summary
    pin: Pin | None
    captures: tuple[HeldCapture, ...]
    damaged: tuple[str, ...]
    """Captures that cannot be read, each with the reason."""
    launches: tuple[Launch, ...]
    """The newest ones that had this key or took from the artifact."""


class PinWanted(Question, frozen=True):
    """For how long, and why; both null is for ever."""

    reason: str = ""
    keep_days: int | None = None
    keep_last: int | None = None


class Pinned(Document, frozen=True, kw_only=True):
    """How an artifact is pinned now."""

    key: Key
    pin: Pin | None


class PlanNamed(Question, frozen=True):
    """Which plan is to be carried out."""

    plan: str
    """Its `name`, as it was shown."""


class RemovalPlan(Document, frozen=True, kw_only=True):
    """What removing an artifact takes away."""

    name: str
    """Names what goes; the deed asks for it, and is refused when something else would go by then."""
    removal: Removal
    done: bool = False


class LookupWanted(Question, frozen=True):
    """What a launch is made of, and what its host offers."""

    factors: tuple[Factor, ...]
    host: Relations = NO_RELATIONS


class Looked(Document, frozen=True, kw_only=True):
    """What the store has for a launch."""

    result: Result
    key: Key
    artifact: Key | None
    """The one found, or the nearest."""
    differs: tuple[Difference, ...]
    relations: tuple[Broken, ...]
    where: Where | None
    """Where this server has it; null when there is nothing to restore."""


class Reported(Question, frozen=True):
    """Launches, as `run --report` writes them."""

    launches: tuple[Launch, ...]


class Taken(Document, frozen=True, kw_only=True):
    """How many launches are kept now, whatever happens."""

    taken: int


class LaunchesWanted(Asked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which launches; names may have `*` in them."""

    limit: int = 100
    """At most 1000."""
    after: str | None = None


class Launches(Document, frozen=True, kw_only=True):
    """A page of launches, the newest first."""

    launches: tuple[Launch, ...]
    after: str | None


class OneLaunch(Document, frozen=True, kw_only=True):
    """One launch."""

    launch: Launch


class WhyWanted(Question, frozen=True):
    """Which launch: by its name, or else the last one of a key or host, or of all."""

    launch: str | None = None
    key: str | None = None
    host: str | None = None


class Why(Document, frozen=True, kw_only=True):
    """Why a start was, or would be, as warm as it is."""

    why: Account


class StatsWanted(Asked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Over which launches, and in which groups."""

    by: By | None = None


class Stats(Document, frozen=True, kw_only=True):
    """Whether the cache pays."""

    total: Starts
    missed: tuple[Missed, ...]
    errors: dict[str, int]
    stored: Stored
    dedup: float | None
    compression: float | None
    groups: tuple[Group, ...]


class Claim(Document, frozen=True, kw_only=True):
    """The newest claim on a key; all null when nobody has one."""

    key: Key
    number: int | None
    owner: Owner | None
    modified: float | None
    """Of its last beat, in seconds since the epoch of the store."""


class ClaimWanted(Question, frozen=True):
    """Who wants to compile, and after which claim (null: the first)."""

    owner: Owner
    after: int | None = None


class ClaimTaken(Document, frozen=True, kw_only=True):
    """The number of the claim that was taken; null when somebody else has it."""

    number: int | None


class ClaimHeld(Document, frozen=True, kw_only=True):
    """Whether a claim is there still."""

    held: bool


class Claimant(Question, frozen=True):
    """Whose claim it is: the name of the launch."""

    launch: str


class PruneWanted(Question, frozen=True):
    """Limits as those of `cachemgr prune`, sizes in bytes and ages in seconds. Without any, only what is damaged,
    superseded or left over goes."""

    max_size: int | None = None
    max_files: int | None = None
    older_than: float | None = None
    unused_for: float | None = None
    keep_last: int | None = None


class PruneDeed(PruneWanted, frozen=True, kw_only=True):
    """The same limits, and the name of the plan that was shown for them."""

    plan: str


class PrunePlan(Document, frozen=True, kw_only=True):
    """What a prune takes away, or has taken."""

    name: str
    plan: Plan
    done: bool = False


class Doctor(Document, frozen=True, kw_only=True):
    """What stands in the way of this server."""

    findings: tuple[Finding, ...]
    healthy: bool


class Audit(Document, frozen=True, kw_only=True):
    """Changes, the newest first."""

    changes: tuple[Change, ...]


class AuditWanted(Question, frozen=True):
    """How many changes, at most 1000."""

    limit: int = 100


class Health(Document, frozen=True, kw_only=True):
    """Whether this replica works."""

    status: Literal["ok", "starting", "failing"]
    detail: str = ""
