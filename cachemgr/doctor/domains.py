"""Checks of where caches lie: one finding a domain, with what decides whether it can be used there."""

import os
import stat
from collections.abc import Iterator

from cachemgr import places, sizes
from cachemgr.doctor.finding import Finding, Opened, Patient, error, note, ok, warning
from cachemgr.doctor.serving import may_write, missing_way
from cachemgr.domains import Target, of_engine
from cachemgr.key import Key
from cachemgr.live import live_root, planned

_SCARCE_BYTES = 1_000_000_000
_SCARCE_INODES = 10_000
_KEY = Key("k1:KEY")
"""Stands for that of a launch."""


def domains(patient: Patient, opened: Opened) -> Iterator[Finding]:
    """Every cache of an engine: its directory, the variable that decides it, owner, mode, file system and room; whether
    the serving user can write there."""
    for target in planned(patient.environ, of_engine("vllm", opened.settings.also), _KEY):
        yield from _domain(patient, target)


def _domain(patient: Patient, target: Target) -> Iterator[Finding]:
    about, place = f"cache {target.domain.name}", places.nearest(target.directory)
    said = f"{target.directory} ({_origin(patient, target)}; {_described(place, target.directory)})"
    if not may_write(place, patient.serving):
        blocked = missing_way(place, patient.serving)
        hint = f"chown {patient.serving} {blocked}, or set {_variable(target)} to a directory that this user can write"
        yield error(about, f"user {patient.serving} cannot write {said}", hint)
        return
    free, inodes = places.free(place)
    if free < _SCARCE_BYTES:
        yield warning(about, f"{sizes.spell(free)} are free for {said}", "cachemgr prune --live, or a larger volume")
    elif inodes is not None and inodes < _SCARCE_INODES:
        yield warning(about, f"{inodes:,} inodes are free for {said}", "cachemgr prune --live --max-files N")
    else:
        yield ok(about, said)


def _variable(target: Target) -> str:
    return target.domain.moved_by or target.domain.variable


def _origin(patient: Patient, target: Target) -> str:
    """What decides the directory."""
    for name in (target.domain.moved_by, target.domain.variable):
        if name and patient.environ.get(name):
            return f"{name} from the environment"
    if target.ours:
        return f"{target.domain.variable}, pinned for each key"
    return f"default, {target.domain.variable} is not set"


def _described(place: str, directory: str) -> str:
    status = os.stat(place)
    kind = places.file_system(place) or "unknown"
    free, inodes = places.free(place)
    parts = [f"user {status.st_uid}", f"mode {stat.S_IMODE(status.st_mode):04o}", kind, f"{sizes.spell(free)} free"]
    if inodes is not None:
        parts.append(f"{inodes:,} inodes free")
    return ", ".join(parts) if place == directory else f"not made yet; {place}: {', '.join(parts)}"


def memory(patient: Patient, _opened: Opened) -> Iterator[Finding]:
    """A cache on tmpfs is gone with the next boot, and takes memory until then (pytorch#121122)."""
    root = live_root(patient.environ)
    kind = places.file_system(root)
    if kind in {"tmpfs", "ramfs"}:
        said = f"{root} is on {kind}: it counts as memory, and is gone when the host boots"
        yield note("VLLM_CACHE_ROOT", said, "set VLLM_CACHE_ROOT to a directory on a disk")
    elif kind == "overlay":
        said = f"{root} is in the container's own layer, and goes with the container"
        yield note("VLLM_CACHE_ROOT", said, "mount a volume there; the store is what lasts")


def conflicts(patient: Patient, opened: Opened) -> Iterator[Finding]:
    """Variables that name the same directory twice, so that two caches mix, or of which one does nothing."""
    seen: dict[str, str] = {}
    for target in planned(patient.environ, of_engine("vllm", opened.settings.also), _KEY):
        other = seen.setdefault(os.path.realpath(target.directory), target.domain.name)
        if other != target.domain.name:
            said = f"{target.directory} is the directory of {other} as well, so that neither can be captured alone"
            yield warning(f"cache {target.domain.name}", said, f"unset {_variable(target)}, or give it one of its own")
    both = [name for name in ("TRITON_HOME", "TRITON_CACHE_DIR") if patient.environ.get(name)]
    if len(both) > 1:
        said = "are both set: TRITON_CACHE_DIR wins, and TRITON_HOME does nothing for the cache"
        yield note(" and ".join(both), said, "unset TRITON_HOME")
