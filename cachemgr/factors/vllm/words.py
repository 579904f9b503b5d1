"""Words of a command line as vLLM's parser takes them: `FlexibleArgumentParser` (vLLM 0.26 to 0.33
`utils/argparse_utils.py`) on Python's argparse, and every value in one spelling.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from cachemgr.factors.vllm.facts import Flag

_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # argparse, _negative_number_matcher
_NONE = frozenset({"", "None"})


class Reader:
    """Follows argparse through the words, and keeps what each flag was given last.

    `values` are canonical texts by canonical name, `operands` the words outside of options, `unknown` the options that
    no flag explains and what follows them.
    """

    def __init__(self, options: Mapping[str, Flag]) -> None:
        self.values: dict[str, str] = {}
        self.operands: list[str] = []
        self.unknown: list[str] = []
        self._spellings = dict(_spellings(options))

    def read(self, words: Sequence[str]) -> None:
        """Take `words`, after `dashed` and `undotted`."""
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if word == "--":
                self.operands += words[at:]
                return
            if not _is_option(word):
                self.operands.append(word)
                continue
            at = self._option(word, words, at)

    def _option(self, word: str, words: Sequence[str], at: int) -> int:
        """Take the option `word` and its values from `words[at:]`; where to go on."""
        flag, inverse, given = self._resolve(word)
        end = at
        while end < len(words) and not _is_option(words[end]) and words[end] != "--":
            end += 1
        if flag is None:
            # What follows may be its value; nobody knows.
            self.unknown += [word, *words[at:end]]
            return end
        takes = flag.takes.rstrip("?")
        if takes in {"flag", "switch", "pair"}:
            self.values[flag.name] = "false" if inverse else "true"
            return at
        if takes == "many" and given is None:
            self.values[flag.name] = canonical(list(words[at:end]))
            return end
        if given is None and at < end:
            given, at = words[at], at + 1
        if given is None:
            self._bare(flag, word)
            return at
        self._take(flag, given)
        return at

    def _bare(self, flag: Flag, word: str) -> None:
        if flag.takes == "optional":
            self.values[flag.name] = "true"
        else:
            self.unknown.append(word)

    def _take(self, flag: Flag, text: str) -> None:
        if flag.takes == "append":
            earlier = json.loads(self.values.get(flag.name, "[]"))
            self.values[flag.name] = canonical([*earlier, text])
        elif flag.takes.startswith("many"):
            self.values[flag.name] = canonical([text])
        elif flag.takes.endswith("?") and text in _NONE:
            self.values.pop(flag.name, None)
        else:
            self.values[flag.name] = spelled(flag.takes.rstrip("?"), text)

    def _resolve(self, word: str) -> tuple[Flag | None, bool, str | None]:
        """The flag that `word` spells, whether it is the twin that switches it off, and the value within the word."""
        name, equals, value = word.partition("=")
        given = value if equals else None
        if name in self._spellings:
            return (*self._spellings[name], given)
        begun = [spelled for spelled in self._spellings if spelled.startswith(name)]
        if len(begun) == 1:
            return (*self._spellings[begun[0]], given)
        if word[:2] in self._spellings:  # `-qfp8`
            return (*self._spellings[word[:2]], word[2:])
        return None, False, given


def _spellings(options: Mapping[str, Flag]) -> Iterator[tuple[str, tuple[Flag, bool]]]:
    for flag in options.values():
        for spelled in ("--" + flag.name, *flag.aliases):
            yield spelled, (flag, False)
            if flag.takes in {"switch", "pair"} and spelled.startswith("--"):
                yield "--no-" + spelled[2:], (flag, True)
        for word, other in (("enable-", "disable-"), ("disable-", "enable-")):
            if flag.takes == "pair" and flag.name.startswith(word):
                yield f"--{other}{flag.name.removeprefix(word)}", (flag, True)


def switches(options: Mapping[str, Flag]) -> frozenset[str]:
    """Flags with a `--no-` twin: what `load_config_file` may write for `false`."""
    return frozenset(flag.name for flag in options.values() if flag.takes in {"switch", "pair"})


def _is_option(word: str) -> bool:
    """Whether argparse takes `word` for an option (`_parse_optional`; vLLM has no options that look like numbers)."""
    if not word.startswith("-") or len(word) == 1 or _NUMBER.fullmatch(word):
        return False
    return word.startswith("--") or " " not in word


def dashed(words: Sequence[str]) -> list[str]:
    """Underscores of long flags as dashes up to the first dot, and every spelling of `-O`."""
    found: list[str] = []
    for at, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            head, dot, rest = name.partition(".")
            found.append(head.replace("_", "-") + dot + rest + equals + value)
        elif word.startswith("-O") and word != "-O":
            found += ["--optimization-level", word[3:] if word[2] == "=" else word[2:]]
        elif word == "-O" and list(words[at + 1 : at + 2]) in (["0"], ["1"], ["2"], ["3"]):
            found.append("--optimization-level")
        else:
            found.append(word)
    return found


def undotted(words: Sequence[str]) -> list[str]:
    """`--flag.key value` as one JSON value behind everything else, as `parse_args` does it."""
    kept: list[str] = []
    objects: dict[str, dict[str, object]] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        name, equals, value = word.partition("=")
        if not word.startswith("-") or "." not in name or _NUMBER.fullmatch(word):
            kept.append(word)
            continue
        if not equals:
            value = "".join(words[at : at + 1])
            at += 1
        if name.endswith("+"):
            name, value = name[:-1], json.dumps(value.split(","))
        flag, *keys = name.split(".")
        _update(objects.setdefault(flag, {}), _nested(keys, _scalar(value)))
    for flag, given in objects.items():
        kept += [flag, json.dumps(given)]
    return kept


def _nested(keys: Sequence[str], value: object) -> dict[str, object]:
    for key in reversed(keys):
        value = {key: value}
    assert isinstance(value, dict), "a dotted flag has a key"
    return value


def _update(original: dict[str, object], update: Mapping[str, object]) -> None:
    for key, value in update.items():
        earlier = original.get(key)
        if isinstance(value, dict) and isinstance(earlier, dict):
            _update(earlier, value)
        elif isinstance(value, list) and isinstance(earlier, list):
            earlier += value
        else:
            original[key] = value


def _scalar(text: str) -> object:
    try:
        found: object = json.loads(text)
    except ValueError:
        found = _human(text)
    return text if found is None and text != "null" else found


def _human(text: str) -> int | None:
    """`4k` is 4000, `4K` is 4096 (`utils/argparse_utils.py`, human_readable_int)."""
    text = text.strip()
    found = _HUMAN.fullmatch(text)
    try:
        if found is None:
            return int(text)
        number, suffix = found.groups()
        return int(float(number) * _DECIMAL[suffix]) if suffix in _DECIMAL else int(number) * _BINARY[suffix]
    except (ValueError, OverflowError):
        return None


def spelled(takes: str, text: str) -> str:
    """One value in canonical form; what is no such value stands as it is."""
    if takes in {"int", "human", "human-auto"}:
        if takes == "human-auto" and text.strip().lower() == "auto":
            return "-1"
        number = _human(text)
        return text if number is None else str(number)
    if takes == "float":
        try:
            return repr(float(text))
        except ValueError:
            return text
    if takes == "json" or (takes == "json-or-text" and re.fullmatch(r"(?s)\s*{.*}\s*", text)):
        return _json(text)
    return text


def _json(text: str) -> str:
    for spelled in (text, _expanded(text)):
        try:
            return canonical(json.loads(spelled))
        except ValueError:
            continue
    return text


def _expanded(text: str) -> str:
    """Numbers like `80g` outside of strings (`engine/arg_utils.py`, _expand_json_human_readable_numbers)."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
    for at in range(0, len(parts), 2):
        parts[at] = re.sub(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b", lambda found: str(_human(found[0])), parts[at])
    return "".join(parts)


def canonical(value: object) -> str:
    """`value` as JSON in one spelling."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
