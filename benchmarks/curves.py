"""Lines over sizes, both axes logarithmic, as SVG: a straight line is a power, and its slope the exponent."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

Line = tuple[str, Sequence[float], Sequence[float]]
"""A name, sizes, and what they cost; all above 0."""

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 520, 340, 70, 34, 200, 40
"""Of the plot and the room around it, in pixels."""
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#555555", "#ee8866")
_LINE = 18
"""Between two lines of text."""


def log_log(title: str, over: str, lines: Sequence[Line]) -> str:
    """The drawing, with a legend in the order of the last values."""
    xs, ys = (
        _decades([x for _n, sizes, _c in lines for x in sizes]),
        _decades([y for _n, _s, costs in lines for y in costs]),
    )
    whole = f'width="{_LEFT + _WIDTH + _RIGHT}" height="{_TOP + _HEIGHT + _BOTTOM}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {whole} font-family="sans-serif" font-size="12">',
        f'<text x="0" y="16">{escape(title)}</text>',
        f'<text x="{_LEFT + _WIDTH / 2:.0f}" y="{_TOP + _HEIGHT + 34}" text-anchor="middle">{escape(over)}</text>',
        *(_vertical(power, xs) for power in range(xs[0], xs[1] + 1)),
        *(_horizontal(power, ys) for power in range(ys[0], ys[1] + 1)),
    ]
    ordered = sorted(lines, key=lambda line: -line[2][-1])
    for number, (name, sizes, costs) in enumerate(ordered):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [(_x(size, xs), _y(cost, ys)) for size, cost in zip(sizes, costs, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        at = _TOP + 12 + number * _LINE
        parts.append(f'<text x="{_LEFT + _WIDTH + 12}" y="{at}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around all of them."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return first, max(last, first + 1)


def _x(value: float, powers: tuple[int, int]) -> float:
    return _LEFT + _WIDTH * (math.log10(value) - powers[0]) / (powers[1] - powers[0])


def _y(value: float, powers: tuple[int, int]) -> float:
    return _TOP + _HEIGHT - _HEIGHT * (math.log10(value) - powers[0]) / (powers[1] - powers[0])


def _vertical(power: int, powers: tuple[int, int]) -> str:
    x = _x(10.0**power, powers)
    line = f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_TOP + _HEIGHT}" stroke="#dddddd"/>'
    return f'{line}<text x="{x:.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{10**power:,}</text>'


def _horizontal(power: int, powers: tuple[int, int]) -> str:
    y = _y(10.0**power, powers)
    line = f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _WIDTH}" y2="{y:.1f}" stroke="#dddddd"/>'
    return f'{line}<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>'
