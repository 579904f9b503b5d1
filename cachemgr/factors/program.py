"""What a command runs, and with which arguments.

The path of a program does not count, its bytes do; arguments count as they are written. An argument that the user
marks (`--ignore-arg --port`) is dropped with its value: what follows `=`, or else the next word unless that starts
with `-`, so a flag without a value must not be followed by an operand. Options that may hold a secret are dropped the
same way, and hidden where the command is shown; their value may start with one `-`.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cachemgr import digest, executables
from cachemgr.factors import launchers
from cachemgr.factors.interpreter import is_python
from cachemgr.factors.text import encodable
from cachemgr.factors.wrappers import Command
from cachemgr.key import Factor
from cachemgr.sensitive import HIDDEN, is_secret, without_secrets

_SHELLS = frozenset({"sh", "bash", "dash", "zsh"})
_SHELL_FILES = frozenset({"--rcfile", "--init-file"})
"""Options of bash that are followed by a file."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")

_VALUED = "cmWX"
_PATH_OPTIONS = frozenset("EIPsS")
"""Where modules are found. The interpreter is asked with the same options, so what they change is seen as a guard."""
_SILENT = frozenset("uBvqdib") | _PATH_OPTIONS
"""Buffering, byte code files, verbosity, a prompt afterwards, warnings about bytes: no effect on what is compiled."""


class Program(msgspec.Struct, frozen=True):
    """What a command line says, before any file is read."""

    kind: str
    """`file`, `module`, `code`, `stdin` or `command`."""
    name: str
    arguments: tuple[str, ...] = ()
    interpreter: tuple[str, ...] = ()
    """Options of the interpreter that shape what the program means, one each."""
    path_options: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    """Options of torchrun or accelerate that shape the world of ranks."""

    @property
    def label(self) -> str:
        """What people call it."""
        names = {"code": "-c", "stdin": "-"}
        return encodable(names.get(self.kind) or (self.name if self.kind == "module" else os.path.basename(self.name)))


def parse(command: Command, cwd: Path) -> Program:
    """Read the command line `command`."""
    name = os.path.basename(command.argv[0])
    if is_python(name):
        return _python(command.argv[1:])
    if name in _SHELLS:
        return _shell(command.argv)
    if (launched := launchers.split(name, command.argv[1:])) is not None:
        return _launched(launched)
    found = executables.find(command.argv[0], command.environ, cwd)
    kind = "command" if found is None or not _is_script(found) else "file"
    return Program(kind, command.argv[0] if found is None else str(found), command.argv[1:])


def factors(program: Program, path: Sequence[str], cwd: Path, ignored: Sequence[str]) -> tuple[Factor, ...]:
    """`program`, `program.args` and, where given, `program.interpreter_args` and `program.launcher_args`.

    `path` is the interpreter's module path, `ignored` the options that do not count.
    """
    named = {
        "program": _identity(program, path, cwd),
        "program.args": _canonical(_kept(program.arguments, ignored)),
    }
    if program.interpreter:
        named["program.interpreter_args"] = _canonical(program.interpreter)
    if program.launcher:
        named["program.launcher_args"] = _canonical(_kept(program.launcher, ignored))
    return tuple(Factor(name, value, "match") for name, value in named.items())


def shown(argv: Sequence[str]) -> tuple[str, ...]:
    """`argv` for people and manifests: values of options and variables that may be secret are hidden."""
    words: list[str] = []
    hide = False
    for word in argv:
        name, equals, _ = word.partition("=")
        named = word.startswith("-") or _ASSIGNMENT.match(word) is not None
        if hide and not word.startswith("--"):
            words.append(HIDDEN)
            hide = False
            continue
        hide = named and not equals and is_secret(name)
        words.append(f"{name}={HIDDEN}" if named and equals and is_secret(name) else _clean(word))
    return tuple(words)


def _python(words: tuple[str, ...]) -> Program:
    shaping: list[str] = []
    paths: list[str] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in {"-", "--"}:
        word = words[at]
        at += 1
        if word.startswith("--"):
            shaping.append(word)
            continue
        for place, letter in enumerate(word[1:], start=1):
            if letter in _VALUED:
                value = word[place + 1 :] or "".join(words[at : at + 1])
                at += not word[place + 1 :]
                if letter in "cm":
                    return _with(_run(letter, value, words[at:]), shaping, paths)
                shaping.append(f"-{letter}{value}")
                break
            (paths if letter in _PATH_OPTIONS else shaping).append(f"-{letter}")
    return _with(_file(words[at:]), shaping, paths)


