"""The warm journey: find an artifact for a launch, and put its files where the engine will look.

Looking up compares factors and tests relations. Restoring stages beside the target, verified and relocated, and then
gives each unit its name by one rename: never a partial unit, never over a live file, nothing at all if a byte is wrong.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from cachemgr import layer as layers
from cachemgr.capture import File, Layer, Unit, Where
from cachemgr.domains import Domain
from cachemgr.domains.relocation import CannotTravelError
from cachemgr.errors import CorruptError, DeadlineError, NotFoundError, StoreError
from cachemgr.heads import Head, Heads
from cachemgr.key import Broken, Comparison, Difference, Factor, Key, Relations, Result, broken, compare
from cachemgr.observe import STAGE_PREFIX, Seen, Snapshot, scan
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, Damaged, captures, has_layers

_SPACE_MARGIN = 64 << 20
"""Bytes that a restore leaves free: the engine has to write too."""
_RELOCATED_LIMIT = 64 << 20


class Found(msgspec.Struct, frozen=True):
    """What a look-up found. For `none`, `artifact` is the nearest one and `differs` says why it cannot be used."""

    result: Result
    artifact: Key | None
    captures: tuple[Capture, ...]
    differs: tuple[Difference, ...]
    relations: tuple[Broken, ...]
    damaged: tuple[Damaged, ...]
    trees: bool
    """Whether domains may be restored in which the engine picks by a key that is blind to some factors."""
    reasons: tuple[str, ...]
    where: Where | None = None


NOTHING = Found("none", None, (), (), (), (), trees=False, reasons=())


class _Candidate(msgspec.Struct, frozen=True):
    key: Key
    comparison: Comparison
    complete: bool
    fits: bool
    """Whether the relations of some capture hold here."""
    newest: str

    @property
    def near(self) -> bool:
        return self.fits and self.comparison.result != "none"


def _worse(candidate: _Candidate) -> tuple[bool, bool, bool, int]:
    """Sorts the best first: usable at all, then with its torch trees, complete, with the fewest differences."""
    comparison = candidate.comparison
    return not candidate.near, not comparison.blind_equal, not candidate.complete, len(comparison.differs)


def find(store: Store, key: Key, factors: Sequence[Factor], host: Relations, heads: Heads | None = None) -> Found:
    """The artifact for a launch with these factors on this host: exact, else the best near one, else none.

    An exact artifact costs its own manifests only. `heads` remembers what the others are.

    Raises:
        CorruptError: the store as a whole is not one that can be read.
        StoreError: it could not be read.
    """
    if layout.read_layout(store) is None:
        return NOTHING
    damaged: list[Damaged] = []
    own = _usable(store, key, host, damaged)
    complete = tuple(capture for capture in own if capture.manifest.complete)
    if complete and compare(factors, complete[0].manifest.factors).result == "exact":
        return Found("exact", key, complete, (), (), tuple(damaged), trees=True, reasons=(), where="local")
    others = (Heads() if heads is None else heads).of(store, damaged)
    candidates = sorted((_candidate(*item, factors, host) for item in others.items()), key=_newest, reverse=True)
    return _best(store, sorted(candidates, key=_worse), others, host, damaged)


def _newest(candidate: _Candidate) -> str:
    return candidate.newest


def _candidate(key: Key, heads: Sequence[Head], factors: Sequence[Factor], host: Relations) -> _Candidate:
    fitting = [head for head in heads if not broken(head.needs, host)]
    complete = any(head.complete for head in fitting)
    return _Candidate(key, compare(factors, heads[0].factors), complete, bool(fitting), heads[-1].created)


def _best(
    store: Store,
    candidates: Sequence[_Candidate],
    heads: Mapping[Key, Sequence[Head]],
    host: Relations,
    damaged: list[Damaged],
) -> Found:
    """The first candidate that still has what its head promised; for `none`, the one that is nearest."""
    for candidate in candidates:
        usable = _usable(store, candidate.key, host, damaged) if candidate.near else ()
        if usable:
            complete = tuple(capture for capture in usable if capture.manifest.complete)
            return msgspec.structs.replace(
                _nothing_but(candidate, damaged),
                result="near",
                captures=complete or usable,
                reasons=() if complete else ("only incomplete captures: their launch ended before it was done",),
                where="local",
            )
    if not candidates:
        return msgspec.structs.replace(NOTHING, damaged=tuple(damaged))
    nearest = candidates[0]
    faults = () if nearest.fits else broken(heads[nearest.key][0].needs, host)
    reasons = tuple(f"{fault.relation} {fault.recorded}: {fault.host}" for fault in faults)
    return msgspec.structs.replace(_nothing_but(nearest, damaged), relations=faults, reasons=reasons)


def _nothing_but(candidate: _Candidate, damaged: Sequence[Damaged]) -> Found:
    """Nothing to restore, and how far this candidate is away."""
    comparison = candidate.comparison
    return msgspec.structs.replace(
        NOTHING,
        artifact=candidate.key,
        differs=comparison.differs,
        damaged=tuple(dict.fromkeys(damaged)),
        trees=comparison.blind_equal,
    )


def _usable(store: Store, key: Key, host: Relations, damaged: list[Damaged]) -> tuple[Capture, ...]:
    return tuple(
        capture
        for capture in captures(store, key, damaged)
        if not broken(capture.manifest.needs, host) and has_layers(store, capture)
    )


class Target(msgspec.Struct, frozen=True):
    """A domain and its live directory for this launch. `ours` is False where the user chose the directory."""

    domain: Domain
    directory: str
    ours: bool


class Restored(msgspec.Struct, frozen=True):
    """What a restore did. Paths are relative to their domain's directory."""

    files: int
    bytes: int
    present: int
    offered: dict[str, frozenset[str]]
    """Per domain, the artifact's files that now lie in the live directory, whoever put them there."""
    stored: dict[str, dict[str, File]]
    """Per domain, the stored form of each restored file, for the stat cache."""
    reasons: tuple[str, ...]


