"""What a store holds, in the terms of `ls`, `show` and `size`: one summary per artifact, made from its records."""

from collections.abc import Iterable, Sequence

import msgspec

from cachemgr.capture import Layer, Verdict
from cachemgr.errors import NotFoundError, UsageError
from cachemgr.history import NO_HISTORY, History, fold
from cachemgr.key import Key, is_key
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, Damaged, all_captures, keys
from cachemgr.store.records import launches
from cachemgr.warm import choose


class Summary(msgspec.Struct, frozen=True):
    """One artifact, as `ls --json` lists it. Sizes in bytes, times RFC 3339 UTC, durations in seconds."""

    key: Key
    engine: str
    engine_version: str | None
    model: str
    device: str
    domains: tuple[str, ...]
    files: int
    """Files that a restore would place, over all captures."""
    bytes: int
    stored_bytes: int
    """Bytes of its manifests and layers; layers that artifacts share count for each of them."""
    captures: int
    complete: bool
    """Whether every rank of its world is in some complete capture: nodes publish their own."""
    created: str
    last_used: str | None
    uses: int
    pinned: bool
    cold_seconds: float | None
    warm_seconds: float | None
    verdicts: dict[Verdict, int] = {}
    """How many of its uses ended how."""
    saved_seconds: float | None = None
    """What its warm starts saved against the cold one, where both were timed."""


class Indexed(msgspec.Struct, frozen=True):
    """One artifact as an index of the store has it."""

    manifests: str
    """The `cachemgr.digest.fingerprint_of` its manifests: that of those that are there, unless the index is behind."""
    summary: Summary


_OF_MANIFESTS = (
    "engine",
    "engine_version",
    "model",
    "device",
    "domains",
    "files",
    "bytes",
    "stored_bytes",
    "captures",
    "complete",
    "created",
    "cold_seconds",
)
"""What of a summary follows from manifests, whatever launches did."""


def contradictions(told: Summary, held: Sequence[Capture]) -> list[str]:
    """What an index says otherwise than the captures that it was made from, for people: name, told and true value."""
    true = summarise(told.key, held, NO_HISTORY, pinned=told.pinned)
    both = ((name, getattr(told, name), getattr(true, name)) for name in _OF_MANIFESTS)
    return [f"{name} {mine} and not {theirs}" for name, mine, theirs in both if mine != theirs]


class Totals(msgspec.Struct, frozen=True):
    """What a store holds altogether. Layers that artifacts share count once."""

    artifacts: int
    captures: int
    files: int
    bytes: int
    stored_bytes: int


def summaries(store: Store, damaged: list[Damaged]) -> list[Summary]:
    """Every artifact, the newest first. What cannot be read is appended to `damaged`."""
    histories = fold(launches(store))
    pinned = {layout.pinned(entry.name) for entry in store.scan(layout.PINS)}
    found = [
        summarise(key, held, histories.get(key, NO_HISTORY), pinned=key in pinned)
        for key, held in all_captures(store, damaged).items()
    ]
    return sorted(found, key=lambda summary: (summary.created, summary.key), reverse=True)


def summarise(key: Key, held: Sequence[Capture], history: History, *, pinned: bool) -> Summary:
    """One artifact from its captures and what launches made of it."""
    first = held[0].manifest
    domains = sorted({section.domain for capture in held for _layer, section in capture.manifest.sections()})
    files = [file for domain in domains for _layer, unit in choose(held, domain).values() for file in unit.files]
    cold = cold_seconds(held)
    return Summary(
        key=key,
        engine=first.engine,
        engine_version=first.engine_version,
        model=first.model,
        device=first.device,
        domains=tuple(domains),
        files=len(files),
        bytes=sum(file.size for file in files),
        stored_bytes=sum(capture.stored for capture in held) + sum(layer.size for layer in layers_of(held)),
        captures=len(held),
        complete=is_whole(held),
        created=first.created,
        last_used=history.last_used,
        uses=history.uses,
        pinned=pinned,
        cold_seconds=cold.get("run"),
        warm_seconds=history.warm_seconds,
        verdicts=history.verdicts,
        saved_seconds=history.saved_seconds(cold),
    )


def is_whole(held: Sequence[Capture]) -> bool:
    """Whether captures of launches that got ready have all ranks of their world together."""
    whole = [capture.manifest for capture in held if capture.manifest.complete]
    ranks = {rank for manifest in whole for rank in manifest.ranks}
    return bool(whole) and (not ranks or len(ranks) >= max(manifest.world for manifest in whole))


def missing_ranks(held: Sequence[Capture]) -> str:
    """`2 of 4 ranks` where the other ranks of a world are not there, else nothing."""
    ranks = {rank for capture in held for rank in capture.manifest.ranks}
    world = max(capture.manifest.world for capture in held)
    return f"{len(ranks)} of {world} ranks" if 0 < len(ranks) < world else ""


def cold_seconds(held: Iterable[Capture]) -> dict[str, float]:
    """Seconds per phase of the start that made these captures; empty where none was timed."""
    return next((capture.manifest.timings for capture in held if "run" in capture.manifest.timings), {})


def layers_of(held: Iterable[Capture]) -> list[Layer]:
    """The layers of these captures, each once."""
    return list({layer.digest: layer for capture in held for layer in capture.manifest.layers}.values())


def totals(store: Store, damaged: list[Damaged]) -> Totals:
    """What all artifacts add up to. What cannot be read is appended to `damaged`; launch records are not looked at."""
    held = all_captures(store, damaged)
    listed = [summarise(key, captured, NO_HISTORY, pinned=False) for key, captured in held.items()]
    prefixes = (layout.LAYERS, layout.ARTIFACTS)
    return Totals(
        artifacts=len(listed),
        captures=sum(summary.captures for summary in listed),
        files=sum(summary.files for summary in listed),
        bytes=sum(summary.bytes for summary in listed),
        stored_bytes=sum(entry.size for prefix in prefixes for entry in store.scan(prefix)),
    )


def resolve(store: Store, text: str) -> Key:
    """The key that a person means by an unambiguous prefix, with or without `k1:`.

    Raises:
        NotFoundError: no artifact starts so.
        UsageError: several do, or it is empty, as of a variable that is not set: that would be whatever is there.
    """
    beginning = text.removeprefix("k1").removeprefix(":")
    if not beginning:
        raise UsageError(f"`{text}` names no artifact", hint="give a key or its beginning, see cachemgr ls")
    wanted = f"k1:{beginning}"
    if is_key(wanted):
        matches = [Key(wanted)] if any(store.scan(layout.artifact_prefix(Key(wanted)))) else []
    else:
        matches = [key for key in keys(store) if key.startswith(wanted)]
    if not matches:
        raise NotFoundError(f"no artifact `{text}` in {store}", hint="cachemgr ls")
    if len(matches) > 1:
        raise UsageError(f"`{text}` is the beginning of {len(matches)} artifacts", hint="give more of the key")
    return matches[0]
