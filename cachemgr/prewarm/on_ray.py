"""A spec on a Ray cluster: one task for each entry, and Ray decides where and when.

A task asks for the GPUs of its entry and for a node that has that kind; it runs the command that a person would run
there. Ray starts it again elsewhere when its node is lost; then a look-up finds what the first attempt had sent to the
mirror. An entry that fails by itself is not started again. The only importer of Ray.
"""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from cachemgr.errors import StoreError, UsageError
from cachemgr.prewarm.entries import Record
from cachemgr.prewarm.passes import Result
from cachemgr.spec import Entry, Spec, dump

ANY = "ray"
"""The cluster that Ray finds by itself: this machine's, or that of RAY_ADDRESS."""
_ADDRESS = re.compile(r"ray://[^/\s]+")
_RETRIES = 3
_GRACE_SECONDS = 1800.0
"""What a task may take beside the limit of its entry: looking up, restoring, sending."""
_LAST_SECONDS = 60
"""What cachemgr may take to end its engine, which would keep the GPUs of its node."""
_Kind = tuple[str | None, bool]
"""The GPU that an entry names, if it does, and whether it needs one at all."""
_KIND = "accelerator_type:"
"""The resource by which a node says what its GPUs are (ray 2.60 `_private/accelerators`)."""


class Cluster(msgspec.Struct, frozen=True):
    """Which cluster, and what its nodes are told."""

    address: str
    """ANY, or `ray://HOST:PORT` of a Ray client server."""
    environ: Mapping[str, str]
    """Settings of cachemgr for the nodes, such as CACHEMGR_MIRROR; all else is their own."""
    words: tuple[str, ...] = ()
    """Options of `cachemgr prewarm` for every entry."""
    parallel: int = 4
    """Entries of each kind of GPU at a time, at most; Ray runs no more than it has room for."""


class Node(msgspec.Struct, frozen=True):
    """A node that is alive: how many GPUs it has, and of which kinds, in Ray's words."""

    gpus: float
    kinds: frozenset[str]


