"""Layout 1 of a store: which object lies where.

    layout.json  CACHEDIR.TAG
    layers/sha256/ab/<hex digest of the compressed bytes>.tar.zst
    artifacts/<key>/<hex capture digest>.json.zst
    artifacts/<key>/<hex capture digest>.<key id>.<time>.sig  what a signer says of it
    artifacts/<key>/<hex capture digest>.<machine>.mac       that this machine made it
    artifacts/<key>/<hex capture digest>.origin.json         where it was taken from; written before the manifest
    artifacts/<key>/<hex capture digest>.<time>.verified     that a start of it added nothing
    entries/<engine entry>/<key>          hint: written last, deleted first, never trusted without the manifest
    near/<guards>/<model>/<key>/<capture> hint, in a mirror: captures whose guards are equal, found without reading them
    launches/<date>/<launch>.json         small, write-once
    launches/<date>/<digest>.jsonl.zst    several of them, under the digest of the lines
    leases/<key>/<launch>.json            in use (heartbeat); `cachemgr.store.leases`
    claims/<key>/<number>.json            single flight: the newest one counts (heartbeat)
    pins/<key>.<time>.json                no prune removes it; the newest one counts; `cachemgr.store.pins`
    quarantine/<capture>/<host>.json      that a host does not use a capture
    quarantine/<capture>/<key id>.<time>.bad   that nobody should, signed
    quarantine/<capture>/<key id>.<time>.pulled   that this report beside a manifest came from the mirror
    artifacts/<key>/<capture>.<key id>.<time>.bad   the same report, where look-ups see it for nothing
    incoming/                             captures that wait for a signature, laid out as a store of its own
    tmp/                                  writes that are not finished; never read

In names the colon of a key or digest is a dash or left out. A newer layout is refused and never re-stamped.
"""

import re

import msgspec

from cachemgr import digest
from cachemgr.capture import LAYOUT
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, NotFoundError
from cachemgr.key import Key, folder, from_folder
from cachemgr.store import Store

_LAYOUT_NAME = "layout.json"
TAG_NAME = "CACHEDIR.TAG"
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# Written by cachemgr; see https://bford.info/cachedir/\n"
_LAYOUT_LIMIT = 64 << 10

ARTIFACTS = "artifacts/"
LAYERS = "layers/sha256/"
LAUNCHES = "launches/"
NEAR = "near/"
PINS = "pins/"
ENTRIES = "entries/"
LEASES = "leases/"
QUARANTINE = "quarantine/"
CLAIMS = "claims/"
INCOMING = "incoming/"
_PLAIN_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_CLAIM = re.compile(r"([0-9]{8})\.json")
_PIN = re.compile(r"pins/([^./]+)\.([0-9]{8}T[0-9]{6}Z)\.json")
MANIFEST_SUFFIX = ".json.zst"
LAYER_SUFFIX = ".tar.zst"
BATCH_SUFFIX = ".jsonl.zst"
SIGNATURE_SUFFIX = ".sig"
REPORT_SUFFIX = ".bad"
PULLED_SUFFIX = ".pulled"
_VERIFIED_SUFFIX = ".verified"


class Layout(msgspec.Struct, frozen=True):
    """What `layout.json` says."""

    layout: int


def layer_name(layer: Digest) -> str:
    """Where a layer lies."""
    digits = digest.hex_of(layer)
    return f"{LAYERS}{digits[:2]}/{digits}{LAYER_SUFFIX}"


def layer_of(name: str) -> Digest | None:
    """The layer that has this object name, or None when it is not spelled like one."""
    return digest.from_hex(name.rsplit("/", 1)[-1].removesuffix(LAYER_SUFFIX))


def key_of(name: str) -> Key | None:
    """The key of the artifact that an object lies in, or None when it lies in none."""
    parts = name.split("/")
    return from_folder(parts[1]) if len(parts) == 3 and f"{parts[0]}/" == ARTIFACTS else None


def artifact_prefix(key: Key) -> str:
    """Where the captures of a key lie."""
    return f"{ARTIFACTS}{folder(key)}/"


def manifest_name(key: Key, capture: Digest) -> str:
    """Where a capture's manifest lies."""
    return f"{artifact_prefix(key)}{digest.hex_of(capture)}{MANIFEST_SUFFIX}"


