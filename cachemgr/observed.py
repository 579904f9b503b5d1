"""What an engine's log means for a launch: an observation for the record, reasons for people, evidence for blame."""

from collections.abc import Sequence

from cachemgr.blame import Death
from cachemgr.capture import Entry, EntryVerdict, Observation
from cachemgr.child import Ended
from cachemgr.engine_log import AotEntry, Failure, Seen, paths_in


def observation(seen: Seen) -> Observation:
    """The part of a log that is kept with the launch."""
    flash = None if seen.flash_attention is None else str(seen.flash_attention)
    return Observation(
        engine_version=seen.version,
        compile_mode=seen.compile_mode,
        graph_mode_requested=seen.graph_mode_requested,
        graph_mode=seen.graph_mode,
        attention=seen.attention_backend,
        flash_attention=flash,
        graph_gib=seen.graph_gib,
        kv_cache_tokens=seen.kv_tokens,
        entries=tuple(_entry(entry) for entry in seen.aot_entries),
        missing=seen.missing,
    )


def _entry(entry: AotEntry) -> Entry:
    verdicts: dict[str, EntryVerdict] = {"loaded": "loaded", "rejected": "rejected"}
    name = "/".join(part for part in (entry.entry, entry.tag, None if entry.rank is None else str(entry.rank)) if part)
    return Entry(name or entry.path, verdicts.get(entry.verdict, "compiled"), entry.rejected)


def reasons(seen: Seen) -> list[str]:
    """What a person should know, with the way out where there is one."""
    told = []
    for rejection in seen.rejections:
        where = f" {rejection.entry}" if rejection.entry else ""
        told.append(f"the engine rejected{where}: {rejection.reason}")
    if seen.graph_mode and seen.graph_mode_requested and seen.graph_mode != seen.graph_mode_requested:
        told.append(f"CUDA graphs run as {seen.graph_mode}, not {seen.graph_mode_requested}")
    if seen.jit_count:
        first = ", ".join(seen.jit_after_ready[:3])
        told.append(f"{seen.jit_count} kernels were not warmed up by the engine and first used while serving: {first}")
    return told


def advice(seen: Seen) -> list[str]:
    """What the engine rejected, why, and what to do about it. Ranks that say the same are one line."""
    entries: dict[str, list[str]] = {}
    for each in seen.rejections:
        known = each.explanation and each.fix
        why = f". {each.explanation} To do: {each.fix}" if known else f": {each.reason}"
        entries.setdefault(why, []).append(each.entry or "an entry")
    return [
        f"the engine rejected {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}{why}"
        for why, names in entries.items()
    ]


def rejected(seen: Seen) -> dict[str, str]:
    """The entries that the engine did not take, and that are to blame themselves, with its reason."""
    return {each.entry: each.reason for each in seen.rejections if each.entry is not None and each.of_entry}


def death(ended: Ended, seen: Seen | None) -> Death:
    """How an engine ended, as far as its exit status and its log tell."""
    signals = () if ended.signal is None else (ended.signal,)
    if seen is None:
        return Death(signals, (), None, out_of_memory=False, ready=False)
    signals = (*signals, *seen.died_of)
    failures = [failure for failure in seen.failures if not failure.stopping and not _interrupted(failure)]
    if seen.ready_at is not None:
        failures = [failure for failure in failures if failure.at >= seen.ready_at]
    return Death(
        signals,
        tuple(path for failure in failures for path in _named(failure, ready=seen.ready_at is not None)),
        failures[0].exception if failures else None,
        out_of_memory=bool(seen.out_of_memory),
        ready=seen.ready_at is not None,
    )


def _interrupted(failure: Failure) -> bool:
    """Whether it was told to end: the frames say where it happened to be."""
    return (failure.exception or "").startswith(("KeyboardInterrupt", "SystemExit"))


def _named(failure: Failure, *, ready: bool) -> Sequence[str]:
    """The paths that a traceback is about. While an engine serves, compiled code is in the frames of whatever goes
    wrong; then only what the exceptions say counts."""
    if not ready:
        return failure.paths
    said = (words for words in (failure.exception, *failure.causes) if words is not None)
    return [path for words in said for path in paths_in(words)]
