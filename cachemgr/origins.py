"""Origins: which entries of a directory that all launches share an engine may be left to find.

vLLM picks an entry by a hash that is blind to some of what shapes it, so an entry that was made under other
circumstances would be taken for the right one. Whatever a launch restored or made gets a note of what its engine could
not see (`cachemgr.key.sight`). Before a start, entries without such a note, or with another one, are moved out of the
engine's sight, and moved back when it has looked: it makes those anew that it wanted.

A note is about the bytes that it was written for. An entry that changed since has no note.
"""

import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from cachemgr import digest
from cachemgr.domains import Target
from cachemgr.examine import units_of
from cachemgr.observe import Snapshot, scan
from cachemgr.places import make_directory, write_private

_NOTES = "cachemgr/.origins"
_ASIDE = "cachemgr/.aside"


class Note(msgspec.Struct, frozen=True):
    """What is known about one entry."""

    sight: str
    files: str
    """Fingerprint of the names, sizes and modification times of its files."""


class Shared:
    """The directories of one launch that all launches on a root share, and whose engine may take a wrong entry."""

    def __init__(self, root: str, targets: Iterable[Target], sight: str, launch: str) -> None:
        self._root, self._sight, self._launch = root, sight, launch
        self._targets = [target for target in targets if target.domain.in_place and not target.domain.content_keyed]

    def recover(self, living: Collection[str]) -> None:
        """Put back what launches that are gone had set aside. `living` are the launches that are not."""
        with suppress(OSError):
            for launch in sorted(os.listdir(f"{self._root}/{_ASIDE}")):
                if launch not in living:
                    self._put_back(launch)

    def strange(self) -> list[tuple[Target, str]]:
        """The units that an engine with this sight must not find."""
        return [(target, unit) for target in self._targets for unit in self._strange_in(target)]

    def _strange_in(self, target: Target) -> list[str]:
        seen = scan(target.directory, target.domain.travels)
        return [
            unit
            for unit, paths in units_of(target.domain, seen).items()
            if not self._sight or _read(self._note(target, unit)) != Note(self._sight, _fingerprint(seen, paths))
        ]

    def set_aside(self, strange: Iterable[tuple[Target, str]]) -> list[str]:
        """Move these units out of the engine's sight. Returns the names of those that could not be moved."""
        return [
            unit
            for target, unit in strange
            if not _moved(f"{target.directory}/{unit}", f"{self._aside(self._launch, target)}/{unit}")
        ]

    def put_back(self) -> dict[str, frozenset[str]]:
        """Move what was set aside back to where nothing has taken its place; the units by domain that lie there again.

        Where something has, an entry that we know the origin of has a capture, and goes; of another this may be the
        only copy, and stays aside.
        """
        return self._put_back(self._launch)

    def _put_back(self, launch: str) -> dict[str, frozenset[str]]:
        back: dict[str, frozenset[str]] = {}
        for target in self._targets:
            aside = self._aside(launch, target)
            units = sorted(units_of(target.domain, scan(aside, target.domain.travels)))
            moved = [unit for unit in units if _moved(f"{aside}/{unit}", f"{target.directory}/{unit}")]
            back[target.domain.name] = frozenset(moved)
            for unit in set(units) - set(moved):
                if self._note(target, unit).exists():
                    shutil.rmtree(f"{aside}/{unit}", ignore_errors=True)
            _remove_empty(aside)
        return back

    def vouch(self, units: Mapping[str, Collection[str]]) -> None:
        """Note that these units (by domain) are what an engine with this sight made.

        Failing to costs a restore at the next start.
        """
        for target in self._targets if self._sight else ():
            wanted = units.get(target.domain.name)
            if wanted:
                self._vouch(target, wanted)

    def _vouch(self, target: Target, wanted: Collection[str]) -> None:
        seen = scan(target.directory, target.domain.travels)
        members = units_of(target.domain, seen)
        for unit in members.keys() & set(wanted):
            note = Note(self._sight, _fingerprint(seen, members[unit]))
            with suppress(OSError):
                write_private(self._note(target, unit), msgspec.json.encode(note))

    def _aside(self, launch: str, target: Target) -> str:
        return f"{self._root}/{_ASIDE}/{launch}/{target.domain.name}"

    def _note(self, target: Target, unit: str) -> Path:
        return Path(self._root, _NOTES, f"{digest.fingerprint(f'{target.domain.name}/{unit}'.encode())}.json")


def _remove_empty(directory: str) -> None:
    """The directory, that of its launch and that of all launches, where nothing is left in them."""
    for path, _names, _files in sorted(os.walk(directory), reverse=True):
        with suppress(OSError):
            os.rmdir(path)
    with suppress(OSError):
        os.rmdir(os.path.dirname(directory))
        os.rmdir(os.path.dirname(os.path.dirname(directory)))


def _moved(path: str, to: str) -> bool:
    """Rename unless something is there."""
    try:
        make_directory(os.path.dirname(to))
        if os.path.lexists(to):
            return False
        os.rename(path, to)
    except OSError:
        return False
    return True


def _read(path: Path) -> Note | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Note)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _fingerprint(seen: Snapshot, paths: Sequence[str]) -> str:
    rows = [(path, seen[path].size, seen[path].mtime_ns) for path in paths]
    return digest.fingerprint(msgspec.json.encode(rows))
