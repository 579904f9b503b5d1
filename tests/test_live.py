"""Live directories: who gets the shared ones, and who gets his own."""

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from cachemgr import live
from cachemgr.domains import TORCH_PROGRAM, VLLM, Domain
from cachemgr.hold import Purpose
from cachemgr.key import Key
from cachemgr.live import Claim, Room

NOW = time.time()


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"VLLM_CACHE_ROOT": str(tmp_path / "root"), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}


def entered(
    environ: Mapping[str, str],
    launch: str,
    sight: str,
    purpose: Purpose = "warm",
    domains: tuple[Domain, ...] = VLLM,
    *,
    key: str = "0",
) -> Room:
    claim = Claim(Key(f"k1:{key * 32}"), launch, purpose, sight)
    return live.enter(environ, domains, claim, now=NOW, notes=[])


def test_launches_of_another_sight_get_a_root_of_their_own(environ: dict[str, str]) -> None:
    first = entered(environ, "first", "three")
    second = entered(environ, "second", "five", key="1")
    assert (first.private, second.private) == (False, True)
    assert first.root != second.root


def test_who_has_a_root_of_its_own_is_in_nobodys_way(environ: dict[str, str]) -> None:
    first = entered(environ, "first", "three")
    second = entered(environ, "second", "five", key="1")
    first.leave(in_use=False)
    assert second.private
    third = entered(environ, "third", "three", key="2")
    assert not third.private
    assert live.sharers(environ["VLLM_CACHE_ROOT"], "third", now=NOW) == []


def test_a_program_uses_nothing_that_is_shared(environ: dict[str, str]) -> None:
    entered(environ, "program", "other", domains=TORCH_PROGRAM)
    assert live.sharers(environ["VLLM_CACHE_ROOT"], "engine", now=NOW) == []
    assert not entered(environ, "engine", "three", key="1").private


def test_nobody_waits_for_a_server_whose_work_is_stored(environ: dict[str, str]) -> None:
    server = entered(environ, "server", "three", "compiling")
    key = Key("k1:" + "0" * 32)
    assert live.someone_compiles(environ, key, "other", now=NOW)
    server.compiled()
    assert not live.someone_compiles(environ, key, "other", now=NOW)
    assert not entered(environ, "other", "three").private


def test_two_that_compile_never_share_a_root(environ: dict[str, str]) -> None:
    server = entered(environ, "server", "three", "compiling")
    assert entered(environ, "second", "three", "compiling", key="1").private
    assert not entered(environ, "warm", "three", "warm", key="2").private
    server.compiled()
    assert not entered(environ, "third", "three", "compiling", key="3").private
