"""Watching: what a start wrote again without compiling anything is not added, and what it compiled is."""

import json
import os
import time
from pathlib import Path

import pytest

from cachemgr import digest
from cachemgr.domains import Target
from cachemgr.domains.scrub import WINNER
from cachemgr.domains.torch import INDUCTOR
from cachemgr.watch import Watch, Work
from tests.trees import write

TUNED = f"aa/{'0' * 64}.best_config"
BLOCKS = (1024, 512)


def winner(block: int, took: int) -> bytes:
    """As Inductor writes it: two candidates that are about as fast as each other."""
    return json.dumps({"XBLOCK": block, "num_warps": 4, "configs_hash": "3ca5", "time_taken_ms": took}).encode()


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """A start that was offered a winner and a kernel's file, and has read neither."""
    held = {TUNED: winner(BLOCKS[0], 29), "triton/0/KEY/k.cubin": b"kernel"}
    write(tmp_path, held)
    digests = {path: _digest(WINNER.detach(data, ()) if path == TUNED else data) for path, data in held.items()}
    target = Target(INDUCTOR, str(tmp_path), ours=True)
    return Watch([target], {"inductor": frozenset(held)}, {"inductor": digests})


def _digest(data: bytes) -> digest.Digest:
    running = digest.hasher()
    running.update(data)
    return digest.finish(running)


def written(watch: Watch, path: Path, data: bytes) -> Work:
    """A start writes a file as torch does, and renames it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(".1.2.tmp")
    beside.write_bytes(data)
    os.replace(beside, path)
    return watch.work()


@pytest.mark.parametrize(("beside", "verdict"), [(False, "inert"), (True, "unknown")])
def test_a_read_that_a_start_beside_it_has_forgotten_is_not_known(
    watch: Watch, tmp_path: Path, beside: bool, verdict: str
) -> None:
    if beside:
        time.sleep(0.02)  # clocks of file systems go in steps
        assert (tmp_path / TUNED).read_bytes()
        Watch([Target(INDUCTOR, str(tmp_path), ours=True)], {}, {})
    assert watch.work().verdict == verdict


def test_a_read_that_nobody_has_forgotten_is_one(watch: Watch, tmp_path: Path) -> None:
    assert (tmp_path / TUNED).read_bytes()
    assert watch.work().verdict == "used"


@pytest.mark.parametrize("block", BLOCKS)
def test_a_winner_that_is_written_out_again_is_not_added(watch: Watch, tmp_path: Path, block: int) -> None:
    assert written(watch, tmp_path / TUNED, winner(block, 32)).added == {"inductor": 0}


def test_a_kernel_that_was_compiled_for_another_winner_is_added(watch: Watch, tmp_path: Path) -> None:
    written(watch, tmp_path / TUNED, winner(BLOCKS[1], 32))
    work = written(watch, tmp_path / "triton/0/OTHER/k.cubin", b"another kernel")
    assert (work.added, work.examples) == ({"inductor": 1}, ("inductor/triton/0/OTHER/k.cubin",))


@pytest.mark.parametrize(
    ("path", "data"),
    [
        (f"aa/{'1' * 64}.best_config", winner(BLOCKS[0], 29)),
        (TUNED, b'{"XBLOCK"'),
        ("triton/0/KEY/k.cubin", b"compiled"),
    ],
    ids=["the first winner of a kernel", "half a winner", "a kernel with other bytes"],
)
def test_what_is_new_or_no_winner_is_added(watch: Watch, tmp_path: Path, path: str, data: bytes) -> None:
    assert written(watch, tmp_path / path, data).added == {"inductor": 1}
