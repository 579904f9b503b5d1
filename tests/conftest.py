"""Every test runs in a home of its own, without settings of the machine, and on a fixed clock."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cachemgr import running
from cachemgr.store import Store
from cachemgr.store.local import LocalStore

pytest_plugins = ["tests.s3_server", "tests.databases"]
pytest.register_assert_rewrite("tests.store_contract", "tests.stores", "tests.trees")

settings.register_profile(
    "cachemgr",
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("cachemgr")


for _ignored in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    # Who starts the tests in the background has a shell that ignores these, and the commands under test would, too.
    if signal.getsignal(_ignored) == signal.SIG_IGN:
        signal.signal(_ignored, signal.SIG_DFL)

_BY_THE_DOZEN = frozenset(
    {
        "test_attached",
        "test_auto_prune",
        "test_bench",
        "test_catalogue_files",
        "test_child",
        "test_cli_catalogue",
        "test_crash",
        "test_crowd",
        "test_docs",
        "test_doctor",
        "test_doctor_launches",
        "test_doctor_mirror",
        "test_doctor_places",
        "test_faults",
        "test_fleet",
        "test_fleet_prewarm",
        "test_flight",
        "test_fuzz",
        "test_images",
        "test_keep",
        "test_kubernetes",
        "test_levels",
        "test_links",
        "test_loading",
        "test_merging",
        "test_mirror",
        "test_network_faults",
        "test_oci",
        "test_plugin",
        "test_plugin_node",
        "test_plugin_shim",
        "test_policies",
        "test_prewarm",
        "test_prune_crash",
        "test_prune_faults",
        "test_prune_mirror",
        "test_quarantine",
        "test_ranks",
        "test_redteam_machine",
        "test_registry",
        "test_s3_connect",
        "test_secrets",
        "test_seed",
        "test_server_access",
        "test_server_api",
        "test_server_page",
        "test_server_process",
        "test_shapes",
        "test_sign",
        "test_soak",
        "test_target",
        "test_tripwires",
        "test_verify",
        "test_vllm_launch",
        "test_vllm_reports",
    }
)
"""Files whose tests start commands, engines and servers by the dozen: all of them are slow."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.stem in _BY_THE_DOZEN:
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests first: a worker that takes one last works on alone."""
    long = {item.path for item in items if item.get_closest_marker("e2e") or item.get_closest_marker("slow")}
    items.sort(key=lambda item: (not item.get_closest_marker("e2e"), item.path not in long))


NOW = 1_800_000_000
NOW_NS = NOW * 1_000_000_000


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory without anything in it."""
    made = tmp_path_factory.mktemp("home")
    for name in [name for name in os.environ if name.startswith(("CACHEMGR_", "XDG_", "VLLM_"))]:
        if not name.startswith("CACHEMGR_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(made))
    return made


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For launches in this process, which has servers of other tests as children, too: they are not what a command left
    behind, and not waited for. A launch makes its process the one that inherits orphans, which no other test may
    notice."""
    monkeypatch.setattr(running, "LINGER_SECONDS", 0.0)
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


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
