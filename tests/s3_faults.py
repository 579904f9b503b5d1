"""A server between the store and a real S3 server that fails as networks, gateways and busy servers do.

It listens on a real socket. What no rule applies to is forwarded as it is, so all else about the answers is real.
It notes every request, which is also how requests are counted.
"""

import http.client
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

HOLD_SECONDS = 30.0
"""How long a stalled answer is held open, unless the server ends before."""


@dataclass(frozen=True)
class Answer:
    """What the real server said."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


Fault = Callable[["Handler"], None]


class FaultyServer(ThreadingHTTPServer):
    """Forwards to `upstream`, except where a rule says otherwise."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = urlsplit(upstream)
        self.asked: list[str] = []
        """Each request, as `GET /bucket/name`; listings as `LIST prefix`,
        copies as `COPY /bucket/name`."""
        self.headers: list[dict[str, str]] = []
        """The headers of each request, names in lower case."""
        self.ended = threading.Event()
        self.sent_endlessly = 0
        """Bytes of endless bodies that went out."""
        self.unknown_headers: set[str] = set()
        """Request headers that the real server does not get to see."""
        self._rules: list[tuple[str, Fault, int]] = []
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that leave in the middle are what this is for."""

    def clear(self) -> None:
        """Forward everything again, and forget what was asked."""
        with self._lock:
            self.asked, self.headers, self._rules, self.unknown_headers = [], [], [], set()

    def fail(self, asked: str, fault: Fault, *, times: int = 1 << 30) -> None:
        """Let the next `times` requests whose note contains `asked` fail."""
        with self._lock:
            self._rules.append((asked, fault, times))

    def noted(self, asked: str, headers: dict[str, str]) -> Fault | None:
        """Note a request, and say how it is to fail."""
        with self._lock:
            self.asked.append(asked)
            self.headers.append(headers)
            for number, (part, fault, times) in enumerate(self._rules):
                if part in asked:
                    self._rules[number] = (part, fault, times - 1)
                    if times <= 1:
                        del self._rules[number]
                    return fault
        return None


@contextmanager
def faulty(upstream: str) -> Iterator[FaultyServer]:
    """A running server in front of `upstream`."""
    with FaultyServer(upstream) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: FaultyServer
    body: bytes

    def log_message(self, *_args: object) -> None:
        pass

    def _serve(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        fault = self.server.noted(self._asked(), {name.lower(): value for name, value in self.headers.items()})
        with suppress(BrokenPipeError, ConnectionResetError):
            if fault is None:
                self.reply(self.forwarded())
            else:
                fault(self)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 - names of http.server

    def _asked(self) -> str:
        parts = urlsplit(self.path)
        if "list-type=2" in parts.query:
            prefix = next((each for each in parts.query.split("&") if each.startswith("prefix=")), "prefix=")
            return f"LIST {prefix.removeprefix('prefix=').replace('%2F', '/')}"
        verb = "COPY" if "x-amz-copy-source" in self.headers else self.command
        return f"{verb} {parts.path}" + (f"?{parts.query}" if parts.query else "")

    def forwarded(self, *, cut: bool = False) -> Answer:
        """What the real server says; with `cut`, to a client that sends the head of its request and no more."""
        upstream = http.client.HTTPConnection(str(self.server.upstream.hostname), self.server.upstream.port, timeout=60)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self._headers().items():
            upstream.putheader(name, value)
        upstream.endheaders(None if cut else self.body)
        if cut:
            upstream.sock.shutdown(socket.SHUT_WR)
        answer = upstream.getresponse()
        body = answer.read()
        upstream.close()
        return Answer(answer.status, answer.getheaders(), body)

    def _headers(self) -> dict[str, str]:
        """The headers that the real server gets. Without one of them the signature has to be made again."""
        unknown = self.server.unknown_headers
        kept = {name.lower(): value for name, value in self.headers.items()}
        known = {name: value for name, value in kept.items() if name not in {"expect", "connection", *unknown}}
        if unknown.isdisjoint(kept):
            return known
        for name in ("authorization", "x-amz-date", "x-amz-content-sha256"):
            known.pop(name, None)
        request = AWSRequest(self.command, f"http://{kept['host']}{self.path}", known, self.body)
        S3SigV4Auth(
            Credentials(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]), "s3", "us-east-1"
        ).add_auth(request)
        return dict(request.headers.items())

    def reply(self, answer: Answer) -> None:
        self.start(answer)
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def start(self, answer: Answer, length: int | None = None) -> None:
        """Status and headers, which may lie about the length."""
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body) if length is None else length))
        self.end_headers()

    def hold(self) -> None:
        """Say nothing for a long time."""
        self.server.ended.wait(HOLD_SECONDS)
        self.close_connection = True


def error(status: int, code: str, more: str = "", **headers: str) -> Fault:
    """An error of S3."""

    def fault(handler: Handler) -> None:
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>no</Message>{more}</Error>'
        shown = {"Content-Type": "application/xml"} | {name.replace("_", "-"): value for name, value in headers.items()}
        handler.reply(Answer(status, list(shown.items()), body.encode()))

    return fault


def page(handler: Handler, status: int = 200) -> None:
    """What a captive portal, a wrong port or a proxy answers."""
    handler.reply(Answer(status, [("Content-Type", "text/html")], b"<html><body>Welcome</body></html>"))


def truncated(handler: Handler) -> None:
    """The connection ends in the middle of the body."""
    answer = handler.forwarded()
    handler.start(answer)
    handler.wfile.write(answer.body[: len(answer.body) // 2])
    handler.close_connection = True


def shortened(handler: Handler) -> None:
    """Fewer bytes than there are, under a length that agrees with them: only a range or a digest can tell."""
    answer = handler.forwarded()
    handler.reply(Answer(answer.status, answer.headers, answer.body[:-1]))


def lengthened(handler: Handler) -> None:
    """More bytes than were asked for, under a length that agrees with them."""
    answer = handler.forwarded()
    handler.reply(Answer(answer.status, answer.headers, answer.body + b"more"))


def endless(handler: Handler, status: int = 200) -> None:
    """A body that never ends."""
    handler.send_response_only(status)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    while not handler.server.ended.is_set():
        handler.wfile.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
        handler.server.sent_endlessly += 0x10000


def stalled(handler: Handler) -> None:
    """Silence in the middle of the body."""
    answer = handler.forwarded()
    handler.start(answer)
    handler.wfile.write(answer.body[: len(answer.body) // 2])
    handler.hold()


def silent(handler: Handler) -> None:
    """No answer at all."""
    handler.hold()


def dripping(handler: Handler) -> None:
    """One byte now and then, so that no read ever times out."""
    answer = handler.forwarded()
    handler.start(answer)
    for at in range(len(answer.body)):
        handler.wfile.write(answer.body[at : at + 1])
        if handler.server.ended.wait(0.1):
            break
    handler.close_connection = True


def dripping_headers(handler: Handler) -> None:
    """The same, before there is a body."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    end = time.monotonic() + HOLD_SECONDS
    while time.monotonic() < end and not handler.server.ended.wait(0.1):
        handler.wfile.write(b"X-Slow: 1\r\n")
    handler.close_connection = True


def dropped(handler: Handler) -> None:
    """The connection ends without an answer, and nothing was done."""
    handler.close_connection = True


def cut_off(handler: Handler) -> None:
    """The client dies between the head of its request and the body."""
    with suppress(OSError, http.client.HTTPException):
        handler.forwarded(cut=True)
    handler.close_connection = True


def unanswered(handler: Handler) -> None:
    """What was asked is done, and the answer gets lost."""
    handler.forwarded()
    handler.close_connection = True
