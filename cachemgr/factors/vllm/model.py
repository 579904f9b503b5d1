"""Which model a launch loads: the string that vLLM hashes as `model`, and a digest of the files that configure it.

The string is not the one of the command line. In order, as `EngineArgs.__post_init__` and `create_engine_config`
(vLLM 0.26 to 0.33 `engine/arg_utils.py`) and `ModelConfig.__post_init__` (`config/model.py`) do it: offline, the id of
a hub model becomes the path of its snapshot; a speculators checkpoint gives way to the model that it drafts for; a
redirect file may rename it; a model in object storage becomes the directory that its files are pulled into. A local
path is hashed as it is spelled: `m`, `./m` and `/srv/m` are three models to vLLM, and `~` is never expanded.

The digest is of files that are here already. Online, vLLM may find a newer revision on the hub than the cached one;
its own hash then differs and picks correctly. A model that is not here yet has no digest, so its first launch is near
to its second. ModelScope's own cache is not read: its ids count as they are spelled and without a digest.

A draft model has a digest of its own, and so has a speculators checkpoint, beside its target's. vLLM compiles it as a
graph beside the target's, under the same hash, in which releases before 0.31 have nothing of the draft of most methods
(`config/speculative.py`, compute_hash).
"""

import hashlib
import json
import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path, PurePath

import msgspec

from cachemgr import digest
from cachemgr.factors.text import encodable
from cachemgr.factors.vllm.files import head
from cachemgr.factors.vllm.flags import Draft
from cachemgr.key import Factor, Role
from cachemgr.sensitive import HIDDEN

# vLLM 0.26 to 0.33 `transformers_utils/utils.py` (is_cloud_storage) and `runai_utils.py` (SUPPORTED_SCHEMES).
_OBJECT_STORAGE = ("s3://", "gs://", "az://")
# huggingface_hub 0.36 to 2.4 `constants.py` (ENV_VARS_TRUE_VALUES) and `utils/_validators.py` (REPO_ID_REGEX).
HUB_TRUE = frozenset({"1", "ON", "YES", "TRUE"})
"""What huggingface_hub takes for yes."""
_HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# From here on `snapshot_download` resolves the cache directory (huggingface_hub `_snapshot_download.py`; 1.21.0 does
# not yet): with a link or a relative path in HF_HOME, the two hash different strings.
_HUB_RESOLVES_SINCE = (1, 22)
# 0.26.0 `envs.py` knows `true` only; 0.28.0 added `1`.
_MODELSCOPE_ONE_SINCE = (0, 28)

# Files beside the weights that vLLM 0.26 to 0.33 reads into a configuration that its hash holds, or that decides which
# layers and kernels are built. Left out: `generation_config.json` and `config_sentence_transformers.json` (sampling
# and prompts, after and before the compiled graph), `modules.json` (a pooling head outside of it),
# `adapter_config.json` (a LoRA, which has its own flags), tokenizers, and weights with their indexes.
_CONFIGS = frozenset(
    {
        "config.json",  # transformers_utils/config.py, HFConfigParser
        "params.json",  # transformers_utils/config.py, MistralConfigParser
        "hf_quant_config.json",  # transformers_utils/config.py, get_config
        "joint_head_config.json",  # transformers_utils/model_arch_config_convertor.py
        # get_config_filenames of model_executor/layers/quantization/*.py
        "quantize_config.json",
        "quant_config.json",
        "quantization_config.json",
        "torchao_config.json",
        "sparse_attention_config.json",  # model_executor/model_loader/weight_utils.py
        # Maximum length of embedding models (transformers_utils/config.py, get_sentence_transformer_tokenizer_config).
        "sentence_albert_config.json",
        "sentence_bert_config.json",
        "sentence_camembert_config.json",
        "sentence_distilbert_config.json",
        "sentence_roberta_config.json",
        "sentence_xlm-roberta_config.json",
        "sentence_xlnet_config.json",
        # Sizes of images, audio and video, and so the shapes of encoders (transformers_utils/processor.py).
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    }
)
# Of this one only a length counts, for pooling models (config/model.py, get_and_verify_max_len); chat templates change
# often and compile nothing.
_TOKENIZER, _TOKENIZER_LENGTH = "tokenizer_config.json", "model_max_length"

