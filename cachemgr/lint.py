"""Linting a launch: variables and settings that would fragment its cache, poison it or switch it off, before it starts.

What an engine hashes differs by its version, and `factors/vllm/facts.json` has it, so the same variable may be a
hazard with one release and none with the next.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from cachemgr.factors.environment import is_service_link
from cachemgr.factors.profile import Profile
from cachemgr.factors.vllm.facts import Facts, facts_for
from cachemgr.factors.vllm.model import HUB_TRUE
from cachemgr.key import Factor
from cachemgr.meanings import debug_adds_asserts, meaning, unread
from cachemgr.sensitive import is_secret

Kind = Literal["fragments", "poisons", "disables", "breaks"]


class Hazard(msgspec.Struct, frozen=True):
    """One thing that stands in the way of a warm start.

    `fragments`: equal launches get different keys; `poisons`: an engine may take an entry that is not its own;
    `disables`: nothing is reused; `breaks`: no engine starts.
    """

    kind: Kind
    about: str
    """A variable or a flag."""
    what: str
    fix: str


CHANGERS = {
    "CI": "torch compiles otherwise where it is set (`_functorch/config.py`)",
    "CXX": "it is in Inductor's key",
    "HF_HUB_OFFLINE": "with it vLLM hashes the path of a model's snapshot instead of its name",
    "VLLM_API_KEY": "vLLM up to 0.28 hashes it, so each key divides the cache",
}
"""Variables that divide the cache where one machine has them and another has not, with the reason."""
DISABLERS = {
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "is set, so no start finds what another compiled",
    "VLLM_DISABLE_COMPILE_CACHE": "is set, so vLLM compiles its graphs at every start",
}
"""Variables that switch a cache off."""
EVERYWHERE = "set it on all machines or on none"
_ADDRESS = re.compile(r"\w+_(HOST|HOSTNAME|IP|PORT|ADDR|ADDRESS)|VLLM_RAY_BUNDLE_INDICES")
_SHARED = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "DG_JIT_CACHE_DIR")
PORT = "VLLM_PORT"


def hazards(environ: Mapping[str, str], profile: Profile) -> list[Hazard]:
    """What `environ` and the flags of a launch have that costs it its cache. `environ` is that of the user."""
    found = [*disabled(environ), *links(environ)]
    if profile.engine == "vllm":
        facts = facts_for(profile.engine_version)
        found += [*_hashed(environ, profile.factors, facts), *_of_flags(profile, facts)]
    found += [*_of_torch(environ, profile), *unreadable(profile), *_hidden(profile)]
    return found


def disabled(environ: Mapping[str, str]) -> Iterator[Hazard]:
    """Caches that are switched off."""
    for name, what in DISABLERS.items():
        if environ.get(name, "") not in {"", "0"}:
            yield Hazard("disables", name, what, f"unset {name}")


def links(environ: Mapping[str, str]) -> Iterator[Hazard]:
    """A service named `vllm` makes the kubelet set VLLM_PORT to a URI (0.26-0.33 `envs.py`, get_vllm_port raises)."""
    port = environ.get(PORT, "")
    if is_service_link(PORT, port):
        fix = "set enableServiceLinks: false in the pod, or rename the service"
        yield Hazard("breaks", PORT, f"is `{port}`, set for a service named `vllm`; no engine starts with it", fix)


def _hashed(environ: Mapping[str, str], factors: tuple[Factor, ...], facts: Facts) -> Iterator[Hazard]:
    """Variables that this version hashes, or does not know, although they differ from machine to machine."""
    counted = {factor.name.removeprefix("env.") for factor in factors if factor.name.startswith("env.")}
    version = f"vLLM {facts.version}"
    for name in sorted(counted):
        row = meaning(f"env.{name}")
        fix = row.fix.format(name=name) or f"unset {name}, or set it alike on all machines"
        if name in {"VLLM_CONFIG_ROOT", "VLLM_XLA_CACHE_PATH"}:
            yield Hazard("fragments", name, f"is hashed by {version} as it is spelled, and is a place", fix)
        elif _ADDRESS.fullmatch(name) and facts.variables.get(name):
            yield Hazard("fragments", name, f"is hashed by {version}, and differs from pod to pod", fix)
        elif name in {"VLLM_PLUGINS", "VLLM_API_KEY"}:
            yield Hazard("fragments", name, f"is hashed by {version}", fix)
        elif name.startswith("VLLM_") and name in environ and name not in facts.variables and not is_secret(name):
            yield Hazard("fragments", name, f"is not known to {version}, so it counts, to be safe", f"unset {name}")


def _of_torch(environ: Mapping[str, str], profile: Profile) -> Iterator[Hazard]:
    for name in ("CI", "CXX"):
        if environ.get(name) and any(factor.name == f"env.{name}" for factor in profile.factors):
            yield Hazard("fragments", name, f"is set: {CHANGERS[name]}", EVERYWHERE)
    if profile.engine == "vllm" and environ.get("HF_HUB_OFFLINE", "").upper() in HUB_TRUE:
        yield Hazard("fragments", "HF_HUB_OFFLINE", f"is set: {CHANGERS['HF_HUB_OFFLINE']}", EVERYWHERE)
    level = environ.get("VLLM_LOGGING_LEVEL", "").upper()
    torch = next((factor.value for factor in profile.factors if factor.name == "torch"), None)
    if profile.engine == "vllm" and level == "DEBUG":
        asserts = debug_adds_asserts(torch)
        what = "is DEBUG, which adds asserts to what is compiled" if asserts else "is DEBUG, which is a key of its own"
        yield Hazard("fragments", "VLLM_LOGGING_LEVEL", what, "unset VLLM_LOGGING_LEVEL")
    for name in _SHARED:
        if environ.get(name):
            what = "is set, so launches of all models share that directory, and cachemgr cannot give each its own"
            yield Hazard("poisons", name, what, f"unset {name}: cachemgr sets it for each launch")


def _of_flags(profile: Profile, facts: Facts) -> Iterator[Hazard]:
    version = f"vLLM {facts.version}"
    for factor in profile.factors:
        name, value = factor.name, factor.value or ""
        if name.startswith("flags.additional-config"):
            if value.startswith("sealed:") or _looks_random(value):
                what = "is hashed with all of --additional-config: an id of one run or worker makes each start cold"
                yield Hazard("fragments", _flag(name), what, "hand ids over in a variable, not in --additional-config")
        elif name == "flags.compilation-config.cache_dir":
            what = "names a directory of which vLLM takes whatever lies there, whoever compiled it"
            yield Hazard("poisons", _flag(name), what, "leave it out: cachemgr gives each launch its own")
        elif name in {"flags.unknown", "flags.config"}:
            yield Hazard("fragments", "flags", meaning(name).means, "correct or leave out what this vLLM does not know")
        elif factor.role == "blind" and name.startswith("flags.speculative-config"):
            what = f"is left out of the hash of {version}: without cachemgr it takes the entry of another value"
            yield Hazard("poisons", _flag(name), what, "keep one VLLM_CACHE_ROOT a value, or start by cachemgr")
        elif name == "model" and value.startswith(("/", ".", "~")):
            what = "is a path, which vLLM hashes as it is spelled"
            yield Hazard("fragments", "model", what, "mount the model at the same path on all machines")


def _flag(factor: str) -> str:
    return "--" + factor.removeprefix("flags.")


_RANDOM = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{12,}|\d{9,}", re.IGNORECASE)


def _looks_random(value: str) -> bool:
    """A UUID, a long hexadecimal or decimal number."""
    return _RANDOM.search(value) is not None


def _hidden(profile: Profile) -> Iterator[Hazard]:
    """An engine that a command starts where nobody looks (`factors/hidden.py`)."""
    if profile.engine == "torch":
        for note in profile.notes:
            what, _, fix = note.partition(": ")
            yield Hazard("disables", "command", what, fix)


def unreadable(profile: Profile) -> Iterator[Hazard]:
    """The guards that could not be read."""
    if profile.unknown_guards:
        what, fix = unread(profile.factors)
        yield Hazard("disables", "command", what, fix)
