"""The vLLM plugin: a plain `vllm serve` or `LLM(...)` starts warm, with only this shim in the engine's processes.

vLLM calls `register` once in each of its processes: the front one (API server, or the user's program), the engine core,
every worker, and a child that inspects model classes. What happens then:

* The *front* process starts one `cachemgr attend` child (`front`). For `vllm serve` and its relatives that is at once,
  since their key is known from the command line: the child looks up and restores while vLLM is still importing. For a
  program it is when the program makes its engine (`EngineArgs.create_engine_config`), because only then anybody knows
  what it makes. There the front process waits for the answer, never longer than the deadline, and puts the pins into
  `os.environ`, from where the engine core and the workers inherit them. The child stays, and does what `cachemgr run`
  does beside its command: it watches, publishes, records and says two lines on stderr.
* *Every* process gets hooks (`hooks`): the engine asks for the entry that it is about to look up, says which entries it
  loaded, and says when it is ready; records of the `vllm` logger are forwarded (`wire`). All of it goes to the launch
  that is in charge, which CACHEMGR_DESK names: the child, or a `cachemgr run` around the engine.

The shim is standard library only, and imports nothing else of cachemgr, whose dependencies may be missing here: with
CACHEMGR_BIN the child lives in an environment of its own. It raises nothing, prints nothing to stdout, never blocks on
the child without a bound, and does nothing at all unless somebody switched it on (`switch`), under `vllm bench
startup`, which measures cold starts, and in the children that inspect model classes.
"""

__all__ = ["register"]

_registered = False


def register() -> None:
    """What the entry point `cachemgr` of `vllm.general_plugins` names. Never raises."""
    global _registered  # noqa: PLW0603 - vLLM promises once per process and means it, except where it does not
    if _registered:
        return
    _registered = True
    try:
        from cachemgr.plugin import switch

        if switch.stays_out():
            return
        from cachemgr.plugin import front, hooks

        if front.arrive():
            hooks.install()
    except Exception as error:  # noqa: BLE001 - an exception here kills the engine (vLLM 0.26-0.33 plugins/__init__.py)
        _say(error)


def _say(error: Exception) -> None:
    """One line, if even that works."""
    import contextlib
    import sys

    with contextlib.suppress(Exception):
        sys.stderr.write(f"cachemgr: the plugin stays off: {type(error).__name__}: {error}\n")