_MOST_BYTES = 4 << 20
"""Of one file. The largest real config.json has some 100 kB; a GGUF file keeps its metadata at its beginning."""
_MOST_SOURCES = 256


class Model(msgspec.Struct, frozen=True):
    """The model of one launch."""

    hashed: str
    """What vLLM hashes as `model`. In a URL that vLLM does not know, logins and queries are hidden."""
    config: str | None
    """Digest of its configuration files; None while they are not on this machine."""
    label: str
    """What people call it."""
    architectures: tuple[str, ...] = ()
    """Those that its configuration names, where it is on this machine."""
    draft: str | None = None
    """Digest of the draft model's configuration files; None without a draft, or while they are not here."""
    speculators: bool = False
    """Whether the draft is a speculators checkpoint, whose own files say how many tokens it drafts."""


class _Machine(msgspec.Struct, frozen=True):
    """Where the engine will look."""

    environ: Mapping[str, str]
    cwd: Path
    hub: str | None
    """The hub cache as huggingface_hub spells it; None when ModelScope is used instead."""


def model(
    name: str,
    *,
    revision: str | None,
    environ: Mapping[str, str],
    cwd: Path,
    hf_config_path: str | None,
    code_revision: str | None = None,
    draft: Draft | None = None,
    vllm_version: str | None = None,
    hub_version: str | None = None,
) -> Model:
    """The model that vLLM makes of `name`. Never raises: what cannot be read is unknown.

    `revision`, `hf_config_path` and `code_revision` are flags of the same names, `environ` and `cwd` those of the
    engine. `vllm_version` and `hub_version` (of huggingface_hub) decide what changed between releases; an unknown one
    counts as new.
    """
    machine = _Machine(environ, cwd, _hub_cache(environ, cwd, vllm_version, hub_version))
    asked = _offline_path(machine, name, revision)
    target = _verifier(machine, asked, revision)
    hashed = _pulled(machine, _redirected(machine, target or asked))
    config_from = _redirected(machine, hf_config_path) if hf_config_path else hashed
    folders = {"config": _folder(machine, config_from, revision)}
    if config_from != hashed:
        folders["model"] = _folder(machine, hashed, revision)
    if target is not None:
        drafted = _digest(machine, {"config": _folder(machine, asked, revision)}, code_revision)
    else:
        drafted = None if draft is None else _drafting(machine, draft)
    return Model(
        _shown(hashed),
        _digest(machine, folders, code_revision),
        _label(machine, name),
        _architectures(folders["config"]),
        drafted,
        speculators=target is not None,
    )


def factors(found: Model, *, draft: Role) -> tuple[Factor, ...]:
    """`model` and, where they are known, `model.config` and `model.draft`, the role of which is `draft`.

    Of a speculators checkpoint no release hashes what its `speculators_config` says (0.26 to 0.33
    `transformers_utils/configs/speculators/base.py` and `config/speculative.py`, compute_hash).
    """
    named: tuple[tuple[str, str | None, Role], ...] = (
        ("model", encodable(found.hashed), "match"),
        ("model.config", found.config, "match"),
        ("model.draft", found.draft, "blind" if found.speculators else draft),
    )
    return tuple(Factor(name, value, role) for name, value, role in named if value is not None)


def _drafting(machine: _Machine, draft: Draft) -> str | None:
    """Digest of the configuration of a draft model (0.26 to 0.33 `config/speculative.py`, __post_init__)."""
    found = _pulled(machine, _redirected(machine, draft.name))
    return _digest(machine, {"config": _folder(machine, found, draft.revision)}, draft.code_revision)


def _offline_path(machine: _Machine, name: str, revision: str | None) -> str:
    """`name`, or the snapshot that replaces it where the hub may not be asked (`repo_utils.py`, get_model_path)."""
    offline = machine.environ.get("HF_HUB_OFFLINE") or machine.environ.get("TRANSFORMERS_OFFLINE") or ""
    if offline.upper() not in HUB_TRUE or in_object_storage(name) or _exists(machine, name):
        return name
    return _snapshot(machine, name, revision) or name


