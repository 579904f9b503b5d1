"""Who uses a live directory: one small file per launch, that says which process it is and still beats.

Not a lock. flock does nothing on some shared file systems, survives nothing in others, and its holder cannot be told
from another container's process of the same number. A record is made under a name of its own, so it cannot be torn or
lost to a race; two launches that see each other both step aside, which costs a directory and never a wrong result.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

import msgspec

from cachemgr import process
from cachemgr.beneath import read_plain
from cachemgr.observe import STAGE_PREFIX
from cachemgr.places import make_directory
from cachemgr.process import Process, this_process

BEAT_SECONDS = 30.0
STALE_SECONDS = 300.0
"""How long a holder that cannot be looked at (another host, another container) counts after its last beat."""

_ATTEMPTS = 20
"""How often a directory is made that another launch removes because it is the last to leave."""
FOLDER = f"{STAGE_PREFIX}held"
"""Where records lie in the directory that they are about."""
_LIMIT = 64 << 10
"""Bytes of a record; whoever may write in a shared directory may have put anything there, a pipe as well."""

Purpose = Literal["compiling", "warm"]


class Holder(msgspec.Struct, frozen=True):
    """One launch that uses a directory."""

    launch: str
    purpose: Purpose
    process: Process
    sight: str | None = None
    """What its engine is blind to (`cachemgr.key.sight`); None for a launch that uses no shared directory."""


def describe_self(launch: str, purpose: Purpose, sight: str | None = None) -> Holder:
    """The record of this process."""
    return Holder(launch, purpose, this_process(), sight)


class Hold:
    """This launch's record in one directory, from `take` until `release`. Beat it at least every BEAT_SECONDS."""

    def __init__(self, directory: str, holder: Holder) -> None:
        self._directory, self._holder = directory, holder
        self._path = f"{directory}/{FOLDER}/{holder.launch}.json"
        self._beaten = time.monotonic()

    @classmethod
    def take(cls, directory: str, holder: Holder) -> "Hold":
        """Say that `holder` uses `directory`, which is made if it is missing. Raises OSError where that is refused."""
        for _attempt in range(_ATTEMPTS):
            with suppress(FileNotFoundError):
                _write(directory, holder)
                return cls(directory, holder)
        _write(directory, holder)
        return cls(directory, holder)

    @property
    def purpose(self) -> Purpose:
        """What the record says."""
        return self._holder.purpose

    def compiled(self) -> None:
        """What it compiled is stored: nobody has to wait for it any more."""
        self._holder = msgspec.structs.replace(self._holder, purpose="warm")
        with suppress(OSError):
            _write(self._directory, self._holder)

    def beat(self) -> None:
        """Show that we are alive, when it is time to."""
        now = time.monotonic()
        if now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            with suppress(OSError):
                os.utime(self._path)

    def release(self) -> None:
        """We do not use the directory any more."""
        with suppress(OSError):
            os.unlink(self._path)
            os.rmdir(os.path.dirname(self._path))


def _write(directory: str, holder: Holder) -> None:
    folder = f"{directory}/{FOLDER}"
    make_directory(folder)
    aside = f"{folder}/.{holder.launch}"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(holder))
    os.rename(aside, f"{folder}/{holder.launch}.json")


def is_record(path: str) -> bool:
    """Whether a path is that of a record, or of one that is being made. Who has one open only asks who is there."""
    return FOLDER in path.split("/")


def living(directory: str, *, now: float) -> list[Holder]:
    """The living holders of `directory`. Nothing is changed."""
    return [holder for path, holder in _records(directory) if _is_alive(path, holder, now)]


def others(directory: str, launch: str, *, now: float) -> list[Holder]:
    """The living holders of `directory` but for `launch`. Records of the dead are removed."""
    return [holder for name, holder in _records(directory) if holder.launch != launch and _lives(name, holder, now)]


def _records(directory: str) -> Iterator[tuple[str, Holder]]:
    folder = f"{directory}/{FOLDER}"
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    except OSError:
        return
    for name in names:
        path = f"{folder}/{name}"
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            yield path, msgspec.json.decode(read_plain(path, limit=_LIMIT), type=Holder)


def _lives(path: str, holder: Holder, now: float) -> bool:
    alive = _is_alive(path, holder, now)
    if not alive:
        with suppress(OSError):
            os.unlink(path)
    return alive


def _is_alive(path: str, holder: Holder, now: float) -> bool:
    """By looking at the process where we can see it, and by its beat where we cannot."""
    runs = process.runs(holder.process)
    return _beats(path, now) if runs is None else runs


def _beats(path: str, now: float) -> bool:
    try:
        return now - os.stat(path).st_mtime < STALE_SECONDS
    except OSError:
        return False
