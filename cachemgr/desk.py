"""The desk of a launch: where the processes of its engine say what they do, and ask for what they are about to look up.

A process of the engine that has our plugin connects to it (`cachemgr.plugin.wire` is the other
side). Nothing that comes in can do harm: facts are kept within bounds, a question names an entry, and what is put
into place is chosen and checked as before every start. Only processes of this user are listened to.
"""

import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from cachemgr import threads
from cachemgr.errors import NoThreadError

DESK_VARIABLE = "CACHEMGR_DESK"
HEARS_VARIABLE = "CACHEMGR_HEARS"
"""`all`: whoever is in charge reads the engine's output anyway, so that its log need not be forwarded."""

_CREDENTIALS: Final = struct.Struct("3i")
_LONGEST_PACKET: Final = 1 << 18
_MOST_CONNECTIONS: Final = 512
_MOST_FACTS: Final = 256


class Message(msgspec.Struct, frozen=True):
    """What a process of the engine says; each packet has some of these."""

    hello: int | None = None
    log: str = ""
    fetch: str | None = None
    """The path of an entry that it is about to look up."""
    question: int = 0
    entry: str | None = None
    """The path of an entry that it has looked up."""
    loaded: bool = False
    ready: int | None = None
    """It has warmed up; how many engine cores there are on this node."""
    counters: dict[str, int] = {}
    join: bool = False
    """It wants to know what this launch hands out."""
    works: bool = False
    """It is a worker."""
    warm: bool = False
    """A worker that has warmed up."""
    lacks: str | None = None
    failed: str | None = None
    again: bool = False
    """It makes an engine and has made one before."""
    dropped: int = 0


class Facts(msgspec.Struct, frozen=True):
    """What was said so far."""

    ready: bool
    """Whether every engine core of this node has said that it has warmed up."""
    looked_up: dict[str, bool]
    """Entries by path, and whether each was loaded."""
    counters: dict[str, int]
    """Of vLLM's compilation counter, summed over the engine cores."""
    lacking: tuple[str, ...]
    """Hooks that this version of vLLM has no place for."""
    failed: tuple[str, ...]
    dropped: int
    processes: int
    """Processes that have ever said something."""
    engines_more: int
    """Engines that were made in a process that had made one."""


