"""Live directories: where an engine looks, the variables that make it look there, and who else is in them.

Caches that mix all models by default get a directory of the launch's own key, `<root>/cachemgr/<key>/<domain>/`. Caches
that vLLM keeps below its root by names of its own stay where they are, shared by all launches.

Two launches that both compile never share a directory: not every engine writes its index atomically. The first takes
`<root>/cachemgr/<key>/`, others `<root>/cachemgr/<key>.<launch>/` with a root of their own in it, and lose it again
when they have published. The same for a launch whose engine could take a shared entry for the right one while others
use it. What one launch uses, no other changes.
"""

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from cachemgr import hold, places
from cachemgr.domains import ROOT_VARIABLE, Domain, Target
from cachemgr.hold import Hold, Holder, Purpose
from cachemgr.key import Key, folder, from_folder

_PRIVATE_ROOT = "vllm"
_TEMPORARY = "/tmp"  # noqa: S108 - only looked at, for directories of ours
BENCH_PREFIX, PROOF_PREFIX = "cachemgr-bench-", "cachemgr-v-"
"""How temporary directories are called that have roots of starts in them."""


class Claim(msgspec.Struct, frozen=True):
    """What a launch says about itself to others on the same root."""

    key: Key
    launch: str
    purpose: Purpose
    sight: str
    """`cachemgr.key.sight`: launches that differ in it must not find each other's entries."""


class Room:
    """The live directories of one launch, from `enter` until `leave`."""

    def __init__(
        self, targets: Sequence[Target], own: str | None, root: str | None, held: Hold | None, *, private: bool
    ) -> None:
        self.targets = tuple(targets)
        self.root = root
        """The root whose shared directories are used; None where no directory can be written."""
        self.private = private
        self._own, self._held = own, held

    def beat(self) -> None:
        """Show other launches that we are still here; to be called every few seconds."""
        if self._held is not None:
            self._held.beat()

    def shared(self, launch: str, *, now: float) -> bool:
        """Whether other launches use these directories, too."""
        return self._own is not None and bool(hold.others(self._own, launch, now=now))

    @property
    def compiles(self) -> bool:
        """Whether others must expect this launch to compile."""
        return self._held is not None and self._held.purpose == "compiling"

    def compiled(self) -> None:
        """What this launch compiled is stored: nobody has to wait for it any more."""
        if self._held is not None:
            self._held.compiled()

    def leave(self, *, in_use: bool) -> None:
        """The launch is over. A private directory goes with it, unless processes are left that may still use it."""
        if self._held is not None:
            self._held.release()
        if self.private and self._own is not None and not in_use:
            shutil.rmtree(self._own, ignore_errors=True)


def enter(
    environ: Mapping[str, str],
    domains: Sequence[Domain],
    claim: Claim,
    *,
    alone: bool = False,
    closed: bool = False,
    now: float,
    notes: list[str],
) -> Room:
    """Take the live directories for a launch. What had to be done differently is appended to `notes`.

    `alone` asks for private ones, whoever else is there; `closed` for a root that no other user can write to.

    Where no directory can be written, domains that the user did not place stay where the engine puts them.
    """
    for root in _roots(environ, notes, closed=closed):
        try:
            return _enter(root, environ, domains, claim, alone=alone, now=now)
        except OSError as error:
            notes.append(f"{root}/cachemgr/{folder(claim.key)} cannot be used: {error.strerror or error}")
    placed = [_placed(domain, environ, "", None) for domain in domains if _is_elsewhere(domain, environ)]
    notes.append("no directory can be written: the caches stay where the engine puts them")
    return Room(placed, None, None, None, private=False)


def _is_elsewhere(domain: Domain, environ: Mapping[str, str]) -> bool:
    """Whether a cache lies where it lies whatever we do."""
    named = (domain.variable, domain.moved_by)
    return bool(domain.usual_base) or any(environ.get(name) for name in named if name)


def _roots(environ: Mapping[str, str], notes: list[str], *, closed: bool) -> list[str]:
    """Where live directories may be, the best first: not on a network when there is something local."""
    roots = _usable_roots(environ, notes)
    open_ones = {root: fault for root in roots if (fault := places.exposure(root)) is not None} if closed else {}
    notes.extend(f"{root} is not used: {fault}" for root, fault in open_ones.items())
    return [root for root in roots if root not in open_ones]


def _usable_roots(environ: Mapping[str, str], notes: list[str]) -> list[str]:
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
    root: str, environ: Mapping[str, str], domains: Sequence[Domain], claim: Claim, *, alone: bool, now: float
) -> Room:
    own = f"{root}/cachemgr/{folder(claim.key)}"
    shares = any(domain.in_place for domain in domains)
    holder = hold.describe_self(claim.launch, claim.purpose, claim.sight if shares else None)
    _require_ours(f"{root}/cachemgr", own)
    held = Hold.take(own, holder)
    private = alone or _rivals(own, claim, now) or (shares and _strangers(root, claim, now))
    if private:
        held.release()
        own = f"{own}.{claim.launch}"
        root = f"{own}/{_PRIVATE_ROOT}"
        held = Hold.take(own, msgspec.structs.replace(holder, sight=None))
    moved = private or root != live_root(environ)
    targets = [_placed(domain, environ, own, root, moved=moved) for domain in domains]
    return Room(targets, own, root, held, private=private)


