"""The pages: what each shows, in terms of the API that programs have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from cachemgr import sizes
from cachemgr.catalogue.artifacts import Wanted, artifacts
from cachemgr.catalogue.launches import Asked as AskedLaunches
from cachemgr.catalogue.launches import launches
from cachemgr.catalogue.statistics import Group, statistics
from cachemgr.clock import age_of
from cachemgr.clock import written as time_text
from cachemgr.errors import CacheError, UsageError
from cachemgr.key import Factor, Key, by_role, compare
from cachemgr.server import charts, contract, page
from cachemgr.server.access import Visitor
from cachemgr.server.api.artifacts import named, shown
from cachemgr.server.api.launches import explained
from cachemgr.server.api.launches import named as launch_named
from cachemgr.server.api.operating import planned
from cachemgr.server.api.table import OPERATIONS
from cachemgr.server.backend import Backend
from cachemgr.server.operations import cursor, written
from cachemgr.settings import typed_age

_DAY = 86400
_LISTED = 50
_NEIGHBOURS = 8
_SPANS = {"7d": 7, "30d": 30, "90d": 90}


@dataclass(frozen=True)
class Asked:
    """What a browser asks for."""

    path: Mapping[str, str]
    query: Mapping[str, str]
    visitor: Visitor

    def text(self, name: str) -> str:
        """A field of a form; empty where it was not filled in.

        Raises:
            UsageError: it has characters in it that cannot be printed.
        """
        value = self.query.get(name, "").strip()
        if not value.isprintable():
            raise UsageError(f"`{name}` has characters in it that cannot be printed", hint="type it again")
        return value


@dataclass(frozen=True)
class Page:
    """One page."""

    path: str
    name: str
    show: Callable[[Backend, Asked], str]


def _overview(backend: Backend, asked: Asked) -> str:
    span = asked.text("span") if asked.text("span") in _SPANS else "30d"
    since = time_text(backend.now - _SPANS[span] * _DAY)
    wanted = AskedLaunches(since=since)
    found = statistics(backend.catalogue, backend.source, wanted, by="day")
    days = sorted(found.groups, key=lambda group: group.name)
    models = statistics(backend.catalogue, backend.source, wanted, by="model").groups[:10]
    return page.render(
        "overview.html",
        {
            "title": "Fleet",
            "here": "/",
            "store": str(backend.store),
            "span": span,
            "spans": tuple(_SPANS),
            "total": found.total,
            "stored": found.stored,
            "missed": found.missed[:10],
            "days": days,
            "models": models,
            "rates": charts.over_days([(day.name, day.starts.hit_rate, _rate(day)) for day in days], most=1.0),
            "saved": charts.over_days([(day.name, day.starts.saved_seconds, _saved(day)) for day in days]),
            "chart": (charts.WIDTH, charts.HEIGHT),
        },
    )


def _rate(day: Group) -> str:
    rate = day.starts.hit_rate
    return f"{day.name}: {'unknown' if rate is None else f'{rate:.0%}'} of {day.starts.starts} starts"


def _saved(day: Group) -> str:
    return f"{day.name}: {day.starts.saved_seconds or 0:,.0f} s"


def _artifacts(backend: Backend, asked: Asked) -> str:
    fields = {name: asked.text(name) for name in ("search", "device", "engine_version", "complete")}
    wanted = Wanted(
        key=_prefix(fields["search"]) if _is_key(fields["search"]) else None,
        model=None if _is_key(fields["search"]) else _anywhere(fields["search"]),
        device=_anywhere(fields["device"]),
        engine_version=_anywhere(fields["engine_version"]),
        complete={"yes": True, "no": False}.get(fields["complete"]),
    )
    after = cursor(asked.query.get("after"))
    found = artifacts(backend.catalogue, backend.source, wanted, limit=_LISTED, after=after)
    return page.render(
        "artifacts.html",
        {
            "title": "Artifacts",
            "here": "/artifacts",
            "found": found.artifacts,
            "ages": {each.key: age_of(each.created, backend.now) for each in found.artifacts},
            "fields": fields,
            "more": None if found.after is None else page.link("/artifacts", **fields, after=written(found.after)),
        },
    )


def _is_key(text: str) -> bool:
    return text.startswith("k1:")


def _prefix(text: str) -> str:
    return f"{text}*"


def _anywhere(text: str) -> str | None:
    """A part of a name, unless it has a `*` of its own."""
    return None if not text else text if "*" in text else f"*{text}*"


def _artifact(backend: Backend, asked: Asked) -> str:
    key = named(backend, asked.path["key"])
    found = shown(backend, key)
    factors = found.captures[0].manifest.factors
    summary = found.artifact
    return page.render(
        "artifact.html",
        {
            "title": f"{summary.model} {key[:12]}",
            "here": "/artifacts",
            "found": found,
            "summary": summary,
            "factors": by_role(factors),
            "history": found.launches,
            "against": charts.against(summary.cold_seconds, summary.warm_seconds),
            "neighbours": _neighbours(backend, key, factors, summary.model),
            "chart": (charts.WIDTH, charts.HEIGHT),
        },
    )


class Neighbour(msgspec.Struct, frozen=True):
    """Another artifact of the same model, and in what it differs."""

    key: Key
    created: str
    result: str
    differs: tuple[str, ...]


def _neighbours(backend: Backend, key: Key, factors: tuple[Factor, ...], model: str) -> list[Neighbour]:
    listed = artifacts(backend.catalogue, backend.source, Wanted(model=model), limit=4 * _NEIGHBOURS).artifacts
    found = []
    for each in listed:
        theirs = backend.index.factors_of(each.key)
        if each.key != key and theirs:
            comparison = compare(factors, theirs)
            differs = tuple(
                f"{one.factor}: {one.wanted or 'unset'} ≠ {one.stored or 'unset'} ({one.role})"
                for one in comparison.differs
            )
            found.append(Neighbour(each.key, each.created, comparison.result, differs))
    return sorted(found, key=lambda each: len(each.differs))[:_NEIGHBOURS]


def _launches(backend: Backend, asked: Asked) -> str:
    fields = {name: asked.text(name) for name in ("model", "host", "verdict")}
    wanted = AskedLaunches(
        model=_anywhere(fields["model"]), host=_anywhere(fields["host"]), verdict=fields["verdict"] or None
    )
    after = cursor(asked.query.get("after"))
    found = launches(backend.catalogue, backend.source, wanted, limit=_LISTED, after=after)
    return page.render(
        "launches.html",
        {
            "title": "Launches",
            "here": "/launches",
            "found": found.launches,
            "parts": {each.launch: charts.stacked(each.phases, each.restore_seconds) for each in found.launches},
            "chart": (charts.WIDTH, charts.HEIGHT),
            "fields": fields,
            "verdicts": ("used", "partly used", "inert", "cold", "unknown"),
            "more": None if found.after is None else page.link("/launches", **fields, after=written(found.after)),
        },
    )


def _launch(backend: Backend, asked: Asked) -> str:
    launch = launch_named(backend, asked.path["launch"])
    return page.render(
        "launch.html",
        {
            "title": f"Launch {launch.launch}",
            "here": "/launches",
            "launch": launch,
            "why": explained(backend, launch),
            "parts": charts.stacked(launch.phases, launch.restore_seconds),
            "chart": (charts.WIDTH, charts.HEIGHT),
        },
    )


def _prune(backend: Backend, asked: Asked) -> str:
    fields = {name: asked.text(name) for name in ("max_size", "older_than", "unused_for", "keep_last")}
    plan, trouble = None, ""
    try:
        plan = planned(backend, _limits(fields)).plan if any(fields.values()) or "preview" in asked.query else None
    except CacheError as error:
        trouble = f"{error} ({error.hint})" if error.hint else str(error)
    return page.render(
        "prune.html",
        {"title": "Prune preview", "here": "/prune", "fields": fields, "plan": plan, "trouble": trouble},
    )


def _limits(fields: Mapping[str, str]) -> contract.PruneWanted:
    try:
        return contract.PruneWanted(
            max_size=sizes.parse(fields["max_size"]) if fields["max_size"] else None,
            older_than=typed_age(fields["older_than"]) if fields["older_than"] else None,
            unused_for=typed_age(fields["unused_for"]) if fields["unused_for"] else None,
            keep_last=int(fields["keep_last"]) if fields["keep_last"] else None,
        )
    except ValueError as error:
        raise UsageError(f"a limit cannot be read: it {error}", hint="sizes such as 50GB, ages such as 30d") from None


def _health(backend: Backend, _asked: Asked) -> str:
    condition = backend.condition
    found = statistics(backend.catalogue, backend.source)
    return page.render(
        "health.html",
        {
            "title": "Health",
            "here": "/health",
            "condition": condition,
            "store": str(backend.store),
            "catalogue": str(backend.catalogue),
            "read_only": backend.read_only,
            "errors": found.errors,
        },
    )


def _api(_backend: Backend, _asked: Asked) -> str:
    return page.render("api.html", {"title": "API", "here": "/v1", "operations": OPERATIONS})


PAGES = (
    Page("/", "overview", _overview),
    Page("/artifacts", "artifacts", _artifacts),
    Page("/artifacts/{key}", "artifact", _artifact),
    Page("/launches", "launches", _launches),
    Page("/launches/{launch}", "launch", _launch),
    Page("/prune", "prune", _prune),
    Page("/health", "health", _health),
    Page("/v1", "api", _api),
)
