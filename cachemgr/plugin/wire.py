"""The wire from a process of the engine to the launch that is in charge: facts one way, answers the other.

Messages are JSON objects, one packet each, on a Unix socket whose name CACHEMGR_DESK holds. The name is abstract: it
needs no directory that can be written, and vanishes with its owner. Both sides see that the other one has their user
id. Nothing here waits for the launch but `ask`, which has a bound: when the socket is full, what was to be told is
dropped and counted, and when the launch is gone, nothing is told any more.
"""

import errno
import json
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Final

DESK_VARIABLE = "CACHEMGR_DESK"
HEARS_VARIABLE = "CACHEMGR_HEARS"
"""`all`: whoever is in charge reads what the engine prints anyway."""
Fact = Mapping[str, object]

_MOST_PENDING: Final = 64
_LONGEST_TEXT: Final = 15_000
"""A packet must fit into the socket's buffer, which has 200 KB by default, and JSON may spell a letter in 12 bytes."""
_CONNECT_SECONDS: Final = 1.0
_CREDENTIALS: Final = struct.Struct("3i")


class Wire:
    """The connection of this process. A process that was forked from one with a connection makes its own."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._owner = 0
        self._asking = threading.Lock()
        self._asks = True
        self._pending: list[Fact] = []
        self._dropped = 0
        self._questions = 0

    def tell(self, **fact: object) -> None:
        """Say something. Before there is a launch, the first few facts are kept for it."""
        if not os.environ.get(DESK_VARIABLE):
            if len(self._pending) < _MOST_PENDING:
                self._pending.append(fact)
            return
        for each in self._taken():
            self._send(each)
        self._send(fact)

    def ask(self, seconds: float, **question: object) -> dict[str, object] | None:
        """The answer to a question; None when there is none within `seconds`, and then nobody is asked any more."""
        end = time.monotonic() + seconds
        if not os.environ.get(DESK_VARIABLE) or self._connected() is None or not self._asking.acquire(timeout=seconds):
            return None  # connecting comes first: it may make the lock anew
        try:
            if not self._asks:
                return None
            self._questions += 1
            number = self._questions
            if not self._send({**question, "question": number}):
                return None
            answer = self._answer(number, end)
            self._asks = answer is not None  # who does not answer may hear all the same, and that waits for nobody
            return answer
        finally:
            self._asking.release()

    def renew(self) -> None:
        """Another launch is in charge now: connect anew when there is something to say."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._owner, self._asks = None, 0, True

    def _taken(self) -> list[Fact]:
        taken, self._pending = self._pending, []
        return taken

    def _send(self, fact: Fact) -> bool:
        connection = self._connected()
        if connection is None:
            return False
        if self._dropped:
            fact = {**fact, "dropped": self._dropped}
        try:
            connection.send(json.dumps(fact).encode())
        except OSError as error:
            if isinstance(error, BlockingIOError) or error.errno == errno.EMSGSIZE:
                self._dropped += 1
            else:
                self._give_up()
            return False
        self._dropped = 0
        return True

    def _answer(self, number: int, end: float) -> dict[str, object] | None:
        connection = self._socket
        while connection is not None:
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            left = end - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return None
            try:
                packet = connection.recv(1 << 16)
                answer = json.loads(packet) if packet else None
            except (OSError, ValueError):
                return None
            if not isinstance(answer, dict):
                return None
            if answer.get("question") == number:
                return answer
        return None

    def _connected(self) -> socket.socket | None:
        pid = os.getpid()
        if self._owner != pid:
            # What there is belongs to the process that we were forked from, and so may its lock.
            self.renew()
            self._owner, self._asking = pid, threading.Lock()
            self._socket = self._connect()
            if self._socket is not None:
                self._send({"hello": pid})
        return self._socket

    def _connect(self) -> socket.socket | None:
        name = os.environ.get(DESK_VARIABLE, "")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(_CONNECT_SECONDS)
            connection.connect("\0" + name)
            data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(data)[1] != os.geteuid():
                raise PermissionError(name)
            connection.settimeout(0)
        except OSError:
            connection.close()
            return None
        return connection

    def _give_up(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()


def _process_name() -> str:
    multiprocessing = sys.modules.get("multiprocessing")
    return "MainProcess" if multiprocessing is None else str(multiprocessing.current_process().name)


class Forward(logging.Handler):
    """Hands records of the engine's logger on, as the lines that the engine prints of them."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(logging.INFO)
        self._wire = wire
        self._times = logging.Formatter(datefmt="%m-%d %H:%M:%S")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._wire.tell(log=self._lines(record)[:_LONGEST_TEXT])
        except Exception:  # noqa: BLE001 - whoever logs must not notice
            self._wire.tell(failed="forwarding the log")

    def _lines(self, record: logging.LogRecord) -> str:
        name = getattr(record, "vllm_process_name", None) or record.processName
        head = f"({name} pid={record.process}) {record.levelname} {self._times.formatTime(record, self._times.datefmt)}"
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self._times.formatException(record.exc_info)
        return "".join(f"{head} [{record.filename}:{record.lineno}] {line}\n" for line in text.split("\n"))


WIRE = Wire()
"""The one connection of this process."""


def listen() -> None:
    """Forward the engine's log, unless whoever is in charge reads it anyway. Asked for again, it does nothing new: vLLM
    removes handlers when it configures its logging anew (0.31-0.33 logger.py)."""
    logger = logging.getLogger("vllm")
    if os.environ.get(HEARS_VARIABLE) == "all" or any(isinstance(each, Forward) for each in logger.handlers):
        return
    if logger.hasHandlers():  # else Python prints warnings by itself, and would not beside a handler of ours
        logger.addHandler(Forward(WIRE))


def hear_the_end() -> None:
    """Hand on what ends this process, too; it is printed as it always was."""
    print_it = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(Exception):
            if os.environ.get(HEARS_VARIABLE) != "all":
                text = "".join(traceback.format_exception(kind, error, trace))
                head = f"({_process_name()} pid={os.getpid()}) "
                WIRE.tell(log="".join(f"{head}{line}\n" for line in text.splitlines())[-_LONGEST_TEXT:])
        print_it(kind, error, trace)

    sys.excepthook = excepthook