class _Part(msgspec.Struct, frozen=True):
    """Units of one layer that are to be restored."""

    layer: Layer
    units: frozenset[str]


def choose(found: Sequence[Capture], domain: str) -> dict[str, tuple[Layer, Unit]]:
    """Per unit of a domain, the capture's layer to take it from.

    The oldest capture wins, unless a later one has all of its files and more: a unit grows when later launches add to
    it, and the larger one serves both.
    """
    chosen: dict[str, tuple[Layer, Unit]] = {}
    for capture in found:
        layer = capture.manifest.layer(domain)
        for unit in layer.units if layer else ():
            assert layer is not None, "a unit comes from a layer"
            taken = chosen.get(unit.name)
            if taken is None or _paths(unit) > _paths(taken[1]):
                chosen[unit.name] = (layer, unit)
    return chosen


def _paths(unit: Unit) -> set[str]:
    return {file.path for file in unit.files}


def restore(
    store: Store,
    found: Found,
    targets: Sequence[Target],
    *,
    launch: str,
    now_ns: int,
    expired: Callable[[], bool],
) -> Restored:
    """Put the artifact's units into the live directories.

    Whole domains succeed or fail on their own; a domain that fails is left exactly as it was, and said in `reasons`.

    Args:
        launch: names the staging directories.
        now_ns: modification time of restored files, in domains that keep none.
        expired: asked between files; once true, what is not placed yet stays out.
    """
    outcome = _Outcome()
    for target in targets:
        if target.domain.content_keyed or found.trees:
            _restore_domain(store, found, target, outcome, launch=launch, now_ns=now_ns, expired=expired)
        elif any(capture.manifest.layer(target.domain.name) for capture in found.captures):
            outcome.reasons.append(f"{target.domain.name} left out: the engine is blind to what differs")
    return outcome.restored()


class _Outcome:
    """What the domains of one restore add up to."""

    def __init__(self) -> None:
        self.files = self.bytes = self.present = 0
        self.offered: dict[str, frozenset[str]] = {}
        self.stored: dict[str, dict[str, File]] = {}
        self.reasons: list[str] = []

    def restored(self) -> Restored:
        return Restored(self.files, self.bytes, self.present, self.offered, self.stored, tuple(self.reasons))


