"""Every test runs in a home of its own, without settings of the machine, and on a fixed clock."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cachemgr.store import Store
from cachemgr.store.local import LocalStore

pytest.register_assert_rewrite("tests.store_contract", "tests.stores", "tests.trees")

settings.register_profile(
    "cachemgr",
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("cachemgr")

NOW = 1_800_000_000
NOW_NS = NOW * 1_000_000_000


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory without anything in it."""
    made = tmp_path_factory.mktemp("home")
    for name in [name for name in os.environ if name.startswith(("CACHEMGR_", "XDG_", "VLLM_"))]:
        if name != "CACHEMGR_TEST_TREES":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(made))
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty local store."""
    return LocalStore(tmp_path / "store")


MakeDisk = Callable[[int], Path]


@pytest.fixture
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeDisk]:
    """Makes real file systems of so many bytes, where this user may mount."""
    made: list[Path] = []

    def make(size: int) -> Path:
        place = tmp_path_factory.mktemp("disk")
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("this user cannot mount a file system")
        made.append(place)
        return place

    yield make
    for place in made:
        subprocess.run(["umount", str(place)], check=True)
