"""The sign journey: verify captures to the last byte, answer for them, and let those in that wait.

Nobody answers here for bytes that he neither made nor verified: a capture needs the mark of this machine or of a
trusted key, or a person who says that he accepts it without. What is signed is the digest of the manifest, which has
the digests of everything below it, so what somebody changes in the meantime is found by every reader.
"""

import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import BinaryIO

import msgspec

from cachemgr import inventory
from cachemgr import layer as layers
from cachemgr.capture import Layer
from cachemgr.clock import epoch
from cachemgr.digest import Digest
from cachemgr.errors import CacheError, CorruptError, NotFoundError, StoreError, UntrustedError, UsageError
from cachemgr.key import Key
from cachemgr.signature import MAX_BYTES, PublicKey, Signer, verified
from cachemgr.store import Store, layout, scratch
from cachemgr.store.captures import Capture, Damaged, Standing, captures, enter, entry_hints, keys, listing
from cachemgr.store.incoming import Incoming
from cachemgr.store.removal import referenced
from cachemgr.trust import Trust

_CAPTURE_PREFIX = "sha256:"
_LEAST_HEX = 6


class Candidate(msgspec.Struct, frozen=True):
    """A capture that somebody wants to be signed."""

    capture: Capture
    waiting: bool
    """Whether it lies in `incoming/`, out of the sight of launches."""
    signatures: tuple[str, ...]
    """The objects beside it that are named as this signer's; anybody can give such a name."""
    signed: bool
    """Whether one of them is a signature of his that counts still."""

    @property
    def by(self) -> str:
        """Who answers for it so far; empty for nobody."""
        return self._standing.by

    @property
    def doubt(self) -> str:
        """Why nobody does."""
        return self._standing.doubt

    @property
    def _standing(self) -> Standing:
        assert self.capture.standing is not None, "it was read with a judge"
        return self.capture.standing

    @property
    def key(self) -> Key:
        return self.capture.manifest.key


def candidates(store: Store, text: str, trust: Trust, signer: PublicKey) -> list[Candidate]:
    """The captures that `text` names: those of an artifact by the beginning of its key, or the one whose digest begins
    so. Waiting ones come first.

    Raises:
        NotFoundError, UsageError: none is named so, or several artifacts or captures are.
        CorruptError: one that is named so cannot be read.
    """
    found: list[Candidate] = []
    damaged: list[Damaged] = []
    for place in (Incoming(store), store):
        for key in _keys(place, text):
            beside = listing(place, layout.artifact_prefix(key))
            found += [
                _candidate(place, capture, beside[layout.manifest_name(key, capture.digest)][1], signer, trust.now())
                for capture in captures(place, key, damaged, judge=trust.opinion)
                if not _names_capture(text) or capture.digest.startswith(text)
            ]
    names = {each.capture.digest for each in found} if _names_capture(text) else {each.key for each in found}
    if len(names) > 1:
        raise UsageError(f"`{text}` is the beginning of {len(names)} names", hint="give more of it")
    for each in damaged:
        if not _names_capture(text) or str(layout.capture_of(each.name)).startswith(text):
            raise CorruptError(each.reason, hint=f"cachemgr show {each.key}")
    if not found:
        raise NotFoundError(f"nothing in {store} is called `{text}`", hint="cachemgr ls")
    return found


def _names_capture(text: str) -> bool:
    return text.startswith(_CAPTURE_PREFIX) and len(text) >= len(_CAPTURE_PREFIX) + _LEAST_HEX


def _keys(place: Store, text: str) -> list[Key]:
    if _names_capture(text):
        return keys(place)
    try:
        return [inventory.resolve(place, text)]
    except NotFoundError:
        return []


def _candidate(place: Store, capture: Capture, beside: list[str], signer: PublicKey, now: float) -> Candidate:
    own = [name for name in beside if layout.signer_of(name) == signer.id and layout.beside(name) == capture.digest]
    signed = any(_counts(place, name, capture, signer, now) for name in own)
    return Candidate(capture, isinstance(place, Incoming), tuple(own), signed)


