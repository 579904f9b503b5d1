"""What this machine is: its GPUs by NVML, its instruction sets, its C++ compiler.

Nothing here raises: a machine that cannot be read gives None, an unknown that equals nothing.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import msgspec

from cachemgr import executables
from cachemgr.factors.packages import NONE, Torch

T = TypeVar("T")

CPUINFO = Path("/proc/cpuinfo")
# Kernel driver, WSL's paravirtual one and that of Jetsons. Without one of them there is no GPU to ask for, whatever
# libraries are installed.
_NVIDIA_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/nvmap"))
_DRM = Path("/dev/dri")
"""Without it, a torch that is built for Intel's GPUs computes on the CPU."""
_COMPILER_SECONDS = 5.0

# Instruction sets that a compiler may use on its own for `-march=native` (gcc `gcc/config/i386/driver-i386.cc`), by
# the names of Linux (`arch/x86/include/asm/cpufeatures.h`). All other words of the flags line are bugs, tuning,
# virtualisation and instructions that nobody emits unasked: two hosts that differ in them run the same code, and
# taking them in made XLA refuse its own executables on the host that wrote them (jax-ml/jax#38445).
_ISA_PREFIXES = ("sse", "avx", "amx_", "apx")
# fmt: off
_ISA_WORDS = frozenset({
    "pni", "ssse3", "3dnow", "3dnowext", "3dnowprefetch", "fma", "fma4", "xop", "tbm", "f16c", "bmi1", "bmi2",
    "abm", "lzcnt", "popcnt", "aes", "pclmulqdq", "vaes", "vpclmulqdq", "gfni", "sha_ni", "sha512", "sm3",
    "sm4", "movbe", "adx", "cx16", "lahf_lm",
})
# fmt: on


class Device(msgspec.Struct, frozen=True):
    """What compiles and runs the kernels of a torch program."""

    kind: str | None
    """`cpu`, `cuda`, `rocm`, or another that torch has a word for."""
    names: str | None = None
    """Distinct names of the visible GPUs, sorted."""
    capabilities: str | None = None
    driver_cuda: str | None = None
    """Newest CUDA version that the driver can run."""
    gpus: int | None = None
    """How many are visible; None where nobody was asked."""


class Cpu(msgspec.Struct, frozen=True):
    """The processors that the child may use."""

    features: tuple[str, ...] | None
    threads: str | None
    """What torch derives its default number of threads from."""


def device(torch: Torch, environ: Mapping[str, str]) -> Device:
    """The device that a program compiles for unless it says otherwise.

    A torch without CUDA computes on the CPU whatever is in the box. ROCm and devices of others are recognised but not
    read, so nothing is ever reused there.
    """
    if torch.hip not in {None, NONE}:
        return Device("rocm")
    if torch.other is not None and (torch.other != "xpu" or _DRM.exists()):
        return Device(torch.other)
    if torch.cuda == NONE or _hidden(environ) or not any(node.exists() for node in _NVIDIA_NODES):
        return Device("cpu")
    return _ask_nvml(environ)


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The name of each GPU that CUDA will show a program with these variables; none where NVML cannot be asked."""
    if _hidden(environ) or not any(node.exists() for node in _NVIDIA_NODES):
        return ()
    return _asked(lambda nvml: tuple(_name(nvml, _instance(nvml, handle)) for handle in _visible(nvml, environ)), ())


def _hidden(environ: Mapping[str, str]) -> bool:
    return environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")[0].strip() in {"", "-1"}


def _ask_nvml(environ: Mapping[str, str]) -> Device:
    def device(nvml: ModuleType) -> Device:
        handles = [_instance(nvml, handle) for handle in _visible(nvml, environ)]
        version = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        return Device(
            "cuda" if handles else "cpu",
            _distinct(_name(nvml, handle) for handle in handles),
            _distinct(_capability(nvml, handle) for handle in handles),
            f"{version // 1000}.{version % 1000 // 10}",
            len(handles),
        )

    return _asked(device, Device(None))


def _asked(question: Callable[[ModuleType], T], unanswered: T) -> T:
    """What NVML answers, or `unanswered` where it is absent or fails."""
    try:
        import pynvml
    except ImportError:
        return unanswered
    try:
        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return unanswered


def _distinct(values: Iterable[str]) -> str | None:
    return ", ".join(sorted(set(values))) or None


def _visible(nvml: ModuleType, environ: Mapping[str, str]) -> list[object]:
    """The devices that CUDA will show (CUDA C++ Programming Guide, environment variables).

    An entry that names nothing ends the list. CUDA counts the fastest device first unless CUDA_DEVICE_ORDER says
    otherwise, NVML counts by bus, so in a mixed box an index alone does not name a device: then all of them count.
    """
    boxed: list[object] = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return boxed
    chosen: list[object] = []
    for word in wanted.split(","):
        entry = word.strip()
        if entry.isdigit() and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and _mixed(nvml, boxed):
            return boxed
        handle = _named(nvml, entry, boxed)
        if handle is None:
            break
        chosen.append(handle)
    return chosen


def _mixed(nvml: ModuleType, handles: Sequence[object]) -> bool:
    return len({_name(nvml, handle) for handle in handles}) > 1


def _named(nvml: ModuleType, entry: str, boxed: Sequence[object]) -> object | None:
    if entry.isdigit():
        return boxed[int(entry)] if int(entry) < len(boxed) else None
    if entry.startswith("MIG-"):
        try:
            found: object = nvml.nvmlDeviceGetHandleByUUID(entry)
        except nvml.NVMLError:
            return None
        return found
    # CUDA accepts any prefix of a UUID that is unique in the box.
    matching = [handle for handle in boxed if entry and str(nvml.nvmlDeviceGetUUID(handle)).startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _instance(nvml: ModuleType, handle: object) -> object:
    """The device itself, or the first MIG instance of a divided one: CUDA shows no more than that of it."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return handle
    except nvml.NVMLError:
        return handle
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):
            instance: object = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            return instance
    return handle


