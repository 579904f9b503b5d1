"""The configuration file behind `--config`, as the words that vLLM makes of it.

Mirrors `load_config_file` of vLLM's `utils/argparse_utils.py`. 0.26.0 drops a `false`; later versions write the `--no-`
twin where there is one. Written for all of them: where the default is `false` the two are equal, and where it is not, a
file that says `false` to 0.26.0 only costs a key of its own.
"""

import json
from collections.abc import Collection
from pathlib import Path

from cachemgr import documents
from cachemgr.factors.vllm.files import head

_MOST_BYTES = 1 << 20


def words(path: Path, switches: Collection[str]) -> list[str]:
    """The words that `path` stands for. `switches` are the flags that have a `--no-` twin.

    Raises:
        ValueError: the file cannot be read, or is no YAML mapping.
    """
    if path.suffix not in {".yaml", ".yml"}:
        raise ValueError(f"{path.name}: no .yaml file")
    read = head(path, _MOST_BYTES)  # a pipe is left to the engine, which could not read it after us
    if read is None or read[1] > _MOST_BYTES:
        raise ValueError(f"{path.name}: no file that can be read")
    try:
        loaded = documents.yaml(read[0].decode())
    except ValueError as error:
        raise ValueError(f"{path.name}: no YAML") from error
    if isinstance(loaded, dict):
        return [word for key, value in loaded.items() for word in _option(str(key), value, switches)]
    raise ValueError(f"{path.name}: no mapping")


def _option(key: str, value: object, switches: Collection[str]) -> list[str]:
    if value is True:
        return ["--" + key]
    if value is False:
        return ["--no-" + key] if key.replace("_", "-") in switches else []
    if isinstance(value, list):
        return ["--" + key, *map(str, value)] if value else []
    if isinstance(value, dict):
        return ["--" + key, json.dumps(value)]
    return ["--" + key, str(value)]
