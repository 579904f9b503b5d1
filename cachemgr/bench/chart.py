"""Bars: seconds of starts, as text and as SVG."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from cachemgr.bench.starts import Row

_COLUMNS = 40
_BAR, _GAP, _LEFT, _WIDTH, _RIGHT = 18, 8, 220, 480, 80
"""Of the drawing, in pixels."""


def bars(rows: Sequence[Row]) -> list[str]:
    """A bar for each row, the longest as wide as there is room; failed starts have none."""
    longest = max((row.took for row in rows if not row.failed), default=0.0)
    return ["" if row.failed or not longest else "█" * max(1, round(row.took / longest * _COLUMNS)) for row in rows]


def svg(title: str, rows: Sequence[Row]) -> str:
    """A drawing of the same."""
    return drawn(title, [(f"{row.variant} · {row.kind}", row.took) for row in rows if not row.failed])


def drawn(title: str, bars: Sequence[tuple[str, float]], *, left: int = _LEFT, form: str = ".1f") -> str:
    """Bars of seconds with their labels, for which there are `left` pixels."""
    longest = max((seconds for _label, seconds in bars), default=0.0) or 1.0
    height = (len(bars) + 2) * (_BAR + _GAP)
    size = f'width="{left + _WIDTH + _RIGHT}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        f'<text x="0" y="{_BAR}">{escape(title)}</text>',
    ]
    for number, (label, seconds) in enumerate(bars, start=1):
        top, width = number * (_BAR + _GAP), seconds / longest * _WIDTH
        middle = top + _BAR - 5
        lines += [
            f'<text x="{left - 8}" y="{middle}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{left}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="#4477aa"/>',
            f'<text x="{left + width + 6:.1f}" y="{middle}">{seconds:{form}} s</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
