"""Flags of a vLLM command, in one spelling.

vLLM's parser (`utils/argparse_utils.py`, FlexibleArgumentParser, 0.26 to 0.33, on Python's argparse) takes dashes and
underscores, `--flag value` and `--flag=value`, `-O2`, JSON and dotted keys, unambiguous beginnings of long flags
(allow_abbrev is left on), and a YAML file behind `--config`, whose values come before those of the command line.
What it would refuse is kept as it stands: such a command fails by itself, and unknown words must count.

As in vLLM: dotted keys of one spelling become one JSON value that comes last, so they replace a JSON value of the same
flag rather than join it; a flag that is given twice counts as given last; `--config=FILE` is not read.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from cachemgr import digest
from cachemgr.factors.text import encodable, told
from cachemgr.factors.vllm import yaml_file
from cachemgr.factors.vllm.facts import Facts, Flag
from cachemgr.factors.vllm.harmless import AUTO_SIZED, DERIVED, HARMLESS, HARMLESS_KEYS, ONLY_GIVEN
from cachemgr.factors.vllm.words import Reader, canonical, dashed, spelled, switches, undotted
from cachemgr.key import Factor, Role
from cachemgr.sensitive import is_secret

_PLAIN = re.compile(r"|[+-]?\d{1,9}(\.\d{1,6})?|true|false|null|auto|none", re.IGNORECASE)
# Defaults that a front end changes for itself: benchmarks/latency.py, set_defaults.
_CHANGED = {"bench latency": {"enable-prefix-caching": "false"}}
SECRET = frozenset({"api-key", "hf-token"})
"""Known flags that hold a secret. `is_secret` would also take `…-token-threshold` for one, so it judges words that
nobody knows, and only those."""


class Draft(msgspec.Struct, frozen=True):
    """A draft model as a command asks for it."""

    name: str
    revision: str | None = None
    code_revision: str | None = None


class Flags(msgspec.Struct, frozen=True):
    """The flags of one command."""

    front_end: str
    values: dict[str, str]
    """By canonical name. Numbers in decimal, switches as `true` and `false`, JSON in canonical form, lists as JSON."""
    model: str | None = None
    """The model, from the command line or the configuration file. Not among `values`: `factors.vllm.model` reads it."""
    unknown: tuple[str, ...] = ()
    """Words that no flag explains, in their order."""
    config_file: str | None = None
    """A configuration file that could not be read, and why."""

    def integer(self, name: str, default: int) -> int:
        """The value of a number, or `default` where it is absent or no number."""
        try:
            return int(self.values.get(name, ""))
        except ValueError:
            return default

    def on(self, name: str) -> bool:
        """Whether a switch is on."""
        return self.values.get(name) == "true"

    def keys(self, name: str) -> dict[str, object]:
        """The JSON object that a flag was given, or an empty one."""
        return _object(self.values.get(name, "")) or {}

    @property
    def draft(self) -> Draft | None:
        """The model that drafts for speculative decoding, where one of its own is named.

        vLLM (0.26 to 0.33 `engine/arg_utils.py`, create_speculative_config) joins both spellings, and takes dashes in
        keys.
        """
        given = {key.replace("-", "_"): value for key, value in self.keys("speculative-config").items()}
        name, revision, code = (given.get(key) for key in ("model", "revision", "code_revision"))
        name = self.values.get("spec-model", name)
        if not isinstance(name, str) or not name:
            return None
        return Draft(name, _text_or_none(revision), _text_or_none(code))


def parse(words: Sequence[str], facts: Facts, front_end: str, cwd: Path) -> Flags:
    """The flags in `words`, which follow the words of the command (`vllm serve`).

    A flag that equals its literal default is left out, as one that is not given.
    """
    options = facts.options(front_end)
    file: list[str] = []
    problem = None
    if "--config" in words[:-1]:
        at = list(words).index("--config")
        try:
            file = yaml_file.words(cwd / words[at + 1], switches(options))
        except ValueError as error:
            problem = str(error)
        words = [*words[:at], *words[at + 2 :]]
    operand = front_end == "serve" and bool(words) and not words[0].startswith("-")
    ordered = [*words[:1], *file, *words[1:]] if operand else [*file, *words]
    reader = Reader(options)
    reader.values.update(_CHANGED.get(front_end, {}))
    reader.read(undotted(dashed(ordered)))
    model = reader.values.pop("model", None)
    # `vllm serve MODEL` wins over the file (entrypoints/cli/serve.py); --model is moved to its place.
    if reader.operands:
        model = model if model is not None and _names_model(words) else reader.operands.pop(0)
    flags = settled(front_end, reader.values, model, (*reader.unknown, *reader.operands), facts)
    return msgspec.structs.replace(flags, config_file=problem)


def settled(front_end: str, given: Mapping[str, str], model: str | None, unknown: Sequence[str], facts: Facts) -> Flags:
    """Flags without those that equal their literal default."""
    options = facts.options(front_end)
    values = {name: text for name, text in given.items() if not _is_default(options.get(name), text)}
    if facts.level_3_is_2 and values.get("optimization-level") == "3":
        values.pop("optimization-level")
    return Flags(front_end=front_end, values=dict(sorted(values.items())), model=model, unknown=tuple(unknown))


def factors(flags: Flags, facts: Facts) -> tuple[Factor, ...]:
    """`flags.<name>`, or `flags.<name>.<key>` where the value is a config: what counts of `flags`.

    Hashed by the engine: `match`. Otherwise `blind`, unless it is harmless and left out. Where facts are only assumed
    from another minor release, everything is `blind`. Values that nobody knows are sealed.
    """
    options = facts.options(flags.front_end)
    auto = flags.values.get("max-model-len") == "-1"
    found: list[Factor] = []
    for name, text in flags.values.items():
        if name in SECRET or (name in HARMLESS and not (auto and name in AUTO_SIZED)):
            continue
        if name in ONLY_GIVEN:
            found.append(Factor(f"flags.{name}", "given", "blind"))
        elif (parts := _parts(name, text, facts)) is not None:
            # A config without keys is not the same as none.
            found += list(_keyed(name, parts, facts)) or [Factor(f"flags.{name}", "given", "blind")]
        else:
            flag = options[name]
            role: Role = "match" if (flag.hashed or name in DERIVED) and facts.close else "blind"
            found.append(Factor(f"flags.{name}", told(encodable(text)), role))
    if flags.front_end != "serve" and not flags.values.keys() >= {"max-num-batched-tokens", "max-num-seqs"}:
        # Sizes of batches have defaults by front end (engine/arg_utils.py, get_batch_defaults), and one of the two is
        # hashed since 0.31 only.
        seen = facts.close and options["max-num-seqs"].hashed
        found.append(Factor("flags.front-end", flags.front_end, "match" if seen else "blind"))
    if flags.unknown:
        sealed = digest.sealed(json.dumps([encodable(word) for word in _public(flags.unknown)]))
        found.append(Factor("flags.unknown", sealed, "blind"))
    if flags.config_file is not None:
        found.append(Factor("flags.config", "unreadable", "blind"))
    return tuple(sorted(found, key=lambda factor: factor.name))


def role_of_draft(facts: Facts) -> Role:
    """`match` where the engine hashes the configuration of a draft model, whatever the method."""
    hashed = _hashed("speculative-config", facts.keys.get("speculative-config"), "model", facts)
    return "match" if hashed and facts.close else "blind"


def _keyed(name: str, parts: Mapping[str, object], facts: Facts) -> Iterator[Factor]:
    known = facts.keys.get(name)
    for key, value in parts.items():
        if (name, key) in HARMLESS_KEYS:
            continue
        hashed = _hashed(name, known, key, facts)
        text = encodable(value if isinstance(value, str) else canonical(value))
        # Objects may hold anything, and so may keys that nobody knows.
        clear = known is not None and key in known and not isinstance(value, dict)
        clear = clear or (not is_secret(key) and _PLAIN.fullmatch(text) is not None)
        if is_secret(key) and not clear and not hashed:
            continue
        role: Role = "match" if hashed and facts.close else "blind"
        yield Factor(f"flags.{name}.{encodable(key)}", told(text) if clear else digest.sealed(text), role)


def _hashed(name: str, known: Mapping[str, bool] | None, key: str, facts: Facts) -> bool:
    """Whether the engine hashes one key of a JSON flag; an unknown key is hashed if its flag is as a whole."""
    if known is not None:
        return known.get(key, False)
    return any(flag.name == name and flag.hashed for flag in facts.flags)


def _parts(name: str, text: str, facts: Facts) -> dict[str, object] | None:
    """The keys of a JSON value, dotted where a config nests in another; None when the value is no JSON object."""
    takes = {flag.takes.rstrip("?") for flag in facts.flags if flag.name == name}
    given = _object(text)
    if not takes & {"json", "json-or-text"} or given is None:
        return None
    known = facts.keys.get(name, {})
    found: dict[str, object] = {}
    for key, value in given.items():
        if isinstance(value, dict) and any(each.startswith(key + ".") for each in known):
            found.update({f"{key}.{inner}": each for inner, each in value.items()})
        else:
            found[key] = value
    return found


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _public(words: Sequence[str]) -> list[str]:
    """Words without the values of options that may be secret."""
    kept: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        if not hide or word.startswith("-"):
            kept.append(name if word.startswith("-") and is_secret(name) else word)
        hide = word.startswith("-") and is_secret(name) and not equals
    return kept


def _object(text: str) -> dict[str, object] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _is_default(flag: Flag | None, text: str) -> bool:
    if flag is None or flag.default is None:
        return False
    default = flag.default
    if isinstance(default, bool):
        return text == ("true" if default else "false")
    return text == spelled(flag.takes.rstrip("?"), str(default))


def _names_model(words: Sequence[str]) -> bool:
    """Whether `--model` is spelled out, which `vllm serve` moves to the place of the operand."""
    return any(re.fullmatch(r"--model(=.+)?", word, re.DOTALL) for word in words)
