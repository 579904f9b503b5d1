"""Explaining a start: why it was not warm, or would not be, from its factors and its record. Nothing is read here.

A reason is told by what happened first: a store that could not be asked, captures that may not be used, a nearest
artifact that differs, an engine that did not take what it was given.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from cachemgr.capture import Launch, Verdict
from cachemgr.domains.scrub import MARK
from cachemgr.key import Comparison, Difference, Factor, Key, Result, compare, folder
from cachemgr.meanings import debug_adds_asserts, meaning, unread

Word = Literal[
    "denied",
    "throttled",
    "unreachable",
    "deadline",
    "untrusted",
    "quarantined",
    "damaged",
    "absent",
    "guard",
    "blind",
    "differs",
    "relation",
    "rejected",
    "not restored",
    "inert",
    "added",
    "unknown",
]


class Miss(msgspec.Struct, frozen=True):
    """Why a start was not wholly warm, in one word, and the factor that is named first, if one is."""

    word: Word
    factor: str | None = None


class Case(msgspec.Struct, frozen=True):
    """A start, real or only asked about."""

    key: Key
    result: Result
    artifact: Key | None
    differs: tuple[Difference, ...]
    factors: tuple[Factor, ...] = ()
    reasons: tuple[str, ...] = ()
    """As a launch record has them."""
    errors: dict[str, int] = {}
    verdict: Verdict | None = None
    """None before a start."""
    restored: int = 0
    """Files that were put into place or lay there."""
    added: int = 0
    rejected: tuple[tuple[str, str], ...] = ()
    """Entries that the engine did not take, each with its words."""


def case_of(launch: Launch) -> Case:
    """The case of a launch that is recorded."""
    entries = () if launch.observed is None else launch.observed.entries
    return Case(
        launch.key,
        launch.result,
        launch.artifact,
        launch.differs,
        launch.factors,
        launch.reasons,
        launch.errors,
        launch.verdict,
        launch.restored_files + launch.present_files,
        sum(launch.added.values()),
        tuple((entry.name, entry.reason or "no reason was said") for entry in entries if entry.verdict == "rejected"),
    )


def miss(launch: Launch) -> Miss | None:
    """Why a launch was not wholly warm; None for one that was."""
    return None if launch.verdict == "used" else reason(case_of(launch))


def reason(case: Case) -> Miss | None:
    """Why a case is not wholly warm; None where it is or nothing speaks against it."""
    if case.verdict == "used":
        return None
    if case.result == "exact":
        return _of_exact(case)
    failed = _failure(case)
    if failed is not None:
        return Miss(failed)
    if case.differs:
        first = case.differs[0]
        return Miss("differs" if first.role == "match" else first.role, first.factor)
    return Miss("absent" if case.artifact is None else "relation")


_UNREADABLE = "unreadable capture: cannot read `artifacts/"


def _failure(case: Case) -> Word | None:
    """What kept an exact artifact from being found, if anything did."""
    errors = case.errors
    other = any(name.startswith("mirror ") and name != "mirror absent" for name in errors)
    holds: tuple[tuple[Word, object], ...] = (
        ("denied", errors.get("mirror denied") or _told(case, f"{_UNREADABLE}{folder(case.key)}/")),
        ("throttled", errors.get("mirror throttled")),
        ("deadline", errors.get("deadline") or errors.get("store left alone")),
        ("unreachable", other),
        ("untrusted", _told(case, "untrusted capture: ") or errors.get("levels ignored")),
        ("quarantined", _told(case, " in quarantine on this host")),
        ("unreachable", errors.get("looking up") or errors.get("opening the store")),
        ("damaged", _told(case, "damaged capture: ")),
    )
    return next((word for word, held in holds if held), None)


def _told(case: Case, words: str) -> bool:
    return any(words in each for each in case.reasons)


def _of_exact(case: Case) -> Miss | None:
    if case.rejected:
        return Miss("rejected")
    if case.verdict == "inert":
        return Miss("inert")
    if case.verdict == "cold":
        return Miss("deadline" if _told(case, "deadline") or case.errors.get("deadline") else "not restored")
    if case.verdict == "partly used":
        return Miss("added")
    return Miss("unknown") if case.verdict == "unknown" else None


class Told(msgspec.Struct, frozen=True):
    """One differing factor, explained."""

    factor: str
    wanted: str | None
    """The value of this start; None is unknown or absent."""
    stored: str | None
    """The value of the artifact."""
    role: str
    means: str
    harmless: str
    """Why the difference changes no compiled code, where that is known; empty where it may change it."""
    fix: str
    """What to type or to change."""


class Account(msgspec.Struct, frozen=True):
    """Why a start was or would be as warm as it is."""

    key: Key
    result: Result
    verdict: Verdict | None
    artifact: Key | None
    """The one that was used, or else the nearest one."""
    word: Word | None
    """None for a start that is wholly warm."""
    says: str
    """The result in plain words."""
    fix: str
    differs: tuple[Told, ...] = ()
    engine: tuple[str, ...] = ()
    """What the records of the engine itself say."""
    launch: str | None = None
    host: str | None = None
    started: str | None = None


def account(case: Case, *, nearest: Sequence[Factor]) -> Account:
    """The explanation of a case. `nearest` are the factors of the artifact that it is compared with, where they are
    known; otherwise the differences that were recorded speak."""
    differs = case.differs
    if nearest and case.factors:
        differs = compare(case.factors, nearest).differs
    # All that only one of two engines has would differ as well.
    differs = tuple(each for each in differs if each.factor == "engine") or differs
    found = reason(case)
    word = None if found is None else found.word
    says, fix = _sentence(case, word)
    told = explained(differs, case.factors)
    if not fix and told and word in {"guard", "blind", "differs"}:
        fix = told[0].fix
    return Account(case.key, case.result, case.verdict, case.artifact, word, says, fix, told, _rejections(case))


def of_launch(launch: Launch, *, nearest: Sequence[Factor] = (), engine: Sequence[str] = ()) -> Account:
    """The explanation of a recorded launch."""
    told = account(case_of(launch), nearest=nearest)
    return msgspec.structs.replace(
        told,
        launch=launch.launch,
        host=launch.host,
        started=launch.started,
        engine=(*told.engine, *engine),
    )


def explained(differs: Sequence[Difference], factors: Sequence[Factor] = ()) -> tuple[Told, ...]:
    """Each of these differences with what it means. `factors` are all of this start, which some meanings depend on."""
    names = {difference.factor for difference in differs}
    torch = next((factor.value for factor in factors if factor.name == "torch"), None)
    return tuple(_explained(difference, names, torch) for difference in differs)


def _explained(difference: Difference, names: set[str], torch: str | None) -> Told:
    row = meaning(difference.factor)
    harmless = row.harmless
    if difference.factor == "model" and "model.config" not in names:
        harmless = "the configuration files are the same"
    if difference.factor == "env.VLLM_LOGGING_LEVEL" and not debug_adds_asserts(torch):
        harmless = "this torch compiles the same with it"
    name = difference.factor.removeprefix("env.")
    fix = row.fix.format(name=name) if row.fix and _typed(name) else _usual_fix(difference)
    return Told(difference.factor, difference.wanted, difference.stored, difference.role, row.means, harmless, fix)


def _usual_fix(difference: Difference) -> str:
    """Set what the artifact has, where it can be read."""
    stored = difference.stored
    if difference.factor.startswith("env.") and _typed(difference.factor.removeprefix("env.")):
        name = difference.factor.removeprefix("env.")
        if stored is None:
            return f"unset {name}"
        if not _readable(stored):
            return f"set {name} as it was where the artifact was made"
        return f"export {name}={shlex.quote(stored)}"
    if difference.factor.startswith("flags.") and _typed(difference.factor.removeprefix("flags.")):
        return _flag_fix(difference.factor.removeprefix("flags."), stored)
    return "capture once with this one: both stay in the store"


def _typed(name: str) -> bool:
    """Whether a name may be a part of what somebody is told to type: it may come from a bucket that others write."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) is not None


