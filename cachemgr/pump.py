"""Copy what a command writes to where it was going, and offer a second copy to cachemgr, which may be gone.

A program of its own, started by `cachemgr.tap` as `python -I -S pump.py 1 2` with every signal blocked: it ends when
nobody can write or nobody can read any more, never because cachemgr ended, and a Ctrl-C for the command is none for it.
The original comes first. The second copy is dropped when cachemgr does not take it at once.

Descriptors of stream N (1 standard output, 2 standard error): N is the original, N+2 the end of the pipe, socket or
pseudo-terminal that the command writes to, N+4 a message socket to cachemgr. On that socket the first message is
`READY`; each later one is a flag (`WHOLE`, or `GAP` where bytes before it were dropped) and bytes; the last is a flag
alone. cachemgr shuts its side down when it stops listening; then what was written by that moment is copied, and our
side is closed as the answer.

Only modules that cost next to nothing are imported: the command waits for this program to start.
"""

import _thread
import fcntl
import os
import select
import sys
import termios

READY = b"ready"
WHOLE = b"\0"
GAP = b"\1"

CHUNK_BYTES = 1 << 16
_MOST_UNREAD_BYTES = 1 << 20
"""What a pipe can hold at most, if the command made it larger; sockets and pseudo-terminals hold less."""


class Stream:
    """One stream of the command. Blocks where its original blocks, so that a slow reader slows the command."""

    def __init__(self, number: int) -> None:
        self.kept = frozenset({number, number + 2, number + 4})
        self._target, self._source, self._listener = number, number + 2, number + 4
        self.terminal = os.isatty(self._target)
        self._offering = True
        self._gap = False
        self._unread: int | None = None
        """Once cachemgr has stopped listening: how many bytes may have been written before that at most."""
        self._poll = select.poll()
        self._poll.register(self._source, select.POLLIN)
        self._poll.register(self._listener, select.POLLIN)
        if not _may_get_a_reader_again(self._target):
            # No events: only errors are told. The command learns of a gone reader at its next write, as without us.
            self._poll.register(self._target, 0)

    def copy(self) -> None:
        """Copy until the last writer or the reader of the original is gone; then both sides learn of it."""
        os.write(self._listener, READY)
        try:
            while data := self._next():
                if self.terminal:
                    self.follow_size()
                self._put(data)
                self._offer(data)
        except OSError:
            return
        finally:
            os.close(self._source)
            os.close(self._target)
            self._stop_offering()

    def follow_size(self) -> None:
        """Give the pseudo-terminal the size of the terminal.

        The kernel has told the command of the new size already, perhaps before we set it here; so it is told again.
        """
        try:
            size = fcntl.ioctl(self._target, termios.TIOCGWINSZ, bytes(8))
            if size != fcntl.ioctl(self._source, termios.TIOCGWINSZ, bytes(8)):
                fcntl.ioctl(self._source, termios.TIOCSWINSZ, size)
                _tell_the_group_of_a_new_size()
        except OSError:
            return

    def _next(self) -> bytes:
        """The next bytes; none when it is over."""
        while True:
            events = dict(self._poll.poll(None if self._unread is None else 0))
            if self._target in events:
                return b""
            if self._listener in events:
                self._poll.unregister(self._listener)
                self._unread = _MOST_UNREAD_BYTES
            if self._source in events:
                try:
                    return os.read(self._source, CHUNK_BYTES)
                except OSError:  # how a pseudo-terminal says that nobody has it open any more
                    return b""
            self._stop_offering()

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._target, rest) :]
            except BlockingIOError:  # somebody who shares the original made it so
                room = select.poll()
                room.register(self._target, select.POLLOUT)
                room.poll()

    def _offer(self, data: bytes) -> None:
        if not self._offering:
            return
        self._send(data)
        if self._unread is not None:
            self._unread -= len(data)
            if self._unread <= 0:
                self._stop_offering()

    def _send(self, data: bytes) -> None:
        try:
            os.write(self._listener, (GAP if self._gap else WHOLE) + data)
            self._gap = False
        except OSError:
            self._gap = True

    def _stop_offering(self) -> None:
        self._unread = None
        if self._offering:
            self._send(b"")
            self._offering = False
            os.close(self._listener)


def _may_get_a_reader_again(fd: int) -> bool:
    """A FIFO with a name: without a reader now, it may have one at the next write."""
    return os.readlink(f"/proc/self/fd/{fd}").startswith("/") and not os.isatty(fd)


def _tell_the_group_of_a_new_size() -> None:
    import signal

    os.kill(0, signal.SIGWINCH)


def _follow_sizes(terminals: list[Stream]) -> None:
    """Follow changes of size, also those that came while we were stopped. Signals are blocked until here."""
    import signal

    def follow(_number: int, _frame: object) -> None:
        for terminal in terminals:
            terminal.follow_size()

    for number in (signal.SIGWINCH, signal.SIGCONT):
        signal.signal(number, follow)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGWINCH, signal.SIGCONT))


def _keep_only(kept: frozenset[int]) -> None:
    """Close what is the command's and not ours to hold open: its input, and pipes whose end somebody waits for."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            os.closerange(int(name), int(name) + 1)


def _copy_aside(stream: Stream) -> _thread.LockType:
    """Copy in a thread; the lock is free when that has ended. A blocked stream must not block the other."""
    copying = _thread.allocate_lock()
    copying.acquire()

    def copy() -> None:
        try:
            stream.copy()
        finally:
            copying.release()

    try:
        _thread.start_new_thread(copy, ())
    except RuntimeError:  # there is no further thread; one stream that waits for the other would be worse than no tap
        sys.exit(1)
    return copying


def main(numbers: list[int]) -> None:
    """Copy these streams. A failure up to here ends the process before it is ready, and the command goes without."""
    streams = [Stream(number) for number in numbers]
    _keep_only(frozenset().union(*(stream.kept for stream in streams)))
    os.chdir("/")
    copying = [_copy_aside(stream) for stream in streams[1:]]
    if terminals := [stream for stream in streams if stream.terminal]:
        _follow_sizes(terminals)
    streams[0].copy()
    for each in copying:
        each.acquire()


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
