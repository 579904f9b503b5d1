"""Targets: what one machine is to a key, as a document that another machine can derive keys with.

A builder has no GPU, another CPU, another driver, and `CI=true`; none of that may be in a key of what it bakes. A
target is written on a machine that serves, in the environment that serves, and has everything of it that a key is made
of but the command: guards, relations, packages, variables. Nothing is invented: what could not be read is unknown.

Values of variables that nobody knows are sealed in it, as they are in a manifest; those of secrets are not in it.
"""

import codecs
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cachemgr import sizes
from cachemgr.errors import UsageError
from cachemgr.factors import environment, guards
from cachemgr.factors.guards import Platform
from cachemgr.factors.text import encodable
from cachemgr.factors.vllm import packages as vllm_packages
from cachemgr.factors.vllm import variables as vllm_variables
from cachemgr.factors.vllm.facts import facts_for
from cachemgr.factors.vllm.flags import Flags
from cachemgr.factors.vllm.model import Model
from cachemgr.factors.vllm.packages import Vllm
from cachemgr.key import Factor

SCHEMA = 1
_MOST_BYTES = 4 << 20
_PREFIX = "env."
# What decides where a model is found and how it is spelled (`factors/vllm/model.py`), and the shape of a world.
_PLACES = (
    "HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "VLLM_ASSETS_CACHE",
    "VLLM_USE_MODELSCOPE",
    "VLLM_MODEL_REDIRECT_PATH",
    "VLLM_DP_SIZE",
    "VLLM_DP_RANK",
    "VLLM_DP_RANK_LOCAL",
    "VLLM_DISABLE_COMPILE_CACHE",
    "OMP_NUM_THREADS",
)


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One machine, in the environment in which it serves."""

    schema: int
    host: str
    """For people."""
    made: str
    """RFC 3339, UTC."""
    platform: Platform
    engine: Vllm
    packages: tuple[Factor, ...]
    variables: dict[str, str]
    """Those that count and may be read by all, and those that say where models are."""
    sealed: dict[str, tuple[Factor, ...]]
    """By engine, the variables that count and whose values nobody should read."""
    models: dict[str, Model]
    """By `model_name`: models that are on that machine, and perhaps not on this one."""

    @property
    def label(self) -> str:
        """What people call it."""
        return self.platform.device_label

    @property
    def unknown(self) -> list[str]:
        """The guards that could not be read: nothing fits a machine that has any."""
        read = [*guards.guards(self.platform), *(self.packages if self.engine.version else ())]
        return [factor.name for factor in read if factor.role == "guard" and factor.value is None]

    def environ(self, own: Mapping[str, str]) -> dict[str, str]:
        """The variables of a command there that is given `own` ones beside those of the machine."""
        return {**self.variables, **own}

    def sealed_for(self, engine: str, own: Mapping[str, str]) -> list[Factor]:
        """The factors of sealed variables, without those that a command is given another value for."""
        return [factor for factor in self.sealed.get(engine, ()) if factor.name.removeprefix(_PREFIX) not in own]


def model_name(name: str, flags: Flags) -> str:
    """How a target calls a model that is asked for with these flags."""
    given, draft = flags.values, flags.draft
    more = [f"{flag}={given[flag]}" for flag in ("revision", "hf-config-path", "code-revision") if flag in given]
    if draft is not None:
        said = {"draft": draft.name, "draft-revision": draft.revision, "draft-code-revision": draft.code_revision}
        more += [f"{word}={value}" for word, value in said.items() if value is not None]
    return " ".join([name, *more])


def make(
    platform: Platform, environ: Mapping[str, str], cwd: Path, models: Mapping[str, Model], *, host: str, made: str
) -> Target:
    """The target that this machine is, whose Python and devices `platform` has read."""
    variables = environment.without_ours(environ)
    engine = vllm_packages.vllm(platform.path, cwd)
    found = {
        "torch": list(environment.factors(variables, device=platform.device.kind)),
        "vllm": serving_variables(variables, engine, platform.device.kind),
    }
    clear = {name: variables[name] for name in _PLACES if name in variables}
    for factor in (*found["torch"], *found["vllm"]):
        name = factor.name.removeprefix(_PREFIX)
        if name in variables and encodable(variables[name]) == factor.value:
            clear[name] = variables[name]
    sealed = {
        kind: tuple(factor for factor in factors if factor.name.removeprefix(_PREFIX) not in clear)
        for kind, factors in found.items()
    }
    packages = () if engine.version is None else vllm_packages.factors(engine, platform.path, cwd, variables)
    return Target(SCHEMA, host, made, platform, engine, tuple(packages), clear, sealed, dict(models))


def serving_variables(variables: Mapping[str, str], engine: Vllm, device: str | None) -> list[Factor]:
    """The variables that count for an engine of vLLM."""
    others = {name: value for name, value in variables.items() if not vllm_variables.claims(name)}
    return [
        *vllm_variables.factors(variables, facts_for(engine.version)),
        *environment.factors(others, device=device),
    ]


def encode(target: Target) -> bytes:
    """A target as people keep it: JSON."""
    return msgspec.json.format(msgspec.json.encode(target, order="sorted"), indent=2) + b"\n"


def load(path: Path) -> Target:
    """Read a target.

    Raises:
        UsageError: it cannot be read, or is none.
    """
    hint = "cachemgr target > FILE, on a machine that serves"
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"target {path} cannot be read: {error.strerror}", hint=hint) from None
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{path} is no target: it is larger than {sizes.spell(_MOST_BYTES)}", hint=hint)
    try:
        target = msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8), type=Target)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no target: {error}", hint=hint) from None
    if target.schema != SCHEMA:
        raise UsageError(f"target {path} has schema {target.schema}, this cachemgr reads {SCHEMA}", hint=hint)
    if unknown := target.unknown:
        raise UsageError(f"{', '.join(unknown)} could not be read where target {path} was made", hint=hint)
    return target
