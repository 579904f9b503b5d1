"""Pages for people: templates and how they write numbers. Everything is rendered here; no script is needed, or run."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cachemgr import __version__, sizes
from cachemgr.server.contract import Problem

_HERE = Path(__file__).parent
STATIC = _HERE / "static"


def _size(count: float) -> str:
    return sizes.spell(int(count))


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) >= 7200:
        return f"{value / 3600:,.1f} h"
    return f"{value:,.1f} s" if abs(value) < 100 else f"{value:,.0f} s"


def _count(number: int) -> str:
    return f"{number:,}"


def _day(text: str) -> str:
    """A time of ours without its letters."""
    return text[:16].replace("T", " ")


def link(path: str, **query: str | None) -> str:
    """A URL of ours; what is None or empty is left out."""
    given = {name: value for name, value in query.items() if value}
    return f"{path}?{urlencode(given)}" if given else path


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(_HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters.update(
    size=_size,
    seconds=_seconds,
    percent=sizes.percent,
    count=_count,
    counted=sizes.counted,
    day=_day,
    short=lambda key: key[:12],
)
_ENVIRONMENT.globals.update(version=__version__, link=link)


def render(template: str, values: Mapping[str, object]) -> str:
    """A page."""
    return _ENVIRONMENT.get_template(template).render(values)


def problem(why: Problem) -> str:
    """The page that says why there is no other."""
    return render("problem.html", {"title": why.title, "here": "", "problem": why})
