"""Starts an engine of the stand-in vLLM many times, each in a fork of one process that has imported nothing of ours:
plugins are loaded anew each time. Prints one JSON line per start: number, fault, exit code, answer, seconds.

    many_starts.py MODEL ROOT STARTS FAULTS, where FAULTS is JSON: name -> variables
"""

import json
import os
import sys
import time

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker import worker_base

AT_ONCE = 8


def engine(model: str, root: str, variables: dict[str, str], out: int) -> None:
    os.environ.update(variables)
    os.environ["HOME"] = root
    sys.argv = ["vllm", "serve", model] if "AS_SERVER" in variables else ["trainer.py"]
    sys.orig_argv = [sys.executable, *sys.argv]
    config = EngineArgs(model=model).create_engine_config()
    os.write(out, worker_base.compile_or_warm_up_model(config).encode())


def fork(work) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            work(writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    return pid, reading


def main() -> None:
    model, root, starts = sys.argv[1], sys.argv[2], int(sys.argv[3])
    faults = sorted(json.loads(sys.argv[4]).items())
    running: dict[int, tuple[int, str, int, float]] = {}
    for number in range(starts + AT_ONCE):
        if len(running) >= AT_ONCE or number >= starts:
            if not running:
                break
            pid, status = os.wait()
            which, name, reading, begun = running.pop(pid)
            with os.fdopen(reading) as file:
                answer = file.read()
            seconds = time.monotonic() - begun
            print(json.dumps([which, name, os.waitstatus_to_exitcode(status), answer, seconds]), flush=True)
        if number < starts:
            name, variables = faults[number % len(faults)]
            home = f"{root}/{number}"
            known = f"{home}/.cache/vllm/modelinfos"  # or each start would start one more Python to ask
            os.makedirs(known)
            with open(f"{known}/vllm-model.json", "w") as file:
                file.write("{}")
            begun = time.monotonic()
            pid, reading = fork(lambda out, home=home, variables=variables: engine(model, home, variables, out))
            running[pid] = (number, name, reading, begun)


if __name__ == "__main__":
    main()
