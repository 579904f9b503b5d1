"""What each family of factors means to the person who reads that one differs, and what to do about it: a table.

The first row whose pattern fits the name of a factor speaks for it. Whether a variable is in vLLM's hash differs by
version, and `cachemgr.factors.vllm.facts` knows; what is said here holds for every version that has the factor. Sources
are those of the modules below `cachemgr.factors`, which made the factors.
"""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

import msgspec

from cachemgr.key import Factor


class Meaning(msgspec.Struct, frozen=True):
    """One row."""

    patterns: str
    """Names of factors, with `*`; a space between two."""
    means: str
    """One sentence."""
    harmless: str = ""
    """Why a difference changes no compiled code, where it is known not to; empty where it may."""
    fix: str = ""
    """What to type or to change, where that is not just setting the value that the artifact has."""

    def fits(self, factor: str) -> bool:
        """Whether this row speaks for a factor."""
        return any(fnmatchcase(factor, pattern) for pattern in self.patterns.split())


_ASSERTS_GONE = (2, 12)
_ADDRESS = "it is an address of one pod or machine, and no kernel depends on it"

MEANINGS: tuple[Meaning, ...] = (
    Meaning("engine", "another engine: nothing of one serves the other"),
    Meaning(
        "vllm vllm.code",
        "another vLLM, by version or by the bytes of its code: it compiles other graphs",
        fix="run the vLLM that made the artifact, or capture once with this one",
    ),
    Meaning(
        "torch torch.code",
        "another torch, by version or by the bytes of its code: it generates other code",
        fix="run the torch that made the artifact, or capture once with this one",
    ),
    Meaning(
        "triton triton.code",
        "another triton: it compiles kernels otherwise",
        fix="run the triton that made the artifact, or capture once with this one",
    ),
    Meaning(
        "cuda hip",
        "torch is built for another CUDA or ROCm",
        fix="install the same build of torch, or capture once with this one",
    ),
    Meaning(
        "python python.abi",
        "another Python: traced code has its bytecode in it, and that differs between patch releases too",
        fix="use one image, or one Python x.y.z, on all machines",
    ),
    Meaning(
        "platform libc", "another operating system, architecture or C library", fix="use one image on all machines"
    ),
    Meaning("device", "another kind of device", fix="capture once on each kind of device"),
    Meaning(
        "device.name",
        "another GPU model: engines reject each other's files by its name, also within one architecture",
        fix="capture once on each GPU model; one store holds them all",
    ),
    Meaning("device.capability", "another GPU architecture: its machine code does not run here"),
    Meaning(
        "cpu.features",
        "another instruction set: code for the CPU is compiled for the one that it was made on",
        fix="capture once on each kind of CPU, or set ATEN_CPU_CAPABILITY and capture on the oldest one",
    ),
    Meaning(
        "cpu.threads",
        "another number of CPU threads, which is in the key of C++ kernels",
        fix="set OMP_NUM_THREADS to the same number on all machines",
    ),
    Meaning(
        "compiler", "another C++ compiler, which is in the key of code for the CPU", fix="use one image on all machines"
    ),
    Meaning(
        "prefix",
        "torch lies in another directory, as in another virtual environment: keys of code for the CPU hold its paths",
        harmless="the code is the same, and its key is not",
        fix="make the environment at the same path on all machines",
    ),
    Meaning("package.transformers", "another transformers, which builds the model's configuration"),
    Meaning(
        "package.*",
        "another version of a package that has kernels",
        fix="install the version that made the artifact, or capture once with this one",
    ),
    Meaning(
        "plugins plugins.code",
        "other vLLM plugins: they may change the model or what is compiled, and vLLM's hash does not hold their code",
        fix="install the same plugins on all machines, or name those that count in VLLM_PLUGINS on all of them",
    ),
    Meaning(
        "model",
        "the string that vLLM hashes as the model: the path as it is spelled, or, offline, that of the snapshot",
        fix="spell the model the same on all machines, with HF_HUB_OFFLINE and HF_HOME on all of them or on none",
    ),
    Meaning(
        "model.config",
        "other configuration files of the model, or none where the model was not downloaded yet",
        fix="pin the model's revision on all machines",
    ),
    Meaning(
        "model.draft",
        "other configuration files of the draft model, or none where it was not downloaded yet; vLLM below 0.31 leaves "
        "them out of its hash, every release those of a speculators checkpoint, and takes the graph of another draft",
        fix="pin the draft's revision on all machines (in --speculative-config), and download it before the start",
    ),
    Meaning(
        "env.VLLM_RAY_BUNDLE_INDICES env.RAY_EXPERIMENTAL_NOSET_*",
        "Ray's choice of devices for this worker, which vLLM up to 0.32 hashes",
        harmless="it says where a worker runs and not what it compiles",
        fix="unset {name} where the placement group need not be chosen by hand",
    ),
    Meaning(
        "env.VLLM_CONFIG_ROOT env.VLLM_XLA_CACHE_PATH",
        "a directory below HOME, XDG_CONFIG_HOME or XDG_CACHE_HOME, which vLLM below 0.28 hashes as it is spelled",
        harmless="it is a mere place",
        fix="set {name} to one path on all machines, or let `cachemgr run` pin it: move your files out of it",
    ),
    Meaning(
        "env.VLLM_PLUGINS",
        "the list of plugins that vLLM may load, which is part of its own hash",
        fix="unset VLLM_PLUGINS, or set it to the same list on all machines",
    ),
    Meaning(
        "env.VLLM_API_KEY",
        "the key of the server, which vLLM up to 0.28 hashes: each key divides the cache",
        harmless="it is compared with what clients send, and nothing else",
        fix="give the key as --api-key, which does not count",
    ),
    Meaning(
        "env.VLLM_LOGGING_LEVEL",
        "DEBUG turns on asserts in generated code where torch is older than 2.12, and vLLM hashes that",
        fix="unset VLLM_LOGGING_LEVEL",
    ),
    Meaning(
        "env.CI",
        "torch compiles otherwise where CI is set (an alias in a custom operator is an error then)",
        fix="unset CI, or set it on all machines",
    ),
    Meaning(
        "env.CXX env.CC env.CUDACXX",
        "the name of the compiler, which is in Inductor's key as it is spelled",
        fix="spell {name} the same on all machines",
    ),
    Meaning(
        "env.*_HOST env.*_HOST_IP env.*_IP env.*_PORT env.*_HOSTNAME env.*_ADDRESS env.*_ADDR",
        "an address of this pod or machine, in a variable that this engine hashes or does not know",
        harmless=_ADDRESS,
        fix="unset {name}, or set it to the same text on all machines (a service name, a constant port)",
    ),
    Meaning(
        "env.VLLM_*_PATH env.VLLM_*_DIR env.VLLM_*_FOLDER env.CUDA_HOME env.CUDA_PATH env.ROCM_HOME env.ROCM_PATH",
        "a directory or library that the engine reads",
        fix="install it at the same path on all machines",
    ),
    Meaning("env.OMP_* env.GOMP_* env.KMP_* env.MKL_*", "how CPU threads run, which is in the key of C++ kernels"),
    Meaning("env.TORCHINDUCTOR_* env.TORCH* env.PYTORCH_* env.AOT* env.INDUCTOR_*", "a variable that torch reads"),
    Meaning("env.TRITON_* env.LLVM_* env.MLIR_* env.NVPTX_* env.AMDGCN_*", "a variable that triton reads"),
    Meaning("env.VLLM_*", "a variable of vLLM"),
    Meaning("env.*", "a variable that the engine or its compiler reads"),
    Meaning(
        "flags.speculative-config flags.speculative-config.*",
        "speculative decoding: vLLM's own hash leaves part of it out, so it would take a wrong entry for the right one",
        fix="start with the same --speculative-config, or capture once with this one",
    ),
    Meaning(
        "flags.*cudagraph-capture-sizes flags.*capture_sizes flags.*capture-size flags.*capture_size "
        "flags.cuda-graph-sizes",
        "the batch sizes that graphs are captured for",
        fix="let vLLM choose, or give the same sizes on all machines",
    ),
    Meaning(
        "flags.additional-config flags.additional-config.*",
        "a value in --additional-config, all of which vLLM hashes: an id of one worker or run makes each start cold",
        fix="keep ids out of --additional-config: hand them over in a variable",
    ),
    Meaning("flags.enforce-eager flags.optimization-level", "whether and how far vLLM compiles"),
    Meaning("flags.compilation-config flags.compilation-config.*", "a setting of vLLM's compiler"),
    Meaning(
        "flags.max-model-len flags.max-num-batched-tokens flags.max-num-seqs",
        "the sizes that graphs are compiled for",
    ),
    Meaning("flags.*-parallel-size", "how the model is divided between devices"),
    Meaning("flags.dtype flags.quantization flags.kv-cache-dtype", "the number format of weights or cache"),
    Meaning(
        "flags.unknown",
        "words that this vLLM does not know; they count as one",
        fix="correct or leave out what this vLLM does not know: cachemgr lookup -- CMD names it",
    ),
    Meaning(
        "flags.config",
        "a configuration file that could not be read",
        fix="name a .yaml file that can be read, as `--config FILE`",
    ),
    Meaning(
        "flags.front-end",
        "another front end, which has other default sizes of batches",
        fix="give --max-num-batched-tokens and --max-num-seqs to both",
    ),
    Meaning("flags.*", "a flag of vLLM"),
    Meaning(
        "program", "other bytes of the program itself", fix="run the same file; its path does not count, its bytes do"
    ),
    Meaning(
        "program.args",
        "other arguments of the program",
        fix="mark an argument that shapes nothing: --ignore-arg --NAME, or CACHEMGR_IGNORE_ARG",
    ),
    Meaning("program.*", "other options of Python or of the launcher"),
    Meaning("*", "an ingredient that this cachemgr has no words for"),
)


