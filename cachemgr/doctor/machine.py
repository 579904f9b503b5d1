"""Checks of the machine itself: what is installed, and the device that it would compile for."""

from collections.abc import Iterator

from cachemgr import __version__
from cachemgr.doctor.finding import Finding, Patient, note, ok
from cachemgr.factors import describe_here


def versions(patient: Patient) -> Iterator[Finding]:
    """What is installed where PATH leads, and the device that it would compile for."""
    yield ok("cachemgr", __version__)
    seen = set[str]()
    for profile in describe_here(patient.environ, patient.cwd):
        values = {factor.name: factor.value for factor in profile.factors}
        if not values.get("torch") or (profile.engine == "vllm" and profile.engine_version is None):
            continue
        said = f"{profile.engine} {profile.engine_version or 'of an unknown version'}"
        if profile.engine != "torch":
            said += f" with torch {values.get('torch') or 'unknown'}"
        said += f", Python {values.get('python') or 'unknown'}, on {profile.device}"
        if said not in seen:
            seen.add(said)
            yield ok("versions", said)
    if not seen:
        yield note("versions", "PATH leads to no Python that has torch", "put the engine's Python on PATH")
