"""Programs that start a program once per rank: torchrun and accelerate.

Where ranks meet and where their output goes differs from launch to launch and shapes nothing; how many there are does.
"""

import msgspec

# torch 2.13 `distributed/run.py`: options that take no value, and options that name a place, a log or a patience.
_VALUELESS = frozenset(
    {"--standalone", "--no-python", "--run-path", "--virtual-local-rank", "--use-env", "--help", "-h", "-m", "--module"}
)
_PLACES = frozenset(
    {
        "--duplicate-stderr-filters",
        "--duplicate-stdout-filters",
        "--event-log-handler",
        "--local-addr",
        "--local-ranks-filter",
        "--log-dir",
        "--logs-specs",
        "--master-addr",
        "--master-port",
        "--max-restarts",
        "--monitor-interval",
        "--node-rank",
        "--rdzv-backend",
        "--rdzv-conf",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--redirects",
        "--role",
        "--shutdown-timeout",
        "--signals-to-handle",
        "--standalone",
        "--tee",
        "-r",
        "-t",
    }
)
_TORCHRUN = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
_ACCELERATE = frozenset({"accelerate", "accelerate.commands.launch"})


class Launched(msgspec.Struct, frozen=True):
    """The program of every rank."""

    program: str
    module: bool
    arguments: tuple[str, ...]
    options: tuple[str, ...]
    """The launcher's own options that count, each with its value as `--option=value`."""


def split(launcher: str, words: tuple[str, ...]) -> Launched | None:
    """What `launcher` (the name of a script or module) starts, or None when it is none that we know."""
    if launcher in _TORCHRUN:
        return _torchrun(words)
    if launcher in _ACCELERATE:
        return _accelerate(words)
    return None


def _torchrun(words: tuple[str, ...]) -> Launched | None:
    options: list[str] = []
    module = False
    at = 0
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].partition("=")
        name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        at += 1
        if name in {"-m", "--module"}:
            module = True
            continue
        if not equals and name not in _VALUELESS:
            value = "".join(words[at : at + 1])
            at += 1
        if name not in _PLACES:
            options.append(f"{name}={value}" if value else name)
    if at >= len(words):
        return None
    return Launched(words[at], module, words[at + 1 :], tuple(sorted(options)))


# accelerate 1.10 `commands/launch.py`: options of launch that name a place, a log, a rank of this node or a patience.
_ACCELERATE_PLACES = frozenset(
    {
        "--log-dir",
        "--machine-rank",
        "--main-process-ip",
        "--main-process-port",
        "--max-restarts",
        "--monitor-interval",
        "--rdzv-backend",
        "--rdzv-conf",
        "--role",
        "--tee",
    }
)


def _accelerate(words: tuple[str, ...]) -> Launched | None:
    """accelerate has a hundred options; its program is the first word that is a script, or what follows `-m`."""
    rest = words[1:] if words[:1] == ("launch",) else words
    for at, word in enumerate(rest):
        if word.endswith(".py") and not word.startswith("-"):
            return Launched(word, module=False, arguments=rest[at + 1 :], options=_without_places(rest[:at]))
        if word in {"-m", "--module"} and at + 1 < len(rest):
            return Launched(rest[at + 1], module=True, arguments=rest[at + 2 :], options=_without_places(rest[:at]))
    return None


def _without_places(words: tuple[str, ...]) -> tuple[str, ...]:
    kept: list[str] = []
    of_place = False
    for word in words:
        name, equals, _ = word.partition("=")
        place = "--" + name[2:].replace("_", "-") in _ACCELERATE_PLACES
        if not place and not of_place:
            kept.append(word)
        of_place = place and not equals
    return tuple(kept)
