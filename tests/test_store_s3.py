"""The store in a bucket: the contract on a real S3 server, and what a bucket and a network can suffer from."""

import time
from pathlib import Path

import pytest

from cachemgr.store import Store
from cachemgr.store.s3 import S3Store
from tests.s3_server import S3Server
from tests.store_contract import StoreContract

pytestmark = pytest.mark.full

LIMIT = 1 << 20


class TestS3Store(StoreContract):
    @pytest.fixture
    def store(self, s3: S3Server, tmp_path: Path) -> Store:
        return s3.store(tmp_path)

    @pytest.fixture
    def broken(self, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        for name, value in s3.environ_of("stranger").items():
            monkeypatch.setenv(name, value)
        return S3Store(s3.fresh(), tmp_path / "mirror" / "tmp")

    # The times of a bucket are its server's, which no test can set.

    def test_putting_again_does_not_refresh(self, store: Store) -> None:  # type: ignore[override]
        store.put("a", b"1")
        made = next(store.scan("")).modified
        time.sleep(1.1)  # S3 counts whole seconds
        assert store.put("a", b"1") is False
        assert next(store.scan("")).modified == made

    def test_a_refreshed_object_looks_new(self, store: Store) -> None:  # type: ignore[override]
        store.put("a", b"1")
        made = next(store.scan("")).modified
        time.sleep(1.1)
        assert store.refresh("a") is True
        assert made + 1 <= next(store.scan("")).modified <= made + 60
        assert store.read("a", limit=LIMIT) == b"1"
