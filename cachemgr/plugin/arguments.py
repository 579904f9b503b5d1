"""What an engine was asked for, from the `EngineArgs` that a program made: the fields that differ from their defaults,
as JSON. What they mean is for the child, which has the facts of each version.

A value that JSON has no words for is named by its type: it counts, and nobody can say for what.
"""

import dataclasses
import enum
from pathlib import PurePath

_SECRET = frozenset({"hf_token"})
_DEEPEST = 6


def described(engine_args: object) -> dict[str, object]:
    """The fields of a dataclass that differ from their defaults; those that hold secrets are left out."""
    return _fields(engine_args, None, 0)


def _fields(value: object, usual: object, depth: int) -> dict[str, object]:
    """The fields in which a dataclass differs from `usual`, another one of its kind, or from their own defaults.

    A configuration that was made without arguments has filled in some of its fields itself (vLLM 0.26-0.33
    config/compilation.py, __post_init__), so one like that is the better measure where there is one.
    """
    found: dict[str, object] = {}
    if not dataclasses.is_dataclass(value):
        return found
    for field in dataclasses.fields(value):
        if field.name.startswith("_") or field.name in _SECRET or not hasattr(value, field.name):
            continue
        given = getattr(value, field.name)
        default = getattr(usual, field.name, None) if type(usual) is type(value) else _default(field)
        if default is dataclasses.MISSING or _plain(default, depth) != _plain(given, depth):
            found[field.name] = _against(given, default, depth)
    return found


def _against(given: object, default: object, depth: int) -> object:
    """A value, or what differs in it where it is a configuration of the kind that is usual."""
    if dataclasses.is_dataclass(given) and type(given) is type(default) and depth < _DEEPEST:
        return _fields(given, default, depth + 1)
    return _plain(given, depth)


def _default(field: "dataclasses.Field[object]") -> object:
    if field.default is not dataclasses.MISSING:
        # pydantic keeps a field of its own in the default's place (vLLM 0.26-0.33 config/*.py).
        factory = getattr(field.default, "default_factory", None)
        return factory() if callable(factory) else getattr(field.default, "default", field.default)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return dataclasses.MISSING


def _plain(value: object, depth: int) -> object:
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if depth >= _DEEPEST:
        return _named(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value, None, depth + 1)
    return _many(value, depth)


def _many(value: object, depth: int) -> object:
    if isinstance(value, dict):
        return {str(name): _plain(each, depth + 1) for name, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(each, depth + 1) for each in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [_plain(each, depth + 1) for each in value]
    return _named(value)


def _named(value: object) -> str:
    """A type or function by its name, `torch.float16` as `float16`, anything else by its type: its text may hold where
    it lies in memory."""
    text = str(value)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    named = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"
