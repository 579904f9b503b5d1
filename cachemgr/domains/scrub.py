"""Scrubbing: what an engine wrote into a file and nobody should get with it is not stored: secrets, and measured time.

`cache_key_factors.json` holds the raw values of every variable that vLLM hashes, `VLLM_API_KEY` among them up to 0.28
(vLLM 0.26, 0.28 `envs.py`, `compile_factors`; left out since 0.31). The engine writes the file once, as a note for
people, and never reads it (vLLM 0.26-0.33 `compilation/backends.py`, the only place that names it), so a scrubbed copy
breaks no hit.

`.best_config` holds how long a tuning took, which no reader looks at (torch 2.11-2.13 `_inductor/runtime/
autotune_cache.py`, `_load_cached_autotuning`). Without it the same winner has the same bytes on every machine, and a
start that writes its winners out again (vLLM 0.26 does at every load) has changed nothing.
"""

import json
import re

from cachemgr.domains import checks
from cachemgr.domains.domain import Relocation
from cachemgr.domains.relocation import CannotTravelError, unchanged
from cachemgr.sensitive import is_secret

MARK = "(scrubbed)"
"""Stands for a value that was secret."""

_TIME = "time_taken_ms"
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
"""The name and password in a URL."""


def scrubbed_factors(data: bytes, _siblings: object) -> bytes:
    """`cache_key_factors.json` with a mark for every secret value of its `env`, printed as vLLM prints it; the very
    bytes when there is none.

    Raises:
        CannotTravelError: not a JSON object.
    """
    value = checks.parsed_object(data)
    if value is None:
        raise CannotTravelError("is no JSON object")
    environ = value.get("env")
    if not isinstance(environ, dict):
        return data
    scrubbed = {name: _scrubbed(held, secret=is_secret(name)) for name, held in environ.items()}
    if scrubbed == environ:
        return data
    return json.dumps({**value, "env": scrubbed}, indent=2, sort_keys=True).encode()


def _scrubbed(value: object, *, secret: bool) -> object:
    if value is None or isinstance(value, (bool, int, float)) or value == "":
        return value  # `VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD` is a number; a secret is not
    if secret:
        return MARK
    if isinstance(value, list):
        return [_scrubbed(item, secret=False) for item in value]
    return _USERINFO.sub(MARK, value) if isinstance(value, str) else value


def without_time(data: bytes, _siblings: object) -> bytes:
    """A `.best_config` without `time_taken_ms`; the very bytes where it has none.

    Raises:
        CannotTravelError: not a JSON object.
    """
    value = checks.parsed_object(data)
    if value is None:
        raise CannotTravelError("is no JSON object")
    return (
        json.dumps({name: held for name, held in value.items() if name != _TIME}).encode() if _TIME in value else data
    )


FACTORS = Relocation(scrubbed_factors, unchanged)
"""For `cache_key_factors.json`."""
WINNER = Relocation(without_time, unchanged)
"""For `.best_config`."""
