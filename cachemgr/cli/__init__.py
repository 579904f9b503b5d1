"""The command line: words, flags and exit codes, and the one boundary where errors become both.

Commands are loaded when they are called, so that `--help` costs click and nothing else.
"""

import importlib
import sys
from typing import Any

import click

from cachemgr import __version__
from cachemgr.errors import CacheError

EXIT_CODES = """
\b
Exit codes: 0 done · 1 the answer is no · 2 usage · 3 partly done
10 no such artifact or store · 11 in use or locked · 12 untrusted or corrupt
13 store, mirror or database unreachable · 130 interrupted
"""

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("cachemgr.cli.run", "run a command with a warm compile cache, and capture what it compiles"),
    "lookup": ("cachemgr.cli.lookup", "say whether a command would start warm, and what differs if not"),
    "env": ("cachemgr.cli.lookup", "print the variables that pin a command's caches, for a shell"),
    "ls": ("cachemgr.cli.artifacts", "list artifacts"),
    "show": ("cachemgr.cli.artifacts", "show one artifact: factors, captures, layers, files"),
    "size": ("cachemgr.cli.artifacts", "say how much the store holds"),
    "dir": ("cachemgr.cli.artifacts", "print where the store is"),
    "rm": ("cachemgr.cli.artifacts", "remove artifacts from the store"),
    "config": ("cachemgr.cli.config", "show settings and where each comes from"),
}
"""Each command with the module that defines it and its line in `--help`."""


class _Group(click.Group):
    """A group whose commands are imported when called, and whose errors are sentences."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_module, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CacheError as error:
            click.echo(f"error: {error}", err=True)
            if error.hint is not None:
                click.echo(f"hint: {error.hint}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            ctx.exit(130)


@click.group(cls=_Group, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="cachemgr %(version)s")
@click.option("--config", metavar="FILE", help="settings file that overrides those of the system and the user")
@click.option("--store", metavar="DIR", help="the local store")
@click.option("--home", metavar="DIR", help="state of cachemgr")
@click.pass_context
def cli(ctx: click.Context, config: str | None, store: str | None, home: str | None) -> None:
    """Make the second start of vLLM and torch.compile programs fast anywhere.

    `cachemgr run -- CMD` restores what an equal start compiled before, on this machine or another, and captures what
    this one compiles.
    """
    ctx.obj = {"config": config, "store": store, "home": home}


def main() -> None:
    """The console script."""
    try:
        cli(prog_name="cachemgr")
    except BrokenPipeError:
        # Whoever read our output has gone; what is still buffered has nowhere to go either.
        sys.stderr.close()
        sys.exit(0)
