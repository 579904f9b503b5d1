"""Tracebacks in the output of several processes whose lines are mixed: which exceptions, and which files they name.

Bounded like all that is read of an engine's output, whatever is printed.
"""

import re
from dataclasses import dataclass, field
from typing import Final

import msgspec

_MOST_FAILURES: Final = 16
_MOST_PATHS: Final = 256
_MOST_CAUSES: Final = 32
_LONGEST_TEXT: Final = 4096
_LONGEST_TRACEBACK: Final = 20_000
"""Lines after which an open traceback is given up: until it is closed, every line is looked at."""
TRACEBACK: Final = "Traceback (most recent call last):"
FATAL: Final = "Fatal Python error: "
_CHAINED: Final = ("During handling of the above exception", "The above exception was the direct cause")
_STACK: Final = ("Thread 0x", "Current thread 0x")
_HARMLESS: Final = frozenset({"DEBUG", "INFO", "WARNING"})
_HEADER = re.compile(
    r"(?:\[rank(?P<rank>\d{1,7})\]:(?: |$)|\([^\s()]{1,64} pid=(?P<pid>\d{1,20})\)(?: |$))?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]\s]{1,300}\](?: |$))?"
)
_EXCEPTION = re.compile(r"(?!(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b)[A-Za-z_][\w.]*(?:: .*|:)?$")
_QUOTED_PATH = re.compile(r"[\"'](/[^\"'\n]{1,4096})[\"']")
_BARE_PATH = re.compile(r"(?<![\w/.:~\"'-])((?:/[\w.+@%~=-]{1,255}){2,64})")


class Failure(msgspec.Struct, frozen=True):
    """A traceback at no level, ERROR or CRITICAL, or a fatal error of the interpreter. Not every one ends a process."""

    process: str
    """`pid 123`, `rank 0`, or empty where the line does not say."""
    exception: str | None
    """The last exception line, with the next one where it ends in a colon. None while the traceback is still coming."""
    causes: tuple[str, ...]
    """Earlier exceptions of the same chain."""
    paths: tuple[str, ...]
    """Every absolute path in it, in order, at most 256."""
    at: float
    """When it began, on the caller's clock."""
    stopping: bool
    """Whether an engine had been told to stop before: 0.32 logs an EngineDeadError at every orderly stop."""


@dataclass
class _Traceback:
    level: str | None
    process: str
    at: float
    stopping: bool
    number: int = 0
    exception: str | None = None
    chained: bool = False
    causes: list[str] = field(default_factory=list)
    paths: dict[str, None] = field(default_factory=dict)
    lines: int = 0

    def raised(self, text: str) -> None:
        if self.exception is not None and len(self.causes) < _MOST_CAUSES:
            self.causes.append(self.exception)
        self.exception = text[:_LONGEST_TEXT]
        self.chained = False

    def mention(self, text: str) -> None:
        for path in paths_in(text):
            if len(self.paths) >= _MOST_PATHS:
                return
            self.paths.setdefault(path)

    def failure(self) -> Failure:
        return Failure(self.process, self.exception, tuple(self.causes), tuple(self.paths), self.at, self.stopping)


def paths_in(text: str) -> list[str]:
    """The absolute paths in `text`, in order: quoted ones whole, bare ones up to white space."""
    found = [(match.start(1), match[1]) for match in _QUOTED_PATH.finditer(text)]
    found += [(match.start(1), match[1].rstrip(".")) for match in _BARE_PATH.finditer(text)]
    return [path for _, path in sorted(found)]


class Tracebacks:
    """Follows tracebacks of several processes whose lines are mixed."""

    def __init__(self) -> None:
        self._open: dict[str, _Traceback] = {}
        self._done: list[_Traceback] = []
        self._number = 0

    @property
    def following(self) -> bool:
        return bool(self._open)

    def failures(self) -> tuple[Failure, ...]:
        """In the order in which they began: the root cause comes first, the processes that waited for it follow."""
        known = [*self._done, *(each for each in self._open.values() if each.level not in _HARMLESS)]
        known.sort(key=lambda trace: trace.number)
        return tuple(trace.failure() for trace in (*known[: _MOST_FAILURES - 1], *known[_MOST_FAILURES - 1 :][-1:]))

    def line(self, text: str, now: float, *, stopping: bool) -> None:
        header = _HEADER.match(text)
        assert header is not None, "every part of it is optional"
        process = f"pid {header['pid']}" if header["pid"] else f"rank {header['rank']}" if header["rank"] else ""
        body = text[header.end() :]
        for each in [name for name, trace in self._open.items() if trace.lines > _LONGEST_TRACEBACK]:
            self._close(each)
        for trace in self._open.values():
            trace.lines += 1
        if TRACEBACK in body or body.startswith(FATAL):
            self._start(body, _Traceback(header["level"], process, now, stopping))
        elif process in self._open:
            self._follow(body, process)

    def _start(self, body: str, new: _Traceback) -> None:
        trace = self._open.get(new.process)
        if trace is not None and not trace.chained and (trace.exception is not None or trace.level != new.level):
            self._close(new.process)
            trace = None
        if trace is None:
            if len(self._open) >= _MOST_FAILURES:
                self._close(next(iter(self._open)))
            self._number += 1
            trace = self._open[new.process] = new
            trace.number = self._number
        if body.startswith(FATAL):
            trace.raised(body)
            trace.mention(body)

    def _follow(self, body: str, process: str) -> None:
        trace = self._open[process]
        if not body or body[0] in " \t" or body.startswith((*_CHAINED, *_STACK)):
            trace.mention(body)
            trace.chained = trace.chained or body.startswith(_CHAINED)
        elif trace.exception is not None and trace.exception.endswith(":") and not trace.chained:
            trace.exception = f"{trace.exception} {body}"[:_LONGEST_TEXT]
            trace.mention(body)
        elif trace.exception is not None and not trace.chained:
            self._close(process)
        elif _EXCEPTION.match(body):
            trace.raised(body)
            trace.mention(body)

    def _close(self, process: str) -> None:
        trace = self._open.pop(process)
        if trace.level in _HARMLESS:
            return
        if len(self._done) >= _MOST_FAILURES:
            self._done.pop()
        self._done.append(trace)
