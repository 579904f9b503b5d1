"""Settings: the only reader of settings files and of `CACHEMGR_*` variables.

defaults < /etc/cachemgr.toml < $XDG_CONFIG_HOME/cachemgr/config.toml < `--config FILE` < CACHEMGR_* < flags. Never from
the working directory, which may belong to somebody else. /etc can lock values with `locked = ["store", ...]`.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from cachemgr.errors import UsageError

ETC = Path("/etc/cachemgr.toml")
_LOCKED = "locked"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})

Publish = Literal["never", "local"]
Value = str | float | bool | tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """Every setting, resolved. Paths are absolute; seconds are floats."""

    home: Path
    store: Path
    publish: Publish
    read_only: bool
    strict: bool
    ignore_arg: tuple[str, ...]
    report: Path | None
    deadline: float
    wait: float
    ready_file: Path | None
    also: tuple[str, ...]
    origins: Mapping[str, str]
    """Where each value comes from: `default`, a file, a variable or a flag."""

    def value(self, name: str) -> Value | None:
        """The value called `name`, as it is written in a settings file."""
        value = getattr(self, name)
        return str(value) if isinstance(value, Path) else cast("Value | None", value)


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings."""

    name: str
    parse: Callable[[Value], Value]
    help: str

    @property
    def variable(self) -> str:
        return "CACHEMGR_" + self.name.upper()


def _text(value: Value) -> Value:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text")
    return value


def _switch(value: Value) -> Value:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise ValueError("must be true or false")


def _seconds(value: Value) -> Value:
    try:
        seconds = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else -1.0
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise ValueError("must be a number of seconds, 0 or more")
    return seconds


def _texts(value: Value) -> Value:
    if isinstance(value, str):
        return tuple(part for part in value.replace(",", " ").split() if part)
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise ValueError("must be a list of texts")


def _publish(value: Value) -> Value:
    if value not in ("never", "local"):
        raise ValueError("must be `never` or `local`")
    return value


TABLE: tuple[Setting, ...] = (
    Setting("home", _text, "state of cachemgr: store, locks, caches of our own"),
    Setting("store", _text, "the local store"),
    Setting("publish", _publish, "where a launch publishes what it compiled: never or local"),
    Setting("read_only", _switch, "restore only: write nothing to the store, no capture and no launch record"),
    Setting("strict", _switch, "stop with exit code 125 when the cache itself fails, instead of going on without it"),
    Setting("ignore_arg", _texts, "arguments of a program that do not shape what it compiles, such as --port"),
    Setting("report", _text, "file that `run` writes its report to, as JSON"),
    Setting(
        "ready_file",
        _text,
        "file that appears when a long-running command is ready",
    ),
    Setting("also", _texts, "caches that are right on the same hardware only, and kept on request: startup_plan"),
    Setting("deadline", _seconds, "seconds that looking up and restoring may delay a start"),
    Setting("wait", _seconds, "seconds to wait for another launch on this host that compiles the same key"),
)
_BY_NAME = {setting.name: setting for setting in TABLE}


def load(
    environ: Mapping[str, str],
    flags: Mapping[str, Value | None],
    *,
    config: Path | None = None,
    etc: Path = ETC,
) -> Settings:
    """Resolve every setting. `flags` holds what was given on the command line; None means not given.

    Raises:
        UsageError: an unknown name, a value of the wrong kind, an unreadable file, or a flag against a locked value.
    """
    user = _config_home(environ) / "cachemgr" / "config.toml"
    system = _file(etc, required=False)
    locked = _texts_of(system.pop(_LOCKED, ()), etc)
    values: dict[str, Value] = dict(_defaults(environ))
    origins = dict.fromkeys(values, "default")
    named = {} if config is None else _file(config, required=True)
    for origin, given in (
        (str(etc), system),
        (str(user), _file(user, required=False)),
        (str(config), named),
        ("", _variables(environ)),
        ("flag", {name: value for name, value in flags.items() if value is not None}),
    ):
        for name, value in given.items():
            if name in locked and given is not system:
                if origin == "flag":
                    raise UsageError(f"`{name}` is locked by {etc}", hint="cachemgr config show")
                continue
            where = origin or _setting(name, "environment").variable
            values[name] = _parsed(name, value, where)
            origins[name] = f"{where} (locked)" if name in locked else where
    return _settled(values, origins)


def _settled(values: Mapping[str, Value], origins: Mapping[str, str]) -> Settings:
    home = Path(str(values["home"])).expanduser().absolute()
    store = values.get("store")
    return Settings(
        home=home,
        store=home / "store" if store is None else Path(str(store)).expanduser().absolute(),
        publish=cast("Publish", values["publish"]),
        read_only=bool(values["read_only"]),
        strict=bool(values["strict"]),
        ignore_arg=cast("tuple[str, ...]", values["ignore_arg"]),
        report=_path(values.get("report")),
        deadline=cast("float", values["deadline"]),
        wait=cast("float", values["wait"]),
        ready_file=_path(values.get("ready_file")),
        also=cast("tuple[str, ...]", values["also"]),
        origins={setting.name: origins.get(setting.name, "default") for setting in TABLE},
    )


def _path(value: Value | None) -> Path | None:
    return None if value is None else Path(str(value)).expanduser().absolute()


def _defaults(environ: Mapping[str, str]) -> dict[str, Value]:
    return {
        "home": str(_cache_home(environ) / "cachemgr"),
        "publish": "local",
        "read_only": False,
        "strict": False,
        "ignore_arg": (),
        "also": (),
        "deadline": 30.0,
        "wait": 0.0,
    }


def _cache_home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".cache")


def _config_home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".config")


def _variables(environ: Mapping[str, str]) -> dict[str, Value]:
    return {setting.name: environ[setting.variable] for setting in TABLE if environ.get(setting.variable)}


def _file(path: Path, *, required: bool) -> dict[str, Value]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if required:
            raise UsageError(f"no settings file {path}") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"settings file {path} cannot be read: {error}") from None
    return _toml(text, path)


def _toml(text: str, path: Path) -> dict[str, Value]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return cast("dict[str, Value]", tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"settings file {path} is no TOML: {error}") from None


def _texts_of(value: Value, where: Path) -> tuple[str, ...]:
    try:
        names = cast("tuple[str, ...]", _texts(value))
    except ValueError as error:
        raise UsageError(f"`{_LOCKED}` in {where} {error}") from None
    for name in names:
        _setting(name, str(where))
    return names


def _parsed(name: str, value: Value, where: str) -> Value:
    try:
        return _setting(name, where).parse(value)
    except ValueError as error:
        raise UsageError(f"`{name}` from {where} {error}, not `{value}`", hint="cachemgr config show") from None


def _setting(name: str, where: str) -> Setting:
    setting = _BY_NAME.get(name)
    if setting is None:
        raise UsageError(f"{where} sets `{name}`, which is no setting", hint="cachemgr config show lists all")
    return setting
