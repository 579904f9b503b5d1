"""Blame: whether an engine died of what was restored.

Engines do not survive a bad file in their caches, and meet it again at every start until somebody removes it. A
traceback that names a restored file is proof enough, and so is a signal that only bad machine code raises while the
engine starts. Running out of memory never is: the same files would be blamed on every machine that is too small.
"""

import os
import signal
from collections.abc import Collection, Mapping

import msgspec

_BAD_CODE = {
    signal.SIGILL: "an instruction that this CPU does not have",
    signal.SIGSEGV: "a memory access of machine code",
    signal.SIGBUS: "a memory access of machine code",
}

_TOLD = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL})
"""What somebody sends who wants an engine to end."""


class Death(msgspec.Struct, frozen=True):
    """How an engine ended."""

    signals: tuple[int, ...]
    """Of the command itself and of processes of the engine, as far as its log tells."""
    paths: tuple[str, ...]
    """Absolute paths that its tracebacks name."""
    error: str | None
    """The last line of the traceback that began it."""
    out_of_memory: bool
    ready: bool
    """Whether it had started before it died."""


def blamed(death: Death, restored: Mapping[str, Collection[str]]) -> str | None:
    """Why the restored files are to blame, or None. `restored` has paths by live directory."""
    if death.out_of_memory or not any(restored.values()) or not _TOLD.isdisjoint(death.signals):
        return None
    named = next((path for path in death.paths if _restored(path, restored)), None)
    if named is not None:
        reason = f": {death.error}" if death.error else ""
        return f"the engine failed on {named}{reason}"
    if death.ready:
        return None
    bad = next((number for number in death.signals if number in _BAD_CODE), None)
    if bad is None:
        return None
    return f"the engine died of {signal.Signals(bad).name} ({_BAD_CODE[signal.Signals(bad)]}) while it started"


def rejected(entries: Mapping[str, str], restored: Mapping[str, Collection[str]]) -> str | None:
    """Why the engine did not take a restored file that it should have taken, or None. `entries` has its reasons."""
    found = next((path for path in entries if _restored(path, restored)), None)
    return None if found is None else f"the engine rejected {found}: {entries[found]}"


def _restored(path: str, restored: Mapping[str, Collection[str]]) -> bool:
    """Whether `path` is a restored file or a directory that holds some."""
    for directory, files in restored.items():
        below = os.path.relpath(path, directory) if path.startswith(directory + "/") else None
        if below is not None and any(file == below or file.startswith(below + "/") for file in files):
            return True
    return False
