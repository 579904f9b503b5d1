"""Settings: the only reader of settings files and of `CACHEMGR_*` variables.

defaults < /etc/cachemgr.toml < $XDG_CONFIG_HOME/cachemgr/config.toml < `--config FILE` < CACHEMGR_* < flags. Never from
the working directory, which may belong to somebody else. /etc can lock values with `locked = ["store", ...]`.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from cachemgr import documents, sizes
from cachemgr.errors import UsageError
from cachemgr.places import working_directory

ETC = Path("/etc/cachemgr.toml")
SEED = Path("/opt/cachemgr/seed")
"""Where an image has its seed, unless a setting says otherwise."""
_LOCKED = "locked"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})

_SSE = ("AES256", "aws:kms", "aws:kms:dsse")

_OF_FLEET = (
    "mirror",
    "mirror_endpoint",
    "mirror_region",
    "mirror_path_style",
    "mirror_sse",
    "mirror_kms_key",
    "mirror_requester_pays",
    "mirror_anonymous",
    "trust",
    "trusted_keys",
    "revoked",
    "max_age",
)

Publish = Literal["never", "local", "mirror"]
Value = str | float | bool | tuple[str, ...]
"""As a settings file has it: seconds are floats, and of whole numbers there are only sizes in bytes."""


@dataclass(frozen=True)
class Settings:
    """Every setting, resolved. Paths are absolute; seconds are floats."""

    home: Path
    store: Path
    seed: tuple[Path, ...]
    trust: tuple[str, ...]
    trusted_keys: tuple[str, ...]
    revoked: tuple[str, ...]
    max_age: float | None
    sign_key: str | None
    publish: Publish
    never_publish: tuple[str, ...]
    read_only: bool
    strict: bool
    ignore_arg: tuple[str, ...]
    report: Path | None
    deadline: float
    wait: float
    single_flight: float
    ready_file: Path | None
    also: tuple[str, ...]
    mirror: str | None
    mirror_endpoint: str | None
    mirror_region: str | None
    mirror_profile: str | None
    mirror_path_style: bool | None
    mirror_sse: str | None
    mirror_kms_key: str | None
    mirror_requester_pays: bool
    mirror_anonymous: bool
    offline: bool
    enable: bool
    bin: Path | None
    budget: int
    """Bytes; 0 is none."""
    require_verified: bool
    database_url: str | None
    """Of the catalogue; it may hold a password, so it is never shown. None is a file in `home`."""
    launch_age: float
    """Seconds after which the catalogue adds launches up by day."""
    auto_prune: bool
    server: str | None
    """URL of the service that is told about launches."""
    server_token: str | None
    """What it knows us by; never shown."""
    origins: Mapping[str, str]
    """Where each value comes from: `default`, a file, a variable or a flag."""

    def value(self, name: str) -> Value | None:
        """The value called `name`, as it is written in a settings file."""
        value = getattr(self, name)
        if isinstance(value, tuple):
            return tuple(map(str, value))
        return str(value) if isinstance(value, Path) else cast("Value | None", value)

    def of_flags(self) -> dict[str, str]:
        """What was given by flags, as variables for a process of ours that gets none."""
        return self._variables(name for name, origin in self.origins.items() if origin == "flag")

    def of_fleet(self) -> dict[str, str]:
        """What other machines need to use the same mirror, as variables; what nobody set here is their own affair."""
        return self._variables(name for name in _OF_FLEET if self.origins[name] != "default")

    def _variables(self, names: Iterable[str]) -> dict[str, str]:
        wanted = frozenset(names)
        given = {setting.variable: self.value(setting.name) for setting in TABLE if setting.name in wanted}
        return {name: _as_variable(value) for name, value in given.items() if value is not None}


_SECRET_HINTS = {
    "sign_key": "cachemgr keygen makes a file",
    "database_url": "CACHEMGR_DATABASE_URL=postgresql://cachemgr@db.example/cachemgr",
    "server_token": "cachemgr token create NAME --role report, on the server",
}


class SecretError(ValueError):
    """A value that must not be told again."""


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings."""

    name: str
    parse: Callable[[Value], Value]
    help: str
    secret: bool = False
    """Whether its value is never shown."""

    @property
    def variable(self) -> str:
        return "CACHEMGR_" + self.name.upper()


def _as_variable(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _text(value: Value) -> Value:
    if not isinstance(value, str) or not value or "\0" in value:
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
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value) and "\0" not in "".join(value):
        return tuple(value)
    raise ValueError("must be a list of texts")


