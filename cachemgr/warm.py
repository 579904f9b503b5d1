"""The warm journey: put an artifact's files where the engine will look."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from cachemgr import layer as layers
from cachemgr.capture import File, Layer, Unit
from cachemgr.digest import Digest
from cachemgr.domains import Domain, Target
from cachemgr.errors import CorruptError, DeadlineError, NotFoundError, StoreError
from cachemgr.observe import Seen, Snapshot, scan
from cachemgr.stage import Stage
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture


class Restored(msgspec.Struct, frozen=True):
    """What a restore did. Paths are relative to their domain's directory."""

    files: int
    bytes: int
    present: int
    offered: dict[str, frozenset[str]]
    """Per domain, the artifact's files that now lie in the live directory, whoever put them there."""
    reasons: tuple[str, ...]
    damaged: tuple["Damage", ...] = ()


class Damage(msgspec.Struct, frozen=True):
    """A capture that must not be used again on this host."""

    capture: Digest
    layer: Digest
    reason: str


class _Part(msgspec.Struct, frozen=True):
    """Units of one layer that are to be restored."""

    layer: Layer
    units: frozenset[str]

    def wants(self, unit: Unit) -> bool:
        return unit.name in self.units


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
    artifact: Sequence[Capture],
    targets: Sequence[Target],
    *,
    trees: bool,
    launch: str,
    now_ns: int,
    expired: Callable[[], bool],
) -> Restored:
    """Put the artifact's units into the live directories.

    Whole domains succeed or fail on their own; a domain that fails is left exactly as it was, and said in `reasons`.

    Args:
        artifact: the captures to take units from.
        trees: whether domains count in which the engine picks by a key that is blind to some factors.
        launch: names the staging directories.
        now_ns: modification time of restored files, in domains that keep none.
        expired: asked between files; once true, what is not placed yet stays out.
    """
    outcome = _Outcome()
    for target in targets:
        if target.domain.content_keyed or trees:
            _restore_domain(store, artifact, target, outcome, launch=launch, now_ns=now_ns, expired=expired)
        elif any(capture.manifest.layer(target.domain.name) for capture in artifact):
            outcome.reasons.append(f"{target.domain.name} left out: the engine is blind to what differs")
    return outcome.restored()


class _Outcome:
    """What the domains of one restore add up to."""

    def __init__(self) -> None:
        self.files = self.bytes = self.present = 0
        self.offered: dict[str, frozenset[str]] = {}
        self.reasons: list[str] = []
        self.damaged: list[Damage] = []

    def restored(self) -> Restored:
        return Restored(self.files, self.bytes, self.present, self.offered, tuple(self.reasons), tuple(self.damaged))


def _restore_domain(
    store: Store,
    artifact: Sequence[Capture],
    target: Target,
    outcome: _Outcome,
    *,
    launch: str,
    now_ns: int,
    expired: Callable[[], bool],
) -> None:
    name = target.domain.name
    chosen = _fitting(target.domain, choose(artifact, name), outcome.reasons)
    live = scan(target.directory, target.domain.travels) if chosen else {}
    present, missing = _against_live(target, chosen, live, outcome.reasons)
    offered = {path: live[path] for unit in present for path in _paths(unit)}
    placed: list[Unit] = []
    stage = Stage(target, launch=launch, now_ns=now_ns, expired=expired)
    try:
        _stage_layers(store, _parts(chosen, missing), stage)
        placed = stage.publish(missing)
    except _BadLayerError as bad:
        outcome.reasons.append(f"{name} not restored: {bad}")
        outcome.damaged.extend(
            Damage(capture.digest, bad.layer, str(bad)) for capture in artifact if _has_layer(capture, bad.layer)
        )
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


def _fitting(
    domain: Domain, chosen: Mapping[str, tuple[Layer, Unit]], reasons: list[str]
) -> dict[str, tuple[Layer, Unit]]:
    """Only units whose files the domain would capture, in the unit that it would capture them in: a manifest may not
    place byte-code beside a module, or have another directory renamed."""
    fitting = {
        name: (layer, unit)
        for name, (layer, unit) in chosen.items()
        if all(domain.travels(file.path) and domain.unit_of(file.path) == name for file in unit.files)
    }
    if len(fitting) < len(chosen):
        reasons.append(f"{domain.name}: {len(chosen) - len(fitting)} units left out, {domain.name} has no such files")
    return fitting


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


def _stage_layers(store: Store, parts: Sequence[_Part], stage: Stage) -> None:
    stage.require_space(
        sum(file.size for part in parts for unit in part.layer.units if unit.name in part.units for file in unit.files),
        sum(len(unit.files) for part in parts for unit in part.layer.units if unit.name in part.units),
    )
    for part in parts:
        with store.open(layout.layer_name(part.layer.digest)) as compressed:
            try:
                layers.unpack(part.layer, compressed, part.wants, stage)
            except CorruptError as error:
                raise _BadLayerError(part.layer.digest, str(error)) from None


class _BadLayerError(Exception):
    """A layer is not what its manifest says. `str()` is the reason."""

    def __init__(self, layer: Digest, reason: str) -> None:
        super().__init__(reason)
        self.layer = layer


def _has_layer(capture: Capture, layer: Digest) -> bool:
    return any(held.digest == layer for held in capture.manifest.layers)
