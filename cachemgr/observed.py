"""What an engine's log means for a launch: an observation for the record, reasons for people, evidence for blame."""

from cachemgr.blame import Death
from cachemgr.capture import Entry, EntryVerdict, Observation
from cachemgr.child import Ended
from cachemgr.engine_log import AotEntry, Seen


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
    """What somebody should do about a rejection."""
    return [f"{each.explanation} {each.fix}" for each in seen.rejections if each.explanation and each.fix]


def rejected(seen: Seen) -> dict[str, str]:
    """The entries that the engine did not take, and that are to blame themselves, with its reason."""
    return {each.entry: each.reason for each in seen.rejections if each.entry is not None and each.of_entry}


def death(ended: Ended, seen: Seen | None) -> Death:
    """How an engine ended, as far as its exit status and its log tell."""
    signals = () if ended.signal is None else (ended.signal,)
    if seen is None:
        return Death(signals, (), None, out_of_memory=False, ready=False)
    failures = [failure for failure in seen.failures if not failure.stopping]
    return Death(
        signals,
        tuple(path for failure in failures for path in failure.paths),
        failures[0].exception if failures else None,
        out_of_memory=bool(seen.out_of_memory),
        ready=seen.ready_at is not None,
    )
