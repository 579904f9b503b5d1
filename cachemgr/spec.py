"""Specs: many commands to prewarm, as TOML or YAML that people write and keep.

    [defaults]
    limit = "45min"
    env = { HF_HUB_OFFLINE = "1" }

    [[entries]]
    name = "llama-8b"
    command = ["vllm", "serve", "/models/llama-8b", "--max-model-len", "8192"]
    gpu = "NVIDIA H200"
    gpus = 1

Words are as they are written, also those that look like numbers (`0.90`) or, in YAML, truth values (`no`). An entry is
one command with the variables that it needs beside those of whoever prewarms. `defaults` has the same fields but for
`name` and `command`; an entry's own come first, and its `env` is added to that of the defaults. Nothing in a spec is
executed but its commands, without a shell; nothing in it is expanded.
"""

import difflib
import re
import reprlib
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from cachemgr import documents, sizes
from cachemgr.capture import Manifest
from cachemgr.errors import UsageError
from cachemgr.sensitive import HIDDEN

SCHEMA = 1
DEFAULT_LIMIT = 3600.0
"""Seconds that all starts of one entry may take together, unless it says otherwise."""
_MOST_BYTES = 8 << 20
_MOST_ENTRIES = 10_000
_MOST_GPUS = 1024
_LONG_TEXT = 100
_EXAMPLE = "docs/images.md shows one"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = "CACHEMGR_"
_COMMON = ("env", "gpu", "gpus", "limit")
_FIELDS = ("name", "command", *_COMMON)


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One command to prewarm."""

    name: str
    """Letters, digits, dots, dashes and underscores: it names files and tasks, too."""
    command: tuple[str, ...]
    env: dict[str, str] = {}
    gpu: str | None = None
    """The name of the GPU that it needs, as NVML says it, or a part of that; None for any, also for none at all."""
    gpus: int = 0
    """How many of them."""
    limit: float = DEFAULT_LIMIT
    """Seconds for all its starts together."""

    @property
    def wanted_gpus(self) -> str:
        """How many GPUs it needs, and of which kind, for people."""
        return f"{self.gpus} of {self.gpu or 'any GPU'}"


class Spec(msgspec.Struct, frozen=True):
    """Entries in the order in which they are prewarmed; no two have the same name."""

    entries: tuple[Entry, ...]

    def only(self, names: Sequence[str]) -> "Spec":
        """The entries with these names, in their own order.

        Raises:
            UsageError: one is not there.
        """
        known = {entry.name for entry in self.entries}
        for name in names:
            if name not in known:
                raise UsageError(f"the spec has no entry `{name}`", hint=f"it has {', '.join(sorted(known))}")
        return Spec(tuple(entry for entry in self.entries if entry.name in names))


def load(path: Path) -> Spec:
    """Read a spec from a file: TOML, or YAML where its name ends in `.yaml`, `.yml`, or `.json`, which is YAML as well.

    Raises:
        UsageError: it cannot be read, or is no spec; which entry and which field.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        text = data.decode("utf-8-sig")  # some editors begin a file with a mark
    except OSError as error:
        raise UsageError(f"spec {path} cannot be read: {error.strerror}", hint=_EXAMPLE) from None
    except UnicodeDecodeError:
        raise UsageError(f"spec {path} cannot be read: it is no UTF-8", hint=_EXAMPLE) from None
    if len(data) > _MOST_BYTES:
        raise UsageError(f"spec {path} is larger than {sizes.spell(_MOST_BYTES)}", hint="split it")
    return parse(text, where=str(path), yaml=path.suffix.lower() in {".yaml", ".yml", ".json"})


def parse(text: str, *, where: str, yaml: bool) -> Spec:
    """Read a spec; `where` names it in errors.

    Raises:
        UsageError: it is no spec; which entry and which field.
    """
    try:
        content = documents.yaml_as_written(text) if yaml else documents.toml(text, number=str)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"spec {where} is no {'YAML' if yaml else 'TOML'}: {error}", hint=_EXAMPLE) from None
    try:
        return _spec(content)
    except ValueError as error:
        raise UsageError(f"spec {where}: {error}", hint=_EXAMPLE) from None


def dump(entries: Sequence[Entry]) -> str:
    """A spec as YAML."""
    rows = [
        {
            "name": entry.name,
            "command": list(entry.command),
            **({"env": entry.env} if entry.env else {}),
            **({"gpu": entry.gpu} if entry.gpu is not None else {}),
            **({"gpus": entry.gpus} if entry.gpus else {}),
            **({"limit": f"{entry.limit:.3f}s"} if entry.limit != DEFAULT_LIMIT else {}),
        }
        for entry in entries
    ]
    return documents.as_yaml({"schema": SCHEMA, "entries": rows})


def of_captures(manifests: Sequence[Manifest]) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """An entry for each command and kind of GPU that captures were made of, and why some have none.

    A capture keeps its command with the values of options that may be secret replaced, and a command with a hole in it
    cannot be started. Variables are kept as factors only, so no entry has any.
    """
    entries: dict[tuple[tuple[str, ...], str | None, int], Entry] = {}
    without: list[str] = []
    names: set[str] = set()
    for manifest in manifests:
        command = manifest.provenance.command
        gpu = None if manifest.device in {"cpu", "unknown"} else manifest.device
        gpus = max(manifest.world, 1) if gpu else 0
        what = (command, gpu, gpus)
        if what in entries:
            continue
        if not command:
            without.append(f"{manifest.key[:12]} ({manifest.model}) was captured without its command")
        elif any(HIDDEN in word for word in command):
            without.append(f"{manifest.key[:12]} ({manifest.model}) has a secret in its command: {shlex.join(command)}")
        else:
            name = free_name(manifest.model, names)
            entries[what] = Entry(name, command, gpu=gpu, gpus=gpus)
            names.add(name)
    return tuple(entries.values()), tuple(dict.fromkeys(without))


