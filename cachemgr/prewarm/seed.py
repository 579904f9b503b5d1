"""Seeds: artifacts in a directory that an image carries, laid out as a store.

A seed is read only, names no place, and belongs to whoever owns the image: directories 0755, files 0644, whatever the
umask was. Several bakes into one directory add up. It keeps the commands that it is for, so that it can be verified
again where it is used.
"""

import math
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from cachemgr.capture import Manifest
from cachemgr.digest import Digest
from cachemgr.errors import (
    CacheError,
    CorruptError,
    DeniedError,
    MirrorError,
    NotFoundError,
    StoreError,
    UsageError,
)
from cachemgr.factors.program import shown
from cachemgr.key import Key
from cachemgr.lookup import Found
from cachemgr.sensitive import HIDDEN, is_secret
from cachemgr.spec import Entry, Spec, dump, free_name, load, of_captures
from cachemgr.store import Store, layout
from cachemgr.store.captures import all_captures
from cachemgr.store.local import LocalStore
from cachemgr.store.names import SCRATCH
from cachemgr.store.removal import plan_removal, remove
from cachemgr.store.transfer import Moved, Transfer

COMMANDS = "commands.yaml"
"""The commands that a seed is for, as a spec."""
_DIRECTORY, _FILE = 0o755, 0o644


class Baking(msgspec.Struct, frozen=True):
    """One artifact that goes into a seed."""

    entry: Entry
    key: Key
    found: Found


class LeftOut(msgspec.Struct, frozen=True):
    """An entry that a seed did not get."""

    name: str
    key: Key | None
    """None for a command whose key cannot be told any more."""
    reason: str


class Baked(msgspec.Struct, frozen=True):
    """What a seed got."""

    seed: str
    artifacts: tuple[Key, ...]
    captures: tuple[Digest, ...]
    """Those that were new to it."""
    bytes: int
    """Of all that was new."""
    left_out: tuple[LeftOut, ...] = ()
    """What it did not get. Nothing of these is in it but what was there before."""


_MOST = 5
"""Differences that are named."""
_OF_ONE = (CorruptError, NotFoundError, DeniedError, MirrorError)
"""What can be wrong with one artifact or where it lies, while the seed can be written and another one may be sound."""


def bake(baking: Sequence[Baking], directory: Path, *, now: float) -> Baked:
    """Copy artifacts into a seed, each whole or not at all, and the commands that they are for. One that is damaged or
    gone is left out and loses no other. `now` is in seconds since the epoch.

    Raises:
        UsageError: something is in the directory that is no seed.
        CorruptError: the seed has a damaged capture already, so that nobody knows which layers can go.
        StoreError: the seed cannot be written; it has those before.
    """
    seed = LocalStore(directory)
    make_seed(directory)
    layout.ensure_layout(seed)
    seal(directory)  # at once: one that is made in part is known as a seed when it is made again
    done: list[Baking] = []
    left_out: list[LeftOut] = []
    arrived: list[Moved] = []
    parts: list[tuple[Key, str]] = []
    unwritten: CacheError | None = None
    for each in baking:
        moved, new = _carried(each, seed, now)
        errors = [failure.error for failure in moved.failures]
        if not errors:
            done.append(each)
            arrived.append(moved)
            continue
        left_out.append(LeftOut(each.entry.name, each.key, str(errors[0])))
        parts += [(each.key, name) for name in new]
        unwritten = next((error for error in errors if not isinstance(error, _OF_ONE)), None)
        if unwritten is not None:
            break
    keys = tuple(dict.fromkeys(each.key for each in done))
    if left_out:
        _drop(seed, [name for key, name in parts if key not in keys], now)
    _keep_commands(directory, [each.entry for each in done])
    seal(directory)
    if unwritten is not None:
        raise unwritten
    captures = tuple(capture for moved in arrived for capture in moved.captures)
    return Baked(str(directory), keys, captures, sum(moved.bytes for moved in arrived), tuple(left_out))


def _carried(baking: Baking, seed: Store, now: float) -> tuple[Moved, list[str]]:
    """What arrived of an artifact, and the manifests among that which were not there before."""
    assert baking.found.store is not None, "it was found"
    transfer = Transfer(baking.found.store, seed)
    plan = transfer.plan_found(baking.found.captures, now=now)
    moved = transfer.carry(plan)
    new = [load.manifest.name for load in plan.loads if load.manifest is not None and load.capture in moved.captures]
    return moved, new


def _drop(seed: Store, manifests: Sequence[str], now: float) -> None:
    """Take out of a seed what arrived of artifacts that did not arrive whole, and layers that nothing refers to."""
    remove(seed, plan_removal(seed, (), manifests=manifests, now=now, grace=-math.inf))


