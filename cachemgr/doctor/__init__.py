"""The doctor: looks at a machine, its settings and, if asked, a command line, and says what stands in the way.

Every check is a function from a patient to findings, and stands in a list. It only looks: what it writes (a probe for
access times) is gone when it returns. A check that fails or hangs is a finding itself, and no other check waits for it.
"""

from collections.abc import Callable, Iterable

from cachemgr.bounded import within
from cachemgr.doctor import (
    catalogue,
    command,
    domains,
    launches,
    machine,
    mirror,
    places,
    plugin,
    settings,
    store,
    trust,
    use,
    variables,
)
from cachemgr.doctor.finding import Finding, Opened, Patient, error
from cachemgr.errors import CacheError

SECONDS = 15.0
"""How long one check may take; a question to another program has 10 s."""

_MORE = "cachemgr config show, for what decides it"
_BUG = "report this, with what `cachemgr doctor --json` says"

Check = Callable[[Patient], Iterable[Finding]]
CacheCheck = Callable[[Patient, Opened], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    settings.sources,
    settings.names,
    places.user,
    places.home_directory,
    places.temporary,
    places.root_file_system,
    places.live_root,
    variables.plugins_list,
    variables.service_links,
    variables.key_changers,
    machine.versions,
)
"""Checks of the machine and of the environment."""

CACHE_CHECKS: tuple[CacheCheck, ...] = (
    store.home,
    store.local_store,
    store.rest,
    store.avoided,
    store.budget,
    mirror.mirror,
    trust.words,
    trust.levels,
    trust.keys,
    trust.machine,
    plugin.enabled,
    plugin.elsewhere,
    plugin.executable,
    plugin.shim,
    domains.domains,
    domains.memory,
    domains.conflicts,
    use.holders,
    use.leased,
    use.locks,
    use.stale_locks,
    use.debris,
    use.pinned,
    launches.desk,
    launches.recent,
    launches.waiting,
    catalogue.catalogue,
    command.engine,
)
"""Checks that need settings; left out where these cannot be read."""


def examine(patient: Patient) -> list[Finding]:
    """All findings, in the order of the checks."""
    found = [finding for check in CHECKS for finding in _asked(check.__name__, lambda check=check: check(patient))]  # type: ignore[misc]
    opened = patient.opened
    if isinstance(opened, Opened):
        for cache_check in CACHE_CHECKS:
            found += _asked(cache_check.__name__, lambda check=cache_check: check(patient, opened))  # type: ignore[misc]
    return found


def _asked(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of one check, those before it failed too."""
    what, found = name.replace("_", " "), list[Finding]()
    try:
        within(SECONDS, f"the check of {what}", lambda: found.extend(check()))
    except CacheError as failure:
        return [*found, error(what, str(failure), failure.hint or _MORE)]
    except OSError as failure:
        said = f"{failure.filename or what} cannot be looked at: {failure.strerror or failure}"
        return [*found, error(what, said, "make it readable for this user, or name another by its setting or variable")]
    except Exception as failure:  # noqa: BLE001 - a bug in one check must not cost the others
        return [*found, error(what, f"this check failed: {type(failure).__name__}: {failure}", _BUG)]
    return found
