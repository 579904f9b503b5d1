"""Live directories: what goes from where engines look, and how it goes without hurting one that looks.

Three kinds of things lie there. The directory of a key, which launches of that key use and nobody else. Units that all
launches share (`$VLLM_CACHE_ROOT/torch_compile_cache`, caches that are never moved), which engines write that were
started without us, too. And what killed writers, restores and prunes left.

What a launch holds stays, and so does what any process has open. The rest is renamed out of sight first, a directory or
a unit at a time, so that an engine that starts meanwhile finds all of it or misses it. While that goes on, the prune
holds the place as one that compiles something else, which sends every launch that starts to directories of its own.
Whatever was opened between the look and the rename is put back.
"""

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Literal

import msgspec

from cachemgr import hold, open_files
from cachemgr.clock import moment
from cachemgr.domains import Target
from cachemgr.domains.leftovers import ORPHANED_SECONDS, is_surely_temporary, is_temporary
from cachemgr.examine import known_units, units_of
from cachemgr.history import LastUses
from cachemgr.key import Key, from_folder
from cachemgr.live import Base
from cachemgr.observe import STAGE_PREFIX
from cachemgr.open_files import Opened
from cachemgr.process import with_variable_in
from cachemgr.prune.limits import Goner, Item, Kept, Limits, Part, choose
from cachemgr.prune.survey import File, Survey, survey

_ASIDE_SECONDS = 7 * 86400.0
"""How long what was set aside is kept, for people who want to know why an engine died."""
_OWNED_SECONDS = 86400.0
"""How long a temporary counts as that of a living process, by the number in its name."""
_ONLY = "no artifact has it"
_KILLED = "a prune was killed here"
_ENDED = "the command that made it for a start was killed"
_PID = re.compile(r"(?:tmp\.pid_|\.tmp\.|\.pid_|[._])(\d+)(?:[._]|$)")
_GONE = f"{STAGE_PREFIX}gone-"


Kind = Literal["directory", "unit", "left-over"]


class Doomed(msgspec.Struct, frozen=True):
    """One thing that goes, whole: `path` below `place`. `bytes` as `du` counts."""

    place: str
    path: str
    kind: Kind
    why: str
    bytes: int
    files: int