def _verifier(machine: _Machine, name: str, revision: str | None) -> str | None:
    """The model that a speculators checkpoint drafts for (`config.py`, maybe_override_with_speculators), else None."""
    folder = None if in_object_storage(name) else _folder(machine, name, revision)
    speculators = None if folder is None else _document(folder / "config.json").get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    found = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return found if isinstance(found, str) else None


def _redirected(machine: _Machine, name: str) -> str:
    """`name`, or what the redirect file says instead: a JSON object, or lines of two words (`utils.py`)."""
    path = machine.environ.get("VLLM_MODEL_REDIRECT_PATH")
    if not path or (text := _head(machine.cwd / path)) is None:
        return name
    renamed = _object(text[0]) or _pairs(text[0])
    found = renamed.get(name)
    return found if isinstance(found, str) and found else name


def _pairs(text: bytes) -> dict[str, object]:
    words = [line.split() for line in os.fsdecode(text).splitlines()]
    return {pair[0]: pair[1] for pair in words if len(pair) == 2}


def _pulled(machine: _Machine, name: str) -> str:
    """The directory that files of object storage are pulled into, named for the URL (`runai_utils.py`)."""
    if not in_object_storage(name):
        return name
    caches = machine.environ.get("XDG_CACHE_HOME", os.path.join(_home_of("~", machine.environ), ".cache"))
    assets = machine.environ.get("VLLM_ASSETS_CACHE", os.path.join(caches, "vllm", "assets"))
    # Eight digits of a digest: vLLM's own name for it, too short to hold the login that a URL may carry.
    folder = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return os.path.join(PurePath(_home_of(assets, machine.environ)), "model_streamer", folder)


def in_object_storage(name: str) -> bool:
    """Whether vLLM streams a model of this name from a bucket."""
    return name.lower().startswith(_OBJECT_STORAGE)


def _exists(machine: _Machine, name: str) -> bool:
    return bool(name) and os.path.exists(machine.cwd / name)


def _folder(machine: _Machine, name: str, revision: str | None) -> Path | None:
    """The directory or file that `name` means on this machine."""
    if _exists(machine, name):
        return machine.cwd / name
    # `org/name:quantisation` names a GGUF file of a repository to the plugin that reads those.
    found = _snapshot(machine, name.partition(":")[0], revision)
    return None if found is None else machine.cwd / found


def _snapshot(machine: _Machine, repository: str, revision: str | None) -> str | None:
    """The cached snapshot of a hub repository, as `snapshot_download` finds and spells it without a network."""
    if machine.hub is None or _HUB_ID.fullmatch(repository) is None:
        return None
    storage = os.path.join(machine.hub, "--".join(["models", *repository.split("/")]))
    commit = revision or "main"
    if _COMMIT.fullmatch(commit) is None:
        reference = _head(machine.cwd / os.path.join(storage, "refs", commit))
        if reference is None:
            return None
        commit = os.fsdecode(reference[0])
    found = os.path.join(storage, "snapshots", commit)
    return found if commit and _exists(machine, found) else None


