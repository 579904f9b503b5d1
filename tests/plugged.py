"""Machines on which a stand-in vLLM (`tests/stand_in`) loads our plugin as the real one does: by its entry point, once
in each of its processes. Nothing wraps it.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines import install_vllm
from tests.machines import Machine

HERE = Path(__file__).parent
SECONDS = 120


@dataclass(frozen=True)
class Run:
    """One start, after its launch has settled: whoever attends holds its standard error open until then."""

    code: int
    stdout: str
    stderr: str
    report: dict[str, Any] | None

    @property
    def answer(self) -> str:
        """What the engine said."""
        return next((line for line in self.stdout.splitlines() if line.startswith("ANSWER ")), "")

    @property
    def said(self) -> list[str]:
        """Our lines."""
        return [line for line in self.stderr.splitlines() if "cachemgr" in line]

    @property
    def told(self) -> tuple[str, str, int]:
        assert self.report is not None, self.stderr
        return self.report["result"], self.report["verdict"], sum(self.report["added"].values())

    @property
    def entries(self) -> list[str]:
        """What became of the AOT entries, by rank."""
        assert self.report is not None, self.stderr
        return [entry["verdict"] for entry in self.report["observed"]["entries"]]


@dataclass(frozen=True)
class Plugged:
    """A fleet that shares a store, a stand-in vLLM with our plugin, and a model."""

    directory: Path
    variables: dict[str, str]
    python: str

    @classmethod
    def install(cls, directory: Path, version: str = "0.32.0", python: str = sys.executable) -> "Plugged":
        program = f"#!{python}\nfrom vllm.entrypoints.cli.main import main\nmain()\n"
        variables = install_vllm(directory, version, program, HERE / "stand_in" / "vllm")
        return cls(directory, {**variables, "CACHEMGR_ENABLE": "1"}, python)

    @property
    def site(self) -> Path:
        return Path(self.variables["PYTHONPATH"])

    @property
    def model(self) -> str:
        return str(self.directory / "model")

    def machine(self, name: str, **variables: str) -> Machine:
        return Machine(self.directory / name, self.directory / "store", {**self.variables, **variables})

    def serve(self, *options: str) -> tuple[str, ...]:
        return (str(self.directory / "bin" / "vllm"), "serve", self.model, *options)

    def program(self, name: str, arguments: str = "", *, engines: int = 1) -> tuple[str, ...]:
        """A program that makes engines; its bytes hold its name, and it takes what it asks for from its arguments."""
        path = self.directory / f"{name}.py"
        makes = f"    print('ANSWER', LLM({self.model!r}, **eval(f'dict({{sys.argv[1]}})')).generate(), flush=True)\n"
        path.write_text(
            f'"""{name}"""\nimport sys\nfrom vllm import LLM\n\nif __name__ == "__main__":\n{makes * engines}'
        )
        return (self.python, str(path), arguments)


def start(machine: Machine, command: tuple[str, ...], **more: str) -> "subprocess.Popen[str]":
    """Start a command on a machine, with pipes."""
    environ = {**machine.environ, "CACHEMGR_REPORT": str(machine.root / "report.json"), **more}
    return subprocess.Popen(
        command, env=environ, cwd=machine.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(machine: Machine, process: "subprocess.Popen[str]") -> Run:
    stdout, stderr = process.communicate(timeout=SECONDS)
    report = machine.root / "report.json"
    found = json.loads(report.read_text()) if report.exists() else None
    return Run(process.returncode, stdout, stderr, found)


def run(machine: Machine, command: tuple[str, ...], code: int = 0, **more: str) -> Run:
    """Run a command on a machine, and wait until its launch has settled."""
    machine.make_places()
    (machine.root / "report.json").unlink(missing_ok=True)
    done = finish(machine, start(machine, command, **more))
    assert done.code == code, f"exit {done.code}\n{done.stdout}\n{done.stderr}"
    return done


def ours(machine: Machine) -> list[int]:
    """Processes of ours that are alive on a machine."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or f"HOME={machine.home}".encode() not in (entry / "environ").read_bytes():
                continue
            if b"attend" in (entry / "cmdline").read_bytes().split(b"\0") and _lives(entry):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _lives(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"


def environ_of(machine: Machine) -> dict[str, str]:
    """What a start on this machine gets from outside."""
    return {**machine.environ, "PATH": os.environ["PATH"]}
