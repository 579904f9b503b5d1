"""The warm journey: put an artifact's files where the engine will look."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from cachemgr import layer as layers
from cachemgr.budget import Budget, needed
from cachemgr.capture import File, Layer, Unit
from cachemgr.digest import Digest
from cachemgr.domains import Domain, Target
from cachemgr.errors import CorruptError, DeadlineError, NotFoundError, StoreError, UntrustedError
from cachemgr.observe import STAGE_PREFIX, Seen, Snapshot, scan
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
    digests: dict[str, dict[str, Digest]] = {}
    """Per domain, of the offered files as they are stored."""
    read_bytes: int = 0
    """Of the layers that were opened for it, as they are stored."""
    pulled_bytes: int | None = 0
    """What came from a mirror for it; None where that is not known."""


class Damage(msgspec.Struct, frozen=True):
    """A capture that must not be used again on this host."""

    capture: Digest
    layer: Digest
    reason: str


Chosen = Mapping[str, tuple[Layer, Unit]]
"""Units by name, each with the layer to take it from."""


def choose(
    found: Sequence[Capture], domain: str, suits: Callable[[Capture, Unit], bool] = lambda _capture, _unit: True
) -> dict[str, tuple[Layer, Unit]]:
    """Per unit of a domain, the capture's layer to take it from, among units that `suits` takes.

    The oldest capture wins, unless that of a later one `outdoes` it.
    """
    chosen: dict[str, tuple[Layer, Unit]] = {}
    for capture in found:
        held = capture.manifest.section(domain)
        if held is None:
            continue
        layer, section = held
        for unit in section.units:
            _layer, taken = chosen.get(unit.name, (None, None))
            if suits(capture, unit) and unit.outdoes(taken):
                chosen[unit.name] = (layer, unit)
    return chosen


def sources(artifact: Sequence[Capture], domains: Iterable[Domain], ranks: Collection[str]) -> tuple[Capture, ...]:
    """The captures that a restore of these domains takes units from, if none of them is there yet."""
    taken: set[int] = set()
    for domain in domains:
        serves = partial(_serves, domain, ranks=ranks)
        taken.update(id(layer) for layer, _unit in choose(artifact, domain.name, serves).values())
    return tuple(capture for capture in artifact if any(id(layer) in taken for layer in capture.manifest.layers))


def restore(
    store: Store,
    artifact: Sequence[Capture],
    targets: Sequence[Target],
    *,
    trees: bool,
    ranks: Collection[str] = (),
    budget: Budget | None = None,
    launch: str,
    now_ns: int,
    expired: Callable[[], bool],
    only: Callable[[Unit], bool] = lambda _unit: True,
) -> Restored:
    """Put the artifact's units into the live directories.

    Whole domains succeed or fail: by what is wrong with their directory on their own, by what is wrong with a layer
    with all that need it. A domain that fails is left exactly as it was, and said in `reasons`.

    Args:
        artifact: the captures to take units from.
        trees: whether domains count in which the engine picks by a key that is blind to some factors.
        ranks: names of the ranks that will run here. A unit that has ranks must have been made by these: an engine
            that finds only some compiles on one rank while the others wait.
        budget: what live directories may still take; None for as much as there is. Domains are taken in the order of
            `targets` while they fit.
        launch: names the staging directories.
        now_ns: modification time of restored files, in domains that keep none.
        expired: asked between files; once true, what is not placed yet stays out.
        only: the units that are wanted.

    Raises:
        UntrustedError: a capture was read without asking whether it may be used.
    """
    if any(capture.standing is None for capture in artifact):
        raise UntrustedError("nobody was asked whether these captures may be used")
    reasons: list[str] = []
    plans: list[_Plan] = []

    def suits(domain: Domain, capture: Capture, unit: Unit) -> bool:
        return only(unit) and _serves(domain, capture, unit, ranks)

    for target in targets:
        if target.domain.content_keyed or trees:
            stage = Stage(target, launch=launch, now_ns=now_ns, expired=expired)
            plans.append(_Plan(target, artifact, stage, suits, reasons))
        elif any(capture.manifest.section(target.domain.name) for capture in artifact):
            reasons.append(f"{target.domain.name} left out: the engine is blind to what differs")
    reasons.extend(
        f"{plan.target.domain.name}: nothing is stored yet of {', '.join(sorted(ranks))}"
        for plan in plans
        if ranks and not plan.chosen and any(capture.manifest.section(plan.target.domain.name) for capture in artifact)
    )
    try:
        _keep_within(budget, plans)
        damaged, read_bytes = _stage_layers(store, artifact, plans)
        for plan in plans:
            plan.publish(expired)
    finally:
        for plan in plans:
            plan.stage.discard()
    return msgspec.structs.replace(_restored(plans, reasons, damaged), read_bytes=read_bytes)


def _serves(domain: Domain, capture: Capture, unit: Unit, ranks: Collection[str]) -> bool:
    """A launch that was ready had all ranks that a unit will ever have: with pipeline parallelism a draft head or an
    encoder lives on some of them. A launch that was killed may have had one of two."""
    found = domain.ranks_of(unit.name, unit.paths)
    if not found or not ranks:
        return True
    return bool(found & set(ranks)) if capture.manifest.complete else found >= set(ranks)


_OWN_FAILURES = (StoreError, OSError)
"""What can go wrong with one live directory."""
_LAYER_FAILURES = (CorruptError, NotFoundError, StoreError, DeadlineError)
"""What stops all that is taken from one layer."""


class _Plan:
    """What is restored of one domain. A failure stops this domain and no other."""

    def __init__(
        self,
        target: Target,
        artifact: Sequence[Capture],
        stage: Stage,
        suits: Callable[[Domain, Capture, Unit], bool],
        reasons: list[str],
    ) -> None:
        domain = target.domain
        self.target, self.stage = target, stage
        chosen = choose(artifact, domain.name, lambda capture, unit: suits(domain, capture, unit))
        self.chosen = _fitting(domain, chosen, reasons)
        live = scan(target.directory, domain.travels) if self.chosen else {}
        self.present, self.missing = _against_live(target, self.chosen, live, reasons)
        self.placed: list[Unit] = []
        self.failure: str | None = None

    def layers(self) -> list[tuple[Layer, set[str]]]:
        """The layers that missing units come from, with the names of those units.

        By identity: two manifests may describe the same object, and not alike.
        """
        wanted: dict[int, tuple[Layer, set[str]]] = {}
        for unit in self.missing if self.failure is None else ():
            layer = self.chosen[unit.name][0]
            wanted.setdefault(id(layer), (layer, set()))[1].add(unit.name)
        return list(wanted.values())

    def sizes(self) -> list[int]:
        """The sizes of the files that are missing."""
        return [file.size for unit in self.missing for file in unit.files]

    def require_space(self) -> None:
        missing = self.sizes()
        try:
            self.stage.require_space(sum(missing), len(missing))
        except _OWN_FAILURES as error:
            self._fail(error)

    def publish(self, expired: Callable[[], bool]) -> None:
        if self.failure is not None or not self.missing:
            return
        if expired():  # nobody waits any more: the engine writes to this directory by now
            self.failure = "the deadline has passed"
            return
        try:
            self.placed = self.stage.publish(self.missing)
        except _OWN_FAILURES as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        own = f"{error.strerror or error} ({self.target.directory})" if isinstance(error, OSError) else str(error)
        self.failure = own

    # A plan is a `cachemgr.layer.Placer`: its stage, with failures kept to itself. It stands on the hottest path.

    def whole(self, file: File, data: memoryview) -> None:
        if self.failure is None:
            try:
                self.stage.whole(file, data)
            except _OWN_FAILURES as error:
                self._fail(error)

    def parts(self, file: File, parts: Iterator[memoryview]) -> None:
        if self.failure is None:
            try:
                self.stage.parts(file, parts)
            except _OWN_FAILURES as error:
                self._fail(error)

    def link(self, file: File, original: str) -> None:
        if self.failure is None:
            try:
                self.stage.link(file, original)
            except _OWN_FAILURES as error:
                self._fail(error)


def _keep_within(budget: Budget | None, plans: Sequence[_Plan]) -> None:
    """Leave out the domains that the budget has no room for."""
    wanting = [plan for plan in plans if plan.missing]
    left = budget.left() if budget is not None and wanting else None
    if budget is None or left is None:
        return
    for plan in wanting:
        size = needed(plan.sizes())
        if size > left:
            plan.failure = budget.refusal(left)
        else:
            left -= size


def _stage_layers(store: Store, artifact: Sequence[Capture], plans: Sequence[_Plan]) -> tuple[list[Damage], int]:
    """Unpack each layer once, for all domains that need it; what is damaged, and the bytes that were read."""
    wanted: dict[int, tuple[Layer, dict[str, tuple[_Plan, set[str]]]]] = {}
    for plan in plans:
        plan.require_space()
        for layer, units in plan.layers():
            wanted.setdefault(id(layer), (layer, {}))[1][plan.target.domain.name] = (plan, units)
    damaged: list[Damage] = []
    for layer, by_domain in wanted.values():
        failure = _stage_layer(store, layer, by_domain)
        if isinstance(failure, CorruptError):
            holders = [capture.digest for capture in artifact if layer in capture.manifest.layers]
            damaged.extend(Damage(holder, layer.digest, str(failure)) for holder in holders)
        for plan, _units in by_domain.values():
            plan.failure = plan.failure or (None if failure is None else str(failure))
    return damaged, sum(layer.size for layer, _by_domain in wanted.values())


def _stage_layer(
    store: Store, layer: Layer, by_domain: Mapping[str, tuple[_Plan, set[str]]]
) -> CorruptError | NotFoundError | StoreError | DeadlineError | None:
    def placer_of(domain: str, unit: Unit) -> _Plan | None:
        plan, units = by_domain.get(domain, (None, frozenset[str]()))
        return plan if plan is not None and plan.failure is None and unit.name in units else None

    try:
        with store.open(layout.layer_name(layer.digest)) as compressed:
            layers.unpack(layer, compressed, placer_of)
    except _LAYER_FAILURES as error:
        return error
    except OSError as error:  # of the store: those of a live directory stay with their plan
        return StoreError(f"cannot read layer {layer.digest}: {error.strerror or error}")
    return None


def _restored(plans: Sequence[_Plan], reasons: list[str], damaged: Sequence[Damage]) -> Restored:
    files = [file for plan in plans for unit in plan.placed for file in unit.files]
    failures = [f"{plan.target.domain.name} not restored: {plan.failure}" for plan in plans if plan.failure]
    offered = {
        plan.target.domain.name: [file for unit in (*plan.present, *plan.placed) for file in unit.files]
        for plan in plans
    }
    return Restored(
        len(files),
        sum(file.size for file in files),
        sum(len(unit.files) for plan in plans for unit in plan.present),
        {domain: frozenset(file.path for file in there) for domain, there in offered.items()},
        (*reasons, *failures),
        tuple(damaged),
        {domain: {file.path: file.digest for file in there} for domain, there in offered.items()},
    )


def _fitting(domain: Domain, chosen: Chosen, reasons: list[str]) -> Chosen:
    """Only units whose files the domain would capture, in the unit that it would capture them in: a manifest may not
    place byte-code beside a module, or have another directory renamed."""
    fitting = {
        name: (layer, unit)
        for name, (layer, unit) in chosen.items()
        if all(_fits(domain, name, file.path) for file in unit.files)
    }
    if len(fitting) < len(chosen):
        reasons.append(f"{domain.name}: {len(chosen) - len(fitting)} units left out, {domain.name} has no such files")
    return fitting


def _fits(domain: Domain, unit: str, path: str) -> bool:
    """No name of ours either: no scan would see what is there."""
    hidden = path.startswith(STAGE_PREFIX) or f"/{STAGE_PREFIX}" in path
    return not hidden and domain.travels(path) and domain.unit_of(path) == unit


def _against_live(target: Target, chosen: Chosen, live: Snapshot, reasons: list[str]) -> tuple[list[Unit], list[Unit]]:
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
