"""Scrubbing: what an engine wrote with secrets in it reaches no store with them, and is otherwise as it was."""

import json
from pathlib import Path

import pytest

from cachemgr.domains import Target
from cachemgr.domains.relocation import CannotTravelError
from cachemgr.domains.scrub import FACTORS, MARK, WINNER, scrubbed_factors
from cachemgr.domains.vllm import TORCH_COMPILE
from cachemgr.store import Store
from tests.trees import TEN_HEX, look_up, publish_trees, read, restore_found, torch_compile, tree_of, write

NOTE = f"{TEN_HEX}/rank_0_0/backbone/cache_key_factors.json"
PLAIN = {
    "VLLM_TARGET_DEVICE": "cuda",
    "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": 163840,
    "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD": 1024,
    "VLLM_USE_FASTOKENS": False,
    "VLLM_LORA_RESOLVER_CACHE_DIR": None,
    "VLLM_DISABLED_KERNELS": ["a", "b"],
    "VLLM_BUILD_URL": "https://example.org/a@b",
}


def note(environ: object) -> bytes:
    """As vLLM 0.26 to 0.33 print it (`compilation/backends.py`)."""
    return json.dumps({"env": environ, "config_hash": "12", "code_hash": "34"}, indent=2, sort_keys=True).encode()


@pytest.mark.parametrize(
    "name", ["VLLM_API_KEY", "S3_SECRET_ACCESS_KEY", "HF_TOKEN", "VLLM_PROXY_PASSWORD", "VLLM_AUTH", "MY_CREDENTIALS"]
)
@pytest.mark.parametrize("value", ["sk-123", "1234", ["sk-1", "sk-2"], {"a": "sk"}])
def test_a_secret_is_replaced_and_nothing_else(name: str, value: object) -> None:
    stored = scrubbed_factors(note({**PLAIN, name: value}), ())
    assert stored == note({**PLAIN, name: MARK})
    assert scrubbed_factors(stored, ()) == stored
    assert FACTORS.attach(stored, "/anywhere") == stored


@pytest.mark.parametrize("value", [None, "", False])
def test_a_secret_that_is_not_set_is_none(value: object) -> None:
    data = note({**PLAIN, "VLLM_API_KEY": value})
    assert scrubbed_factors(data, ()) == data


@pytest.mark.parametrize("value", ["http://user:pa55@host:80/x", ["http://user:pa55@host:80/x"]])
def test_a_login_in_a_url_is_replaced(value: object) -> None:
    stored = scrubbed_factors(note({"VLLM_STORE": value}), ())
    assert b"pa55" not in stored
    assert f"http://{MARK}@host:80/x".encode() in stored


@pytest.mark.parametrize("data", [b'{  "env": {"A": "1"}}', b'{"code_hash": 3}', b'{"env": ["VLLM_API_KEY"]}', b"{}"])
def test_where_there_is_nothing_to_hide_the_bytes_stay(data: bytes) -> None:
    assert scrubbed_factors(data, ()) == data


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_cannot_be_read_is_not_stored(data: bytes) -> None:
    with pytest.raises(CannotTravelError, match="is no JSON object"):
        scrubbed_factors(data, ())


def test_a_secret_reaches_no_store_and_stays_where_the_engine_wrote_it(tmp_path: Path, store: Store) -> None:
    torch_compile(tmp_path / "live")
    data = note({**PLAIN, "VLLM_API_KEY": "sk-very-secret"})
    write(tmp_path / "live", {NOTE: data})
    published = publish_trees(store, [tree_of(TORCH_COMPILE, tmp_path / "live")])
    assert published.refused == ()
    restored = restore_found(store, look_up(store), [Target(TORCH_COMPILE, str(tmp_path / "new"), ours=True)])
    assert restored.reasons == ()
    assert not any(b"sk-very-secret" in held for held in read(tmp_path / "new").values())
    assert read(tmp_path / "new")[NOTE] == note({**PLAIN, "VLLM_API_KEY": MARK})
    assert read(tmp_path / "live")[NOTE] == data


def test_a_winner_is_stored_without_the_time_that_its_tuning_took() -> None:
    tuned = b'{"XBLOCK": 64, "num_warps": 4, "time_taken_ms": 788, "triton_cache_hash": "X"}'
    stored = WINNER.detach(tuned, set())
    assert json.loads(stored) == {"XBLOCK": 64, "num_warps": 4, "triton_cache_hash": "X"}
    assert WINNER.detach(tuned.replace(b"788", b"12"), set()) == stored
    assert WINNER.attach(stored, "/elsewhere") == stored


def test_a_winner_without_a_time_keeps_its_bytes() -> None:
    plain = b'{ "XBLOCK":64 }'
    assert WINNER.detach(plain, set()) == plain


def test_a_winner_that_is_no_object_does_not_travel() -> None:
    with pytest.raises(CannotTravelError):
        WINNER.detach(b"[1]", set())