def _restore_domain(
    store: Store,
    found: Found,
    target: Target,
    outcome: _Outcome,
    *,
    launch: str,
    now_ns: int,
    expired: Callable[[], bool],
) -> None:
    name = target.domain.name
    chosen = choose(found.captures, name)
    live = scan(target.directory, target.domain.travels) if chosen else {}
    present, missing = _against_live(target, chosen, live, outcome.reasons)
    offered = {path: live[path] for unit in present for path in _paths(unit)}
    placed: list[Unit] = []
    stage = _Stage(target, launch=launch, now_ns=now_ns, expired=expired)
    try:
        _stage_layers(store, _parts(chosen, missing), stage)
        placed = stage.publish(missing)
    except (NotFoundError, CorruptError, StoreError, DeadlineError) as error:
        outcome.reasons.append(f"{name} not restored: {error}")
    except OSError as error:
        outcome.reasons.append(f"{name} not restored: {error.strerror or error} ({target.directory})")
    finally:
        stage.discard()
    files = {file.path: file for unit in placed for file in unit.files}
    outcome.files += len(files)
    outcome.bytes += sum(file.size for file in files.values())
    outcome.present += len(offered)
    outcome.offered[name] = frozenset(offered) | frozenset(files)
    outcome.stored[name] = files


def _against_live(
    target: Target, chosen: Mapping[str, tuple[Layer, Unit]], live: Snapshot, reasons: list[str]
) -> tuple[list[Unit], list[Unit]]:
    """Which of the chosen units lie in the live directory already, and which are missing altogether."""
    live_units = {target.domain.unit_of(path) for path in live}
    present: list[Unit] = []
    missing: list[Unit] = []
    differing = 0
    for name, (_layer, unit) in chosen.items():
        if name not in live_units:
            missing.append(unit)
        elif all(_matches(file, live.get(file.path)) for file in unit.files):
            present.append(unit)
        else:
            differing += 1
    if differing:
        reasons.append(f"{target.domain.name}: {differing} units left as they are, the live directory has other ones")
    return present, missing


def _matches(file: File, seen: Seen | None) -> bool:
    return seen is not None and (file.relocated or seen.size == file.size)


def _parts(chosen: Mapping[str, tuple[Layer, Unit]], missing: Sequence[Unit]) -> list[_Part]:
    wanted = {unit.name for unit in missing}
    by_layer: dict[str, tuple[Layer, set[str]]] = {}
    for name, (layer, _unit) in chosen.items():
        if name in wanted:
            by_layer.setdefault(layer.digest, (layer, set()))[1].add(name)
    return [_Part(layer, frozenset(units)) for layer, units in by_layer.values()]


def _stage_layers(store: Store, parts: Sequence[_Part], stage: "_Stage") -> None:
    stage.require_space(
        sum(file.size for part in parts for unit in part.layer.units if unit.name in part.units for file in unit.files),
        sum(len(unit.files) for part in parts for unit in part.layer.units if unit.name in part.units),
    )
    for part in parts:
        with store.open(layout.layer_name(part.layer.digest)) as compressed:
            layers.unpack(part.layer, compressed, lambda unit, wanted=part.units: unit.name in wanted, stage)  # type: ignore[misc]


