"""What an engine's log means for a launch: an observation for the record, reasons for people, evidence for blame."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from cachemgr.blame import Death
from cachemgr.capture import Entry, EntryVerdict, Observation
from cachemgr.child import Ended
from cachemgr.desk import Facts
from cachemgr.seen import AotEntry, CompileDirectory, Seen
from cachemgr.tracebacks import Failure, paths_in


def joined(seen: Seen, facts: Facts, ready_at: float | None) -> Seen:
    """What a log says, with what the engine's processes said themselves: a log may be configured away.

    `ready_at` is when all engines of this node had said that they are.
    """
    known = {entry.path for entry in seen.aot_entries}
    silent = [
        AotEntry(path, None, None, None, loaded=loaded) for path, loaded in facts.looked_up.items() if path not in known
    ]
    return msgspec.structs.replace(
        seen,
        aot_entries=(*seen.aot_entries, *silent),
        engine_ready_at=ready_at if seen.engine_ready_at is None else seen.engine_ready_at,
    )


def desk_reasons(facts: Facts) -> list[str]:
    """What a person should know about hooks: what a version has no place for, and what did not work."""
    told = [f"this vLLM has no place for the hook `{name}`: entries come by key only" for name in facts.lacking]
    told += [f"a hook failed: {name}" for name in facts.failed]
    if facts.dropped:
        told.append(f"{facts.dropped} messages of the engine's processes were dropped")
    if facts.engines_more:
        told.append(f"{facts.engines_more} more engines in one process: they use the directories of the first one")
    return told


def count_lost(errors: Counter[str], facts: Facts) -> None:
    """Count what hooks could not do or tell under names of its own; a launch is told of more than once."""
    for name, count in (("facts dropped", facts.dropped), ("hooks failed", len(facts.failed))):
        if count:
            errors[name] = count


def observation(seen: Seen, facts: Facts | None = None) -> Observation:
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
        compile_directories=tuple(sorted(map(_directory, seen.compile_directories))),
        compile_ranges={name: round(seconds, 3) for name, seconds in seen.compile_ranges.items()},
        autotune=seen.autotune,
        entries=tuple(_entry(entry) for entry in seen.aot_entries),
        missing=seen.missing,
        counters={} if facts is None else facts.counters,
        processes=0 if facts is None else facts.processes,
    )


def _entry(entry: AotEntry) -> Entry:
    verdicts: dict[str, EntryVerdict] = {"loaded": "loaded", "rejected": "rejected"}
    return Entry(_name(entry) or entry.path, verdicts.get(entry.verdict, "compiled"), entry.rejected)


def _directory(directory: CompileDirectory) -> str:
    return directory.path if directory.entry is None else _name(directory)


def _name(place: AotEntry | CompileDirectory) -> str:
    """The engine's own name of one place of one rank; it has neither a root nor a host in it."""
    parts = (place.entry, place.tag, None if place.rank is None else str(place.rank))
    return "/".join(part for part in parts if part)


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


def unseen_end(seen: Seen | None) -> Ended | None:
    """The end of an engine whose exit code nobody could read: a failure, where it said so and had not been ready."""
    failed = seen is not None and seen.ready_at is None and bool(seen.failures or seen.died_of)
    return Ended(1, None, left_behind=False) if failed else None


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
