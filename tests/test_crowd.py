"""Sixteen publishers with overlapping keys, readers, removers and killers at once: nothing incomplete is ever seen and
nothing is lost, in a directory and in a bucket. `python -m tests.crowd --help` does the same for longer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.s3_server import S3Server

pytestmark = pytest.mark.slow


def met(directory: Path, *options: str, **environ: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.crowd", "--directory", str(directory), *options],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert (told["wrong"], done.returncode) == ([], 0), done.stderr
    return told


def test_a_crowd_on_a_directory_loses_nothing(tmp_path: Path) -> None:
    told = met(tmp_path, "--seconds", "8", "--at-least", "16")
    assert told["files_checked"] > told["pulled"]
    assert told["record_objects"] < told["recorded"], "rolled up"


def test_a_crowd_on_a_bucket_loses_nothing(tmp_path: Path, s3: S3Server) -> None:
    bucket = s3.fresh()
    where = ("--endpoint", s3.endpoint, "--bucket", bucket.name, "--prefix", bucket.prefix)
    told = met(tmp_path, "--seconds", "8", "--at-least", "16", "--kill-every", "0.3", *where, **s3.environ)
    assert told["files_checked"] > 16
