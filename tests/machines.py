"""Machines for tests: an isolated home with its own temporary and cache directories, sharing a store with others.

`cachemgr` runs there as a real process with nothing of this machine's environment but PATH. `install_stand_in` makes an
interpreter that has a torch by all that factors look at, and a program that keeps an Inductor cache as Inductor does:
looked up by content, written aside and renamed. It stands in where a real compile would cost minutes and prove nothing
more; `test_e2e_torch.py` has the real one.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cachemgr.store import records
from cachemgr.store.local import LocalStore

STAND_IN = '''\
"""Compiles nothing, and keeps a cache as Inductor does. Arguments: names of graphs."""
import base64, hashlib, os, signal, sys, time

root = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(os.environ["TMPDIR"], "torchinductor")

def name_of(data):
    return base64.b32encode(hashlib.sha256(data).digest())[:51].decode().lower()

def compiled(graph):
    directory = os.path.join(root, "aotautograd", "a" + name_of(graph.encode()))
    if os.path.isdir(directory):
        for entry in os.listdir(directory):
            return open(os.path.join(directory, entry), "rb").read()
    noise = os.urandom(4) if os.environ.get("NOISE") else b""
    data = b"machine code of " + graph.encode() + noise + b"." * 5000
    os.makedirs(directory, exist_ok=True)
    aside = os.path.join(directory, f".{os.getpid()}.tmp")
    with open(aside, "wb") as file:
        file.write(data)
    os.replace(aside, os.path.join(directory, name_of(data)))
    print("compiled", graph, file=sys.stderr)
    return data

for argument in sys.argv[1:]:
    if argument.startswith("exit="):
        sys.exit(int(argument[5:]))
    elif argument.startswith("kill="):
        os.kill(os.getpid(), int(argument[5:]))
    elif argument.startswith("sleep="):
        print("sleeping", flush=True)
        time.sleep(float(argument[6:]))
    elif argument.startswith("list="):
        os.listdir(os.path.join(root, "aotautograd", "a" + name_of(argument[5:].encode())))
    elif argument == "idle":
        sys.exit(0) if os.path.exists(os.path.join(os.environ["TMPDIR"], "idle")) else None
    else:
        print(compiled(argument)[:30].decode(errors="replace"))
'''


@dataclass(frozen=True)
class Machine:
    """One machine of a fleet: its own HOME and TMPDIR; `store` may be shared."""

    root: Path
    store: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def environ(self) -> dict[str, str]:
        self.make_places()
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "TMPDIR": str(self.tmp),
            "CACHEMGR_STORE": str(self.store),
            "LC_ALL": "C.UTF-8",
            **self.variables,
        }

    def make_places(self) -> None:
        """HOME and TMPDIR, before several processes need them at once."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.tmp.mkdir(exist_ok=True)

    def cachemgr(self, *words: str, code: int | None = 0, **more: str) -> "subprocess.CompletedProcess[str]":
        """Run `cachemgr WORDS` and expect the exit code `code` (None: any)."""
        done = subprocess.run(
            [sys.executable, "-m", "cachemgr", *words],
            env={**self.environ, **more},
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *words: str, group: bool = False, **more: str) -> "subprocess.Popen[str]":
        """Start `cachemgr WORDS` and return the running process; with `group`, in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "cachemgr", *words],
            env={**self.environ, **more},
            cwd=self.root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=os.setpgrp if group else None,  # noqa: PLW1509 - process_group needs Python 3.11
        )

    def run(self, *command: str, code: int = 0, options: tuple[str, ...] = (), **more: str) -> dict[str, Any]:
        """`cachemgr run -- COMMAND`; its report, with what it printed as `stdout` and `stderr`."""
        report = self.root / "report.json"
        report.unlink(missing_ok=True)
        done = self.cachemgr("run", "--report", str(report), *options, "--", *command, code=code, **more)
        return {**json.loads(report.read_text()), "stdout": done.stdout, "stderr": done.stderr}

    def json(self, *words: str, code: int | None = 0, **more: str) -> dict[str, Any]:
        """`cachemgr WORDS --json`, decoded."""
        head, *rest = words
        document: dict[str, Any] = json.loads(self.cachemgr(head, "--json", *rest, code=code, **more).stdout)
        return document


def install_stand_in(directory: Path, *, torch: str = "2.13.0+cpu") -> dict[str, str]:
    """A site directory with a torch that has no code, as the variables that put it on the path."""
    site = directory / f"site-{torch}"
    (site / "torch").mkdir(parents=True, exist_ok=True)
    (site / "torch" / "__init__.py").write_text("")
    (site / "torch" / "version.py").write_text(f"__version__ = '{torch}'\ncuda = None\nhip = None\n")
    info = site / f"torch-{torch}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    (info / "RECORD").write_text(f"torch/__init__.py,sha256={torch},0\ntorch/version.py,sha256=x,1\n")
    return {"PYTHONPATH": str(site)}


def install_program(directory: Path) -> str:
    """The stand-in program; its path."""
    path = directory / "engine.py"
    path.write_text(STAND_IN)
    return str(path)


class Fleet:
    """Machines that share a store, a stand-in torch and a program."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.program = install_program(directory)
        self.variables = install_stand_in(directory)

    def machine(self, name: str, **variables: str) -> Machine:
        return Machine(self.directory / name, self.directory / "store", {**self.variables, **variables})

    def command(self, *arguments: str) -> tuple[str, ...]:
        return (sys.executable, self.program, *arguments)


def launches_in(store: Path) -> list[dict[str, Any]]:
    """The launch records of a store, oldest first, each once; some may have been rolled up."""
    found = [msgspec.to_builtins(launch) for launch in records.launches(LocalStore(store))]
    return sorted(found, key=lambda record: (record["started"], record["launch"]))


def wait_for(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Until something holds; an AssertionError where it does not come to that."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)
