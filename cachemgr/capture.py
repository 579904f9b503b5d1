"""The records that cachemgr keeps: what one launch used or made, as frozen values with one canonical JSON form.

A manifest is the commit point of a capture and what a signature will cover, so its bytes are canonical: keys sorted, no
white space, UTF-8. Its name is the digest of exactly those bytes. Layout 1 is frozen; a newer layout or an unknown
field is refused, never guessed at.

A manifest is also the first thing an attacker controls, so `decode_manifest` checks every path, mode, size and count
before anybody acts on one of them (design: bytes are checked before they are placed).
"""

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from cachemgr import digest
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError
from cachemgr.key import Difference, Factor, Key, Relations, derive, is_key

LAYOUT = 1
MAX_MANIFEST_BYTES = 256 << 20
MAX_FILES = 500_000
MAX_CAPTURE_BYTES = 64 << 30
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
_MAX_TIME_NS = 1 << 63
"""What a file system may keep; every kernel takes it."""

_PLAIN_NAME = r"[A-Za-z0-9_@%+=,-][A-Za-z0-9_@%+=,.-]*"
_PLAIN_PATH = re.compile(f"{_PLAIN_NAME}(?:/{_PLAIN_NAME})*")
"""What nearly every path in a cache looks like, and safe at one glance; the others are looked at part by part."""

Verdict = Literal["used", "partly used", "inert", "cold", "unknown"]
Where = Literal["local", "mirror", "seed", "image"]


class File(msgspec.Struct, frozen=True, omit_defaults=True):
    """One stored file. `path` is relative to its domain's directory; `size` (bytes) and `digest` are of the stored
    bytes, which for a `relocated` file name their own directory by a mark (`cachemgr.domains.relocation`)."""

    path: str
    size: int
    digest: Digest
    mode: int = 0o644
    mtime_ns: int | None = None
    """Kept only in domains whose validity depends on it; None everywhere else."""
    relocated: bool = False


class Unit(msgspec.Struct, frozen=True):
    """What is whole or worthless in a domain; `files` are sorted by path."""

    name: str
    files: tuple[File, ...]

    @property
    def paths(self) -> set[str]:
        """Those of its files."""
        return {file.path for file in self.files}

    def outdoes(self, older: "Unit | None") -> bool:
        """Whether readers take it instead of that of an older capture: where there is none, or it has all of its files
        and more. A unit grows when later launches add to it, and the larger one serves both."""
        return older is None or self.paths > older.paths


class Section(msgspec.Struct, frozen=True):
    """The units of one domain in a layer, sorted by name."""

    domain: str
    units: tuple[Unit, ...]

    def files(self) -> Iterator[File]:
        """All files in the order in which the tar holds them."""
        for unit in self.units:
            yield from unit.files


class Layer(msgspec.Struct, frozen=True):
    """Units of some domains as one deterministic `tar.zst`, one section a domain, sorted.

    Domains of one launch share bytes (Inductor keeps copies of kernels that Triton has as well), which only one
    compression window can see. `digest` and `size` (bytes) are of the compressed object in the store. `tar_digest` and
    `tar_size` are of the tar inside it, so that the same tree packed by another zstd release is recognised.
    """

    digest: Digest
    size: int
    tar_digest: Digest
    tar_size: int
    sections: tuple[Section, ...]

    def files(self) -> Iterator[File]:
        """All files in the order in which the tar holds them."""
        for section in self.sections:
            yield from section.files()


