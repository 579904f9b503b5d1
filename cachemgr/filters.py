"""Filters over artifacts, as people type them: `model=llama*`, `size>1GB`, `age<30d`, `complete=yes`.

A filter is a field, a comparison and a value, without a language around it: several filters must all hold.
"""

import operator
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from cachemgr import sizes
from cachemgr.clock import moment
from cachemgr.errors import UsageError
from cachemgr.inventory import Summary

Filter = Callable[[Summary], bool]

_FORM = re.compile(r"\s*([a-z_]+)\s*(!=|>=|<=|=|>|<)\s*(.*?)\s*", re.DOTALL)
_ORDERS: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_AGES = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}
_PLAIN = {"": 1}
_YES, _NO = frozenset({"yes", "true", "1"}), frozenset({"no", "false", "0"})

_TEXTS: dict[str, Callable[[Summary], Sequence[str]]] = {
    "key": lambda summary: (summary.key,),
    "engine": lambda summary: (summary.engine,),
    "engine_version": lambda summary: (summary.engine_version or "unknown",),
    "model": lambda summary: (summary.model,),
    "device": lambda summary: (summary.device,),
    "domain": lambda summary: summary.domains,
}
_SWITCHES: dict[str, Callable[[Summary], bool]] = {
    "complete": lambda summary: summary.complete,
    "pinned": lambda summary: summary.pinned,
}
_SIZES: dict[str, Callable[[Summary], float]] = {
    "size": lambda summary: summary.bytes,
    "stored": lambda summary: summary.stored_bytes,
}
_NUMBERS: dict[str, Callable[[Summary], float]] = {
    "files": lambda summary: summary.files,
    "captures": lambda summary: summary.captures,
    "uses": lambda summary: summary.uses,
}
_TIMES: dict[str, Callable[[Summary], str]] = {
    "age": lambda summary: summary.created,
    "unused": lambda summary: summary.last_used or summary.created,
}
FIELDS = (*_TEXTS, *_SWITCHES, *_SIZES, *_NUMBERS, *_TIMES)
"""What can be asked for: texts with `*` and `?`, sizes as `cachemgr.sizes` reads them, ages in s, min, h, d, w, y."""


def parse(texts: Sequence[str], *, now: float) -> Filter:
    """One filter that holds where all of these do; `now` is what ages are counted from, in seconds since the epoch.

    Raises:
        UsageError: one of them cannot be read.
    """
    filters = [_parsed(text, now) for text in texts]
    return lambda summary: all(holds(summary) for holds in filters)


def _parsed(text: str, now: float) -> Filter:
    found = _FORM.fullmatch(text)
    if found is None:
        raise UsageError(f"`{text}` is no filter", hint="-f 'model=llama*', -f 'size>1GB', -f 'age<30d'")
    field, sign, value = found.groups()
    if field in _TEXTS:
        return _text(text, _TEXTS[field], sign, value)
    if field in _SWITCHES:
        return _switch(text, _SWITCHES[field], sign, value)
    if field in _SIZES:
        return _number(_SIZES[field], sign, _size(text, value))
    if field in _NUMBERS:
        return _number(_NUMBERS[field], sign, _amount(text, value, _PLAIN))
    if field in _TIMES:
        time, wanted, order = _TIMES[field], _amount(text, value, _AGES), _ORDERS[sign]
        return lambda summary: order(now - moment(time(summary)), wanted)
    raise UsageError(f"`{field}` in `{text}` is nothing to filter by", hint=f"one of {', '.join(FIELDS)}")


def _text(text: str, field: Callable[[Summary], Sequence[str]], sign: str, pattern: str) -> Filter:
    if sign not in ("=", "!="):
        raise UsageError(f"`{text}` compares names by size", hint="= or !=, with * and ? in the value")
    return lambda summary: any(fnmatchcase(name, pattern) for name in field(summary)) == (sign == "=")


def _switch(text: str, field: Callable[[Summary], bool], sign: str, value: str) -> Filter:
    if sign not in ("=", "!=") or value.lower() not in _YES | _NO:
        raise UsageError(f"`{text}` asks for neither yes nor no", hint="-f complete=yes")
    wanted = (value.lower() in _YES) == (sign == "=")
    return lambda summary: field(summary) == wanted


def _number(number: Callable[[Summary], float], sign: str, wanted: float) -> Filter:
    order = _ORDERS[sign]
    return lambda summary: order(number(summary), wanted)


def _size(text: str, value: str) -> float:
    try:
        return sizes.parse(value)
    except ValueError as error:
        raise UsageError(f"`{value}` in `{text}` is no size: it {error}", hint="-f 'size>1GB'") from None


def _amount(text: str, value: str, units: dict[str, int]) -> float:
    found = _AMOUNT.fullmatch(value)
    unit = None if found is None else units.get(found[2].lower())
    if found is None or unit is None:
        known = " ".join(name for name in units if name) or "none"
        raise UsageError(f"`{value}` in `{text}` is no amount", hint=f"a number with a unit; units: {known}")
    return float(found[1]) * unit
