"""Keys: what was compiled, as a list of named factors.

A wrong key silently hands an engine somebody else's machine code, so this module is pure: factors in, key and
differences out. Where factors come from is `cachemgr.factors`; what a difference means for a restore is decided here,
once, by roles:

`guard`  must be equal for any reuse (versions, device, platform). A guard that cannot be read is unknown, and an
         unknown guard equals nothing, not even another unknown.
`match`  shapes compilation, and the engine's own key contains it: a difference makes the artifact near, not wrong.
`blind`  shapes compilation, but the engine leaves it out of its own key: the engine would take a wrong entry for the
         right one, so torch trees do not cross such a difference.

Relations are facts that are compared, not equated (a driver must be new enough, a CPU must have at least these
features). They are recorded per capture and tested at look-up; they are never part of a key.
"""

import json
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, NewType

import msgspec

from cachemgr import digest
from cachemgr.errors import UsageError

Key = NewType("Key", str)
"""`k1:` and 32 lower-case hex digits."""

Role = Literal["guard", "match", "blind"]
Result = Literal["exact", "near", "none"]

SCHEME = "k1"
_KEY = re.compile(r"k1:[0-9a-f]{32}")
_ROLE_ORDER: dict[Role, int] = {"guard": 0, "blind": 1, "match": 2}
_NO_ORDINALS: Mapping[str, int] = MappingProxyType({})


class Factor(msgspec.Struct, frozen=True, order=True):
    """One named ingredient of a key. `value` None means unknown: it could not be read."""

    name: str
    value: str | None
    role: Role


class Difference(msgspec.Struct, frozen=True):
    """One factor in which the wanted and the stored set differ; None is unknown or absent."""

    factor: str
    wanted: str | None
    stored: str | None
    role: Role

    def __str__(self) -> str:
        """In one line, for people."""
        return f"{self.factor} {self.wanted}≠{self.stored}"


class Comparison(msgspec.Struct, frozen=True):
    """What a stored set of factors is worth to a launch that wants another set."""

    result: Result
    differs: tuple[Difference, ...]

    @property
    def blind_equal(self) -> bool:
        """Whether the engine's own key can be trusted to pick correctly among restored torch trees."""
        return not any(difference.role == "blind" for difference in self.differs)


