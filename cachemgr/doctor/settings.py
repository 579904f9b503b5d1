"""Checks of the settings: whether they can be read, who may change them, and names that nobody knows."""

import os
from collections.abc import Iterator

from cachemgr.desk import DESK_VARIABLE, HEARS_VARIABLE
from cachemgr.doctor.finding import Finding, Opened, Patient, error, ok, warning
from cachemgr.order import KEY_VARIABLE, LAUNCH_VARIABLE, PINNED_VARIABLE
from cachemgr.settings import TABLE

_PREFIX = "CACHEMGR_"
_NO_SETTINGS = frozenset({LAUNCH_VARIABLE, KEY_VARIABLE, PINNED_VARIABLE, DESK_VARIABLE, HEARS_VARIABLE})
"""What a launch tells the processes in it."""


def sources(patient: Patient) -> Iterator[Finding]:
    """Every source can be read and makes sense."""
    opened = patient.opened
    if not isinstance(opened, Opened):
        said = f"{opened}; checks that need settings are left out"
        yield error("settings", said, opened.hint or "cachemgr config show")
        return
    origins = {name: origin for name, origin in opened.settings.origins.items() if origin != "default"}
    told = ", ".join(f"{name} from {origin}" for name, origin in origins.items())
    yield ok("settings", told or "all at their defaults")
    for path in sorted({origin.removesuffix(" (locked)") for origin in origins.values() if "/" in origin}):
        yield from _writers(path)


def _writers(path: str) -> Iterator[Finding]:
    """Who can write settings decides which program the plugin starts."""
    status = os.stat(path)
    if status.st_mode & 0o022 or status.st_uid not in {0, os.geteuid()}:
        yield warning("settings", f"{path} can be changed by other users", f"chown root {path}; chmod go-w {path}")


def names(patient: Patient) -> Iterator[Finding]:
    """Variables with our prefix that no setting has: most likely misspelt."""
    known = {setting.variable for setting in TABLE} | _NO_SETTINGS
    for name in sorted(patient.environ):
        if name.startswith(_PREFIX) and name not in known and not name.startswith(f"{_PREFIX}TEST_"):
            yield warning(name, "is no setting, so it does nothing", "cachemgr config show")
