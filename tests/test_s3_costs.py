"""What an artifact costs in requests. It depends on how many captures and layers it has, never on how many files."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachemgr.key import derive, folder
from cachemgr.store import layout
from cachemgr.store.captures import captures
from cachemgr.store.s3 import S3Store
from tests import s3_faults
from tests.s3_faults import FaultyServer
from tests.s3_server import S3Server
from tests.trees import FACTORS, build, draft, publish_trees

pytestmark = pytest.mark.full

KEY = derive(FACTORS)


@pytest.fixture(scope="module")
def between(running_s3: S3Server) -> Iterator[tuple[FaultyServer, S3Server]]:
    """A server that counts."""
    with s3_faults.faulty(running_s3.endpoint) as server:
        yield server, S3Server(server.endpoint, running_s3.bucket, running_s3.environ)


@pytest.mark.usefixtures("s3")
def test_an_exact_artifact_is_one_listing_a_manifest_and_a_layer(
    between: tuple[FaultyServer, S3Server], tmp_path: Path
) -> None:
    server, place = between
    server.clear()
    store = place.store(tmp_path)
    publish_trees(store, build(tmp_path / "live"), draft())
    prefix = store._link.bucket.prefix

    asked = [each.replace(f"/{place.bucket}/{prefix}/", "").replace(f"{prefix}/", "") for each in server.asked]
    kinds = [" ".join(re.findall(r"\w+", each)[:2]) for each in asked]
    assert kinds[:9] == [
        "GET layout",
        "PUT layout",
        "PUT layout",  # once per process that writes: whether the server creates conditionally
        "PUT CACHEDIR",
        "GET layout",
        "LIST artifacts",
        "GET layout",
        "PUT layers",
        "PUT artifacts",
    ]
    assert set(kinds[9:]) == {"PUT entries", "PUT near"}

    server.clear()
    found = captures(store, KEY, [])
    files = sum(
        len(unit.files)
        for capture in found
        for section in capture.manifest.layers[0].sections
        for unit in section.units
    )
    with store.open(layout.layer_name(found[0].manifest.layers[0].digest)) as stream:
        assert stream.read()
    assert files > 10
    assert [asked.split("/")[0] for asked in server.asked] == ["LIST tests", "GET ", "GET "]
    assert server.asked[0] == f"LIST {prefix}/artifacts/{folder(KEY)}/"


@pytest.mark.usefixtures("s3")
def test_a_listing_costs_a_request_for_every_thousand_objects(
    between: tuple[FaultyServer, S3Server], tmp_path: Path
) -> None:
    server, place = between
    store: S3Store = place.store(tmp_path)
    for number in range(3):
        store.put(f"a/{number}", b"")
    server.clear()
    assert len(list(store.scan("a/"))) == 3
    assert len(server.asked) == 1


@pytest.mark.usefixtures("s3")
def test_a_layer_is_sent_once_also_by_a_process_that_does_not_know_the_server(
    between: tuple[FaultyServer, S3Server], tmp_path: Path
) -> None:
    """What finds out about conditions by writing twice is small."""
    server, place = between
    store, layer = place.store(tmp_path), b"x" * 100_000
    server.clear()
    assert store.put("a", layer) is True
    assert [asked.split("/")[0].strip() for asked in server.asked] == ["LIST tests", "PUT"]
    assert store.put("a", layer) is False
    server.clear()
    assert store.put("b", b"") is True
    assert [asked.split("/")[0].strip() for asked in server.asked] == ["PUT", "PUT"]
