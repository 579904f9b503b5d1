"""Documentation is executed: what the README and the guides show runs. Links and spelling: tests/test_pages.py."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from cachemgr.cli import COMMANDS
from cachemgr.explain import Word
from tests.engines import Engines
from tests.machines import Machine, install_program

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SHOWN = "\n".join([README, *((ROOT / "docs" / f"{name}.md").read_text() for name in ("getting-started", "torch"))])
BLOCKS = re.findall(r"```(?:console|sh)\n(.*?)```", SHOWN, re.DOTALL)
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
        expected = 1 if " diff " in line else 0  # they do differ
        assert done.returncode == expected, f"{line}\n{done.stdout}\n{done.stderr}"


def in_a_shell(workshop: Machine, script: str) -> "subprocess.CompletedProcess[str]":
    """A script that does what it says."""
    done = subprocess.run(
        ["bash", "-euc", script],
        env=workshop.environ,
        cwd=workshop.root,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def test_the_commands_of_the_pruning_guide_do_what_they_say(workshop: Machine) -> None:
    first = workshop.run("python", "train.py", "--shown=1")
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "docs" / "pruning.md").read_text(), re.DOTALL)
    lines = [line[2:] for block in blocks for line in block.splitlines()]
    assert len(lines) > 10
    for line in lines:
        words = shlex.split(re.sub(r"k1:[0-9a-f]+", first["key"], line))
        done = subprocess.run(
            words, env=workshop.environ, cwd=workshop.root, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def test_what_a_shell_pins_is_warm_without_us(workshop: Machine) -> None:
    """As a notebook finds it, whose server was started by such a shell."""
    script = 'cachemgr run -- python train.py a\neval "$(cachemgr env -- python train.py a)"\npython train.py a'
    assert 'eval "$(cachemgr env --' in (ROOT / "docs" / "torch.md").read_text()
    assert in_a_shell(workshop, script).stderr.count("compiled a") == 1


def test_the_signed_seed_of_the_docs_is_used(workshop: Machine) -> None:
    (block,) = re.findall(r"```console\n(.*?)```", (ROOT / "docs" / "trust.md").read_text(), re.DOTALL)
    script = block.replace("k1:24c0ada7c", '"$(cachemgr --store seed ls -q)"').replace("builder$ ", "")
    builder, pod = script.split("pod$ ", 1)
    elsewhere = "export HOME=$PWD/pod TMPDIR=$PWD/pod CACHEMGR_STORE=$PWD/pod/store\nmkdir pod\n"
    done = in_a_shell(workshop, builder + elsewhere + pod.replace("pod$ ", ""))
    assert "answered for by this machine" in done.stdout
    assert "from the seed" in done.stderr
    assert "cachemgr: used" in done.stderr


def test_the_images_of_the_docs_make_another_site_warm(workshop: Machine) -> None:
    (block,) = re.findall(r"```console\n(.*?)```", (ROOT / "docs" / "oci.md").read_text(), re.DOTALL)
    builder, site = block.replace("k1:24c0ada7c", '"$(cachemgr ls -q)"').replace("builder$ ", "").split("site$ ", 1)
    elsewhere = "export HOME=$PWD/site TMPDIR=$PWD/site CACHEMGR_STORE=$PWD/site/store\nmkdir site\n"
    done = in_a_shell(workshop, builder + elsewhere + site.replace("site$ ", ""))
    assert "imported 1 capture" in done.stderr
    assert "cachemgr: used" in done.stderr


def test_every_command_of_the_catalogue_does_what_it_says(workshop: Machine) -> None:
    key = workshop.run("python", "train.py", "--shown=1")["key"]
    page = (ROOT / "docs" / "catalogue.md").read_text()
    lines = [line[2:] for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert len(lines) > 8
    for line in lines:
        workshop.cachemgr(*shlex.split(re.sub(r"k1:[0-9a-f]+", key, line))[1:])


def test_the_words_of_why_are_documented() -> None:
    page = (ROOT / "docs" / "catalogue.md").read_text()
    assert [word for word in get_args(Word) if f"`{word}`" not in page] == []


def test_the_shown_scripts_exist_and_can_be_run() -> None:
    scripts = set(re.findall(r"^(scripts/\S+)", "\n".join(BLOCKS), re.MULTILINE))
    assert scripts == {"scripts/quickstart", "scripts/test"}
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


def test_every_command_is_in_the_readme() -> None:
    assert [name for name in COMMANDS if f"cachemgr {name}" not in README] == []


def test_the_version_is_in_the_changelog() -> None:
    from cachemgr import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_what_the_page_about_images_shows_is_so(workshop: Machine, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "images.md").read_text()
    model = str(tmp_path / "model")
    (spec,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (workshop.root / "models.toml").write_text(spec.replace("/models/llama-8b", model))
    blocks = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    lines = [line[2:].replace("/models/llama-8b", model) for block in blocks for line in block.splitlines()]
    assert len(lines) > 8
    dockerfile = (ROOT / "docs" / "deploy" / "Dockerfile").read_text()
    (built,) = re.findall(r"^RUN (cachemgr .+)$", dockerfile, re.MULTILINE)
    # Of the two entries, one is for a GPU that is not here.
    steps = [*((line, 0) for line in lines), (built.replace("/build/", "").replace("/seed", "image-seed"), 3)]
    for line, code in steps:
        done = subprocess.run(
            ["bash", "-c", line],
            env=workshop.environ,
            cwd=workshop.root,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == code, f"{line}\n{done.stdout}\n{done.stderr}"
