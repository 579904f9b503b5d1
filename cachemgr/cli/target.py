"""`cachemgr target`: this machine as a document."""

import os
from pathlib import Path

import click

from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.session import PASS_THROUGH, WallClock
from cachemgr.errors import NoSuchCommandError, UsageError
from cachemgr.executables import find
from cachemgr.factors import target_here
from cachemgr.factors.target import encode
from cachemgr.places import working_directory
from cachemgr.spec import load

_USUAL = (("vllm", "serve"), ("python", "-c", ""), ("python3", "-c", ""))


@click.command(context_settings=PASS_THROUGH, epilog=EXIT_CODES)
@click.option("--spec", metavar="FILE", help="describe the models of its commands, too: they are on this machine")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD [ARG]...]")
def target(spec: str | None, command: tuple[str, ...]) -> None:
    """Describe this machine as JSON, so that a machine without its GPU can derive its keys.

    Run it where the engine runs, in the environment that the engine gets. It describes the Python of CMD, or else that
    of `vllm` or `python` on PATH, and the models of CMD and of the spec. No secret is in it.
    """
    environ, cwd = dict(os.environ), working_directory()
    usual = next((words for words in _USUAL if find(words[0], environ, cwd) is not None), None)
    asked = command or usual
    if asked is None:
        raise NoSuchCommandError("no vllm and no python is on PATH", hint="cachemgr target -- CMD")
    commands = [entry.command for entry in (() if spec is None else load(Path(spec)).entries)]
    commands += [command] if command else []
    made = target_here(asked, commands, environ, cwd=cwd, host_name=os.uname().nodename, made=WallClock().text())
    if unknown := made.unknown:
        raise UsageError(
            f"{', '.join(unknown)} cannot be read here, so nothing would fit", hint="cachemgr doctor, or name CMD"
        )
    click.echo(encode(made).decode(), nl=False)
    version = f"vLLM {made.engine.version}" if made.engine.version else f"torch {made.platform.torch.version}"
    output.note(f"{made.label} · {version} · {output.counted(len(made.models), 'model')}")
