"""Specs: what people write, what is said when they err, and what is made of captures."""

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.capture import LAYOUT, Manifest, Provenance
from cachemgr.errors import UsageError
from cachemgr.key import Key, Relations
from cachemgr.spec import DEFAULT_LIMIT, Entry, Spec, dump, load, of_captures, parse

TOML = """
[defaults]
limit = "45min"
env = { HF_HUB_OFFLINE = "1", TORCHINDUCTOR_MAX_AUTOTUNE = 1 }

[[entries]]
name = "llama"
command = ["vllm", "serve", "/models/llama", "--max-model-len", 8192]
gpu = "H200"

[[entries]]
name = "two"
command = "python train.py --name 'a b'"
env = { HF_HUB_OFFLINE = "0" }
limit = 90
"""
YAML = """
schema: 1
defaults:
  limit: 45min
  env: {HF_HUB_OFFLINE: "1", TORCHINDUCTOR_MAX_AUTOTUNE: 1}
entries:
- name: llama
  command: [vllm, serve, /models/llama, --max-model-len, 8192]
  gpu: H200
- name: two
  command: python train.py --name 'a b'
  env: {HF_HUB_OFFLINE: "0"}
  limit: 90
"""
MEANT = Spec(
    (
        Entry(
            "llama",
            ("vllm", "serve", "/models/llama", "--max-model-len", "8192"),
            {"HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_MAX_AUTOTUNE": "1"},
            gpu="H200",
            gpus=1,
            limit=2700.0,
        ),
        Entry(
            "two",
            ("python", "train.py", "--name", "a b"),
            {"HF_HUB_OFFLINE": "0", "TORCHINDUCTOR_MAX_AUTOTUNE": "1"},
            limit=90.0,
        ),
    )
)


@pytest.mark.parametrize(("text", "yaml"), [(TOML, False), (YAML, True)])
def test_both_forms_say_the_same(text: str, yaml: bool) -> None:
    assert parse(text, where="x", yaml=yaml) == MEANT


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = [", "is no TOML"),
        ("", "`entries` must be a list"),
        ("entries = []", "`entries` must be a list"),
        ("schema = 2\n[[entries]]\nname = 'a'\ncommand = 'x'", "`schema` must be 1"),
        ("[[entries]]\ncommand = 'x'", "`name` of entry 1"),
        ("[[entries]]\nname = '../a'\ncommand = 'x'", "`name` of entry 1"),
        ("[[entries]]\nname = 'a'", "`command` of entry `a` must be a list of words"),
        ("[[entries]]\nname = 'a'\ncommand = []", "`command` of entry `a`"),
        ("[[entries]]\nname = 'a'\ncommand = \"x 'y\"", "cannot be split"),
        ("[[entries]]\nname = 'a'\ncommand = ['x', true]", "has `True`, which is no word"),
        ("[[entries]]\nname = 'a'\ncomand = 'x'", "entry `a` has `comand`, which is none of name, command"),
        ("[[entries]]\nname = 'a'\ncommand = 'x'\nlimit = '1 year'", "`limit` of entry `a` must be a time"),
        ("[[entries]]\nname = 'a'\ncommand = 'x'\nlimit = 0", "`limit` of entry `a` must be a time"),
        ("[[entries]]\nname = 'a'\ncommand = 'x'\ngpus = -1", "`gpus` of entry `a`"),
        ("[[entries]]\nname = 'a'\ncommand = 'x'\ngpu = 'L4'\ngpus = 0", "`gpus` of entry `a`"),
        ("[[entries]]\nname = 'a'\ncommand = 'x'\nenv = 'A=1'", "`env` of entry `a` must be a table"),
        ("[[entries]]\nname = 'a'\ncommand = 'x'\nenv = {'A B' = '1'}", "no name of a variable"),
        ("[[entries]]\nname = 'a'\ncommand = 'x'\nenv = {CACHEMGR_STORE = '/x'}", "belong to whoever prewarms"),
        ("[[entries]]\nname = 'a'\ncommand = 'x'\n[[entries]]\nname = 'A'\ncommand = 'x'", "two entries are called"),
        ("[defaults]\nname = 'a'", "`defaults` has `name`"),
    ],
)
def test_an_error_says_which_entry_and_which_field(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, where="my.toml", yaml=False)
    assert said in str(caught.value)
    assert "my.toml" in str(caught.value)


