"""A worker on another machine, as executors for Ray make it: its configuration comes, then plugins, device, warm-up."""

import pickle
import sys
from pathlib import Path

from vllm.v1.worker.worker_base import WorkerWrapperBase

if __name__ == "__main__":
    place, rank = sys.argv[1], int(sys.argv[2])
    config = pickle.loads(Path(place).read_bytes())
    wrapper = WorkerWrapperBase(0)
    wrapper.init_worker([{"vllm_config": config, "rank": rank}])
    wrapper.init_device()
    print("ANSWER", wrapper.compile_or_warm_up_model(), flush=True)
    sys.stdin.read()
