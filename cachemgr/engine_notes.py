"""What vLLM itself noted about its keys: `cache_key_factors.json` beside the graphs of a ten-hex directory, and the
names of its entries.

The notes of an artifact are in its layers, those of a start that is here in its live directory (vLLM 0.26-0.33
`compilation/backends.py` writes one on a cold start). Nothing else of a layer is looked at, and nothing is placed.
"""

from collections.abc import Iterator, Sequence

import msgspec

from cachemgr.beneath import read_plain
from cachemgr.capture import File, Launch, Manifest, Unit
from cachemgr.domains.checks import parsed_object
from cachemgr.domains.vllm import AOT, FACTORS_NAME
from cachemgr.errors import CacheError
from cachemgr.explain import compare_notes, engine_says
from cachemgr.key import Difference
from cachemgr.layer import unpack
from cachemgr.store import Store, layout

_DOMAIN = "torch_compile"
_LIMIT = 4 << 20

Note = dict[str, object]


class Notes(msgspec.Struct, frozen=True):
    """Notes by the model that they are about (`backbone`, `eagle_head`, …), of the first rank that has one."""

    by_model: dict[str, Note]


class _Collector:
    """Takes the notes of a unit, and no other file."""

    def __init__(self, found: dict[str, Note]) -> None:
        self._found = found

    def whole(self, file: File, data: memoryview) -> None:
        if file.path.endswith(f"/{FACTORS_NAME}") and file.size <= _LIMIT:
            note = parsed_object(bytes(data))
            if note is not None:
                self._found.setdefault(file.path.split("/")[-2], note)

    def parts(self, _file: File, parts: Iterator[memoryview]) -> None:
        for _part in parts:
            pass

    def link(self, _file: File, _original: str) -> None:
        """Equal notes of other ranks say nothing new."""


def of_capture(store: Store, manifest: Manifest) -> Notes:
    """The notes in a capture. A layer that cannot be read has none."""
    found: dict[str, Note] = {}
    there = manifest.section(_DOMAIN)
    if there is None:
        return Notes(found)
    layer, _section = there

    def placer(domain: str, unit: Unit) -> _Collector | None:
        noted = any(file.path.endswith(f"/{FACTORS_NAME}") for file in unit.files)
        return _Collector(found) if domain == _DOMAIN and noted else None

    try:
        with store.open(layout.layer_name(layer.digest)) as stream:
            unpack(layer, stream, placer)
    except CacheError:
        return Notes({})
    return Notes(found)


def of_live(root: str, launch: Launch) -> Notes:
    """The notes that a launch left below the live root of this host."""
    found: dict[str, Note] = {}
    named = () if launch.observed is None else launch.observed.compile_directories
    for name in named:
        parts = name.split("/")  # <ten-hex>/<model>/<rank>; one that the user chose is a path
        if len(parts) != 3 or not all(parts):
            continue
        entry, model, rank = parts
        path = f"{root}/torch_compile_cache/{entry}/rank_{rank}_0/{model}/{FACTORS_NAME}"
        try:
            note = parsed_object(read_plain(path, limit=_LIMIT))
        except OSError:
            continue
        if note is not None:
            found.setdefault(model, note)
    return Notes(found)


def says(launch: Launch, manifest: Manifest, ours: Notes, theirs: Notes, differs: Sequence[Difference]) -> list[str]:
    """What the engine's own records say about a launch and the artifact that it is compared with."""
    both = sorted(ours.by_model.keys() & theirs.by_model.keys())
    told: list[str] = []
    for model in both:
        told += engine_says(compare_notes(ours.by_model[model], theirs.by_model[model]), differs)
    if both and not told:
        told.append("vLLM's own notes about its key are equal")
    return [*_names(launch, manifest), *dict.fromkeys(told)]


def _names(launch: Launch, manifest: Manifest) -> list[str]:
    """Whether vLLM looked for the entries that the artifact has."""
    if launch.observed is None or not manifest.entries:
        return []
    asked = {name.split("/")[0] for name in launch.observed.compile_directories}
    asked |= {entry.name.removeprefix(f"{AOT}/").split("/")[0] for entry in launch.observed.entries}
    told = []
    for length, what in ((64, "AOT entry"), (10, "directory of graphs")):
        ours = sorted(name for name in asked if len(name) == length)
        theirs = sorted(name for name in manifest.entries if len(name) == length)
        if not ours or not theirs:
            continue
        if set(ours) & set(theirs):
            told.append(f"vLLM looked for the {what} that the artifact has: {min(set(ours) & set(theirs))[:10]}…")
        else:
            told.append(f"vLLM looked for the {what} {ours[0][:10]}…, and the artifact has {theirs[0][:10]}…")
    return told
