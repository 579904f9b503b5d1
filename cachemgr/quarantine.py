"""Quarantine across a fleet: captures that nobody should use any more, by reports that holders of trusted keys sign.

A host that a capture failed says so for itself (`cachemgr.store.captures.quarantine`); an unsigned word for all would
let anybody who can write to a bucket take a fleet's captures away. A signed report lies twice in a store: in the list
`quarantine/`, of which hosts get what is news to them, and beside the manifest, where every look-up has it in its
listing anyway. The capture stays, as evidence and for the day that somebody brings it back.
"""

from collections.abc import Iterable
from contextlib import suppress

import msgspec

from cachemgr import digest
from cachemgr.digest import Digest
from cachemgr.errors import CacheError, NotFoundError, UsageError
from cachemgr.inventory import resolve
from cachemgr.key import Key, is_key
from cachemgr.signature import MAX_BYTES, Report, Signer
from cachemgr.store import Store, captures, layout
from cachemgr.trust import Trust

_CAPTURE = "sha256:"
_MOST_NOTE = 1 << 16
"""Bytes of a host's note that are read."""


class Note(msgspec.Struct, frozen=True, order=True):
    """Who does not use a capture, or says that nobody should, why, and since when (RFC 3339, UTC)."""

    where: str
    """The name of a host; for a report, all of them, and the key that signed it."""
    reason: str = "no reason can be read"
    since: str = "?"


def report(store: Store, key: Key, capture: Digest, signer: Signer, *, reason: str, signed: str) -> None:
    """Report that nobody should use a capture. Raises StoreError."""
    layout.ensure_layout(store)
    data = signer.report(capture, key, reason=reason, signed=signed)
    for name in layout.report_names(key, capture, signer.public.id, signed):
        store.put(name, data)


def notes(stores: Iterable[Store], trust: Trust, capture: Digest) -> list[Note]:
    """Everybody who does not use a capture, by the notes in these stores. Reports that nobody trusted signed are left
    out."""
    found: set[Note] = set()
    for store in stores:
        names = [entry.name for entry in store.scan(f"{layout.QUARANTINE}{digest.hex_of(capture)}/")]
        found.update(_of_host(store, name) for name in names if name.endswith(".json"))
        said = trust.report(store, capture, names)
        if said is not None:
            found.add(_of_key(said))
    return sorted(found)


def _of_host(store: Store, name: str) -> Note:
    where = name.rsplit("/", 1)[-1].removesuffix(".json")
    try:
        told = msgspec.json.decode(store.read(name, limit=_MOST_NOTE), type=dict[str, str])
        return Note(where, told["reason"], told["since"])
    except (CacheError, msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return Note(where)


def _of_key(said: Report) -> Note:
    return Note(f"all hosts (key {said.signer})", said.reason, said.signed)


def named(store: Store, text: str) -> list[tuple[Key, Digest]]:
    """The captures that a person means: all of an artifact by the beginning of its key, or the one whose digest begins
    so.

    Raises:
        NotFoundError, UsageError: none is named so, or several are.
    """
    if text == _CAPTURE:
        raise UsageError(f"`{text}` names no capture", hint="give its digest or the beginning, see cachemgr show KEY")
    if not text.startswith(_CAPTURE):
        listed = captures.listing(store, layout.artifact_prefix(resolve(store, text)))
    else:
        listed = {
            name: there
            for name, there in captures.listing(store).items()
            if str(layout.capture_of(name)).startswith(text)
        }
        if len(listed) > 1:
            raise UsageError(f"`{text}` is the beginning of {len(listed)} captures", hint="give more of it")
    found = [(key, capture) for name, (key, _beside) in listed.items() if (capture := layout.capture_of(name))]
    if not found:
        raise NotFoundError(f"nothing in {store} is called `{text}`", hint="cachemgr ls")
    return sorted(found)


def noted(store: Store, trust: Trust) -> set[Digest]:
    """The captures that some host does not use, or the holder of a trusted key seems to have reported: no signature is
    read. One listing."""
    names = (entry.name for entry in store.scan(layout.QUARANTINE))
    heeded = (name for name in names if (signer := layout.reporter_of(name)) is None or trust.heeds(signer))
    found = (digest.from_hex(name.split("/")[1]) for name in heeded)
    return {capture for capture in found if capture is not None}


def against(store: Store, found: Iterable[tuple[Key, Digest]], *, host: str | None) -> list[str]:
    """The names of what is said against these captures: every report, whoever signed it, and the note of `host`, or of
    all hosts for None."""
    named = []
    for key, capture in found:
        beside = (entry.name for entry in store.scan(layout.artifact_prefix(key)))
        own = [name for name in beside if layout.reporter_of(name) is not None and layout.beside(name) == capture]
        for entry in store.scan(f"{layout.QUARANTINE}{digest.hex_of(capture)}/"):
            others = entry.name.endswith(".json") and host is not None
            if not others or entry.name == layout.quarantine_name(capture, host or ""):
                own.append(entry.name)
        named += own
    return named


def bring_back(store: Store, found: Iterable[tuple[Key, Digest]], *, host: str | None) -> list[str]:
    """Forget what is said against these captures (`against`). The names of what went.

    Raises:
        StoreError: something could not be removed.
    """
    return [name for name in against(store, found, host=host) if store.delete(name)]


def spread(mirror: Store, local: Store, trust: Trust) -> int:
    """Bring this host's store up to what the mirror's reports say of captures that it has: reports that are new are
    put beside them, those that the mirror has no more go. How many changed. One listing, and a read for each new one.

    Raises:
        StoreError: the mirror could not be listed, or the local store not be written.
    """
    there = {entry.name for entry in mirror.scan(layout.QUARANTINE) if layout.reporter_of(entry.name) is not None}
    known = {entry.name for entry in local.scan(layout.QUARANTINE) if entry.name.endswith(layout.PULLED_SUFFIX)}
    wanted = {_pulled(name): name for name in there}
    changed = 0
    for marker in sorted(wanted.keys() - known):
        said = _taken(mirror, wanted[marker], trust)
        if said is not None and local.has(layout.manifest_name(said[0].key, said[0].capture)):
            beside = layout.report_names(said[0].key, said[0].capture, said[0].signer, said[0].signed)[1]
            local.put(marker, said[0].key.encode())
            local.put(beside, said[1])
            changed += 1
    for marker in sorted(known - wanted.keys()):
        changed += _forgotten(local, marker)
    return changed


def _pulled(name: str) -> str:
    return name.removesuffix(layout.REPORT_SUFFIX) + layout.PULLED_SUFFIX


def _taken(mirror: Store, name: str, trust: Trust) -> tuple[Report, bytes] | None:
    """A report that somebody trusted has signed, and its bytes."""
    capture = digest.from_hex(name.split("/")[1])
    said = None if capture is None else trust.report(mirror, capture, [name])
    if said is None:
        return None
    with suppress(NotFoundError):
        return said, mirror.read(name, limit=MAX_BYTES)
    return None


def _forgotten(local: Store, marker: str) -> bool:
    """Remove a report that came from the mirror and is there no more."""
    with suppress(NotFoundError, UnicodeDecodeError):
        key = local.read(marker, limit=MAX_BYTES).decode()
        digits, said = marker.split("/")[1:]
        for entry in list(local.scan(layout.artifact_prefix(Key(key)))) if is_key(key) else ():
            if entry.name.endswith(f"{digits}.{said.removesuffix(layout.PULLED_SUFFIX)}{layout.REPORT_SUFFIX}"):
                local.delete(entry.name)
    return local.delete(marker)
