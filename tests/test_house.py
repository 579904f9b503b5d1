"""The house keeps its rules: import directions, one owner per dependency, and what start-up may load."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cachemgr.cli import COMMANDS
from cachemgr.errors import CacheError

ROOT = Path(__file__).parent.parent
_COMMANDS = sorted({module.removeprefix("cachemgr.cli.") for module, _line in COMMANDS.values()})
HEAVY = (
    "torch",
    "sqlalchemy",
    "alembic",
    "boto3",
    "botocore",
    "cryptography",
    "starlette",
    "urllib3",
    "vllm",
    "triton",
)


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `code`."""
    report = "import sys; print(' '.join({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


def test_imports_point_down_the_house() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_help_loads_click_and_nothing_else_of_ours() -> None:
    loaded = loaded_by("import sys\nfrom cachemgr.cli import cli\ntry: cli(['--help'])\nexcept SystemExit: pass")
    assert "click" in loaded
    assert loaded.isdisjoint({*HEAVY, "msgspec", "zstandard", "filelock", "xxhash", "pynvml"})


@pytest.mark.parametrize("command", _COMMANDS)
def test_commands_load_nothing_heavy(command: str) -> None:
    loaded = loaded_by(f"import cachemgr.cli.{command}")
    assert loaded.isdisjoint(HEAVY)
    assert "pynvml" not in loaded, "only where there is a GPU"


def test_a_mirror_that_nobody_asks_costs_nothing() -> None:
    opened = """
    import os
    from cachemgr.cache import open_cache
    from cachemgr.settings import load
    assert open_cache(load({}, {"mirror": "s3://bucket/prefix"}), {}).mirror is not None
    """
    assert loaded_by(textwrap.dedent(opened)).isdisjoint(HEAVY)


def test_every_error_has_a_documented_exit_code() -> None:
    pending, classes = [CacheError], []
    while pending:
        classes.append(pending.pop())
        pending.extend(classes[-1].__subclasses__())
    documented = {1, 2, 3, 10, 11, 12, 13, 125, 126, 127}
    assert {each.exit_code for each in classes} <= documented
    assert all(each.__doc__ for each in classes)


def test_no_module_is_a_drawer() -> None:
    names = {path.stem for path in (ROOT / "cachemgr").rglob("*.py")}
    assert not {name for name in names if re.search(r"util|helper|manager|common|misc", name)}


def test_every_module_says_why_it_exists() -> None:
    for path in (ROOT / "cachemgr").rglob("*.py"):
        assert path.read_text().startswith('"""'), path


def test_the_map_in_the_readme_names_every_room() -> None:
    readme = (ROOT / "README.md").read_text()
    rooms = {path.stem for path in (ROOT / "cachemgr").glob("*.py")} - {"__init__", "__main__"}
    rooms |= {path.parent.name for path in (ROOT / "cachemgr").glob("*/__init__.py")}
    missing = sorted(room for room in rooms if f"`{room}" not in readme)
    assert missing == []
