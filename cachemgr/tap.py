"""Read what a command writes while it writes, without standing in its way.

What the command gets as standard output or error is of the kind that it would have got without us:

| the original        | the command gets                             | who copies                              |
|---------------------|----------------------------------------------|-----------------------------------------|
| terminal            | a raw pseudo-terminal of the same size       | the pump                                |
| pipe, FIFO          | a pipe                                       | the pump                                |
| Unix stream socket  | a socket (the journal of systemd is one)     | the pump                                |
| regular file        | the file; we read it behind the command      | nobody                                  |
| anything else       | the original: devices, closed, connections   | nobody; the tap does not see it         |

The same file for both stays one, so that the order of the two is kept. Standard input and the controlling terminal are
never touched: Ctrl-C, Ctrl-Z and `fg` work as before.

The pump (`cachemgr.pump`) is a process of its own, so that our death does not matter to the command. Refused: a thread
of ours as the pump (a SIGKILL for us would be a SIGPIPE for the command), and reading with `splice` or `tee` from one
pipe (a stopped cachemgr would stop the command).

What a command can notice: a pipe holds some 128 KiB more than it did; the reader of the original is found gone one
write later where the original is a named FIFO; terminal settings made through descriptor 1 or 2 rather than 0 do not
reach the terminal (full-screen programs need it untapped); when somebody kills the pump, it is as when `tee` is killed.
"""

import fcntl
import os
import pty
import select
import signal
import socket
import stat
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from cachemgr import pump, threads
from cachemgr.descriptors import raised
from cachemgr.errors import NoThreadError

Name = Literal["stdout", "stderr"]

READY_SECONDS = 2.0
"""How long a pump may take to start; usually it takes 20 ms. Later the command starts untapped."""
FILE_POLL_SECONDS = 0.04
"""How late what a command writes to a regular file may be seen. Events of the kernel would slow its writes down."""
_NO_COMMAND = "the command did not start"
_MESSAGE_BYTES = 1 << 17
_UNTAKEN_BYTES = 4 << 20
"""What the kernel may keep for us when our thread is late; without privileges it grants less."""
_NUMBERS: dict[Name, int] = {"stdout": 1, "stderr": 2}


class Piece(msgspec.Struct, frozen=True):
    """Some bytes of one stream: not a line, not even whole characters."""

    name: Name
    """Where both streams are the same file, all of it is `stdout`."""
    data: bytes
    gap: bool
    """Whether bytes right before these were not seen, because we did not take them in time or the file was cut.

    Where nothing follows such bytes, the last piece is empty.
    """


class Ends(msgspec.Struct, frozen=True):
    """What to give to the command as its streams; None where it gets the original."""

    stdout: int | None
    stderr: int | None


