"""Transfer of captures from one store to another: what has to move is a plan, and carrying it out moves it.

Layers first, then what lies beside the manifest, then the manifest, then hints, as everywhere: a transfer that is cut
off at any point leaves whole captures and bytes that nothing refers to, and the next one goes on from there. Every
layer is hashed on its way, and one with other bytes than its name says becomes no object.

Requests count: a capture costs a handful, however many files it has, and a layer that is there already costs a share of
one listing.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from cachemgr.bounded import Begun
from cachemgr.capture import Layer
from cachemgr.digest import Digest
from cachemgr.errors import (
    CacheError,
    CorruptError,
    DeadlineError,
    DeniedError,
    MirrorError,
    NotFoundError,
    UntrustedError,
)
from cachemgr.key import Key, from_folder
from cachemgr.parallel import side_by_side
from cachemgr.store import Entry, Remote, Store, layout
from cachemgr.store.captures import (
    GRACE_SECONDS,
    Capture,
    Damaged,
    Judge,
    Marks,
    discard_damaged,
    entry_hints,
    load,
    near_hint,
    no_marks,
    put_manifest,
)
from cachemgr.store.checked import LARGE_BYTES, Checked

_STREAMS = 16
"""Objects that move at a time. Most are small, and a request is mostly waiting."""
_LARGE_STREAMS = 2
"""Layers over LARGE_BYTES are moved by their store in parts, several at a time, each of them in memory."""
_HINT_STREAMS = 4
"""Hints of one capture that are written at a time. They are empty; only the last one says that all are there."""
_FEW_KEYS = 32
"""Up to so many artifacts are listed one by one, more by one listing of all."""
_FEW_SHARDS = 32
"""The same for the directories of layers."""
BESIDE_LIMIT = 1 << 20
"""Bytes of an object beside a manifest."""

_OF_ONE = (CorruptError, NotFoundError, DeniedError)
"""What can be wrong with one capture, while the next one may be sound."""

Listing = Mapping[str, Entry]


class Piece(msgspec.Struct, frozen=True):
    """An object that has to move; its size in bytes."""

    name: str
    size: int


class Load(msgspec.Struct, frozen=True):
    """What one capture needs at the target, in the order in which it is written."""

    key: Key
    capture: Digest
    layers: tuple[Piece, ...]
    aged: tuple[str, ...]
    """Layers that are there, and so old that a prune might take them before the manifest arrives."""
    beside: tuple[Piece, ...]
    """Signatures. What a store notes about a capture for itself does not travel."""
    manifest: Piece | None
    """None when it is there already."""
    hints: tuple[str, ...]

    def pieces(self) -> Iterator[Piece]:
        """All objects with bytes."""
        yield from self.layers
        yield from self.beside
        if self.manifest is not None:
            yield self.manifest


class Plan(msgspec.Struct, frozen=True):
    """What a transfer would move. A layer that captures share is listed with each of them and counted once."""

    source: str
    target: str
    loads: tuple[Load, ...]
    """Captures of which something is missing at the target."""
    whole: int
    """Captures of which nothing is."""
    objects: int
    bytes: int
    skipped_objects: int
    """Objects with bytes that the target has already."""
    skipped_bytes: int
    damaged: tuple[Damaged, ...]
    """Captures that cannot be used at the source, and stay there."""


class Failure(msgspec.Struct, frozen=True):
    """A capture that did not arrive."""

    key: Key
    capture: Digest
    error: CacheError


class Moved(msgspec.Struct, frozen=True):
    """What a transfer did."""

    captures: tuple[Digest, ...]
    """Those that arrived."""
    objects: int
    bytes: int
    failures: tuple[Failure, ...]


def joined(source: Store, target: Store, plans: Sequence[Plan]) -> Plan:
    """What transfers from one store to places of another would move together."""
    return Plan(
        source=str(source),
        target=str(target),
        loads=tuple(load for plan in plans for load in plan.loads),
        whole=sum(plan.whole for plan in plans),
        objects=sum(plan.objects for plan in plans),
        bytes=sum(plan.bytes for plan in plans),
        skipped_objects=sum(plan.skipped_objects for plan in plans),
        skipped_bytes=sum(plan.skipped_bytes for plan in plans),
        damaged=tuple(damaged for plan in plans for damaged in plan.damaged),
    )


def together(done: Sequence[Moved]) -> Moved:
    """What several transfers did."""
    return Moved(
        tuple(capture for each in done for capture in each.captures),
        sum(each.objects for each in done),
        sum(each.bytes for each in done),
        tuple(failure for each in done for failure in each.failures),
    )


class Transfer:
    """Moves captures from `source` to `target`.

    Args:
        expired: asked between pieces; once true, what has not arrived stays away.
        judge: who decides which captures of the source may be used.
        marks: what is put beside a manifest that is new at the target.
        moved: told how many bytes have moved, from several threads.
        hints: whether the target keeps hints for look-ups that cannot read every manifest.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        expired: Callable[[], bool] = lambda: False,
        judge: Judge | None = None,
        marks: Marks = no_marks,
        moved: Callable[[int], None] = lambda _count: None,
        hints: bool = False,
    ) -> None:
        self._source, self._target = source, target
        self._expired, self._judge, self._marks, self._told, self._hints = expired, judge, marks, moved, hints
        self._read: dict[tuple[Key, Digest], Capture] = {}
        self._stop: CacheError | None = None
        self._large = threading.Semaphore(_LARGE_STREAMS)
        self._laid: Begun[layout.Layout | None] | None = None
        """The layout of the target, read while it is listed."""
        self._strange: set[str] = set()
        """Layers that are at the target in another size than they should have."""
        self._turns: dict[str, threading.Lock] = {}
        self._arrived: dict[str, int] = {}
        """Bytes of the objects that this transfer moved."""

    def plan(self, keys: Collection[Key], *, now: float, only: frozenset[Digest] | None = None) -> Plan:
        """What has to move so that the target has the captures of `keys`, or those among them that are in `only`.

        Raises:
            StoreError: one of the stores cannot be listed, or the source not be read.
            DeadlineError: the time was over.
        """
        here = Begun(f"listing {self._target}", lambda: _listed(self._target, keys))
        there = _listed(self._source, keys)
        names = [
            (key, name, [other for other in objects if layout.beside(other) == layout.capture_of(name)])
            for key, objects in there.items()
            for name in objects
            if name.endswith(layout.MANIFEST_SUFFIX) and (only is None or layout.capture_of(name) in only)
        ]
        damaged: list[Damaged] = []
        loaded = side_by_side(lambda item: self._loaded(*item, damaged), names, threads=_STREAMS)
        found = [capture for capture in loaded if capture is not None]
        return self._planned(found, there, here, damaged, now)

    def plan_found(self, captures: Sequence[Capture], *, now: float) -> Plan:
        """What has to move so that the target has these captures, which were read at the source before.

        Raises:
            StoreError: the target cannot be listed.
        """
        keys = {capture.manifest.key for capture in captures}
        here = Begun(f"listing {self._target}", lambda: _listed(self._target, keys))
        there: dict[Key, dict[str, Entry]] = defaultdict(dict)
        for capture in captures:
            there[capture.manifest.key].update((name, Entry(name, 0, 0.0)) for name in capture.beside)
        return self._planned(captures, there, here, [], now)

    def _loaded(self, key: Key, name: str, beside: Sequence[str], damaged: list[Damaged]) -> Capture | None:
        self._check()
        try:
            return load(self._source, key, name, self._judge, beside)
        except NotFoundError:
            return None
        except (CorruptError, DeniedError, UntrustedError) as error:
            damaged.append(Damaged.of(key, name, error))
            return None

    def _planned(
        self,
        captures: Sequence[Capture],
        there: Mapping[Key, Listing],
        here: Begun[dict[Key, dict[str, Entry]]],
        damaged: Sequence[Damaged],
        now: float,
    ) -> Plan:
        """What is asked of the target is asked at once: a request is mostly waiting."""
        hinted = Begun(f"listing hints in {self._target}", lambda: self._hinted(captures if self._hints else ()))
        if isinstance(self._target, Remote):
            self._laid = Begun(f"reading the layout of {self._target}", lambda: layout.read_layout(self._target))
        held = self._held_layers([layer for capture in captures for layer in capture.manifest.layers])
        view = _View(there, here.result(), held, hinted.result(), now, with_hints=self._hints)
        loads = [view.load(capture) for capture in captures]
        wanting = tuple(load for load in loads if any(load.pieces()) or load.hints)
        self._read = {(load.key, load.capture): each for load, each in zip(loads, captures, strict=True)}
        pieces = {piece.name: piece.size for load in wanting for piece in load.pieces()}
        return Plan(
            source=str(self._source),
            target=str(self._target),
            loads=wanting,
            whole=len(loads) - len(wanting),
            objects=len(pieces),
            bytes=sum(pieces.values()),
            skipped_objects=len(view.skipped),
            skipped_bytes=sum(view.skipped.values()),
            damaged=tuple(damaged),
        )

    def _held_layers(self, wanted: Iterable[Layer]) -> Listing:
        """Those of these layers that the target has, in their size: some servers keep what a client that died began."""
        sizes = {layout.layer_name(layer.digest): layer.size for layer in wanted}
        shards = sorted({name.rpartition("/")[0] + "/" for name in sizes})
        prefixes = shards if len(shards) <= _FEW_SHARDS else [layout.LAYERS]
        listings = side_by_side(lambda prefix: list(self._target.scan(prefix)), prefixes, threads=_STREAMS)
        listed = [entry for entries in listings for entry in entries if entry.name in sizes]
        self._strange = {entry.name for entry in listed if entry.size != sizes[entry.name]}
        return {entry.name: entry for entry in listed if entry.name not in self._strange}

    def _hinted(self, captures: Iterable[Capture]) -> frozenset[str]:
        """The hints about captures of these models with these guards that the target has."""
        names = [name for capture in captures if (name := near_hint(capture.manifest, capture.digest)) is not None]
        prefixes = sorted({name.rsplit("/", 2)[0] + "/" for name in names})
        listings = side_by_side(lambda prefix: list(self._target.scan(prefix)), prefixes, threads=_STREAMS)
        return frozenset(entry.name for entries in listings for entry in entries)

    def carry(self, plan: Plan) -> Moved:
        """Carry out a plan of this transfer. What fails is in the answer, and the rest arrives all the same; only a
        store that fails as a whole ends it for all that comes after.

        Raises:
            CorruptError: the target is no store of ours.
            StoreError: it cannot be written at all.
        """
        if not plan.loads:
            return Moved((), 0, 0, ())
        if (layout.read_layout(self._target) if self._laid is None else self._laid.result()) is None:
            layout.make_layout(self._target)
        names = (name for load in plan.loads for name in (*(piece.name for piece in load.pieces()), *load.aged))
        self._turns = {name: threading.Lock() for name in names}
        try:
            failures = side_by_side(self._carried, plan.loads, threads=_STREAMS)
        finally:
            self._stop = self._stop or DeadlineError("interrupted")
        arrived = tuple(load.capture for load, error in zip(plan.loads, failures, strict=True) if error is None)
        failed = tuple(
            Failure(load.key, load.capture, error)
            for load, error in zip(plan.loads, failures, strict=True)
            if error is not None
        )
        return Moved(arrived, len(self._arrived), sum(self._arrived.values()), failed)

    def _carried(self, load: Load) -> CacheError | None:
        """Why a capture did not arrive, or None."""
        try:
            for piece in load.layers:
                self._once(piece, self._layer)
            for name in load.aged:
                self._check()
                if not self._target.refresh(name):
                    self._once(Piece(name, 0), self._layer)
            for piece in load.beside:
                self._once(piece, self._whole)
            if load.manifest is not None:
                self._once(load.manifest, lambda piece: self._manifest(load, piece))
            side_by_side(self._hint, load.hints[:-1], threads=_HINT_STREAMS)
            for last in load.hints[-1:]:
                self._hint(last)
        except CacheError as error:
            if not isinstance(error, _OF_ONE) or isinstance(error, MirrorError):
                self._stop = self._stop or error
            return error
        return None

    def _hint(self, name: str) -> None:
        self._check()
        self._target.put(name, b"")

    def _once(self, piece: Piece, move: Callable[[Piece], int]) -> None:
        """Captures share layers: the first that needs one moves it, and the others wait for that."""
        with self._turns[piece.name]:
            if piece.name not in self._arrived:
                self._check()
                self._arrived[piece.name] = move(piece)

    def _layer(self, piece: Piece) -> int:
        name = layout.layer_of(piece.name)
        assert name is not None, "the plan names layers"
        if piece.name in self._strange and not discard_damaged(self._target, name):
            raise CorruptError(f"layer {name} has another size than its manifest says")
        with self._turn(piece.size), self._source.open(piece.name) as stream:
            checked = Checked(stream, name, piece.size, self._piece_moved)
            self._target.put_stream(piece.name, checked)
            return checked.count

    def _turn(self, size: int) -> "threading.Semaphore | threading.Lock":
        return self._large if size > LARGE_BYTES else threading.Lock()

    def _whole(self, piece: Piece) -> int:
        data = self._source.read(piece.name, limit=BESIDE_LIMIT)
        self._target.put(piece.name, data)
        self._told(len(data))
        return len(data)

    def _manifest(self, load: Load, piece: Piece) -> int:
        for name, mark in self._marks(load.key, load.capture).items():
            self._target.put(name, mark)
        put_manifest(self._target, self._read[load.key, load.capture])
        self._told(piece.size)
        return piece.size

    def _piece_moved(self, count: int) -> None:
        self._check()
        self._told(count)

    def _check(self) -> None:
        if self._stop is not None:
            raise self._stop
        if self._expired():
            raise DeadlineError(f"the time for a transfer to {self._target} was over")


