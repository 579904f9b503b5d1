"""What other machines need, gathered from stores: nothing is started, and nothing of this machine is in a key."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cachemgr.cache import Cache
from cachemgr.errors import CacheError
from cachemgr.factors import describe
from cachemgr.factors.target import Target
from cachemgr.key import Key, derive
from cachemgr.lookup import find
from cachemgr.prewarm.seed import Baking, require_exact
from cachemgr.spec import Entry, Spec


class Gathered(msgspec.Struct, frozen=True):
    """What stores have for one entry on one target."""

    name: str
    target: str
    key: Key | None
    baking: Baking | None
    """None where something is missing."""
    missing: str
    """What, for people; empty where nothing is."""


def gather(
    spec: Spec, targets: Sequence[Target], cache: Cache, *, cwd: Path, ignored_args: Sequence[str]
) -> tuple[Gathered, ...]:
    """Look up each entry as on each target whose GPU it is for. What is missing is in the answer, and so is an entry
    that is for none of them."""
    found: list[Gathered] = []
    for entry in spec.entries:
        fitting = [target for target in targets if suits(entry, target)]
        found += [_gathered(entry, target, cache, cwd, ignored_args) for target in fitting]
        if not fitting:
            wanted = entry.gpu or "a GPU"
            there = ", ".join(target.label for target in targets)
            found.append(Gathered(entry.name, "", None, None, f"it needs {wanted}, and the targets are {there}"))
    return tuple(found)


def suits(entry: Entry, target: Target) -> bool:
    """Whether an entry is for the GPU of a target, as far as it says."""
    if entry.gpu is not None:
        return entry.gpu.lower() in target.label.lower()
    return not entry.gpus or target.platform.device.kind != "cpu"


def _gathered(entry: Entry, target: Target, cache: Cache, cwd: Path, ignored_args: Sequence[str]) -> Gathered:
    key: Key | None = None
    try:
        profile = describe(entry.command, entry.env, cwd=cwd, ignored_args=ignored_args, target=target)
        key = derive(profile.factors)
        found = find(cache.levels, key, profile.factors, profile.host, model=profile.model)
        return Gathered(entry.name, target.label, key, require_exact(entry, key, found), "")
    except CacheError as error:
        return Gathered(entry.name, target.label, key, None, str(error))