class Provenance(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a capture was made. For people; never part of an identity."""

    cachemgr: str
    host: str
    command: tuple[str, ...] = ()
    """The command line with secrets replaced."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One capture."""

    layout: int
    key: Key
    factors: tuple[Factor, ...]
    needs: Relations
    engine: str
    engine_version: str | None
    model: str
    device: str
    created: str
    """RFC 3339, UTC."""
    launch: str
    complete: bool
    layers: tuple[Layer, ...]
    provenance: Provenance
    timings: dict[str, float] = {}
    """Seconds per phase of the launch that made it."""
    ranks: tuple[str, ...] = ()
    """The ranks that ran on the node of this launch. A world on several nodes has a capture of each."""
    world: int = 0
    """How many ranks there were on all nodes; 0 where nobody knew."""
    entries: tuple[str, ...] = ()
    """The engine's own names of what is inside (AOT and ten-hex directories)."""

    def sections(self) -> Iterator[tuple[Layer, Section]]:
        """Every section with the layer that it is in."""
        for layer in self.layers:
            for section in layer.sections:
                yield layer, section

    def section(self, domain: str) -> tuple[Layer, Section] | None:
        """The section of `domain` and the layer that it is in, if this capture has one."""
        return next((pair for pair in self.sections() if pair[1].domain == domain), None)


EntryVerdict = Literal["loaded", "compiled", "rejected"]


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the engine said about one of its cache entries: a backbone, a draft head and an encoder have one each."""

    name: str
    verdict: EntryVerdict
    reason: str | None = None
    """Why it was rejected, in the engine's words."""


class Observation(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an engine said about its start. None: its log did not say."""

    engine_version: str | None = None
    compile_mode: str | None = None
    graph_mode_requested: str | None = None
    graph_mode: str | None = None
    """The effective one: an attention back end may not support what was asked for."""
    attention: str | None = None
    flash_attention: str | None = None
    graph_gib: float | None = None
    kv_cache_tokens: int | None = None
    compile_directories: tuple[str, ...] = ()
    """Of compiled graphs, per rank and model: by their own names (`<ten-hex>/<model>/<rank>`), by path where the user
    chose them."""
    compile_ranges: dict[str, float] = {}
    """Seconds by compile range, of the slowest rank."""
    autotune: str | None = None
    """FlashInfer's: tuned, loaded or disabled."""
    entries: tuple[Entry, ...] = ()
    missing: tuple[str, ...] = ()
    """What this version usually says and did not."""
    counters: dict[str, int] = {}
    """vLLM's own counts of what it compiled and loaded, where our plugin could read them."""
    processes: int = 0
    """Processes of the engine that our plugin spoke from."""


class Launch(msgspec.Struct, frozen=True, omit_defaults=True):
    """One start of an engine under cachemgr: what `run --report` writes and what the store keeps as a launch record."""

    schema: int
    launch: str
    key: Key
    result: Literal["exact", "near", "none"]
    artifact: Key | None
    where: Where | None
    verdict: Verdict
    reasons: tuple[str, ...]
    restored_files: int
    restored_bytes: int
    restore_seconds: float
    present_files: int
    """Files of the artifact that the live directory had already."""
    added: dict[str, int]
    added_after_ready: int
    phases: dict[str, float]
    published: Digest | None
    errors: dict[str, int]
    started: str
    exit_code: int | None
    """None while it runs."""
    engine: str
    engine_version: str | None
    model: str
    device: str
    host: str
    differs: tuple[Difference, ...] = ()
    observed: Observation | None = None
    factors: tuple[Factor, ...] = ()
    """What its key was made of, so that it can be explained when the pod is gone; empty in records before 0.2."""
    gpus: int | None = None
    """GPUs that waited for this start, on all machines that it is in charge of: each is in the record of one launch,
    and a node's part of a launch has none. None where nobody knows, as in older records. So it is for bytes."""
    pulled_bytes: int | None = None
    """That came from a mirror: of layers and what lies beside them, as they are stored."""
    published_bytes: int | None = None
    """Of the layers that it added to its store."""
    pushed_bytes: int | None = None
    """That it sent to a mirror itself. None as well where a process that outlives it sends them."""


def encode_manifest(manifest: Manifest) -> bytes:
    """The canonical bytes: what is named, stored and signed."""
    return msgspec.json.encode(manifest, order="sorted")


def encode_launch(launch: Launch) -> bytes:
    """A launch record as canonical JSON, every field present."""
    return msgspec.json.encode({name: getattr(launch, name) for name in Launch.__struct_fields__}, order="sorted")


def decode_launch(data: bytes) -> Launch:
    """Read a launch record. Raises CorruptError for anything else."""
    try:
        return msgspec.json.decode(data, type=Launch)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(f"launch record cannot be read: {error}") from None


def decode_manifest(data: bytes, *, name: str) -> Manifest:
    """Read and check a manifest; `name` says which one in an error.

    Raises:
        CorruptError: not JSON, not a manifest of layout 1, or a path, mode, size or count that may not be placed.
    """
    layout = _layout_of(data, name)
    if layout != LAYOUT:
        raise CorruptError(
            f"capture {name} has layout {layout}, this cachemgr reads layout {LAYOUT}", hint="upgrade cachemgr"
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(f"capture {name} cannot be read: {error}") from None
    # Covers unknown fields at any depth, repeated keys and every other spelling of the same values.
    fault = _fault(manifest) or (None if encode_manifest(manifest) == data else "it is not in canonical form")
    if fault is not None:
        raise CorruptError(f"capture {name} is refused: {fault}")
    return manifest


class _Versioned(msgspec.Struct):
    layout: int


def _layout_of(data: bytes, name: str) -> int:
    try:
        return msgspec.json.decode(data, type=_Versioned).layout
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(f"capture {name} cannot be read: {error}") from None


def _fault(manifest: Manifest) -> str | None:
    if not is_key(manifest.key):
        return f"`{manifest.key}` is no key"
    if len({factor.name for factor in manifest.factors}) != len(manifest.factors):
        return "a factor is given twice"
    if derive(manifest.factors) != manifest.key:
        return "its factors do not make its key"
    domains = [section.domain for _layer, section in manifest.sections()]
    if len(set(domains)) != len(domains):
        return "a domain has two sections"
    stray = next((entry for entry in manifest.entries if "/" in entry or not _is_safe_name(entry)), None)
    if stray is not None:
        return f"`{stray[:200]!r}` is no name of an entry"
    fault = next((fault for layer in manifest.layers if (fault := _layer_fault(layer)) is not None), None)
    return fault or _size_fault(manifest)


def _size_fault(manifest: Manifest) -> str | None:
    """Of everything together: equal files are stored once, so a small layer may unpack to more than any disk has."""
    count = size = 0
    for _layer, section in manifest.sections():
        for file in section.files():
            count, size = count + 1, size + file.size
    if count > MAX_FILES:
        return f"it lists {count} files, more than {MAX_FILES}"
    return None if size <= MAX_CAPTURE_BYTES else "its files have an impossible size together"


def _layer_fault(layer: Layer) -> str | None:
    if not (digest.is_digest(layer.digest) and digest.is_digest(layer.tar_digest)):
        return "a layer has a malformed digest"
    if layer.size < 0 or not 0 <= layer.tar_size <= MAX_CAPTURE_BYTES:
        return "a layer has an impossible size"
    domains = [section.domain for section in layer.sections]
    if sorted(set(domains)) != domains:
        return "a layer repeats or misorders its sections"
    faults = (_section_fault(section) for section in layer.sections)
    return next((fault for fault in faults if fault is not None), None)


def _section_fault(section: Section) -> str | None:
    if "/" in section.domain or not _is_safe_name(section.domain):
        return f"`{section.domain[:200]!r}` is no name of a domain"
    files = section.files()
    return _order_fault(section) or next((fault for file in files if (fault := _file_fault(file)) is not None), None)


def _order_fault(section: Section) -> str | None:
    """Sorted and without repetition, also across units."""
    units = [unit.name for unit in section.units]
    if not units or sorted(set(units)) != units:
        return f"section {section.domain} is empty, or repeats or misorders its units"
    names = Names()
    for unit in section.units:
        if not is_safe_path(unit.name):
            return f"`{unit.name[:200]!r}` is not a unit that may be placed"
        paths = [file.path for file in unit.files]
        if not paths or sorted(set(paths)) != paths:
            return f"unit {unit.name} is empty, or repeats or misorders its files"
        fault = names.add(unit)
        if fault is not None:
            return fault
    return None


class Names:
    """Names that can lie beside each other on any file system: no two that differ in case or in the composition of
    letters only, and no file where another needs a directory."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._directories: set[str] = set()

    def add(self, unit: Unit) -> str | None:
        """What is wrong with the names of a unit beside those that were added before, or None when it is added, too."""
        files = {_alike(file.path) for file in unit.files}
        if len(files) < len(unit.files):
            return f"unit {unit.name} has two names that some file systems take for one"
        if not self._files.isdisjoint(files):
            return f"unit {unit.name} repeats a file of another unit"
        directories: set[str] = set()
        for path in files:
            _add(path.rpartition("/")[0], directories)
        clash = (files & self._directories) | (directories & self._files) | (files & directories)
        if clash:
            return f"`{min(clash)}` is a file and a directory"
        self._files |= files
        self._directories |= directories
        return None


def _alike(path: str) -> str:
    """Equal for paths that a file system which ignores case or composes letters takes for one."""
    if path.isascii():
        return path.lower()
    import unicodedata

    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())


def _add(directory: str, directories: set[str]) -> None:
    """Add a directory and those above it, up to the first that is known."""
    while directory and directory not in directories:
        directories.add(directory)
        directory = directory.rpartition("/")[0]


def _file_fault(file: File) -> str | None:
    if not is_safe_path(file.path):
        return f"`{file.path[:200]!r}` is not a path that may be placed"
    if file.mode not in (0o644, 0o755):
        return f"`{file.path}` has mode {file.mode:o}"
    if not 0 <= file.size <= MAX_CAPTURE_BYTES:
        return f"`{file.path}` has an impossible size"
    if not 0 <= (file.mtime_ns or 0) < _MAX_TIME_NS:
        return f"`{file.path}` has an impossible time"
    if not digest.is_digest(file.digest):
        return f"`{file.path}` has a malformed digest"
    return None


def _is_safe_name(name: str) -> bool:
    return is_safe_path(name) and not name.startswith(".")


def is_safe_path(path: str) -> bool:
    """Whether `path` is relative, plain and stays below the directory that it is relative to."""
    if len(path) <= MAX_NAME_BYTES and _PLAIN_PATH.fullmatch(path):
        return True
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        return False
    if not raw or len(raw) > MAX_PATH_BYTES or not path.isprintable() or "\\" in path:
        return False
    return all(part not in ("", ".", "..") and len(part.encode()) <= MAX_NAME_BYTES for part in path.split("/"))
