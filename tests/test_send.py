"""Sending in the background: what waits survives its sender, arrives whole, and says why it waits."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from cachemgr import background
from cachemgr.errors import CorruptError, DeniedError, MirrorError, StoreError
from cachemgr.key import derive
from cachemgr.outbox import Outbox, Trouble
from cachemgr.send import Sent, send, send_one
from cachemgr.store import Store, layout, records
from cachemgr.store.captures import captures
from cachemgr.store.local import LocalStore
from tests.kills import killed_at_every_step
from tests.stores import Corrupting, MemoryStore, Wrapper
from tests.test_capture import LAUNCH
from tests.test_crash import visible
from tests.test_transfer import KEY, NOW, OTHER, OTHER_KEY
from tests.trees import NOW_NS, build, changed, draft, publish_trees


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now_ns(self) -> int:
        return NOW_NS

    def monotonic(self) -> float:
        return sum(self.slept)

    def text(self) -> str:
        return "2027-01-15T08:00:00Z"

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "local")
    trees = build(tmp_path / "live", ["triton"])
    publish_trees(store, trees)
    publish_trees(store, trees, draft(OTHER))
    return store


@pytest.fixture
def outbox(tmp_path: Path, local: Store) -> Outbox:
    """Both captures wait."""
    made = Outbox(tmp_path / "outbox")
    for key in (KEY, OTHER_KEY):
        for capture in captures(local, key, []):
            made.add(key, capture.digest)
    return made


@pytest.fixture
def mirror(tmp_path: Path) -> MemoryStore:
    return MemoryStore(tmp_path / "scratch")


def sent(outbox: Outbox, local: Store, mirror: Store, *, clock: Clock | None = None, patience: float = 0.0) -> Sent:
    return send(outbox, local, mirror, clock=clock or Clock(), patience=patience, chance=lambda: 0.5)


def test_what_waits_arrives_and_waits_no_more(outbox: Outbox, local: LocalStore, mirror: MemoryStore) -> None:
    done = sent(outbox, local, mirror)
    assert (done.captures, done.dropped) == (2, ())
    assert visible(mirror) == visible(local)
    assert outbox.waiting() == {}
    assert sent(outbox, local, mirror) == Sent(0, 0, 0, ()), "and nothing is an answer too"
    assert len(list(mirror.scan(layout.NEAR))) == 2


def test_only_what_waits_is_sent(tmp_path: Path, local: LocalStore, mirror: MemoryStore) -> None:
    outbox = Outbox(tmp_path / "one")
    (one,) = captures(local, KEY, [])
    outbox.add(KEY, one.digest)
    sent(outbox, local, mirror)
    assert visible(mirror) == [one.digest]


def test_what_is_added_while_it_sends_is_sent_as_well(
    tmp_path: Path, outbox: Outbox, local: LocalStore, mirror: MemoryStore
) -> None:
    factors = changed("vllm.max_model_len", "1")
    publish_trees(local, build(tmp_path / "live", ()), draft(factors))
    late = [capture.digest for capture in captures(local, derive(factors), [])]

    class Adding(Wrapper):
        def put(self, name: str, data: bytes) -> bool:
            if not mirror.has(name):
                outbox.add(derive(factors), late[0])
            return super().put(name, data)

    sent(outbox, local, Adding(mirror))
    assert late[0] in visible(mirror)


def test_a_mirror_that_fails_leaves_it_waiting_and_the_reason_for_the_next_to_tell(
    outbox: Outbox, local: LocalStore, mirror: MemoryStore
) -> None:
    before = outbox.waiting()

    class Denying(Wrapper):
        def put(self, name: str, data: bytes) -> bool:
            raise MirrorError("the mirror refuses", word="denied")

    with pytest.raises(StoreError):
        sent(outbox, local, Denying(mirror))
    assert outbox.waiting() == before
    assert outbox.trouble() == Trouble("denied", "the mirror refuses", "2027-01-15T08:00:00Z")
    sent(outbox, local, mirror)
    assert outbox.trouble() is None


def test_it_is_tried_again_with_growing_pauses_and_not_for_ever(
    outbox: Outbox, local: LocalStore, mirror: MemoryStore
) -> None:
    class Failing(Wrapper):
        word = "unreachable"

        def put(self, name: str, data: bytes) -> bool:
            raise MirrorError("no route", word=self.word)

    clock, failing = Clock(), Failing(mirror)
    with pytest.raises(StoreError):
        sent(outbox, local, failing, clock=clock, patience=100.0)
    assert clock.slept == [2.0, 4.0, 8.0, 16.0, 32.0]
    failing.word = "denied"
    with pytest.raises(StoreError):
        sent(outbox, local, failing, clock=clock, patience=100.0)
    assert clock.slept == [2.0, 4.0, 8.0, 16.0, 32.0], "who is denied is denied again"

    class Once(Wrapper):
        failed = False

        def put(self, name: str, data: bytes) -> bool:
            if not self.failed:
                self.failed = True
                raise MirrorError("slow down", word="throttled")
            return super().put(name, data)

    clock = Clock()
    assert sent(outbox, local, Once(mirror), clock=clock, patience=100.0).captures == 2
    assert clock.slept == [2.0]
    assert outbox.trouble() is None


@pytest.mark.parametrize("damaged", ["layers/", "artifacts/"])
def test_what_can_never_be_sent_is_dropped_and_said(
    damaged: str, outbox: Outbox, local: LocalStore, mirror: MemoryStore
) -> None:
    done = sent(outbox, Corrupting(local, damaged), mirror)
    assert done.captures == 0
    assert len(done.dropped) == 2
    assert outbox.waiting() == {}
    outbox.add(KEY, captures(local, OTHER_KEY, [])[0].digest)
    sent(outbox, local, mirror)
    assert outbox.waiting() == {}, "a capture that was removed meanwhile"


def test_what_cannot_be_read_now_waits(outbox: Outbox, local: LocalStore, mirror: MemoryStore) -> None:
    class Closed(Wrapper):
        def read(self, name: str, *, limit: int) -> bytes:
            if name.startswith("artifacts/"):
                raise DeniedError(f"cannot read `{name}` in {self}")
            return super().read(name, limit=limit)

    with pytest.raises(StoreError, match="cannot read `artifacts/"):
        sent(outbox, Closed(local), mirror)
    assert sum(map(len, outbox.waiting().values())) == 2
    (key, waiting), *_ = outbox.waiting().items()
    with pytest.raises(CorruptError):
        send_one(Closed(local), mirror, key, next(iter(waiting)), now=NOW)


@pytest.mark.slow
def test_kill_9_at_every_step_loses_nothing(outbox: Outbox, local: LocalStore, tmp_path: Path) -> None:
    root = tmp_path / "mirror"
    for _step in killed_at_every_step(lambda: sent(outbox, local, LocalStore(root))):
        there = set(visible(LocalStore(root)))
        waiting = {capture for each in outbox.waiting().values() for capture in each}
        assert there | waiting == set(visible(local))
    assert visible(LocalStore(root)) == visible(local)


def test_strange_files_in_the_outbox_are_no_captures(outbox: Outbox, tmp_path: Path) -> None:
    before = outbox.waiting()
    for name in ("lock", "log", "failure.json", "k1-xy.zz", ".hidden"):
        (tmp_path / "outbox" / name).write_text("{")
    assert outbox.waiting() == before
    assert outbox.trouble() is None
    assert Outbox(tmp_path / "nowhere").waiting() == {}


def test_one_capture_is_sent_at_once_or_the_reason_is_raised(local: LocalStore, mirror: MemoryStore) -> None:
    (one,) = captures(local, KEY, [])
    with pytest.raises(CorruptError):
        send_one(Corrupting(local, "layers/"), mirror, KEY, one.digest, now=NOW)
    send_one(local, mirror, KEY, one.digest, now=NOW)
    assert visible(mirror) == [one.digest]


def test_a_process_in_the_background_has_nothing_of_ours(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; print(os.getsid(0) == os.getpid(), sys.stdin.read(), len(os.listdir('/proc/self/fd')),"
        "signal.pthread_sigmask(signal.SIG_BLOCK, []), file=sys.stderr)"
    )
    log = tmp_path / "deep" / "log"
    read, write = os.pipe()
    os.set_inheritable(write, True)
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        pid = background.start([sys.executable, "-c", code], os.environ, log=log)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    os.close(read)
    os.close(write)
    assert background.wait([pid], 60.0)
    assert log.read_text() == "True  4 set()\n"


def test_waiting_for_the_background_has_an_end(tmp_path: Path) -> None:
    pid = background.start(["/bin/sleep", "60"], {}, log=tmp_path / "log")
    begun = time.monotonic()
    assert not background.wait([pid], 0.2)
    assert time.monotonic() - begun < 30
    os.kill(pid, signal.SIGKILL)
    assert background.wait([pid], 60.0)
    assert background.wait([pid], 0.0), "somebody reaped it before"


def test_a_machine_that_may_write_captures_only_keeps_its_records(
    outbox: Outbox, local: LocalStore, mirror: MemoryStore
) -> None:
    class Limited(Wrapper):
        def put(self, name: str, data: bytes) -> bool:
            if name.startswith("launches/"):
                raise DeniedError(f"cannot write `{name}` in {self}")
            return super().put(name, data)

    records.keep(outbox.records, LAUNCH)
    done = send(outbox, local, Limited(mirror), clock=Clock(), patience=0.0)
    assert (done.captures, done.records, outbox.trouble()) == (2, 0, None)
    assert len(list(outbox.records.glob("*.json"))) == 1
    assert send(outbox, local, mirror, clock=Clock(), patience=0.0).records == 1
    assert list(records.launches(mirror)) == [LAUNCH]
