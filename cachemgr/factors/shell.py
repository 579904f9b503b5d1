"""The command that a shell is told to start by `-c`, where its text is one plain command and nothing else.

Charts and images start engines that way: `sh -c 'exec vllm serve $MODEL --port 8000'`. What is understood are words,
quotes, variables of the environment, assignments in front, `exec`, `"$@"` and `2>&1`; any other text is a program of
its own, and so is a shell that reads a start-up file first (POSIX.1-2024, Shell Command Language; bash 5.2 manual,
Invocation).
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

SHELLS = frozenset({"sh", "bash", "dash"})

_OPTIONS = re.compile(r"-(?=.)[ceux]*(o?)")
_SETTINGS = frozenset({"errexit", "nounset", "pipefail", "xtrace"})
_MERGED = "2>&1"
_BLANK = " \t\n"
_PLAIN = re.compile(r"[\w@%+=:,./^-]")
"""What means itself outside of quotes, in any place of a word."""
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=", re.ASCII)
_OWN = re.compile(
    r"BASH\w*|E?UID|IFS|LINENO|OLDPWD|OPT(ARG|IND)|PPID|PWD|P?S\d|RANDOM|S?RANDOM|SECONDS|SHLVL|EPOCH\w+|_"
)
"""Variables that a shell sets itself."""
# fmt: off
_BUILT_IN = frozenset({
    "!", ".", ":", "[", "[[", "alias", "bg", "break", "builtin", "caller", "case", "cd", "command", "continue",
    "coproc", "declare", "do", "done", "echo", "elif", "else", "esac", "eval", "exec", "exit", "export", "false", "fg",
    "fi", "for", "function", "getopts", "hash", "if", "in", "jobs", "kill", "let", "local", "mapfile", "popd", "printf",
    "pushd", "pwd", "read", "readarray", "readonly", "return", "select", "set", "shift", "shopt", "source", "suspend",
    "test", "then", "times", "trap", "true", "type", "typeset", "ulimit", "umask", "unalias", "unset", "until", "wait",
    "while",
})
# fmt: on


class Found(msgspec.Struct, frozen=True):
    """The one command of a text."""

    argv: tuple[str, ...]
    assigned: dict[str, str]
    """Variables that the text sets for it."""


class _Word(msgspec.Struct):
    text: str = ""
    named: int = 0
    """Length of `NAME=` where the word begins like that outside of quotes."""
    begun: bool = False


def only_command(argv: Sequence[str], environ: Mapping[str, str]) -> Found | None:
    """What the shell `argv` starts, or None where it does anything else, or may do."""
    at = _text_at(argv)
    if at is None or "BASH_ENV" in environ:
        return None
    words = _Reader(environ, argv[at + 1 :]).read(argv[at])
    return None if words is None else _command(words)


def _text_at(argv: Sequence[str]) -> int | None:
    """Where the text of `-c` is."""
    at, told = 1, False
    while at < len(argv) and argv[at].startswith("-"):
        found = _OPTIONS.fullmatch(argv[at])
        if found is None:
            return None
        told = told or "c" in argv[at]
        at += 1
        if found[1]:
            if at >= len(argv) or argv[at] not in _SETTINGS:
                return None
            at += 1
    return at if told and at < len(argv) else None


def _command(words: Sequence[_Word]) -> Found | None:
    assigned: dict[str, str] = {}
    at = 0
    while at < len(words) and words[at].named:
        name = words[at].text[: words[at].named - 1]
        assigned[name] = words[at].text[words[at].named :]
        at += 1
    argv = [word.text for word in words[at:]]
    if argv[:1] == ["exec"] and not "".join(argv[1:2]).startswith("-"):
        argv = argv[1:]
    if not argv or argv[0] in _BUILT_IN:
        return None
    return Found(tuple(argv), assigned)


class _Reader:
    """Splits a text as a shell does. `operands` are the words after it: `$0`, `$1` …"""

    def __init__(self, environ: Mapping[str, str], operands: Sequence[str]) -> None:
        self._environ, self._operands = environ, operands
        self._words: list[_Word] = []
        self._word = _Word()
        self._assigned: set[str] = set()

    def read(self, text: str) -> list[_Word] | None:
        """The words, or None where something is not understood."""
        text, at = text.strip(_BLANK), 0
        while at < len(text):
            step = self._step(text, at)
            if step is None:
                return None
            at = step
        self._end()
        return self._words

    def _end(self) -> None:
        if self._word.begun:
            self._words.append(self._word)
        if self._word.named:
            self._assigned.add(self._word.text[: self._word.named - 1])
        self._word = _Word()

    def _add(self, text: str) -> None:
        self._word.text += text
        self._word.begun = True

    def _step(self, text: str, at: int) -> int | None:
        letter, after = text[at], text[at + 1 : at + 2]
        if letter == '"':
            return self._quoted(text, at)
        if letter == "$":
            return self._variable(text, at, quoted=False)
        if letter in " \t":
            self._end()
        elif letter == "\\" and after:
            at += 1
            if after != "\n":
                self._add(after)
        elif letter == "'":
            end = text.find("'", at + 1)
            if end < 0:
                return None
            self._add(text[at + 1 : end])
            at = end
        else:
            return self._plain(text, at)
        return at + 1

    def _plain(self, text: str, at: int) -> int | None:
        end = at + len(_MERGED)
        if text.startswith(_MERGED, at) and not self._word.begun and not text[end : end + 1].strip(_BLANK):
            return end  # both streams in one: no word, and nothing else
        if not self._word.begun and (found := _ASSIGNMENT.match(text, at)) is not None:
            self._word.named = len(found[0])
            self._add(found[0])
            return found.end()
        if _PLAIN.match(text, at) is None:
            return None
        self._add(text[at])
        return at + 1

    def _quoted(self, text: str, at: int) -> int | None:
        if text.startswith('"$@"', at):
            return self._all_operands(text, at)
        self._add("")
        at += 1
        while at < len(text) and text[at] != '"':
            if text[at] == "`":
                return None
            if text[at] == "\\" and text[at + 1 : at + 2] in {"$", "`", '"', "\\", "\n"}:
                self._add(text[at + 1].strip("\n"))
                at += 2
            elif text[at] == "$":
                step = self._variable(text, at, quoted=True)
                if step is None:
                    return None
                at = step
            else:
                self._add(text[at])
                at += 1
        return at + 1 if at < len(text) else None

    def _all_operands(self, text: str, at: int) -> int | None:
        """`"$@"` as a word of its own."""
        end = at + len('"$@"')
        if self._word.begun or text[end : end + 1].strip(_BLANK):
            return None
        self._words += [_Word(word, begun=True) for word in self._operands[1:]]
        return end

    def _variable(self, text: str, at: int, *, quoted: bool) -> int | None:
        """A variable of the environment; outside of quotes only one that stays one word and is no pattern."""
        found = _VARIABLE.match(text, at)
        name = "" if found is None else found[1] or found[2]
        value = self._environ.get(name)
        if found is None or value is None or name in self._assigned or _OWN.fullmatch(name):
            return None
        if text.startswith("\\\n", found.end()):  # the name goes on in the next line
            return None
        if not quoted and not (value and all(_PLAIN.fullmatch(letter) for letter in value)):
            return None
        self._add(value)
        return found.end()
