"""Domains: the caches that engines keep on disk, as data with rules.

A domain says which variable moves it, which of its files travel, what belongs together (a unit is whole or
worthless), how a file proves that it is whole, and which files are not stored as they are. To add one, add a row to
`VLLM` or `ON_REQUEST`; the rules of each family are in the module named after it.
"""

from collections.abc import Collection

from cachemgr.domains.domain import ROOT_VARIABLE, Domain, Target
from cachemgr.domains.flashinfer import FLASHINFER_CUBINS, FLASHINFER_JIT, FLASHINFER_WINNERS
from cachemgr.domains.jit import CUTE_DSL, DEEP_GEMM, TILELANG, TORCH_EXTENSIONS, TVM_FFI
from cachemgr.domains.torch import INDUCTOR
from cachemgr.domains.triton import TRITON
from cachemgr.domains.vllm import AUTOTUNE, MODELINFOS, STARTUP_PLAN, TORCH_COMPILE

__all__ = ["ON_REQUEST", "ROOT_VARIABLE", "TABLE", "TORCH_PROGRAM", "VLLM", "Domain", "Target", "by_name", "of_engine"]

VLLM: tuple[Domain, ...] = (
    TORCH_COMPILE,
    INDUCTOR,
    TRITON,
    MODELINFOS,
    AUTOTUNE,
    DEEP_GEMM,
    CUTE_DSL,
    TILELANG,
    FLASHINFER_JIT,
    FLASHINFER_CUBINS,
    FLASHINFER_WINNERS,
    TVM_FFI,
    TORCH_EXTENSIONS,
)
"""The domains of a vLLM launch."""

ON_REQUEST: tuple[Domain, ...] = (STARTUP_PLAN,)
"""Domains of a vLLM launch that somebody must ask for: right only on the same hardware."""

TABLE: tuple[Domain, ...] = (*VLLM, *ON_REQUEST)
"""Every domain that this release can restore."""

TORCH_PROGRAM: tuple[Domain, ...] = (INDUCTOR, TRITON, CUTE_DSL)
"""The domains of a plain torch.compile program."""


_OF_ENGINE = {"torch": TORCH_PROGRAM, "vllm": VLLM}


def of_engine(engine: str, also: Collection[str] = ()) -> tuple[Domain, ...]:
    """The domains that a launch of `engine` may have, and those that were asked for by name."""
    asked = tuple(domain for domain in ON_REQUEST if domain.name in also) if engine == "vllm" else ()
    return (*_OF_ENGINE[engine], *asked)


def by_name(name: str) -> Domain | None:
    """The domain called `name`, or None when a newer cachemgr knows it and we do not."""
    return next((domain for domain in TABLE if domain.name == name), None)