def _flag_fix(name: str, stored: str | None) -> str:
    """A whole flag that is on or off takes no value; a part of a dotted one does."""
    if stored is None:
        return f"leave out --{name}"
    if not _readable(stored):
        return f"give --{name} as it was where the artifact was made"
    if stored in {"true", "false"} and "." not in name:
        return f"--{name}" if stored == "true" else f"--no-{name}"
    return f"--{name} {shlex.quote(stored)}"


def _readable(value: str) -> bool:
    """Whether a value is one that can be typed: neither sealed nor a word of ours for `it was given`."""
    return not value.startswith(("sealed:", "sha256:")) and value not in {"set", "given"}


_SENTENCES: dict[Word | None, tuple[str, str]] = {
    None: ("an exact artifact is there", ""),
    "denied": (
        "a store denied access, so nobody knows whether it has an artifact: this is no miss",
        "cachemgr doctor says which permission is missing",
    ),
    "throttled": (
        "the mirror asked to slow down, and no answer came in time: this is no miss",
        "start fewer machines at once, or put a copy nearer: cachemgr pull",
    ),
    "unreachable": (
        "a store could not be read, so nobody knows whether it has an artifact: this is no miss",
        "cachemgr doctor",
    ),
    "deadline": (
        "the time that a start may be delayed was over before everything was in place",
        "CACHEMGR_DEADLINE=60 gives it more, `cachemgr pull` beforehand less to do",
    ),
    "untrusted": (
        "captures were there, and nobody who is trusted answers for them",
        "sign them (`cachemgr sign`), or set CACHEMGR_TRUSTED_KEYS to who did",
    ),
    "quarantined": (
        "this host does not use the captures of this key: an engine failed with them here",
        "`cachemgr show KEY` has the reason; `cachemgr rm KEY` lets the next start make it anew",
    ),
    "damaged": (
        "the captures that were there are damaged; the next start that compiles publishes whole ones",
        "cachemgr rm KEY",
    ),
    "absent": ("no artifact is like it: it is the first of its kind", "start it once, and the next one is warm"),
    "guard": ("the nearest artifact cannot be used: what must be equal differs", ""),
    "blind": (
        "kernels of the nearest artifact are reused and graphs are not: what the engine cannot tell apart differs",
        "",
    ),
    "differs": ("the nearest artifact is reused as far as it is equal: something that shapes compilation differs", ""),
    "relation": ("the nearest artifact needs something that this host does not have", "cachemgr doctor"),
    "rejected": ("an exact artifact was restored, and the engine rejected what it was given", ""),
    "not restored": (
        "an exact artifact was there, and nothing of it was put into place",
        "the report of that start says why; cachemgr doctor",
    ),
    "inert": (
        "files were restored and the engine read none of them: it looked elsewhere, or its own key differs",
        "unset cache directories that are set by hand; cachemgr doctor -- CMD",
    ),
    "added": ("an exact artifact was used, and the start compiled something beside it", ""),
    "unknown": (
        "nobody knows whether what was restored was read: the file system keeps no access times, or others forgot them",
        "mount the live directory with relatime",
    ),
}