class Desk:
    """Open from `open` until `close`. `hear` takes lines of the engine's log, `fetch` the path of an entry, and
    returns what became of it."""

    def __init__(self, name: str, listener: socket.socket, hear: Callable[[bytes], None], *, of_workers: bool) -> None:
        self.name = name
        self._of_workers = of_workers
        self._listener, self._hear = listener, hear
        self._fetch: Callable[[str], str] = lambda _path: "nobody fetches"
        self._lock = threading.Lock()
        self._connected: set[socket.socket] = set()
        self._ready: set[int] = set()
        self._workers: set[int] = set()
        self._warm: set[int] = set()
        self._handed_out: Mapping[str, object] = {}
        self._engines = 1
        self._looked_up: dict[str, bool] = {}
        self._counters: dict[int, dict[str, int]] = {}
        self._lacking: dict[str, None] = {}
        self._failed: dict[str, None] = {}
        self._dropped = 0
        self._again = 0
        self._processes: set[int] = set()

    @classmethod
    def open(cls, hear: Callable[[bytes], None], name: str = "") -> "Desk":
        """Under a name of its own, or one that workers without an engine core know (`cachemgr.plugin.node`): then what
        is ready is decided by them.

        Raises OSError where there are no Unix sockets, or where the name is taken.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        of_workers, name = bool(name), name or f"cachemgr-{secrets.token_hex(16)}"
        try:
            listener.bind("\0" + name)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        return cls(name, listener, hear, of_workers=of_workers)

    def attend(self, fetch: Callable[[str], str]) -> None:
        """Begin to listen. Raises NoThreadError, and is closed then."""
        self._fetch = fetch
        try:
            threads.start(self._accept, "desk")
        except NoThreadError:
            self.close()
            raise

    def hand_out(self, what: Mapping[str, object]) -> None:
        """What processes that join are told."""
        self._handed_out = what

    @property
    def connected(self) -> int:
        """Processes of the engine that are connected now."""
        with self._lock:
            return len(self._connected)

    def facts(self) -> Facts:
        """What was said so far."""
        with self._lock:
            names = {name for counters in self._counters.values() for name in counters}
            return Facts(
                ready=self._is_ready(),
                looked_up=dict(self._looked_up),
                counters={name: sum(each.get(name, 0) for each in self._counters.values()) for name in sorted(names)},
                lacking=tuple(self._lacking),
                failed=tuple(self._failed),
                dropped=self._dropped,
                processes=len(self._processes),
                engines_more=self._again,
            )

    def _is_ready(self) -> bool:
        if self._of_workers:
            return bool(self._workers) and self._warm >= self._workers
        return len(self._ready) >= self._engines

    def close(self) -> None:
        """Listen no more."""
        with self._lock:
            connections = list(self._connected)
        for each in (self._listener, *connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _address = self._listener.accept()
            except OSError:
                return
            if _own_peer(connection) is None or self.connected >= _MOST_CONNECTIONS:
                connection.close()
                continue
            self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        with self._lock:
            self._connected.add(connection)
        try:
            threads.start(lambda: self._serve(connection), "desk-client")
        except NoThreadError:
            self._part_from(connection)

    def _serve(self, connection: socket.socket) -> None:
        pid = _own_peer(connection) or 0
        try:
            while packet := connection.recv(_LONGEST_PACKET):
                try:
                    message = msgspec.json.decode(packet, type=Message)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    message = Message(failed="a message that nobody understands")
                self._take(message, pid, connection)
        except OSError:
            pass
        finally:
            self._part_from(connection)

    def _part_from(self, connection: socket.socket) -> None:
        with self._lock:
            self._connected.discard(connection)
        connection.close()

    def _take(self, message: Message, pid: int, connection: socket.socket) -> None:
        if message.log:
            self._hear(message.log.encode("utf-8", "backslashreplace"))
        if message.fetch is not None:
            told = self._fetch(message.fetch)
            connection.send(json.dumps({"question": message.question, "told": told}).encode())
        if message.join:
            connection.send(json.dumps({"question": message.question, **self._handed_out}).encode())
        with self._lock:
            self._keep(message, pid)

    def _keep(self, message: Message, pid: int) -> None:
        self._dropped += max(0, message.dropped)
        self._again += message.again
        if len(self._processes) < _MOST_FACTS:
            self._processes.add(pid)
        if message.works and len(self._workers) < _MOST_FACTS:
            self._workers.add(pid)
        if message.warm:
            self._warm.add(pid)
        if message.entry is not None and len(self._looked_up) < _MOST_FACTS:
            # Layers of an encoder share an entry: a cold start misses it once, and loads what it saved from then on.
            self._looked_up[message.entry] = message.loaded and self._looked_up.get(message.entry, True)
        if message.ready is not None and len(self._ready) < _MOST_FACTS:
            self._engines = max(self._engines, min(message.ready, _MOST_FACTS))
            self._ready.add(pid)
            self._counters[pid] = message.counters
        for table, text in ((self._lacking, message.lacks), (self._failed, message.failed)):
            if text is not None and len(table) < _MOST_FACTS:
                table.setdefault(text[:200])


def peer(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end and its user, as the kernel says them. Raises OSError."""
    size = _CREDENTIALS.size
    pid, uid, _gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid), int(uid)


def _own_peer(connection: socket.socket) -> int | None:
    """The process at the other end, or None when it is another user's."""
    try:
        pid, uid = peer(connection)
    except OSError:
        return None
    return pid if uid in {os.geteuid(), 0} else None
