"""Variables of vLLM: what the engine hashes counts, what it ignores does not, places of the user do not divide keys."""

import os
from pathlib import Path

import pytest

from cachemgr.factors import environment
from cachemgr.factors.vllm import variables
from cachemgr.factors.vllm.facts import Facts, facts_for, known_versions

FACTS = facts_for("0.32.0")
every_version = pytest.mark.parametrize("version", known_versions())


def read(environ: dict[str, str], facts: Facts = FACTS) -> dict[str, tuple[str | None, str]]:
    return {each.name: (each.value, each.role) for each in variables.factors(environ, facts)}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the constant directory is in these tests."""
    made = tmp_path / "constant"
    monkeypatch.setattr(variables, "_ROOT", str(made))
    monkeypatch.setattr(
        variables, "_PLACES", {"VLLM_CONFIG_ROOT": str(made), "VLLM_XLA_CACHE_PATH": f"{made}/xla_cache"}
    )
    return made


@pytest.mark.parametrize(
    "name", ["VLLM_PP_LAYER_PARTITION", "VLLM_PLUGINS", "CUDA_HOME", "VLLM_USE_DEEP_GEMM", "VLLM_DP_RANK", "VERBOSE"]
)
def test_what_the_engine_hashes_is_a_match(name: str) -> None:
    assert read({name: "1"}) == {f"env.{name}": ("1", "match")}
    assert variables.claims(name)


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_CACHE_ROOT", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_HOST_IP", "VLLM_PORT", "VLLM_NO_USAGE_STATS",
        "VLLM_RPC_BASE_PATH", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LOCAL_RANK", "MAX_JOBS", "VLLM_CONFIG_ROOT",
        "VLLM_CPU_KVCACHE_SPACE", "VLLM_API_KEY", "S3_SECRET_ACCESS_KEY", "HF_TOKEN", "HOME", "PATH",
    ],
)  # fmt: skip
def test_what_the_engine_ignores_does_not_count(name: str) -> None:
    assert read({name: "1"}) == {}


@pytest.mark.parametrize("name", ["VLLM_TUNED_CONFIG_FOLDER", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_SOMETHING_NEW"])
def test_what_shapes_code_unhashed_and_what_nobody_knows_is_blind(name: str) -> None:
    assert read({name: "1"}) == {f"env.{name}": ("1", "blind")}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_SERVICE_HOST", "10.0.0.1"),
        ("VLLM_SERVICE_PORT_HTTP", "80"),
        ("VLLM_PORT", "tcp://10.0.0.1:80"),
        ("VLLM_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("VLLM_QWEN_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", "tcp://10.0.0.1:80"),
    ],
)
def test_kubernetes_service_links_never_count(name: str, value: str) -> None:
    assert read({name: value}) == {}


@pytest.mark.parametrize(("value", "counts"), [("DEBUG", True), ("debug", True), ("INFO", False), ("", False)])
@every_version
def test_debug_logging_counts_although_its_variable_is_ignored(version: str, value: str, counts: bool) -> None:
    found = read({"VLLM_LOGGING_LEVEL": value, **nowhere()}, facts_for(version))
    assert found == ({"env.VLLM_LOGGING_LEVEL": ("DEBUG", "match")} if counts else {})


def test_a_secret_that_is_hashed_counts_without_its_value() -> None:
    for name in variables.SECRET:
        assert "hunter2" not in repr(read({name: "hunter2", **nowhere()}, facts_for("0.28.0")))
    assert read({"VLLM_API_KEY": "hunter2"}, facts_for("0.28.0")) == {"env.VLLM_API_KEY": ("set", "match")}


def test_unknown_secrets_do_not_count() -> None:
    assert read({"VLLM_NEW_PASSWORD": "hunter2"}) == {}


def test_a_threshold_of_tokens_is_no_secret() -> None:
    assert read({"VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD": "9"})["env.VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD"][0] == "9"


def test_words_are_sealed_unless_they_name_a_back_end() -> None:
    assert (read({"VLLM_NCCL_SO_PATH": "/a"})["env.VLLM_NCCL_SO_PATH"][0] or "").startswith("sealed:")
    assert read({"VLLM_NCCL_SO_PATH": "/a"}) != read({"VLLM_NCCL_SO_PATH": "/b"})
    assert read({"VLLM_KV_CACHE_LAYOUT": "HND"}) == {"env.VLLM_KV_CACHE_LAYOUT": ("HND", "match")}
    assert "hunter2" not in repr(read({"VLLM_NEW_BACKEND": "hunter2"}))


def test_facts_that_are_only_assumed_make_everything_blind() -> None:
    assert read({"VLLM_PLUGINS": "1"}, facts_for("0.45.0")) == {"env.VLLM_PLUGINS": ("1", "blind")}


@every_version
def test_an_empty_environment_has_no_factors(version: str) -> None:
    assert read(nowhere(), facts_for(version)) == {}


@every_version
def test_names_of_torch_and_triton_are_left_to_their_module(version: str) -> None:
    shared = {
        name
        for name in facts_for(version).variables
        if environment.factors({name: "1"}, device="cuda") and not name.startswith("VLLM_")
    }
    assert shared <= {"CUDA_HOME"}
    assert not any(variables.claims(name) for name in ("CI", "CXX", "TORCH_COMPILE_DISABLE", "TRITON_CACHE_DIR"))


def nowhere() -> dict[str, str]:
    return {"HOME": "/nonexistent"}


class TestPlaces:
    OLD = facts_for("0.26.0")

    def test_old_versions_get_constants(self, tmp_path: Path, place: Path) -> None:
        home = {"HOME": str(tmp_path)}
        pinned = variables.constants(self.OLD, home)
        assert pinned == {"VLLM_CONFIG_ROOT": str(place), "VLLM_XLA_CACHE_PATH": f"{place}/xla_cache"}
        assert read({**home, **pinned}, self.OLD) == read(home, self.OLD) == {}

    @pytest.mark.parametrize("version", known_versions()[1:])
    def test_newer_versions_need_none(self, version: str, tmp_path: Path) -> None:
        assert variables.constants(facts_for(version), {"HOME": str(tmp_path)}) == {}

    @pytest.mark.parametrize("name", ["do_not_track", "ray_non_carry_over_env_vars.json"])
    def test_files_of_the_user_are_honoured_and_the_place_counts(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "config" / "vllm").mkdir(parents=True)
        (tmp_path / "config" / "vllm" / name).touch()
        environ = {"HOME": "/h", "XDG_CONFIG_HOME": str(tmp_path / "config")}
        assert set(variables.constants(self.OLD, environ)) == {"VLLM_XLA_CACHE_PATH"}
        assert read(environ, self.OLD)["env.VLLM_CONFIG_ROOT"][1] == "match"

    def test_a_choice_of_the_user_stands_and_counts(self) -> None:
        environ = {**nowhere(), "VLLM_CONFIG_ROOT": "/a", "VLLM_XLA_CACHE_PATH": "/b"}
        assert variables.constants(self.OLD, environ) == {}
        assert set(read(environ, self.OLD)) == {"env.VLLM_CONFIG_ROOT", "env.VLLM_XLA_CACHE_PATH"}
        assert read(environ, self.OLD) != read({**environ, "VLLM_CONFIG_ROOT": "/c"}, self.OLD)

    def test_a_directory_that_others_may_write_to_is_not_used(self, place: Path) -> None:
        place.mkdir(mode=0o700)
        assert "VLLM_CONFIG_ROOT" in variables.constants(self.OLD, nowhere())
        place.chmod(0o777)
        assert "VLLM_CONFIG_ROOT" not in variables.constants(self.OLD, nowhere())
        place.rmdir()
        os.symlink("/etc", place)
        assert "VLLM_CONFIG_ROOT" not in variables.constants(self.OLD, nowhere())


def test_undecodable_bytes_become_text() -> None:
    for name, (value, _) in read({"VLLM_NEW\udcff": "a\udcfe", "VLLM_KV_CACHE_LAYOUT": "\udcfd"}).items():
        assert value is not None
        (name + value).encode()
