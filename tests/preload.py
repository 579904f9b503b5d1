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

_REFUSE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int is_ours;
__attribute__((constructor)) static void look(void) {
    static const char run[] = "-m\\0cachemgr", pump[] = "pump.py";
    char line[4096];
    int file = open("/proc/self/cmdline", O_RDONLY);
    long size = file < 0 ? 0 : read(file, line, sizeof line);
    close(file);
    is_ours = size > 0 && (memmem(line, size, run, sizeof run) || memmem(line, size, pump, sizeof pump - 1));
}
static int refused(atomic_int *count) {
    const char *range = getenv("REFUSED");
    int first = 0, last = 0, number = atomic_fetch_add(count, 1);
    return is_ours && range && sscanf(range, "%%d-%%d", &first, &last) == 2 && number >= first && number <= last;
}
%s
"""

_NO_THREADS = (
    _REFUSE
    % """
int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*start)(void *), void *with) {
    static atomic_int count;
    static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (!real) real = dlsym(RTLD_NEXT, "pthread_create");
    return refused(&count) ? EAGAIN : real(thread, how, start, with);
}
"""
)

_NO_PROCESSES = (
    _REFUSE
    % """
int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *how,
                char *const argv[], char *const environ[]) {
    static atomic_int count;
    static int (*real)(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *,
                       char *const[], char *const[]);
    if (!real) real = dlsym(RTLD_NEXT, "posix_spawn");
    return refused(&count) ? EAGAIN : real(pid, path, actions, how, argv, environ);
}
"""
)

SOURCES = {
    "no threads": _NO_THREADS,
    "no processes": _NO_PROCESSES,
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
