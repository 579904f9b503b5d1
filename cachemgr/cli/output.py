"""The only place that formats: tables, sizes, ages and sentences for people, one JSON document for programs.

Data goes to stdout, talk to stderr. Nothing is said by colour alone, and no table is cut when the
output is piped.
"""

import json
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

import click
import msgspec

from cachemgr import sizes
from cachemgr.cli.plain import plain
from cachemgr.key import Difference, Key

Format = Literal["table", "json", "quiet"]
F = TypeVar("F", bound=Callable[..., None])

SCHEMA = 1
_PIPED_COLUMNS = 1_000_000
_GAP = "  "
_LEAST = 12
"""Columns of a text in a table that are left before another text is shortened as well."""
_MOST = 40
"""Columns of a value in a sentence."""
_FIRST = 2
"""Differing factors that a sentence has."""
_BEFORE = 8
"""Columns of what two long values have in common that are shown before they part."""
_HASH = re.compile(r"(?<![0-9a-f])[0-9a-f]{32,}(?![0-9a-f])")
_PATH = re.compile(r"/[^\s:,'\"()]{80,}")


def listing(function: F) -> F:
    """The options of everything that lists: `--format`, `--json`, `-q`."""
    for option in (
        click.option("-q", "--quiet", is_flag=True, help="names only, one a line"),
        click.option("--json", "as_json", is_flag=True, help="short for --format json"),
        click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True),
    ):
        function = option(function)
    return function


def chosen(form: str, *, as_json: bool, quiet: bool) -> Format:
    """Which of the three forms the options of `listing` ask for."""
    if as_json or form == "json":
        return "json"
    return "quiet" if quiet else "table"


def document(**content: Any) -> None:
    """Print one JSON document with its schema number."""
    data = msgspec.json.encode({"schema": SCHEMA, **content}, order="sorted")
    text = msgspec.json.format(data, indent=2).decode()
    # JSON escapes only some of what a terminal would act upon; all of that stands in strings.
    click.echo("\n".join(line if line.isprintable() else _escaped(line) for line in text.split("\n")))


def _escaped(line: str) -> str:
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in line)


def lines(names: Sequence[str]) -> None:
    """Print what is for a script, one a line and as it is."""
    if names:
        click.echo("\n".join(names))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), flexible: str) -> None:
    """Print rows under headers. Where a terminal is too narrow, the `flexible` column is shortened, and other texts
    only where that does not do; never the first column, which names what the row is about, and no number."""
    grid = [list(headers), *([plain(cell) for cell in row] for row in rows)]
    widths = [max(_width(row[column]) for row in grid) for column in range(len(headers))]
    rights = [header in right for header in headers]
    bends = headers.index(flexible)
    others = [column for column, number in enumerate(rights) if column not in {0, bends} and not number]
    over = sum(widths) + len(_GAP) * (len(widths) - 1) - _room()
    over -= _narrow(widths, bends, max(_LEAST, len(flexible)), over)
    for column in sorted(others, key=lambda column: -widths[column]):
        over -= _narrow(widths, column, max(_LEAST, len(headers[column])), over)
    _narrow(widths, bends, len(flexible), over)
    printed = []
    for row in grid:
        cells = map(_padded, map(_shortened, row, widths), widths, rights)
        printed.append(_GAP.join(cells).rstrip())
    click.echo("\n".join(printed))


def _narrow(widths: list[int], column: int, least: int, over: int) -> int:
    """Make a column narrower by up to `over`, and not below `least`; by how much it is now."""
    given = max(min(over, widths[column] - least), 0)
    widths[column] -= given
    return given


def _room() -> int:
    """Columns to print in: those of the terminal, and as many as it takes where there is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPED_COLUMNS


def _width(text: str) -> int:
    """Columns that `text` takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _shortened(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    if width < 1:
        return ""
    while _width(text) > width - 1:
        text = text[:-1]
    return text + "…"


def _padded(text: str, width: int, right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if right else text + space


def record(pairs: Sequence[tuple[str, str]]) -> None:
    """Print named values, aligned; on a terminal a long value goes on below itself."""
    width = max(_width(name) for name, _value in pairs)
    room = max(_room() - width - len(_GAP), 20)
    for name, value in pairs:
        first, *rest = textwrap.wrap(plain(value), room, break_on_hyphens=False) or [""]
        click.echo((_padded(name, width, right=False) + _GAP + first).rstrip())
        for line in rest:
            click.echo(" " * (width + len(_GAP)) + line)


def heading(text: str) -> None:
    """Print a title above what follows."""
    click.echo(f"\n{plain(text)}")


def note(text: str) -> None:
    """Say something to a person, on stderr; where that is full or gone, what is said about goes on all the same."""
    with suppress(OSError):
        click.echo(plain(text), err=True)


def say(text: str) -> None:
    """One line of a launch, on stderr."""
    click.echo(f"cachemgr: {plain(text)}", err=True)


def size(count: int) -> str:
    """Bytes for people, in powers of 1000."""
    return sizes.spell(count)


def seconds(value: float) -> str:
    """A duration for people."""
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def counted(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return sizes.counted(count, noun)


def skipped(objects: int, noun: str, count: int) -> None:
    """Say what was not sent, because it is there; `count` is its bytes."""
    if objects:
        note(f"skipped {counted(objects, noun)} ({size(count)}), which {'are' if objects > 1 else 'is'} there already")


def later(count: int) -> str:
    """What is said of layers of so many bytes that nothing refers to, and that are too young to go."""
    return f"{size(count)} of layers can go once they are a day old"


def short(key: str | Key) -> str:
    """A key or digest as people read it."""
    return key.removeprefix("sha256:")[:12]


def difference(differs: Difference) -> str:
    """One differing factor with both values and its role."""
    absent = "unknown" if differs.role == "guard" else "unset"
    wanted, stored = (absent if value is None else value for value in (differs.wanted, differs.stored))
    if min(len(wanted), len(stored)) > _MOST:
        same = max(len(os.path.commonprefix([wanted, stored])) - _BEFORE, 0)  # noqa: RUF071 - of texts
        wanted, stored = (f"…{value[same:]}" if same else value for value in (wanted, stored))
    return f"{differs.factor} {_clipped(wanted)}≠{_clipped(stored)} ({differs.role})"


def factor_value(value: str | None) -> str:
    """A factor's value, also when it could not be read."""
    return "unknown" if value is None else value


def brief(text: str) -> str:
    """A sentence with its long paths and hashes cut to what tells them apart; reports have them whole."""
    hashes = _HASH.sub(lambda found: found[0][:8] + "…", text)
    return _PATH.sub(lambda found: "…/" + "/".join(found[0].split("/")[-4:]), hashes)


def _clipped(text: str) -> str:
    text = brief(text)
    return text if len(text) <= _MOST else text[: _MOST - 3] + "…"


def differences(differs: Sequence[Difference]) -> str:
    """The first differing factors in a sentence."""
    telling_ones = telling(differs)
    told = ", ".join(map(difference, telling_ones[:_FIRST]))
    return told if len(telling_ones) <= _FIRST else f"{told} and {len(telling_ones) - _FIRST} more"


def telling(differs: Sequence[Difference]) -> Sequence[Difference]:
    """The differences that say something: between two engines it is that, and not the factors that only one has."""
    return [each for each in differs if each.factor == "engine"] or differs
