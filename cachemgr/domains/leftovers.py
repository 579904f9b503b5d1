"""Left-overs of writers that died: temporaries by the names that engines give them.

Nothing reads them, nobody else removes them, and each crash adds some. Names: triton 3.6-3.9 `runtime/cache.py`
(`tmp.pid_<pid>_<uuid>/`, older `<file>.tmp.pid_<pid>_<n>`), torch 2.13 `_inductor/codecache.py` (`.<pid>.<tid>.tmp`),
vLLM 0.28-0.32 `compilation/decorators.py` (`model.<pid>.tmp`), tilelang 0.1.15 (`.staging_<id>/`).
"""

import re

ORPHANED_SECONDS = 3600.0
"""How old a temporary must be to have no writer any more: the longest compile of one kernel is far shorter."""

_TEMPORARY = re.compile(r"(?:^|/)(?:tmp\.pid_[^/]+|\.staging_[^/]+|[^/]*\.tmp|[^/]+\.tmp\.pid_[^/]+)(?:/|$)")


def is_temporary(path: str) -> bool:
    """Whether a path is, or lies in, something that a writer renames when it is done."""
    return _TEMPORARY.search(path) is not None
