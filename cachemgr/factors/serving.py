"""What a vLLM command would compile: its flags, model, environment and packages, as factors of one launch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from cachemgr.factors import environment, guards, program
from cachemgr.factors.guards import Platform
from cachemgr.factors.profile import Profile
from cachemgr.factors.vllm import flags as vllm_flags
from cachemgr.factors.vllm import model as vllm_model
from cachemgr.factors.vllm import packages as vllm_packages
from cachemgr.factors.vllm import variables as vllm_variables
from cachemgr.factors.vllm.command import EngineCommand
from cachemgr.factors.vllm.facts import Facts, facts_for
from cachemgr.factors.vllm.flags import Flags
from cachemgr.factors.vllm.model import Model
from cachemgr.factors.vllm.packages import Vllm
from cachemgr.factors.vllm.world import World, compile_expected, world
from cachemgr.key import Factor, Relations

_DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
"""What a command without a model serves (vLLM 0.26-0.33 `config/model.py`)."""


class Setting(msgspec.Struct, frozen=True):
    """Where a command will run."""

    argv: Sequence[str]
    """As it was given, with its wrappers."""
    environ: Mapping[str, str]
    """What the user set, without what an outer cachemgr did."""
    cwd: Path
    platform: Platform
    constants: Mapping[str, str]
    salt: str


def profile(command: EngineCommand, setting: Setting) -> Profile:
    """The profile of a command that starts an engine of vLLM."""
    path, cwd = setting.platform.path, setting.cwd
    engine = vllm_packages.vllm(path, cwd)
    facts = facts_for(engine.version)
    flags = vllm_flags.parse(command.words, facts, command.front_end, cwd)
    model = _model(flags, engine, setting)
    pins = vllm_variables.constants(facts, setting.environ)
    variables = {**setting.environ, **setting.constants}
    ours = world(flags, setting.environ)
    compiles, why_not = compile_expected(flags, setting.environ, facts, model.architectures)
    factors = (
        Factor("engine", "vllm", "guard"),
        *guards.guards(setting.platform),
        *guards.threads(setting.platform, variables),
        *vllm_packages.factors(engine, path, cwd, setting.environ),
        *vllm_flags.factors(flags, facts, setting.salt),
        *_variables(variables, facts, setting),
        *vllm_model.factors(model),
    )
    return Profile(
        engine="vllm",
        engine_version=engine.version,
        model=model.label,
        device=setting.platform.device_label,
        factors=tuple(sorted(factors, key=lambda factor: factor.name)),
        host=_with_ordinals(guards.offers(setting.platform), setting.platform, ours),
        needs=_with_ordinals(guards.needs(setting.platform), setting.platform, ours),
        command=program.shown(setting.argv),
        constants=dict(setting.constants),
        pins=pins,
        ranks=ours.ranks,
        compiles=compiles,
        notes=_notes(facts, engine, flags, why_not),
    )


def _model(flags: Flags, engine: Vllm, setting: Setting) -> Model:
    return vllm_model.model(
        flags.model or _DEFAULT_MODEL,
        revision=flags.values.get("revision"),
        environ=setting.environ,
        cwd=setting.cwd,
        hf_config_path=flags.values.get("hf-config-path"),
        code_revision=flags.values.get("code-revision"),
        vllm_version=engine.version,
        hub_version=engine.hub,
    )


def _variables(variables: Mapping[str, str], facts: Facts, setting: Setting) -> list[Factor]:
    others = {name: value for name, value in variables.items() if not vllm_variables.claims(name)}
    return [
        *vllm_variables.factors(variables, facts, setting.salt),
        *environment.factors(others, device=setting.platform.device.kind, salt=setting.salt),
    ]


def _with_ordinals(relations: Relations, platform: Platform, ours: World) -> Relations:
    """The CPU has no ordinals."""
    return msgspec.structs.replace(relations, ordinals=ours.ordinals if platform.device.kind == "cuda" else {})


def _notes(facts: Facts, engine: Vllm, flags: Flags, why_not: str) -> tuple[str, ...]:
    assumed = f"vLLM {engine.version or 'of an unknown version'} is read with the facts of {facts.assumed}"
    elsewhere = flags.keys("compilation-config").get("cache_dir")
    told = (
        (facts.assumed is not None, assumed),
        (bool(why_not), f"no torch tree is expected: {why_not}"),
        (bool(elsewhere), f"vLLM takes whatever lies in {elsewhere} (cache_dir): it is neither checked nor captured"),
        (flags.config_file is not None, f"--config cannot be read: {flags.config_file}"),
        (bool(flags.unknown), _unknown(flags.unknown, facts)),
    )
    return tuple(text for holds, text in told if holds)


def _unknown(words: Sequence[str], facts: Facts) -> str:
    """Names only: the value of an option that nobody knows may be a secret."""
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    named = ", ".join(options[:3]) + (f" and {len(options) - 3} more" if options[3:] else "")
    return f"vLLM {facts.version} knows no {named or 'second model'} (it counts all the same)"
