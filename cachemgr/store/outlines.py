"""Outlines: what removing needs to know of every capture, remembered so that only new manifests are read.

Which layers are needed is a question about all captures of a store. Manifests are immutable and named by their digest,
so what was read once stays true; only the listing decides what exists. What is remembered is a cache on this host:
losing it costs time.

Nothing is placed by what an outline says, so paths and sizes are not checked here as they are before a restore: of a
manifest that is refused there, the layers count as needed all the same.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from cachemgr.capture import LAYOUT
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, DeniedError, NotFoundError
from cachemgr.key import Factor, Key, guard_print
from cachemgr.parallel import side_by_side
from cachemgr.remembered import recall, remember
from cachemgr.store import Remote, Store, layout
from cachemgr.store.captures import Damaged, manifest_bytes

_READERS = 16


class Outline(msgspec.Struct, frozen=True, array_like=True):
    """One capture, without its factors and files."""

    key: Key
    created: str
    """RFC 3339, UTC."""
    engine: str
    engine_version: str | None
    torch: str | None
    model: str
    device: str
    entries: tuple[str, ...]
    layers: tuple[tuple[Digest, int], ...]
    """Each with its size in bytes."""
    near: str
    """The name of its hint in a mirror; empty where it has none."""


class _Layer(msgspec.Struct):
    digest: Digest
    size: int


class _Told(msgspec.Struct):
    """The fields of a manifest that an outline is made of."""

    layout: int
    key: Key
    factors: tuple[Factor, ...]
    engine: str
    engine_version: str | None
    model: str
    device: str
    created: str
    layers: tuple[_Layer, ...]
    entries: tuple[str, ...] = ()


class Outlines:
    """The outlines of one store by the name of the manifest, kept in the file `path`, if there is one."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, Outline] | None = None

    def of(self, store: Store, listed: Mapping[str, Key], damaged: list[Damaged]) -> dict[str, Outline]:
        """The outlines of the manifests `listed`, by name, with the key that each lies under. What cannot be read goes
        to `damaged`; what vanished is left out."""
        held = self._recalled()
        known = {name: held[name] for name in listed if name in held}
        news = sorted(listed.keys() - known.keys())

        def learn(name: str) -> Outline | None:
            key = listed[name]
            try:
                data, _stored = manifest_bytes(store, name)
            except NotFoundError:
                return None
            except (CorruptError, DeniedError) as error:
                damaged.append(Damaged.of(key, name, error))
                return None
            try:
                return outline(data, key, name)
            except CorruptError as error:  # its bytes are right, and a newer cachemgr may know what they mean
                damaged.append(Damaged(key, name, str(error), "unreadable"))
                return None

        learnt = side_by_side(learn, news, threads=_READERS if isinstance(store, Remote) else 1)
        known.update((name, each) for name, each in zip(news, learnt, strict=True) if each is not None)
        self._remember(known)
        return known

    def _recalled(self) -> dict[str, Outline]:
        if self._known is None:
            self._known = (None if self._path is None else recall(self._path, dict[str, Outline])) or {}
        return self._known

    def _remember(self, known: dict[str, Outline]) -> None:
        if self._path is not None and known.keys() != self._recalled().keys():
            remember(self._path, known)
        self._known = known


def outline(data: bytes, key: Key, name: str) -> Outline:
    """The outline of the manifest with the object name `name` and these uncompressed bytes, which lies under `key`.

    Raises:
        CorruptError: it is of another layout, belongs to another key, or is no manifest.
    """
    short, capture = layout.short(name), layout.capture_of(name)
    try:
        told = msgspec.json.decode(data, type=_Told)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(f"capture {short} cannot be read: {error}") from None
    if told.layout != LAYOUT:
        raise CorruptError(f"capture {short} has layout {told.layout}, this cachemgr reads layout {LAYOUT}")
    if told.key != key or capture is None:
        raise CorruptError(f"capture {short} belongs to {told.key} and lies under {key}")
    guards = guard_print(told.factors)
    return Outline(
        key,
        told.created,
        told.engine,
        told.engine_version,
        next((factor.value for factor in told.factors if factor.name == "torch"), None),
        told.model,
        told.device,
        told.entries,
        tuple((layer.digest, layer.size) for layer in told.layers),
        layout.near_name(key, capture, guards, told.model) if guards else "",
    )
