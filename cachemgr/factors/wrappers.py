"""Commands that only prepare something and then become another command: `env A=1 nice python x.py`.

Looked through only where every word is understood; anything else is left as it is, and its Python is then found
elsewhere. The words are those of GNU coreutils 9, util-linux 2.40, numactl 2.0, GNU time 1.9, tini 0.19, dumb-init 1.2
and uv 0.9 (their `--help`). What changes the user (`sudo`, `gosu`), or variables by files of its own (`conda run`), is
none of them.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence

import msgspec

from cachemgr.factors import shell

_PLACES = frozenset({"taskset", "numactl"})
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


class Command(msgspec.Struct, frozen=True):
    """A command behind its wrappers."""

    placement: tuple[str, ...]
    """The wrappers that decide about CPUs; in front of another command they give it the same ones. The others are
    left out: `time -o FILE` writes, `timeout` would count."""
    argv: tuple[str, ...]
    environ: dict[str, str]
    """The variables that the inner command sees."""
    chosen: bool = False
    """Whether a wrapper chooses the Python, by itself (`uv run`): the placement has to be asked for it."""


class _Wrapper(msgspec.Struct, frozen=True):
    flags: frozenset[str] = frozenset()
    valued: frozenset[str] = frozenset()
    operands: int = 0
    """How many words of its own stand between its options and the command."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WRAPPERS: dict[str, _Wrapper] = {
    "nohup": _Wrapper(),
    "nice": _Wrapper(valued=_words("-n --adjustment")),
    "timeout": _Wrapper(
        flags=_words("--preserve-status --foreground -v --verbose -f -p"),
        valued=_words("-k --kill-after -s --signal"),
        operands=1,
    ),
    "time": _Wrapper(
        flags=_words("-p --portability -v --verbose -q --quiet -a --append"), valued=_words("-f --format -o --output")
    ),
    "stdbuf": _Wrapper(valued=_words("-i --input -o --output -e --error")),
    "setsid": _Wrapper(flags=_words("-c --ctty -f --fork -w --wait")),
    "numactl": _Wrapper(
        flags=_words("-l --localalloc -a --all -b --balancing"),
        valued=_words("-N --cpunodebind -m --membind -C --physcpubind -i --interleave -p --preferred"),
    ),
    # `-p` asks about a running process, so taskset with it is no wrapper.
    "taskset": _Wrapper(flags=_words("-a --all-tasks"), valued=_words("-c --cpu-list"), operands=1),
    "ionice": _Wrapper(flags=_words("-t --ignore"), valued=_words("-c --class -n --classdata")),
    "chrt": _Wrapper(
        flags=_words(
            "-a --all-tasks -b --batch -f --fifo -i --idle -o --other -r --rr -R --reset-on-fork -v --verbose"
        ),
        operands=1,
    ),
    "tini": _Wrapper(flags=_words("-s -w -g -v -vv -vvv"), valued=_words("-p -e")),
    "dumb-init": _Wrapper(flags=_words("-c --single-child -v --verbose"), valued=_words("-r --rewrite")),
}
# Of `uv run` and `poetry run`: what chooses the environment, and what says how much is told. Not among it are
# `--env-file`, `--directory` and `--module`.
_RUNNERS = {
    "poetry": _Wrapper(),
    "uv": _Wrapper(
        flags=_words(
            "--active --all-extras --all-groups --exact --frozen --isolated --locked --managed-python --native-tls "
            "--no-cache --no-config --no-default-groups --no-dev --no-env-file --no-managed-python --no-progress "
            "--no-project --no-sync --offline --only-dev -q --quiet -v --verbose -n"
        ),
        valued=_words(
            "--cache-dir --default-index --extra --extra-index-url --find-links --group --index --index-url --no-extra "
            "--no-group --only-group --package --project -p --python --with --with-editable --with-requirements"
        ),
    ),
}
_WRAPPERS["docker-init"] = _WRAPPERS["tini"]  # the same program by another name


def unwrap(argv: Sequence[str], environ: Mapping[str, str]) -> Command:
    """`argv` without the wrappers in front of it."""
    command = Command((), tuple(argv), dict(environ))
    while (inner := _step(command)) is not None:
        command = inner
    return command