def _with(program: Program, shaping: Sequence[str], paths: Sequence[str]) -> Program:
    kept = tuple(sorted(option for option in shaping if option[1:] not in _SILENT))
    return msgspec.structs.replace(program, interpreter=kept, path_options=tuple(paths))


def _run(letter: str, value: str, rest: tuple[str, ...]) -> Program:
    if letter == "c":
        return Program("code", value, rest)
    launched = launchers.split(value, rest)
    return Program("module", value, rest) if launched is None else _launched(launched)


def _file(words: tuple[str, ...]) -> Program:
    rest = words[1:] if words[:1] == ("--",) else words
    if not rest or rest[0] == "-":
        return Program("stdin", "-", rest[1:])
    launched = launchers.split(os.path.basename(rest[0]), rest[1:])
    return Program("file", rest[0], rest[1:]) if launched is None else _launched(launched)


def _launched(launched: launchers.Launched) -> Program:
    kind = "module" if launched.module else "file"
    return Program(kind, launched.program, launched.arguments, launcher=launched.options)


def _shell(argv: tuple[str, ...]) -> Program:
    at = 1
    while at < len(argv) and argv[at][:1] in {"-", "+"}:
        word = argv[at]
        at += 1
        if word in {"-", "--"}:
            break
        if word.startswith("--"):
            at += word in _SHELL_FILES
        elif "c" in word:  # also `-lc`, `-ec`
            return Program("command", argv[0], argv[1:])
        else:
            at += sum(letter in "oO" for letter in word)  # `-euo pipefail`
    return Program("file", argv[at], argv[at + 1 :]) if at < len(argv) else Program("command", argv[0], argv[1:])


def _is_script(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def _identity(program: Program, path: Sequence[str], cwd: Path) -> str:
    if program.kind == "code":
        return digest.of_bytes(encodable(program.name).encode())
    if program.kind == "stdin":
        return "stdin"
    if program.kind == "command":
        return "command " + program.label
    if program.kind == "module":
        located = _locate(program.name, path, cwd)
        return program.label if located is None else f"{program.label} {located}"
    # A directory or zip file runs its __main__.py; an unreadable program is told apart by its name.
    found = _bytes(cwd / program.name) or _bytes(cwd / program.name / "__main__.py")
    return f"unreadable {program.label}" if found is None else digest.of_bytes(_without_launcher(found))


def _without_launcher(code: bytes) -> bytes:
    """A console script without the lines in which its installer wrote where Python lives."""
    if not code.startswith(b"#!"):
        return code
    _, _, rest = code.partition(b"\n")
    if rest.startswith(b"'''exec'"):
        _, _, rest = rest.partition(b"\n' '''\n")
    return rest


def _locate(module: str, path: Sequence[str], cwd: Path) -> str | None:
    parts = module.split(".")
    for entry in ("", *path):
        base = cwd.joinpath(entry, *parts)
        for candidate in (base.with_name(base.name + ".py"), base / "__main__.py"):
            if (code := _bytes(candidate)) is not None:
                return digest.of_bytes(code)
    return None


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (OSError, ValueError):
        return None


def _kept(arguments: Sequence[str], ignored: Sequence[str]) -> list[str]:
    kept: list[str] = []
    option = ""  # what no value starts with, while the value of a dropped option may follow
    for word in arguments:
        if option and not word.startswith(option):
            option = ""
            continue
        name, equals, _ = word.partition("=")
        secret = is_secret(name)
        dropped = word.startswith("-") and (secret or name in ignored)
        option = "" if equals or not dropped else "--" if secret else "-"
        if not dropped:
            kept.append(_clean(word))
    return kept


def _clean(word: str) -> str:
    return without_secrets(encodable(word))


def _canonical(words: Sequence[str]) -> str:
    return json.dumps([encodable(word) for word in words], ensure_ascii=False, separators=(",", ":"))
