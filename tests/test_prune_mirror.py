"""Pruning a bucket: several at once, readers in the middle of a pull, records that cover the time, few listings."""

import os
import sys
import time
from pathlib import Path

import pytest

from cachemgr.errors import NotFoundError
from cachemgr.history import LastUses
from cachemgr.prune import artifacts
from cachemgr.prune.artifacts import Wish
from cachemgr.prune.limits import Limits
from cachemgr.store import Store, layout, pins
from cachemgr.store import captures as store_captures
from cachemgr.store.captures import Damaged, captures, has_layers, keys
from cachemgr.store.local import LocalStore
from cachemgr.store.outlines import Outlines
from cachemgr.store.pins import Pin
from cachemgr.store.s3 import S3Store
from cachemgr.store.transfer import Transfer
from cachemgr.verify import mend, verify
from tests.machines import Fleet
from tests.pruning import add, key_of, planned
from tests.s3_server import S3Server
from tests.stores import Recording, Wrapper, contents


@pytest.fixture
def bucket(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    for name, value in s3.environ.items():
        monkeypatch.setenv(name, value)
    return S3Store(s3.fresh(), tmp_path / "scratch")


@pytest.fixture
def ungraceful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for a day."""
    monkeypatch.setattr(store_captures, "GRACE_SECONDS", 0.0)


def prune(store: Store, limits: Limits) -> artifacts.Plan:
    plan = artifacts.plan(store, Wish(limits), outlines=Outlines(), uses=LastUses(), now=time.time() + 1)
    return artifacts.carry_out(store, plan, outlines=Outlines(), now=time.time() + 1)


def filled(store: Store, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        add(store, tmp_path / "live", name, kernels=["same", name])


def test_a_bucket_is_pruned_to_nothing_but_what_is_pinned(bucket: S3Store, tmp_path: Path, ungraceful: None) -> None:
    filled(bucket, tmp_path)
    pins.put(bucket, key_of("b"), Pin("me", "2026-01-01T00:00:00Z"))
    assert list(bucket.scan(layout.NEAR))
    done = prune(bucket, Limits(max_size=0))
    assert {gone.key for gone in done.artifacts} == {key_of("a"), key_of("c")}
    assert keys(bucket) == [key_of("b")]
    assert len(list(bucket.scan(layout.NEAR))) == 1
    assert all(has_layers(bucket, each) for each in captures(bucket, key_of("b"), []))
    pins.lift(bucket, key_of("b"))
    prune(bucket, Limits(max_size=0))
    assert set(contents(bucket)) == {"layout.json", "CACHEDIR.TAG"}


def test_prunes_at_once_end_as_one_would(bucket: S3Store, tmp_path: Path, ungraceful: None) -> None:
    filled(bucket, tmp_path)
    pins.put(bucket, key_of("a"), Pin("me", "2026-01-01T00:00:00Z"))
    pids = []
    for _number in range(3):
        pid = os.fork()
        if pid == 0:
            prune(S3Store(bucket._link.bucket, tmp_path / f"scratch-{os.getpid()}"), Limits(max_size=0))
            os._exit(0)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0, 0]
    assert keys(bucket) == [key_of("a")]
    assert not verify(bucket, depth="deep", now=time.time()).report.damaged


@pytest.mark.parametrize("when", ["before the layer", "within the layer"])
def test_a_reader_in_the_middle_of_a_pull_finishes_or_starts_again(
    bucket: S3Store, tmp_path: Path, ungraceful: None, when: str
) -> None:
    add(bucket, tmp_path / "live", "a")

    class Pruned(Wrapper):
        """Is pruned to nothing when somebody asks for a layer."""

        def open(self, name: str):  # type: ignore[no-untyped-def]
            opened = self.inner.open(name) if when == "within the layer" else None
            if name.startswith(layout.LAYERS):
                prune(self.inner, Limits(max_size=0))
            return self.inner.open(name) if opened is None else opened

    local = LocalStore(tmp_path / "local")
    moving = Transfer(Pruned(bucket), local, expired=lambda: False)
    moved = moving.carry(moving.plan([key_of("a")], now=time.time()))
    damaged: list[Damaged] = []
    there = captures(local, key_of("a"), damaged)
    assert not damaged
    assert all(has_layers(local, capture) for capture in there)
    assert bool(there) is (when == "within the layer")
    assert all(isinstance(failure.error, NotFoundError) for failure in moved.failures)
    add(bucket, tmp_path / "again", "a")
    moving = Transfer(bucket, local, expired=lambda: False)
    assert not moving.carry(moving.plan([key_of("a")], now=time.time())).failures
    assert captures(local, key_of("a"), [])


def test_a_plan_lists_each_kind_of_object_once(bucket: S3Store, tmp_path: Path) -> None:
    filled(bucket, tmp_path)
    recording = Recording(bucket)
    planned(recording, Limits(max_size=0))
    asked = [name for verb, name in recording.calls if verb in ("scan", "has")]
    assert len(asked) == len(set(asked)) <= 10, asked


def test_damage_in_a_bucket_is_found_and_mended(bucket: S3Store, tmp_path: Path) -> None:
    filled(bucket, tmp_path)
    (capture,) = captures(bucket, key_of("a"), [])
    name = layout.layer_name(capture.manifest.layers[0].digest)
    data = bytearray(bucket.read(name, limit=1 << 20))
    data[-1] ^= 1
    bucket.delete(name)
    bucket.put(name, bytes(data))
    bucket.delete(next(bucket.scan(layout.NEAR)).name)
    later = time.time() + 7200
    found = verify(bucket, now=later)
    assert sorted({fault.name.split("/")[0] for fault in found.report.faults}) == ["layers", "near"]
    mend(bucket, found.repair, launch="repair", now=later)
    assert not verify(bucket, depth="deep", now=later).report.damaged
    assert key_of("a") not in keys(bucket)


def test_a_mirror_is_pruned_by_records_only_where_they_cover_the_time(tmp_path: Path, s3: S3Server) -> None:
    place = s3.fresh()
    fleet = Fleet(tmp_path)
    variables = {
        **s3.environ,
        "CACHEMGR_MIRROR": f"s3://{place.name}/{place.prefix}",
        "CACHEMGR_MIRROR_ENDPOINT": s3.endpoint,
        "CACHEMGR_MIRROR_REGION": "us-east-1",
        "CACHEMGR_TRUST": "mirror=off",
    }
    machine = fleet.machine("one", **variables)
    key = machine.run(sys.executable, fleet.program, "one")["key"]
    machine.cachemgr("push", key)
    for words in (("--unused-for", "30d"), ("--old-versions",)):
        done = machine.cachemgr("prune", "--mirror", *words, "--dry-run", code=2)
        assert "launch records in s3://" in done.stderr
        assert "are missing" in done.stderr
    assert "no free bytes to count" in machine.cachemgr("prune", "--mirror", "--min-free", "1GB", code=2).stderr
    machine.cachemgr("pin", key, "--mirror", "--reason", "release 7")
    assert "release 7" in machine.cachemgr("prune", "--mirror", "--max-size", "0", "-y").stderr
    machine.cachemgr("unpin", key, "--mirror")
    done = machine.json("prune", "--mirror", "--older-than", "0s", "-y")["done"]
    assert [gone["key"] for gone in done["artifacts"]] == [key]
    assert done["later"] > 0, "its layer is young"
    assert machine.cachemgr("ls", "--mirror", "-q").stdout == ""
    assert machine.cachemgr("ls", "-q").stdout.split() == [key], "the local store is another matter"
