"""`cachemgr attend`: what the vLLM plugin starts beside an engine. Not for people, and so in no list of commands.

Its order comes as JSON on standard input, its answer goes as one line of JSON to standard output (`cachemgr.plugin` is
the other side); what it says to people goes to standard error, as from `cachemgr run`.
"""

import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path

import click
import msgspec

from cachemgr import attached
from cachemgr.cache import open_cache
from cachemgr.cli.output import say
from cachemgr.cli.session import WallClock, settings_of
from cachemgr.cli.telling import Teller, order_of, reporter_of, sender_of
from cachemgr.errors import CacheError, in_words
from cachemgr.factors import says_it_itself
from cachemgr.factors.vllm.variables import seen_by
from cachemgr.order import Order, Part, Reporter, Sender
from cachemgr.settings import Settings

_MARGIN = 0.1
"""The part of the time that the answer itself may take: who waits has less patience than we have work."""


class _Given(msgspec.Struct, frozen=True):
    """What the shim knows."""

    argv: list[str]
    environ: dict[str, str]
    """What its process began with."""
    now: dict[str, str]
    """What there is by now."""
    cwd: str
    pid: int
    began: float
    """On the monotonic clock of this machine."""
    seconds: float
    """How long it waits for an answer from then on."""
    engine_args: dict[str, object] | None = None
    part: Part | None = None


@click.command(hidden=True)
@click.pass_context
def attend(ctx: click.Context) -> None:
    """Look after the engine of the process that started this."""
    given = msgspec.convert(json.load(sys.stdin), type=_Given)
    _leave_home()
    try:
        settings = settings_of(ctx)
        _attend(_order(settings, given, sender_of(ctx, settings), reporter_of(ctx, settings)), settings, given.pid)
    except CacheError as error:
        say(f"{error}; the engine starts without a cache" + (f" (hint: {error.hint})" if error.hint else ""))
        _answer(attached.Answer(None, str(error)))
    except Exception as error:  # noqa: BLE001 - a traceback in the middle of an engine's log would be taken for its own
        say(f"the attendant failed, and the engine goes on without it: {in_words(error)}")
        _answer(attached.Answer(None, str(error)))


def _leave_home() -> None:
    """Become nobody's child, and deaf to what is meant for the engine: its end is ours.

    Whoever stops a service stops every process of it; we have to see the engine's end first.
    """
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _order(settings: Settings, given: _Given, sender: Sender | None, reporter: Reporter | None) -> Order:
    """Nobody waits for another launch before the start, since the engine waits for us. A node that is a part of one
    compiles its own ranks."""
    cwd = Path(given.cwd)
    known = says_it_itself(given.argv, given.environ, cwd)
    environ = given.environ if known else seen_by(given.environ, given.now)
    order = order_of(settings, tuple(given.argv), environ=environ, cwd=cwd, sender=sender)
    order = msgspec.structs.replace(order, reporter=reporter)
    if given.part is not None:
        order = msgspec.structs.replace(order, launch=f"{given.part.of}-{secrets.token_hex(4)}", part=given.part)
    left = (given.began + given.seconds - time.monotonic()) * (1 - _MARGIN)
    left = max(0.0, min(left, order.deadline))
    waiting = 0.0 if given.part else order.single_flight
    return msgspec.structs.replace(
        order,
        left=left,
        wait=0.0,
        single_flight=waiting,
        waits_at_lookup=True,
        strict=False,
        engine_args=given.engine_args,
    )


def _attend(order: Order, settings: Settings, pid: int) -> None:
    cache = open_cache(settings, os.environ)
    process = attached.Process(pid)
    attached.attend(order, cache, WallClock(), Teller(settings.report), process=process, answer=_answer)


def _answer(answer: attached.Answer) -> None:
    """Once; then standard output is nobody's."""
    sys.stdout.write(json.dumps({"cachemgr": 1, "variables": answer.variables, "reason": answer.reason}) + "\n")
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
