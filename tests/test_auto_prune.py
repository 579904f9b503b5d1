"""The local budget holds by itself: after a publish that leaves it nearly full, what was used least goes; pins stay."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.machines import Fleet


class Host:
    """A machine with a small budget, and a program whose every graph takes some 5 kB of store and live directory."""

    def __init__(self, tmp_path: Path, **variables: str) -> None:
        fleet = Fleet(tmp_path)
        self.machine = fleet.machine("one", **variables)
        self.program = fleet.program

    def compile(self, *graphs: str) -> dict[str, Any]:
        report = self.machine.run(sys.executable, self.program, *graphs)
        for path in self.machine.store.rglob("*.zst"):
            os.utime(path, (time.time() - 2 * 86400,) * 2)
        return report

    def artifacts(self) -> list[str]:
        return [row["key"] for row in reversed(self.machine.json("ls")["artifacts"])]

    @property
    def live(self) -> set[str]:
        return {path.name for path in (self.machine.home / ".cache/vllm/cachemgr").glob("k1-*")}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path, CACHEMGR_BUDGET="600kB")


@pytest.mark.slow  # 13 launches: 8 s
def test_live_directories_go_first_and_then_the_least_used_artifacts(host: Host) -> None:
    first = host.compile("g0")["key"]
    told, keys = "", [first]
    for number in range(1, 12):
        report = host.compile(f"g{number}")
        keys.append(report["key"])
        assert report["published"], "room was made before it was needed"
        told += report["stderr"]
    assert "made room: " in told
    assert keys[-1] in host.artifacts()
    assert len(host.live) < len(keys)
    again = host.compile("g11")
    assert (again["result"], again["verdict"]) == ("exact", "used")


def test_what_is_pinned_is_not_made_room_with(tmp_path: Path) -> None:
    host = Host(tmp_path, CACHEMGR_BUDGET="300kB")
    first, second = (host.compile(f"g{number}")["key"] for number in range(2))
    host.machine.cachemgr("pin", first)
    for number in range(2, 10):
        host.compile(f"g{number}")
    assert first in host.artifacts()
    assert second not in host.artifacts()


@pytest.mark.parametrize("variables", [{"CACHEMGR_AUTO_PRUNE": "false"}, {"CACHEMGR_BUDGET": "0"}])
def test_nothing_goes_where_it_is_switched_off_or_has_no_limit(tmp_path: Path, variables: dict[str, str]) -> None:
    host = Host(tmp_path, **{"CACHEMGR_BUDGET": "60kB", **variables})
    keys = [host.compile(f"g{number}")["key"] for number in range(3)]
    assert {f"k1-{key[3:]}" for key in keys} <= host.live


def test_a_store_that_does_not_count_loses_nothing(tmp_path: Path) -> None:
    """One on a file server: this host's budget says nothing about it, and others use it."""
    from cachemgr.prune.automatic import Stored, make_room
    from cachemgr.prune.superseded import Looked
    from cachemgr.store.captures import keys, unasked
    from cachemgr.store.local import LocalStore
    from cachemgr.store.outlines import Outlines
    from tests.conftest import NOW
    from tests.pruning import add, settle

    store = LocalStore(tmp_path / "store")
    key = add(store, tmp_path / "live", "a")
    settle(tmp_path / "store")
    for counts in (False, True):
        looked = Looked(tmp_path / "looked")
        stored = Stored(store, Outlines(), unasked, tmp_path / "locks" / "prune.lock", looked, counts=counts)
        freed = make_room(stored, [str(tmp_path / "vllm")], [], 10**6, prune="p", now=float(NOW))
        assert freed is not None
        assert freed.artifacts == counts
        assert keys(store) == ([] if counts else [key])
