"""docs/reference.md is what the code says, and shells can complete commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = Path(sys.executable).parent / "cachemgr"


def test_the_page_is_what_the_code_says(tmp_path: Path) -> None:
    made = tmp_path / "reference.md"
    subprocess.run([sys.executable, str(ROOT / "scripts" / "reference.py"), str(made)], check=True)
    assert made.read_text() == (ROOT / "docs" / "reference.md").read_text(), "run scripts/reference.py"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion(shell: str) -> None:
    told = said({"_CACHEMGR_COMPLETE": f"{shell}_source"})
    assert f"_CACHEMGR_COMPLETE={shell}_complete" in told


@pytest.mark.parametrize(
    ("words", "completed"),
    [("cachemgr loo", "lookup"), ("cachemgr run --sin", "--single-flight"), ("cachemgr config sh", "show")],
)
def test_commands_and_options_are_completed(words: str, completed: str) -> None:
    asked = {"_CACHEMGR_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert said(asked).split() == [f"plain,{completed}"]


def said(asked: dict[str, str]) -> str:
    done = subprocess.run([SCRIPT], env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    return done.stdout
