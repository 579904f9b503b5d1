"""What a vLLM command would compile: its flags, model, environment and packages, as factors of one launch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from cachemgr.factors import guards, program
from cachemgr.factors.guards import Platform
from cachemgr.factors.profile import Profile
from cachemgr.factors.target import Target, model_name, serving_variables
from cachemgr.factors.vllm import arguments as vllm_arguments
from cachemgr.factors.vllm import flags as vllm_flags
from cachemgr.factors.vllm import model as vllm_model
from cachemgr.factors.vllm import packages as vllm_packages
from cachemgr.factors.vllm import variables as vllm_variables
from cachemgr.factors.vllm.command import EngineCommand
from cachemgr.factors.vllm.facts import Facts, facts_for
from cachemgr.factors.vllm.flags import Flags
from cachemgr.factors.vllm.model import Model
from cachemgr.factors.vllm.packages import Vllm
from cachemgr.factors.vllm.world import World, compile_expected, in_charge_of, world
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
    target: Target | None = None
    """The machine, where it is another one than this."""
    own: Mapping[str, str] = {}
    """Of the variables, those that are not the target's."""


def flags_of(command: EngineCommand, path: Sequence[str], cwd: Path) -> Flags:
    """The flags of a command whose Python finds modules in `path`."""
    return vllm_flags.parse(command.words, facts_for(vllm_packages.vllm(path, cwd).version), command.front_end, cwd)


def model_here(
    command: EngineCommand, path: Sequence[str], environ: Mapping[str, str], cwd: Path
) -> tuple[Model, Flags, str]:
    """The model that a command loads here, its flags, and the name that it asks for it by."""
    engine, flags = vllm_packages.vllm(path, cwd), flags_of(command, path, cwd)
    return model_of(flags, engine, environ, cwd), flags, flags.model or _DEFAULT_MODEL


def profile(command: EngineCommand, setting: Setting) -> Profile:
    """The profile of a command that starts an engine of vLLM."""
    engine = _engine(setting)
    facts = facts_for(engine.version)
    flags = vllm_flags.parse(command.words, facts, command.front_end, setting.cwd)
    return _profile(engine, facts, flags, setting)


def profile_of_program(fields: Mapping[str, object], extra: Sequence[Factor], setting: Setting) -> Profile:
    """The profile of an engine that a program makes. `fields` are the `EngineArgs` that it gave, `extra` is what the
    program itself may have to do with it."""
    engine = _engine(setting)
    facts = facts_for(engine.version)
    flags = vllm_arguments.flags_of(fields, facts)
    return _profile(engine, facts, flags, setting, extra)


def _profile(engine: Vllm, facts: Facts, flags: Flags, setting: Setting, extra: Sequence[Factor] = ()) -> Profile:
    model = _model(flags, engine, setting)
    pins = vllm_variables.constants(facts, setting.environ)
    variables = {**setting.environ, **setting.constants}
    ours = world(flags, setting.environ)
    compiles, why_not = compile_expected(flags, setting.environ, facts, model.architectures)
    factors = (
        Factor("engine", "vllm", "guard"),
        *guards.guards(setting.platform),
        *guards.threads(setting.platform, variables),
        *_packages(engine, setting),
        *vllm_flags.factors(flags, facts),
        *serving_variables(variables, engine, setting.platform.device.kind),
        *(() if setting.target is None else setting.target.sealed_for("vllm", setting.own)),
        *vllm_model.factors(model, draft=vllm_flags.role_of_draft(facts)),
        *extra,
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
        world=ours.size,
        gpus=setting.platform.gpus(in_charge_of(flags, setting.environ)),
        compiles=compiles,
        notes=_notes(facts, engine, flags, why_not),
    )


def _engine(setting: Setting) -> Vllm:
    if setting.target is not None:
        return setting.target.engine
    return vllm_packages.vllm(setting.platform.path, setting.cwd)


def _packages(engine: Vllm, setting: Setting) -> Sequence[Factor]:
    if setting.target is not None:
        return setting.target.packages
    return vllm_packages.factors(engine, setting.platform.path, setting.cwd, setting.environ)


def model_of(flags: Flags, engine: Vllm, environ: Mapping[str, str], cwd: Path) -> Model:
    """The model that a command with these flags loads here."""
    return vllm_model.model(
        flags.model or _DEFAULT_MODEL,
        revision=flags.values.get("revision"),
        environ=environ,
        cwd=cwd,
        hf_config_path=flags.values.get("hf-config-path"),
        code_revision=flags.values.get("code-revision"),
        draft=flags.draft,
        vllm_version=engine.version,
        hub_version=engine.hub,
    )


def _model(flags: Flags, engine: Vllm, setting: Setting) -> Model:
    there = {} if setting.target is None else setting.target.models
    known = there.get(model_name(flags.model or _DEFAULT_MODEL, flags))
    return model_of(flags, engine, setting.environ, setting.cwd) if known is None else known


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