class Tap:
    """A tap on the standard streams that a command is about to inherit from us.

    In this order: `open`, `ends` round the start of the command, `finish` after its end. Opening it long before the
    command starts hides the start of the pump.
    """

    def __init__(self, watched: Callable[[Piece], None]) -> None:
        self._watched = watched
        self._unseen: dict[Name, str] = {}
        self._lines: list[_Line] = []
        self._files: list[_File] = []
        self._pumps: set[int] = set()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._over = False

    @classmethod
    def open(cls, watched: Callable[[Piece], None]) -> "Tap":
        """Prepare a tap; what cannot be tapped is in `unseen`, and nothing is raised.

        `watched` is called in a thread of the tap, within milliseconds (`FILE_POLL_SECONDS` for files), and must not
        raise. While it works, pieces queue up in the kernel; when it is much too slow, some are dropped.
        """
        tap = cls(watched)
        for original in _originals(tap._unseen):
            try:
                tap._add(original)
            except OSError as error:
                tap._lose(original.names, f"it cannot be tapped: {error.strerror}")
        if tap._lines:
            tap._start_pump()
        return tap

    @property
    def unseen(self) -> dict[Name, str]:
        """Why a stream is not seen, by its name; final once `ends` was left."""
        return dict(self._unseen)

    @property
    def pumps(self) -> frozenset[int]:
        """Processes of ours that may outlive the command; for `Child.wait`, which must not take them for its own."""
        return frozenset(self._pumps)

    @contextmanager
    def ends(self) -> Iterator[Ends]:
        """Start the command in here, with these; from then on pieces are delivered."""
        self._await_ready()
        try:
            yield Ends(self._end("stdout"), self._end("stderr"))
        except BaseException:
            self._abandon(_NO_COMMAND)
            raise
        for line in self._lines:
            line.give_away()
        if self._lines or self._files:
            self._start_thread()

    def finish(self, seconds: float) -> bool:
        """Stop listening. True when all that was written before is copied to the originals and was delivered.

        Waits `seconds` at most: for a reader of the original that has stopped (the pump goes on after us, except where
        our end is that of a whole container: be patient as PID 1), or for `watched`. Nothing is delivered later.
        """
        self._ending.set()
        if self._thread is None:
            self._abandon(_NO_COMMAND)
            return True
        for line in self._lines:
            with suppress(OSError):  # the pump has ended
                line.listener.shutdown(socket.SHUT_WR)
        self._thread.join(seconds)
        self._over = True
        for pid in self._pumps:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return not self._thread.is_alive()

    def _add(self, original: "_Original") -> None:
        if original.kind == "file":
            self._files.append(_File(original.names[0], original.number))
        else:
            self._lines.append(_Line.lay(original))

    def _lose(self, names: Sequence[Name], reason: str) -> None:
        self._unseen.update(dict.fromkeys(names, reason))

    def _end(self, name: Name) -> int | None:
        return next((line.given for line in self._lines if name in line.original.names), None)

    def _start_pump(self) -> None:
        actions: list[tuple[int, int, int]] = []
        numbers = [line.original.number for line in self._lines]
        for line, number in zip(self._lines, numbers, strict=True):
            actions.append((os.POSIX_SPAWN_DUP2, line.source, number + 2))
            actions.append((os.POSIX_SPAWN_DUP2, line.offering.fileno(), number + 4))
        argv = [sys.executable, "-I", "-S", pump.__file__, *map(str, numbers)]
        try:
            # Blocked rather than ignored: it holds from the first instruction, and Ctrl-C may come any time.
            pid = os.posix_spawn(
                sys.executable, argv, os.environ, file_actions=actions, setsigmask=signal.valid_signals()
            )
        except OSError as error:
            self._drop_lines(f"the pump cannot be started: {error.strerror}")
            return
        self._pumps.add(pid)
        for line in self._lines:
            line.hand_over()

    def _await_ready(self) -> None:
        """All lines or none: a pump that has failed once is not relied on."""
        end = time.monotonic() + READY_SECONDS
        for line in self._lines:
            line.listener.settimeout(max(end - time.monotonic(), 0.001))
            try:
                ready = line.listener.recv(_MESSAGE_BYTES)
            except OSError:
                ready = b""
            if ready != pump.READY:
                self._drop_lines("the pump did not start")
                return
            line.listener.settimeout(None)

    def _drop_lines(self, reason: str) -> None:
        for line in self._lines:
            self._lose(line.original.names, reason)
            line.close()
        self._lines.clear()

    def _abandon(self, reason: str) -> None:
        """We hear nothing. Without a command the pump sees the end of its sources, and ends."""
        self._drop_lines(reason)
        for file in self._files:
            file.close()
        self._files.clear()

    def _start_thread(self) -> None:
        """Where there is none to be had, the pump copies all the same, and nothing is delivered."""
        try:
            self._thread = threads.start(self._listen, "tap")
        except NoThreadError as error:
            self._abandon(str(error))

    def _listen(self) -> None:
        lines = {line.listener.fileno(): line for line in self._lines}
        poll = select.poll()
        for fd in lines:
            poll.register(fd, select.POLLIN)
        while lines:
            self._read_files()
            for fd, _event in poll.poll(FILE_POLL_SECONDS * 1000 if self._files else None):
                if not self._take(lines[fd]):
                    poll.unregister(fd)
                    del lines[fd]
        while self._files and not self._ending.wait(FILE_POLL_SECONDS):
            self._read_files()
        self._read_files()

    def _take(self, line: "_Line") -> bool:
        """Deliver one message; False at the end of them, which a pump that was killed does not tell."""
        try:
            message = line.listener.recv(_MESSAGE_BYTES)
        except OSError:
            message = b""
        if message != pump.WHOLE:
            self._deliver(Piece(line.original.names[0], message[1:], message[:1] != pump.WHOLE))
        return len(message) > 1

    def _read_files(self) -> None:
        for file in self._files:
            for piece in file.news():
                if self._over:
                    return
                self._deliver(piece)

    def _deliver(self, piece: Piece) -> None:
        if not self._over:
            self._watched(piece)


class _Original(msgspec.Struct, frozen=True):
    """A file behind one or both of our standard streams."""

    number: int
    names: tuple[Name, ...]
    kind: Literal["file", "terminal", "pipe", "socket"]


