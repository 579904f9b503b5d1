"""Healing live directories before a start: what would kill an engine is set aside, and said.

Engines do not check what they load, and most of them meet a damaged file again at every start until somebody removes
it. What is set aside keeps its name below `.cachemgr-aside-<launch>/` in the same directory. Only files that nobody
uses are touched: the caller says whether other launches are here.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from cachemgr.domains import Target
from cachemgr.domains.leftovers import ORPHANED_SECONDS, is_temporary
from cachemgr.examine import Fault, Tree, faults, never, seen_in, units_of
from cachemgr.observe import STAGE_PREFIX, Snapshot, scan
from cachemgr.places import make_directory
from cachemgr.statcache import StatCache

_UNFINISHED_SECONDS = 600.0
"""In a directory that the user chose, programs that we do not know may write: what is younger may be their work."""


class Ailing(msgspec.Struct, frozen=True):
    """What must go from one live directory."""

    target: Target
    faults: tuple[Fault, ...]


def look(
    targets: Sequence[Target],
    cache: StatCache,
    *,
    now_ns: int,
    left_overs: bool = True,
    expired: Callable[[], bool] = never,
) -> list[Ailing]:
    """The directories in which something is damaged or left over. Unchanged files are not read again.

    Without `left_overs`, only what is damaged: the rest is nobody's trouble while others use the directories.

    Raises:
        DeadlineError: `expired` was true before everything was read.
    """
    found = []
    for target in targets:
        if target.domain.checks_itself:
            continue
        seen = seen_in(target)
        tree = Tree(target.domain, target.directory, seen, frozenset())
        damaged = faults(tree, cache, now_ns=now_ns, expired=expired) if seen else []
        if not target.ours:
            damaged = [fault for fault in damaged if _is_old(seen, fault.paths, now_ns, _UNFINISHED_SECONDS)]
        orphans = _orphans(target, now_ns) if target.ours and left_overs else []
        if damaged or orphans:
            found.append(Ailing(target, (*damaged, *orphans)))
    return found


def stale_locks(targets: Sequence[Target], *, now_ns: int) -> list[str]:
    """What an engine may wait for in vain, in one sentence each. Nothing is removed: a long build may still run."""
    found = []
    for target in targets:
        seen = {} if target.domain.waits_for is None else scan(target.directory, target.domain.waits_for)
        for path in sorted(seen):
            hours = (now_ns - seen[path].mtime_ns) / 3600e9
            if hours * 3600 > ORPHANED_SECONDS:
                found.append(
                    f"{target.directory}/{path} is {hours:.0f} h old, and its engine waits until it is removed: "
                    "remove it unless something is being built there"
                )
    return found


def all_of(targets: Sequence[Target], offered: Mapping[str, Collection[str]], reason: str) -> list[Ailing]:
    """Everything that was restored, as what must go for `reason`. `offered` has paths by domain."""
    found = []
    for target in targets:
        members = units_of(target.domain, offered.get(target.domain.name, ()))
        if members:
            found.append(Ailing(target, tuple(Fault(unit, reason, tuple(paths)) for unit, paths in members.items())))
    return found


def _orphans(target: Target, now_ns: int) -> list[Fault]:
    seen = scan(target.directory, is_temporary)
    old = [path for path in seen if _is_old(seen, (path,), now_ns, ORPHANED_SECONDS)]
    return [Fault(path, "was left by a writer that died", (path,)) for path in sorted(old)]


def _is_old(seen: Snapshot, paths: Sequence[str], now_ns: int, seconds: float) -> bool:
    return all(now_ns - seen[path].mtime_ns > seconds * 1e9 for path in paths)


def set_aside(ailing: Ailing, launch: str) -> list[str]:
    """Move what is damaged out of the engine's sight, and say so in one sentence each."""
    directory = ailing.target.directory
    aside = f"{directory}/{STAGE_PREFIX}aside-{launch}"
    said = []
    for fault in ailing.faults:
        moved = [path for path in fault.paths if _moved(f"{directory}/{path}", f"{aside}/{path}")]
        if moved:
            said.append(f"set aside {ailing.target.domain.name} {fault.unit}: {fault.reason}")
        else:
            said.append(f"{ailing.target.domain.name} {fault.unit}: {fault.reason}, and it cannot be set aside")
    return said


def _moved(path: str, aside: str) -> bool:
    try:
        make_directory(os.path.dirname(aside))
        os.rename(path, aside)
    except OSError:
        return False
    # Some engines take a directory for a hit, so an empty one must not stay.
    with suppress(OSError):
        os.rmdir(os.path.dirname(path))
    return True
