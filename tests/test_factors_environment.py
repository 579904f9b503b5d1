"""Which variables count: what the engine hashes does, places, logs, secrets and what a cluster injects do not."""

import pytest

from cachemgr.factors import environment
from cachemgr.sensitive import is_secret


def values(environ: dict[str, str], device: str = "cpu") -> dict[str, str | None]:
    found = environment.factors(environment.without_ours(environ), device=device)
    return {factor.name: factor.value for factor in found}


@pytest.mark.parametrize(
    "name",
    [
        "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "TORCHINDUCTOR_FILE_LOCK_TIMEOUT",
        "TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_SOMETHING_NEW", "TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS",
        "TORCH_COMPILE_DISABLE", "TORCH_COMPILE_CACHE_KEY_TAG", "PYTORCH_JIT", "TRITON_DEFAULT_FP_FUSION",
        "AOT_INDUCTOR_DEBUG_COMPILE", "AOT_PARTITIONER_DEBUG", "CXX", "OMP_PREFIX", "FAKE_ALLOW_META", "LOG_TLPARSE",
        "DISABLE_LLVM_OPT", "LLVM_PASS_PLUGIN_PATH", "PYTHONOPTIMIZE",
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_the_engine_hashes_or_compiles_by_counts(name: str, device: str) -> None:
    assert values({name: "1"}, device) == {f"env.{name}": "1"}


@pytest.mark.parametrize("name", sorted(environment._UNCOUNTED))
def test_a_place_or_a_log_does_not_count(name: str) -> None:
    assert values({name: "1"}) == {}
    assert environment._UNCOUNTED[name]


@pytest.mark.parametrize(
    "name",
    [
        "PATH", "HOME", "HOSTNAME", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "RANK", "CONDA_PREFIX", "PYTHONPATH", "VIRTUAL_ENV",
    ],
)  # fmt: skip
def test_what_differs_from_machine_to_machine_does_not_count(name: str) -> None:
    assert values({name: "1"}) == values({name: "1"}, "cuda") == {}


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"])
def test_thread_settings_count_on_the_cpu(name: str) -> None:
    assert values({name: "granularity=fine,8"}, "cpu") == {f"env.{name}": "granularity=fine,8"}
    assert values({name: "granularity=fine,8"}, "cuda") == {}


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH", "CC"])
def test_what_compiles_device_code_counts_on_a_gpu(name: str) -> None:
    assert values({name: "/usr/local/x"}, "cuda") == {f"env.{name}": "/usr/local/x"}
    assert values({name: "/usr/local/x"}, "cpu") == {}


def test_what_no_key_of_the_engine_holds_is_blind() -> None:
    found = environment.factors({"ATEN_CPU_CAPABILITY": "avx2", "CXX": "g++"}, device="cpu")
    assert {factor.name: factor.role for factor in found} == {"env.ATEN_CPU_CAPABILITY": "blind", "env.CXX": "match"}


@pytest.mark.parametrize(
    "name",
    [
        "TORCH_HUB_TOKEN", "TORCH_SECRET", "PYTORCH_PASSWORD", "TORCH_PASSWD", "TORCHINDUCTOR_API_KEY",
        "TRITON_CREDENTIALS", "TORCH_AWS_ACCESS_KEY_ID", "TORCH_PRIVATE_KEY", "TORCH_OAUTH",
    ],
)  # fmt: skip
def test_a_secret_never_counts(name: str) -> None:
    assert values({name: "hunter2"}) == {}


@pytest.mark.parametrize(
    "name", ["max_tokens", "--max-new-tokens", "--tokenizer", "TOKENIZERS_PARALLELISM", "--author"]
)
def test_a_name_that_only_resembles_a_secret_is_none(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_SERVE_SERVICE_HOST", "10.0.0.1"),
        ("TORCH_SERVE_SERVICE_PORT", "80"),
        ("TORCH_SERVE_SERVICE_PORT_HTTP", "80"),
        ("TORCH_SERVE_PORT", "tcp://10.0.0.1:80"),
        ("TORCH_SERVE_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("TORCH_SERVE_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("TORCH_SERVE_PORT_53_UDP_PROTO", "udp"),
    ],
)
def test_kubernetes_service_links_never_count(name: str, value: str) -> None:
    assert values({name: value}) == {}


def test_a_port_that_is_only_a_number_is_no_service_link() -> None:
    assert values({"TORCH_SERVE_PORT": "80"}) == {"env.TORCH_SERVE_PORT": "80"}


@pytest.mark.parametrize("value", ["", "0", "1", "-1", "600", "true", "OFF"])
def test_switches_and_numbers_are_stored_in_clear(value: str) -> None:
    assert values({"TORCHINDUCTOR_SOMETHING_NEW": value}) == {"env.TORCHINDUCTOR_SOMETHING_NEW": value}


def test_words_of_unknown_variables_are_sealed_alike_everywhere() -> None:
    name = "TORCHINDUCTOR_SOMETHING_NEW"
    sealed = values({name: "a word"})[f"env.{name}"]
    assert sealed == "sealed:e4b873ed998df8c3962d2cdd3660994f", "another one would orphan artifacts"
    assert values({name: "another"})[f"env.{name}"] != sealed


def test_words_of_known_variables_are_stored_in_clear() -> None:
    name = "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS"
    assert values({name: "ATEN,TRITON"}) == {f"env.{name}": "ATEN,TRITON"}


@pytest.mark.parametrize("value", ["1", "true", "github"])
def test_only_that_ci_is_set_counts(value: str) -> None:
    assert values({"CI": value}) == {"env.CI": "set"}


def test_an_empty_ci_is_none() -> None:
    assert values({"CI": ""}) == {}


@pytest.mark.parametrize("separator", [":", ",", ", "])
def test_what_we_pinned_ourselves_is_not_the_users(separator: str) -> None:
    environ = {"CACHEMGR_PINNED": separator.join(["TORCHINDUCTOR_A", "CI"]), "TORCHINDUCTOR_A": "1", "CI": "1"}
    assert values({**environ, "TORCHINDUCTOR_B": "1"}) == {"env.TORCHINDUCTOR_B": "1"}


def test_our_own_settings_never_count() -> None:
    assert values({"CACHEMGR_HOME": "/x", "CACHEMGR_KEY": "k1:0"}) == {}


def test_undecodable_bytes_become_text() -> None:
    for value in values({"CXX": "g\udcff", "TORCH_X": "a\udcff", "TORCH_\udcfe": "1"}).values():
        assert value is not None
        value.encode()