def meaning(factor: str) -> Meaning:
    """The row that speaks for a factor."""
    return next(row for row in MEANINGS if row.fits(factor))


def debug_adds_asserts(torch: str | None) -> bool:
    """Whether vLLM's DEBUG logging may change what this torch compiles (0.26-0.33 `config/compilation.py`)."""
    return torch is None or tuple(int(part) for part in re.findall(r"\d{1,9}", torch)[:2]) < _ASSERTS_GONE


def unread(factors: Iterable[Factor]) -> tuple[str, str]:
    """What a guard that cannot be read means, and what to do; empty where all of them were read."""
    guards = {factor.name: factor.value for factor in factors if factor.role == "guard"}
    unknown = sorted(name for name, value in guards.items() if value is None)
    if not unknown:
        return "", ""
    says = f"{', '.join(unknown)} cannot be read, so no artifact fits and nothing is captured"
    if unknown == ["device.capability", "device.name"]:
        return says, f"nothing: cachemgr reads NVIDIA's GPUs and CPUs, and this torch computes on {guards['device']}"
    if all(name.endswith(".code") for name in unknown):
        return says, "install it as a wheel, of which every file is recorded: an editable or copied one may be anything"
    if "device" in unknown and "torch" not in unknown:
        return says, "nvidia-smi: does the driver answer?"
    return says, "is this the Python that has torch?"
