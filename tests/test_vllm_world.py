"""Which ranks a node runs, on which devices, and whether anything is compiled."""

from pathlib import Path

import pytest

from cachemgr.factors.vllm import flags as flag_words
from cachemgr.factors.vllm.facts import Facts, facts_for, known_versions
from cachemgr.factors.vllm.world import World, compile_expected, in_charge_of, world

FACTS = facts_for("0.33.0")
every_version = pytest.mark.parametrize("version", known_versions())


def read(words: str, environ: dict[str, str] | None = None) -> World:
    return world(flag_words.parse(f"m {words}".split(), FACTS, "serve", Path("/")), environ or {})


@pytest.mark.parametrize(
    ("words", "ordinals", "size"),
    [
        ("", {"rank_0_0": 0}, 1),
        ("-tp 2", {"rank_0_0": 0, "rank_1_0": 1}, 2),
        ("-tp 2 -pp 2", {"rank_0_0": 0, "rank_1_0": 1, "rank_2_0": 2, "rank_3_0": 3}, 4),
        ("-pcp 2", {"rank_0_0": 0, "rank_1_0": 1}, 2),
        ("-dcp 2 -tp 2", {"rank_0_0": 0, "rank_1_0": 1}, 2),
        ("-dp 2", {"rank_0_0": 0, "rank_0_1": 1}, 2),
        ("-tp 2 -dp 2", {"rank_0_0": 0, "rank_1_0": 1, "rank_0_1": 2, "rank_1_1": 3}, 4),
        ("-tp 2 --distributed-executor-backend mp", {"rank_0_0": 0, "rank_1_0": 1}, 2),
        # two nodes of a data-parallel deployment: the head, and one without a server
        ("-dp 4 -dpl 2 -dpa 10.0.0.1", {"rank_0_0": 0, "rank_0_1": 1}, 4),
        ("--headless -dp 4 -dpl 2 -dpr 2 -dpa 10.0.0.1", {"rank_0_2": 0, "rank_0_3": 1}, 4),
        ("-dp 4 -dpl 0", {}, 4),
        # external load balancing: one replica per process
        ("-dp 4 -dpn 3", {"rank_0_3": 0}, 4),
        ("-tp 2 -dp 4 -dpn 3", {"rank_0_3": 0, "rank_1_3": 1}, 8),
        # hybrid load balancing
        ("-dp 4 -dpl 2 -dpr 2 -dph", {"rank_0_2": 0, "rank_0_3": 1}, 4),
        ("-dp 4 -dpl 2 -dpr 2 --data-parallel-multi-port-external-lb", {"rank_0_2": 0, "rank_0_3": 1}, 4),
        # one replica over two nodes
        ("-tp 4 --nnodes 2 --node-rank 0", {"rank_0_0": 0, "rank_1_0": 1}, 4),
        ("-tp 4 --nnodes 2 --node-rank 1 --headless", {"rank_2_0": 0, "rank_3_0": 1}, 4),
        ("-tp 2 -pp 2 -n 2 -r 1 --headless", {"rank_2_0": 0, "rank_3_0": 1}, 4),
        # a replica per node
        ("-tp 2 -dp 2 -n 2 -r 1", {"rank_0_1": 0, "rank_1_1": 1}, 4),
        # two replicas, each over two nodes
        ("-tp 4 -dp 2 -n 4 -r 3", {"rank_2_1": 0, "rank_3_1": 1}, 8),
        ("-tp 2 --device-ids 3,1", {"rank_0_0": 3, "rank_1_0": 1}, 2),
    ],
)
def test_ranks_and_their_devices(words: str, ordinals: dict[str, int], size: int) -> None:
    assert read(words) == World(tuple(ordinals), ordinals, size)


@pytest.mark.parametrize(
    "words",
    [
        "-tp 2 --distributed-executor-backend ray",
        "-tp 2 --distributed-executor-backend external_launcher",
        "-tp 2 --distributed-executor-backend my.Executor",
        "-dp 2 --data-parallel-backend ray",
    ],
)
def test_where_others_place_ranks_nothing_is_said(words: str) -> None:
    assert read(words) == World((), {}, 2)


def waiting(words: str, environ: dict[str, str] | None = None) -> int | None:
    return in_charge_of(flag_words.parse(f"m {words}".split(), FACTS, "serve", Path("/")), environ or {})


