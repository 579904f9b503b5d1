"""A world on several nodes: each publishes and restores its own ranks, and the artifact is complete when all are."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines import Engines
from tests.machines import Machine

pytestmark = pytest.mark.slow

World = Callable[[str, int, bool], tuple[Machine, tuple[str, ...]]]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A node of a world of four ranks on two nodes and its command, with a store of its own or a shared one."""
    engines = Engines.install(tmp_path)

    def node(name: str, number: int, shared: bool) -> tuple[Machine, tuple[str, ...]]:
        ranks = ",".join(str(2 * number + local) for local in range(2))
        machine = engines.machine(name, RANKS=ranks)
        if not shared:
            machine = Machine(machine.root, tmp_path / f"store-{number}", machine.variables)
        return machine, engines.serve("--tensor-parallel-size=4", "--nnodes=2", f"--node-rank={number}")

    return node


def restored_ranks(machine: Machine) -> set[str]:
    return {path.name for path in machine.home.glob(".cache/vllm/torch_compile_cache/torch_aot_compile/*/rank_*")}


def test_a_node_alone_keeps_its_own_ranks_and_says_that_others_are_missing(world: World) -> None:
    for number, ranks in enumerate(({"rank_0_0", "rank_1_0"}, {"rank_2_0", "rank_3_0"})):
        machine, command = world(f"cold-{number}", number, False)
        key = machine.run(*command)["key"]
        (artifact,) = machine.json("ls")["artifacts"]
        assert artifact["complete"] is False
        assert "complete  no: it has 2 of 4 ranks, nodes publish their own" in machine.cachemgr("show", key).stdout
        again, command = world(f"warm-{number}", number, False)
        assert again.run(*command)["verdict"] == "used"
        assert restored_ranks(again) == ranks


def test_an_artifact_is_complete_when_the_world_is(world: World) -> None:
    first, command = world("one", 0, True)
    key = first.run(*command)["key"]
    second, command = world("two", 1, True)
    told = second.run(*command)
    assert (told["key"], told["result"], told["verdict"]) == (key, "exact", "partly used")
    assert any("nothing is stored yet of rank_2_0, rank_3_0" in reason for reason in told["reasons"])
    assert told["published"] is not None
    (artifact,) = second.json("ls")["artifacts"]
    assert artifact["complete"] is True
    assert "complete  yes" in second.cachemgr("show", key).stdout
    for number, ranks in enumerate(({"rank_0_0", "rank_1_0"}, {"rank_2_0", "rank_3_0"})):
        again, command = world(f"again-{number}", number, True)
        assert again.run(*command)["verdict"] == "used"
        assert restored_ranks(again) == ranks
