"""The parts of every launch: its Python, torch, triton, device and CPU, as guards and relations."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from cachemgr.factors import host, packages
from cachemgr.factors.interpreter import Interpreter
from cachemgr.factors.packages import NONE, Torch, Triton
from cachemgr.factors.text import encodable
from cachemgr.key import Factor, Relations

# On the CPU Inductor compiles a header of 147 MB per flag set before it looks for a kernel, in a directory that no
# variable moves (torch 2.13 `_inductor/codecache.py`, _HEADER_DIR). The switch is in Inductor's key, so it is set from
# the first launch on and counts like any variable.
_CPU_CONSTANTS = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}


class Platform(msgspec.Struct, frozen=True):
    """The parts that guards are made of."""

    python: Interpreter | None
    torch: Torch
    triton: Triton
    device: host.Device
    cpu: host.Cpu
    compiler: str | None

    @property
    def path(self) -> tuple[str, ...]:
        """Where its Python finds modules."""
        return self.python.path if self.python else ()

    @property
    def device_label(self) -> str:
        """For people."""
        return self.device.names or self.device.kind or "unknown"

    def gpus(self, ranks: int | None) -> int | None:
        """GPUs that wait for a start of so many ranks, each of which has one; None where nobody knows, as of a program
        that may use any number of those that it sees."""
        if self.device.kind in {None, "cpu"}:
            return None if self.device.kind is None else 0
        return 1 if ranks is None and self.device.gpus == 1 else ranks


def look(python: Interpreter | None, environ: Mapping[str, str], cwd: Path, cpuinfo: Path) -> Platform:
    """Read the parts from files, NVML and `/proc`."""
    path = python.path if python else ()
    torch = packages.torch(path, cwd)
    device = host.device(torch, environ)
    return Platform(
        python=python,
        torch=torch,
        triton=packages.triton(path, cwd) if python else Triton(),
        device=device,
        cpu=host.cpu(python.cpus if python else frozenset(), cpuinfo),
        compiler=host.compiler(environ, cwd) if device.kind == "cpu" else None,
    )


def constants(device: host.Device, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to set for a program on this device."""
    if device.kind != "cpu":
        return {}
    return {name: value for name, value in _CPU_CONSTANTS.items() if name not in environ}


def guards(platform: Platform) -> list[Factor]:
    """What must hold for any reuse of compiled code."""
    named = {
        "torch": platform.torch.version,
        "torch.code": platform.torch.code,
        "triton": platform.triton.version,
        "triton.code": platform.triton.code,
        "cuda": platform.torch.cuda,
        "hip": platform.torch.hip,
        **_python_guards(platform.python),
        "device": platform.device.kind,
        **(_cpu_guards(platform) if platform.device.kind == "cpu" else _gpu_guards(platform.device)),
    }
    return [Factor(name, None if value is None else encodable(value), "guard") for name, value in named.items()]


def _python_guards(python: Interpreter | None) -> dict[str, str | None]:
    if python is None:
        return dict.fromkeys(("python", "python.abi", "platform", "libc"))
    return {
        "python": f"{python.implementation} {python.version}",
        "python.abi": python.abi,
        "platform": f"{python.platform} {python.machine}",
        "libc": python.libc,
    }


def _cpu_guards(platform: Platform) -> dict[str, str | None]:
    """What the keys of C++ kernels hold, and what `-march=native` in them means (`_inductor/cpp_builder.py`)."""
    known = platform.torch.site is not None and platform.python is not None
    return {
        "cpu.features": None if platform.cpu.features is None else " ".join(platform.cpu.features),
        "compiler": platform.compiler,
        "prefix": f"{platform.torch.site} {platform.python.include}" if known and platform.python else None,
    }


def _gpu_guards(device: host.Device) -> dict[str, str | None]:
    return {"device.name": device.names, "device.capability": device.capabilities}


def threads(platform: Platform, environ: Mapping[str, str]) -> list[Factor]:
    """The default number of threads, where no variable decides it."""
    if platform.device.kind != "cpu" or environ.get("OMP_NUM_THREADS"):
        return []
    return [Factor("cpu.threads", platform.cpu.threads, "match")]


def offers(platform: Platform) -> Relations:
    """What this host has for captures that need it."""
    return Relations(cpu_features=platform.cpu.features or (), driver_cuda=platform.device.driver_cuda)


def needs(platform: Platform) -> Relations:
    """What a capture made here needs of its host.

    A CUDA program may carry `-march=native` host code as well, so CPU features are needed on every device.
    """
    cuda = platform.torch.cuda if platform.device.kind == "cuda" and platform.torch.cuda != NONE else None
    return msgspec.structs.replace(offers(platform), cuda_runtime=cuda)