def prewarm_on_ray(
    spec: Spec, cluster: Cluster, record: Record, *, now: Callable[[], str], told: Callable[[Result, str], None]
) -> tuple[Result, ...]:
    """All entries, in the order of the spec; `told` gets each as it is done, and the node that did it. What becomes of
    them is kept as it comes: who is interrupted loses nothing that is done.

    Raises:
        UsageError: there is no Ray here, or the address is none.
        StoreError: the cluster cannot be reached, or is lost, or the record cannot be written.
    """
    done: dict[str, Result] = {}
    with _connected(cluster.address) as ray:
        for entry, result, node in _results(ray, spec, cluster):
            done[entry.name] = result
            record.note(entry, result, now())
            told(result, node)
    return tuple(done[entry.name] for entry in spec.entries)


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    if address != ANY and not _ADDRESS.fullmatch(address):
        raise UsageError(f"`{address}` is no Ray cluster", hint="--on ray, or --on ray://HOST:10001")
    try:
        import ray
    except ImportError:
        raise UsageError("Ray is not installed beside cachemgr", hint="pip install 'cachemgr[ray]'") from None
    try:
        ray.init(address="auto" if address == ANY else address, log_to_driver=True, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().rpartition("\n")[2]  # above it may be the trace of a server
        raise StoreError(f"no Ray cluster at {address}: {reason}", hint="ray start, or set RAY_ADDRESS") from None
    try:
        yield ray
    except (ConnectionError, ray.exceptions.RayError) as error:
        hint = "the same command goes on from there"
        raise StoreError(f"the Ray cluster at {address} was lost: {_first_line(error)}", hint=hint) from None
    finally:
        ray.shutdown()


def _results(ray: Any, spec: Spec, cluster: Cluster) -> Iterator[tuple[Entry, Result, str]]:
    """Each entry as it is done, with what became of it and where."""
    task = ray.remote(_task())
    waiting: dict[_Kind, deque[Entry]] = defaultdict(deque)
    for entry in spec.entries:
        waiting[entry.gpu, entry.gpus > 0].append(entry)
    running: dict[Any, tuple[_Kind, Entry]] = {}
    while running or any(waiting.values()):
        nodes = _nodes(ray)
        for kind, entries in waiting.items():
            while entries and sum(kind == other for other, _entry in running.values()) < cluster.parallel:
                entry = entries.popleft()
                lack = missing(entry, nodes)
                if lack:
                    yield entry, Result(entry.name, "no GPU", None, lack), ""
                else:
                    running[_submitted(task, entry, nodes, cluster)] = (kind, entry)
        if running:
            (reference, *_more), _rest = ray.wait(list(running), num_returns=1)
            entry = running.pop(reference)[1]
            yield entry, *_collected(ray, reference, entry)


def _submitted(task: Any, entry: Entry, nodes: Sequence[Node], cluster: Cluster) -> Any:
    kind = kind_of(entry, nodes)
    placed = task.options(
        name=f"prewarm {entry.name}",
        num_cpus=1,
        num_gpus=entry.gpus,
        resources={} if kind is None else {f"{_KIND}{kind}": 0.001},
        max_retries=_RETRIES,
        retry_exceptions=False,
    )
    return placed.remote(dump([entry]), list(cluster.words), dict(cluster.environ), entry.limit + _GRACE_SECONDS)


def _collected(ray: Any, reference: Any, entry: Entry) -> tuple[Result, str]:
    try:
        code, said, node = ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # the node is well, and the next one would say the same
        return Result(entry.name, "failed", None, f"cachemgr did not do it: {_first_line(error.cause)}"), ""
    except ray.exceptions.RayError as error:
        return Result(entry.name, "failed", None, f"lost on {_RETRIES + 1} nodes: {_first_line(error)}"), ""
    try:
        (result,) = msgspec.json.decode(said, type=_Said).entries
    except (msgspec.MsgspecError, ValueError):
        return Result(entry.name, "failed", None, f"cachemgr ended with exit code {code} on {node}"), node
    return result, node


def _first_line(error: object) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class _Said(msgspec.Struct):
    """What `cachemgr prewarm --json` prints."""

    entries: tuple[Result, ...]


def _nodes(ray: Any) -> list[Node]:
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [
        Node(
            float(resources.get("GPU", 0.0)),
            frozenset(name.removeprefix(_KIND) for name in resources if name.startswith(_KIND)),
        )
        for resources in alive
    ]


def kind_of(entry: Entry, nodes: Sequence[Node]) -> str | None:
    """Ray's word for the GPU that an entry needs: that of a node which is in its name, as `H200` in `NVIDIA H200`; None
    where any will do, or none has it."""
    if entry.gpu is None:
        return None
    words = set(re.split(r"[^A-Za-z0-9]+", entry.gpu.upper()))
    there = {kind for node in nodes for kind in node.kinds}
    return next((kind for kind in sorted(there, key=len, reverse=True) if _words(kind) <= words), None)


def _words(kind: str) -> set[str]:
    return set(re.split(r"[^A-Za-z0-9]+", kind.upper()))


def missing(entry: Entry, nodes: Sequence[Node]) -> str:
    """What no node of a cluster has of the GPUs that an entry needs, for people; empty for nothing. Ray would wait for
    such a node for ever."""
    if not entry.gpus:
        return ""
    kind = kind_of(entry, nodes)
    fitting = [node for node in nodes if entry.gpu is None or (kind is not None and kind in node.kinds)]
    if any(node.gpus >= entry.gpus for node in fitting):
        return ""
    there = sorted({f"{node.gpus:g} of {' or '.join(sorted(node.kinds)) or 'any GPU'}" for node in nodes if node.gpus})
    return f"needs {entry.wanted_gpus}, and nodes of the cluster have {', '.join(there) or 'no GPU'}"


def _task() -> Callable[[str, list[str], dict[str, str], float], tuple[int, str, str]]:
    """What a node does. It is sent by value and uses the standard library only: the node's own cachemgr does the work,
    which may lie in an environment of its own (CACHEMGR_BIN)."""
    last = _LAST_SECONDS

    def prewarm(spec: str, words: list[str], environ: dict[str, str], seconds: float) -> tuple[int, str, str]:
        import importlib.util
        import os
        import socket
        import subprocess
        import sys
        import tempfile

        def started_with() -> set[str]:
            """The names of the variables that this node was started with: those of our parent, the raylet."""
            with open(f"/proc/{os.getppid()}/environ", "rb") as file:
                return {each.partition(b"=")[0].decode(errors="replace") for each in file.read().split(b"\0")}

        def is_of_ray(name: str, known: set[str]) -> bool:
            """Ray sets OMP_NUM_THREADS for a task, and it would be taken for the user's, who has another key then."""
            return (name == "OMP_NUM_THREADS" or name.startswith("RAY_")) and name not in known

        try:
            known = started_with()
        except OSError:
            known = set(os.environ)
        own = {name: value for name, value in os.environ.items() if not is_of_ray(name, known)}
        binary = own.get("CACHEMGR_BIN")
        module = [sys.executable, "-m", "cachemgr"] if importlib.util.find_spec("cachemgr") else ["cachemgr"]
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(spec)
            file.flush()
            command = [*([binary] if binary else module), "prewarm", "--json", *words]
            process = subprocess.Popen(
                [*command, "--spec", file.name],
                env={**own, **environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # what it says on stderr goes through Ray's log to who waits
                text=True,
            )
            try:
                said, _nothing = process.communicate(timeout=seconds)
            except BaseException:
                process.terminate()
                try:
                    process.wait(last)
                except subprocess.TimeoutExpired:
                    process.kill()
                raise
        return process.returncode, said, socket.gethostname()

    return prewarm
