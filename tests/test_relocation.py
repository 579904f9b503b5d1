"""Relocation: a file that names its own directory arrives naming its new one, and nothing else about it changes."""

import ast
import json
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cachemgr.domains.relocation import (
    MARK,
    CannotTravelError,
    attach_json,
    attach_literal,
    detach_json,
    detach_literal,
)
from tests.trees import index, strings

Detach = Callable[[bytes, Collection[str]], bytes]
Attach = Callable[[bytes, str], bytes]

KINDS = [
    pytest.param(detach_json, attach_json, lambda value: json.dumps(value).encode(), id="json"),
    pytest.param(detach_literal, attach_literal, lambda value: repr(value).encode(), id="literal"),
]
Dump = Callable[[object], bytes]

ROOTS = [
    "/tmp/c1",
    "/tmp/c1/deeper",
    "/tmp/c11",
    "/",
    "/a dir with spaces/and 'single' and \"double\" quotes",
    "/ünï/cödé/文字",
    "/with\\backslash",
    "/new\nline\ttab",
    "/@dir@-alike",
    "/{}/%s/$HOME",
    "/" + "long/" * 100 + "end",
    "/" + "long with spaces " * 20,
]


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("new", ROOTS)
def test_a_group_file_follows_its_directory(root: str, new: str) -> None:
    names = ["add.cubin", "add.json", "a b'c.ptx"]
    data = json.dumps({"child_paths": {name: f"{root}/K/{name}" for name in names}}).encode()
    stored = detach_json(data, names)
    assert json.loads(stored) == {"child_paths": {name: MARK + name for name in names}}
    placed = attach_json(stored, f"{new}/K")
    assert json.loads(placed) == {"child_paths": {name: f"{new}/K/{name}" for name in names}}
    assert detach_json(placed, names) == stored
    assert attach_json(stored, f"{root}/K") == data


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("new", ROOTS)
def test_an_index_follows_its_directory(root: str, new: str) -> None:
    names = ["artifact_compile_range_1_512_subgraph_0", "artifact_compile_range_1_512_subgraph_1"]
    stored = detach_literal(index(f"{root}/backbone", names), names)
    placed = attach_literal(stored, f"{new}/backbone")
    assert ast.literal_eval(placed.decode()) == ast.literal_eval(index(f"{new}/backbone", names).decode())
    assert detach_literal(placed, names) == stored
    assert all(root not in text for text in strings(ast.literal_eval(stored.decode())) if root != "/")


def test_an_index_is_printed_as_the_engine_prints_it() -> None:
    names = ["artifact_a", "artifact_b"]
    assert attach_literal(detach_literal(index("/old", names), names), "/new") == index("/new", names)


OLD_SHAPES = [
    # vLLM up to 0.9: the handle is a list of (hash, path)
    {(None, 0, "inductor"): ["fxq4", "/old/backbone/artifact_a"]},
    # 0.26: a tuple of name and path
    {((1, 512), 0, "inductor_standalone"): {"cache_key": "a1", "graph_handle": ("artifact_a", "/old/b/artifact_a")}},
    # with only a name, as 0.32 would read it
    {((1, 512), 0, "inductor_standalone"): {"cache_key": "a1", "graph_handle": ("artifact_a",)}},
    # a path with a closing slash names an unpacked artifact
    {((1, 512), 0, "inductor_standalone"): {"graph_handle": ("artifact_a", "/old/b/artifact_a/")}},
    {},
]


@pytest.mark.parametrize("value", OLD_SHAPES)
def test_every_shape_of_an_index_arrives_with_its_new_directory(value: dict[object, object]) -> None:
    placed = ast.literal_eval(
        attach_literal(detach_literal(repr(value).encode(), ["artifact_a"]), "/new/root").decode()
    )
    found = [text for text in strings(placed) if text.startswith("/")]
    assert found == ["/new/root/artifact_a"] * sum(text.startswith("/") for text in strings(value))
    assert [text for text in strings(placed) if not text.startswith("/")] == [
        text for text in strings(value) if not text.startswith("/")
    ]


@pytest.mark.parametrize(("detach", "attach", "dump"), KINDS)
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/elsewhere/other.cubin", "names `other.cubin`, which is not beside it"),
        ("/usr/lib/libcuda.so", "names `libcuda.so`, which is not beside it"),
        ("/", "names ``, which is not beside it"),
        ("//", "names ``, which is not beside it"),
        ("/old/..", "names `..`, which is not beside it"),
        ("/old/.", "names `.`, which is not beside it"),
        (f"{MARK}add.cubin", "contains `@dir@/`"),
        (f"x{MARK}", "contains `@dir@/`"),
    ],
)
def test_what_leads_elsewhere_does_not_travel(
    detach: Detach, attach: Attach, dump: Dump, path: str, words: str
) -> None:
    for value in ({"a": path}, {path: "a"}, [["x", {"deep": [path]}]]):
        with pytest.raises(CannotTravelError, match=words.replace(".", r"\.")):
            detach(dump(value), ["add.cubin", "old"])


@pytest.mark.parametrize(("detach", "attach", "dump"), KINDS)
@pytest.mark.parametrize("text", [f"{MARK}../../etc/passwd", f"{MARK}a/b", f"{MARK}..", f"{MARK}", f"{MARK}/etc"])
def test_a_stored_path_that_leads_out_is_not_followed(detach: Detach, attach: Attach, dump: Dump, text: str) -> None:
    with pytest.raises(CannotTravelError, match="not beside it"):
        attach(dump({"a": text}), "/new")