class LivePlan(msgspec.Struct, frozen=True):
    """What a prune of live directories will do."""

    roots: tuple[str, ...]
    goners: tuple[Doomed, ...]
    kept: tuple[Kept, ...]
    bytes: int
    files: int
    notes: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Whether nothing goes."""
        return not self.goners


class Restorable(msgspec.Struct, frozen=True):
    """What artifacts can put back: directories of these keys, and entries of these names."""

    keys: frozenset[Key]
    entries: frozenset[str]


class _Found(msgspec.Struct, frozen=True):
    """A thing that may go, as an item and as what is done with it."""

    item: Item
    place: str
    path: str
    kind: Kind


def plan(
    roots: Sequence[str],
    shared: Sequence[Target],
    limits: Limits,
    *,
    uses: LastUses,
    models: Mapping[Key, str] = {},
    covered: Collection[tuple[str, str]] | None = None,
    restorable: Restorable | None = None,
    bases: Sequence[Base] = (),
    free: int = 0,
    now: float,
) -> LivePlan:
    """What goes from live directories. Nothing is changed.

    Args:
        roots: where directories of keys may be, in `<root>/cachemgr/`.
        shared: the directories of caches that are not divided by key.
        uses: what launch records tell.
        models: per key its model and device, as far as artifacts tell.
        covered: domain and name of every unit that some artifact has, where units that none has are to go; None leaves
            them.
        restorable: what may go at all, but for what was left by the dead; None for everything.
        bases: where roots of starts may be that were killed.
        free: bytes that the file system has.
        now: seconds since the epoch.
    """
    opened = open_files.look()
    prunes = _living_prunes(roots, now)
    looking = _Looking(uses, models, covered, restorable, opened=opened, prunes=prunes, now=now)
    found = [each for root in roots for each in looking.directories(root)]
    for target in shared:
        root = next((root for root in roots if target.directory.startswith(f"{root}/")), None)
        found += looking.units(target, root)
    found += [each for root in roots for each in looking.left_in(root)]
    found += [each for base in bases for each in looking.roots_of_the_killed(base)]
    choice = choose([each.item for each in found], limits, now=now, free=free)
    by_name = {each.item.name: each for each in found}
    goners = tuple(_doomed(by_name[goner.name], goner) for goner in choice.goners)
    notes = list(choice.notes)
    if opened.unseen:
        noun = "process" if opened.unseen == 1 else "processes"
        notes.append(f"{opened.unseen} {noun} of other users could not be looked into")
    return LivePlan(
        tuple(roots),
        goners,
        choice.kept,
        sum(goner.bytes for goner in goners),
        sum(goner.files for goner in goners),
        tuple(notes),
    )


def _doomed(found: _Found, goner: Goner) -> Doomed:
    return Doomed(found.place, found.path, found.kind, goner.why, goner.bytes, goner.files)


class _Looking:
    """What may go, from one look at who has what open."""

    def __init__(
        self,
        uses: LastUses,
        models: Mapping[Key, str],
        covered: Collection[tuple[str, str]] | None,
        restorable: Restorable | None,
        *,
        opened: Opened,
        prunes: Collection[str],
        now: float,
    ) -> None:
        self._prunes = prunes
        self._uses, self._models, self._covered, self._restorable = uses, models, covered, restorable
        self._opened, self._now = opened, now

    def directories(self, root: str) -> Iterator[_Found]:
        """Directories of keys. One with a launch in its name went with that launch, unless that was killed."""
        for name in _directories_in(f"{root}/cachemgr"):
            folder, _dot, launch = name.partition(".")
            key = from_folder(folder)
            if key is None:
                continue
            place, seen = f"{root}/cachemgr", survey(f"{root}/cachemgr/{name}")
            holder = self._held_by(f"{place}/{name}")
            kept = holder or self._kept(f"{place}/{name}", seen.files, seen.barred)
            last = max(moment(self._uses.keys.get(key, "")), seen.modified)
            if launch and not kept and self._now - last > ORPHANED_SECONDS:  # what it started may run on
                why = f"its launch {launch} is gone"
                yield self._found(place, name, "directory", seen.files, last=last, unfit=why)
                continue
            if self._restorable is not None and key not in self._restorable.keys:
                kept = kept or _ONLY
            own = [file for file in seen.files if _left_over(file.path) is None]
            yield self._found(place, name, "directory", own, last=last, kept=kept, group=self._models.get(key, ""))
            yield from self._left_overs(f"{place}/{name}", seen, holder)

    def units(self, target: Target, root: str | None) -> Iterator[_Found]:
        """Units in a directory that launches share, and what was left there."""
        seen = survey(target.directory)
        using = [] if root is None else _living_sharers(root, self._now)
        for unit, files in _units(target, seen).items():
            barred = [each for each in seen.barred if each.startswith(f"{unit}/")]
            kept = f"in use by launch {using[0]}" if using else self._kept(target.directory, files, barred)
            if self._restorable is not None and target.domain.entry_of(unit) not in self._restorable.entries:
                kept = kept or _ONLY
            last = self._last_of_unit(target, unit, files)
            unfit = self._uncovered(target, unit, last)
            yield self._found(target.directory, unit, "unit", files, last=last, kept=kept, unfit=unfit)
        if root is None or not target.domain.in_place:  # a name of vLLM's below its own root
            seen = seen._replace(files=tuple(file for file in seen.files if _is_surely_left(file.path)))
        yield from self._left_overs(target.directory, seen, f"in use by launch {using[0]}" if using else "")

    def _last_of_unit(self, target: Target, unit: str, files: Sequence[File]) -> float:
        """Of an entry that no record names, nobody knows more than when it was made."""
        name = target.domain.entry_of(unit)
        told = "" if name is None else self._uses.entries.get(name, "")
        return max([moment(told), *(file.modified for file in files)])

    def _uncovered(self, target: Target, unit: str, last: float) -> str:
        if self._covered is None or (target.domain.name, unit) in self._covered:
            return ""
        return _ONLY if self._now - last > ORPHANED_SECONDS else ""

    def left_in(self, root: str) -> Iterator[_Found]:
        """What prunes and launches left in our own directory of a root."""
        place = f"{root}/cachemgr"
        for name in _directories_in(place):
            if name.startswith(_GONE) and name not in self._prunes:
                seen = survey(f"{place}/{name}")
                yield self._found(place, name, "left-over", seen.files, unfit=_KILLED)

    def roots_of_the_killed(self, base: Base) -> Iterator[_Found]:
        """Roots of starts that did not go with their start. While one runs, its launch has a hold in there; where that
        is of the dead, what it started may run on, and has the root among its variables. Where there is no hold, only
        time tells."""
        place = os.path.realpath(base.directory)
        for name in _directories_in(place):
            if not name.startswith(base.prefix) or not _is_ours(f"{place}/{name}"):
                continue
            seen = survey(f"{place}/{name}")
            last = max([seen.modified, *(file.modified for file in seen.files)])
            held = {file.path.partition(f"/{hold.FOLDER}/")[0] for file in seen.files if hold.is_record(file.path)}
            if held or self._now - last > ORPHANED_SECONDS:
                kept = self._user_of_start(f"{place}/{name}", held, seen)
                yield self._found(place, name, "left-over", seen.files, last=last, kept=kept, unfit=_ENDED)

    def _user_of_start(self, root: str, held: Collection[str], seen: Survey) -> str:
        holder = next(filter(None, (self._held_by(f"{root}/{each}") for each in sorted(held))), "")
        if holder:
            return holder
        pid = with_variable_in(root)
        return self._kept(root, seen.files, seen.barred) if pid is None else f"process {pid} was started for it"

    def _left_overs(self, place: str, seen: Survey, kept: str) -> Iterator[_Found]:
        """Temporaries of writers that died, and what was set aside long ago."""
        for top, files in sorted(_left_overs_of(seen).items()):
            why = self._why_left(top, files)
            if why:
                holder = kept or self._kept(place, files, ())
                yield self._found(place, top, "left-over", files, kept=holder, unfit=why)

    def _why_left(self, top: str, files: Sequence[File]) -> str:
        age = self._now - max(file.modified for file in files)
        name = top.rsplit("/", 1)[-1]
        if name.startswith(_GONE):
            return "" if name in self._prunes else _KILLED
        if name.startswith(STAGE_PREFIX):
            return "set aside more than a week ago" if age > _ASIDE_SECONDS else ""
        if age <= ORPHANED_SECONDS:
            return ""
        pid = _PID.search(name)
        if pid is not None and age <= _OWNED_SECONDS and os.path.exists(f"/proc/{pid[1]}"):
            return ""
        return "was left by a writer that died"

    def _held_by(self, directory: str) -> str:
        holders = hold.living(directory, now=self._now)
        return f"in use by launch {holders[0].launch}" if holders else ""

    def _kept(self, place: str, files: Sequence[File], barred: Sequence[str]) -> str:
        """Why files stay whatever the limits say."""
        foreign = next((file for file in files if file.owner != os.geteuid()), None)
        if foreign is not None:
            return f"{foreign.path} belongs to user {foreign.owner}"
        if barred:
            return f"{barred[0]} is mounted there or belongs to another user"
        real = os.path.realpath(place)
        used = [file for file in files if not hold.is_record(file.path)]
        holders = ((self._opened.holder(f"{real}/{file.path}", file.inode), file.path) for file in used)
        held = next(((pid, path) for pid, path in holders if pid is not None), None)
        return "" if held is None else f"process {held[0]} has {held[1]} open"

    def _found(
        self,
        place: str,
        path: str,
        kind: Kind,
        files: Sequence[File],
        *,
        last: float = 0.0,
        kept: str = "",
        unfit: str = "",
        group: str = "",
    ) -> _Found:
        name = f"{place}/{path}"
        created = max((file.modified for file in files), default=last)
        part = Part(name, sum(file.bytes for file in files), len(files))
        return _Found(Item(name, group or name, created, last, (part,), kept, unfit), place, path, kind)


def _units(target: Target, seen: Survey) -> dict[str, list[File]]:
    """Everything of each unit, what does not travel included, but not what was left there."""
    domain = target.domain
    own = {file.path: domain.unit_of(file.path) for file in seen.files if _travels(target, file.path)}
    names = set(known_units(target, units_of(domain, own)))
    found: dict[str, list[File]] = defaultdict(list)
    for file in seen.files:
        if _left_over(file.path) is not None:
            continue
        above = (own.get(file.path, ""), *_above(file.path))
        unit = next((each for each in above if each in names), None)
        if unit is not None:
            found[unit].append(file)
    return dict(sorted(found.items()))


def _above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition("/")[0]
        yield path


def _left_overs_of(seen: Survey) -> dict[str, list[File]]:
    """Per directory or file that may have been left, its files."""
    found: dict[str, list[File]] = defaultdict(list)
    for file in seen.files:
        top = _left_over(file.path)
        if top is not None:
            found[top].append(file)
    return found


def _travels(target: Target, path: str) -> bool:
    return not any(part.startswith(STAGE_PREFIX) for part in path.split("/")) and target.domain.travels(path)


def _is_surely_left(path: str) -> bool:
    """Also where anybody may write: by a name as only we or an engine give it."""
    return is_surely_temporary(path) or any(part.startswith(STAGE_PREFIX) for part in path.split("/"))


def _left_over(path: str) -> str | None:
    """The directory or file of ours, or of a writer, that a path is, or lies in; None for others."""
    parts = path.split("/")
    for at, part in enumerate(parts):
        if part.startswith(STAGE_PREFIX) and part != hold.FOLDER:
            return "/".join(parts[: at + 1])
        if part == hold.FOLDER:
            return None
    if not is_temporary(path):
        return None
    return next("/".join(parts[: at + 1]) for at in range(len(parts)) if is_temporary("/".join(parts[: at + 1])))


def _is_ours(directory: str) -> bool:
    with suppress(OSError):
        return os.stat(directory, follow_symlinks=False).st_uid == os.geteuid()
    return False  # it went with its start


def _directories_in(place: str) -> list[str]:
    try:
        with os.scandir(place) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _living_prunes(roots: Sequence[str], now: float) -> frozenset[str]:
    """Where prunes that are at work put things aside: they may yet have to put some back."""
    return frozenset(
        name
        for root in roots
        for name in _directories_in(f"{root}/cachemgr")
        if name.startswith(_GONE) and hold.living(f"{root}/cachemgr/{name}", now=now)
    )


def _living_sharers(root: str, now: float) -> list[str]:
    names = _directories_in(f"{root}/cachemgr")
    everybody = [holder for name in names for holder in hold.living(f"{root}/cachemgr/{name}", now=now)]
    return [holder.launch for holder in everybody if holder.sight is not None]