def _sse(value: Value) -> Value:
    if value not in _SSE:
        raise ValueError(f"must be one of {', '.join(f'`{each}`' for each in _SSE)}")
    return value


def _paths(value: Value) -> Value:
    """As PATH is written, because paths may have spaces and commas in them."""
    return tuple(part for part in value.split(":") if part) if isinstance(value, str) else _texts(value)


_POLICIES = frozenset({"require", "warn", "off"})
_LEVELS = frozenset({"local", "seed", "mirror", "image"})


def _trust(value: Value) -> Value:
    words = cast("tuple[str, ...]", _texts(value))
    for word in words:
        where, equals, policy = word.rpartition("=")
        if policy not in _POLICIES or (equals and where not in _LEVELS):
            raise ValueError("must be require, warn or off, or such as local=off,seed=require")
    return words


_AGE = re.compile(r"(\d{1,6})(s|min|h|d|)")
_AGE_SECONDS = {"s": 1, "": 1, "min": 60, "h": 3600, "d": 86400}


def age(value: Value) -> float:
    """Seconds of an age such as `30d` or `12h`; without a unit it is in seconds.

    Raises:
        ValueError: it is written otherwise.
    """
    found = _AGE.fullmatch(str(value))
    if isinstance(value, (bool, tuple)) or found is None:
        raise ValueError("must be an age such as 30d or 12h")
    return float(found[1]) * _AGE_SECONDS[found[2]]


def typed_age(text: str) -> float:
    """Seconds of an age that somebody types where something goes by it: of `30` alone nobody knows the unit.

    Raises:
        ValueError: it is written otherwise.
    """
    if text.isdecimal() and text != "0":
        raise ValueError("needs a unit, as in 30d or 12h")
    return age(text)


def _sign_key(value: Value) -> Value:
    """Never the key itself, which would be shown by `config show`. Its text is not in the error either."""
    if isinstance(value, str) and "PRIVATE KEY" in value:
        raise SecretError("names a key and must not be one: a file, env:NAME or command:WORDS")
    return _text(value)


_SERVER = re.compile(r"https?://[A-Za-z0-9.-]+(:\d{1,5})?/?|https?://\[[0-9a-fA-F:]+\](:\d{1,5})?/?")
_DATABASE = re.compile(r"(postgresql|postgres|sqlite)://\S+")


def _database(value: Value) -> Value:
    """Its text is in no error: it may hold a password."""
    if not isinstance(value, str) or _DATABASE.fullmatch(value) is None:
        raise SecretError("must be a URL: postgresql://USER@HOST/DATABASE or sqlite:////PATH")
    return value


def _server(value: Value) -> Value:
    if not isinstance(value, str) or _SERVER.fullmatch(value) is None:
        raise ValueError("must be a URL without anything after the host: https://HOST:PORT")
    return value


def _token(value: Value) -> Value:
    """Its text is in no error."""
    if not isinstance(value, str) or not value.isascii() or not value.isprintable() or " " in value or not value:
        raise SecretError("must be a token, as `cachemgr token create` prints it")
    return value


def _size(value: Value) -> Value:
    text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    try:
        return sizes.parse(text)
    except ValueError as error:
        raise ValueError(f"{error}, or 0 for none") from None


def _publish(value: Value) -> Value:
    if value not in ("never", "local", "mirror"):
        raise ValueError("must be `never`, `local` or `mirror`")
    return value


