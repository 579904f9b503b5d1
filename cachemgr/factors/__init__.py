"""What a command would compile, as factors, without importing what it imports.

`describe` reads the command line, asks the command's Python once what it is, and reads the rest from files, NVML and
`/proc`. It never raises for a machine that cannot be read: such a guard is unknown and equals nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from cachemgr import executables
from cachemgr.errors import NoSuchCommandError
from cachemgr.factors import environment, guards, host, interpreter, program, serving
from cachemgr.factors.profile import Profile
from cachemgr.factors.vllm.command import recognise
from cachemgr.factors.wrappers import unwrap
from cachemgr.key import Factor


def describe(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    cwd: Path,
    ignored_args: Sequence[str],
    salt: str,
    cpuinfo: Path = host.CPUINFO,
) -> Profile:
    """The profile of a command that uses torch.compile or starts a vLLM engine.

    `ignored_args` are options that do not count, `salt` seals values of variables that nobody knows.

    Raises:
        NoSuchCommandError: `argv` names nothing that can be found.
        CannotExecuteError: it names a file that may not be executed.
    """
    if not argv:
        raise NoSuchCommandError("no command is given")
    executables.resolve(argv[0], environ, cwd)
    command = unwrap(argv, environ)
    parsed = program.parse(command, cwd)
    launcher = interpreter.launcher(command, cwd)
    python = None if launcher is None else interpreter.ask(launcher, parsed.path_options, command, cwd)
    platform = guards.look(python, command.environ, cwd, cpuinfo)
    variables = environment.without_ours(command.environ)
    constants = guards.constants(platform.device, variables)
    engine = recognise(parsed)
    if engine is not None:
        return serving.profile(engine, serving.Setting(argv, variables, cwd, platform, constants, salt))
    variables.update(constants)
    return Profile(
        engine="torch",
        engine_version=platform.torch.version,
        model=parsed.label,
        device=platform.device_label,
        factors=_sorted(
            Factor("engine", "torch", "guard"),
            *guards.guards(platform),
            *guards.threads(platform, variables),
            *environment.factors(variables, device=platform.device.kind, salt=salt),
            *program.factors(parsed, platform.path, cwd, ignored_args),
        ),
        host=guards.offers(platform),
        needs=guards.needs(platform),
        command=program.shown(argv),
        constants=constants,
    )


def reason_to_leave_alone(argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> str | None:
    """Why a command must not be given any cache, or None."""
    if not argv:
        return None
    engine = recognise(program.parse(unwrap(argv, environ), cwd))
    if engine is None or not engine.measures_cold:
        return None
    return f"`vllm {engine.kind}` measures cold starts, so it runs as if cachemgr were not there"


def _sorted(*factors: Factor) -> tuple[Factor, ...]:
    return tuple(sorted(factors, key=lambda factor: factor.name))
