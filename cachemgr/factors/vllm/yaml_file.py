"""The configuration file behind `--config`, as the words that vLLM makes of it.

Mirrors `load_config_file` of vLLM's `utils/argparse_utils.py`. 0.26.0 drops a `false`; later versions write the `--no-`
twin where there is one. Written for all of them: where the default is `false` the two are equal, and where it is not, a
file that says `false` to 0.26.0 only costs a key of its own.
"""

import json
from collections.abc import Collection
from pathlib import Path

from cachemgr import documents


def words(path: Path, switches: Collection[str]) -> list[str]:
    """The words that `path` stands for. `switches` are the flags that have a `--no-` twin.

    Raises:
        ValueError: the file cannot be read, or is no YAML mapping.
    """
    try:
        loaded = documents.yaml(path.read_text())
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{path.name}: {type(error).__name__}") from error
    except ValueError as error:
        raise ValueError(f"{path.name}: no YAML") from error
    if path.suffix not in {".yaml", ".yml"} or not isinstance(loaded, dict):
        raise ValueError(f"{path.name}: not a mapping in a .yaml file")
    found: list[str] = []
    for key, value in loaded.items():
        found += _option(str(key), value, switches)
    return found


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
