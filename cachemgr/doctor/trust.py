"""Checks of trust: whose captures are used here, and whether the keys that decide it do so tomorrow as well."""

from collections.abc import Iterator

from cachemgr.clock import written
from cachemgr.doctor.finding import Finding, Opened, Patient, error, note, ok, warning
from cachemgr.store import layout

_SOON_SECONDS = 14 * 86400.0


def words(_patient: Patient, opened: Opened) -> Iterator[Finding]:
    """What the settings name can be read."""
    for fault in opened.cache.trust.faults:
        yield error("trust", fault, "cachemgr config show")


def levels(_patient: Patient, opened: Opened) -> Iterator[Finding]:
    """Every level that is asked for is read, and by a policy that stops strangers."""
    for level in opened.cache.levels:
        if level.where == "seed" and layout.read_layout(level.store) is None:
            yield error("trust", f"there is no store in {level}", "correct the setting `seed`")
        elif level.closed is not None:
            yield error("trust", f"{level} is not read: no trusted key", "set CACHEMGR_TRUSTED_KEYS")
        elif level.where != "local" and level.policy != "require":
            said = f"{level} is read with trust={level.policy}: whoever can write it runs code here"
            yield warning("trust", said, f"sign it, and set CACHEMGR_TRUST={level.where}=require")
        else:
            yield ok("trust", f"{level}: {level.policy}")
    if opened.cache.exposed:
        yield warning("trust", opened.cache.exposed, "cachemgr sign KEY, or chmod go-w the store")


def keys(patient: Patient, opened: Opened) -> Iterator[Finding]:
    """Trusted keys, and those that end soon."""
    trust = opened.cache.trust
    for name, key in sorted(trust.keys.items()):
        if name in trust.revoked:
            yield note("trust", f"key {name} is revoked", "take it out of trusted_keys")
        elif key.expires is not None and key.expires <= patient.now:
            yield warning("trust", f"key {name} has expired", "sign with another key, and trust that")
        elif key.expires is not None and key.expires <= patient.now + _SOON_SECONDS:
            yield warning("trust", f"key {name} expires on {written(key.expires)}", "sign with another key in time")
        else:
            yield ok("trust", f"key {name} is trusted")


def machine(_patient: Patient, opened: Opened) -> Iterator[Finding]:
    """The key with which this machine knows what it made is its own."""
    spoilt = None if opened.cache.trust.machine is None else opened.cache.trust.machine.spoilt
    if spoilt is not None:
        said = f"{spoilt} may be known to others, so what was made here does not count as such"
        yield warning("trust", said, f"rm {spoilt}; the next capture makes a new one")
