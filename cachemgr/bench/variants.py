"""What a benchmark starts: the command as it was given, near to itself, and with other settings.

Settings that come to the same are not started twice. Before a start that is known by equal keys; after it by what the
engine said: the names of its entries and its graph mode.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from cachemgr.errors import UsageError
from cachemgr.factors import describe, engine_of
from cachemgr.factors.vllm.flags import Flags
from cachemgr.factors.wrappers import spelled_out
from cachemgr.key import Key, derive

Kind = Literal["cold", "second", "restored", "near"]
"""In a new root without an artifact; again in that root; in a new root with the artifact, or with that of another
setting."""
GIVEN = "as given"
NEAR = "near"
VARY: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "optimization-level": tuple((f"-O{level}", ("--optimization-level", str(level))) for level in range(4)),
    "cudagraph-mode": tuple(
        (mode, (f"--compilation-config.cudagraph_mode={mode}",))
        for mode in ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
    ),
    "capture-sizes": tuple(
        (f"up to {most}", ("--max-cudagraph-capture-size", str(most))) for most in (1, 8, 64, 256, 512)
    ),
}
"""By what can be varied: each setting by name, and the flags of vLLM 0.26 to 0.33 that make it."""
_LENGTH, _OTHER_LENGTH = "max-model-len", 1024


class Variant(msgspec.Struct, frozen=True):
    """A command with some setting."""

    name: str
    argv: tuple[str, ...]
    key: Key
    same_as: str | None = None
    """An earlier variant that has the same key."""


class Planned(msgspec.Struct, frozen=True):
    """One start."""

    variant: Variant
    kind: Kind


def plan(
    argv: Sequence[str], vary: Collection[str], environ: Mapping[str, str], cwd: Path, ignored_args: Sequence[str]
) -> tuple[tuple[Variant, ...], tuple[Planned, ...]]:
    """The variants of a command, and the starts of them in their order.

    Raises:
        NoSuchCommandError, CannotExecuteError: it cannot be started.
        UsageError: there is something to vary, and it starts no engine of vLLM.
    """
    engine = engine_of(argv, environ, cwd)
    if vary and engine is None:
        raise UsageError(
            "--vary changes flags of vLLM, and this command starts no engine of it", hint="leave --vary out"
        )
    wanted = [(GIVEN, tuple(argv))]
    open_ended = spelled_out(argv, environ)
    wanted += [(name, (*open_ended, *flags)) for what in vary for name, flags in VARY[what]]
    if engine is not None:
        wanted.append((NEAR, (*open_ended, *other_length(engine[1]))))
    variants: list[Variant] = []
    for name, words in wanted:
        key = derive(describe(words, environ, cwd=cwd, ignored_args=ignored_args).factors)
        same = next((variant.name for variant in variants if variant.key == key), None)
        variants.append(Variant(name, words, key, same))
    return tuple(variants), tuple(start for variant in variants for start in _starts(variant))


def _starts(variant: Variant) -> list[Planned]:
    if variant.same_as is not None:
        return []
    kinds: dict[str, tuple[Kind, ...]] = {GIVEN: ("cold", "second", "restored"), NEAR: ("near",)}
    return [Planned(variant, kind) for kind in kinds.get(variant.name, ("cold", "restored"))]


def other_length(flags: Flags) -> tuple[str, str]:
    """Another longest sequence: near to the command in a factor that the engine hashes, and as large a model."""
    given = flags.integer(_LENGTH, 0)
    return (f"--{_LENGTH}", str(given // 2 if given > 1 else _OTHER_LENGTH))
