"""A line on a terminal that says how far a transfer is; nothing anywhere else."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cachemgr.cli import output

_STEP_SECONDS = 0.1
_BAR = 24


class Progress:
    """Counts bytes from several threads, and shows them on stderr."""

    def __init__(self) -> None:
        self._total, self._done = 0, 0
        self._begun = time.monotonic()
        self._shown = 0.0
        self._lock = threading.Lock()
        self._terminal = sys.stderr.isatty()

    @contextmanager
    def of(self, total: int) -> Iterator[None]:
        """Show what is moved of `total` bytes meanwhile, and clear the line at the end."""
        self._total, self._begun = total, time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                if self._shown:
                    self._write("")

    def moved(self, count: int) -> None:
        """So many bytes more have moved."""
        if not self._terminal:
            return
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._shown >= _STEP_SECONDS:
                self._shown = now
                self._write(self._line(now - self._begun))

    @staticmethod
    def _write(line: str) -> None:
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()

    def _line(self, seconds: float) -> str:
        share = min(self._done / max(self._total, 1), 1.0)
        bar = "█" * round(share * _BAR)
        rate = output.size(round(self._done / max(seconds, 0.001)))
        return f"{bar:░<{_BAR}} {share:4.0%} · {output.size(self._done)} of {output.size(self._total)} · {rate}/s"
