"""Write docs/reference.md: every command, setting, variable and exit code, from the code itself.

    python scripts/reference.py [FILE]

tests/test_reference.py says when the page is behind the code.
"""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from cachemgr import errors
from cachemgr.cli import COMMANDS, cli
from cachemgr.settings import TABLE

PAGE = Path(__file__).parent.parent / "docs" / "reference.md"

HEAD = """# Reference

Every command, setting, variable and exit code. This page is written by `python scripts/reference.py` from the code;
what files look like is in [formats](formats.md).

Shells complete commands and options: `eval "$(_CACHEMGR_COMPLETE=bash_source cachemgr)"`, and `zsh_source` or
`fish_source` there.
"""
SETTINGS = """
In `/etc/cachemgr.toml`, `$XDG_CONFIG_HOME/cachemgr/config.toml` or the file of `--config`; a variable goes before
files, a flag before a variable. `/etc/cachemgr.toml` can lock values: `locked = ["store"]`. `cachemgr config show` says
which value holds, and where it comes from.
"""
EXIT_CODES = """
`run` ends with the code of its command (128 and the number of the signal that ended it); 125 is its own, and so are 126
and 127, which every command gives that is asked about a command line: `lookup`, `why`, `lint`, `env` and others.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## Commands", *_commands(), "## Settings", _settings(), "## Exit codes", _exit_codes()]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _commands() -> Iterator[str]:
    with click.Context(cli, info_name="cachemgr") as top:
        yield "Before any command:\n\n" + _options(cli, top)
        for name in COMMANDS:
            command = cli.get_command(top, name)
            assert command is not None, "the table of commands names it"
            yield from _command(command, top, name, "###")


def _command(command: click.Command, above: click.Context, name: str, level: str) -> Iterator[str]:
    with click.Context(command, info_name=name, parent=above) as context:
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        about = inspect.cleandoc(command.help or "").replace("\b\n", "")
        yield f"{level} `{context.command_path}`\n\n```text\n{usage}\n```\n\n{about}\n\n{_options(command, context)}"
        if isinstance(command, click.Group):
            for each in command.list_commands(context):
                below = command.get_command(context, each)
                assert below is not None, "the group lists it"
                yield from _command(below, context, each, level + "#")


def _options(command: click.Command, context: click.Context) -> str:
    rows = [each.get_help_record(context) for each in command.params if isinstance(each, click.Option)]
    return _table(("option", "meaning"), [(f"`{row[0]}`", row[1]) for row in rows if row is not None])


def _settings() -> str:
    rows = [(f"`{each.name}`", f"`{each.variable}`", each.help) for each in TABLE]
    return f"{SETTINGS.strip()}\n\n{_table(('setting', 'variable', 'meaning'), rows)}"


def _exit_codes() -> str:
    codes = {
        0: ["Done."],
        3: ["Partly done: some of what was asked for, and what was not is named."],
        130: ["Interrupted."],
    }
    codes[1] = ["The answer is no: a miss, damage that was found, something that does not fit."]
    codes[11] = ["In use or locked."]
    for kind in errors.CacheError.__subclasses__():
        if kind.exit_code not in {1, 11}:
            first = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
            codes.setdefault(kind.exit_code, []).append(first)
    rows = [(str(code), " ".join(codes[code])) for code in sorted(codes)]
    return f"{EXIT_CODES.strip()}\n\n{_table(('code', 'meaning'), rows)}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _name in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE).write_text(page())
