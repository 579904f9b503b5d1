"""What a domain is: a row of rules about one on-disk cache."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from cachemgr.domains.checks import Check

ROOT_VARIABLE = "VLLM_CACHE_ROOT"
"""What moves everything that vLLM keeps by names of its own (vLLM 0.26-0.33 `envs.py`)."""


@dataclass(frozen=True)
class Relocation:
    """How one kind of file is stored without its directory (`detach`) and given a new one (`attach`).

    A scrub is one whose `attach` changes nothing (`cachemgr.domains.scrub`).
    """

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
    moved_by: str = ""
    """Another variable, which names its directory itself; while it is set, `variable` does not move this cache."""
    usual_base: str = ""
    """What an unset `variable` means (`~` is the home directory) for a cache that is never moved: it is used where the
    engine puts it, since its files name that place or since a copy elsewhere would hide what an image brought along."""
    in_place: bool = False
    """Whether it lies below vLLM's own root, by names that all launches share, so that only that root is moved."""
    source: str = field(kw_only=True)
    """Where its layout and rules were read: project, version, file."""
    travels: Callable[[str], bool] = field(kw_only=True)
    """Whether a file belongs into a capture: never locks, temporaries, or facts about one machine."""
    unit_of: Callable[[str], str] = field(kw_only=True)
    """The name of the unit that a file belongs to."""
    check_of: Callable[[str], Check] = field(kw_only=True)
    """How a file proves that it is whole."""
    unit_fault: Callable[[str, Collection[str]], str | None] = field(kw_only=True, default=lambda _unit, _paths: None)
    """What is missing from a unit with these paths, or None."""
    relocation_of: Callable[[str], Relocation | None] = field(kw_only=True, default=lambda _path: None)
    """How a file that names its own directory travels."""
    is_unit: Callable[[Collection[str]], bool] | None = field(kw_only=True, default=None)
    """Whether a unit of these paths has names as only this engine gives them; None where `travels` says as much. A
    directory that the user chose may be a home or `/tmp`, and what else lies there is not ours to read or to move."""
    content_keyed: bool = field(kw_only=True)
    """Looked up by the hash of everything that matters, so that a near artifact's units are always safe to offer."""
    entry_of: Callable[[str], str | None] = field(kw_only=True, default=lambda _unit: None)
    """The engine's own name of a unit, where it has one."""
    ranks_of: Callable[[str, Collection[str]], frozenset[str]] = field(
        kw_only=True, default=lambda _unit, _paths: frozenset()
    )
    """The ranks that a unit with these paths has something of, as `rank_<rank>_<dp>`; none when it is not divided by
    ranks."""
    keeps_mtimes: bool = field(kw_only=True, default=False)
    """Whether validity depends on modification times (ninja). Such files name their own directory in a way that nobody
    can rewrite, too: below another one they are of no use, and of no harm."""
    exact_only: bool = field(kw_only=True, default=False)
    """Restored only where every factor is equal."""
    checks_itself: bool = field(kw_only=True, default=False)
    """Whether its engine compares every file with a digest when it loads it, and gets it anew when it is wrong: then
    nobody reads gigabytes before a start to find out."""
    waits_for: Callable[[str], bool] | None = field(kw_only=True, default=None)
    """Whether its engine waits until somebody removes this file, however long ago its maker died; None for none."""
    chooses: Callable[[str], bool] = field(kw_only=True, default=lambda _path: False)
    """Whether a file only says which of some kernels to launch, which are kept as files of their own. Its name stands
    for all of them, so that another choice in the place of an offered one means nothing that was compiled."""
    needs_compile: bool = field(kw_only=True, default=False)
    """Whether only torch.compile writes it, so that a start with `--enforce-eager` has none."""


@dataclass(frozen=True)
class Target:
    """A domain and its live directory for one launch."""

    domain: Domain
    directory: str
    ours: bool
    """False where the user chose the directory."""
    pin: tuple[str, str] | None = None
    """The variable and its value that make the engine use this directory, where it would not by itself."""
