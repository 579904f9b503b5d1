"""Documentation is executed: every command that the README shows runs, and every file that it links to is there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cachemgr.cli import COMMANDS
from tests.engines import Engines
from tests.machines import Machine, install_program

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(?:console|sh)\n(.*?)```", README, re.DOTALL)
COMMAND_LINES = [line[2:] for block in BLOCKS for line in block.splitlines() if line.startswith("$ ")]


@pytest.fixture
def workshop(tmp_path: Path) -> Machine:
    """A machine with `cachemgr`, `python`, `vllm` and `train.py` under the names that the README uses."""
    engines = Engines.install(tmp_path)
    tools = tmp_path / "bin"
    for name, words in (("cachemgr", "-m cachemgr"), ("python", "")):
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        tool.chmod(0o755)
    variables = engines.variables | {"PATH": f"{tools}:{os.environ['PATH']}"}
    machine = Machine(tmp_path / "machine", tmp_path / "store", variables)
    (machine.root / "home").mkdir(parents=True)
    Path(install_program(tmp_path)).rename(machine.root / "train.py")
    return machine


def test_the_readme_shows_commands_at_all() -> None:
    assert len(COMMAND_LINES) > 10


def test_every_shown_command_does_what_it_says(workshop: Machine) -> None:
    first = workshop.run("python", "train.py", "--shown=1")
    for line in COMMAND_LINES:
        shown = re.sub(r"k1:[0-9a-f]+", first["key"], line)
        if shown.startswith("pip install"):
            continue
        words = shlex.split(shown)
        done = subprocess.run(
            words, env=workshop.environ, cwd=workshop.root, capture_output=True, text=True, check=False, timeout=60
        )
        expected = 0
        assert done.returncode == expected, f"{line}\n{done.stdout}\n{done.stderr}"


def test_the_shown_scripts_exist_and_can_be_run() -> None:
    scripts = set(re.findall(r"^(scripts/\S+)", "\n".join(BLOCKS), re.MULTILINE))
    assert scripts == {"scripts/quickstart", "scripts/test"}
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


def test_every_command_is_in_the_readme() -> None:
    assert [name for name in COMMANDS if f"cachemgr {name}" not in README] == []


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]))
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_version_is_in_the_changelog() -> None:
    from cachemgr import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