TABLE: tuple[Setting, ...] = (
    Setting("home", _text, "state of cachemgr: store, locks, caches of our own"),
    Setting("store", _text, "the local store"),
    Setting("publish", _publish, "where a launch publishes what it compiled: never, local, or local and then mirror"),
    Setting(
        "seed", _paths, "stores that are read only, such as one in an image: directories with a colon between them"
    ),
    Setting("trust", _trust, "what a capture needs before it is used: require, warn or off, or local=…,image=…"),
    Setting("trusted_keys", _texts, "public keys whose signatures count: ed25519:…, or files of them"),
    Setting("revoked", _texts, "ids of keys and digests of captures that count no more, or files of them"),
    Setting("max_age", age, "age after which a signature has to be renewed, such as 90d"),
    Setting("sign_key", _sign_key, "private key of `sign`: a file, env:NAME or command:WORDS"),
    Setting("never_publish", _texts, "models of which nothing is written to a store, such as acme/secret-*"),
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
    Setting("mirror", _text, "the bucket behind the local store: s3://BUCKET/PREFIX"),
    Setting("mirror_endpoint", _text, "server of the mirror, unless it is AWS's own: https://HOST:PORT"),
    Setting("mirror_region", _text, "region of the mirror's bucket"),
    Setting("mirror_profile", _text, "profile of the AWS configuration that has the mirror's credentials"),
    Setting("mirror_path_style", _switch, "whether the bucket is in the path of a URL (true) or in its host (false)"),
    Setting("mirror_sse", _sse, "encryption that the mirror's server is asked for: AES256, aws:kms or aws:kms:dsse"),
    Setting("mirror_kms_key", _text, "key that the mirror's server encrypts with"),
    Setting("mirror_requester_pays", _switch, "agree to pay for requests to a bucket of somebody else"),
    Setting("mirror_anonymous", _switch, "read the mirror without credentials"),
    Setting("offline", _switch, "leave the mirror alone, as if there were none"),
    Setting("enable", _switch, "whether the plugin does anything in an engine that loads it"),
    Setting("bin", _text, "the cachemgr that the plugin starts, where it is in another environment than the engine"),
    Setting("budget", _size, "what store and live caches may take of this host's disks, such as 20GB; 0 is no limit"),
    Setting(
        "auto_prune", _switch, "whether launches remove what was not used for longest when the budget is nearly full"
    ),
    Setting(
        "require_verified", _switch, "use only captures of which a start was seen to add nothing, by prewarm --verify"
    ),
    Setting(
        "database_url",
        _database,
        "database of the catalogue, for a fleet: postgresql://USER@HOST/DATABASE; else a file in `home`",
        secret=True,
    ),
    Setting("launch_age", age, "age after which the catalogue adds launches up by day, such as 180d"),
    Setting("server", _server, "the service of the fleet, which is told about launches: https://HOST:PORT"),
    Setting("server_token", _token, "what the service knows this machine by", secret=True),
    Setting("deadline", _seconds, "seconds that looking up and restoring may delay a start"),
    Setting("wait", _seconds, "seconds to wait for another launch on this host that compiles the same key"),
    Setting(
        "single_flight",
        _seconds,
        "seconds to wait for any machine of the fleet that compiles the same key; 0 is off",
    ),
)
_BY_NAME = {setting.name: setting for setting in TABLE}


def load(
    environ: Mapping[str, str],
    flags: Mapping[str, Value | None],
    *,
    config: Path | None = None,
    etc: Path = ETC,
    seed: Path = SEED,
) -> Settings:
    """Resolve every setting. `flags` holds what was given on the command line; None means not given.

    Raises:
        UsageError: an unknown name, a value of the wrong kind, an unreadable file, or a flag against a locked value.
    """
    user = _config_home(environ) / "cachemgr" / "config.toml"
    system = _file(etc, required=False)
    locked = _texts_of(system.pop(_LOCKED, ()), etc)
    seeds = (str(seed),) if os.path.isfile(seed / "layout.json") else ()
    values: dict[str, Value] = {**_defaults(environ), "seed": seeds}
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
    home = _absolute(str(values["home"]))
    store = values.get("store")
    return Settings(
        home=home,
        store=home / "store" if store is None else _absolute(str(store)),
        seed=tuple(_absolute(path) for path in cast("tuple[str, ...]", values["seed"])),
        trust=cast("tuple[str, ...]", values["trust"]),
        trusted_keys=cast("tuple[str, ...]", values["trusted_keys"]),
        revoked=cast("tuple[str, ...]", values["revoked"]),
        max_age=cast("float | None", values.get("max_age")),
        sign_key=cast("str | None", values.get("sign_key")),
        publish=cast("Publish", values["publish"]),
        never_publish=cast("tuple[str, ...]", values["never_publish"]),
        read_only=bool(values["read_only"]),
        strict=bool(values["strict"]),
        ignore_arg=cast("tuple[str, ...]", values["ignore_arg"]),
        report=_path(values.get("report")),
        deadline=cast("float", values["deadline"]),
        wait=cast("float", values["wait"]),
        single_flight=cast("float", values["single_flight"]),
        ready_file=_path(values.get("ready_file")),
        also=cast("tuple[str, ...]", values["also"]),
        mirror=_optional(values.get("mirror")),
        mirror_endpoint=_optional(values.get("mirror_endpoint")),
        mirror_region=_optional(values.get("mirror_region")),
        mirror_profile=_optional(values.get("mirror_profile")),
        mirror_path_style=cast("bool | None", values.get("mirror_path_style")),
        mirror_sse=_optional(values.get("mirror_sse")),
        mirror_kms_key=_optional(values.get("mirror_kms_key")),
        mirror_requester_pays=bool(values["mirror_requester_pays"]),
        mirror_anonymous=bool(values["mirror_anonymous"]),
        offline=bool(values["offline"]),
        enable=bool(values["enable"]),
        bin=_path(values.get("bin")),
        budget=cast("int", values["budget"]),
        launch_age=cast("float", values["launch_age"]),
        require_verified=bool(values["require_verified"]),
        database_url=_optional(values.get("database_url")),
        server=_optional(values.get("server")),
        server_token=_optional(values.get("server_token")),
        auto_prune=bool(values["auto_prune"]),
        origins={setting.name: origins.get(setting.name, "default") for setting in TABLE},
    )


