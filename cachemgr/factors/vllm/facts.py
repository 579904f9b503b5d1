"""What vLLM releases say about their own flags and variables: `facts.json`, by version.

The file is generated from the sources (`scripts/vllm_facts.py`), and a test compares the two. Its words for how a flag
takes its value, `takes`:

`flag`      stands alone.
`switch`    stands alone, and has a twin `--no-…`.
`pair`      a switch that also knows `--disable-…` for `--enable-…` (0.33.0 `utils/argparse_utils.py`).
`optional`  may be followed by a value.
`many`      takes all words up to the next option, `append` one word each time it is given.
`text`, `int`, `float`, `json`, `json-or-text`, `human` (`4k`, `4K`) and `human-auto` (the same, or `auto`) take one.

A `?` behind the word: an empty value and `None` mean none.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType

import msgspec

Default = bool | int | float | str | None


class Flag(msgspec.Struct, frozen=True, array_like=True):
    """One flag of some versions."""

    name: str
    """Canonical, without dashes in front."""
    owner: str
    """`engine`, or the front end that has it: `serve`, `run-batch`, `grpc`, `bench latency` …"""
    takes: str
    aliases: tuple[str, ...]
    """Other spellings, with their dashes."""
    feeds: str | None
    """The field of a config that it sets, as `ParallelConfig.tensor_parallel_size`."""
    default: Default
    """A plain word, number or switch. None where there is none, or where vLLM decides later."""
    hashed: bool
    """Whether `VllmConfig.compute_hash` contains the value of that field."""
    versions: str


class _Key(msgspec.Struct, frozen=True, array_like=True):
    flag: str
    key: str
    hashed: bool
    versions: str


class _Variable(msgspec.Struct, frozen=True, array_like=True):
    name: str
    hashed: bool
    versions: str


class _Architecture(msgspec.Struct, frozen=True, array_like=True):
    name: str
    versions: str


class _File(msgspec.Struct, frozen=True):
    versions: tuple[str, ...]
    level_3_is_2: str
    flags: tuple[Flag, ...]
    keys: tuple[_Key, ...]
    variables: tuple[_Variable, ...]
    breakable: tuple[_Architecture, ...]


class Facts(msgspec.Struct, frozen=True):
    """What one version says."""

    version: str
    """The release that the facts were read from."""
    assumed: str | None
    """The same where the engine is another version and these facts are only assumed; None where they are its own."""
    close: bool
    """Whether the engine is of the same minor release: patch releases of vLLM keep what they hash."""
    flags: tuple[Flag, ...]
    keys: dict[str, dict[str, bool]]
    """Of a flag that takes a config as JSON: its keys, dotted where they nest, and whether the hash contains them."""
    variables: dict[str, bool]
    """Variables that vLLM reads, and whether `compile_factors` (`vllm/envs.py`) hashes them."""
    breakable: frozenset[str]
    """Model architectures that run without torch.compile unless a variable says otherwise (`config/vllm.py`)."""
    level_3_is_2: bool
    """Whether `-O3` sets exactly what `-O2` sets."""

    def options(self, owner: str) -> Mapping[str, Flag]:
        """The flags of the front end `owner` and of the engine, by canonical name."""
        return _options(self.version, owner)


@cache
def _options(version: str, owner: str) -> Mapping[str, Flag]:
    flags = [flag for flag in _read().flags if _covers(flag.versions, version)]
    found = {flag.name: flag for flag in flags if flag.owner == "engine"}
    found.update({flag.name: flag for flag in flags if flag.owner == owner})
    return MappingProxyType(found)


def facts_for(version: str | None) -> Facts:
    """The facts of `version`, or those of the nearest known release at or below it (of the oldest, below that).

    A local (`+cu130`) or post release has the facts of its release; a pre-release is assumed to.
    """
    known = _read().versions
    release, exact = _release(version)
    if release is None:
        return _of(known[-1], assumed=True, close=False)
    below = [each for each in known if _numbers(each) <= release] or [known[0]]
    nearest = _numbers(below[-1])
    return _of(below[-1], assumed=not exact or nearest != release, close=nearest[:2] == release[:2])


def known_versions() -> tuple[str, ...]:
    """The releases whose sources were read, oldest first."""
    return _read().versions


def _release(version: str | None) -> tuple[tuple[int, ...] | None, bool]:
    """The release numbers in `version`, and whether it is that release (PEP 440: local and post releases are)."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?(.*)", version or "", re.DOTALL)
    if found is None:
        return None, False
    rest = found[4].partition("+")[0]
    return (int(found[1]), int(found[2]), int(found[3] or 0)), re.fullmatch(r"(\.?post\d*)?", rest) is not None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@cache
def _read() -> _File:
    data = resources.files("cachemgr.factors.vllm").joinpath("facts.json").read_bytes()
    return msgspec.json.decode(data, type=_File)


@cache
def _of(version: str, *, assumed: bool, close: bool) -> Facts:
    file = _read()
    keys: dict[str, dict[str, bool]] = {}
    for key in file.keys:
        if _covers(key.versions, version):
            keys.setdefault(key.flag, {})[key.key] = key.hashed
    return Facts(
        version=version,
        assumed=version if assumed else None,
        close=close,
        flags=tuple(flag for flag in file.flags if _covers(flag.versions, version)),
        keys=keys,
        variables={each.name: each.hashed for each in file.variables if _covers(each.versions, version)},
        breakable=frozenset(each.name for each in file.breakable if _covers(each.versions, version)),
        level_3_is_2=_covers(file.level_3_is_2, version),
    )


@cache
def _covers(spans: str, version: str) -> bool:
    if spans == "*":
        return True
    wanted = _numbers(version)
    for span in filter(None, spans.split(",")):
        first, _, last = span.partition("-")
        if _numbers(first) <= wanted <= _numbers(last or first):
            return True
    return False