class Relations(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts that a capture needs of its host, and that a host has to offer. Empty means not needed or not known."""

    cpu_features: tuple[str, ...] = ()
    """Instruction sets that compiled host code may use, sorted."""
    cuda_runtime: str | None = None
    """CUDA version that produced the device code, such as `13.0`."""
    driver_cuda: str | None = None
    """Newest CUDA version that the driver of a host can run. Of a capture: the driver under which it was made."""
    ordinals: dict[str, int] = {}
    """Visible device ordinal of each rank, by rank directory name."""


class Broken(msgspec.Struct, frozen=True):
    """A relation that does not hold on this host."""

    relation: str
    recorded: str
    host: str

    def __str__(self) -> str:
        """In one line, for people."""
        return f"{self.relation} {self.recorded}: {self.host}"


def derive(factors: Iterable[Factor]) -> Key:
    """The key of a set of factors.

    Only names and values count, so that a release of cachemgr that learns a better role for a factor keeps its keys.

    Raises:
        UsageError: two factors share a name.
    """
    pairs = sorted((factor.name, factor.value) for factor in _checked(factors))
    canonical = json.dumps(pairs, ensure_ascii=True, separators=(",", ":"))
    return Key(f"{SCHEME}:{digest.fingerprint(canonical.encode())}")


def _checked(factors: Iterable[Factor]) -> list[Factor]:
    seen: dict[str, Factor] = {}
    for factor in factors:
        if factor.name in seen:
            raise UsageError(f"factor `{factor.name}` is given twice")
        seen[factor.name] = factor
    return list(seen.values())


def is_key(text: str) -> bool:
    """Whether `text` is spelled like a whole key."""
    return _KEY.fullmatch(text) is not None


def folder(key: Key) -> str:
    """`key` as a file name: ninja, PATH-like variables and `host:path` tools split at a colon."""
    return key.replace(":", "-")


def from_folder(name: str) -> Key | None:
    """The key that a file name spells, or None when it is not one of ours."""
    key = name.replace("-", ":", 1)
    return Key(key) if is_key(key) else None


def compare(wanted: Iterable[Factor], stored: Iterable[Factor]) -> Comparison:
    """What the artifact with the factors `stored` is worth to a launch with the factors `wanted`."""
    ours = {factor.name: factor for factor in wanted}
    theirs = {factor.name: factor for factor in stored}
    # What is the same in both, and known, is passed over first: it is nearly everything of many artifacts.
    both = set(ours.values()) & set(theirs.values())
    same = {factor.name for factor in both if factor.value is not None}
    differs = [
        difference
        for name in (ours.keys() | theirs.keys()) - same
        if (difference := _difference(ours.get(name), theirs.get(name))) is not None
    ]
    differs.sort(key=lambda difference: (_ROLE_ORDER[difference.role], difference.factor))
    return Comparison(_result(differs), tuple(differs))


def by_role(factors: Iterable[Factor]) -> list[Factor]:
    """Factors as people read them: guards first, then by name."""
    return sorted(factors, key=lambda factor: (_ROLE_ORDER[factor.role], factor.name))


def _difference(ours: Factor | None, theirs: Factor | None) -> Difference | None:
    present = ours or theirs
    assert present is not None, "a name comes from one of the two sets"
    role = _stricter(ours or present, theirs or present)
    equal = ours is not None and theirs is not None and ours.value == theirs.value
    if equal and (present.value is not None or role != "guard"):
        return None
    return Difference(present.name, ours.value if ours else None, theirs.value if theirs else None, role)


def _stricter(ours: Factor, theirs: Factor) -> Role:
    """Two releases may disagree about a role; the one that refuses more is safe."""
    return min(ours.role, theirs.role, key=_ROLE_ORDER.__getitem__)


def _result(differs: list[Difference]) -> Result:
    if not differs:
        return "exact"
    return "none" if any(difference.role == "guard" for difference in differs) else "near"


def broken(recorded: Relations, host: Relations) -> tuple[Broken, ...]:
    """The relations of a capture that do not hold on `host`. What the host cannot tell does not hold."""
    found = []
    missing = set(recorded.cpu_features) - set(host.cpu_features)
    if missing:
        found.append(Broken("cpu_features", " ".join(sorted(missing)), "missing"))
    cuda = _needed_cuda(recorded)
    if cuda is not None and _version(host.driver_cuda) < _version(cuda):
        found.append(Broken("cuda_runtime", cuda, f"driver runs {host.driver_cuda or 'unknown'}"))
    return tuple(found)


def _needed_cuda(recorded: Relations) -> str | None:
    """The CUDA version that a driver must be able to run: that of the runtime, or less where the capture was made under
    an older driver and so has run there (CUDA Compatibility guide, minor version compatibility)."""
    runtime, driver = recorded.cuda_runtime, recorded.driver_cuda
    if runtime is None or driver is None:
        return runtime
    return min(runtime, driver, key=_version)


def misplaced(recorded: Relations, host: Relations) -> tuple[Broken, ...]:
    """The ranks that a capture was made for on another device ordinal than they have on `host`.

    vLLM's torch trees hold the ordinal in their code, and nobody checks it (vLLM 0.26-0.33, `v1/worker/gpu_worker.py`);
    kernels do not. Ranks that only one of the two has (other nodes, another world) say nothing; where one side knows
    no ordinals at all, nobody knows.
    """
    if bool(recorded.ordinals) != bool(host.ordinals):
        return (Broken("device ordinals", _ordinals(recorded), _ordinals(host)),)
    return tuple(
        Broken(f"device ordinal of {rank}", str(recorded.ordinals[rank]), str(host.ordinals[rank]))
        for rank in sorted(recorded.ordinals.keys() & host.ordinals.keys())
        if recorded.ordinals[rank] != host.ordinals[rank]
    )


def _ordinals(relations: Relations) -> str:
    return " ".join(f"{rank}:{ordinal}" for rank, ordinal in sorted(relations.ordinals.items())) or "unknown"


def sight(factors: Iterable[Factor], ordinals: Mapping[str, int] = _NO_ORDINALS) -> str:
    """What an engine cannot see in its own key, as one short name: equal for launches that may share its entries.

    Guards are in it as well, because not every engine's name holds all of them, and so are ranks on another device than
    the one of their number (`ordinals`, by rank directory name; see `misplaced`): launches that differ in their worlds
    only share as a rule. Empty where a guard is unknown: such a launch shares with nobody.
    """
    kept = [factor for factor in factors if factor.role != "match"]
    if any(factor.role == "guard" and factor.value is None for factor in kept):
        return ""
    pairs: list[tuple[str, str | None]] = [(factor.name, factor.value) for factor in kept]
    pairs += [(rank, str(ordinal)) for rank, ordinal in ordinals.items() if rank.split("_")[1:2] != [str(ordinal)]]
    canonical = json.dumps(sorted(pairs), separators=(",", ":"))
    return digest.fingerprint(canonical.encode())


def guard_print(factors: Iterable[Factor]) -> str:
    """One short name for the guards among `factors`: equal where captures may be reused. Empty where one is unknown,
    which equals nothing."""
    guards = sorted((factor.name, factor.value) for factor in factors if factor.role == "guard")
    if any(value is None for _name, value in guards):
        return ""
    return digest.fingerprint(json.dumps(guards, separators=(",", ":")).encode())


def _version(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text or ""))