def _hub_cache(environ: Mapping[str, str], cwd: Path, vllm_version: str | None, hub_version: str | None) -> str | None:
    """Where hub models are kept (huggingface_hub `constants.py`), or None with ModelScope (vLLM `envs.py`)."""
    truths = {"true"} if _older(vllm_version, _MODELSCOPE_ONE_SINCE) else {"true", "1"}
    if environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in truths:
        return None
    caches = environ.get("XDG_CACHE_HOME", os.path.join(_home_of("~", environ), ".cache"))
    home = _expanded(environ.get("HF_HOME", os.path.join(caches, "huggingface")), environ)
    legacy = environ.get("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    hub = _expanded(environ.get("HF_HUB_CACHE", legacy), environ)
    return hub if _older(hub_version, _HUB_RESOLVES_SINCE) else os.path.realpath(cwd / hub)


def _older(version: str | None, than: tuple[int, int]) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < than


def _expanded(path: str, environ: Mapping[str, str]) -> str:
    """`os.path.expandvars(os.path.expanduser(path))` with the variables of the engine."""

    def value(found: re.Match[str]) -> str:
        return environ.get(found[1].strip("{}"), found[0])

    return re.sub(r"\$(\w+|\{[^}]*\})", value, _home_of(path, environ))


def _home_of(path: str, environ: Mapping[str, str]) -> str:
    """`os.path.expanduser(path)` with the HOME of the engine."""
    if path != "~" and not path.startswith("~/"):
        return path
    home = environ.get("HOME")
    if home is None:
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return path
    return (home.rstrip("/") + path[1:]) or "/"


def _digest(machine: _Machine, folders: Mapping[str, Path | None], code_revision: str | None) -> str | None:
    contents = {part: {} if folder is None else _contents(folder) for part, folder in folders.items()}
    if not contents["config"].keys() & {"config.json", "params.json", ""}:
        return None
    for folder in folders.values():
        for repository in () if folder is None else _code_repositories(folder):
            place = _snapshot(machine, repository, code_revision)
            contents[f"code {repository}"] = {} if place is None else _sources(machine.cwd / place)
    return digest.of_bytes(json.dumps(contents, sort_keys=True).encode())


def _architectures(folder: Path | None) -> tuple[str, ...]:
    named = None if folder is None else _document(folder / "config.json").get("architectures")
    return tuple(word for word in named if isinstance(word, str)) if isinstance(named, list) else ()


def _contents(folder: Path) -> dict[str, str]:
    """Digests of what configures a model, by name; of a single file (GGUF) under an empty name."""
    if not os.path.isdir(folder):
        alone = _identity(folder)
        return {} if alone is None else {"": alone}
    found = {name: _identity(folder / name) for name in _CONFIGS}
    length = _document(folder / _TOKENIZER).get(_TOKENIZER_LENGTH)
    found[_TOKENIZER] = None if length is None else json.dumps(length, sort_keys=True)
    return {name: value for name, value in found.items() if value is not None} | _sources(folder)


def _sources(folder: Path) -> dict[str, str]:
    """Digests of the Python code of a model: vLLM compares the text of what it traced, and the rest builds configs."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".py"))
    except OSError:
        return {}
    found = {name: _identity(folder / name) for name in names[:_MOST_SOURCES]}
    return {encodable(name): value for name, value in found.items() if value is not None}


def _code_repositories(folder: Path) -> list[str]:
    """Other repositories that hold code of a model: `repository--module.Class` in its `auto_map` (transformers
    `dynamic_module_utils.py`, get_class_from_dynamic_module)."""
    mapped = _document(folder / "config.json").get("auto_map")
    references = mapped.values() if isinstance(mapped, dict) else ()
    return sorted({word.partition("--")[0] for word in references if isinstance(word, str) and "--" in word})


def _identity(path: Path) -> str | None:
    """Digest of a regular file, of JSON without its spelling: white space and order of keys do not survive into
    vLLM's hash. Of a file that is too large to be a configuration, its size and its beginning. None is unreadable."""
    read = _head(path)
    if read is None:
        return None
    data, size = read
    if size > len(data):
        return f"{size} {digest.of_bytes(data)}"
    return digest.of_bytes(_canonical(data) if path.suffix == ".json" else data)


def _canonical(data: bytes) -> bytes:
    try:
        return json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return data


def _document(path: Path) -> dict[str, object]:
    """The JSON object in a file; empty where there is none."""
    read = _head(path)
    return {} if read is None else _object(read[0])


def _object(data: bytes) -> dict[str, object]:
    try:
        parsed: object = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _head(path: Path) -> tuple[bytes, int] | None:
    return head(path, _MOST_BYTES)


def _label(machine: _Machine, name: str) -> str:
    """A hub id or URL as it is, a path by its last part, a snapshot by the id that it is of."""
    cached = re.search(r"models--([^/]+)/snapshots/", name)
    if cached is not None:
        return encodable(cached[1].replace("--", "/", 1))
    if _exists(machine, name):
        return encodable(os.path.basename(os.path.normpath(machine.cwd / name)))
    return encodable(_shown(name))


def _shown(name: str) -> str:
    """`name` without the login and the query of a URL. Secret keys may hold a slash, so all before `@` may be one."""
    scheme, separator, rest = name.partition("://")
    if not separator:
        return name
    place, asked, query = rest.partition("?")
    if "@" in query and "@" not in place:
        return f"{scheme}://{HIDDEN}"
    _, at, bare = place.rpartition("@")
    return f"{scheme}://{HIDDEN + at if at else ''}{bare}{asked}{HIDDEN if asked else ''}"
