"""The service for tests: replicas in this process over real stores and databases, and what nodes send them."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.testclient import TestClient

from cachemgr.cache import open_cache
from cachemgr.capture import Launch, encode_launch
from cachemgr.catalogue import tokens
from cachemgr.catalogue.tokens import Role, Token
from cachemgr.cli.session import WallClock
from cachemgr.key import Factor
from cachemgr.server.access import Access
from cachemgr.server.app import application
from cachemgr.server.backend import Backend
from cachemgr.server.limits import Bounds
from cachemgr.server.serving import backend_of
from cachemgr.server.upkeep import Upkeep
from cachemgr.settings import load
from cachemgr.store.local import LocalStore
from tests.test_capture import launch_named

SECRETS: dict[Role, str] = {
    "read": tokens.secret_of(b"r" * 32),
    "report": tokens.secret_of(b"p" * 32),
    "admin": tokens.secret_of(b"a" * 32),
}


@dataclass
class Replica:
    """One replica; `lines` are what it says on stderr."""

    backend: Backend
    client: TestClient
    upkeep: Upkeep
    lines: list[str] = field(default_factory=list)

    def ask(self, method: str, path: str, *, role: Role | None = "admin", code: int = 200, **more: Any) -> Any:
        """The JSON that is answered, with this status."""
        headers = {} if role is None else {"Authorization": f"Bearer {SECRETS[role]}"}
        answer = self.client.request(method, path, headers=headers, **more)
        assert answer.status_code == code, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json()

    def get(self, path: str, **more: Any) -> Any:
        """What an admin gets."""
        return self.ask("GET", path, **more)


def replica(
    home: Path,
    settings: Mapping[str, str],
    *,
    open_to_loopback: bool = False,
    bounds: Bounds | None = None,
    read_only: bool = False,
) -> Replica:
    """A replica that has read its store once."""
    environ = {"CACHEMGR_HOME": str(home), "CACHEMGR_TRUST": "off", **settings}
    environ.setdefault("CACHEMGR_LAUNCH_AGE", "36500d")  # launches of the tests are of one day, whenever they run
    loaded = load(environ, {"read_only": read_only})
    lines: list[str] = []
    cache, host = open_cache(loaded, environ), os.uname().nodename
    backend = backend_of(loaded, cache, environ=environ, clock=WallClock(), host=host, replica=home.name)
    upkeep = Upkeep(backend, interval=60.0, say=lines.append)
    access = Access(backend.catalogue, backend.clock, open_to_loopback=open_to_loopback)
    app = application(backend, access, upkeep=None, say=lines.append, bounds=bounds or Bounds())
    upkeep.once()
    client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    return Replica(backend, client, upkeep, lines)


def let_in(backend: Backend) -> None:
    """Keep a token of each role."""
    for role, secret in SECRETS.items():
        tokens.create(backend.catalogue, Token(role, role, "2026-01-01T00:00:00Z"), secret)


def local_replica(root: Path, **more: Any) -> Replica:
    """One on SQLite and a directory, with tokens; more of them share both."""
    settings = {"CACHEMGR_STORE": str(root / "store"), "CACHEMGR_DATABASE_URL": f"sqlite:///{root}/catalogue.db"}
    made = replica(root / "home", settings, **more)
    if not tokens.tokens(made.backend.catalogue):
        let_in(made.backend)
    return made


def store_of(root: Path) -> LocalStore:
    """The store of `local_replica`."""
    return LocalStore(root / "store")


def report_of(*launches: Launch) -> dict[str, object]:
    """What a node sends about launches."""
    return {"launches": [json.loads(encode_launch(launch)) for launch in launches]}


def started(name: str, **changes: Any) -> Launch:
    """A launch of an artifact, as a node of a fleet records it."""
    usual = {"engine": "vllm", "engine_version": "0.32.0", "device": "NVIDIA H200", "model": "llama"}
    return msgspec.structs.replace(launch_named(name), **{**usual, **changes})


def question(factors: tuple[Factor, ...]) -> dict[str, object]:
    """The body of a look-up."""
    found: dict[str, object] = msgspec.to_builtins({"factors": factors})
    return found