def spelled_out(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """`argv` as a command that words may be added to: one inside of a text (`sh -c`, `env -S`) becomes words."""
    inner = unwrap(argv, environ)
    if tuple(argv[len(argv) - len(inner.argv) :]) == inner.argv:
        return tuple(argv)
    gone = [word for name in sorted(environ.keys() - inner.environ.keys()) for word in ("-u", name)]
    changed = [f"{name}={value}" for name, value in inner.environ.items() if environ.get(name) != value]
    return (*(("env", *gone, *changed) if gone or changed else ()), *inner.placement, *inner.argv)


def _step(command: Command) -> Command | None:
    if len(command.argv) < 2:
        return None
    name = os.path.basename(command.argv[0])
    if name == "env":
        return _through_env(command)
    if name in shell.SHELLS:
        return _through_shell(command)
    if name in _RUNNERS and command.argv[1] == "run":
        return _through_runner(_RUNNERS[name], command)
    if name not in _WRAPPERS:
        return None
    skipped = _own_words(_WRAPPERS[name], command.argv)
    return None if skipped is None else _inner(command, skipped, command.environ)


def _inner(command: Command, skipped: int, environ: dict[str, str]) -> Command | None:
    if skipped >= len(command.argv):
        return None
    words, argv = command.argv[:skipped], command.argv[skipped:]
    places = os.path.basename(words[0]) in _PLACES
    return Command(command.placement + words if places else command.placement, argv, environ, command.chosen)


def _through_runner(runner: _Wrapper, command: Command) -> Command | None:
    """`uv run python x.py`; of a script that is no command (`uv run x.py`) only uv knows how it starts."""
    skipped = _own_words(runner, command.argv[1:])
    if skipped is None or skipped + 1 >= len(command.argv) or "UV_ENV_FILE" in command.environ:
        return None
    words, argv = command.argv[: skipped + 1], command.argv[skipped + 1 :]
    if argv[0] == "-" or argv[0].endswith((".py", ".pyw", ".pyz")) or "://" in argv[0]:
        return None
    return Command(command.placement + words, argv, command.environ, chosen=True)


def _own_words(wrapper: _Wrapper, argv: tuple[str, ...]) -> int | None:
    """How many words of `argv` belong to its wrapper, or None when one of them is not understood."""
    at, operands = 1, wrapper.operands
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "-":
        word = argv[at]
        at += 1
        if word == "--":
            break
        if word in wrapper.valued:
            at += 1
            # `taskset -c 0-3 cmd`: the list is the operand.
            operands -= wrapper.operands and word in {"-c", "--cpu-list"}
        elif word not in wrapper.flags and not _joined(word, wrapper):
            return None
    return at + operands


def _joined(word: str, wrapper: _Wrapper) -> bool:
    """Whether `word` is an option together with its value: `--signal=KILL`, `-n10`, `-oL`, `nice -10`."""
    if word.startswith("--"):
        return word.partition("=")[0] in wrapper.valued and "=" in word
    return word[:2] in wrapper.valued or ("--adjustment" in wrapper.valued and word[1:].lstrip("+-").isdigit())


def _through_shell(command: Command) -> Command | None:
    """`sh -c 'A=1 exec python x.py'`: a shell that starts one command."""
    found = shell.only_command(command.argv, command.environ)
    if found is None:
        return None
    return Command(command.placement, found.argv, {**command.environ, **found.assigned}, command.chosen)


def _through_env(command: Command) -> Command | None:
    environ, argv, at = dict(command.environ), command.argv, 1
    while at < len(argv) and argv[at].startswith("-"):
        word = argv[at]
        at += 1
        if word in {"-i", "-", "--ignore-environment"}:
            environ.clear()
        elif word in {"-u", "--unset"} and at < len(argv):
            environ.pop(argv[at], None)
            at += 1
        elif word.startswith("--unset="):
            environ.pop(word.partition("=")[2], None)
        elif word == "--":
            break
        else:
            return _split_env(command, at, environ)
    while at < len(argv) and (assignment := _ASSIGNMENT.fullmatch(argv[at])) is not None:
        environ[assignment[1]] = assignment[2]
        at += 1
    return _inner(command, at, environ)


def _split_env(command: Command, at: int, environ: dict[str, str]) -> Command | None:
    """`env -S 'A=1 python -u' x.py`, the only other option that leaves a command readable (`-C` moves it)."""
    word = command.argv[at - 1]
    if word in {"-S", "--split-string"} and at < len(command.argv):
        text, at = command.argv[at], at + 1
    elif word.startswith(("-S", "--split-string=")):
        text = word.removeprefix("--split-string=").removeprefix("-S")
    else:
        return None
    try:
        words = tuple(shlex.split(text))
    except ValueError:
        return None
    return Command(command.placement, ("env", *words, *command.argv[at:]), environ, command.chosen)