def _name(nvml: ModuleType, handle: object) -> str:
    name = nvml.nvmlDeviceGetName(handle)
    return name.decode() if isinstance(name, bytes) else str(name)


def _capability(nvml: ModuleType, handle: object) -> str:
    # Fails for what is no MIG instance, which is then the device itself.
    with contextlib.suppress(nvml.NVMLError):
        handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return f"{major}.{minor}"


def cpu(cpus: frozenset[int], cpuinfo: Path = CPUINFO) -> Cpu:
    """The instruction sets that all of `cpus` have, and how many threads torch would start on them.

    torch asks MKL or OpenMP for its default (ATen `ParallelOpenMP.cpp`, `init_num_threads`): OpenMP takes every CPU
    of the affinity mask, MKL every physical core of it, so both counts decide.
    """
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return Cpu(None, None)
    processors = [_fields(block) for block in text.split("\n\n") if block.strip()]
    ours = [fields for fields in processors if _number(fields) in cpus] or processors
    return Cpu(_features(ours), _threads(ours, cpus))


def _number(fields: dict[str, str]) -> int:
    number = fields.get("processor", "")
    return int(number) if number.isdigit() else -1


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _features(processors: Sequence[dict[str, str]]) -> tuple[str, ...] | None:
    """What every processor has: a thread may be scheduled on the weakest. None where no known line tells."""
    x86 = {fields["flags"] for fields in processors if "flags" in fields}
    # Arm and s390x list nothing but instruction sets there, RISC-V one word.
    others = {fields.get("features") or fields.get("isa") or "" for fields in processors if "flags" not in fields}
    sets = [_instruction_sets(line) for line in x86] + [frozenset(line.split()) for line in others]
    return tuple(sorted(frozenset.intersection(*sets))) or None if sets else None


def _instruction_sets(flags: str) -> frozenset[str]:
    return frozenset(word for word in flags.split() if word in _ISA_WORDS or word.startswith(_ISA_PREFIXES))


def _threads(processors: Sequence[dict[str, str]], cpus: frozenset[int]) -> str | None:
    if not cpus:
        return None
    cores = {(fields.get("physical id"), fields["core id"]) for fields in processors if "core id" in fields}
    return f"{len(cpus)} on {len(cores)} cores" if cores else str(len(cpus))


def compiler(environ: Mapping[str, str], cwd: Path) -> str | None:
    """The first line that Inductor's C++ compiler says about itself; `none` when there is no compiler.

    torch 2.13 `_inductor/config.py` (`cpp.cxx`) and `_inductor/cpp_builder.py` (`cpp_compiler_search`): CXX as one
    word, else g++, whatever answers to `--version`.
    """
    name = environ.get("CXX", "g++")
    if executables.find(name, environ, cwd) is None:
        return NONE
    answer = executables.ask((name, "--version"), environ, cwd, _COMPILER_SECONDS)
    if answer is None:
        return None
    return answer.decode("utf-8", "backslashreplace").partition("\n")[0].strip() or None