def test_an_error_in_yaml_is_one_sentence() -> None:
    with pytest.raises(UsageError) as caught:
        parse("a: b\nentries: [", where="x.yaml", yaml=True)
    told = "spec x.yaml is no YAML: expected the node content, but found '<stream end>' (at line 2)"
    assert str(caught.value) == told


ODD = """\ufeffentries:\r
- name: 8\r
  command: [x, 0.90, 1e3, 017, 1_000, 12:30:45, 2026-11-30, no, =, .inf]\r
  env: {A: no, B: 1.10}\r
  gpus: 2\r
"""


def test_words_are_as_they_are_written(tmp_path: Path) -> None:
    """Not as YAML 1.1 understands them; with the mark and the ends of lines that some editors write."""
    (tmp_path / "odd.YAML").write_bytes(ODD.encode())
    (entry,) = load(tmp_path / "odd.YAML").entries
    words = ("x", "0.90", "1e3", "017", "1_000", "12:30:45", "2026-11-30", "no", "=", ".inf")
    assert entry == Entry("8", words, {"A": "no", "B": "1.10"}, gpus=2)
    (tmp_path / "odd.toml").write_bytes(b"\xef\xbb\xbf[[entries]]\r\nname = 'a'\r\ncommand = ['x', 0.90, 7]\r\n")
    assert load(tmp_path / "odd.toml").entries == (Entry("a", ("x", "0.90", "7")),)
    (tmp_path / "odd.json").write_text('{"entries": [{"name": "a", "command": "x"}]}')
    assert load(tmp_path / "odd.json").entries == (Entry("a", ("x",)),)


BOMB = "[&a [x,x,x,x,x,x,x,x,x], " + ", ".join(
    f"&{name} [{','.join(['*' + before] * 9)}]" for before, name in pairwise("abcdefghijklmnop")
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "entries:\n- {name: a, command: x}\n- name: a\n  command: y\n  command: z",
            "`command` is given twice (at line 5)",
        ),
        ("entries: []\nentries: []", "`entries` is given twice (at line 2)"),
        ("entrys: []", "`entrys`, which is none of schema, defaults, entries; did you mean `entries`?"),
        ("entries:\n- {name: a, comand: x}", "did you mean `command`?"),
        ("entries:\n- {name: a, command: x, zzz: 1}", "which is none of name, command, env, gpu, gpus, limit"),
        ("entries: &a [*a]", "entry 1 must be a table"),
        ("entries:\n- &a {name: *a, command: x}", "`name` of entry 1 must be"),
        ('entries:\n- {name: a, command: ["\\uD800"]}', "which is no word"),
        ("entries: " + "[" * 3000, "is no YAML: maximum recursion depth exceeded"),
        *[
            (f"entries:\n- {{name: a, command: x, {field}: {BOMB}]}}", f"`{field}` of entry `a` must be")
            for field in ("gpus", "limit", "env")
        ],
        (f"schema: {BOMB}]\nentries: []", "`schema` must be 1"),
        (f"entries:\n- {{name: {BOMB}], command: x}}", "`name` of entry 1 must be"),
        (f"entries:\n- {{name: a, command: {BOMB}]}}", "`command` of entry `a` has"),
        (f"entries:\n- {{name: a, command: x, env: {{A: {BOMB}]}}}}", "`env` of entry `a` gives A a value"),
    ],
)
def test_what_no_person_means_is_said_in_one_short_sentence(text: str, said: str) -> None:
    """Aliases of YAML make 9¹⁵ words of a line: nobody may be told them all."""
    with pytest.raises(UsageError) as caught:
        parse(text, where="x.yaml", yaml=True)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", ["directory", "bytes"])
