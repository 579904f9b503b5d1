"""Left-overs of writers that died: temporaries by the names that engines give them.

Nothing reads them, nobody else removes them, and each crash adds some. Names: triton 3.6-3.9 `runtime/cache.py`
(`tmp.pid_<pid>_<uuid>/`, older `<file>.tmp.pid_<pid>_<n>`), torch 2.13 `_inductor/codecache.py` (`.<pid>.<tid>.tmp`),
vLLM 0.28-0.33 `compilation/decorators.py` (`model.<pid>.tmp`) and `v1/worker/startup_plan.py` (`<file>.tmp.<pid>`),
tilelang 0.1.15 `cache/kernel_cache.py` (`.staging/<key>_<pid>_<id>/`, `.<stem>.<pid>_<id>.tmp.so`; older
`.staging_<id>/`), DeepGEMM 2.x `csrc/jit/compiler.hpp` (`tmp/<uuid>/kernel.*`), nvidia-cutlass-dsl 4.8
`base_dsl/cache_helpers.py` (`tmp.pid_<pid>_<uuid>/`), flashinfer 0.7 `jit/cubin_loader.py` (`<file>.<id>.tmp`).
"""

import re

ORPHANED_SECONDS = 3600.0
"""How old a temporary must be to have no writer any more: the longest compile of one kernel is far shorter."""

_TEMPORARY = re.compile(
    r"(?:^|/)(?:"
    r"(?:tmp\.pid_[^/]+|\.staging(?:_[^/]+)?|[^/]*\.tmp(?:\.so)?|[^/]+\.tmp\.(?:pid_[^/]+|\d+))(?:/|$)"
    r"|tmp/[^/]+/kernel\.[^/]+$"
    r")"
)

_SURELY = re.compile(
    r"(?:^|/)(?:tmp\.pid_\d+_[^/]+|[^/]+\.tmp\.pid_\d+(?:_[^/]+)?|\.staging_[0-9a-f_]+|\.\d+\.\d+\.tmp)(?:/|$)"
)


def is_surely_temporary(path: str) -> bool:
    """Whether its name is as only these engines give it: others, too, write to `*.tmp`."""
    return _SURELY.search(path) is not None


def is_temporary(path: str) -> bool:
    """Whether a path is, or lies in, something that a writer renames when it is done."""
    return _TEMPORARY.search(path) is not None
