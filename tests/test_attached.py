"""The process that an attendant looks after, which is no child of its own."""

import os
import signal
import subprocess
import threading

import pytest

from cachemgr.attached import Process
from cachemgr.child import Ended
from cachemgr.cli.session import WallClock
from cachemgr.engine_log import EngineLog
from cachemgr.observed import unseen_end

PIDFD = pytest.mark.parametrize("pidfd", [True, False])


def watched(process: "subprocess.Popen[bytes]", pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> Process:
    def refused(_pid: int) -> int:
        raise OSError("not here")

    if not pidfd:
        monkeypatch.setattr(os, "pidfd_open", refused)
    return Process(process.pid)


@PIDFD
def test_the_end_of_a_process_is_seen_with_its_exit_code_until_its_parent_asks(
    pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for end, expected in (
        (None, Ended(3, None, left_behind=False)),
        (signal.SIGKILL, Ended(137, 9, left_behind=False)),
    ):
        with subprocess.Popen(["/bin/sh", "-c", "read line; exit 3"], stdin=subprocess.PIPE) as process:
            looked_after = watched(process, pidfd, monkeypatch)
            assert process.stdin is not None
            if end is None:
                process.stdin.close()
            else:
                process.send_signal(end)
            assert looked_after.wait(WallClock()) == expected


@PIDFD
def test_a_process_that_is_gone_and_reaped_has_no_known_end(pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["/bin/true"]) as process:
        process.wait()
        assert watched(process, pidfd, monkeypatch).wait(WallClock()) is None


def test_waiting_lasts_as_long_as_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        looked_after = watched(process, pidfd=True, monkeypatch=monkeypatch)
        ended = threading.Event()

        def wait() -> None:
            looked_after.wait(WallClock())
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        assert not ended.wait(0.3)
        process.kill()
        assert ended.wait(30)


def test_an_end_that_nobody_saw_is_a_failure_only_where_the_engine_said_so() -> None:
    quiet, failed = EngineLog(0.0), EngineLog(0.0)
    failed.feed(b"(EngineCore pid=7) Traceback (most recent call last):\n(EngineCore pid=7) ValueError: no\n", 1.0)
    assert unseen_end(None) is None
    assert unseen_end(quiet.seen()) is None
    assert unseen_end(failed.seen()) == Ended(1, None, left_behind=False)