def _require_ours(*directories: str) -> None:
    """What an engine finds there, it executes, so nobody else may have made it or may write to it.

    Raises:
        OSError: somebody was here before us.
    """
    for directory in directories:
        fault = places.exposure(directory, way=False)
        if fault is not None:
            raise OSError(errno.EPERM, fault)


def _rivals(own: str, claim: Claim, now: float) -> bool:
    """Whether another launch of this key compiles, or this one would beside another."""
    return any("compiling" in (claim.purpose, other.purpose) for other in hold.others(own, claim.launch, now=now))


def _strangers(root: str, claim: Claim, now: float) -> bool:
    """Whether a launch on this root differs in what the engine is blind to, so that each could take the other's
    entries, or compiles like this one, so that nobody could tell who made what."""
    others = sharers(root, claim.launch, now=now)
    if any(claim.purpose == other.purpose == "compiling" for other in others):
        return True
    sights = {other.sight for other in others}
    return bool(sights) and (not claim.sight or sights != {claim.sight})


def sharers(root: str, launch: str, *, now: float) -> list[Holder]:
    """The living launches of any key that use the shared directories of this root, but for `launch`."""
    try:
        names = sorted(os.listdir(f"{root}/cachemgr"))
    except OSError:
        return []
    everybody = (holder for name in names for holder in hold.others(f"{root}/cachemgr/{name}", launch, now=now))
    return [holder for holder in everybody if holder.sight is not None]


def roots(environ: Mapping[str, str]) -> list[str]:
    """Where live directories of this user may be, the one that launches prefer first. Nothing is made."""
    spare = places.spare_of(environ)
    return list(dict.fromkeys([live_root(environ), f"{spare}/live"]))


class Base(NamedTuple):
    """Where commands make a root for each of their starts, and how the names of these begin."""

    directory: str
    prefix: str


def bases(home: Path, environ: Mapping[str, str]) -> list[Base]:
    """Where `prewarm`, `bench` and `verify --seed` of this user make roots, which go with their start unless they are
    killed. `home` is the directory of our state."""
    usual = dict.fromkeys((environ.get("TMPDIR") or _TEMPORARY, _TEMPORARY))
    temporary = [Base(directory, prefix) for directory in usual for prefix in (BENCH_PREFIX, PROOF_PREFIX)]
    return [Base(f"{home}/prewarm", ""), *temporary]


def someone_compiles(environ: Mapping[str, str], key: Key, launch: str, *, now: float) -> bool:
    """Whether another launch on this host is compiling what `key` names."""
    places_of_key = (f"{root}/cachemgr/{folder(key)}" for root in _usable_roots(environ, []))
    return any(other.purpose == "compiling" for own in places_of_key for other in hold.others(own, launch, now=now))


def _placed(domain: Domain, environ: Mapping[str, str], own: str, root: str | None, *, moved: bool = False) -> Target:
    itself = environ.get(domain.moved_by) if domain.moved_by else None
    if itself:
        return Target(domain, _absolute(itself, environ), ours=False)
    if domain.in_place and root is not None:
        return Target(domain, _below(root, domain), ours=False, pin=(ROOT_VARIABLE, root) if moved else None)
    chosen = environ.get(domain.variable) or domain.usual_base
    if chosen:
        return Target(domain, _below(_absolute(chosen, environ), domain), ours=False)
    base = f"{own}/{domain.name}"
    return Target(domain, _below(base, domain), ours=True, pin=(domain.variable, base))


def _below(base: str, domain: Domain) -> str:
    return f"{base}/{domain.subdirectory}" if domain.subdirectory else base


def _absolute(path: str, environ: Mapping[str, str]) -> str:
    """With `~` as the command will see it."""
    if path == "~" or path.startswith("~/"):
        path = (environ.get("HOME") or "~") + path[1:]
    return places.absolute(os.path.expanduser(path))


def live_root(environ: Mapping[str, str]) -> str:
    """`VLLM_CACHE_ROOT` and its default (vLLM 0.26-0.33 `envs.py`), absolute."""
    root = environ.get(ROOT_VARIABLE)
    if not root:
        caches = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or "~", ".cache")
        root = os.path.join(caches, "vllm")
    return _absolute(root, environ)


def planned(environ: Mapping[str, str], domains: Sequence[Domain], key: Key) -> list[Target]:
    """The targets that a launch without rivals would get. Nothing is made."""
    root = live_root(environ)
    own = Path(root) / "cachemgr" / folder(key)
    return [_placed(domain, environ, str(own), root) for domain in domains]


def live_targets(environ: Mapping[str, str], domains: Sequence[Domain]) -> list[Target]:
    """Every live directory that is there now: those that launches share, and those of each key."""
    found = [target for target in planned(environ, domains, Key("none")) if not target.ours]
    for root in roots(environ):
        with suppress(OSError):
            for name in sorted(os.listdir(f"{root}/cachemgr")):
                if from_folder(name.partition(".")[0]) is not None:
                    own = f"{root}/cachemgr/{name}"
                    found += [_placed(domain, {}, own, None) for domain in domains if not domain.usual_base]
    return [target for target in found if os.path.isdir(target.directory)]


def pins(targets: Sequence[Target]) -> dict[str, str]:
    """The variables that make an engine use the targets that are not where it would look by itself."""
    return dict(target.pin for target in targets if target.pin is not None)
