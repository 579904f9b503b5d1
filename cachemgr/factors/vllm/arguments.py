"""What a program asked for when it made its engine: fields of `EngineArgs` as the flags that they stand for.

`LLM(...)`, `AsyncLLM` and trainers fill the same dataclass as the command line does (vLLM 0.26-0.33
`engine/arg_utils.py`), so an engine of a program has the flags of a server with the same arguments, and the same words
for them. What no flag explains counts as an unknown word does.
"""

import json
from collections.abc import Mapping

from cachemgr.factors.vllm.facts import Facts, Flag
from cachemgr.factors.vllm.flags import Flags, settled
from cachemgr.factors.vllm.words import canonical, spelled

FRONT_END = "LLM"
"""The front end of a program: it has the engine's flags and no other."""


def flags_of(fields: Mapping[str, object], facts: Facts) -> Flags:
    """The flags of the fields that differ from their defaults, in the spelling of `cachemgr.factors.vllm.flags`."""
    options = facts.options(FRONT_END)
    values: dict[str, str] = {}
    unknown: list[str] = []
    for field, value in sorted(fields.items()):
        name = field.replace("_", "-")
        flag = options.get(name)
        if flag is None:
            unknown.append(f"--{name}={_text(value)}")
        elif value is not None:
            values[name] = _spelled(flag, value)
    model = values.pop("model", None)
    return settled(FRONT_END, values, model, unknown, facts)


def _spelled(flag: Flag, value: object) -> str:
    takes = flag.takes.rstrip("?")
    if takes.startswith("many") or takes == "append":
        listed = value if isinstance(value, list) else [value]
        return canonical([_text(each) for each in listed])
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list)):
        return canonical(value)
    return spelled(takes, _text(value))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
