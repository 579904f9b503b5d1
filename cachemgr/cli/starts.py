"""What commands have in common that start commands of users again and again: `prewarm`, `prove`, `bench`."""

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from cachemgr.cli import output
from cachemgr.cli.telling import Teller, order_of
from cachemgr.order import KEY_VARIABLE, LAUNCH_VARIABLE, Order, Sender
from cachemgr.places import working_directory
from cachemgr.prewarm.passes import Pass, grown
from cachemgr.settings import Settings

_PHASES = ("model_load", "compile", "capture", "init_engine", "ready", "restore", "publish")


class Telling(Teller):
    """Tells a person about each start as it ends."""

    def passed(self, name: str, each: Pass) -> None:
        output.note(f"{name}: {of_pass(each)}")


def of_pass(each: Pass) -> str:
    """A start in a line."""
    report = each.report
    parts = [f"start {each.number}", output.seconds(each.seconds)]
    if report is not None:
        parts.append(report.verdict)
        phases = [f"{name} {output.seconds(report.phases[name])}" for name in _PHASES if name in report.phases]
        parts += [", ".join(phases)] if phases else []
    parts.append(f"added {grown(each)}" if each.added else "added nothing")
    if each.exercised:
        answered = sum(step.answered for step in each.exercised)
        parts.append(f"{answered} of {len(each.exercised)} questions answered")
        refused = dict.fromkeys(step.kind for step in each.exercised if not step.answered)
        parts += [f"refused {', '.join(refused)}"] if refused else []
    return output.brief(" · ".join(parts))


def template_of(settings: Settings, *, sender: Sender | None) -> Order:
    """An order for everything but its command. What is started here is its own affair, also inside another launch."""
    ours = {LAUNCH_VARIABLE, KEY_VARIABLE}
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    environ = without_sign_key(environ, settings)
    return order_of(settings, (), environ=environ, cwd=working_directory(), sender=sender)


@contextmanager
def told_to_end() -> Iterator[None]:
    """Whoever tells us to end meanwhile is heard as one at the keyboard is: what was made for starts goes on the way
    out. What we were started to ignore stays ignored."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def without_sign_key(environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """Without the key that signs what is made, and where it is: engines and seeds run code of others."""
    where = settings.sign_key or ""
    ours = {"CACHEMGR_SIGN_KEY", where.removeprefix("env:")}
    return {name: value for name, value in environ.items() if name not in ours}


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
