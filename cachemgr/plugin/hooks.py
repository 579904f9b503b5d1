"""Where the shim looks into vLLM, as data: each hook with the versions that have it and its source.

A hook wraps one function. Arguments, results and exceptions pass through untouched; what the shim does beside them
never raises. Modules are patched when the engine itself has imported them, none is imported for it. Where a version
lacks a function, nothing happens there, and the launch is told: look-up by key and the growth of directories remain.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from cachemgr.plugin import front, node
from cachemgr.plugin.wire import WIRE, hear_the_end, listen

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _nothing(_arguments: Arguments) -> None:
    """Before or after a call where there is nothing to do."""


def _nothing_after(_arguments: Arguments, _result: object) -> None:
    """As `_nothing`."""


@dataclass(frozen=True)
class Hook:
    """One function of vLLM and what happens beside it."""

    name: str
    """What a report calls it."""
    module: str
    function: str
    """`name` or `Class.name` in that module."""
    versions: str
    """Releases whose sources have it."""
    before: Callable[[Arguments], None] = _nothing
    after: Callable[[Arguments, object], None] = _nothing_after
    unless: str = ""
    """A function of the same module that makes this hook needless."""


def _value(arguments: Arguments, place: int, name: str) -> object:
    """An argument, however it was passed."""
    positional, named = arguments
    return named[name] if name in named else positional[place] if len(positional) > place else None


def _configured(arguments: Arguments) -> None:
    front.configure(_value(arguments, 0, "self"))


def _is_configured(arguments: Arguments, result: object) -> None:
    listen()
    node.leave(result, _value(arguments, 0, "self"))


def _looks_up(arguments: Arguments) -> None:
    """`_try_load_aot_compiled_fn(model, aot_compilation_path)`, in each worker."""
    _fetch(str(_value(arguments, 1, "aot_compilation_path")))


def _looked_up(arguments: Arguments, result: object) -> None:
    path = str(_value(arguments, 1, "aot_compilation_path"))
    WIRE.tell(entry=path, loaded=result is not None)


def _opens_index(arguments: Arguments) -> None:
    """`CompilerManager.initialize_cache(self, cache_dir, disable_cache, prefix)`: a ten-hex directory, or none when an
    AOT artifact was loaded (`caching.py` makes a manager for `dummy_cache`)."""
    directory, disabled = str(_value(arguments, 1, "cache_dir")), _value(arguments, 2, "disable_cache")
    if not disabled and "/torch_compile_cache/" in directory:
        _fetch(directory)


def _fetch(path: str) -> None:
    """Have the entry of this path put there if the launch has it and nobody else did."""
    WIRE.ask(front.patience() + front.waiting(), fetch=path)


def _has_a_worker(arguments: Arguments) -> None:
    """`WorkerWrapperBase.init_device(self)`: after `init_worker`, where plugins are loaded, and before any kernel."""
    node.arrive(_value(arguments, 0, "self"))


def _is_warm(_arguments: Arguments, _result: object) -> None:
    node.warm()


def _is_ready(arguments: Arguments, _result: object) -> None:
    """The executor in an engine core: all its workers have compiled, warmed up and captured their graphs."""
    WIRE.tell(ready=_engines(_value(arguments, 0, "self")), counters=_counters())


def _engines(executor: object) -> int:
    """How many engine cores this node runs."""
    config = getattr(getattr(executor, "vllm_config", None), "parallel_config", None)
    count = getattr(config, "data_parallel_size_local", 1)
    return count if isinstance(count, int) and count > 0 else 1


def _counters() -> dict[str, int]:
    """Of this process: workers in processes of their own have theirs (0.26-0.33 compilation/counter.py)."""
    module = sys.modules.get("vllm.compilation.counter")
    counter = getattr(module, "compilation_counter", None)
    return {name: value for name, value in getattr(counter, "__dict__", {}).items() if isinstance(value, int)}


HOOKS: tuple[Hook, ...] = (
    Hook(
        "configuration",
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        "0.26-0.33",
        before=_configured,
        after=_is_configured,
    ),
    Hook(
        "look-up of AOT entries",
        "vllm.compilation.decorators",
        "_try_load_aot_compiled_fn",
        "0.26-0.33",
        before=_looks_up,
        after=_looked_up,
    ),
    Hook(
        "look-up of ten-hex entries",
        "vllm.compilation.backends",
        "CompilerManager.initialize_cache",
        "0.26-0.33",
        before=_opens_index,
    ),
    Hook(
        "workers",
        "vllm.v1.worker.worker_base",
        "WorkerWrapperBase.init_device",
        "0.26-0.33",
        before=_has_a_worker,
    ),
    Hook(
        "warm workers",
        "vllm.v1.worker.gpu_worker",
        "Worker.compile_or_warm_up_model",
        "0.26-0.33",
        after=_is_warm,
    ),
    Hook(
        "ready sign",
        "vllm.v1.executor.abstract",
        "Executor.compile_or_warm_up_model",
        "0.28-0.33",
        after=_is_ready,
    ),
    Hook(  # 0.26 compiles and warms up in here; later releases do it in a step of its own
        "ready sign",
        "vllm.v1.executor.abstract",
        "Executor.initialize_from_config",
        "0.26",
        after=_is_ready,
        unless="Executor.compile_or_warm_up_model",
    ),
)


def install() -> None:
    """Patch what is imported already, and the rest when it is."""
    waiting: dict[str, list[Hook]] = {}
    for hook in HOOKS:
        waiting.setdefault(hook.module, []).append(hook)
    for name in list(waiting):
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            _patch(module, waiting.pop(name))
    if waiting:
        sys.meta_path.insert(0, _Finder(waiting))
    listen()
    hear_the_end()


def _patch(module: ModuleType, hooks: Sequence[Hook]) -> None:
    for hook in hooks:
        if hook.unless and _owner_of(module, hook.unless) is not None:
            continue
        owner, name = _owner_of(module, hook.function), hook.function.rpartition(".")[2]
        if owner is None:
            if not any(other.name == hook.name and _owner_of(module, other.function) for other in hooks):
                WIRE.tell(lacks=hook.name)
        else:
            setattr(owner, name, _wrapped(getattr(owner, name), hook))


def _owner_of(module: ModuleType, function: str) -> object | None:
    """What `function` is an attribute of, or None where there is no such function."""
    owner: object = module
    *classes, name = function.split(".")
    for each in classes:
        owner = getattr(owner, each, None)
    return owner if callable(getattr(owner, name, None)) else None


def _wrapped(original: Callable[..., object], hook: Hook) -> Callable[..., object]:
    @functools.wraps(original)
    def wrapper(*args: object, **kwargs: object) -> object:
        try:
            hook.before((args, kwargs))
        except Exception:  # noqa: BLE001 - the engine must not notice
            WIRE.tell(failed=f"before {hook.function}")
        result = original(*args, **kwargs)
        try:
            hook.after((args, kwargs), result)
        except Exception:  # noqa: BLE001 - as above
            WIRE.tell(failed=f"after {hook.function}")
        return result

    return wrapper


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the import of modules that are to be patched; finds none itself."""

    def __init__(self, waiting: dict[str, list[Hook]]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hooks = self._waiting.pop(fullname, None)
        if hooks is None:
            return None
        spec = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (spec := find(fullname, path, target)) is not None:
                break
        if spec is not None and spec.loader is not None:
            with suppress(AttributeError):  # a loader with slots: then without this hook
                _patch_after(spec.loader, hooks)
        return spec


def _patch_after(loader: Any, hooks: Sequence[Hook]) -> None:
    """Have `loader` patch the module when it has run it. A loader is made for one module."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            _patch(module, hooks)
        except Exception:  # noqa: BLE001 - the engine must not notice
            WIRE.tell(failed=f"patching {module.__name__}")

    loader.exec_module = exec_module