def signature_name(key: Key, capture: Digest, signer: str, signed: str) -> str:
    """Where a signature of a capture lies; `signer` is the id of a key, `signed` the RFC 3339 time.

    With the time, because objects never change: a new signature of the same signer is another object, which is there
    before the old one goes, and which a push copies.
    """
    return f"{artifact_prefix(key)}{digest.hex_of(capture)}.{signer}.{_squeezed(signed)}{SIGNATURE_SUFFIX}"


def verified_name(key: Key, capture: Digest, at: str) -> str:
    """Where it is noted that a start of a capture added nothing; `at` is the RFC 3339 time."""
    return f"{artifact_prefix(key)}{digest.hex_of(capture)}.{_squeezed(at)}{_VERIFIED_SUFFIX}"


def goes_along(name: str) -> bool:
    """Whether what lies beside a manifest goes where that goes; MAC and origin are of one machine."""
    return signer_of(name) is not None or is_verified(name)


def is_verified(name: str) -> bool:
    """Whether an object is such a note, by its name."""
    return name.endswith(_VERIFIED_SUFFIX)


def _squeezed(time: str) -> str:
    return time.replace("-", "").replace(":", "")


def signer_of(name: str) -> str | None:
    """The id of the key whose signature has this object name; None for other objects."""
    if not name.endswith(SIGNATURE_SUFFIX):
        return None
    return name.rsplit("/", 1)[-1].split(".")[1]


def report_names(key: Key, capture: Digest, signer: str, signed: str) -> tuple[str, str]:
    """Where the report of a signer lies that nobody should use a capture: where a fleet lists them, and beside the
    manifest, where whoever looks the capture up has it listed anyway."""
    said = f"{signer}.{_squeezed(signed)}{REPORT_SUFFIX}"
    digits = digest.hex_of(capture)
    return f"{QUARANTINE}{digits}/{said}", f"{artifact_prefix(key)}{digits}.{said}"


def reporter_of(name: str) -> str | None:
    """The id of the key whose report has this object name, beside a manifest or in the list; None for others."""
    parts = name.rsplit("/", 1)[-1].split(".")
    return parts[-3] if name.endswith(REPORT_SUFFIX) and len(parts) >= 3 else None


def mac_name(key: Key, capture: Digest, machine: str) -> str:
    """Where a machine says that it made a capture."""
    return f"{artifact_prefix(key)}{digest.hex_of(capture)}.{machine}.mac"


def origin_name(key: Key, capture: Digest) -> str:
    """Where it is noted that a capture was taken from another store, or made from what was."""
    return f"{artifact_prefix(key)}{digest.hex_of(capture)}.origin.json"


def beside(name: str) -> Digest | None:
    """The capture that an object beside its manifest is about."""
    return digest.from_hex(name.rsplit("/", 1)[-1].partition(".")[0])


def manifest_of(name: str) -> str:
    """The name of the manifest that an object is, or lies beside."""
    above, _slash, file = name.rpartition("/")
    return f"{above}/{file.partition('.')[0]}{MANIFEST_SUFFIX}"


def short(name: str) -> str:
    """What a person is told of the capture whose manifest has this object name: how its digest begins."""
    return name.rsplit("/", 1)[-1][:12]


def capture_of(name: str) -> Digest | None:
    """The capture whose manifest has this object name, or None when it is not spelled like one."""
    return digest.from_hex(name.rsplit("/", 1)[-1].removesuffix(MANIFEST_SUFFIX))


def quarantine_name(capture: Digest, host: str) -> str:
    """Where a host says that it does not use a capture. Host names are not paths, so odd ones are fingerprinted."""
    plain = host if _PLAIN_HOST.fullmatch(host) else digest.fingerprint(host.encode("utf-8", "backslashreplace"))
    return f"{QUARANTINE}{digest.hex_of(capture)}/{plain}.json"


def entry_name(entry: str, key: Key) -> str:
    """The hint that an engine's entry is in an artifact."""
    return f"{entry_prefix(entry)}{folder(key)}"


def entry_prefix(entry: str) -> str:
    """Where the hints of an engine's entry lie; their names end in the folders of keys."""
    return f"{ENTRIES}{entry}/"


def near_prefix(guards: str, model: str | None = None) -> str:
    """Where hints lie about captures with this print of guards (`cachemgr.key.guard_print`), of a `model` or of all."""
    return f"{NEAR}{guards}/" if model is None else f"{NEAR}{guards}/{digest.fingerprint(model.encode())}/"


def near_name(key: Key, capture: Digest, guards: str, model: str) -> str:
    """The hint that a capture has these guards."""
    return f"{near_prefix(guards, model)}{folder(key)}/{digest.hex_of(capture)}"