def _originals(unseen: dict[Name, str]) -> list[_Original]:
    """What can be tapped, each file once; reasons for the others go to `unseen`."""
    found: dict[tuple[int, int], _Original] = {}
    for name, number in _NUMBERS.items():
        kind = _kind(number)
        if kind == "closed":
            unseen[name] = "it is closed"
            continue
        if kind == "other":
            unseen[name] = "it is neither a file, a pipe nor a terminal"
            continue
        status = os.fstat(number)
        same = found.get((status.st_dev, status.st_ino))
        if same is None:
            found[status.st_dev, status.st_ino] = _Original(number, (name,), kind)
        else:
            found[status.st_dev, status.st_ino] = msgspec.structs.replace(same, names=("stdout", "stderr"))
    return list(found.values())


def _kind(number: int) -> Literal["file", "terminal", "pipe", "socket", "closed", "other"]:
    mode = _inherited_mode(number)
    if mode is None:
        return "closed"
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISFIFO(mode):
        return "pipe"
    if os.isatty(number):
        return "terminal"
    return "socket" if stat.S_ISSOCK(mode) and _only_written_to(number) else "other"


def _inherited_mode(number: int) -> int | None:
    """None where the command gets nothing: at the number of a closed stream there may be a file that we opened."""
    try:
        return os.fstat(number).st_mode if os.get_inheritable(number) else None
    except OSError:
        return None


def _only_written_to(number: int) -> bool:
    """A Unix stream socket that is not standard input too: a server of inetd talks to a connection both ways."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
        if one.family != socket.AF_UNIX or one.type != socket.SOCK_STREAM:
            return False
        status = os.fstat(number)
        try:
            given = os.fstat(0)
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != (given.st_dev, given.st_ino)
    return False


class _Line:
    """The way of one original: `given` is the command's end, `source` the pump's, and messages come from `listener`."""

    def __init__(self, original: _Original, given: int, source: int) -> None:
        self.original = original
        self.given, self.source = raised(given), raised(source)
        listener, offering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener = socket.socket(fileno=raised(listener.detach()))
        self.offering = socket.socket(fileno=raised(offering.detach()))
        self.offering.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNTAKEN_BYTES)
        self.offering.settimeout(0)

    @classmethod
    def lay(cls, original: _Original) -> "_Line":
        """Raises OSError when the kernel refuses."""
        if original.kind == "terminal":
            source, given = pty.openpty()
            tty.setraw(given, termios.TCSANOW)
            size = fcntl.ioctl(original.number, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(given, termios.TIOCSWINSZ, size)
        elif original.kind == "socket":
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            ours.shutdown(socket.SHUT_WR)
            source, given = ours.detach(), theirs.detach()
        else:
            source, given = os.pipe()
        return cls(original, given, source)

    def hand_over(self) -> None:
        """The pump has its ends: ours would keep it from seeing an end, or the command from seeing one."""
        os.close(self.source)
        self.source = -1
        self.offering.close()

    def give_away(self) -> None:
        """The command has its end."""
        os.close(self.given)
        self.given = -1

    def close(self) -> None:
        for fd in (self.given, self.source):
            if fd >= 0:
                os.close(fd)
        self.offering.close()
        self.listener.close()


class _File:
    """A regular file that the command writes to itself, read behind it."""

    def __init__(self, name: Name, number: int) -> None:
        """Raises OSError where we may write the file and not read it, or without /proc."""
        self._name = name
        self._number = number
        self._file = os.open(Path(f"/proc/self/fd/{number}"), os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
        self._position = self._end()
        self._gap = False

    def news(self) -> Iterator[Piece]:
        """What was written since the last call."""
        end = self._end()
        if end < self._position:
            self._position = 0 if self._appends() else end
            self._gap = True
        while self._position < end:
            data = os.pread(self._file, min(end - self._position, pump.CHUNK_BYTES), self._position)
            if not data:  # cut off before we read it, as log rotation by copying does
                self._position, self._gap = end, True
                return
            self._position += len(data)
            gap, self._gap = self._gap, False
            yield Piece(self._name, data, gap)

    def close(self) -> None:
        os.close(self._file)

    def _end(self) -> int:
        """Where the next write goes. The command shares our offset; what may lie behind it is older."""
        if self._appends():
            return os.fstat(self._number).st_size
        return os.lseek(self._number, 0, os.SEEK_CUR)

    def _appends(self) -> bool:
        return bool(fcntl.fcntl(self._number, fcntl.F_GETFL) & os.O_APPEND)
