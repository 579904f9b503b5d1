"""What an optimization level and a graph mode turn on, for people.

vLLM 0.26 to 0.33 `config/vllm.py` (OPTIMIZATION_LEVEL_00 to _03, the same in all of them in what is said here) and
`config/compilation.py` (CUDAGraphMode). A flag wins over its level.
"""

from collections.abc import Sequence

from cachemgr.key import Factor

_DEFAULT_LEVEL = "2"
LEVELS = {
    "0": "no compilation, no CUDA graphs, no fusions, no FlashInfer autotuning",
    "1": "Dynamo and Inductor, piecewise CUDA graphs, fusions of norms and activations, FlashInfer autotuning",
    "2": "as 1, with full and piecewise CUDA graphs and fusions of all-reduce, attention and rotary embedding",
    "3": "as 2 in every release so far",
}
GRAPH_MODES = {
    "NONE": "no CUDA graphs",
    "PIECEWISE": "graphs of the parts between attention",
    "FULL": "one graph of the whole model, for all batches",
    "FULL_DECODE_ONLY": "one graph of the whole model for decode batches, none for others",
    "FULL_AND_PIECEWISE": "one graph of the whole model for decode batches, parts between attention for others",
}
_OF_LEVEL = {"0": "NONE", "1": "PIECEWISE", "2": "FULL_AND_PIECEWISE", "3": "FULL_AND_PIECEWISE"}


def turned_on(factors: Sequence[Factor]) -> list[tuple[str, str]]:
    """The level and the graph mode of an engine of vLLM, each with what it turns on; empty for other engines."""
    values = {factor.name: factor.value for factor in factors}
    if values.get("engine") != "vllm":
        return []
    if values.get("flags.enforce-eager") == "true":
        return [("level", "--enforce-eager: no compilation and no CUDA graphs")]
    level = values.get("flags.optimization-level") or _DEFAULT_LEVEL
    named = values.get("flags.compilation-config.cudagraph_mode")
    mode = (named or _OF_LEVEL.get(level, "")).upper()
    given = "" if "flags.optimization-level" in values else " (default)"
    return [
        ("level", f"-O{level}{given}: {LEVELS.get(level, 'not known')}"),
        ("graphs", f"{mode}{'' if named else ' (by level)'}: {GRAPH_MODES.get(mode, 'not known')}"),
    ]
