"""What a command would compile, as factors, without importing what it imports.

`describe` reads the command line, asks the command's Python once what it is, and reads the rest from files, NVML and
`/proc`. It never raises for a machine that cannot be read: such a guard is unknown and equals nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from cachemgr import executables
from cachemgr.errors import NoSuchCommandError
from cachemgr.factors import environment, host, interpreter, packages, program
from cachemgr.factors.interpreter import Interpreter
from cachemgr.factors.packages import NONE, Torch, Triton
from cachemgr.factors.text import encodable
from cachemgr.factors.wrappers import unwrap
from cachemgr.key import Factor, Relations

# On the CPU Inductor compiles a header of 147 MB per flag set before it looks for a kernel, in a directory that no
# variable moves (torch 2.13 `_inductor/codecache.py`, _HEADER_DIR). The switch is in Inductor's key, so it is set from
# the first launch on and counts like any variable.
_CPU_CONSTANTS = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}


class Profile(msgspec.Struct, frozen=True):
    """Everything about a command that decides which artifact fits it."""

    engine: str
    engine_version: str | None
    model: str
    """For people: the name of the script or module."""
    device: str
    """For people: the name of the GPU, or `cpu`."""
    factors: tuple[Factor, ...]
    host: Relations
    """What this host offers."""
    needs: Relations
    """What a capture that is made here needs of its host."""
    command: tuple[str, ...]
    """The command line without its secrets."""
    constants: dict[str, str]
    """Variables to set for the command because they are in the engine's key."""


class _World(msgspec.Struct, frozen=True):
    """The parts that guards are made of."""

    python: Interpreter | None
    torch: Torch
    triton: Triton
    device: host.Device
    cpu: host.Cpu
    compiler: str | None


def describe(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    cwd: Path,
    ignored_args: Sequence[str],
    salt: str,
    cpuinfo: Path = host.CPUINFO,
) -> Profile:
    """The profile of a command that uses torch.compile.

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
    world = _look(python, command.environ, cwd, cpuinfo)
    variables = environment.without_ours(command.environ)
    constants = _constants(world.device, variables)
    variables.update(constants)
    return Profile(
        engine="torch",
        engine_version=world.torch.version,
        model=parsed.label,
        device=world.device.names or world.device.kind or "unknown",
        factors=_sorted(
            *_guards(world),
            *_threads(world, variables),
            *environment.factors(variables, device=world.device.kind, salt=salt),
            *program.factors(parsed, python.path if python else (), cwd, ignored_args),
        ),
        host=Relations(cpu_features=world.cpu.features or (), driver_cuda=world.device.driver_cuda),
        needs=_needs(world),
        command=program.shown(argv),
        constants=constants,
    )


def _look(python: Interpreter | None, environ: Mapping[str, str], cwd: Path, cpuinfo: Path) -> _World:
    path = python.path if python else ()
    torch = packages.torch(path, cwd)
    device = host.device(torch, environ)
    return _World(
        python=python,
        torch=torch,
        triton=packages.triton(path, cwd) if python else Triton(),
        device=device,
        cpu=host.cpu(python.cpus if python else frozenset(), cpuinfo),
        compiler=host.compiler(environ, cwd) if device.kind == "cpu" else None,
    )


def _constants(device: host.Device, environ: Mapping[str, str]) -> dict[str, str]:
    if device.kind != "cpu":
        return {}
    return {name: value for name, value in _CPU_CONSTANTS.items() if name not in environ}


def _guards(world: _World) -> list[Factor]:
    named = {
        "torch": world.torch.version,
        "torch.code": world.torch.code,
        "triton": world.triton.version,
        "triton.code": world.triton.code,
        "cuda": world.torch.cuda,
        "hip": world.torch.hip,
        **_python_guards(world.python),
        "device": world.device.kind,
        **(_cpu_guards(world) if world.device.kind == "cpu" else _gpu_guards(world.device)),
    }
    factors = [Factor("engine", "torch", "guard")]
    factors += [Factor(name, None if value is None else encodable(value), "guard") for name, value in named.items()]
    return factors


def _python_guards(python: Interpreter | None) -> dict[str, str | None]:
    if python is None:
        return dict.fromkeys(("python", "python.abi", "platform", "libc"))
    return {
        "python": f"{python.implementation} {python.version}",
        "python.abi": python.abi,
        "platform": f"{python.platform} {python.machine}",
        "libc": python.libc,
    }


def _cpu_guards(world: _World) -> dict[str, str | None]:
    """What the keys of C++ kernels hold, and what `-march=native` in them means (`_inductor/cpp_builder.py`)."""
    known = world.torch.site is not None and world.python is not None
    return {
        "cpu.features": None if world.cpu.features is None else " ".join(world.cpu.features),
        "compiler": world.compiler,
        "prefix": f"{world.torch.site} {world.python.include}" if known and world.python else None,
    }


def _gpu_guards(device: host.Device) -> dict[str, str | None]:
    return {"device.name": device.names, "device.capability": device.capabilities}


def _threads(world: _World, environ: Mapping[str, str]) -> list[Factor]:
    """The default number of threads, where no variable decides it."""
    if world.device.kind != "cpu" or environ.get("OMP_NUM_THREADS"):
        return []
    return [Factor("cpu.threads", world.cpu.threads, "match")]


def _needs(world: _World) -> Relations:
    """A CUDA program may carry `-march=native` host code as well, so CPU features are needed on every device."""
    cuda = world.torch.cuda if world.device.kind == "cuda" and world.torch.cuda != NONE else None
    return Relations(cpu_features=world.cpu.features or (), cuda_runtime=cuda, driver_cuda=world.device.driver_cuda)


def _sorted(*factors: Factor) -> tuple[Factor, ...]:
    return tuple(sorted(factors, key=lambda factor: factor.name))