def hinted_manifest(name: str) -> tuple[Key, str] | None:
    """The key and the manifest that a hint below `near/` speaks of, or None when it is not spelled like one."""
    parts = name.split("/")
    key = from_folder(parts[3]) if len(parts) == 5 else None
    capture = digest.from_hex(parts[-1])
    return None if key is None or capture is None else (key, manifest_name(key, capture))


def pin_name(key: Key, at: str) -> str:
    """A pin that keeps an artifact; `at` is the RFC 3339 time. Names of one key sort as their times."""
    return f"{PINS}{folder(key)}.{_squeezed(at)}.json"


def pin_time(name: str) -> str:
    """The RFC 3339 time in the name of a pin.

    Raises:
        ValueError: it is no name of a pin.
    """
    found = _PIN.fullmatch(name)
    if found is None:
        raise ValueError("must be the name of a pin")
    at = found[2]
    return f"{at[:4]}-{at[4:6]}-{at[6:11]}:{at[11:13]}:{at[13:]}"


def lease_name(key: Key, launch: str) -> str:
    """The lease of a launch on an artifact."""
    return f"{LEASES}{folder(key)}/{launch}.json"


def pinned(name: str) -> Key | None:
    """The key that the pin with this object name keeps, or None when it is not spelled like one."""
    found = _PIN.fullmatch(name)
    return None if found is None else from_folder(found[1])


def entry_key(name: str) -> Key | None:
    """The key that a hint about an engine's entry names, or None when it is not spelled like one."""
    return from_folder(name.rsplit("/", 1)[-1])


def claim_prefix(key: Key) -> str:
    """Where the claims on a key lie."""
    return f"{CLAIMS}{folder(key)}/"


def claim_name(key: Key, number: int) -> str:
    """A claim on a key; names sort as their numbers."""
    return f"{claim_prefix(key)}{number:08}.json"


def claim_number(name: str) -> int | None:
    """The number of the claim with this object name, or None when it is not spelled like one."""
    found = _CLAIM.fullmatch(name.rsplit("/", 1)[-1])
    return None if found is None else int(found[1])


def launch_name(date: str, launch: str) -> str:
    """Where a launch record lies; `date` is `YYYY-MM-DD`."""
    return f"{LAUNCHES}{date}/{launch}.json"


def batch_name(date: str, batch: Digest) -> str:
    """Where several launch records of a day lie."""
    return f"{LAUNCHES}{date}/{digest.hex_of(batch)}{BATCH_SUFFIX}"


def batch_of(name: str) -> Digest | None:
    """The digest of the launch records with this object name, or None when it is not spelled like several."""
    return digest.from_hex(name.rsplit("/", 1)[-1].removesuffix(BATCH_SUFFIX)) if name.endswith(BATCH_SUFFIX) else None


def read_layout(store: Store) -> Layout | None:
    """The layout of a store, or None when nothing was stored there yet.

    Raises:
        CorruptError: not a store of ours, or one that only a newer cachemgr can read.
    """
    try:
        data = store.read(_LAYOUT_NAME, limit=_LAYOUT_LIMIT)
    except NotFoundError:
        return None
    try:
        layout = msgspec.json.decode(data, type=Layout)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        hint = "name another store or mirror"
        if not data.strip(b"\0"):  # what a power cut leaves of a file, and no cachemgr writes
            hint = f"remove {store}/{_LAYOUT_NAME}, which is empty: the next launch writes it; or {hint}"
        raise CorruptError(f"{store} is no cachemgr store: its {_LAYOUT_NAME} cannot be read", hint=hint) from None
    if layout.layout != LAYOUT:
        raise CorruptError(
            f"{store} has layout {layout.layout}, this cachemgr reads layout {LAYOUT}", hint="upgrade cachemgr"
        )
    return layout


def ensure_layout(store: Store) -> Layout:
    """The layout of a store, made if it is new. Raises as `read_layout`."""
    return read_layout(store) or make_layout(store)


def make_layout(store: Store) -> Layout:
    """The layout of a store in which there was none.

    Raises:
        CorruptError: it does not keep what is written to it, or somebody has made it another store.
    """
    store.put(_LAYOUT_NAME, msgspec.json.encode(Layout(LAYOUT)))
    store.put(TAG_NAME, _TAG)
    made = read_layout(store)
    if made is None:
        raise CorruptError(f"{store} does not keep what is written to it")
    return made
