"""A registry over HTTP (distribution-spec 1.1): one image to read or to write.

The only importer of urllib3, which boto3 brings along. The client for Python that there is (`oras`) moves whole files
through `requests`, takes and gives paths, and says what went wrong as text: our bytes are hashed on their way and have
no file, and every failure has a word of its own. What we need of the protocol are five requests.

A login is sent to the registry that it is for, and to the token server that this registry names; over plain HTTP only
where the registry itself is asked over it.
"""

import io
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import BinaryIO
from urllib.parse import unquote, urlencode, urljoin, urlsplit

import msgspec
import urllib3
from urllib3.exceptions import HTTPError

from cachemgr import __version__, digest
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, NotFoundError, RegistryError, UsageError
from cachemgr.oci import documents
from cachemgr.oci.credentials import Login, login
from cachemgr.oci.documents import Descriptor
from cachemgr.oci.image import Image
from cachemgr.oci.place import Opened, Reference
from cachemgr.store import Source

_CONNECT_SECONDS, _STALL_SECONDS = 5.0, 30.0
_ATTEMPTS = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
"""Status codes that are likely to be other ones in a while."""
_SENT_PIECE = 1 << 18
_CONNECTIONS = 16
_TOKEN_LIMIT = 1 << 20
_CHALLENGE = re.compile(r'([a-zA-Z_]+)="([^"]*)"')
_LOOPBACK = re.compile(r"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d+)?")
_FOLLOW = urllib3.Retry(total=None, connect=0, read=0, status=0, other=0, redirect=5)
_ACCEPT = f"{documents.MANIFEST}, {documents.INDEX}"


class _Token(msgspec.Struct):
    token: str = ""
    access_token: str = ""


