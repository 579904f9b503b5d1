"""What FlashInfer keeps below `$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer` (the home directory by default).

Read in flashinfer 0.7.4: `jit/env.py` (places), `jit/core.py` and `jit/cpp_ext.py` (modules that ninja builds),
`jit/cute_dsl_core.py` (kernels beside a `meta.json`), `jit/cubin_loader.py` (downloads), `autotune_cache.py` (winners).

* Modules, `<version>/<archs>/cached_ops/<name>/`, follow ninja's rules (`cachemgr.domains.ninja`). Older releases have
  no `<version>/`. `cached_ops/tmp/` has locks only. Their sources in `generated/<name>/` are read before each build and
  written only when they differ; where they are missing, new ones are newer than what was built, and ninja builds again.
* Downloaded cubins, `cubins/<artifact>/…`, are checked against sha256 lists at every load and fetched again when wrong.
* Winners of managed autotuning, `autotune/v2/<environment>/entries/<op>.json`, are looked up by a hash of the
  environment and one of the operation; anything odd is a miss. vLLM 0.33 uses them in starts with one rank.

Modules and cubins are never moved: `FLASHINFER_CUBIN_DIR` overrides the `flashinfer-cubin` package, so that a pinned
one would make an offline machine download, and another `FLASHINFER_WORKSPACE_BASE` hides what an image or another model
built.
"""

import hashlib
import re
from collections.abc import Collection
from typing import NamedTuple

from cachemgr.domains import checks, ninja
from cachemgr.domains.domain import Domain

_BUILT = "cached_ops"
_GENERATED = "generated"
_LOCKS = "tmp"
_META = "meta.json"
_CUTE = "_cute_dsl"
_WINNER = re.compile(r"v2/[0-9a-f]{16}/(?:manifest|entries/[0-9a-f]{24})\.json")


class _Place(NamedTuple):
    """Where a file of a module lies: `<workspace>/<kind>/<module>/…`."""

    workspace: str
    kind: str
    module: str


def _place(path: str) -> _Place | None:
    parts = path.split("/")
    for at in (1, 2):
        if len(parts) > at + 2 and parts[at] in (_BUILT, _GENERATED):
            return _Place("/".join(parts[:at]), parts[at], parts[at + 1])
    return None


def travels(path: str) -> bool:
    """Files of modules and of their generated sources."""
    place = _place(path)
    return place is not None and place.module != _LOCKS and ninja.belongs(path)


def unit_of(path: str) -> str:
    """A module's build directory, or that of its sources."""
    place = _place(path)
    return path if place is None else "/".join(place)


def check_of(path: str) -> checks.Check:
    """As ninja's, and `meta.json` must parse."""
    return checks.json_object if path.endswith("/" + _META) else ninja.check_of(path)


def unit_fault(unit: str, paths: Collection[str]) -> str | None:
    """CuTe kernels count only beside the `meta.json` that is written last."""
    if not unit.endswith(_CUTE) or f"{unit}/{_META}" in paths:
        return None
    return f"has kernels and no `{_META}`" if any(path.endswith(".o") for path in paths) else None


def _winner(content: checks.Content) -> str | None:
    """A winner is named by the first 24 digits of the sha256 of the key in it."""
    if not content.whole:
        return None
    value = checks.parsed_object(content.head)
    if value is None:
        return "is no complete JSON object"
    key = value.get("key")
    named = hashlib.sha256(key.encode()).hexdigest()[:24] if isinstance(key, str) else None
    return None if named == content.name.removesuffix(".json") else "is no entry of its name"


FLASHINFER_JIT = Domain(
    "flashinfer_jit",
    "FLASHINFER_WORKSPACE_BASE",
    ".cache/flashinfer",
    usual_base="~",
    travels=travels,
    unit_of=unit_of,
    check_of=check_of,
    unit_fault=unit_fault,
    relocation_of=ninja.relocation_of,
    content_keyed=False,
    keeps_mtimes=True,
    exact_only=True,
    source="flashinfer 0.7.4 jit/env.py, jit/core.py, jit/cpp_ext.py, jit/cute_dsl_core.py",
)

_ARTIFACT = re.compile(r"[0-9a-f]{8,}/")

FLASHINFER_CUBINS = Domain(
    "flashinfer_cubins",
    "FLASHINFER_WORKSPACE_BASE",
    ".cache/flashinfer/cubins",
    moved_by="FLASHINFER_CUBIN_DIR",
    usual_base="~",
    travels=lambda path: "/" in path and not path.endswith((".lock", ".tmp")),
    unit_of=lambda path: path,
    check_of=lambda _path: checks.whole_when_elf,
    checks_itself=True,
    is_unit=lambda paths: all(map(_ARTIFACT.match, paths)),
    content_keyed=True,
    source="flashinfer 0.7.4 jit/env.py, jit/cubin_loader.py, artifacts.py",
)

FLASHINFER_WINNERS = Domain(
    "flashinfer_winners",
    "FLASHINFER_AUTOTUNE_CACHE_DIR",
    travels=lambda path: _WINNER.fullmatch(path) is not None,
    unit_of=lambda path: path,
    check_of=lambda path: _winner if "/entries/" in path else checks.json_object,
    content_keyed=True,
    source="flashinfer 0.7.4 autotune_cache.py; vLLM 0.33 model_executor/warmup/kernel_warmup.py",
)