def _path(value: Value | None) -> Path | None:
    return None if value is None else _absolute(str(value))


def _absolute(text: str) -> Path:
    try:
        return working_directory() / Path(text).expanduser()
    except RuntimeError:
        raise UsageError(
            f"`{text}` begins with the home of a user that nobody knows", hint="cachemgr config show"
        ) from None


def _optional(value: Value | None) -> str | None:
    return None if value is None else str(value)


def _defaults(environ: Mapping[str, str]) -> dict[str, Value]:
    return {
        "home": str(_cache_home(environ) / "cachemgr"),
        "trust": (),
        "trusted_keys": (),
        "revoked": (),
        "publish": "local",
        "never_publish": (),
        "read_only": False,
        "strict": False,
        "ignore_arg": (),
        "also": (),
        "mirror_requester_pays": False,
        "mirror_anonymous": False,
        "offline": False,
        "enable": False,
        "require_verified": False,
        "budget": 20_000_000_000,
        "auto_prune": True,
        "deadline": 30.0,
        "wait": 0.0,
        "single_flight": 0.0,
        "launch_age": 180 * 86400.0,
    }


def _cache_home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or _home(environ) / ".cache")


def _config_home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CONFIG_HOME") or _home(environ) / ".config")


def _home(environ: Mapping[str, str]) -> Path:
    """Of a user id without a name, in an environment without HOME, the root: it cannot be written, so that another
    place is found. Never below the working directory."""
    try:
        return Path(environ.get("HOME") or "~").expanduser()
    except RuntimeError:
        return Path("/")


def _variables(environ: Mapping[str, str]) -> dict[str, Value]:
    return {setting.name: environ[setting.variable] for setting in TABLE if environ.get(setting.variable)}


def _file(path: Path, *, required: bool) -> dict[str, Value]:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise UsageError(f"no settings file {path}", hint="name one that is there, or leave --config out") from None
        return {}
    except OSError as error:
        if required or os.path.isdir(path.parent):
            raise _unreadable(path, error) from None
        return {}  # a HOME of somebody else, as images have it that are run under another user id, or one that is gone
    except UnicodeDecodeError as error:
        raise _unreadable(path, error) from None
    return _toml(text, path)


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> UsageError:
    why = "it is no UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
    return UsageError(f"settings file {path} cannot be read: {why}", hint="it must be TOML that this user may read")


def _toml(text: str, path: Path) -> dict[str, Value]:
    try:
        return cast("dict[str, Value]", documents.toml(text))
    except ValueError as error:
        raise UsageError(
            f"settings file {path} is no TOML: {error}", hint='one setting a line: budget = "20GB"'
        ) from None


def _texts_of(value: Value, where: Path) -> tuple[str, ...]:
    try:
        names = cast("tuple[str, ...]", _texts(value))
    except ValueError as error:
        raise UsageError(f"`{_LOCKED}` in {where} {error}", hint=f'{_LOCKED} = ["trust"]') from None
    for name in names:
        _setting(name, str(where))
    return names


def _parsed(name: str, value: Value, where: str) -> Value:
    try:
        return _setting(name, where).parse(value)
    except SecretError as error:
        raise UsageError(f"`{name}` from {where} {error}", hint=_SECRET_HINTS[name]) from None
    except ValueError as error:
        raise UsageError(f"`{name}` from {where} {error}, not `{value}`", hint="cachemgr config show") from None


def _setting(name: str, where: str) -> Setting:
    setting = _BY_NAME.get(name)
    if setting is None:
        raise UsageError(f"{where} sets `{name}`, which is no setting", hint="cachemgr config show lists all")
    return setting