def seconds(value: object) -> float:
    """Seconds of a time such as `90s`, `45min`, `2h` or a plain number of seconds.

    Raises:
        ValueError: it is written otherwise, or not above 0.
    """
    text = str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)(s|min|h|)", text)
    if found is None or not float(found[1]):
        raise ValueError("must be a time such as 90s, 45min or 2h")
    return float(found[1]) * {"s": 1, "": 1, "min": 60, "h": 3600}[found[2]]


def _spec(content: object) -> Spec:
    top = _mapping(content, "the spec")
    _known(top, ("schema", "defaults", "entries"), "the spec")
    if top.get("schema", SCHEMA) not in (SCHEMA, str(SCHEMA)):
        raise ValueError(f"`schema` must be {SCHEMA}: a newer cachemgr may read this one")
    defaults = _mapping(top.get("defaults", {}), "`defaults`")
    _known(defaults, _COMMON, "`defaults`")
    rows = top.get("entries")
    if not isinstance(rows, list) or not rows or len(rows) > _MOST_ENTRIES:
        raise ValueError(f"`entries` must be a list of 1 to {_MOST_ENTRIES} entries")
    entries = tuple(_entry(row, number, defaults) for number, row in enumerate(rows, start=1))
    seen: set[str] = set()
    for entry in entries:
        if entry.name.lower() in seen:  # they name files, and some file systems ignore case
            raise ValueError(f"two entries are called `{entry.name}`")
        seen.add(entry.name.lower())
    return Spec(entries)


def _entry(row: object, number: int, defaults: Mapping[str, object]) -> Entry:
    who = f"entry {number}"
    given = _mapping(row, who)
    name = given.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"`name` of {who} must be letters, digits, dots, dashes and underscores, not {_brief(name)}")
    who = f"entry `{name}`"
    _known(given, _FIELDS, who)
    common = {**defaults, **{field: given[field] for field in _COMMON if field in given}}
    gpu = common.get("gpu")
    gpus = _count(common.get("gpus", 0 if gpu is None else 1))
    if gpu is not None and (not isinstance(gpu, str) or not gpu):
        raise ValueError(f"`gpu` of {who} must be the name of a GPU")
    if gpus is None or (gpu is not None and not gpus):
        raise ValueError(f"`gpus` of {who} must be a number of GPUs, not {_brief(common.get('gpus'))}")
    return Entry(
        name,
        _command(given.get("command"), who),
        {**_env(defaults.get("env", {}), "`defaults`"), **_env(given.get("env", {}), who)},
        gpu,
        gpus,
        _limit(common.get("limit", DEFAULT_LIMIT), who),
    )


def _count(value: object) -> int | None:
    """How many GPUs; YAML has its numbers as they are written. None for what is no number of them."""
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,4}", str(value) if isinstance(value, (int, str)) else ""):
        return None
    return int(str(value)) if int(str(value)) <= _MOST_GPUS else None


def _limit(value: object, who: str) -> float:
    try:
        return seconds(value)
    except ValueError as error:
        raise ValueError(f"`limit` of {who} {error}, not {_brief(value)}") from None


def _command(value: object, who: str) -> tuple[str, ...]:
    """A list of words, or a line that is split as a shell would split it, and not expanded."""
    if isinstance(value, str):
        try:
            words: object = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"`command` of {who} cannot be split: {error}") from None
    else:
        words = value
    if not isinstance(words, list) or not words or not words[0]:
        raise ValueError(f"`command` of {who} must be a list of words, or a line")
    for word in words:
        if not _is_word(word):
            raise ValueError(f"`command` of {who} has {_brief(word)}, which is no word: quote it")
    return tuple(map(str, words))


def _env(value: object, who: str) -> dict[str, str]:
    given = _mapping(value, f"`env` of {who}")
    for name, text in given.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"`env` of {who} has `{name}`, which is no name of a variable")
        if name.startswith(_OURS):
            raise ValueError(f"`env` of {who} sets {name}: settings of cachemgr belong to whoever prewarms")
        if not _is_word(text):
            raise ValueError(f"`env` of {who} gives {name} a value that is no text: quote it")
    return {name: str(text) for name, text in given.items()}


def _is_word(value: object) -> bool:
    """Whether it can be said to a process: text, or a number."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return False
    try:
        return b"\0" not in str(value).encode()
    except ValueError:  # half of a character, or a number with thousands of digits
        return False


def _brief(value: object) -> str:
    """A value as it is told in an error, however large it is: aliases of YAML make much of little."""
    if isinstance(value, (dict, list)):
        return f"a {'table' if isinstance(value, dict) else 'list'}"
    return f"`{reprlib.repr(value) if len(repr(value)) > _LONG_TEXT else value}`"


def _mapping(value: object, who: str) -> dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{who} must be a table of named fields")
    return value


def _known(given: Mapping[str, object], allowed: Sequence[str], who: str) -> None:
    for name in given:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, 1)
            meant = f"; did you mean `{near[0]}`?" if near else ""
            raise ValueError(f"{who} has {_brief(name)}, which is none of {', '.join(allowed)}{meant}")


def free_name(wanted: str, taken: Collection[str]) -> str:
    """A name for an entry: what is wanted, as far as it can be one, and a number where that is taken."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted.rstrip("/").rsplit("/", 1)[-1]).strip("-._")[:80] or "entry"
    lowered = {name.lower() for name in taken}
    numbered = [plain, *(f"{plain}-{number}" for number in range(2, len(taken) + 3))]
    return next(name for name in numbered if name.lower() not in lowered)
