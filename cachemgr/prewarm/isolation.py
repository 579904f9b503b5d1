"""Starts that are watched: no network, and compilers that leave a trace.

A compiler is found by PATH, so a directory in front of it has a stand-in for each, which notes its words and becomes
the real one. What is called by its own path leaves no trace here (Triton's ptxas lies in its package, CXX may be a
path), but what it makes does: a kernel that was compiled is a file that was added.
"""

import fcntl
import os
import re
import shlex
import socket
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from cachemgr import executables, places

COMPILERS = ("g++", "gcc", "c++", "cc", "clang++", "clang", "nvcc", "cicc", "ptxas", "hipcc")
# The real one is called by the same word: gcc tells it on (`COLLECT_GCC`), and Inductor has that in its keys.
_SHIM = """#!/bin/sh
# Notes how {name} is called, one word a line, and becomes the real one.
printf '%s\\n' {name} "$@" >> {calls}/$$
PATH={path}
export PATH
exec {name} "$@"
"""
_INPUT = re.compile(r"(?!-).*\.(c|cc|cpp|cxx|cu|h|hpp|o|s|S|ptx|ll)|-")
# Inductor asks at every start of a new machine which instruction sets its compiler can make (torch 2.11 to 2.13
# `_inductor/cpu_vec_isa.py`, check_build). The source is named by a hash alone; those of kernels end in `.main.cpp`.
_PROBE = re.compile(r".*/c[a-z2-7]{51}\.cpp")
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1  # linux/sockios.h, linux/if.h
_NOBODY = "http://127.0.0.1:9"
"""The port of the discard service, where nobody listens."""
_PATIENCE = 10.0
_HERE = "localhost,127.0.0.1,::1"
_SHORT = "/tmp"  # noqa: S108 - what is made in it has a name that nobody can guess, and is its owner's alone
_LONGEST_BASE = 107 - len("/cachemgr-v-12345678/10000/tmp/01234567-89ab-cdef-0123-456789abcdef")
"""Bytes of a directory below which engines get their temporary ones: they meet at sockets in there, whose paths have
at most 107 (unix(7)) and end in a UUID (vLLM 0.26 to 0.33 `utils/network_utils.py`, get_open_zmq_ipc_path)."""


def watch_compilers(place: Path, environ: Mapping[str, str], cwd: Path) -> dict[str, str]:
    """Put stand-ins for compilers into `place`; the variables that make a command use them.

    Raises:
        OSError: they cannot be written.
    """
    tools, calls = place / "bin", place / "calls"
    tools.mkdir(parents=True)
    calls.mkdir()
    path = environ.get("PATH", os.defpath)
    for name in COMPILERS:
        if executables.find(name, environ, cwd) is not None:
            shim = tools / name
            shim.write_text(_SHIM.format(name=name, calls=shlex.quote(str(calls)), path=shlex.quote(path)))
            shim.chmod(0o755)
    return {"PATH": f"{tools}:{path}"}


def compiled(place: Path) -> list[str]:
    """What compilers compiled: the name of each and its input. Questions about the compiler itself do not count."""
    found = []
    for call in sorted((place / "calls").iterdir()):
        name, *words = call.read_text(errors="replace").splitlines() or [""]  # killed before it noted anything
        inputs = [word for before, word in pairwise(["", *words]) if before != "-o" and _INPUT.fullmatch(word)]
        if "-E" not in words and any(not _PROBE.fullmatch(path) for path in inputs):
            found.append(f"{name} {' '.join(os.path.basename(path) for path in inputs)}")
    return found


def base_of_places(usual: str) -> str:
    """Where to make places for starts: in the usual temporary directory, unless its name is too long for sockets."""
    fits = len(os.fsencode(usual)) <= _LONGEST_BASE
    return usual if fits or not places.usable(_SHORT) else _SHORT


def can_unshare() -> bool:
    """Whether a command of this user can be given a network of its own, with nothing in it."""
    tried = ("unshare", "--net", "true")
    return os.geteuid() == 0 and executables.ask(tried, os.environ, Path("/"), _PATIENCE) is not None


def raise_loopback() -> None:
    """Have this machine's own address in a network that is new: engines talk to themselves by it.

    Raises:
        OSError: the kernel refuses.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16xh14x", fcntl.ioctl(one, _SIOCGIFFLAGS, request))[0]
        fcntl.ioctl(one, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def no_proxy_answers() -> dict[str, str]:
    """Variables that send what asks a proxy to nobody. What asks none gets through: a network of its own is better."""
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    return {**dict.fromkeys(names, _NOBODY), "no_proxy": _HERE, "NO_PROXY": _HERE}


def left_in(directory: Path) -> Sequence[str]:
    """Caches that a start left in its temporary directory, where the next machine does not look."""
    return sorted(
        path.name
        for path in directory.iterdir()
        if path.name.startswith(("torchinductor_", "triton", "flashinfer", "torch_extensions")) and path.is_dir()
    )
