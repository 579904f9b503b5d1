"""Documents that people write: TOML and YAML as plain data, and plain data as YAML.

The only importer of YAML. Nothing in a document is executed or constructed: what comes out are mappings, lists, texts,
numbers, truth values and times.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yaml import Node

_NOTHING, _MERGE = "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"


def toml(text: str, *, number: Callable[[str], object] = float) -> dict[str, object]:
    """What a TOML text says. `number` makes what it is of a number with a point, as it is written.

    Raises:
        ValueError: it is no TOML; where and why.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    content: dict[str, object] = tomllib.loads(text, parse_float=number)
    return content


def yaml(text: str) -> object:
    """What a YAML text of one document says.

    Raises:
        ValueError: it is no YAML; where and why.
    """
    import yaml as library

    with _told():
        return library.safe_load(text)


def yaml_as_written(text: str) -> object:
    """What a YAML text of one document says, for those who write words in it: `0.90`, `no`, `017` and `12:30` are
    texts as they are written, and only nothing is nothing. A field that is given twice is an error.

    Raises:
        ValueError: it is no YAML; where and why.
    """
    import yaml as library

    class AsWritten(library.SafeLoader):
        yaml_implicit_resolvers = {  # noqa: RUF012 - as the library has it
            letter: [(tag, pattern) for tag, pattern in known if tag in {_NOTHING, _MERGE}]
            for letter, known in library.SafeLoader.yaml_implicit_resolvers.items()
        }

    with _told():
        loader = AsWritten(text)
        node = loader.get_single_node()
        _refuse_repeats(node)
        return None if node is None else loader.construct_document(node)


def _refuse_repeats(node: "Node | None") -> None:
    """Every node once, as aliases may make a few of them a tree without end."""
    import yaml as library

    pending, seen = [node], set[int]()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, library.SequenceNode):
            pending += each.value
        elif isinstance(each, library.MappingNode):
            names = set[str]()
            for key, value in each.value:
                name = key.value if isinstance(key, library.ScalarNode) else None
                if name in names:
                    raise library.MarkedYAMLError(problem=f"`{name}` is given twice", problem_mark=key.start_mark)
                names.update(() if name is None else (name,))
                pending += [key, value]


@contextmanager
def _told() -> Iterator[None]:
    """Errors of the library in one sentence."""
    import yaml as library

    try:
        yield
    except library.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f" (at line {error.problem_mark.line + 1})"
        raise ValueError(f"{error.problem or error.context}{where}") from None
    except library.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from None


def as_yaml(content: object) -> str:
    """Plain data as YAML, in its own order, a value to a line."""
    import yaml as library

    return str(library.safe_dump(content, sort_keys=False, allow_unicode=True, width=10_000))