def _counts(place: Store, name: str, capture: Capture, signer: PublicKey, now: float) -> bool:
    """Whether an object is what its name says, a signature of this key, and has not expired."""
    try:
        said = verified(place.read(name, limit=MAX_BYTES), capture.digest, capture.manifest.key, signer)
    except (UntrustedError, CorruptError, NotFoundError):
        return False
    return said.expires is None or now < epoch(said.expires)


def require_origin(found: Iterable[Candidate], revoked: Collection[str] = (), *, accept: bool = False) -> None:
    """Refuse what nobody answers for, unless a person does (`accept`), and what is revoked in any case.

    Raises:
        UntrustedError: one of them.
    """
    for each in found:
        if each.capture.digest in revoked:
            raise UntrustedError(each.doubt, hint="cachemgr rm removes its artifact")
        if not each.by and not accept:
            host = each.capture.manifest.provenance.host
            raise UntrustedError(
                f"{each.doubt}; it says that it was made on {host}, and anybody may have written that",
                hint="make it here instead, or answer for bytes of others with --accept-unverified-origin",
            )


def sign(store: Store, candidate: Candidate, signer: Signer, *, signed: str, expires: str | None) -> None:
    """Verify a capture, sign it, and if it waits, let it in. What this signer signed of it before goes afterwards.

    Raises:
        CorruptError, NotFoundError: a layer is damaged or missing; nothing is signed.
        StoreError: something could not be read or written.
    """
    capture, key = candidate.capture, candidate.key
    for layer in capture.manifest.layers:
        _settle(store, layer)
    name = layout.signature_name(key, capture.digest, signer.public.id, signed)
    data = signer.sign(capture.digest, key, signed=signed, expires=expires)
    if candidate.waiting:
        layout.ensure_layout(store)
        enter(store, capture.manifest, lambda _key, _capture: {name: data})
        _remove_waiting(Incoming(store), capture)
        return
    store.put(name, data)
    for old in candidate.signatures:
        if old != name:
            store.delete(old)


def _settle(store: Store, layer: Layer) -> None:
    """Have the verified bytes of a layer where launches look for them."""
    name = layout.layer_name(layer.digest)
    if store.refresh(name):  # a prune that has listed already must not take it before the manifest is there
        with store.open(name) as stream:
            layers.verify(layer, stream)
        return
    aside = store.scratch() / uuid.uuid4().hex
    try:
        try:
            with Incoming(store).open(name) as stream, scratch.create(aside) as target:
                for piece in _bounded(stream, layer):
                    target.write(piece)
            with aside.open("rb") as copy:
                layers.verify(layer, copy)
        except OSError as error:
            raise StoreError(f"cannot copy layer {layer.digest}: {error.strerror or error}") from None
        if not store.put_file(name, aside):
            store.refresh(name)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def _bounded(stream: BinaryIO, layer: Layer) -> Iterator[bytes]:
    """No more than the manifest says and a piece: what waits may be endless."""
    size = 0
    while size <= layer.size and (piece := stream.read(layers.CHUNK)):
        size += len(piece)
        yield piece


def _remove_waiting(waiting: Incoming, capture: Capture) -> None:
    """The manifest goes first, as always. Layers stay that another one that waits may need."""
    manifest = capture.manifest
    for hint in entry_hints(manifest):
        waiting.delete(hint)
    prefix = layout.artifact_prefix(manifest.key)
    own = [entry.name for entry in waiting.scan(prefix) if layout.beside(entry.name) == capture.digest]
    for name in sorted(own, key=lambda name: not name.endswith(layout.MANIFEST_SUFFIX)):
        waiting.delete(name)
    needed: set[Digest] = set()
    try:
        needed = referenced(waiting)
    except CacheError:
        return
    for layer in manifest.layers:
        if layer.digest not in needed:
            waiting.delete(layout.layer_name(layer.digest))
