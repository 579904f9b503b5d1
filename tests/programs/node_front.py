"""The front process of an engine that Ray will take to other machines: leaves its configuration in a file."""

import pickle
import sys
from pathlib import Path

from vllm.engine.arg_utils import EngineArgs

if __name__ == "__main__":
    model, place, *_others = sys.argv[1:]
    args = EngineArgs(model=model, tensor_parallel_size=4, distributed_executor_backend="ray")
    aside = Path(place + ".aside")
    aside.write_bytes(pickle.dumps(args.create_engine_config()))
    aside.rename(place)
    sys.stdin.read()
