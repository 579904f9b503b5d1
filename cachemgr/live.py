"""Live directories: where an engine looks, the variables that make it look there, and who else is in them.

Two launches that both compile never share a directory: not every engine writes its index atomically. The first takes
`<root>/cachemgr/<key>/`, others `<root>/cachemgr/<key>.<launch>/`, and lose it again when they have published. What one
launch uses, no other changes.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from cachemgr import hold, places
from cachemgr.domains import Domain, Target
from cachemgr.hold import Hold, Purpose
from cachemgr.key import Key, folder


class Room:
    """The live directories of one launch, from `enter` until `leave`."""

    def __init__(self, targets: Sequence[Target], own: str | None, held: Hold | None, *, private: bool) -> None:
        self.targets = tuple(targets)
        self._own, self._held, self._private = own, held, private

    def beat(self) -> None:
        """Show other launches that we are still here; to be called every few seconds."""
        if self._held is not None:
            self._held.beat()

    def shared(self, launch: str, *, now: float) -> bool:
        """Whether other launches use these directories, too."""
        return self._own is not None and bool(hold.others(self._own, launch, now=now))

    def leave(self, *, in_use: bool) -> None:
        """The launch is over. A private directory goes with it, unless processes are left that may still use it."""
        if self._held is not None:
            self._held.release()
        if self._private and self._own is not None and not in_use:
            shutil.rmtree(self._own, ignore_errors=True)


def enter(
    environ: Mapping[str, str],
    domains: Sequence[Domain],
    key: Key,
    launch: str,
    *,
    purpose: Purpose,
    alone: bool = False,
    now: float,
    notes: list[str],
) -> Room:
    """Take the live directories for a launch. What had to be done differently is appended to `notes`.

    `alone` asks for private ones, whoever else is there.

    Where no directory can be written, domains that the user did not place stay where the engine puts them.
    """
    for root in _roots(environ, notes):
        own = f"{root}/cachemgr/{folder(key)}"
        try:
            return _enter(own, environ, domains, launch, purpose=purpose, alone=alone, now=now)
        except OSError as error:
            notes.append(f"{own} cannot be used: {error.strerror or error}")
    placed = [_placed(domain, environ, "") for domain in domains if environ.get(domain.variable)]
    notes.append("no directory can be written: the caches stay where the engine puts them")
    return Room(placed, None, None, private=False)


def _roots(environ: Mapping[str, str], notes: list[str]) -> list[str]:
    """Where live directories may be, the best first: not on a network when there is something local."""
    root, spare = live_root(environ), places.spare(environ)
    roots = [root] if places.usable(root) else []
    if not roots:
        notes.append(f"{root} cannot be written" + (f", so {spare} is used" if spare else ""))
    network = places.network_file_system(root)
    if spare is None:
        return roots
    local = str(spare / "live")
    if network is None or places.network_file_system(spare) is not None:
        return [*roots, local]
    notes.append(f"{root} is on {network}, so {spare} is used")
    return [local, *roots]


def _enter(
    own: str,
    environ: Mapping[str, str],
    domains: Sequence[Domain],
    launch: str,
    *,
    purpose: Purpose,
    alone: bool,
    now: float,
) -> Room:
    holder = hold.describe_self(launch, purpose)
    held = Hold.take(own, holder)
    rivals = [other for other in hold.others(own, launch, now=now) if "compiling" in (purpose, other.purpose)]
    private = alone or bool(rivals)
    if private:
        held.release()
        own = f"{own}.{launch}"
        held = Hold.take(own, holder)
    return Room([_placed(domain, environ, own) for domain in domains], own, held, private=private)


def someone_compiles(environ: Mapping[str, str], key: Key, launch: str, *, now: float) -> bool:
    """Whether another launch on this host is compiling what `key` names."""
    places_of_key = (f"{root}/cachemgr/{folder(key)}" for root in _roots(environ, []))
    return any(other.purpose == "compiling" for own in places_of_key for other in hold.others(own, launch, now=now))


def _placed(domain: Domain, environ: Mapping[str, str], own: str) -> Target:
    chosen = environ.get(domain.variable)
    if chosen:
        return Target(domain, os.path.join(os.path.abspath(chosen), domain.subdirectory).rstrip("/"), ours=False)
    return Target(domain, f"{own}/{domain.name}", ours=True)


def live_root(environ: Mapping[str, str]) -> str:
    """`VLLM_CACHE_ROOT` and its default (vLLM 0.26-0.32 `envs.py`), absolute."""
    root = environ.get("VLLM_CACHE_ROOT")
    if not root:
        caches = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or "~", ".cache")
        root = os.path.join(caches, "vllm")
    return os.path.abspath(os.path.expanduser(root))


def planned(environ: Mapping[str, str], domains: Sequence[Domain], key: Key) -> list[Target]:
    """The targets that a launch without rivals would get. Nothing is made."""
    own = Path(live_root(environ)) / "cachemgr" / folder(key)
    return [_placed(domain, environ, str(own)) for domain in domains]


def pins(targets: Sequence[Target]) -> dict[str, str]:
    """The variables that make an engine use the targets that are ours."""
    return {target.domain.variable: target.directory for target in targets if target.ours}
