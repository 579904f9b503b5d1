"""Sizes as people and Kubernetes write them, and counts: one reading and one spelling for settings, reasons, tables."""

import re

_TEXT = re.compile(r"(\d+(?:\.\d+)?) *(?:([kmgt])(i)?)?b?", re.IGNORECASE | re.ASCII)
_DIGITS = 30
_POWERS = " KMGT"
_UNITS = ("B", "kB", "MB", "GB", "TB")


def parse(text: str) -> int:
    """Bytes of `20GB` (powers of 1000), `20GiB` or Kubernetes' `20Gi` (of 1024), or a plain number.

    Raises:
        ValueError: it is none of these.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None or len(found[1]) > _DIGITS:
        raise ValueError("must be a size such as 20GB or 20GiB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS.index((found[2] or " ").upper()))


def spell(count: int) -> str:
    """Bytes for people, in powers of 1000."""
    value = float(count)
    for unit in _UNITS:
        if value < 999.5 or unit == _UNITS[-1]:
            return f"{count} B" if unit == "B" else f"{value:.{1 if value < 99.5 else 0}f} {unit}"
        value /= 1000
    raise AssertionError("the last unit takes any size")


def counted(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def percent(rate: float | None) -> str:
    """`25%`; a dash where there is nothing to have a share of."""
    return "-" if rate is None else f"{rate:.0%}"
