"""The Python that a command will run, and what it says about itself.

The interpreter is found by reading the command as the kernel and the shell would, and then asked once. Asking is what
makes pyenv shims, conda, nix wrappers, virtual environments and `.pth` files come out right: where a Python looks for
its packages is decided by its own start-up code, and a guess from files would be wrong silently.
"""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cachemgr import executables
from cachemgr.factors.wrappers import Command, unwrap

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*t?)?(-dbg)?")
_TRAMPOLINE = re.compile(rb"'''exec' (.+?) \"\$0\" \"\$@\"")
_SHELLS = frozenset({"sh", "bash", "dash"})
_HEAD = 4096
_SECONDS = 10.0

# Only modules that are compiled into every CPython: they cost nothing, and no file in the child's directory can shadow
# them (`-c` puts that directory first on the path). `include` is what sysconfig's posix_prefix scheme gives (CPython
# 3.10 to 3.13, Lib/sysconfig); importing sysconfig for it would double the time. The `-c` entry '' is no part of the
# path of a script.
_PROBE = r"""
import sys, posix, _imp
try:
    libc = posix.confstr("CS_GNU_LIBC_VERSION") or ""
except (ValueError, OSError):
    libc = ""
answer = [
    sys.version.split()[0],
    sys.implementation.name,
    _imp.extension_suffixes()[0],
    sys.platform,
    posix.uname().machine,
    libc,
    "%s/include/python%d.%d%s" % ((sys.base_prefix,) + sys.version_info[:2] + (sys.abiflags,)),
    ",".join(map(str, sorted(posix.sched_getaffinity(0)))),
] + [entry for entry in sys.path if entry]
sys.stdout.flush()
text = "\0cachemgr\0" + "\0".join(answer)
sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
sys.stdout.buffer.flush()
posix._exit(0)
"""


class Interpreter(msgspec.Struct, frozen=True):
    """What a Python says about itself."""

    version: str
    implementation: str
    abi: str
    """Suffix of its extension modules without dot and `.so`, such as `cpython-311-x86_64-linux-gnu`."""
    platform: str
    machine: str
    libc: str | None
    include: str
    """Directory of `Python.h`."""
    cpus: frozenset[int]
    """The CPUs that the process may use."""
    path: tuple[str, ...]


def is_python(name: str) -> bool:
    """Whether a file of this name is taken for a Python interpreter."""
    return _PYTHON.fullmatch(os.path.basename(name)) is not None


def launcher(command: Command, cwd: Path) -> tuple[str, ...] | None:
    """The words that start the Python of `command`: the executable and the options that a shebang adds.

    A command that is neither Python nor a Python script (a shell script, a binary) gets the first Python on its PATH,
    which is what it most likely starts itself. Where a wrapper chooses the Python, the wrapper finds it.
    """
    if command.chosen and "/" not in command.argv[0]:
        return (command.argv[0] if is_python(command.argv[0]) else "python",)
    path = executables.find(command.argv[0], command.environ, cwd)
    if path is None:
        return None
    if is_python(path.name):
        return (str(path),)
    return _from_script(path, command, cwd) or _first_on_path(command, cwd)


def ask(python: Sequence[str], options: Sequence[str], command: Command, cwd: Path) -> Interpreter | None:
    """Start `python` once where `command` will run (`taskset` decides the number of threads) and ask.

    `options` are interpreter options that decide where modules are found. None: no usable answer.
    """
    argv = [*command.placement, *python, *options, "-c", _PROBE]
    answer = executables.ask(argv, command.environ, cwd, _SECONDS)
    return None if answer is None else _parse(answer)


def _parse(answer: bytes) -> Interpreter | None:
    # A sitecustomize may print before us.
    fields = answer.rpartition(b"\0cachemgr\0")[2].decode("utf-8", "surrogateescape").split("\0")
    if len(fields) < 8:
        return None
    version, implementation, suffix, platform, machine, libc, include, cpus, *path = fields
    return Interpreter(
        version=version,
        implementation=implementation,
        abi=suffix.strip(".").removesuffix(".so"),
        platform=platform,
        machine=machine,
        libc=libc or None,
        include=include,
        cpus=frozenset(int(cpu) for cpu in cpus.split(",") if cpu),
        path=tuple(path),
    )


def _from_script(path: Path, command: Command, cwd: Path) -> tuple[str, ...] | None:
    head = _head(path)
    if not head.startswith(b"#!"):
        return None
    words = _shebang(head)
    if words and os.path.basename(words[0]) in _SHELLS:
        return _from_trampoline(path, head)
    inner = unwrap(words, command.environ)
    if not inner.argv or not is_python(inner.argv[0]):
        return None
    python = executables.find(inner.argv[0], inner.environ, cwd)
    return None if python is None else (str(python), *inner.argv[1:])


def _head(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD)
    except OSError:
        return b""


def _shebang(head: bytes) -> tuple[str, ...]:
    """The interpreter and its one optional argument: Linux does not split the rest of the line (execve(2))."""
    line = os.fsdecode(head.partition(b"\n")[0][2:]).strip()
    return tuple(line.split(None, 1))


def _from_trampoline(path: Path, head: bytes) -> tuple[str, ...] | None:
    """Python behind `#!/bin/sh` and `'''exec' PYTHON "$0" "$@"`.

    pip and distlib write this where a shebang would be too long or hold a space (distlib `scripts.py`,
    `_build_shebang`), uv also with a `$(dirname …)` for relocatable environments (uv `uv-install-wheel`, `wheel.rs`).
    """
    found = _TRAMPOLINE.search(head)
    if found is None:
        return None
    text = os.fsdecode(found[1])
    if "$(" in text:
        sibling = text.rpartition("/")[2].strip("'\"")
        return (str(Path(os.path.realpath(path)).parent / sibling),)
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    return tuple(words) or None


def _first_on_path(command: Command, cwd: Path) -> tuple[str, ...] | None:
    for name in ("python", "python3"):
        if (found := executables.find(name, command.environ, cwd)) is not None:
            return (str(found),)
    return None