def _sentence(case: Case, word: Word | None) -> tuple[str, str]:
    says, fix = _SENTENCES[word]
    unread_says, unread_fix = unread(case.factors)
    if word in {"absent", "guard"} and unread_says:
        return unread_says, unread_fix
    if word == "relation" and case.reasons:
        says = f"{says}: {case.reasons[0]}"
    if word == "added" and case.added:
        says = f"{says}: {case.added:,} files, which its next artifact has"
    if word is None and case.verdict is not None:
        says = "it was warm: everything that it compiled before was restored, and the engine used it"
    if word in {"differs", "blind"} and case.verdict == "inert":
        says = f"{says}; the engine read none of what was restored"
    return says, fix.replace("KEY", case.key[:12])


def _rejections(case: Case) -> tuple[str, ...]:
    return tuple(f"the engine rejected {name}: {said}" for name, said in case.rejected)


def compared(ours: Sequence[Factor], theirs: Sequence[Factor]) -> tuple[Comparison, tuple[Told, ...]]:
    """Two sets of factors, of which the first is the wanted one, and each difference explained."""
    found = compare(ours, theirs)
    return found, explained(found.differs, ours)


class Engine(msgspec.Struct, frozen=True):
    """What two notes of vLLM about its own key have different (`cache_key_factors.json`)."""

    variables: tuple[str, ...] = ()
    """Names of variables whose values differ."""
    digests: tuple[str, ...] = ()
    """Which of its other digests differ: `config`, `code`, `compiler`."""


_DIGESTS = {"config_hash": "config", "code_hash": "code", "compiler_hash": "compiler"}


def compare_notes(ours: Mapping[str, object], theirs: Mapping[str, object]) -> Engine:
    """What differs between two notes. Values are not told: they are raw, and may be secret."""
    mine, other = (note.get("env") for note in (ours, theirs))
    variables: tuple[str, ...] = ()
    if isinstance(mine, dict) and isinstance(other, dict):
        variables = tuple(
            sorted(
                str(name)
                for name in mine.keys() | other.keys()
                if mine.get(name) != other.get(name) and MARK not in (mine.get(name), other.get(name))
            )
        )
    return Engine(variables, tuple(word for name, word in _DIGESTS.items() if ours.get(name) != theirs.get(name)))


def engine_says(engine: Engine, differs: Sequence[Difference]) -> tuple[str, ...]:
    """What the notes of the engine add: which variable, and of its digests which factor of ours is behind each. Nothing
    where they are equal."""
    told = []
    if engine.variables:
        told.append(f"vLLM hashed other values of {', '.join(engine.variables)}")
    if "config" in engine.digests:
        behind = [
            each.factor for each in differs if each.factor.startswith(("flags.", "model")) and each.role == "match"
        ]
        told.append(
            f"vLLM's digest of its configuration differs, by {', '.join(behind)}"
            if behind
            else "vLLM's digest of its configuration differs, and nobody can say by what: only digests are known. "
            "Compare the two command lines, and what fills --additional-config"
        )
    if "code" in engine.digests:
        told.append("vLLM's digest of the model's code differs: other sources of the model were traced")
    if "compiler" in engine.digests:
        behind = [each.factor for each in differs if each.factor in {"torch", "triton", "cuda", "device.name"}]
        by = f", by {', '.join(behind)}" if behind else ", and only digests are known"
        told.append(f"vLLM's digest of torch's compiler differs{by}")
    return tuple(told)
