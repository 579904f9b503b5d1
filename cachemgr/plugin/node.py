"""Workers on another machine than the front process, as Ray places them: one attendant per node and launch.

Each node has a store, live directories and settings of its own, and the attendant of the front process reaches none of
them. So a worker that finds itself elsewhere has an attendant started there, or joins the one that another worker of
the launch has started: it restores the ranks of its node before they look, and publishes them when they are ready.

Which variables travel to a worker depends on the executor: the first one of vLLM's copies those with certain prefixes
(0.26-0.33 ray/ray_env.py), the second one all of them (v1/executor/ray_executor_v2.py). What travels with both is the
engine's configuration, so the front process leaves its launch in an attribute of that, which no hash of vLLM's looks
at. With it go the command line without its secrets, and the factors of the launch but for the guards, which are about
each machine: a node that has equal guards has the same key. Whether the plugin is on is each node's own decision, by
variable or file (`switch`).
"""

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

from cachemgr.plugin import front, switch
from cachemgr.plugin.arguments import described
from cachemgr.plugin.wire import DESK_VARIABLE, WIRE

ATTRIBUTE = "_cachemgr_launch"
_OURS = (switch.LAUNCH_VARIABLE, "CACHEMGR_KEY", "CACHEMGR_PINNED", DESK_VARIABLE, "CACHEMGR_HEARS")
_STEP_SECONDS = 0.05
_ANSWER_SECONDS = 5.0


def leave(config: object, engine_args: object) -> None:
    """The front process has made a configuration that Ray will take to other machines: leave the launch in it."""
    if config is None or not _is_for_ray(config) or not os.environ.get(DESK_VARIABLE):
        return
    told = WIRE.ask(_ANSWER_SECONDS, join=True)
    if told is None:
        return
    left = {
        "launch": os.environ.get(switch.LAUNCH_VARIABLE, ""),
        "machine": machine(),
        "variables": told.get("variables"),
        "factors": told.get("factors"),
        "command": told.get("command"),
        "cwd": front.working_directory(),
        "engine_args": described(engine_args),
    }
    vars(config)[ATTRIBUTE] = json.dumps(left)


def _is_for_ray(config: object) -> bool:
    """By its name or by that of an executor class, or for its data-parallel engines (config/parallel.py)."""
    parallel = getattr(config, "parallel_config", None)
    backends = (getattr(parallel, f"{kind}_backend", "") for kind in ("distributed_executor", "data_parallel"))
    return any("ray" in str(backend).lower() for backend in backends)


def machine() -> str:
    """What two processes have in common that reach each other's sockets and files."""
    parts = [str(os.geteuid())]
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts.append(file.read().strip())
        parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt")]
    return " ".join(parts)


def arrive(wrapper: object) -> None:
    """A worker that has its configuration and no device yet (`WorkerWrapperBase.init_device`)."""
    left = _left(getattr(wrapper, "vllm_config", None))
    if left is not None:
        if left.get("machine") == machine():
            _adopt(left.get("variables"))
        elif switch.is_on(os.environ):
            _join_or_start(left, _rank(wrapper))
    WIRE.tell(works=True)


def warm() -> None:
    """A worker has compiled and warmed up."""
    WIRE.tell(warm=True)


def _left(config: object) -> dict[str, object] | None:
    text = getattr(config, "__dict__", {}).get(ATTRIBUTE)
    found = json.loads(text) if isinstance(text, str) else None
    return found if isinstance(found, dict) else None


def _rank(wrapper: object) -> str:
    """As vLLM names the directories of this rank (0.26-0.33 compilation/decorators.py)."""
    worker, config = getattr(wrapper, "worker", None), getattr(wrapper, "vllm_config", None)
    replica = getattr(getattr(config, "parallel_config", None), "data_parallel_index", 0)
    return f"rank_{getattr(worker, 'rank', 0)}_{replica}"


def _adopt(variables: object) -> bool:
    """Use what an attendant handed out: its directories, and its desk."""
    if not isinstance(variables, dict) or not variables:
        return False
    front.use({"variables": variables})
    return True


def _join_or_start(left: Mapping[str, object], rank: str) -> None:
    """All workers of a node arrive at once; one of them starts the attendant, the others wait for its desk."""
    desk = "cachemgr-" + hashlib.sha256(f"{left.get('launch')} {machine()}".encode()).hexdigest()[:32]
    environ = _without_the_others(left)
    end = time.monotonic() + front.patience()
    while (seconds := end - time.monotonic()) > 0:
        os.environ[DESK_VARIABLE] = desk
        WIRE.renew()
        answer = WIRE.ask(min(seconds, _ANSWER_SECONDS), join=True)
        if answer is not None and _adopt(answer.get("variables")):
            return
        starter = _one_at_a_time(desk)
        if starter is not None:
            with starter:
                _start(left, rank, desk, environ, seconds)
            return
        time.sleep(_STEP_SECONDS)


def _without_the_others(left: Mapping[str, object]) -> dict[str, str]:
    """The environment without what the front process was pinned to: those are directories of its machine."""
    variables = left.get("variables")
    pinned = variables if isinstance(variables, dict) else {}
    for name in [name for name, value in os.environ.items() if name in _OURS or pinned.get(name) == value]:
        del os.environ[name]
    return dict(os.environ)


def _one_at_a_time(desk: str) -> socket.socket | None:
    """A name that one process at a time can have, and that nobody has to clear away."""
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        taken.bind(f"\0{desk}-starts")
    except OSError:
        taken.close()
        return None
    return taken


def _start(left: Mapping[str, object], rank: str, desk: str, environ: dict[str, str], seconds: float) -> None:
    cwd = str(left.get("cwd"))
    order = {
        "argv": left.get("command"),
        "environ": environ,
        "now": environ,
        "cwd": cwd if os.path.isdir(cwd) else front.working_directory(),
        "pid": os.getpid(),
        "engine_args": left.get("engine_args"),
        "part": {"of": left.get("launch"), "desk": desk, "ranks": [rank], "factors": left.get("factors")},
    }
    answer = front.answer_to(order, seconds) if front.can_start() else None
    front.use(answer)
