"""cachemgr opens no pickle, imports no file and runs no binary of a cache, in any command: tripwires in all of them.

A program fills its caches with files of every kind that run something when they are unpickled, imported, loaded, built
or found by an interpreter. It is captured, looked at by every command, restored and removed. Nothing may have run.
"""

import ast
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cachemgr.cli import COMMANDS
from tests.authorities import Authority
from tests.machines import Fleet, Machine

PROGRAM = '''\
"""Puts files into its caches, or reads them as data when they are there."""
import os, shutil, sys

for variable, traps in zip(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), sys.argv[1:]):
    root = os.environ[variable]
    if not os.path.isdir(root) or not any(files for _, _, files in os.walk(root)):
        shutil.copytree(traps, root, dirs_exist_ok=True)
        print("filled", file=sys.stderr)
    for directory, _, files in os.walk(root):
        for name in files:
            open(os.path.join(directory, name), "rb").read()
'''

LIBRARY = """\
#include <fcntl.h>
__attribute__((constructor)) static void sprung(void) { open("%s/sprung-by-loading", O_CREAT | O_WRONLY, 0644); }
int unused;
"""

WATCHED = """\
import os, sys
sprung, roots = sys.argv[1], sys.argv[2].split(":")

def hook(event, arguments):
    telling = event == "pickle.find_class"
    if event in ("ctypes.dlopen", "import", "compile", "exec", "os.exec", "os.posix_spawn", "os.system"):
        telling = any(root in str(what) for what in arguments[:2 if event == "import" else 1] for root in roots)
    if telling:
        descriptor = os.open(os.path.join(sprung, f"sprung-{event}"), os.O_CREAT | os.O_WRONLY, 0o644)
        os.write(descriptor, repr(arguments)[:500].encode())
        os.close(descriptor)

sys.addaudithook(hook)
sys.argv[:] = ["cachemgr", *sys.argv[3:]]
from cachemgr.__main__ import main
main()
"""


class _Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (str(self._path), os.O_CREAT | os.O_WRONLY)


