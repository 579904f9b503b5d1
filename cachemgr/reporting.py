"""Launches told to the service of a fleet: noted in our own state, and sent by a process of its own that nobody waits
for. The record in the store is what counts; a report is what a fleet sees at once."""

import os
from pathlib import Path

from cachemgr import background
from cachemgr.capture import Launch
from cachemgr.order import Order
from cachemgr.outbox import reports
from cachemgr.store import records


class Reporting:
    """The reports of one launch. Without a reporter there are none."""

    def __init__(self, order: Order, home: Path) -> None:
        self._reporter = order.reporter
        self._directory = None if order.reporter is None else reports(home, order.reporter.server)
        self.senders: set[int] = set()
        """Processes that this launch started; they are not the command's."""

    def record(self, launch: Launch) -> None:
        """Have the record of a launch sent, now.

        Raises:
            OSError: it cannot be kept, or no process can be started; the next launch sends what is kept.
        """
        if self._reporter is None or self._directory is None:
            return
        records.keep(self._directory, launch)
        log = self._directory.with_suffix(".log")
        self.senders.add(background.start(self._reporter.argv, self._reporter.environ, log=log))

    def finish(self, seconds: float) -> None:
        """Wait so long for what is being sent, where nothing outlives us: in the first process of a container."""
        if os.getpid() == 1 and self.senders:
            background.wait(self.senders, seconds)
