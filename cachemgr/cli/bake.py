"""Baking seeds: of what was prewarmed here, and of what stores have for other machines."""

import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from cachemgr.cache import Cache
from cachemgr.cli import output, share
from cachemgr.cli.trust import sign_seed, signing_key
from cachemgr.errors import CacheError, UsageError
from cachemgr.factors.target import load as load_target
from cachemgr.order import Order
from cachemgr.places import working_directory
from cachemgr.prewarm import seed as journey
from cachemgr.prewarm.entries import looked_up, order_of_entry
from cachemgr.prewarm.gathering import Gathered, gather
from cachemgr.prewarm.seed import Baked, Baking, LeftOut, make_seed, require_exact, seal
from cachemgr.settings import Settings
from cachemgr.signature import Signer
from cachemgr.spec import Spec
from cachemgr.store.local import LocalStore


def ready(seed: Path, settings: Settings) -> Signer | None:
    """Make the directory of a seed and read the key that signs it, so that neither fails after hours of starts.

    Raises:
        StoreError: the directory cannot be made.
        UsageError: the key cannot be read.
    """
    make_seed(seed)
    return None if settings.sign_key is None else signing_key(settings.sign_key, os.environ)


def bake(warm: Spec, template: Order, cache: Cache, directory: Path) -> Baked:
    """A seed of what is warm. An entry whose artifact went away or was damaged meanwhile is left out, and named.

    Raises:
        CorruptError, StoreError: as `cachemgr.prewarm.seed.bake`.
    """
    baking: list[Baking] = []
    gone: list[LeftOut] = []
    for entry in warm.entries:
        try:
            key, found = looked_up(order_of_entry(entry, template), cache)
            baking.append(require_exact(entry, key, found))
        except CacheError as error:
            gone.append(LeftOut(entry.name, None, str(error)))
    baked = journey.bake(baking, directory, now=time.time())
    return msgspec.structs.replace(baked, left_out=(*gone, *baked.left_out))


def finish(baked: Baked, signer: Signer | None, cache: Cache) -> None:
    """Sign a seed, if there is a key, and give it the modes of an image.

    Raises:
        CorruptError, StoreError: as `cachemgr.cli.trust.sign_seed`.
    """
    sign_seed(LocalStore(Path(baked.seed)), baked.artifacts, cache.trust, signer)
    seal(Path(baked.seed))


def say(baked: Baked) -> None:
    """Tell a person what a seed got, and what it did not."""
    output.note(_told(baked))
    for each in baked.left_out:
        output.note(output.brief(f"{each.name}: not baked: {each.reason}"))


def _told(baked: Baked) -> str:
    return (
        f"baked into {baked.seed}: {output.counted(len(baked.artifacts), 'artifact')}, {output.size(baked.bytes)} new"
    )


def left_out(baked: Baked | None) -> Collection[str]:
    """The names of the entries that were to be in a seed and are not."""
    return () if baked is None else {each.name for each in baked.left_out}


def for_targets(
    spec: Spec,
    targets: Sequence[str],
    settings: Settings,
    cache: Cache,
    directory: str | None,
    *,
    verify: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """A seed of what stores have for other machines; the exit code, which is 0 only where nothing is missing.

    Raises:
        UsageError: a target cannot be read; or there is no place for a seed, or it was to be verified here.
        CorruptError, StoreError: as `cachemgr.prewarm.seed.bake`.
    """
    if directory is None or verify:
        raise UsageError(
            "--target goes with --bake, and what it bakes is verified where it can run",
            hint="--target FILE --bake DIR here, and cachemgr verify --seed DIR there",
        )
    machines = [load_target(Path(each)) for each in targets]
    place = working_directory() / directory
    signer = None if dry_run else ready(place, settings)
    gathered = gather(spec, machines, cache, cwd=working_directory(), ignored_args=settings.ignore_arg)
    baking = [each.baking for each in gathered if each.baking is not None]
    baked = journey.bake(baking, place, now=time.time()) if baking and not dry_run else None
    if baked is not None:
        gathered = _without(gathered, baked.left_out)
        finish(baked, signer, cache)
    _print(gathered, baked, dry_run=dry_run, as_json=as_json)
    good = sum(not each.missing for each in gathered)
    return share(good, len(gathered))


def _without(gathered: Sequence[Gathered], left_out: Sequence[LeftOut]) -> tuple[Gathered, ...]:
    """What was gathered, with what could not be copied as missing."""
    reasons = {(each.name, each.key): each.reason for each in left_out}
    return tuple(
        msgspec.structs.replace(each, missing=each.missing or reasons.get((each.name, each.key), ""))
        for each in gathered
    )


def _print(gathered: Sequence[Gathered], baked: Baked | None, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        rows = [
            {"name": each.name, "target": each.target, "key": each.key, "missing": each.missing} for each in gathered
        ]
        output.document(gathered=rows, baked=baked, dry_run=dry_run)
        return
    table = [
        (each.name, each.target, "" if each.key is None else output.short(each.key), each.missing) for each in gathered
    ]
    output.table(("ENTRY", "TARGET", "KEY", "MISSING"), table, flexible="MISSING")
    if not dry_run:
        output.note("nothing was baked" if baked is None else _told(baked))