class Registry:
    """An image in a registry, and what it needs there.

    Args:
        plain_http: whether it is asked without TLS; on this machine it always is.
        environ: where logins, proxies and certificates are looked for.
    """

    def __init__(
        self,
        reference: Reference,
        environ: Mapping[str, str],
        *,
        plain_http: bool = False,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._reference, self._environ, self._pause = reference, environ, pause
        host = {"docker.io": "registry-1.docker.io"}.get(reference.registry, reference.registry)
        self._plain = plain_http or _LOOPBACK.fullmatch(reference.registry) is not None
        self._base = f"{'http' if self._plain else 'https'}://{host}/v2/{reference.repository}/"
        self._pool = _pool(self._base, environ)
        self._authorization: str | None = None
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return str(self._reference)

    def index(self) -> bytes:
        data, name = self._manifest(self._reference.tag), self._reference.tag
        if digest.is_digest(name) and digest.of_bytes(data) != name:
            raise CorruptError(f"{self} has other bytes than its digest says")
        return data

    def document(self, wanted: Descriptor) -> bytes:
        return self._manifest(wanted.digest)

    def open(self, blob: Digest) -> BinaryIO:
        return io.BufferedReader(_Body(self._expect("GET", f"blobs/{blob}", {200}), self), _SENT_PIECE)

    def has(self, blob: Descriptor) -> bool:
        with self._made("HEAD", f"blobs/{blob.digest}") as answer:
            if answer.status not in {200, 404}:
                raise self._refused(answer)
            return answer.status == 200

    def put(self, blob: Descriptor, source: Opened) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            with source() as stream:
                failure = self._sent(blob, stream)
            if failure is None:
                return
            if attempt == _ATTEMPTS or failure.word not in {"unreachable", "expired"}:
                raise failure
            self._rest(attempt)

    def publish(self, image: Image) -> None:
        headers = {"Content-Type": documents.MANIFEST}
        self._expect("PUT", f"manifests/{self._reference.tag}", {201}, headers, image.manifest).release_conn()

    def _manifest(self, name: str) -> bytes:
        with self._expect("GET", f"manifests/{name}", {200}, {"Accept": _ACCEPT}) as answer:
            try:
                return answer.read(documents.DOCUMENT_LIMIT + 1)
            except HTTPError as error:
                raise self.unreachable(error) from None

    def _sent(self, blob: Descriptor, source: Source) -> RegistryError | None:
        """Why a blob did not arrive this time, or None."""
        with self._expect("POST", "blobs/uploads/", {202}) as begun:
            place = urljoin(self._base, begun.headers.get("Location", ""))
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size)}
        where = f"{place}{'&' if urlsplit(place).query else '?'}{urlencode({'digest': blob.digest})}"
        try:
            answer = self._send("PUT", where, headers, iter(partial(source.read, _SENT_PIECE), b""))
        except HTTPError as error:
            return self.unreachable(error)
        with answer:
            if answer.status == 201:
                return None
            if answer.status == 401:
                self._authorize(answer)
                return RegistryError(f"{self} does not let us in any more", word="expired")
            return self._refused(answer)

    def _expect(
        self,
        verb: str,
        path: str,
        expected: "set[int]",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """An answer with one of these status codes; the caller closes it.

        Raises:
            NotFoundError: what is asked for is not there.
            RegistryError: anything else.
        """
        answer = self._made(verb, path, headers, body)
        if answer.status not in expected:
            with answer:
                raise self._missing() if answer.status == 404 else self._refused(answer)
        return answer

    def _made(
        self, verb: str, path: str, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> urllib3.BaseHTTPResponse:
        """The answer to a request, for which we are let in where we have a login."""
        answer = self._patient(verb, path, headers or {}, body)
        if answer.status != 401:
            return answer
        with answer:
            self._authorize(answer)
        return self._patient(verb, path, headers or {}, body)

    def _patient(
        self, verb: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> urllib3.BaseHTTPResponse:
        """The answer to a request, asked again where that may help."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = self._send(verb, self._base + path, headers, body)
            except HTTPError as error:
                if attempt == _ATTEMPTS:
                    raise self.unreachable(error) from None
            else:
                if answer.status not in _PASSING or attempt == _ATTEMPTS:
                    return answer
                answer.release_conn()
            self._rest(attempt)
        raise AssertionError("the last attempt returns or raises")

    def _send(
        self, verb: str, url: str, headers: Mapping[str, str], body: bytes | Iterator[bytes] | None
    ) -> urllib3.BaseHTTPResponse:
        own = {"User-Agent": f"cachemgr/{__version__}", **headers}
        if self._authorization is not None and urlsplit(url)[:2] == urlsplit(self._base)[:2]:
            own["Authorization"] = self._authorization
        # What is read may lie elsewhere, and urllib3 takes our login to no other host.
        retries = _FOLLOW if verb in {"GET", "HEAD"} else False
        return self._pool.request(
            verb, url, headers=own, body=body, preload_content=False, decode_content=False, retries=retries
        )

    def _authorize(self, answer: urllib3.BaseHTTPResponse) -> None:
        """Get what opens the door that an answer shows, by the login that is kept for it.

        Raises:
            RegistryError: there is no way in.
        """
        with self._lock:
            kept = login(self._reference.registry, self._environ)
            kind, _space, rest = answer.headers.get("WWW-Authenticate", "").partition(" ")
            if kind.lower() == "basic" and kept is not None:
                self._authorization = kept.basic()
            elif kind.lower() == "bearer":
                self._authorization = f"Bearer {self._token(dict(_CHALLENGE.findall(rest)), kept)}"
            else:
                raise self._denied()

    def _token(self, challenge: Mapping[str, str], kept: Login | None) -> str:
        """A token of the server that the registry names (distribution, "Token Authentication Specification")."""
        realm = challenge.get("realm", "")
        if urlsplit(realm).scheme != "https" and not self._plain:
            raise RegistryError(f"{self} wants a token from {realm[:100]!r}, which has no TLS", word="refused")
        wanted = {name: challenge[name] for name in ("service", "scope") if name in challenge}
        headers = {} if kept is None else {"Authorization": kept.basic()}
        try:
            with self._pool.request(
                "GET", f"{realm}?{urlencode(wanted)}", headers=headers, preload_content=False, redirect=False
            ) as answer:
                said = answer.read(_TOKEN_LIMIT)
        except (HTTPError, ValueError) as error:
            raise self.unreachable(error) from None
        if answer.status in {401, 403}:
            raise self._denied()
        try:
            token = msgspec.json.decode(said, type=_Token)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise RegistryError(f"{realm} gives no token for {self}", word="garbled") from None
        return token.token or token.access_token

    def _rest(self, attempt: int) -> None:
        self._pause(min(_FIRST_PAUSE * 2.0**attempt, _LONGEST_PAUSE) * random.uniform(0.5, 1.0))  # noqa: S311 - no secret

    def _denied(self) -> RegistryError:
        return RegistryError(
            f"{self._reference.registry} does not let us use {self._reference.repository}",
            word="denied",
            hint=f"docker login {self._reference.registry}, or skopeo login, with a user who may",
        )

    def _missing(self) -> NotFoundError:
        return NotFoundError(f"there is no {self}, or not all of it", hint="look at its name and tag")

    def _refused(self, answer: urllib3.BaseHTTPResponse) -> RegistryError:
        if answer.status in {401, 403}:
            return self._denied()
        word = "unreachable" if answer.status in _PASSING else "refused"
        hint = "try again later" if answer.status in _PASSING else "check its name, its port and HTTPS_PROXY"
        return RegistryError(f"{self} answers with status {answer.status}", word=word, hint=hint)

    def unreachable(self, error: Exception) -> RegistryError:
        """What a failed connection is to those who wait for an answer."""
        said = str(getattr(error, "reason", None) or error)
        tls = "SSL" in said and not self._plain
        hint = "--plain-http asks a registry without TLS" if tls else "check its name, its port and HTTPS_PROXY"
        return RegistryError(f"{self} cannot be reached: {said[:300]}", word="unreachable", hint=hint)


class _Body(io.RawIOBase):
    """The bytes of an answer; what goes wrong on their way is an error of ours."""

    def __init__(self, answer: urllib3.BaseHTTPResponse, registry: Registry) -> None:
        self._answer, self._registry = answer, registry

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview | bytearray", /) -> int:  # type: ignore[override]
        try:
            piece = self._answer.read(len(buffer))
        except HTTPError as error:
            raise self._registry.unreachable(error) from None
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self._answer.close()
        super().close()


def _pool(base: str, environ: Mapping[str, str]) -> urllib3.PoolManager:
    """Connections to a registry, through the proxy that the environment names for it."""
    timeout = urllib3.Timeout(connect=_CONNECT_SECONDS, read=_STALL_SECONDS)
    scheme, host = urlsplit(base)[:2]
    named = _proxy(scheme, host, environ)
    if named is None:
        return urllib3.PoolManager(timeout=timeout, maxsize=_CONNECTIONS, blocksize=_SENT_PIECE)
    try:
        proxy = urllib3.util.parse_url(named)
        headers = urllib3.make_headers(proxy_basic_auth=unquote(proxy.auth)) if proxy.auth else None
        return urllib3.ProxyManager(
            proxy.url, proxy_headers=headers, timeout=timeout, maxsize=_CONNECTIONS, blocksize=_SENT_PIECE
        )
    except HTTPError:  # its text has the password of the proxy
        hint = f"{scheme.upper()}_PROXY=http://HOST:PORT"
        raise UsageError(f"the proxy that is named for {host} cannot be used", hint=hint) from None


def _proxy(scheme: str, host: str, environ: Mapping[str, str]) -> str | None:
    """The proxy for a registry, which none on this machine has: a login would go to another one in clear."""
    proxies = {
        name[: -len("_proxy")].lower(): value for name, value in environ.items() if name.lower().endswith("_proxy")
    }
    named = proxies.get(scheme) or proxies.get("all")
    if not named or _LOOPBACK.fullmatch(host) or _goes_straight(host, proxies.get("no", "")):
        return None
    return named if "://" in named else f"http://{named}"


def _goes_straight(host: str, exceptions: str) -> bool:
    """Whether `no_proxy` names a host, or a domain that it is in."""
    name = host.partition(":")[0].lower()
    named = [each.strip().lstrip("*").lstrip(".").lower() for each in exceptions.split(",")]
    return exceptions.strip() == "*" or any(
        each and (each in (name, host) or name.endswith(f".{each}")) for each in named
    )
