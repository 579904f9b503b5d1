"""Captures that wait to be sent to the mirror: names in our own state, so that a sender that dies costs nothing.

A name is added after its capture is in the local store, and goes when the mirror has it. Sending twice is harmless;
what is lost with the state is only that somebody would have sent it.
"""

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from cachemgr import digest
from cachemgr.digest import Digest
from cachemgr.key import Key, folder, from_folder
from cachemgr.places import make_directory, write_private
from cachemgr.sizes import counted

_FAILURE = "failure.json"


def reports(home: Path, server: str) -> Path:
    """Where reports of launches wait for one service (`cachemgr.reporting`)."""
    return home / "reports" / digest.fingerprint(server.encode())


class Trouble(msgspec.Struct, frozen=True):
    """Why the last sending did not come to its end."""

    word: str
    reason: str
    since: str
    """RFC 3339, UTC."""


class Outbox:
    """What waits between one local store and one mirror; `directory` need not exist."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def lock(self) -> Path:
        """The lock file of the one that sends."""
        return self._directory / "lock"

    @property
    def records(self) -> Path:
        """Where launch records are gathered (`cachemgr.store.records.keep`)."""
        return self._directory / "launches"

    @property
    def log(self) -> Path:
        """Where a sender's own failures go."""
        return self._directory / "log"

    def add(self, key: Key, capture: Digest) -> None:
        """Let a capture be sent.

        Raises:
            OSError: the note cannot be written.
        """
        make_directory(self._directory, 0o700)
        os.close(os.open(self._path(key, capture), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def waiting(self) -> Mapping[Key, frozenset[Digest]]:
        """The captures that wait, by artifact."""
        found: dict[Key, set[Digest]] = defaultdict(set)
        with suppress(FileNotFoundError), os.scandir(self._directory) as entries:
            for entry in entries:
                name, _dot, digits = entry.name.partition(".")
                key, capture = from_folder(name), digest.from_hex(digits)
                if key is not None and capture is not None:
                    found[key].add(capture)
        return {key: frozenset(captures) for key, captures in found.items()}

    def told(self) -> str | None:
        """How many captures wait, for people; None when none does."""
        count = sum(map(len, self.waiting().values()))
        return None if not count else f"{counted(count, 'capture')} {'waits' if count == 1 else 'wait'} for the mirror"

    def sent(self, key: Key, capture: Digest) -> None:
        """A capture does not wait any more."""
        self._path(key, capture).unlink(missing_ok=True)

    def fail(self, trouble: Trouble) -> None:
        """Remember why what waits was not sent, for the next command to tell."""
        write_private(self._directory / _FAILURE, msgspec.json.encode(trouble))

    def recover(self) -> None:
        """Sending works again."""
        (self._directory / _FAILURE).unlink(missing_ok=True)

    def trouble(self) -> Trouble | None:
        """Why what waits was not sent the last time."""
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((self._directory / _FAILURE).read_bytes(), type=Trouble)
        return None

    def _path(self, key: Key, capture: Digest) -> Path:
        return self._directory / f"{folder(key)}.{digest.hex_of(capture)}"