class _View:
    """What both stores have, as far as a plan needs it; loads are made from it."""

    def __init__(
        self,
        there: Mapping[Key, Listing],
        here: Mapping[Key, Listing],
        held: Listing,
        hinted: frozenset[str],
        now: float,
        *,
        with_hints: bool,
    ) -> None:
        self._there, self._here, self._held, self._hinted = there, here, held, hinted
        self._old = now - GRACE_SECONDS / 2
        self._with_hints = with_hints
        self.skipped: dict[str, int] = {}
        """Objects that the target has, with their sizes."""

    def load(self, capture: Capture) -> Load:
        """What this capture needs."""
        key = capture.manifest.key
        here = self._here.get(key, {})
        own = layout.manifest_name(key, capture.digest)
        beside = [
            Piece(entry.name, entry.size)
            for entry in self._there.get(key, {}).values()
            if layout.goes_along(entry.name) and layout.beside(entry.name) == capture.digest
        ]
        layers = {layout.layer_name(layer.digest): layer.size for layer in capture.manifest.layers}
        wanted = [*(Piece(name, size) for name, size in layers.items()), *beside, Piece(own, capture.stored)]
        missing = [piece for piece in wanted if piece.name not in self._held and piece.name not in here]
        self.skipped.update((piece.name, piece.size) for piece in wanted if piece not in missing)
        is_new = own not in here
        return Load(
            key=key,
            capture=capture.digest,
            layers=tuple(piece for piece in missing if piece.name in layers),
            aged=tuple(name for name in layers if is_new and self._is_old(name)),
            beside=tuple(piece for piece in beside if piece in missing),
            manifest=missing[-1] if is_new else None,
            hints=self._hints(capture, is_new=is_new),
        )

    def _is_old(self, layer: str) -> bool:
        return layer in self._held and self._held[layer].modified < self._old

    def _hints(self, capture: Capture, *, is_new: bool) -> tuple[str, ...]:
        """The last hint of a mirror is written last: where it is, all are."""
        near = near_hint(capture.manifest, capture.digest) if self._with_hints else None
        if near is None:
            return entry_hints(capture.manifest) if is_new else ()
        return () if near in self._hinted else (*entry_hints(capture.manifest), near)


def _listed(store: Store, keys: Collection[Key]) -> dict[Key, dict[str, Entry]]:
    """The objects of each of these artifacts by name."""
    if len(keys) <= _FEW_KEYS:
        listings = side_by_side(
            lambda key: list(store.scan(layout.artifact_prefix(key))), sorted(keys), threads=_STREAMS
        )
        entries = [entry for listing in listings for entry in listing]
    else:
        entries = list(store.scan(layout.ARTIFACTS))
    wanted = frozenset(keys)
    found: dict[Key, dict[str, Entry]] = defaultdict(dict)
    for entry in entries:
        key = from_folder(entry.name.split("/")[1])
        # An empty one is what some servers keep of a client that died.
        if key is not None and key in wanted and entry.size:
            found[key][entry.name] = entry
    return found
