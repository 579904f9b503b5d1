"""Executables of a command's world: find one as the kernel would, and ask it a short question.

A question is bounded in time, cannot read our terminal, and an answer that does not come is no answer: None.
"""

import contextlib
import os
import signal
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from cachemgr.errors import CannotExecuteError, NoSuchCommandError

_OF_THE_SHELL = frozenset({"cd", "exec", "export", "source", "ulimit"})


def ask(argv: Sequence[str], environ: Mapping[str, str], cwd: Path, seconds: float) -> bytes | None:
    """What `argv` prints to stdout, or None when it fails, cannot start or takes longer than `seconds`."""
    try:
        # A session of its own: a shim's grandchildren hold the pipe open after the shim itself is dead.
        process = subprocess.Popen(
            list(argv),
            env=dict(environ),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError):
        return None
    with process:
        try:
            answer, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            return None
    return answer if process.returncode == 0 else None


def resolve(name: str, environ: Mapping[str, str], cwd: Path) -> Path:
    """The file that executing `name` with the child's PATH and directory would run.

    Raises:
        NoSuchCommandError: there is no such file.
        CannotExecuteError: there is one, and it may not be executed.
    """
    if "/" in name:
        candidates = [cwd / name]
    else:
        # A missing PATH means the default path, an empty entry the current directory, as for execvp(3).
        candidates = [cwd / folder / name for folder in environ.get("PATH", os.defpath).split(":")] if name else []
    found = [(path, mode) for path in candidates if (mode := _mode(path)) is not None]
    for path, mode in found:
        if stat.S_ISREG(mode) and os.access(path, os.X_OK):
            return path
    if found and stat.S_ISDIR(found[0][1]):
        raise CannotExecuteError(f"`{name}` is a directory ({found[0][0]})", hint="name a command in it")
    if found:
        raise CannotExecuteError(
            f"`{name}` cannot be executed ({found[0][0]})", hint=f"chmod +x {found[0][0]}, or name an interpreter"
        )
    if name in _OF_THE_SHELL:
        raise NoSuchCommandError(
            f"`{name}` is a word of the shell, and no command", hint="leave it out, or use sh -c '…'"
        )
    raise NoSuchCommandError(f"no command `{name}`", hint="check its spelling and PATH; it goes after `--`")


def find(name: str, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """Like `resolve`, and None where it raises."""
    try:
        return resolve(name, environ, cwd)
    except (NoSuchCommandError, CannotExecuteError):
        return None


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return None
