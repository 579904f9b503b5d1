"""What a store holds, in the terms of `ls`, `show` and `size`: one summary per artifact, made from its records."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from cachemgr.capture import Launch, Layer
from cachemgr.errors import NotFoundError, UsageError
from cachemgr.key import Key, is_key
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, Damaged, captures, keys, launches
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
    created: str
    last_used: str | None
    uses: int
    pinned: bool
    cold_seconds: float | None
    warm_seconds: float | None


class Totals(msgspec.Struct, frozen=True):
    """What a store holds altogether. Layers that artifacts share count once."""

    artifacts: int
    captures: int
    files: int
    bytes: int
    stored_bytes: int


def summaries(store: Store, damaged: list[Damaged]) -> list[Summary]:
    """Every artifact, the newest first. What cannot be read is appended to `damaged`."""
    by_key: dict[Key, list[Launch]] = defaultdict(list)
    for launch in launches(store):
        by_key[launch.artifact or launch.key].append(launch)
    found = []
    for key in keys(store):
        held = captures(store, key, damaged)
        if held:
            found.append(summarise(key, held, by_key[key], pinned=store.has(layout.pin_name(key))))
    return sorted(found, key=lambda summary: (summary.created, summary.key), reverse=True)


def summarise(key: Key, held: Sequence[Capture], used: Iterable[Launch], *, pinned: bool) -> Summary:
    """One artifact from its captures and the launches that took from it."""
    first = held[0].manifest
    domains = sorted({section.domain for capture in held for _layer, section in capture.manifest.sections()})
    files = [file for domain in domains for _layer, unit in choose(held, domain).values() for file in unit.files]
    uses = [launch for launch in used if launch.artifact == key and launch.result != "none"]
    warm = [launch.phases["run"] for launch in uses if launch.verdict == "used" and "run" in launch.phases]
    cold = [capture.manifest.timings["run"] for capture in held if "run" in capture.manifest.timings]
    return Summary(
        key=key,
        engine=first.engine,
        engine_version=first.engine_version,
        model=first.model,
        device=first.device,
        domains=tuple(domains),
        files=len(files),
        bytes=sum(file.size for file in files),
        stored_bytes=sum(capture.stored for capture in held) + sum(layer.size for layer in _layers(held)),
        captures=len(held),
        complete=any(capture.manifest.complete for capture in held),
        created=first.created,
        last_used=max((launch.started for launch in uses), default=None),
        uses=len(uses),
        pinned=pinned,
        cold_seconds=cold[0] if cold else None,
        warm_seconds=min(warm, default=None),
    )


def _layers(held: Iterable[Capture]) -> list[Layer]:
    return list({layer.digest: layer for capture in held for layer in capture.manifest.layers}.values())


def totals(store: Store, listed: Sequence[Summary]) -> Totals:
    """What these artifacts, which are all of the store's, add up to."""
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
        UsageError: several do.
    """
    wanted = "k1:" + text.removeprefix("k1").removeprefix(":")
    if is_key(wanted):
        matches = [Key(wanted)] if any(store.scan(layout.artifact_prefix(Key(wanted)))) else []
    else:
        matches = [key for key in keys(store) if key.startswith(wanted)]
    if not matches:
        raise NotFoundError(f"no artifact `{text}` in {store}", hint="cachemgr ls")
    if len(matches) > 1:
        raise UsageError(f"`{text}` is the beginning of {len(matches)} artifacts", hint="give more of the key")
    return matches[0]
