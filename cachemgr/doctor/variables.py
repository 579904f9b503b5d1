"""Checks of variables that vLLM or torch read: those that drop our plugin, change the key, or break the engine."""

from collections.abc import Iterator

from cachemgr import lint
from cachemgr.doctor.finding import Finding, Opened, Patient, error, note, ok, warning
from cachemgr.factors.environment import is_service_link

PLUGIN = "cachemgr"
"""The name of our entry point in the group `vllm.general_plugins`."""


def plugins_list(patient: Patient) -> Iterator[Finding]:
    """`VLLM_PLUGINS` is an allow-list, and part of vLLM's own hash (0.26-0.33 `plugins/__init__.py`, `envs.py`)."""
    if "VLLM_PLUGINS" not in patient.environ:
        yield ok("VLLM_PLUGINS", "is not set, so all plugins are loaded")
        return
    text = patient.environ["VLLM_PLUGINS"]
    if PLUGIN not in text.split(","):  # as vLLM reads it: a space belongs to a name
        names = [name.strip() for name in text.split(",") if name.strip() not in {"", PLUGIN}]
        wanted = ",".join([*names, PLUGIN])
        hint = f"unset VLLM_PLUGINS, or VLLM_PLUGINS={wanted}, equal on all machines"
        wants = isinstance(patient.opened, Opened) and patient.opened.settings.enable
        said = f"is `{text}`, so vLLM does not load the plugin of cachemgr"
        yield error("VLLM_PLUGINS", said, hint) if wants else note("VLLM_PLUGINS", said, hint)
    else:
        said = f"is `{text}`, which is part of vLLM's own hash: it must be equal on all machines"
        yield note("VLLM_PLUGINS", said, "unset VLLM_PLUGINS to load all plugins")


def service_links(patient: Patient) -> Iterator[Finding]:
    """What the kubelet sets for services of the namespace (0.26-0.33 `envs.py`, get_vllm_port raises for a URI)."""
    for hazard in lint.links(patient.environ):
        yield error(hazard.about, hazard.what, hazard.fix)
    links = [
        name
        for name, value in patient.environ.items()
        if name.startswith("VLLM_") and name != lint.PORT and is_service_link(name, value)
    ]
    if links:
        said = f"{len(links)} variables such as {min(links)} are set for services; they do not count"
        yield note("service links", said, "set enableServiceLinks: false in the pod to be rid of them")


def key_changers(patient: Patient) -> Iterator[Finding]:
    """Variables that make two machines differ without need."""
    for name, reason in lint.CHANGERS.items():
        if patient.environ.get(name):
            yield note(name, f"is set: {reason}", lint.EVERYWHERE)
    if patient.environ.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG":
        hint = "unset VLLM_LOGGING_LEVEL"
        yield note("VLLM_LOGGING_LEVEL", "is DEBUG, which changes vLLM's own hash with older torch", hint)
    for hazard in lint.disabled(patient.environ):
        yield warning(hazard.about, hazard.what, hazard.fix)
