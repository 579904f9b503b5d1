"""The one command in the text of `sh -c`, and engines that nobody looks for: what is understood, and what is said."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from cachemgr.factors import describe, program, shell
from cachemgr.factors.wrappers import spelled_out, unwrap
from cachemgr.lint import hazards
from tests.engines import Engines

ENVIRON = {"MODEL": "org/m", "PORT": "8000", "TWO": "a b", "STAR": "*", "NONE": "", "PWD": "/elsewhere"}


def command(text: str, *operands: str, environ: Mapping[str, str] = ENVIRON) -> list[str] | None:
    found = shell.only_command(["sh", "-c", text, *operands], environ)
    return None if found is None else [f"{name}={value}" for name, value in found.assigned.items()] + list(found.argv)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm serve m", ["vllm", "serve", "m"]),
        ("\n exec  vllm serve m \n", ["vllm", "serve", "m"]),
        ("vllm serve \\\n  m", ["vllm", "serve", "m"]),
        ("vllm serve $MODEL --port ${PORT}", ["vllm", "serve", "org/m", "--port", "8000"]),
        ('vllm serve --x="$TWO" "$NONE"', ["vllm", "serve", "--x=a b", ""]),
        ("""vllm serve -cc '{"mode": 3}'""", ["vllm", "serve", "-cc", '{"mode": 3}']),
        (r'vllm serve "a\"b" a\ b', ["vllm", "serve", 'a"b', "a b"]),
        ("A=1 B='x y' exec vllm serve m C=3", ["A=1", "B=x y", "vllm", "serve", "m", "C=3"]),
        ("vllm serve m 2>&1 --x", ["vllm", "serve", "m", "--x"]),
        ("PORT=/x:$PORT vllm serve m", ["PORT=/x:8000", "vllm", "serve", "m"]),
    ],
)
def test_one_plain_command_is_read_as_the_shell_reads_it(text: str, words: list[str]) -> None:
    assert command(text) == words


@pytest.mark.parametrize(
    "text",
    [
        "cd / && vllm serve m", "vllm serve m | tee log", "vllm serve m &", "vllm serve m; true", "vllm serve m > log",
        "vllm serve m12>&1", "vllm serve m 2>&1x", "vllm serve $MODEL\\\nX",
        "vllm serve $(cat m)", "vllm serve `cat m`", "vllm serve $UNSET", "vllm serve $STAR", "vllm serve $TWO",
        "vllm serve m*", "vllm serve ~/m", "vllm serve {a,b}", "vllm serve m # 1", "vllm serve $1", 'vllm serve "$*"',
        "vllm serve 'm", 'vllm serve "m', "vllm serve $PWD", "A=1 vllm serve $A", "A=1", "", "exec -a x vllm serve m",
        "source x", "vllm serve m\nvllm serve n", 'x"$@"',
    ],
)  # fmt: skip
def test_a_text_that_may_do_anything_else_is_not(text: str) -> None:
    assert command(text) is None


def test_operands_of_a_text_are_words() -> None:
    assert command('exec vllm serve "$@"', "sh", "a b", "--port", "1") == ["vllm", "serve", "a b", "--port", "1"]


@pytest.mark.parametrize("options", [["-c"], ["-ec"], ["-e", "-u", "-c"], ["-euo", "pipefail", "-c"]])
def test_options_that_change_no_word_are_passed_over(options: list[str]) -> None:
    found = unwrap(["/bin/bash", *options, "A=1 tini -- python x.py"], {})
    assert (found.argv, found.environ) == (("python", "x.py"), {"A": "1"})


@pytest.mark.parametrize(
    "argv", [["bash", "-lc", "x"], ["bash", "-ic", "x"], ["bash", "x"], ["bash", "-O", "a", "-c", "x"]]
)
def test_a_shell_that_reads_something_first_is_not_looked_through(argv: list[str]) -> None:
    assert unwrap(argv, {}).argv == tuple(argv)
    assert unwrap(["bash", "-c", "x"], {"BASH_ENV": "/x"}).argv == ("bash", "-c", "x")


@pytest.mark.parametrize("options", [["-lc"], ["-o", "pipefail", "-c"], ["-euxo", "pipefail", "-lc"]])
def test_the_text_of_a_login_shell_counts_whole(tmp_path: Path, options: list[str]) -> None:
    """It was taken for the name of a file, of which the last part counted."""
    one, other = (
        program.parse(unwrap(["bash", *options, f"cd / && python /srv/{name}.py --to /data/m"], {}), tmp_path)
        for name in "ab"
    )
    assert program.factors(one, (), tmp_path, ()) != program.factors(other, (), tmp_path, ())
    assert one.label == "bash"


def test_words_can_be_added_to_what_stood_in_a_text() -> None:
    environ = {"A": "0", "B": "2"}
    assert spelled_out(["nice", "vllm", "serve"], environ) == ("nice", "vllm", "serve")
    assert spelled_out(["sh", "-c", "exec vllm serve m"], environ) == ("vllm", "serve", "m")
    assert spelled_out(["sh", "-c", "A=1 exec vllm serve m"], environ) == ("env", "A=1", "vllm", "serve", "m")
    assert spelled_out(["env", "-S", "-u B taskset 1 vllm serve"], environ) == (
        "env", "-u", "B", "taskset", "1", "vllm", "serve",
    )  # fmt: skip


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    return Engines.install(tmp_path)


def test_an_engine_behind_a_shell_has_the_key_of_the_engine(engines: Engines) -> None:
    machine = engines.machine("one")
    words = engines.serve("--max-model-len", "64")
    shown = [
        describe(argv, machine.environ, cwd=engines.directory, ignored_args=()).factors
        for argv in (words, ("sh", "-c", f"exec {' '.join(words)}"))
    ]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("words", ["sh -lc VLLM", "conda run VLLM", "./entry.sh m", "python llm.py", "python -c CODE"])
def test_that_an_engine_is_not_looked_at_is_said(engines: Engines, words: str) -> None:
    """It said `used` and `0 added` of a start that compiled all its graphs."""
    machine, root = engines.machine("one"), engines.directory
    (root / "bin" / "conda").write_text("\x7fELF")
    (root / "bin" / "conda").chmod(0o755)
    (root / "entry.sh").write_text('#!/bin/bash\nset -e\nexec vllm serve "$@"\n')
    (root / "entry.sh").chmod(0o755)
    (root / "llm.py").write_text("import os\n\nfrom vllm import LLM\n")
    texts = {"VLLM": "exec vllm serve m", "CODE": "import vllm"}
    argv = [texts.get(word, word) for word in words.split()]
    environ = {**machine.environ, "PATH": f"{root}/bin:{machine.environ['PATH']}"}
    profile = describe(argv, environ, cwd=root, ignored_args=())
    [note] = profile.notes
    assert [hazard.kind for hazard in hazards({}, profile)] == ["disables"]
    assert "compiled graphs are neither captured nor restored" in note
    assert ("CACHEMGR_ENABLE=1" in note) == words.startswith("python")


@pytest.mark.parametrize("words", ["vllm serve --help", "vllm bench serve --model m", "python -m vllm.x", "sh -c date"])
def test_what_starts_no_engine_is_no_cause_for_a_note(engines: Engines, words: str) -> None:
    machine = engines.machine("one")
    environ = {**machine.environ, "PATH": f"{engines.directory}/bin:{machine.environ['PATH']}"}
    assert describe(words.split(), environ, cwd=engines.directory, ignored_args=()).notes == ()
