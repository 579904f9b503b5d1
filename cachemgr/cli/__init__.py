"""The command line: words, flags and exit codes, and the one boundary where errors become both.

Commands are loaded when they are called, so that `--help` costs click and nothing else.
"""

import importlib
import os
import sys
from contextlib import suppress
from keyword import iskeyword
from typing import Any, NoReturn, TextIO

import click

from cachemgr import __version__
from cachemgr.cli.plain import plain
from cachemgr.descriptors import raised
from cachemgr.errors import CacheError, in_words

EXIT_CODES = """
\b
Exit codes: 0 done · 1 the answer is no · 2 usage · 3 partly done
10 no such artifact or store · 11 in use or locked · 12 untrusted or corrupt
13 store, mirror or database unreachable · 130 interrupted
"""

PARTLY = 3
"""The exit code of a command that did some of what it was asked for."""

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("cachemgr.cli.run", "run a command with a warm compile cache, and capture what it compiles"),
    "lookup": ("cachemgr.cli.lookup", "say whether a command would start warm, and what differs if not"),
    "target": ("cachemgr.cli.target", "describe this machine, so that others can derive its keys"),
    "spec": ("cachemgr.cli.spec", "write the commands of artifacts as a spec for prewarm"),
    "prewarm": ("cachemgr.cli.prewarm", "start commands until a start adds nothing, so that the next one is warm"),
    "bench": ("cachemgr.cli.bench", "start a command cold, again, restored and near, and say what each takes"),
    "env": ("cachemgr.cli.lookup", "print the variables that pin a command's caches, for a shell"),
    "ls": ("cachemgr.cli.artifacts", "list artifacts"),
    "show": ("cachemgr.cli.show", "show one artifact: factors, captures, layers, files"),
    "why": ("cachemgr.cli.why", "say why a start was not warm, or would not be"),
    "diff": ("cachemgr.cli.why", "say what differs between two artifacts, or an artifact and a command"),
    "lint": ("cachemgr.cli.lint", "name what would fragment or poison the cache of a command"),
    "stats": ("cachemgr.cli.stats", "say whether the cache pays: hit rate, misses, seconds saved, bytes"),
    "reindex": ("cachemgr.cli.index", "make the catalogue anew from the store and the mirror"),
    "size": ("cachemgr.cli.artifacts", "say how much the store holds"),
    "dir": ("cachemgr.cli.artifacts", "print where the store is"),
    "rm": ("cachemgr.cli.artifacts", "remove artifacts from the store"),
    "verify": ("cachemgr.cli.verify", "say whether store and live directories are whole, and mend them"),
    "prune": ("cachemgr.cli.prune", "remove what is not needed any more, or has no room"),
    "pin": ("cachemgr.cli.keep", "keep artifacts from every prune"),
    "quarantine": ("cachemgr.cli.keep", "report, signed, that nobody in the fleet should use a capture"),
    "unquarantine": ("cachemgr.cli.keep", "let captures be used again"),
    "unpin": ("cachemgr.cli.keep", "let pinned artifacts go when their time has come"),
    "push": ("cachemgr.cli.transfer", "copy artifacts from the local store to the mirror"),
    "pull": ("cachemgr.cli.transfer", "copy artifacts from the mirror to the local store"),
    "export": ("cachemgr.cli.exchange", "write artifacts as OCI images: to a directory, a tar file, a registry"),
    "import": ("cachemgr.cli.exchange", "take artifacts from OCI images into the local store"),
    "keygen": ("cachemgr.cli.trust", "make a key that signs captures"),
    "sign": ("cachemgr.cli.trust", "verify captures and sign them; let those in that wait for it"),
    "serve": ("cachemgr.cli.serve", "serve a page, an API and metrics about the cache of a fleet"),
    "token": ("cachemgr.cli.serve", "make, list and revoke the tokens that the service asks for"),
    "doctor": ("cachemgr.cli.doctor", "say what stands in the way of a warm start on this machine"),
    "config": ("cachemgr.cli.config", "show settings and where each comes from"),
}
"""Each command with the module that defines it and its line in `--help`."""
_HIDDEN = {"attend": "cachemgr.cli.attend", "prove": "cachemgr.cli.proof", "reporter": "cachemgr.cli.reporter"}
"""Commands that programs start, not people."""