@pytest.mark.parametrize(("detach", "attach", "dump"), KINDS)
def test_two_paths_that_become_one_do_not_travel(detach: Detach, attach: Attach, dump: Dump) -> None:
    with pytest.raises(CannotTravelError, match="twice"):
        detach(dump({"/old/a": 1, "/older/a": 2}), ["a"])


@pytest.mark.parametrize(("detach", "attach", "dump"), KINDS)
def test_what_is_nested_too_deeply_does_not_travel(detach: Detach, attach: Attach, dump: Dump) -> None:
    value: object = "/old/a"
    for _level in range(60):
        value = [value]
    with pytest.raises(CannotTravelError, match="nested too deeply"):
        detach(dump(value), ["a"])


@pytest.mark.parametrize(
    ("detach", "data"),
    [
        (detach_json, b""),
        (detach_json, b"{"),
        (detach_json, b"\xff\xfe\xfd"),
        (detach_json, b"[" * 100_000),
        (detach_json, b"9" * 5000),
        (detach_literal, b""),
        (detach_literal, b"{"),
        (detach_literal, b"\xff"),
        (detach_literal, b"\0"),
        (detach_literal, b"__import__('os').system('true')"),
        (detach_literal, b"open('/etc/passwd')"),
        (detach_literal, b"(" * 10_000),
        (detach_literal, b"-" * 50_000 + b"1"),
        (detach_literal, b"9" * 5000),
    ],
)
def test_what_cannot_be_parsed_does_not_travel(detach: Detach, data: bytes) -> None:
    with pytest.raises(CannotTravelError, match="is no"):
        detach(data, ["a"])


def test_nothing_in_an_index_is_executed(tmp_path: Path) -> None:
    witness = tmp_path / "executed"
    with pytest.raises(CannotTravelError):
        detach_literal(f"[open({str(witness)!r}, 'w')]".encode(), ["executed"])
    assert not witness.exists()


def test_a_huge_index_is_no_problem() -> None:
    names = [f"artifact_compile_range_1_512_subgraph_{number}" for number in range(3000)]
    data = index("/old root/of 'many'", names)
    assert attach_literal(detach_literal(data, set(names)), "/new") == index("/new", names)


def test_paths_in_sets_are_rewritten_too() -> None:
    placed = attach_literal(detach_literal(b"{'/old/a', '/old/b'}", ["a", "b"]), "/new")
    assert ast.literal_eval(placed.decode()) == {"/new/a", "/new/b"}


def test_the_order_of_an_index_is_kept() -> None:
    value = {(number, "x"): f"/old/{name}" for number, name in ((2, "b"), (1, "a"), (3, "b"))}
    placed = ast.literal_eval(attach_literal(detach_literal(repr(value).encode(), ["a", "b"]), "/new").decode())
    assert list(placed.items()) == [((2, "x"), "/new/b"), ((1, "x"), "/new/a"), ((3, "x"), "/new/b")]


def test_text_that_is_no_path_stays() -> None:
    value = {"a": "see /tmp/c1 for more", "b": "c/d", "c": "", "d": "~/x", "e": None, "f": 1.5, "g": True}
    assert json.loads(attach_json(detach_json(json.dumps(value).encode(), []), "/new")) == value


names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..") and MARK.rstrip("/") not in name
)
roots = st.lists(names, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))
texts = st.text(max_size=20).filter(lambda text: not text.startswith("/") and MARK not in text)
json_texts = texts | st.text("ab ", max_size=100)


def values(root: str, siblings: list[str], *, literal: bool) -> st.SearchStrategy[object]:
    """Nested values in which every absolute path is one of `siblings` below `root`."""
    paths = st.sampled_from(siblings).map(lambda name: f"{root}/{name}")
    leaves: st.SearchStrategy[object] = (
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    )
    keys: st.SearchStrategy[object] = json_texts
    if literal:
        leaves = leaves | st.binary(max_size=5)
        keys = json_texts | st.integers() | st.tuples(st.integers(), json_texts)

    def inside(children: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
        found = st.lists(children, max_size=3) | st.dictionaries(keys, children, max_size=3)
        return found | st.tuples(children, children) | st.tuples(children) if literal else found

    return st.recursive(leaves | json_texts | paths, inside, max_leaves=8)


def moved(value: object, old: str, new: str) -> object:
    """`value` with each absolute path below `old` placed below `new`."""
    if isinstance(value, str):
        return f"{new}/{value[len(old) + 1 :]}" if value.startswith("/") else value
    if isinstance(value, dict):
        return {moved(key, old, new): moved(item, old, new) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, old, new) for item in value)
    return value


@given(roots, roots, st.lists(names, min_size=1, max_size=3), st.data())
def test_any_json_arrives_with_its_paths_and_nothing_else_changed(
    old: str, new: str, siblings: list[str], data: st.DataObject
) -> None:
    value = data.draw(values(old, siblings, literal=False))
    stored = detach_json(json.dumps(value).encode(), siblings)
    assert json.loads(attach_json(stored, new)) == moved(value, old, new)


@given(roots, roots, st.lists(names, min_size=1, max_size=3), st.data())
def test_any_literal_arrives_with_its_paths_and_nothing_else_changed(
    old: str, new: str, siblings: list[str], data: st.DataObject
) -> None:
    value = data.draw(values(old, siblings, literal=True))
    assume("\\N" not in repr(value))
    stored = detach_literal(repr(value).encode(), siblings)
    assert ast.literal_eval(attach_literal(stored, new).decode()) == moved(value, old, new)
