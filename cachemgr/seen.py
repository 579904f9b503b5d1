"""What the log of one launch says about it: plain facts, which `engine_log` reads and the verdict weighs."""

import msgspec

from cachemgr.tracebacks import Failure


class CompileDirectory(msgspec.Struct, frozen=True):
    """A directory of compiled graphs that a rank uses (`compilation/backends.py`)."""

    path: str
    entry: str | None
    """Its ten-hex name; None where the user chose the directory (`compilation_config.cache_dir`)."""
    rank: int | None
    tag: str | None
    """`backbone`, `eagle_head`, an encoder's name: which of the launch's models."""


class AotEntry(msgspec.Struct, frozen=True):
    """One AOT file of one rank and what became of it (`compilation/decorators.py`)."""

    path: str
    entry: str | None
    """Its 64-hex name."""
    rank: int | None
    tag: str | None
    loaded: bool = False
    saved: bool = False
    rejected: str | None = None
    """The engine's reason."""
    not_saved: str | None = None

    @property
    def verdict(self) -> str:
        """`loaded`, `rejected` (and usually saved again), `saved` (compiled in this start) or `not saved`.

        The layers of an encoder share one entry: the first of a cold start saves it, and the others load that.
        """
        if self.rejected is not None:
            return "rejected"
        if self.saved:
            return "saved"
        return "loaded" if self.loaded else "not saved"


class Rejection(msgspec.Struct, frozen=True):
    """Why the engine did not take an entry, or died of it."""

    entry: str | None
    """The path of the AOT file, or the first path in the words of a fatal error."""
    reason: str
    """The engine's own words."""
    explanation: str | None
    fix: str | None
    """Both None where the reason is not known."""
    of_entry: bool = True
    """Whether the entry itself is to blame, as far as anybody knows."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the log said so far. None, or nothing in it, means that it did not say."""

    version: str | None
    model_runner: str | None
    device: str | None
    attention_backend: str | None
    flash_attention: int | None
    compile_mode: str | None
    graph_mode_requested: str | None
    """What a message says it was before the engine lowered it, or as configured."""
    graph_mode: str | None
    """The effective one: lowered by a message, or as configured once graphs were captured or the engine was ready."""
    compile_cache_disabled: bool
    compile_directories: tuple[CompileDirectory, ...]
    aot_entries: tuple[AotEntry, ...]
    rejections: tuple[Rejection, ...]
    phases: dict[str, float]
    """Seconds by phase, of the slowest process, summed over its models: model_init, weights, model_load, dynamo,
    compile_graphs, graphs_load, aot_load, compile, warmup, capture, kernel_warmup, init_engine, ready."""
    compile_ranges: dict[str, float]
    """Seconds by compile range, of the slowest process, as the engine writes the range: `(1, 16384)`."""
    graph_gib: float | None
    kv_tokens: int | None
    """Summed over data-parallel engines."""
    kv_gib: float | None
    weights_gib: float | None
    gpu_free_gib: float | None
    gpu_total_gib: float | None
    world_size: int | None
    ranks: tuple[int, ...]
    """Ranks that announced themselves."""
    engine_ready_at: float | None
    """When all data-parallel engines had said `init engine`. A log of one node of several never has them all."""
    engines_ready: int
    """Engines that said it."""
    server_ready_at: float | None
    """When an API server first said that it is up; it waits for all its engines."""
    out_of_memory: tuple[str, ...]
    """Lines that say so, or that a worker was killed with signal 9: never the fault of a cache."""
    died_of: tuple[int, ...]
    """Signals that ended processes of the engine, but for 9, as their parent says; workers and cores die apart from the
    command."""
    failures: tuple[Failure, ...]
    """The first fifteen and the last one."""
    jit_monitor: bool
    jit_after_ready: tuple[str, ...]
    """Kernels that were compiled while serving, at most 32."""
    jit_count: int
    autotune: str | None
    """FlashInfer: `tuned`, `loaded` or `disabled`."""
    autotune_paths: tuple[str, ...]
    warmed_up: tuple[str, ...]
    missing: tuple[str, ...]
    """Events that a complete start of this version prints and that are not there (yet)."""

    @property
    def ready_at(self) -> float | None:
        """The ready sign: of the server if there is one, else of the engine."""
        return self.server_ready_at if self.server_ready_at is not None else self.engine_ready_at

    @property
    def all_ranks(self) -> bool | None:
        """Whether every rank of the world announced itself in this log; None where none did."""
        return None if self.world_size is None else len(self.ranks) >= self.world_size