@pytest.mark.parametrize(
    ("nodes", "size"),
    [
        ([""], 1),
        (["-tp 2 -pp 2"], 4),
        (["-dp 4 -dpl 2 -dpa 10.0.0.1", "--headless -dp 4 -dpl 2 -dpr 2 -dpa 10.0.0.1"], 4),
        (["-dp 4 -dpl 0", "--headless -dp 4 -dpl 4 -dpa 10.0.0.1"], 4),
        ([f"-tp 2 -dp 4 -dpn {rank}" for rank in range(4)], 8),
        ([f"-tp 4 --nnodes 2 --node-rank {node}" for node in range(2)], 4),
        ([f"-tp 2 -dp 2 -n 2 -r {node}" for node in range(2)], 4),
        ([f"-tp 4 -dp 2 -n 4 -r {node}" for node in range(4)], 8),
        (["-tp 2 -pp 2 --distributed-executor-backend ray"], 4),
        (["-tp 2 -dp 4 -dpl 1 --data-parallel-backend ray"], 8),
    ],
)
def test_every_rank_of_a_world_waits_in_the_record_of_one_node(nodes: list[str], size: int) -> None:
    counts = [waiting(words) for words in nodes]
    assert sum(count for count in counts if count is not None) == size
    assert {read(words).size for words in nodes} == {size}


def test_a_replica_over_two_nodes_waits_where_its_times_are() -> None:
    assert [waiting(f"-tp 4 --nnodes 2 --node-rank {node}") for node in range(2)] == [4, 0]
    assert waiting("-tp 2", {"VLLM_DP_SIZE": "4", "VLLM_DP_RANK": "3"}) == 2


@pytest.mark.parametrize("backend", ["external_launcher", "my.Executor"])
def test_ranks_that_others_start_are_not_guessed(backend: str) -> None:
    assert waiting(f"-tp 2 --distributed-executor-backend {backend}") is None


@pytest.mark.parametrize("ids", ["GPU-a,GPU-b", "0", "", "1,x"])
def test_devices_that_cannot_be_told(ids: str) -> None:
    found = read(f"-tp 2 --device-ids={ids}")
    assert (found.ranks, found.ordinals) == (("rank_0_0", "rank_1_0"), {})


def test_offline_data_parallelism_is_told_by_variables() -> None:
    environ = {"VLLM_DP_SIZE": "4", "VLLM_DP_RANK": "3", "VLLM_DP_RANK_LOCAL": "1"}
    assert read("-tp 2", environ) == World(("rank_0_3", "rank_1_3"), {"rank_0_3": 2, "rank_1_3": 3}, 8)


@pytest.mark.parametrize(
    "words", ["-tp x", "-tp 0", "-tp -1", "-dp 0 -dpl x", "--nnodes 0 --node-rank 9", "-tp 1 -n 8"]
)
def test_nonsense_is_no_reason_to_fail(words: str) -> None:
    assert read(words).size >= 1


def expected(
    words: str, environ: dict[str, str] | None = None, facts: Facts = FACTS, model: str = ""
) -> tuple[bool, str]:
    flags = flag_words.parse(["m", *words.split()], facts, "serve", Path("/"))
    return compile_expected(flags, environ or {}, facts, [model])


@every_version
@pytest.mark.parametrize(
    "words", ["", "-O1", "-O2", "-O3", "-O0 -cc.mode=3", "-cc.mode=VLLM_COMPILE", "--no-enforce-eager", "-cc.mode=2"]
)
def test_a_torch_tree_is_expected(version: str, words: str) -> None:
    assert expected(words, facts=facts_for(version), model="LlamaForCausalLM") == (True, "")


@every_version
@pytest.mark.parametrize(
    ("words", "environ", "reason"),
    [
        ("--enforce-eager", {}, "--enforce-eager"),
        ("--enforce-eager -cc.mode=3", {}, "--enforce-eager"),
        ("-O0", {}, "compilation mode NONE"),
        ("-O 0", {}, "compilation mode NONE"),
        ("-cc.mode=0", {}, "compilation mode NONE"),
        ("-cc.mode=none", {}, "compilation mode NONE"),
        ('--compilation-config {"mode":"NONE"}', {}, "compilation mode NONE"),
        ("", {"TORCH_COMPILE_DISABLE": "1"}, "TORCH_COMPILE_DISABLE=1"),
        ("", {"VLLM_DISABLE_COMPILE_CACHE": "1"}, "VLLM_DISABLE_COMPILE_CACHE"),
        ("", {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}, "VLLM_USE_BREAKABLE_CUDAGRAPH=1"),
    ],
)
def test_no_torch_tree_is_expected_and_why(version: str, words: str, environ: dict[str, str], reason: str) -> None:
    assert expected(words, environ, facts_for(version)) == (False, reason)


def test_some_models_do_not_compile_unless_told_to() -> None:
    assert not expected("", model="DeepseekV4ForCausalLM")[0]
    assert expected("", {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}, model="DeepseekV4ForCausalLM")[0]
    assert not expected("", model="Step5ForCausalLM")[0]
    assert expected("", facts=facts_for("0.32.0"), model="Step5ForCausalLM")[0]


@pytest.mark.parametrize("value", ["0", "", "x"])
def test_switches_that_are_off(value: str) -> None:
    environ = {
        "TORCH_COMPILE_DISABLE": value,
        "VLLM_DISABLE_COMPILE_CACHE": value,
        "VLLM_USE_BREAKABLE_CUDAGRAPH": value,
    }
    assert expected("", environ)[0]
