"""What a domain is: a row of rules about one on-disk cache."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from cachemgr.domains.checks import Check


@dataclass(frozen=True)
class Relocation:
    """How one kind of file is stored without its directory (`detach`) and given a new one (`attach`)."""

    detach: Callable[[bytes, Collection[str]], bytes]
    attach: Callable[[bytes, str], bytes]
    needs_all: bool = False
    """Whether its engine dies when something that the file names is missing, so that it is read before every start."""


@dataclass(frozen=True)
class Domain:
    """One cache. All paths are relative to its directory, with `/`."""

    name: str
    variable: str
    """The environment variable that moves it."""
    subdirectory: str = ""
    """Where it lies below the directory that the variable names."""
    travels: Callable[[str], bool] = field(kw_only=True)
    """Whether a file belongs into a capture: never locks, temporaries, or facts about one machine."""
    unit_of: Callable[[str], str] = field(kw_only=True)
    """The name of the unit that a file belongs to."""
    check_of: Callable[[str], Check] = field(kw_only=True)
    """How a file proves that it is whole."""
    unit_fault: Callable[[str, Collection[str]], str | None] = field(kw_only=True)
    """What is missing from a unit with these paths, or None."""
    relocation_of: Callable[[str], Relocation | None] = field(kw_only=True)
    """How a file that names its own directory travels."""
    content_keyed: bool = field(kw_only=True)
    """Looked up by the hash of everything that matters, so that a near artifact's units are always safe to offer."""
    entry_of: Callable[[str], str | None] = field(kw_only=True, default=lambda _unit: None)
    """The engine's own name of a unit, where it has one."""
    keeps_mtimes: bool = field(kw_only=True, default=False)
    """Whether validity depends on modification times (ninja)."""


@dataclass(frozen=True)
class Target:
    """A domain and its live directory for one launch."""

    domain: Domain
    directory: str
    ours: bool
    """False where the user chose the directory."""
