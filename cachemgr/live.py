"""Live directories: where an engine looks, and the variables that make it look there."""

import os
from collections.abc import Mapping, Sequence

from cachemgr.domains import Domain
from cachemgr.warm import Target


def live_target(domain: Domain, environ: Mapping[str, str], own: str) -> Target:
    """Where `domain` lies for a launch whose own directories are below `own`."""
    chosen = environ.get(domain.variable)
    if chosen:
        return Target(domain, os.path.join(os.path.abspath(chosen), domain.subdirectory).rstrip("/"), ours=False)
    return Target(domain, f"{own}/{domain.name}", ours=True)


def live_root(environ: Mapping[str, str]) -> str:
    """`VLLM_CACHE_ROOT` and its default (vLLM 0.26-0.32 `envs.py`), absolute."""
    root = environ.get("VLLM_CACHE_ROOT")
    if not root:
        caches = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or "~", ".cache")
        root = os.path.join(caches, "vllm")
    return os.path.abspath(os.path.expanduser(root))


def pins(targets: Sequence[Target]) -> dict[str, str]:
    """The variables that make an engine use the targets that are ours."""
    return {target.domain.variable: target.directory for target in targets if target.ours}