class _Stage:
    """A private directory on the target's file system, in which units are made whole before they get their names.

    It is a `cachemgr.layer.Placer`. It lies beside a directory of ours, so that a missing directory is placed by one
    rename, and inside one that the user chose, which may be a mount point. Nothing in it exists when it is made, and
    only this user may enter it, so paths below it cannot be links that somebody planted.
    """

    def __init__(self, target: Target, *, launch: str, now_ns: int, expired: Callable[[], bool]) -> None:
        self._domain = target.domain
        self._final = target.directory
        parent, name = os.path.split(target.directory)
        self._parent = parent if target.ours else target.directory
        self._private = f"{self._parent}/{STAGE_PREFIX}{launch}-{name}"
        self._root = f"{self._private}/tree"
        self._whole_tree = target.ours
        self._times = (0, now_ns)
        self._expired = expired
        self._made: set[str] = set()

    def whole(self, file: File, data: memoryview) -> None:
        self._write(file, iter((self._relocated(file, data),)))

    def parts(self, file: File, parts: Iterator[memoryview]) -> None:
        if not file.relocated:
            self._write(file, parts)
        elif file.size <= _RELOCATED_LIMIT:
            self.whole(file, memoryview(b"".join(parts)))
        else:
            raise CorruptError(f"`{file.path}` is too large to be relocated")

    def _relocated(self, file: File, data: memoryview) -> memoryview:
        relocation = self._domain.relocation_of(file.path) if file.relocated else None
        if relocation is None:
            return data
        own = f"{self._final}/{file.path}".rpartition("/")[0]
        try:
            return memoryview(relocation.attach(bytes(data), own))
        except (CannotTravelError, ValueError, RecursionError) as error:
            raise CorruptError(f"`{file.path}` cannot be relocated: it {error}") from None

    def _write(self, file: File, parts: Iterator[memoryview]) -> None:
        descriptor = self._create(file)
        try:
            for part in parts:
                _write_all(descriptor, part)
            self._settle(descriptor, file)
        finally:
            os.close(descriptor)

    def link(self, file: File, original: str) -> None:
        descriptor = self._create(file)
        try:
            source = layers.open_quietly(f"{self._root}/{original}")  # the original must not look read
            try:
                while os.sendfile(descriptor, source, None, 1 << 30):
                    pass
            finally:
                os.close(source)
            self._settle(descriptor, file)
        finally:
            os.close(descriptor)

    def _create(self, file: File) -> int:
        if self._expired():
            raise DeadlineError("the deadline has passed")
        path = f"{self._root}/{file.path}"
        directory = path.rpartition("/")[0]
        if directory not in self._made:
            self._enter(directory)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, file.mode)

    def _enter(self, directory: str) -> None:
        if not self._made:
            os.makedirs(self._parent, exist_ok=True)
            os.mkdir(self._private, 0o700)
            os.mkdir(self._root)
            self._made.add(self._root)
        if directory not in self._made:
            self._enter(directory.rpartition("/")[0])
            os.mkdir(directory)
            self._made.add(directory)

    def _settle(self, descriptor: int, file: File) -> None:
        os.utime(descriptor, ns=self._times if file.mtime_ns is None else (0, file.mtime_ns))

    def require_space(self, size: int, files: int) -> None:
        """Raises StoreError when the target's file system cannot take this many bytes and files."""
        if not files:
            return
        os.makedirs(self._parent, exist_ok=True)
        space = os.statvfs(self._parent)
        if space.f_bavail * space.f_frsize < size + _SPACE_MARGIN:
            raise StoreError(
                f"no space on the file system of {self._parent}", hint="free space, or move VLLM_CACHE_ROOT"
            )
        if space.f_files and space.f_favail < files + 100:
            raise StoreError(
                f"no inodes on the file system of {self._parent}", hint="free inodes, or move VLLM_CACHE_ROOT"
            )

    def publish(self, units: Sequence[Unit]) -> list[Unit]:
        """Give the staged units their names; those that another launch placed meanwhile stay as they are."""
        if not self._made:
            return []
        if self._whole_tree and _renamed(self._root, self._final):
            return list(units)
        return [unit for unit in units if self._publish_unit(unit)]

    def _publish_unit(self, unit: Unit) -> bool:
        """One rename for a unit with a directory of its own; name by name for one among others."""
        staged, final = f"{self._root}/{unit.name}", f"{self._final}/{unit.name}"
        os.makedirs(final.rpartition("/")[0], exist_ok=True)
        if os.path.isdir(staged):
            return _renamed(staged, final)
        taken = [_claimed(f"{self._root}/{file.path}", f"{self._final}/{file.path}") for file in unit.files]
        return all(taken)

    def discard(self) -> None:
        """Remove what was not published."""
        if self._made:
            shutil.rmtree(self._private, ignore_errors=True)


def _renamed(staged: str, final: str) -> bool:
    """Rename a directory unless something is there; an empty directory of that name is replaced."""
    try:
        os.rename(staged, final)
    except (FileExistsError, NotADirectoryError):
        return False
    except OSError as error:
        if os.path.isdir(final):
            return False
        raise error from None
    return True


def _claimed(staged: str, final: str) -> bool:
    """Give a file its name unless the name is taken: by a link, which cannot replace, where there are links."""
    try:
        os.link(staged, final)
    except FileExistsError:
        return False
    except OSError:
        if os.path.lexists(final):
            return False
        os.rename(staged, final)
        return True
    os.unlink(staged)
    return True


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
