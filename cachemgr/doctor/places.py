"""Checks of the machine: its user, and the directories that an engine and its caches need."""

import os
import pwd
from collections.abc import Iterator

from cachemgr import places
from cachemgr.doctor.finding import Finding, Patient, error, note, ok, warning
from cachemgr.live import live_root as root_of
from cachemgr.observe import keeps_access_times


def user(patient: Patient) -> Iterator[Finding]:
    """The user id has a name, or is known to need none."""
    uid = os.geteuid()
    try:
        yield ok("user", f"{pwd.getpwuid(uid).pw_name} ({uid})")
    except KeyError:
        # Inductor asked for the name in older torch (`_inductor/runtime/cache_dir_utils.py`), and so do others.
        named = any(patient.environ.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME"))
        hint = "" if named else "set USER to any name"
        yield note("user", f"user id {uid} has no name on this machine; some programs ask for one", hint)


def home_directory(patient: Patient) -> Iterator[Finding]:
    """HOME leads somewhere that can be written."""
    home = patient.environ.get("HOME", "")
    if not home:
        yield warning("HOME", "is not set", "set HOME to a directory of this user, such as a mounted volume")
    elif home == "/" or not places.usable(home):
        said = "is `/`" if home == "/" else f"is {home}, which cannot be written"
        hint = "set HOME, or XDG_CACHE_HOME, to a directory that can be written"
        yield note("HOME", f"{said}: caches go where other variables say", hint)
    else:
        yield ok("HOME", home)


def temporary(patient: Patient) -> Iterator[Finding]:
    """Compilers, torch and vLLM's sockets need a temporary directory."""
    place = patient.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - where everybody looks
    if not places.usable(place):
        yield error("TMPDIR", f"{place} cannot be written, and no compiler runs without it", "mount a volume at /tmp")
    elif places.spare(patient.environ) is None:
        spare = places.spare_of(patient.environ)
        yield warning("TMPDIR", f"{spare} belongs to somebody else or is open to others", f"remove {spare}")
    else:
        yield ok("TMPDIR", place)


def root_file_system(_patient: Patient) -> Iterator[Finding]:
    """A read-only root is fine where everything that is written has a volume."""
    if os.statvfs("/").f_flag & os.ST_RDONLY:
        yield note("root", "the root file system is read-only, so all that is written needs a volume")


def live_root(patient: Patient) -> Iterator[Finding]:
    """Where vLLM keeps its caches can be written, is local, and shows what was read."""
    root = root_of(patient.environ)
    if not places.usable(root):
        spare = places.spare(patient.environ)
        hint = "set VLLM_CACHE_ROOT to a directory that can be written"
        if spare is None:
            yield error("VLLM_CACHE_ROOT", f"{root} cannot be written, and neither can a spare directory", hint)
        else:
            yield warning("VLLM_CACHE_ROOT", f"{root} cannot be written, so {spare} is used", hint)
        return
    network = places.network_file_system(root)
    if network is not None:
        hint = "set VLLM_CACHE_ROOT to a local disk"
        yield warning("VLLM_CACHE_ROOT", f"{root} is on {network}, so a launch keeps its caches elsewhere", hint)
        return
    yield ok("VLLM_CACHE_ROOT", root)
    if not keeps_access_times(places.nearest(root)):
        said = f"{root} keeps no access times (noatime): the verdict of a start is `unknown` unless its log tells"
        yield note("VLLM_CACHE_ROOT", said)
