"""What `scripts/release-check` asks of distributions and of what was installed from them; standard library only.

release_check.py contents DIST       the wheel and the sdist in a directory have what they need, and one version
release_check.py works CACHEMGR      an installed command does the main job, with a program that compiles nothing
release_check.py shim                without any dependency installed vLLM finds the plugin, and it loads
release_check.py serves CACHEMGR     with the extra `server` it answers on a port of its own
"""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = {"cachemgr": "cachemgr", "migrations": "cachemgr/migrations"}
"""Directories of the clone, and what they are in the wheel: all of both is needed."""
_SDIST_NEEDED = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "migrations/env.py", "tests/conftest.py")
_EXTRAS = {"dev", "postgres", "ray", "server", "torch"}
_LISTENS = re.compile(r"http://127\.0\.0\.1:\d+")
_SECONDS = 60.0


def contents(dist: Path) -> None:
    """The wheel is pure and whole; the sdist builds and tests itself."""
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    assert wheel.name.endswith("-py3-none-any.whl"), wheel.name
    with zipfile.ZipFile(wheel) as held:
        names = set(held.namelist())
        of_wheel = {
            name.partition(".dist-info/")[2]: held.read(name).decode() for name in names if ".dist-info/" in name
        }
    with tarfile.open(sdist) as held_too:
        of_sdist = {name.partition("/")[2] for name in held_too.getnames()}
    missing = [name for name in _needed() if name not in names]
    missing += [name for name in _SDIST_NEEDED if name not in of_sdist]
    assert not missing, f"missing: {missing}"
    strange = [name for name in names if not name.startswith(("cachemgr/", "cachemgr-"))]
    assert not strange, f"the wheel installs {strange}"
    metadata = of_wheel["METADATA"]
    _one_version(wheel.name, metadata)
    assert of_wheel["licenses/LICENSE"] == (_ROOT / "LICENSE").read_text()
    assert "License-Expression: Apache-2.0" in metadata
    assert set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.MULTILINE)) == _EXTRAS
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e3:.0f} kB; {sdist.name}: {len(of_sdist)}")


def _needed() -> list[str]:
    """Every file of the package: code, facts, pages and what they look like, revisions of the catalogue."""
    return [
        f"{inside}/{path.relative_to(_ROOT / outside)}"
        for outside, inside in _PACKAGES.items()
        for path in sorted((_ROOT / outside).rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    ]


def _one_version(wheel: str, metadata: str) -> None:
    """What `cachemgr/__init__.py` says is what everything else says."""
    code = (_ROOT / "cachemgr" / "__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', code, re.MULTILINE)
    assert f"\nVersion: {version}\n" in metadata
    assert f"-{version}-" in wheel
    headings = re.findall(r"^## (\S+)", (_ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version, f"CHANGELOG.md begins with {headings[0]}, the version is {version}"


def works(command: str) -> None:
    """Everything is imported that the client needs, and one command runs from end to end."""
    with tempfile.TemporaryDirectory() as home:
        environ = {"PATH": os.environ["PATH"], "HOME": home, "LC_ALL": "C.UTF-8"}
        told = _said([command, "--version"], environ)
        listed = _said([command, "--help"], environ)
        for name in re.findall(r"^  ([a-z]+)  ", listed, re.MULTILINE):
            _said([command, name, "--help"], environ)
        report = Path(home, "report.json")
        _said([command, "run", "--report", str(report), "--", sys.executable, "-c", "print(1)"], environ)
        assert json.loads(report.read_text())["exit_code"] == 0
        assert json.loads(_said([command, "ls", "--json"], environ))["artifacts"] == []
        assert list(Path(home).rglob("catalogue.db")), "revisions of the catalogue are not where they are looked for"
    print(f"{told.strip()} works on Python {sys.version.split()[0]}")


def shim() -> None:
    """What a serving image carries: the entry point of vLLM's plugins, of the standard library only."""
    (point,) = importlib.metadata.entry_points(group="vllm.general_plugins")
    point.load()()
    foreign = {name.partition(".")[0] for name in sys.modules} - {*sys.stdlib_module_names, "__main__", "cachemgr"}
    assert not {name for name in foreign if not name.startswith("_")}, foreign
    others = {each.metadata["Name"] for each in importlib.metadata.distributions()} - {"cachemgr", "pip", "setuptools"}
    assert not others, f"installed beside it: {others}"
    print(f"the plugin alone loads on Python {sys.version.split()[0]}")


def serves(command: str) -> None:
    """Pages, templates and metrics are there when they are installed."""
    with tempfile.TemporaryDirectory() as home:
        environ = {"PATH": os.environ["PATH"], "HOME": home, "LC_ALL": "C.UTF-8"}
        server = subprocess.Popen([command, "serve", "--port", "0"], env=environ, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None, "it is a pipe"
            address = next(found[0] for line in server.stderr if (found := _LISTENS.search(line)))
            for page in ("/healthz", "/", "/static/page.css", "/metrics", "/v1/artifacts", "/v1/openapi.json"):
                _answered(address + page)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(_SECONDS)
    print(f"it serves on Python {sys.version.split()[0]}")


def _answered(url: str) -> None:
    end = time.monotonic() + _SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
                assert answer.status == 200, url
                return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _said(words: list[str], environ: dict[str, str]) -> str:
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=_SECONDS)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    _ways = {"contents": lambda: contents(Path(sys.argv[2])), "works": lambda: works(sys.argv[2])}
    {**_ways, "serves": lambda: serves(sys.argv[2]), "shim": shim}[sys.argv[1]]()
