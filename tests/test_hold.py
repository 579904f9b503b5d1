"""Who uses a live directory: seen across processes, told apart from the dead, without any lock."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from cachemgr import hold
from cachemgr.hold import Hold, describe_self, others

NOW = time.time()


def names(directory: Path, launch: str = "me", now: float = NOW) -> list[str]:
    return [holder.launch for holder in others(str(directory), launch, now=now)]


def test_a_holder_is_seen_by_others_and_gone_when_it_leaves(tmp_path: Path) -> None:
    held = Hold.take(str(tmp_path), describe_self("other", "compiling"))
    assert names(tmp_path) == ["other"]
    assert names(tmp_path, launch="other") == [], "not by itself"
    held.release()
    assert names(tmp_path) == []
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_holder_in_another_process_is_alive_until_that_process_is_dead(tmp_path: Path) -> None:
    code = (
        "import sys, time; from cachemgr.hold import *; "
        f"Hold.take({str(tmp_path)!r}, describe_self('other', 'warm')); print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert names(tmp_path) == ["other"]
    process.kill()
    process.wait()
    process.stdout.close()
    assert names(tmp_path) == []
    assert list(tmp_path.rglob("*.json")) == [], "records of the dead are removed"


def planted(directory: Path, **changes: object) -> Path:
    """A record of this process, changed as if somebody else had written it."""
    Hold.take(str(directory), describe_self("other", "compiling"))
    (path,) = directory.rglob("other.json")
    holder = msgspec.to_builtins(describe_self("other", "compiling"))
    path.write_text(json.dumps(holder | {"process": holder["process"] | changes}))
    return path


def test_a_process_number_that_was_used_again_is_not_the_holder(tmp_path: Path) -> None:
    planted(tmp_path, started="1")
    assert names(tmp_path) == []


def test_a_holder_in_another_container_or_host_counts_while_it_beats(tmp_path: Path) -> None:
    path = planted(tmp_path, namespace="pid:[1]", pid=1, started="1")
    assert names(tmp_path) == ["other"]
    os.utime(path, (NOW - hold.STALE_SECONDS - 1, NOW - hold.STALE_SECONDS - 1))
    assert names(tmp_path) == []


def test_a_beat_keeps_a_record_fresh(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    held = Hold.take(str(tmp_path), describe_self("other", "warm"))
    (path,) = tmp_path.rglob("other.json")
    os.utime(path, (1, 1))
    held.beat()
    assert path.stat().st_mtime == 1, "not before it is time"
    monkeypatch.setattr(hold, "BEAT_SECONDS", 0.0)
    held.beat()
    assert path.stat().st_mtime > 1


def test_torn_and_foreign_records_are_nobody(tmp_path: Path) -> None:
    folder = tmp_path / ".cachemgr-held"
    folder.mkdir()
    (folder / "torn.json").write_text('{"launch": "x"')
    (folder / "foreign.json").write_text("[1, 2]")
    (folder / "link.json").symlink_to("/dev/null")
    assert names(tmp_path) == []


def test_what_is_compiled_keeps_nobody_waiting(tmp_path: Path) -> None:
    held = Hold.take(str(tmp_path), describe_self("other", "compiling", "three"))
    held.compiled()
    (other,) = others(str(tmp_path), "me", now=NOW)
    assert (other.purpose, other.sight) == ("warm", "three")
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_one_comes_while_the_other_goes(tmp_path: Path) -> None:
    """The last to leave removes the directory that the next has just made."""
    failures: list[OSError] = []

    def come_and_go(launch: str) -> None:
        try:
            for _ in range(400):
                Hold.take(str(tmp_path), describe_self(launch, "warm")).release()
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=come_and_go, args=(f"launch-{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
