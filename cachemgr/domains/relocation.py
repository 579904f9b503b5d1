"""Structural relocation: files that name their own directory travel without it.

Two kinds of cache file carry absolute paths that the engine follows: Triton's `__grp__*.json` and vLLM's
`vllm_compile_cache.py`. Each is parsed, and every absolute path in it is replaced by a mark and its base name; on
restore the mark becomes the directory in which the file now lies. A textual search and replace was refused: roots are
prefixes of each other, appear in comments, and a cache that was moved once names a root that nobody knows any more.

A path whose base name is not a sibling of the file cannot be followed elsewhere, so its unit does not travel.
"""

import ast
import cmath
import json
import pprint
import warnings
from collections.abc import Callable, Collection, Sized

MARK = "@dir@/"
"""Stands for the file's own directory in stored bytes."""

_MAX_DEPTH = 50


class CannotTravelError(Exception):
    """The file names something that will not exist elsewhere, or cannot be parsed. `str()` says what.

    `named` is the absolute path that leads out of the file's own directory, if that is the reason.
    """

    def __init__(self, reason: str, *, named: str | None = None) -> None:
        super().__init__(reason)
        self.named = named


def detach_json(data: bytes, siblings: Collection[str]) -> bytes:
    """A Triton group file with its paths stored relative (triton 3.6-3.9 `runtime/cache.py`, `put_group`).

    Raises:
        CannotTravelError: not JSON, or a path leads out of the file's own directory.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise CannotTravelError("is no JSON") from None
    return json.dumps(_mapped(value, lambda text: _detached(text, siblings))).encode()


def attach_json(data: bytes, directory: str) -> bytes:
    """The inverse of `detach_json` for a file that now lies in `directory`."""
    return json.dumps(_mapped(json.loads(data), lambda text: _attached(text, directory))).encode()


def detach_literal(data: bytes, siblings: Collection[str]) -> bytes:
    """A `vllm_compile_cache.py` index with its paths stored relative (vLLM 0.26-0.33 `compilation/backends.py`,
    `save_to_file`; below 0.32 the engine loads by the absolute path).

    Raises:
        CannotTravelError: not a Python literal, or a path leads out of the file's own directory.
    """
    return _printed(_mapped(_literal(data), lambda text: _detached(text, siblings)))


def attach_literal(data: bytes, directory: str) -> bytes:
    """The inverse of `detach_literal` for a file that now lies in `directory`."""
    return _printed(_mapped(_literal(data), lambda text: _attached(text, directory)))


def unchanged(data: bytes, _directory: str) -> bytes:
    """An `attach` for files whose stored form is what an engine may find."""
    return data


def _literal(data: bytes) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a compiler thinks of it is nobody's news
            return ast.literal_eval(data.decode())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise CannotTravelError("is no Python literal") from None


def _printed(value: object) -> bytes:
    try:
        return pprint.PrettyPrinter(indent=4, sort_dicts=False).pformat(value).encode()
    except ValueError:  # a number with more digits than Python prints, half of a surrogate pair
        raise CannotTravelError("cannot be printed") from None


def _detached(text: str, siblings: Collection[str]) -> str:
    if MARK in text:
        raise CannotTravelError(f"contains `{MARK}`")
    if not text.startswith("/"):
        return text
    base = text.rstrip("/").rsplit("/", 1)[-1]
    if base not in siblings:
        raise CannotTravelError(f"names `{base}`, which is not beside it", named=text)
    return MARK + base


def _attached(text: str, directory: str) -> str:
    if text.startswith("/"):  # no stored form has one: whoever wrote this did not go through `detach`
        raise CannotTravelError(f"names `{text[:200]}`, which is not beside it", named=text)
    if not text.startswith(MARK):
        return text
    base = text.removeprefix(MARK)
    if "/" in base or base in ("", ".", ".."):
        raise CannotTravelError(f"names `{base}`, which is not beside it")
    return f"{directory}/{base}"


def _mapped(value: object, change: Callable[[str], str], depth: int = 0) -> object:
    """`value` with `change` applied to every string in it, keys included."""
    if depth > _MAX_DEPTH:
        raise CannotTravelError("is nested too deeply")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        changed = {_mapped(key, change, depth + 1): _mapped(item, change, depth + 1) for key, item in value.items()}
        return _as_large_as(value, changed)
    if isinstance(value, (list, tuple, set)):
        return _as_large_as(value, type(value)(_mapped(item, change, depth + 1) for item in value))
    if isinstance(value, (float, complex)) and not cmath.isfinite(value):
        raise CannotTravelError("has a number that nobody can write down")
    return value


def _as_large_as(before: Sized, after: Sized) -> Sized:
    if len(after) != len(before):
        raise CannotTravelError("names one file twice, by two paths")
    return after
