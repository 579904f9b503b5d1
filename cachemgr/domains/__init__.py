"""Domains: the caches that engines keep on disk, as data with rules.

A domain says which variable moves it, which of its files travel, what belongs together (a unit is whole or
worthless), how a file proves that it is whole, and which files name their own directory. To add one, add a row to
`TABLE`; the rules of each family are in the module named after it.
"""

from cachemgr.domains.domain import Domain, Target
from cachemgr.domains.torch import INDUCTOR
from cachemgr.domains.triton import TRITON
from cachemgr.domains.vllm import MODELINFOS, TORCH_COMPILE

__all__ = ["TABLE", "TORCH_PROGRAM", "Domain", "Target", "by_name"]

TABLE: tuple[Domain, ...] = (TORCH_COMPILE, INDUCTOR, TRITON, MODELINFOS)
"""Every domain that this release can restore."""

TORCH_PROGRAM: tuple[Domain, ...] = (INDUCTOR, TRITON)
"""The domains of a plain torch.compile program."""


def by_name(name: str) -> Domain | None:
    """The domain called `name`, or None when a newer cachemgr knows it and we do not."""
    return next((domain for domain in TABLE if domain.name == name), None)