def test_what_is_no_text_is_said(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "spec.yaml"
    if kind == "directory":
        path.mkdir()
    else:
        path.write_bytes("entries: []".encode("utf-16"))
    with pytest.raises(UsageError, match="Is a directory" if kind == "directory" else "it is no UTF-8"):
        load(path)


def test_yaml_builds_no_objects() -> None:
    with pytest.raises(UsageError, match="is no YAML"):
        parse("entries: !!python/object/apply:os.system ['true']", where="x.yaml", yaml=True)


def test_a_file_is_read_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    (tmp_path / "a.yml").write_text(YAML)
    assert load(tmp_path / "a.toml") == load(tmp_path / "a.yml") == MEANT
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "none.toml")


LEAF = st.none() | st.booleans() | st.integers(-3, 9) | st.text(max_size=6) | st.just("90s")
ANY = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner), max_leaves=5
)
ROW = st.fixed_dictionaries(
    {"name": st.sampled_from(["a", "b", "../c"]) | LEAF, "command": st.just("x --y 'z w'") | ANY},
    optional={"env": ANY, "gpu": LEAF, "gpus": LEAF, "limit": LEAF | st.sampled_from(["1234567s", "0.5h"]), "x": LEAF},
)


@given(st.fixed_dictionaries({"entries": st.lists(ROW, max_size=3) | ANY}, optional={"defaults": ROW, "schema": LEAF}))
def test_anything_is_a_spec_that_is_read_again_or_an_error_for_people(content: dict[str, object]) -> None:
    try:
        spec = parse(json.dumps(content), where="x", yaml=True)
    except UsageError:
        return
    assert parse(dump(spec.entries), where="x", yaml=True) == spec


def test_what_is_dumped_is_read_again() -> None:
    assert parse(dump(MEANT.entries), where="x", yaml=True) == MEANT


def test_only_some_entries() -> None:
    assert [entry.name for entry in MEANT.only(["two"]).entries] == ["two"]
    with pytest.raises(UsageError, match="no entry `three`"):
        MEANT.only(["three"])


def capture(*command: str, model: str = "org/m", device: str = "cpu", world: int = 0) -> Manifest:
    return Manifest(
        LAYOUT, Key("k1:" + "0" * 32), (), Relations(), "vllm", "0.32.0", model, device, "2026-11-30T00:00:00Z", "l",
        complete=True, layers=(), provenance=Provenance("0.1", "h", command), world=world,
    )  # fmt: skip


def test_captures_become_entries_once_a_command_and_gpu() -> None:
    manifests = [
        capture("vllm", "serve", "org/m"),
        capture("vllm", "serve", "org/m"),
        capture("vllm", "serve", "org/m", "-tp", "2", device="NVIDIA H200", world=2),
        capture("vllm", "serve", "org/m", "-tp", "2", device="NVIDIA L4", world=2),
    ]
    entries, without = of_captures(manifests)
    assert entries == (
        Entry("m", ("vllm", "serve", "org/m")),
        Entry("m-2", ("vllm", "serve", "org/m", "-tp", "2"), gpu="NVIDIA H200", gpus=2),
        Entry("m-3", ("vllm", "serve", "org/m", "-tp", "2"), gpu="NVIDIA L4", gpus=2),
    )
    assert not without
    assert parse(dump(entries), where="x", yaml=True).entries == entries
    assert entries[0].limit == DEFAULT_LIMIT


def test_a_command_with_a_hole_in_it_is_named_and_left_out() -> None:
    told = capture("vllm", "serve", "m", "--api-key", "***")
    entries, without = of_captures([told, msgspec.structs.replace(told, provenance=Provenance("0.1", "h"))])
    assert not entries
    assert "has a secret in its command" in without[0]
    assert "without its command" in without[1]
