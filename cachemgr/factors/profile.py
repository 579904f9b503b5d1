"""What a command would compile, and what that needs of a host."""

import msgspec

from cachemgr.key import Factor, Relations


class Profile(msgspec.Struct, frozen=True):
    """Everything about a command that decides which artifact fits it."""

    engine: str
    engine_version: str | None
    model: str
    """For people: the name of the script or module."""
    device: str
    """For people: the name of the GPU, or `cpu`."""
    factors: tuple[Factor, ...]
    host: Relations
    """What this host offers."""
    needs: Relations
    """What a capture that is made here needs of its host."""
    command: tuple[str, ...]
    """The command line without its secrets."""
    constants: dict[str, str]
    """Variables to set for the command because they are in the engine's key."""
    pins: dict[str, str] = {}
    """Variables to set for the command because its engine hashes what is a mere place; never factors."""
    ranks: tuple[str, ...] = ()
    """The ranks that run on this node, by the names that the engine gives to their directories; empty where unknown."""
    world: int = 0
    """Ranks of the whole world, on all nodes; 0 where unknown."""
    gpus: int | None = None
    """GPUs that wait for a start of it, on all nodes that it is in charge of; None where unknown."""
    compiles: bool = True
    """Whether torch.compile will run at all."""
    notes: tuple[str, ...] = ()
    """What a person should know about this reading of the command: facts that were assumed, caches that cannot be."""

    @property
    def unknown_guards(self) -> list[str]:
        """Names of the guards that could not be read; no artifact fits a command that has any."""
        return [factor.name for factor in self.factors if factor.role == "guard" and factor.value is None]
