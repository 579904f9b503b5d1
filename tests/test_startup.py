"""What stands before an engine's start costs little: no process of ours loads anything heavy on the way there.

How long it takes is for `benchmarks/startup.py`; what is loaded decides about it, and does not depend on the machine.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.machines import Fleet, Machine

HEAVY = frozenset(
    {
        "alembic", "boto3", "botocore", "cryptography", "jinja2", "numpy", "prometheus_client", "psycopg", "pynvml",
        "ray", "sqlalchemy", "starlette", "torch", "triton", "urllib3", "uvicorn", "vllm",
    }
)  # fmt: skip
SHIM = "import cachemgr.plugin; cachemgr.plugin.register()"


def loaded(machine: Machine, *words: str, **more: str) -> set[str]:
    """Packages that an interpreter with these words loads, by its own log. What it starts is not in it."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words],
        env={**machine.environ, **more},
        cwd=machine.root,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    lines = [line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    found = {line.partition(".")[0] for line in lines}
    assert "cachemgr" in found, "the log says nothing"
    return found


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_help_loads_nothing_heavy(fleet: Fleet) -> None:
    assert loaded(fleet.machine("one"), "-m", "cachemgr", "--help") & HEAVY == set()


@pytest.mark.slow
def test_a_launch_loads_nothing_heavy_whether_it_hits_or_not(fleet: Fleet) -> None:
    run = ("-m", "cachemgr", "run", "--", *fleet.command("a", "b"))
    assert loaded(fleet.machine("one"), *run) & HEAVY == set()
    second = fleet.machine("two")
    assert loaded(second, *run) & HEAVY == set()
    assert second.run(*fleet.command("a", "b"))["verdict"] == "used", "or that was no hit"
    assert loaded(second, "-m", "cachemgr", "run", "--", *fleet.command("c")) & HEAVY == set()


@pytest.mark.slow
def test_a_mirror_that_fails_is_not_asked_for_by_what_needs_none(fleet: Fleet) -> None:
    nowhere = {"CACHEMGR_MIRROR": "s3://bucket/prefix", "CACHEMGR_OFFLINE": "1"}
    assert loaded(fleet.machine("one"), "-m", "cachemgr", "run", "--", *fleet.command("a"), **nowhere) & HEAVY == set()


@pytest.mark.parametrize("enabled", ["0", "1"])
def test_the_plugin_loads_the_standard_library_only(fleet: Fleet, enabled: str) -> None:
    bare = loaded(fleet.machine("one"), "-c", "import cachemgr")
    alone = loaded(fleet.machine("one"), "-c", SHIM, CACHEMGR_ENABLE=enabled)
    assert alone - bare - sys.stdlib_module_names <= {"org"}  # what `copy` tries to import, for Jython


@pytest.mark.slow
def test_what_asks_the_catalogue_loads_it_and_no_more(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    machine.run(*fleet.command("a"))
    assert loaded(machine, "-m", "cachemgr", "ls") & HEAVY <= {"alembic", "sqlalchemy"}
    assert loaded(machine, "-m", "cachemgr", "size") & HEAVY == set()
    assert loaded(machine, "-m", "cachemgr", "lookup", "--", *fleet.command("a")) & HEAVY == set()
