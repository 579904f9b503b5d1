"""Serving: settings in, a listening server out. It ends when it is told to, with what it has begun answered."""

import signal
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import uvicorn

from cachemgr.cache import Cache
from cachemgr.catalogue.ingest import number_of
from cachemgr.catalogue.opened import open_catalogue
from cachemgr.catalogue.sources import source_name
from cachemgr.clock import Clock
from cachemgr.errors import DatabaseError, UsageError
from cachemgr.server.access import LOOPBACK, Access
from cachemgr.server.app import application
from cachemgr.server.backend import Backend, Condition
from cachemgr.server.index import Index
from cachemgr.server.limits import Bounds
from cachemgr.server.reports import Reports
from cachemgr.server.upkeep import Upkeep
from cachemgr.server.wire import Wire
from cachemgr.settings import Settings
from cachemgr.store import Store

_GRACE_SECONDS = 20
"""How long requests that are being answered may take when the server is told to end."""
_BACKLOG = 512


@dataclass(frozen=True)
class Bind:
    """Where to listen."""

    host: str
    port: int
    certificate: Path | None = None
    """PEM files for TLS; None for none."""
    key: Path | None = None
    insecure_public: bool = False
    """Whether other hosts may be answered without TLS: a proxy speaks it for us."""

    @property
    def on_loopback(self) -> bool:
        """Whether only this host can ask."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host in LOOPBACK

    def check(self) -> None:
        """Refuse what would send tokens through a network in clear.

        Raises:
            UsageError: other hosts can ask, without TLS, and nobody has said that this is meant; or half of TLS is
                given.
        """
        if (self.certificate is None) != (self.key is None):
            raise UsageError("TLS needs a certificate and its key", hint="--tls-cert FILE --tls-key FILE")
        if self.on_loopback or self.certificate is not None or self.insecure_public:
            return
        raise UsageError(
            f"other hosts can reach {self.host}, and tokens would travel in clear",
            hint="--tls-cert FILE --tls-key FILE, or --insecure-public behind a proxy that speaks TLS",
        )

    @property
    def tls(self) -> bool:
        """Whether TLS is spoken."""
        return self.certificate is not None


class Certificate:
    """The certificate of a server, which is another one by and by: what renews it replaces the files."""

    def __init__(self, bind: Bind, say: Callable[[str], None]) -> None:
        self._chain, self._key = bind.certificate, bind.key
        self._say = say
        self._context: ssl.SSLContext | None = None
        self._seen = self._now()

    def serves(self, context: ssl.SSLContext | None) -> None:
        """What new connections are encrypted with."""
        self._context = context

    def renew(self) -> None:
        """Take other files, if there are some, for connections from now on. Said either way, and once."""
        now = self._now()
        if self._context is None or self._chain is None or not now or now == self._seen:
            return
        self._seen = now
        try:
            # Tried aside first: half of a pair would leave the server with none.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._chain, self._key)
            self._context.load_cert_chain(self._chain, self._key)
        except (OSError, ssl.SSLError) as error:
            self._say(f"warning: the new certificate or its key cannot be used, the old one is: {error}")
        else:
            self._say(f"{self._chain} is used from now on")

    def _now(self) -> tuple[object, ...]:
        try:
            found = [path.stat() for path in (self._chain, self._key) if path is not None]
        except OSError:  # between two of them
            return ()
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)


def backend_of(
    settings: Settings, cache: Cache, *, environ: Mapping[str, str], clock: Clock, host: str, replica: str
) -> Backend:
    """What a server works on: the mirror if there is one, or else the local store, and their catalogue.

    Raises:
        DatabaseError: there is no catalogue that lasts.
    """
    store: Store = cache.store if cache.mirror is None else cache.mirror
    catalogue = open_catalogue(settings.database_url, cache.home)
    if str(catalogue) == "memory":
        raise DatabaseError(f"a service needs a catalogue that lasts: {catalogue.note}", hint="cachemgr doctor")
    name = source_name(catalogue, store, host)
    source = number_of(catalogue, name)
    level = cache.fleet(mirrored=True)
    return Backend(
        settings=settings,
        cache=cache,
        store=store,
        mirrored=cache.mirror is not None,
        name=name,
        catalogue=catalogue,
        source=source,
        index=Index(level),
        reports=Reports(store, catalogue, source),
        condition=Condition(),
        clock=clock,
        environ=environ,
        host=host,
        replica=replica,
        read_only=settings.read_only,
    )


def serve(backend: Backend, bind: Bind, *, interval: float, bounds: Bounds, say: Callable[[str], None]) -> None:
    """Answer until SIGTERM or SIGINT.

    Raises:
        UsageError: it cannot listen there.
    """
    bind.check()
    # What a proxy on this host asks for comes from the loopback, too.
    alone = bind.on_loopback and not bind.insecure_public
    access = Access(backend.catalogue, backend.clock, open_to_loopback=alone)
    certificate = Certificate(bind, say)
    upkeep = Upkeep(backend, interval=interval, say=say, before=certificate.renew)
    app = application(backend, access, upkeep=upkeep, say=say, bounds=bounds)
    listening = _listening(bind)
    try:
        config = uvicorn.Config(
            app,
            http=Wire,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="on",
            limit_concurrency=4 * bounds.requests,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            ssl_certfile=bind.certificate,
            ssl_keyfile=bind.key,
        )
        config.load()
        certificate.serves(config.ssl)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"the certificate or its key cannot be used: {error}", hint="PEM files: --tls-cert CHAIN --tls-key KEY"
        ) from None
    scheme, port = "https" if bind.tls else "http", listening.getsockname()[1]
    say(f"serving {backend.store} on {scheme}://{_bracketed(bind.host)}:{port}")
    # uvicorn sends itself the signal again when it has stopped; ending because of one is what was asked for.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)
    uvicorn.Server(config).run(sockets=[listening])
    backend.catalogue.close()


def _ignore(_number: int, _frame: object) -> None:
    return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _listening(bind: Bind) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((bind.host, bind.port))
        made.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        made.close()
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on {bind.host}:{bind.port}: {why}", hint="--host 127.0.0.1 --port 0") from None
    made.set_inheritable(False)
    return made
