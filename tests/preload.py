"""Libraries that make real system calls misbehave in a child process: locks that lie, opens that hang.

Built with the C compiler that torch.compile needs anyway, and loaded with LD_PRELOAD: the product runs unchanged.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

_FLOCK = """
#include <errno.h>
int flock(int fd, int operation) { %s }
"""

_HANG = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <stdlib.h>
#include <unistd.h>
static void maybe_hang(const char *path) {
    const char *slow = getenv("HANGING_PATH");
    if (slow && path && strstr(path, slow)) sleep(20);
}
#define WRAP(name) \\
int name(const char *path, int flags, ...) { \\
    static int (*real)(const char *, int, ...); \\
    mode_t mode = 0; \\
    va_list list; \\
    va_start(list, flags); \\
    if (flags & (O_CREAT | O_TMPFILE)) mode = va_arg(list, mode_t); \\
    va_end(list); \\
    if (!real) real = dlsym(RTLD_NEXT, #name); \\
    maybe_hang(path); \\
    return real(path, flags, mode); \\
}
WRAP(open)
WRAP(open64)
"""

SOURCES = {
    "flock does nothing": _FLOCK % "return 0;",
    "flock is missing": _FLOCK % "errno = ENOSYS; return -1;",
    "flock finds no locks": _FLOCK % "errno = ENOLCK; return -1;",
    "opens hang": _HANG,
}


def misbehaving(name: str, directory: Path) -> dict[str, str]:
    """The variables that load the misbehaviour `name` into a process."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, built = directory / "preload.c", directory / "preload.so"
    source.write_text(SOURCES[name])
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(built), str(source), "-ldl"], check=True)
    return {"LD_PRELOAD": str(built)}