class Minefield:
    """A fleet whose program leaves tripwires in its caches; what they touch lies in `sprung`."""

    def __init__(self, root: Path) -> None:
        self.fleet = Fleet(root)
        self.sprung = root / "sprung"
        self.sprung.mkdir()
        self.traps = root / "traps"
        (root / "trapped.py").write_text(PROGRAM)
        self.command = (
            sys.executable,
            str(root / "trapped.py"),
            str(self.traps / "inductor"),
            str(self.traps / "triton"),
        )
        self._lay()

    def _lay(self) -> None:
        inductor, triton = self.traps / "inductor", self.traps / "triton" / ("A" * 52)
        for directory in (inductor / "qa", inductor / "fxgraph" / "ab", triton):
            directory.mkdir(parents=True)
        code = f"import os\nos.open({str(self.sprung / 'sprung-by-import')!r}, os.O_CREAT)\n"
        poisoned = pickle.dumps(_Trap(self.sprung / "sprung-by-unpickling"))
        library = self._library()
        for place in (inductor / "qa", triton):
            (place / "trap.pkl").write_bytes(poisoned)
            (place / "trap.bin").write_bytes(poisoned)
            (place / "sitecustomize.py").write_text(code)
            (place / "usercustomize.txt").write_text(code)
            (place / "trap.pth").write_text(f"import os; os.open({str(self.sprung / 'sprung-by-pth')!r}, os.O_CREAT)\n")
            (place / "build.ninja").write_text(f"rule t\n command = touch {self.sprung}/sprung-by-ninja\nbuild x: t\n")
            (place / "trap.sh").write_text(f"#!/bin/sh\ntouch {self.sprung}/sprung-by-shell\n")
            (place / "trap.sh").chmod(0o755)
            if library is not None:
                shutil.copy(library, place / "trap.so")
        (triton / "add.json").write_text("{}")
        (triton / "add.cubin").write_bytes((triton / "trap.so").read_bytes() if library else b"")
        (triton / "__grp__add.json").write_text('{"child_paths": {}}')

    def _library(self) -> Path | None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            return None
        source, made = self.sprung.with_name("trap.c"), self.sprung.with_name("trap.so")
        source.write_text(LIBRARY % self.sprung)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
        return made

    def cachemgr(self, machine: Machine, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """`cachemgr WORDS` in the middle of the traps, with every import, load and unpickling watched."""
        package = Path(__file__).parent.parent
        roots = f"{self.traps}:{machine.home}:{machine.tmp}:{machine.store}"
        code = f"import sys; sys.path[0] = {str(package)!r}\n{WATCHED}"  # instead of the working directory
        return subprocess.run(
            [sys.executable, "-c", code, str(self.sprung), roots, *words],
            env={**machine.environ, **more},
            cwd=self.traps / "inductor" / "qa",
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def said(self) -> list[str]:
        """What has run."""
        return sorted(f"{path.name}: {path.read_text()}" for path in self.sprung.iterdir())


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Minefield:
    return Minefield(tmp_path_factory.mktemp("field"))


def test_the_traps_spring_when_they_are_stepped_on(tmp_path: Path) -> None:
    """Otherwise the silence of all the others would prove nothing."""
    field = Minefield(tmp_path)
    place = field.traps / "inductor" / "qa"
    subprocess.run([sys.executable, "-c", "import pickle; pickle.load(open('trap.pkl', 'rb'))"], cwd=place, check=True)
    subprocess.run([sys.executable, "-c", "import sitecustomize"], cwd=place, env={"PYTHONPATH": "."}, check=True)
    subprocess.run([sys.executable, "-c", "import site; site.addsitedir('.')"], cwd=place, check=True)
    if (place / "trap.so").exists():
        subprocess.run([sys.executable, "-c", "import ctypes; ctypes.CDLL('./trap.so')"], cwd=place, check=True)
        assert "sprung-by-loading" in os.listdir(field.sprung)
    assert {"sprung-by-unpickling", "sprung-by-import", "sprung-by-pth"} <= set(os.listdir(field.sprung))


_LOADERS = {
    "cli/__init__.py",  # our own commands
    "prewarm/on_ray.py",  # asks whether Ray is there
    "plugin/front.py",  # asks whether our own dependencies are there
    "plugin/hooks.py",  # waits for the engine to import its own modules
}


def test_nothing_of_ours_runs_what_it_read() -> None:
    """The import contract knows modules; these are names that need none."""
    runs = {"eval", "exec", "compile", "__import__", "execfile"}
    for path in sorted((Path(__file__).parent.parent / "cachemgr").rglob("*.py")):
        tree = ast.parse(path.read_text())
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        named |= {
            f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert not called & runs, path
        loads = {name for name in named if name.split(".")[0] in ("importlib", "imp")} - {
            "importlib.resources",
            "importlib.metadata",
        }
        assert not loads or "/".join(path.parts[-2:]) in _LOADERS, f"{path} loads modules by name"


@pytest.mark.slow
def test_no_command_steps_on_one(field: Minefield, tmp_path: Path) -> None:
    one, two = field.fleet.machine("one"), field.fleet.machine("two")
    cold = field.cachemgr(one, "run", "--", *field.command)
    assert "filled" in cold.stderr, cold.stderr
    assert "captured" in cold.stderr, cold.stderr
    warm = field.cachemgr(two, "run", "--", *field.command)
    assert "filled" not in warm.stderr, warm.stderr
    restored = {path.name for path in two.home.rglob("trap.*")} | {path.name for path in two.home.rglob("*.ninja")}
    assert {"trap.pkl", "trap.pth", "build.ninja", "trap.sh"} <= restored
    author = Authority()
    key = field.cachemgr(one, "ls", "-q").stdout.strip()
    assert key.startswith("k1:")
    looks: dict[str, tuple[str, ...]] = {
        "lookup": ("lookup", "--", *field.command),
        "env": ("env", "--", *field.command),
        "ls": ("ls",),
        "show": ("show", key, "--files"),
        "size": ("size",),
        "dir": ("dir",),
        "config": ("config", "show"),
        "keygen": ("keygen", str(tmp_path / "key.pem")),
        "sign": ("sign", key, "--key", str(author.file(tmp_path)), "--accept-unverified-origin"),
        "why": ("why", key),
        "diff": ("diff", key, "--", *field.command),
        "verify": ("verify", "--deep", "--live"),
        "export": ("export", key, "--tar", str(tmp_path / "artifact.tar")),
        "import": ("import", str(tmp_path / "artifact.tar")),
        "pin": ("pin", key),
        "prune": ("prune", "--unused-for", "1d", "--live", "-y"),
        "rm": ("rm", key, "-y"),
    }
    ends = [name for name in COMMANDS if name not in {"run", "serve"}]
    looks = {**{name: (name,) for name in ends if name not in looks}, **looks}
    for name, words in looks.items():
        done = field.cachemgr(one, *words)
        assert "Traceback" not in done.stderr, f"{name}\n{done.stderr}"
    assert field.said() == [], field.said()
