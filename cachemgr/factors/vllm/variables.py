"""Variables of a vLLM engine: what its hash contains counts, what it ignores does not, unless it can shape code.

vLLM hashes every variable that it knows but for a list (`vllm/envs.py`, compile_factors); `facts.json` has both per
version. This module speaks for the names that it `claims`; `cachemgr.factors.environment` speaks for those of torch and
triton, and for `CI`.
"""

import os
import re
import stat
from collections.abc import Mapping

from cachemgr import digest
from cachemgr.factors.environment import is_service_link, is_switch
from cachemgr.factors.text import encodable
from cachemgr.factors.vllm.facts import Facts, facts_for, known_versions
from cachemgr.key import Factor, Role
from cachemgr.sensitive import is_secret

_PREFIXES = ("VLLM_", "RAY_EXPERIMENTAL_NOSET_")

SHAPING: dict[str, str] = {
    "VLLM_TUNED_CONFIG_FOLDER": "tuned constants of Triton kernels (fused_moe)",
    "VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS": "which kernels are tuned (model_executor/warmup)",
    "VLLM_ZENTORCH_WEIGHT_PREPACK": "layout of weights, so which kernel is called",
    "VLLM_TEST_FORCE_LOAD_FORMAT": "which loader runs, and some quantize",
    "VLLM_ENABLE_CUDA_COMPATIBILITY": "which libcuda is loaded (env_override.py)",
    "VLLM_CUDA_COMPATIBILITY_PATH": "which libcuda is loaded (env_override.py)",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "whether Inductor sees the variables that the CPU platform sets for workers",
    "VLLM_WORKER_MULTIPROC_METHOD": "whether a worker reads its variables at import or inherits what was read",
    "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH": "a start that skips compilation (v1/worker)",
    "VLLM_SKIP_VERSION_SUFFIX": "the text of the version",
    "VLLM_MODEL_REDIRECT_PATH": "which model is loaded (transformers_utils/utils.py); its file may change",
    "VLLM_USE_MODELSCOPE": "which model is loaded (transformers_utils)",
    "VLLM_RAY_BUNDLE_INDICES": "which device a rank gets",
}
"""Ignored by the hash of some version, and yet able to decide what is compiled: `blind` there."""

