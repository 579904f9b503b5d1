"""vLLM 0.32 plugins/__init__.py, without its log."""

import os

import vllm.logger  # noqa: F401 - configured before any plugin is loaded, as in vLLM

plugins_loaded = False


def load_general_plugins() -> None:
    global plugins_loaded  # noqa: PLW0603 - as vLLM has it
    if plugins_loaded:
        return
    plugins_loaded = True
    from importlib.metadata import entry_points

    allowed = os.environ.get("VLLM_PLUGINS")
    for plugin in entry_points(group="vllm.general_plugins"):
        if allowed is None or plugin.name in allowed.split(","):
            plugin.load()()
