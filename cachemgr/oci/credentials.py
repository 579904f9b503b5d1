"""What docker, podman and skopeo know of a registry: user names and passwords in their files, or of their helpers.

Nothing is kept or logged here. A helper is a program `docker-credential-<name>`, which is asked as docker asks it
(docker/docker-credential-helpers, "Credential helpers").
"""

import base64
import binascii
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from cachemgr.errors import StoreError

_LIMIT = 1 << 20
_HELPER_SECONDS = 30.0
_HUB = "https://index.docker.io/v1/"
"""The name under which docker keeps what is for docker.io."""


class Login(msgspec.Struct, frozen=True):
    """A user and a password."""

    user: str
    password: str

    def basic(self) -> str:
        """The value of an `Authorization` header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


class _Entry(msgspec.Struct):
    auth: str = ""
    username: str = ""
    password: str = ""


class _File(msgspec.Struct, rename="camel"):
    auths: dict[str, _Entry] = {}
    cred_helpers: dict[str, str] = {}
    creds_store: str = ""


class _Told(msgspec.Struct):
    username: str = msgspec.field(name="Username")
    secret: str = msgspec.field(name="Secret")


def login(registry: str, environ: Mapping[str, str]) -> Login | None:
    """What is kept for a registry, in the first file that has something; None for an anonymous caller.

    Raises:
        StoreError: a file or helper that is there cannot be used.
    """
    names = [registry, f"https://{registry}", *([_HUB] if registry in {"docker.io", "registry-1.docker.io"} else [])]
    for path in _files(environ):
        file = _read(path)
        if file is not None:
            for name in names:
                found = _in_file(file, name, path, environ)
                if found is not None:
                    return found
    return None


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    """Where they are looked for (containers-auth.json(5); docker's `config.json`)."""
    if environ.get("REGISTRY_AUTH_FILE"):
        yield Path(environ["REGISTRY_AUTH_FILE"])
    if environ.get("DOCKER_CONFIG"):
        yield Path(environ["DOCKER_CONFIG"]) / "config.json"
    if environ.get("XDG_RUNTIME_DIR"):
        yield Path(environ["XDG_RUNTIME_DIR"]) / "containers" / "auth.json"
    if environ.get("HOME"):
        yield Path(environ["HOME"]) / ".config" / "containers" / "auth.json"
        yield Path(environ["HOME"]) / ".docker" / "config.json"


def _read(path: Path) -> _File | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_LIMIT), type=_File)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"the logins in {path} cannot be read: {error}", hint="docker login makes it anew") from None


def _in_file(file: _File, name: str, path: Path, environ: Mapping[str, str]) -> Login | None:
    """A helper counts before what stands in the file, which may be what it gave long ago."""
    helper = file.cred_helpers.get(name) or file.creds_store
    found = _asked(helper, name, environ) if helper else None
    entry = file.auths.get(name)
    if found is None and entry is not None and (entry.auth or entry.username):
        return _decoded(entry, path)
    return found


def _decoded(entry: _Entry, path: Path) -> Login:
    if not entry.auth:
        return Login(entry.username, entry.password)
    try:
        user, _colon, password = base64.b64decode(entry.auth, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        raise StoreError(f"a login in {path} cannot be read", hint="docker login makes it anew") from None
    return Login(user, password.rstrip("\0"))


def _asked(helper: str, name: str, environ: Mapping[str, str]) -> Login | None:
    """What a helper says; None where it has nothing for this registry, which it says by its exit code."""
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run(
            [program, "get"],
            input=name.encode(),
            capture_output=True,
            check=False,
            timeout=_HELPER_SECONDS,
            env=environ,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise StoreError(f"{program}, which has the login for {name}, cannot be asked: {error}") from None
    if done.returncode:
        return None
    try:
        told = msgspec.json.decode(done.stdout[:_LIMIT], type=_Told)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise StoreError(f"{program} says nothing that can be read for {name}") from None
    return Login(told.username, told.secret)
