"""Origins: which entries of a directory that all launches share an engine may be left to find.

vLLM picks an entry by a hash that is blind to some of what shapes it, so an entry that was made under other
circumstances would be taken for the right one. Whatever a launch restored or made gets a note of what its engine could
not see (`cachemgr.key.sight`). Before a start, entries without such a note, or with another one, are moved out of the
engine's sight, and moved back when it has looked: it makes those anew that it wanted.

A note is about the bytes that it was written for, where they lay then. An entry that changed since has no note, and
neither has one that somebody copied here with its note: its index may name the place that it came from.
"""

import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from cachemgr import digest
from cachemgr.beneath import read_plain
from cachemgr.domains import Target
from cachemgr.examine import seen_in, units_of
from cachemgr.observe import STAGE_PREFIX, Snapshot, scan
from cachemgr.places import make_directory, write_private

_NOTES = "cachemgr/.origins"
_ASIDE = "cachemgr/.aside"
_LIMIT = 64 << 10
_KEPT = "kept"
"""Below what is aside, as if a launch of that name had put it there: one copy of each entry of unknown origin whose
place is taken. Launches that are killed again and again would fill the disk with more."""


class Note(msgspec.Struct, frozen=True):
    """What is known about one entry."""

    sight: str
    files: str
    """Fingerprint of its directory and of the names, sizes and modification times of its files."""
    launch: str = ""
    """Which launch restored or made it."""

    def same(self, other: "Note | None") -> bool:
        """Whether both are about the same bytes under the same sight, whoever made them."""
        return other is not None and (self.sight, self.files) == (other.sight, other.files)


class Shared:
    """The directories of one launch that all launches on a root share, and whose engine may take a wrong entry.

    One that the user named by a variable of its own is the user's: nothing is moved in there.
    """

    def __init__(self, root: str, targets: Iterable[Target], sight: str, launch: str) -> None:
        self._root, self._sight, self._launch = root, sight, launch
        self._targets = [
            target
            for target in targets
            if target.domain.in_place and not target.domain.content_keyed and target.directory.startswith(f"{root}/")
        ]

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
        seen = seen_in(target)
        return [
            unit
            for unit, paths in units_of(target.domain, seen).items()
            if not self._sight or not self._now(target, seen, paths).same(_read(self._note(target, unit)))
        ]

    def made_elsewhere(self, target: Target, seen: Snapshot, *, unknown: bool) -> frozenset[str]:
        """The units in `seen` that another launch restored or made; `unknown` is the answer where nobody knows."""
        if target not in self._targets:
            return frozenset()
        return frozenset(
            unit
            for unit, paths in units_of(target.domain, seen).items()
            if self._is_anothers(_read(self._note(target, unit)), self._now(target, seen, paths), unknown=unknown)
        )

    def _is_anothers(self, note: Note | None, now: Note, *, unknown: bool) -> bool:
        return note.launch != self._launch if note is not None and now.same(note) else unknown

    def set_aside(self, strange: Iterable[tuple[Target, str]]) -> list[str]:
        """Move these units out of the engine's sight. Returns the names of those that could not be moved."""
        return [unit for target, unit in strange if not self._set_aside(target, unit)]

    def _set_aside(self, target: Target, unit: str) -> bool:
        """Its note goes along: the entry that takes its place gets a note of the same name."""
        aside = self._aside(self._launch, target)
        if not _moved(f"{target.directory}/{unit}", f"{aside}/{unit}"):
            return False
        _moved(str(self._note(target, unit)), self._note_aside(aside, target, unit))
        return True

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
            moved = [unit for unit in units if self._return(aside, target, unit)]
            back[target.domain.name] = frozenset(moved)
            for unit in set(units) - set(moved):
                self._keep(launch, target, unit)
            _remove_empty(aside)
        return back

    def _return(self, aside: str, target: Target, unit: str) -> bool:
        """To its place, if nothing is there but empty directories: vLLM makes some before it looks."""
        place = f"{target.directory}/{unit}"
        _remove_empty_below(place)
        if not _moved(f"{aside}/{unit}", place):
            return False
        _moved(self._note_aside(aside, target, unit), str(self._note(target, unit)))
        return True

    def _keep(self, launch: str, target: Target, unit: str) -> None:
        """What cannot come back: one copy, where the origin is unknown."""
        aside, kept = self._aside(launch, target), self._aside(_KEPT, target)
        note = Path(self._note_aside(aside, target, unit))
        if note.exists():
            shutil.rmtree(f"{aside}/{unit}", ignore_errors=True)
            note.unlink(missing_ok=True)
        elif launch != _KEPT and os.path.lexists(f"{kept}/{unit}"):
            shutil.rmtree(f"{aside}/{unit}", ignore_errors=True)
        elif launch != _KEPT:
            _moved(f"{aside}/{unit}", f"{kept}/{unit}")

    def vouch(self, units: Mapping[str, Collection[str]]) -> None:
        """Note that these units (by domain) are what an engine with this sight made.

        Failing to costs a restore at the next start.
        """
        for target in self._targets if self._sight else ():
            wanted = units.get(target.domain.name)
            if wanted:
                self._vouch(target, wanted)

    def _vouch(self, target: Target, wanted: Collection[str]) -> None:
        seen = seen_in(target)
        members = units_of(target.domain, seen)
        for unit in members.keys() & set(wanted):
            note = self._now(target, seen, members[unit])
            if note.same(_read(self._note(target, unit))):
                continue  # whoever made it stays its maker
            with suppress(OSError):
                write_private(self._note(target, unit), msgspec.json.encode(note))

    def _now(self, target: Target, seen: Snapshot, paths: Sequence[str]) -> Note:
        rows = [(path, seen[path].size, seen[path].mtime_ns) for path in paths]
        return Note(self._sight, digest.fingerprint(msgspec.json.encode([target.directory, rows])), self._launch)

    def _aside(self, launch: str, target: Target) -> str:
        return f"{self._root}/{_ASIDE}/{launch}/{target.domain.name}"

    def _note(self, target: Target, unit: str) -> Path:
        return Path(self._root, _NOTES, f"{digest.fingerprint(f'{target.domain.name}/{unit}'.encode())}.json")

    def _note_aside(self, aside: str, target: Target, unit: str) -> str:
        return f"{aside}/{STAGE_PREFIX}{self._note(target, unit).name}"


def _remove_empty_below(directory: str) -> None:
    """The directory and all in it where nothing is left in them."""
    for path, _names, _files in sorted(os.walk(directory), reverse=True):
        with suppress(OSError):
            os.rmdir(path)


def _remove_empty(directory: str) -> None:
    """The directory, that of its launch and that of all launches, where nothing is left in them."""
    _remove_empty_below(directory)
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
        return msgspec.json.decode(read_plain(path, limit=_LIMIT), type=Note)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
