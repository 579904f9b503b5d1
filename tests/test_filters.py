"""Filters over artifacts: every field, every comparison, and words that mean nothing."""

from typing import Any

import msgspec
import pytest

from cachemgr.errors import UsageError
from cachemgr.filters import FIELDS, parse
from cachemgr.inventory import Summary
from cachemgr.key import Key

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z
ONE = Summary(
    key=Key("k1:" + "ab" * 16),
    engine="vllm",
    engine_version="0.32.0",
    model="meta/llama-8b",
    device="NVIDIA H200",
    domains=("torch_compile", "triton"),
    files=420,
    bytes=1_500_000_000,
    stored_bytes=2 << 20,
    captures=2,
    complete=True,
    created="2027-01-05T08:00:00Z",
    last_used="2027-01-14T20:00:00Z",
    uses=7,
    pinned=False,
    cold_seconds=None,
    warm_seconds=None,
)

HOLDS = """
key=k1:abab* | engine=vllm | engine!=torch | engine_version=0.32.* | model=*llama* | model!=qwen | device=NVIDIA?H200
domain=triton | domain!=inductor | size>1GB | size<1.5GiB | size=1500MB | size>=1.5GB | size<=1.5gb | stored=2MiB
stored<=2097152 | files>400 | files!=0 | captures=2 | uses>=7 | complete=yes | complete!=no | pinned=false | age>9d
age<2w | age>239h | unused<1d | unused>=12h | size > 1 GB
"""
FAILS = """
key=abab* | engine=torch | engine_version=0.3 | model=LLAMA* | domain=inductor | domain!=triton | size<1GB | size>1.5GB
stored>2MiB | files<420 | captures!=2 | uses>7 | complete=no | pinned=yes | age<9d | age>2w | unused>1d
"""


def each(text: str) -> list[str]:
    return [part.strip() for part in text.replace("\n", "|").split("|") if part.strip()]


@pytest.mark.parametrize("text", each(HOLDS))
def test_holds(text: str) -> None:
    assert parse([text], now=NOW)(ONE)


@pytest.mark.parametrize("text", each(FAILS))
def test_does_not_hold(text: str) -> None:
    assert not parse([text], now=NOW)(ONE)


def test_every_field_is_tested() -> None:
    assert {text.replace("!", "=").split("=")[0].split(">")[0].split("<")[0].strip() for text in each(HOLDS)} == set(
        FIELDS
    )


def test_all_of_several_must_hold() -> None:
    assert parse([], now=NOW)(ONE)
    assert parse(["size>1GB", "age<30d"], now=NOW)(ONE)
    assert not parse(["size>1GB", "age>30d"], now=NOW)(ONE)


@pytest.mark.parametrize(
    "text",
    each(
        """model | size | =1 | size~1 | colour=red | size>big | size>1XB | size>-1 | age<30 | age<30GB | files>1k
        model>llama | engine<=vllm | complete>no | complete=perhaps | size> | SIZE>1 | size>1GB and age<1d | size>1e9
        """
    ),
)
def test_what_cannot_be_meant_is_said(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([text], now=NOW)
    assert caught.value.hint


@pytest.mark.parametrize("change", [{"created": "yesterday"}, {"engine_version": None}, {"last_used": None}])
def test_what_is_not_known_compares_all_the_same(change: dict[str, Any]) -> None:
    summary = msgspec.structs.replace(ONE, **change)
    for field in ("age", "unused"):
        assert parse([f"{field}>1s"], now=NOW)(summary)
    assert parse(["engine_version=*"], now=NOW)(summary)
