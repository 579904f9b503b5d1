"""What prewarm starts for a command: the same engine with weights that mean nothing, on a port of its own.

Neither is in the engine's hash: it has nothing of how weights are loaded (vLLM 0.26 to 0.33 `config/load.py`:
compute_hash has no factors), and nothing of where a server listens. Our key is that of the command as it was given:
`--load-format` counts as blind in it, because some loaders quantize.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from cachemgr.domains import TABLE
from cachemgr.domains.domain import ROOT_VARIABLE
from cachemgr.factors import engine_of
from cachemgr.factors.vllm.command import EngineCommand
from cachemgr.factors.vllm.flags import Flags
from cachemgr.factors.vllm.model import in_object_storage
from cachemgr.factors.wrappers import spelled_out

_SERVERS = frozenset({"serve", "api_server"})
_PLAIN_FORMATS = frozenset(
    {
        "auto",
        "dummy",
        "fastsafetensors",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "safetensors",
    }
)
"""Loaders that fill the layers that the model has (0.26 to 0.33 `model_executor/model_loader/__init__.py`). The others
read weights that were quantized, sharded or serialised for them, or from another process."""
_GGUF_OF_HUB = re.compile(r"[\w.-]+/[\w.-]+:[\w-]+")
_OF_BUILDS = frozenset({"CI"})
"""torch has it in every key (2.13 `_functorch/config.py`, error_on_custom_op_aliasing)."""


class Server(msgspec.Struct, frozen=True):
    """Where a started server listens."""

    port: int
    tls: bool = False
    key: str | None = None
    """What it asks of its clients."""
    adapters: bool = False
    """Whether it takes adapters (LoRA)."""


class Starting(msgspec.Struct, frozen=True):
    """What is started for a command."""

    executes: tuple[str, ...]
    server: Server | None
    """None for a command that ends by itself."""
    note: str
    """Why real weights are loaded, for people; empty where they are not, or there are none."""


def starting(argv: Sequence[str], environ: Mapping[str, str], cwd: Path, *, port: int, real_weights: bool) -> Starting:
    """What to start for `argv`; a server gets `port`, on this machine only.

    Raises:
        NoSuchCommandError, CannotExecuteError: it cannot be started at all.
    """
    engine = engine_of(argv, environ, cwd)
    if engine is None:
        return Starting(tuple(argv), None, note="")
    command, flags = engine
    reason = "--real-weights" if real_weights else needs_weights(flags)
    given = flags.values.get("load-format") == "dummy"
    added = [] if reason or given else ["--load-format", "dummy"]
    server = _server(command, flags, environ, port)
    if server is not None:
        added += ["--host", "127.0.0.1", "--port", str(port)]
        added += ["--uds="] if flags.values.get("uds") else []
    note = f"loads its weights: {reason}" if reason else ""
    return Starting((*spelled_out(argv, environ), *added), server, note=note)


def needs_weights(flags: Flags) -> str:
    """Why an engine cannot do without its weights; empty where it can."""
    form = flags.values.get("load-format", "auto").lower()
    if form not in _PLAIN_FORMATS:
        return f"--load-format {form} reads weights that were made for it"
    if flags.values.get("quantization") == "bitsandbytes":
        return "bitsandbytes has a loader of its own"
    if _is_gguf(flags):
        return "a GGUF file has its own kinds of layers"
    if "model-loader-extra-config" in flags.values:
        return "the dummy loader takes no --model-loader-extra-config"
    if in_object_storage(flags.model or ""):
        return "a model in object storage has loaders of its own"
    return ""


def _is_gguf(flags: Flags) -> bool:
    """A file, or `org/name:quantization` for one of a repository, as the plugin takes it that reads these."""
    model = (flags.model or "").lower()
    return flags.values.get("quantization") == "gguf" or model.endswith(".gguf") or bool(_GGUF_OF_HUB.fullmatch(model))


def _server(command: EngineCommand, flags: Flags, environ: Mapping[str, str], port: int) -> Server | None:
    if command.kind not in _SERVERS or command.headless:
        return None
    tls = bool(flags.values.get("ssl-certfile") or flags.values.get("ssl-keyfile"))
    key = _first_of(flags.values.get("api-key")) or environ.get("VLLM_API_KEY")
    return Server(port, tls=tls, key=key, adapters=flags.values.get("enable-lora") == "true")


def _first_of(listed: str | None) -> str | None:
    """`--api-key` takes several since 0.11; here they are one JSON list."""
    if not listed:
        return None
    try:
        keys = msgspec.json.decode(listed, type=list[str])
    except msgspec.MsgspecError:
        return listed
    return keys[0] if keys else None


def surroundings(environ: Mapping[str, str], root: Path) -> dict[str, str]:
    """The environment of one start that finds nothing that another start left: its caches are below `root`.

    Directories that the user set for caches are left out. Caches that are used where their engine puts them stay there.
    """
    moved = [domain for domain in TABLE if not domain.usual_base]
    places = {name for domain in moved for name in (domain.variable, domain.moved_by) if name}
    kept = {name: value for name, value in environ.items() if name not in places}
    return {**kept, ROOT_VARIABLE: str(root)}


def without_build_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what a build has in its environment and a server has not, and what would be in every key."""
    return {name: value for name, value in environ.items() if name not in _OF_BUILDS}