def require_seed_or_nothing(directory: Path) -> None:
    """That a seed can be made here: in an image everybody reads it, so nothing else may be in it.

    Raises:
        UsageError: there are other files, or a store that is in use.
        CorruptError: as `cachemgr.store.layout.read_layout`.
        StoreError: it cannot be read.
    """
    try:
        empty = not directory.exists() or not any(directory.iterdir())
    except OSError as error:
        raise StoreError(f"seed {directory} cannot be made: {error.strerror}", hint="--bake DIR, a new one") from None
    if empty or (layout.read_layout(LocalStore(directory)) is not None and is_sealed(directory)):
        return
    raise UsageError(f"{directory} has something in it that is no seed", hint="--bake DIR, a new one")


def is_sealed(directory: Path) -> bool:
    """Whether a store is a seed: `seal` took the tag that says that it is a cache."""
    return not (directory / layout.TAG_NAME).exists()


def make_seed(directory: Path) -> None:
    """Make the directory of a seed, or find that it is one.

    Raises:
        UsageError, CorruptError, StoreError: as `require_seed_or_nothing`, or it cannot be made.
    """
    require_seed_or_nothing(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"seed {directory} cannot be made: {error.strerror}", hint="--bake DIR") from None


def wanted_of(directory: Path, spec: Spec | None) -> Spec:
    """The commands to start from a seed: those of a spec, or else `commands`.

    Raises:
        NotFoundError: there is no seed, or it has no command that can be started.
        UsageError: what it keeps is no spec.
        CorruptError, StoreError: as `cachemgr.store.layout.read_layout`.
    """
    if layout.read_layout(LocalStore(directory)) is None:
        raise NotFoundError(f"there is no seed in {directory}", hint="cachemgr prewarm --bake DIR makes one")
    return commands(directory) if spec is None else spec


def commands(directory: Path) -> Spec:
    """The commands that a seed is for: those that it keeps, or else those that its captures were made of.

    Raises:
        NotFoundError: it has no command that can be started.
        UsageError: what it keeps is no spec.
    """
    if (directory / COMMANDS).is_file():
        return load(directory / COMMANDS)
    entries, without = of_captures(_manifests(LocalStore(directory)))
    if not entries:
        reason = f": {without[0]}" if without else ""
        raise NotFoundError(f"seed {directory} has no command that can be started{reason}", hint="give --spec FILE")
    return Spec(entries)


def _manifests(seed: LocalStore) -> list[Manifest]:
    return [capture.manifest for held in all_captures(seed, []).values() for capture in held]


def _keep_commands(directory: Path, entries: Iterable[Entry]) -> None:
    path = directory / COMMANDS
    held = load(path).entries if path.is_file() else ()
    joined = _joined([*held, *(public for entry in entries if (public := _public(entry)) is not None)])
    if not joined:
        return
    aside = directory / f".{COMMANDS}"
    try:
        aside.write_text(dump(joined))
        aside.rename(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}") from None


def _joined(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Each command once. Others of the same name, as two command lines have, get another one."""
    joined: dict[bytes, Entry] = {}
    names: set[str] = set()
    for entry in entries:
        what = msgspec.json.encode((entry.command, entry.env, entry.gpu, entry.gpus), order="sorted")
        if what not in joined:
            joined[what] = msgspec.structs.replace(entry, name=free_name(entry.name, names))
            names.add(joined[what].name)
    return tuple(joined.values())


def _public(entry: Entry) -> Entry | None:
    """Without its secrets, since everybody can read an image; None for a command that has one among its words."""
    words = shown(entry.command)
    if any(HIDDEN in word for word in words):
        return None
    env = {name: value for name, value in entry.env.items() if not is_secret(name)}
    return msgspec.structs.replace(entry, env=env)


def seal(directory: Path) -> None:
    """Give a seed the modes of an image, and take what only a store that is written needs.

    Raises:
        StoreError: it is not ours.
    """
    try:
        shutil.rmtree(directory / SCRATCH, ignore_errors=True)
        with suppress(FileNotFoundError):
            (directory / layout.TAG_NAME).unlink()  # tools that leave caches out would leave the seed out of the image
        for path, _folders, files in os.walk(directory):
            os.chmod(path, _DIRECTORY)
            for name in files:
                if stat.S_ISREG(os.lstat(Path(path, name)).st_mode):
                    os.chmod(Path(path, name), _FILE)
    except OSError as error:
        raise StoreError(f"the modes of seed {directory} cannot be set: {error.strerror}") from None


def require_exact(entry: Entry, key: Key, found: Found) -> Baking:
    """An artifact to bake, which must be exact.

    Raises:
        NotFoundError: it is not; what is missing, or what differs.
    """
    if found.result == "exact":
        return Baking(entry, key, found)
    differs = ", ".join(map(str, found.differs[:_MOST]))
    why = f", differs in {differs}" if differs else f": {'; '.join(found.reasons)}"
    nearest = f"; the nearest, {found.artifact[:12]}{why}" if found.artifact else ""
    raise NotFoundError(f"no artifact {key[:12]} for entry `{entry.name}`{nearest}")