class _Group(click.Group):
    """A group whose commands are imported when called, and whose errors are sentences."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = COMMANDS[cmd_name][0] if cmd_name in COMMANDS else _HIDDEN.get(cmd_name)
        if name is None:
            return None
        module = importlib.import_module(name)
        command: click.Command = getattr(module, f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_module, line) in COMMANDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            _refuse(ctx, error)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CacheError as error:
            _say(str(error), error.hint)
            ctx.exit(error.exit_code)
        except click.UsageError as error:
            _refuse(ctx, error)
        except MemoryError as error:
            _say(in_words(error), "raise the limit on memory: `ulimit -v`, or that of the container")
            ctx.exit(CacheError.exit_code)
        except KeyboardInterrupt:
            ctx.exit(130)


def share(good: int, of: int) -> int:
    """The exit code of a command that did well by so many of the things that it was asked for."""
    return 0 if good == of else PARTLY if good else 1


def _refuse(ctx: click.Context, error: click.UsageError) -> NoReturn:
    """Say what is wrong with a command line as every other error is said. A group without a command shows its help."""
    asked = error.ctx or ctx
    if error.message == asked.get_help():
        raise error
    message = " ".join(error.format_message().split()).rstrip(".")
    _say(message[:1].lower() + message[1:], f"{asked.command_path} --help")
    ctx.exit(error.exit_code)


def _say(message: str, hint: str | None) -> None:
    with suppress(OSError):  # the exit code says it as well
        click.echo(f"error: {plain(message)}", err=True)
        if hint is not None:
            click.echo(f"hint: {plain(hint)}", err=True)


@click.group(cls=_Group, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="cachemgr %(version)s")
@click.option("--config", metavar="FILE", help="settings file that overrides those of the system and the user")
@click.option("--store", metavar="DIR", help="the local store")
@click.option("--home", metavar="DIR", help="state of cachemgr")
@click.option("--mirror", metavar="URL", help="the bucket behind the local store: s3://BUCKET/PREFIX")
@click.option("--server", metavar="URL", help="ask the service there: ls, show, why, diff, stats, lookup")
@click.option("--offline", is_flag=True, default=None, help="leave the mirror alone")
@click.pass_context
def cli(ctx: click.Context, /, config: str | None, **flags: str | bool | None) -> None:
    """Make the second start of vLLM and torch.compile programs fast anywhere.

    `cachemgr run -- CMD` restores what an equal start compiled before, on this machine or another, and captures what
    this one compiles.
    """
    ctx.obj = {"config": config, "flags": flags}


def main() -> None:
    """The console script."""
    _open_what_is_closed()
    try:
        cli(prog_name="cachemgr")
    except BrokenPipeError:
        # Whoever read our output has gone; what is still buffered has nowhere to go either.
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if not _comes_of_echo(error):
            raise
        _say(f"the output cannot be written: {error.strerror or error}", None)
        sys.exit(1)
    finally:
        for stream in (sys.stdout, sys.stderr):
            _let_go(stream)


def _open_what_is_closed() -> None:
    """A standard stream that is closed is None to Python. Ours read and write nothing then; a command that we start
    gets none, as it would without us."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = raised(os.open(os.devnull, os.O_RDWR))
            setattr(sys, name, open(nowhere, mode))  # noqa: SIM115 - until the end


def _comes_of_echo(error: OSError) -> bool:
    """Whether our own output is what failed. Flushing it once more would not tell: it may have been dropped."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and at.tb_frame.f_code is click.echo.__code__


def _is_written(stream: TextIO) -> bool:
    try:
        stream.flush()
    except (OSError, ValueError):
        return False
    return True


def _let_go(stream: TextIO) -> None:
    """What cannot be written is lost, and our exit code is not: Python would make 120 of it."""
    if not _is_written(stream):
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
