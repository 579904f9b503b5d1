"""What a launch publishes goes on to the mirror: in the background, by a process of its own.

The capture is in the local store first, and its name in the outbox. So the command ends when it ends, and a sender that
dies is succeeded by that of the next command. Only the first process of a container waits for its sender, as nothing
there outlives it.
"""

import os

from cachemgr import background
from cachemgr.bounded import within
from cachemgr.cache import Cache
from cachemgr.capture import Launch
from cachemgr.clock import Clock
from cachemgr.digest import Digest
from cachemgr.key import Key
from cachemgr.order import Order
from cachemgr.outbox import Outbox
from cachemgr.send import send_one
from cachemgr.store import records
from cachemgr.trouble import Trouble


class Forwarding:
    """The way from the local store to the mirror for one launch. Without a sender nothing is sent."""

    def __init__(self, order: Order, cache: Cache, clock: Clock, trouble: Trouble) -> None:
        self._cache, self._clock, self._trouble = cache, clock, trouble
        self._sender = order.sender
        self._outbox = None if order.sender is None else cache.outbox
        self._urgent = False
        self.senders: set[int] = set()
        """Processes that this launch started; they are not the command's."""
        self.pushed_bytes: int | None = 0
        """What this launch has sent itself; None where a sender sends some of it, perhaps after our end."""

    def resume(self) -> None:
        """Have what an earlier launch left sent, and say why it is still here."""
        if self._outbox is None:
            return
        waits = self._outbox.told()
        if waits is None and not self._is_batch(self._outbox):
            return
        told = self._outbox.trouble()
        if told is not None and waits is not None:
            self._trouble.errors[f"mirror {told.word}"] += 1
            self._trouble.say(f"{waits} since {told.since}: {told.reason}")
        self._start(self._outbox)

    def hand_over(self, key: Key, capture: Digest) -> None:
        """Have a capture that is in the local store now sent with the next sender that sets off.

        Raises:
            OSError: its name cannot be noted.
        """
        if self._outbox is not None:
            self._outbox.add(key, capture)
            self._urgent, self.pushed_bytes = True, None

    def record(self, launch: Launch) -> None:
        """Have the record of a launch sent: soon when it is ready, because a server may never get to its end, else with
        those of other launches of this host.

        Raises:
            OSError: it cannot be kept until then.
        """
        if self._outbox is not None:
            records.keep(self._outbox.records, launch)
            self._urgent |= launch.exit_code is None or self._outlives_nothing or self._is_batch(self._outbox)

    def set_off(self) -> None:
        """Start a sender if something was handed over that should not wait for the next launch.

        Raises:
            OSError: no process can be started.
        """
        if self._outbox is not None and self._urgent:
            self._urgent = False
            self._start(self._outbox)

    def _is_batch(self, outbox: Outbox) -> bool:
        return records.due(outbox.records, now=self._clock.now_ns() / 1e9)

    @property
    def _outlives_nothing(self) -> bool:
        """Whether this is the first process of a container, and with it everything ends."""
        return os.getpid() == 1

    def deliver(self, key: Key, capture: Digest, *, seconds: float) -> None:
        """Send a capture now, because others wait for it; what is not there in time is sent in the background.

        Raises:
            CacheError, OSError: it is not sent, and waits for the next sender.
        """
        if self._outbox is None or self._cache.mirror is None:
            return
        self._outbox.add(key, capture)
        try:
            mirror = self._cache.mirror.until(self._clock.monotonic() + seconds)
            sent = within(
                seconds,
                f"sending to {mirror}",
                lambda: send_one(self._cache.store, mirror, key, capture, now=self._clock.now_ns() / 1e9),
            )
        except BaseException:
            self._urgent, self.pushed_bytes = True, None
            raise
        self._outbox.sent(key, capture)
        if self.pushed_bytes is not None:
            self.pushed_bytes += sent

    def _start(self, outbox: Outbox) -> None:
        assert self._sender is not None, "there is an outbox only with a sender"
        self.senders.add(background.start(self._sender.argv, self._sender.environ, log=outbox.log))

    def finish(self, seconds: float) -> None:
        """Wait so long for the senders where they cannot outlive us."""
        if self._outlives_nothing and self.senders and not background.wait(self.senders, seconds):
            self._trouble.say(f"the container ends before everything is sent to {self._cache.mirror}")
