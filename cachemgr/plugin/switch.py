"""Whether the plugin is on in this process, and what the shim must know before anybody reads the settings whole.

`enable`, `bin`, `deadline` and `single_flight` come from CACHEMGR_ENABLE and the like, else from the user's settings
file, else from /etc/cachemgr.toml: on the nodes of a Ray cluster variables do not travel, and files in the image do.
CACHEMGR_ENABLE=0 wins over everything. Of the files only lines `name = value` before the first table are understood,
which is all that these need: Python 3.10 has no TOML parser. `cachemgr.settings` reads the same files
whole, in the child.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence

ETC = "/etc/cachemgr.toml"
DEADLINE_SECONDS = 30.0
LAUNCH_VARIABLE = "CACHEMGR_LAUNCH"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_LINE = re.compile(r"""\s*(enable|bin|deadline|single_flight)\s*=\s*(?:"([^"]*)"|'([^']*)'|([\w.]+))\s*(?:#.*)?""")
_LONGEST_FILE = 1 << 20
_ASKS = frozenset({"-h", "--help", "-v", "--version"})


def stays_out(environ: Mapping[str, str] | None = None, argv: Sequence[str] | None = None) -> bool:
    """Whether this process is to be left exactly as it is.

    A launch that is in charge already (`cachemgr run`, or the front process) was asked for by whoever started it, so
    only an explicit no counts against it.
    """
    environ = os.environ if environ is None else environ
    argv = sys.argv if argv is None else argv
    if environ.get("CACHEMGR_ENABLE", "").lower() in _FALSE:
        return True
    if _measures_cold(argv) or _inspects_models(argv) or _only_asks(argv):
        return True
    return not environ.get(LAUNCH_VARIABLE) and not is_on(environ)


def is_on(environ: Mapping[str, str]) -> bool:
    """Whether somebody switched the plugin on."""
    return setting("enable", environ).lower() in _TRUE


def deadline(environ: Mapping[str, str]) -> float:
    """Seconds that the front process waits at most; the child says so where the setting makes no sense."""
    return _seconds("deadline", environ, DEADLINE_SECONDS)


def single_flight(environ: Mapping[str, str]) -> float:
    """Seconds more that an engine waits for an entry that another machine compiles."""
    return _seconds("single_flight", environ, 0.0)


def _seconds(name: str, environ: Mapping[str, str], default: float) -> float:
    try:
        seconds = float(setting(name, environ))
    except ValueError:
        return default
    return seconds if 0 <= seconds < 1e6 else default


def setting(name: str, environ: Mapping[str, str]) -> str:
    """The text of a setting, or nothing."""
    given = environ.get(f"CACHEMGR_{name.upper()}")
    if given:
        return given
    for path in (_user_file(environ), ETC):
        found = _in_file(path).get(name)
        if found is not None:
            return found
    return ""


def _user_file(environ: Mapping[str, str]) -> str:
    """As `cachemgr.settings` finds it."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return os.path.join(home, "cachemgr", "config.toml")


def _in_file(path: str) -> dict[str, str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(_LONGEST_FILE)
    except OSError:
        return {}
    found = {}
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            break
        match = _LINE.fullmatch(line)
        if match is not None:
            found[match[1]] = next(part for part in match.groups()[1:] if part is not None)
    return found


def _measures_cold(argv: Sequence[str]) -> bool:
    """`vllm bench startup`. Its engines run in children that multiprocessing gives the same `sys.argv`."""
    words = list(argv[1:4])
    return words[:2] == ["bench", "startup"] or words == ["bench", "sweep", "startup"]


def _inspects_models(argv: Sequence[str]) -> bool:
    """The child that imports a model class and says what it can do (0.26-0.33 model_executor/models/registry.py)."""
    return bool(argv) and argv[0].endswith("/vllm/model_executor/models/registry.py")


def _only_asks(argv: Sequence[str]) -> bool:
    """vLLM loads plugins to print its flags, too (0.26-0.33 engine/arg_utils.py, add_cli_args)."""
    named = os.path.basename(argv[0]) == "vllm" if argv else False
    return named and any(word in _ASKS or word.startswith("--help=") for word in argv[1:])


def starts_engine(argv: Sequence[str]) -> bool:
    """Whether a command line is one whose key is known from it: the child reads it in every detail."""
    if not argv:
        return False
    program, words = argv[0], list(argv[1:3])
    if os.path.basename(program) == "vllm" or program.endswith("/vllm/entrypoints/cli/main.py"):
        return words[:1] in (["serve"], ["run-batch"])
    return program.endswith("/vllm/entrypoints/openai/api_server.py")