# Known variables that hold a secret. Whether they are set is all that may be told, and counts where they are hashed:
# VLLM_API_KEY is up to 0.28. `is_secret` would also take `…_TOKEN_THRESHOLD` for one.
SECRET = frozenset({"VLLM_API_KEY", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY"})

# Inductor's asserts on sizes, scalars and alignment follow it where torch is older than 2.12 (0.26 to 0.33
# `config/compilation.py`), and its configuration is hashed, although the variable is not. With a newer torch it only
# costs a key.
_LEVEL = "VLLM_LOGGING_LEVEL"

# Names of back ends, modes and layouts: worth reading in a difference, and no place for a secret.
_CLEAR = re.compile(
    r"\w+_(BACKEND|MODE|METHOD|LAYOUT|DTYPE|PARTITION|PRECISION|STRATEGY|POLICY|FORMAT|QUANTIZATION|KERNELS?|ALGORITHM)"
)

_ROOT = "/tmp/cachemgr-vllm-config"  # noqa: S108 - must be the same on every machine; see `constants`
_PLACES = {"VLLM_CONFIG_ROOT": _ROOT, "VLLM_XLA_CACHE_PATH": f"{_ROOT}/xla_cache"}
# What a user may have put into the configuration directory: usage/usage_lib.py and ray/ray_env.py.
_USER_FILES = ("do_not_track", "ray_non_carry_over_env_vars.json")


# What `import vllm` sets: not the program's doing, and the same in every start (0.26-0.33 env_override.py). What vLLM
# sets later, it sets while it makes its engine's configuration, and that is after the question.
_SET_BY_IMPORT = frozenset(
    {
        "LD_LIBRARY_PATH",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "TILELANG_CLEANUP_TEMP_FILES",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TRITON_CACHE_AUTOTUNING",
    }
)


def seen_by(began: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that has imported vLLM: what it `began` with and what it has set since (`now`), but
    for what vLLM sets itself."""
    changed = {name for name in began.keys() | now.keys() if began.get(name) != now.get(name)} - _SET_BY_IMPORT
    kept = {name: value for name, value in began.items() if name not in changed}
    return kept | {name: now[name] for name in changed if name in now}


def claims(name: str) -> bool:
    """Whether this module speaks for a variable, counted or not."""
    return name.startswith(_PREFIXES) or any(name in facts_for(version).variables for version in known_versions())


def constants(facts: Facts, environ: Mapping[str, str]) -> dict[str, str]:
    """What to set so that a mere place does not divide keys: directories that this version hashes (below 0.28).

    Only where the user did not choose one. VLLM_CONFIG_ROOT is left alone when the user has files there, and when the
    constant directory belongs to somebody else; who launches makes it beforehand, with mode 0700.
    """
    found = {name: place for name, place in _PLACES.items() if facts.variables.get(name) and name not in environ}
    if "VLLM_CONFIG_ROOT" in found and (_has_user_files(environ) or not _is_private(_ROOT)):
        del found["VLLM_CONFIG_ROOT"]
    return found


def factors(environ: Mapping[str, str], facts: Facts) -> tuple[Factor, ...]:
    """`env.NAME` for the variables of `environ` that this module claims and that count. Unknown values are sealed.

    `environ` is that of the user, without what an outer cachemgr pinned; `constants` may be in it already.
    """
    found = [
        Factor(f"env.{encodable(name)}", _value(name, value, facts), role)
        for name, value in environ.items()
        if name not in _PLACES and (role := _role(name, value, facts)) is not None
    ]
    if environ.get(_LEVEL, "").upper() == "DEBUG":
        found.append(Factor(f"env.{_LEVEL}", "DEBUG", "match"))
    if "proxy" in environ.get("JAX_PLATFORMS", "").lower():
        # What VLLM_TPU_USING_PATHWAYS, which is hashed, is read from (vllm/envs.py).
        found.append(Factor("env.JAX_PLATFORMS", "proxy", "match"))
    found += _placed(environ, facts)
    return tuple(sorted(found, key=lambda factor: factor.name))


def _role(name: str, value: str, facts: Facts) -> Role | None:
    """What `name` counts for; None for nothing."""
    hashed = facts.variables.get(name)
    if hashed:
        return None if _is_link(name, value, known=True) else "match" if facts.close else "blind"
    if name in SHAPING:
        return "blind"
    if hashed is None and name.startswith("VLLM_") and not is_secret(name) and not _is_link(name, value, known=False):
        return "blind"
    return None


def _is_link(name: str, value: str, *, known: bool) -> bool:
    """A service that is named `vllm` makes VLLM_PORT=tcp://…; a known name is one by its value only."""
    return is_service_link(name if not known or name.endswith("_PORT") else "", value)


def _value(name: str, value: str, facts: Facts) -> str:
    if name in SECRET:
        return "set"
    text = encodable(value)
    known = name in facts.variables
    if is_switch(text) or (known and _CLEAR.fullmatch(name)):
        return text
    return digest.sealed(text)


def _placed(environ: Mapping[str, str], facts: Facts) -> list[Factor]:
    """The hashed places that are no constant: the user's own, or the default under the user's home."""
    pinned = constants(facts, environ)
    found = []
    for name, constant in _PLACES.items():
        if not facts.variables.get(name) or name in pinned or environ.get(name) == constant:
            continue
        place = environ.get(name) or _default(name, environ)
        found.append(Factor(f"env.{name}", digest.sealed(encodable(place)), "match" if facts.close else "blind"))
    return found


def _default(name: str, environ: Mapping[str, str]) -> str:
    home = environ.get("HOME") or os.path.expanduser("~")
    if name == "VLLM_CONFIG_ROOT":
        return os.path.join(environ.get("XDG_CONFIG_HOME", os.path.join(home, ".config")), "vllm")
    return os.path.join(environ.get("XDG_CACHE_HOME", os.path.join(home, ".cache")), "vllm", "xla_cache")


def _has_user_files(environ: Mapping[str, str]) -> bool:
    root = _default("VLLM_CONFIG_ROOT", environ)
    return any(os.path.lexists(os.path.join(root, name)) for name in _USER_FILES)


def _is_private(place: str) -> bool:
    """Whether a directory is ours and closed to others, or does not exist yet."""
    try:
        found = os.lstat(place)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
