"""What development and CI install is locked: every version, and the digest of every file."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
_PIN = re.compile(
    r"^([A-Za-z0-9._-]+)==([^\s;\\]+)(?: ; [^\\]*)? ?\\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE
)


def locked(name: str) -> dict[str, set[str]]:
    """The versions of each package that a lock file names with hashes."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    found: dict[str, set[str]] = {}
    for package, version, _hashes in _PIN.findall(text):
        found.setdefault(canonicalize_name(package), set()).add(version)
    assert len(re.findall(r"^[A-Za-z0-9]", text, re.MULTILINE)) == len(_PIN.findall(text)), "a line without hashes"
    return found


def wanted(name: str) -> list[str]:
    """What a lock file is made from."""
    project = PROJECT["project"]
    build = (ROOT / "requirements" / "build.in").read_text()
    asked: dict[str, list[str]] = {
        "run": project["dependencies"],
        "dev": [
            *project["dependencies"],
            *project["optional-dependencies"]["dev"],
            *PROJECT["build-system"]["requires"],
        ]
        + [line for line in build.splitlines() if not line.startswith("#")],
        "audit": [
            line for line in (ROOT / "requirements/audit.in").read_text().splitlines() if not line.startswith("#")
        ],
    }
    return asked[name]


@pytest.mark.parametrize("name", ["run", "dev", "audit"])
def test_a_lock_file_has_what_is_asked_for_and_no_file_without_its_digest(name: str) -> None:
    found = locked(name)
    for text in wanted(name):
        asked = Requirement(text)
        versions = found.get(canonicalize_name(asked.name))
        assert versions, f"{asked.name} is not in requirements/{name}.txt: run scripts/lock"
        assert all(version in asked.specifier for version in versions), f"{text} is not met: run scripts/lock"


def test_what_is_tested_is_what_is_shipped() -> None:
    """The wheel's packages have the same versions in both files."""
    run, dev = locked("run"), locked("dev")
    assert {name: dev[name] for name in run} == run
