"""A C++ compiler that writes down how it was called, and remembers what it made; `g++` and `c++` of the vLLM tests.

    compiler.py REAL LOG MEMORY ARGUMENT...

A cold start of vLLM on a CPU spends most of its time in headers: about twenty calls of three seconds. What was compiled
once, from the same text with the same flags, is copied the next time; Inductor and vLLM notice nothing of it.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path


def main() -> int:
    real, log, memory, *arguments = sys.argv[1:]
    if "-o" not in arguments:
        os.execv(real, [real, *arguments])
    made = Path(arguments[arguments.index("-o") + 1])
    with open(log, "a", encoding="utf-8") as calls:
        calls.write(f"{shlex.join(arguments)}\n")
    kept = Path(memory) / digest(arguments)
    if not kept.exists():
        done = subprocess.run([real, *arguments], check=False)
        if done.returncode:
            return done.returncode
        aside = kept.with_name(f"{kept.name}.{os.getpid()}")
        shutil.copy(made, aside)
        aside.rename(kept)
        return 0
    shutil.copy(kept, made)
    return 0


def digest(arguments: list[str]) -> str:
    """Of the flags, and of what is compiled without where it lies."""
    digest = hashlib.sha256()
    for argument in arguments:
        if argument.endswith((".cpp", ".so", ".o", ".c")):
            path = Path(argument)
            digest.update(path.name.encode() + (path.read_bytes() if path.exists() else b""))
        else:
            digest.update(argument.encode() + b"\0")
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
