"""What a command would compile, as factors, without importing what it imports.

`describe` reads the command line, asks the command's Python once what it is, and reads the rest from files, NVML and
`/proc`. It never raises for a machine that cannot be read: such a guard is unknown and equals nothing.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cachemgr import executables
from cachemgr.errors import CannotExecuteError, NoSuchCommandError
from cachemgr.factors import environment, guards, hidden, host, interpreter, program, serving
from cachemgr.factors.guards import Platform
from cachemgr.factors.profile import Profile
from cachemgr.factors.target import Target, make, model_name
from cachemgr.factors.vllm.command import EngineCommand, recognise
from cachemgr.factors.vllm.flags import Flags
from cachemgr.factors.wrappers import unwrap
from cachemgr.key import Factor


def describe(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    cwd: Path,
    ignored_args: Sequence[str],
    engine_args: Mapping[str, object] | None = None,
    cpuinfo: Path = host.CPUINFO,
    target: Target | None = None,
) -> Profile:
    """The profile of a command that uses torch.compile or starts a vLLM engine.

    `ignored_args` are options that do not count. `engine_args` is what a program asks vLLM for, by fields of its
    `EngineArgs`; a command line that says it itself goes first, so that one start has one key whoever asks. With a
    `target`, the command is described as on that machine, with `environ` added to what it has there: nothing of this
    one counts but the files of the program and of the model.

    Raises:
        NoSuchCommandError: `argv` names nothing that can be found.
        CannotExecuteError: it names a file that may not be executed.
    """
    if not argv:
        raise NoSuchCommandError("no command is given", hint="it goes after `--`")
    if target is None:
        executables.resolve(argv[0], environ, cwd)
    own = environ
    environ = environ if target is None else target.environ(own)
    command = unwrap(argv, environ)
    parsed = program.parse(command, cwd)
    platform = _platform(argv, environ, cwd, cpuinfo) if target is None else target.platform
    variables = environment.without_ours(command.environ)
    constants = guards.constants(platform.device, variables)
    engine = recognise(parsed)
    setting = serving.Setting(argv, variables, cwd, platform, constants, target, own)
    if engine is not None:
        return serving.profile(engine, setting)
    if engine_args is not None:
        # What a program was told acts through what it asks for; a model class of its own does not.
        bytes_of_it = [each for each in program.factors(parsed, platform.path, cwd, ()) if each.name == "program"]
        return serving.profile_of_program(engine_args, bytes_of_it, setting)
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
            *environment.factors(variables, device=platform.device.kind),
            *(() if target is None else target.sealed_for("torch", own)),
            *program.factors(parsed, platform.path, cwd, ignored_args),
        ),
        host=guards.offers(platform),
        needs=guards.needs(platform),
        command=program.shown(argv),
        constants=constants,
        gpus=platform.gpus(None),
        notes=hidden.notes(parsed, command.argv, cwd),
    )


def _platform(argv: Sequence[str], environ: Mapping[str, str], cwd: Path, cpuinfo: Path) -> Platform:
    return guards.look(python_of(argv, environ, cwd), unwrap(argv, environ).environ, cwd, cpuinfo)


def target_here(
    argv: Sequence[str],
    commands: Sequence[Sequence[str]],
    environ: Mapping[str, str],
    *,
    cwd: Path,
    host_name: str,
    made: str,
) -> Target:
    """This machine as a target, by the Python that `argv` runs, with the models that `commands` load.

    Raises:
        NoSuchCommandError, CannotExecuteError: as `describe`.
    """
    executables.resolve(argv[0], environ, cwd)
    platform = _platform(argv, environ, cwd, host.CPUINFO)
    models = {}
    for command in commands:
        engine = recognise(program.parse(unwrap(command, environ), cwd))
        if engine is not None:
            found, flags, name = serving.model_here(engine, platform.path, environ, cwd)
            models[model_name(name, flags)] = found
    return make(platform, environ, cwd, models, host=host_name, made=made)


_USUAL = (
    ("vllm", "serve"),
    ("python", "-m", "vllm.entrypoints.openai.api_server"),
    ("python", "-c", ""),
    ("python3", "-c", ""),
)


def describe_here(environ: Mapping[str, str], cwd: Path) -> list[Profile]:
    """Profiles of what is usually run, as far as this machine's PATH has it. Their guards are those of whatever engine
    and program runs here; the rest of them means nothing."""
    found = []
    for argv in _USUAL:
        with suppress(NoSuchCommandError, CannotExecuteError):
            found.append(describe(argv, environ, cwd=cwd, ignored_args=()))
    return found


def python_of(argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> interpreter.Interpreter | None:
    """The Python that a command will run, None where there is none that answers."""
    command = unwrap(argv, environ)
    launcher = interpreter.launcher(command, cwd)
    if launcher is None:
        return None
    return interpreter.ask(launcher, program.parse(command, cwd).path_options, command, cwd)


def engine_of(argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> tuple[EngineCommand, Flags] | None:
    """The engine of vLLM that a command line starts, and its flags; None for any other command.

    Raises:
        NoSuchCommandError, CannotExecuteError: as `describe`.
    """
    executables.resolve(argv[0], environ, cwd)
    command = recognise(program.parse(unwrap(argv, environ), cwd))
    if command is None:
        return None
    python = python_of(argv, environ, cwd)
    return command, serving.flags_of(command, python.path if python else (), cwd)


def reason_to_leave_alone(argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> str | None:
    """Why a command must not be given any cache, or None."""
    if not argv:
        return None
    engine = recognise(program.parse(unwrap(argv, environ), cwd))
    if engine is None or not engine.measures_cold:
        return None
    return f"`vllm {engine.kind}` measures cold starts, so it runs as if cachemgr were not there"


def says_it_itself(argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> bool:
    """Whether a command line names its engine, so that nobody else need say what will be compiled."""
    return bool(argv) and recognise(program.parse(unwrap(argv, environ), cwd)) is not None


def _sorted(*factors: Factor) -> tuple[Factor, ...]:
    return tuple(sorted(factors, key=lambda factor: factor.name))
