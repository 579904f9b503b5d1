"""The two figures of `vllm bench startup`, by that tool itself: seconds of startup and of compilation, cold and warm.

It makes an engine in a process of its own: startup is what `LLM.from_engine_args` takes after the imports, compilation
what the engine's configuration counted (vLLM 0.26 to 0.33 `benchmarks/startup.py`). Nothing of ours is in these starts.
"""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from cachemgr.errors import CannotExecuteError, UsageError
from cachemgr.executables import resolve
from cachemgr.factors import engine_of
from cachemgr.factors.vllm.arguments import FRONT_END
from cachemgr.factors.vllm.facts import facts_for
from cachemgr.factors.vllm.flags import Flags
from cachemgr.factors.wrappers import spelled_out
from cachemgr.prewarm.starting import needs_weights
from cachemgr.process import descendants, start_time, tell

_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)
_GRACE = 30.0
"""How long the tool may take to end after it was told to, in seconds."""
_STEP_SECONDS = 0.05
_ITERATIONS = ("--num-iters-cold=1", "--num-iters-warmup=1", "--num-iters-warm=1")


class Figures(msgspec.Struct, frozen=True):
    """Seconds."""

    cold_startup: float
    cold_compilation: float
    warm_startup: float
    warm_compilation: float


class _Said(msgspec.Struct, frozen=True):
    """What the tool writes with `--output-json`, as far as it is used."""

    avg_cold_startup_time: float
    avg_cold_compilation_time: float
    avg_warm_startup_time: float
    avg_warm_compilation_time: float


def command_of(argv: Sequence[str], environ: Mapping[str, str], cwd: Path, output: Path) -> tuple[str, ...]:
    """The command of the tool for the engine that `argv` starts.

    Raises:
        UsageError: it starts none by `vllm`'s own command line.
    """
    engine = engine_of(argv, environ, cwd)
    argv = spelled_out(argv, environ)
    kind = () if engine is None else tuple(engine[0].kind.split())
    before = () if engine is None else tuple(argv[: len(argv) - len(engine[0].words)])
    if engine is None or before[len(before) - len(kind) :] != kind:
        raise UsageError(
            "--startup measures what `vllm serve` or another command of `vllm` starts",
            hint="cachemgr bench --startup -- vllm serve MODEL, or without --startup",
        )
    flags = engine[1]
    dummy = () if needs_weights(flags) else ("--load-format=dummy",)
    ours = (*_ITERATIONS, f"--output-json={output}")
    return (*before[: len(before) - len(kind)], "bench", "startup", *engine_words(flags), *dummy, *ours)


def engine_words(flags: Flags) -> list[str]:
    """The flags of the engine alone: where a server listens means nothing to the tool."""
    known = facts_for(None).options(FRONT_END)
    words = [] if flags.model is None else [f"--model={flags.model}"]
    for name, value in flags.values.items():
        if name in known:
            words.append({"true": f"--{name}", "false": f"--no-{name}"}.get(value, f"--{name}={value}"))
    return words


def measure(argv: Sequence[str], environ: Mapping[str, str], cwd: Path, place: Path, *, seconds: float) -> Figures:
    """Run the tool: one cold start, one to warm up, one warm start.

    Raises:
        UsageError: it cannot be run for this command, failed, or took longer than `seconds`.
        NoSuchCommandError, CannotExecuteError: it cannot be started.
        KeyboardInterrupt: somebody told us to end; nothing of it is left.
    """
    output = place / "startup.json"
    code = _run(command_of(argv, environ, cwd, output), environ, cwd, seconds)
    if code is None:
        raise UsageError(f"`vllm bench startup` was not done after {seconds:.0f} s", hint="leave --startup out")
    try:
        said = msgspec.json.decode(output.read_bytes(), type=_Said)
    except (OSError, msgspec.MsgspecError):
        raise UsageError(
            f"`vllm bench startup` ended with exit code {code} and no figures", hint="leave --startup out"
        ) from None
    return Figures(
        said.avg_cold_startup_time,
        said.avg_cold_compilation_time,
        said.avg_warm_startup_time,
        said.avg_warm_compilation_time,
    )


def _run(words: Sequence[str], environ: Mapping[str, str], cwd: Path, seconds: float) -> int | None:
    """The exit code of a command in our working directory, `cwd`; None for one that took too long. Its processes are a
    session, all of which ends when it takes too long, or when we are told to end: engines lie below the tool.

    Raises:
        NoSuchCommandError, CannotExecuteError: it cannot be started.
        KeyboardInterrupt: we were told to end.
    """
    path = resolve(words[0], environ, cwd)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        pid = os.posix_spawn(
            path, list(words), dict(environ), setsid=True, setsigmask=mask, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ]
        )
        received = _waited(pid, seconds)
        if received != signal.SIGCHLD:
            _end_session(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except OSError as error:
        raise CannotExecuteError(f"`{path}` cannot be executed: {error.strerror}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if received is None:
        return None
    if received != signal.SIGCHLD:
        raise KeyboardInterrupt
    return code


def _waited(pid: int, seconds: float) -> int | None:
    """SIGCHLD once a child of ours has ended, which is not reaped; or the signal by which we were told to end; or None
    after so many seconds."""
    end = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        received = signal.sigtimedwait(_WATCHED, max(end - time.monotonic(), 0.0))
        if received is None or received.si_signo != signal.SIGCHLD:
            return None if received is None else received.si_signo
    return signal.SIGCHLD


def _end_session(pid: int) -> None:
    """Tell all processes of a session to end, and end those below its leader that have not when it has; who tells us
    once more does not want to wait. The leader is not reaped yet, so its number is nobody else's."""
    below = {each: start_time(each) for each in (pid, *descendants(pid))}  # compilers have sessions of their own
    _tell_group(pid, signal.SIGTERM)
    _waited(pid, _GRACE)
    _tell_group(pid, signal.SIGKILL)
    left = [each for each, began in below.items() if began is not None and start_time(each) == began]
    for each in left:
        tell(each, below[each], signal.SIGKILL)
    end = time.monotonic() + _GRACE
    while any(start_time(each) == below[each] for each in left) and time.monotonic() < end:
        time.sleep(_STEP_SECONDS)


def _tell_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)
