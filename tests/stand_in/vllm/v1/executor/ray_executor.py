"""Both executors of vLLM for Ray, as far as they differ: in the variables that reach a worker, and when.

The first one (0.26-0.33 v1/executor/ray_executor.py, ray/ray_env.py) copies variables that it knows or that have one of
its prefixes, and they win; the second one (v1/executor/ray_executor_v2.py, ray_env_utils.py) copies all, and those of
the node win. Both do it before plugins are loaded. The Ray is a real one.
"""

import copy
import os

import ray
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vllm.v1.worker.worker_base import WorkerWrapperBase

PREFIXES = {"VLLM_", "FLASH_ATTENTION_", "LMCACHE_", "NCCL_", "UCX_", "HF_", "HUGGING_FACE_"}
NAMES = {"PYTHONHASHSEED", "LD_LIBRARY_PATH", "CUDA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "CXX"}
WORKERS_OWN = {"VLLM_HOST_IP", "VLLM_HOST_PORT", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"}


class RayWorker:
    def __init__(self, rank: int) -> None:
        self.wrapper = WorkerWrapperBase(rank)

    def initialize(self, variables: dict, fill: dict, all_kwargs: list) -> None:
        os.environ.update(variables)
        for name, value in fill.items():
            os.environ.setdefault(name, value)
        self.wrapper.init_worker(all_kwargs)
        self.wrapper.init_device()

    def compile_or_warm_up_model(self) -> str:
        return self.wrapper.compile_or_warm_up_model()


def compile_on_all_nodes(executor) -> str:
    config = executor.vllm_config
    size = config.parallel_config.tensor_parallel_size
    ray.init(address=os.environ["RAY_ADDRESS"], logging_level="error")
    group = placement_group([{"CPU": 1}] * size, strategy="PACK")
    ray.get(group.ready())
    nodes = placement_group_table(group)["bundles_to_node_id"]
    ours = ray.get_runtime_context().get_node_id()
    bundles = sorted(range(size), key=lambda bundle: (nodes[bundle] != ours, nodes[bundle], bundle))
    executor.workers = [
        ray.remote(RayWorker)
        .options(num_cpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle))
        .remote(rank)
        for rank, bundle in enumerate(bundles)
    ]
    if os.environ.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1") == "1":
        variables, fill = {}, {name: value for name, value in os.environ.items() if name not in WORKERS_OWN}
    else:
        known = {name for name in os.environ if name in NAMES or name.startswith(tuple(PREFIXES))}
        variables, fill = {name: os.environ[name] for name in known - WORKERS_OWN}, {}
    kwargs = [{"vllm_config": copy.deepcopy(config), "rank": rank} for rank in range(size)]
    ray.get([worker.initialize.remote(variables, fill, kwargs) for worker in executor.workers])
    return " ".join(ray.get([worker.compile_or_warm_up_model.remote() for worker in executor.workers]))
