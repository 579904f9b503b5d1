"""Layout 1 of a store: which object lies where.

    layout.json  CACHEDIR.TAG
    layers/sha256/ab/<hex digest of the compressed bytes>.tar.zst
    artifacts/<key>/<hex capture digest>.json.zst  [+ .sig]
    entries/<engine entry>/<key>          hint: written last, deleted first, never trusted without the manifest
    launches/<date>/<launch>.json         small, write-once
    leases/<key>/<launch>.json            in use (heartbeat)
    claims/<key>.json                     single flight
    pins/<key>.json
    quarantine/<capture>/<host>.json
    incoming/                             captures that wait for a signature
    tmp/                                  writes that are not finished; never read

In names the colon of a key or digest is a dash or left out. A newer layout is refused and never re-stamped.
"""

import re
import secrets

import msgspec

from cachemgr import digest
from cachemgr.capture import LAYOUT
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, NotFoundError
from cachemgr.key import Key, folder
from cachemgr.store import Store

_LAYOUT_NAME = "layout.json"
_TAG_NAME = "CACHEDIR.TAG"
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# Written by cachemgr; see https://bford.info/cachedir/\n"
_LAYOUT_LIMIT = 64 << 10

ARTIFACTS = "artifacts/"
LAYERS = "layers/sha256/"
LAUNCHES = "launches/"
QUARANTINE = "quarantine/"
_PLAIN_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
MANIFEST_SUFFIX = ".json.zst"
LAYER_SUFFIX = ".tar.zst"


class Layout(msgspec.Struct, frozen=True):
    """What `layout.json` says. `salt` seals factor values of unknown names, so that equal ones compare equal within a
    store and its mirror and cannot be read back from what is published."""

    layout: int
    salt: str


def layer_name(layer: Digest) -> str:
    """Where a layer lies."""
    digits = digest.hex_of(layer)
    return f"{LAYERS}{digits[:2]}/{digits}{LAYER_SUFFIX}"


def artifact_prefix(key: Key) -> str:
    """Where the captures of a key lie."""
    return f"{ARTIFACTS}{folder(key)}/"


def manifest_name(key: Key, capture: Digest) -> str:
    """Where a capture's manifest lies."""
    return f"{artifact_prefix(key)}{digest.hex_of(capture)}{MANIFEST_SUFFIX}"


def capture_of(name: str) -> Digest | None:
    """The capture whose manifest has this object name, or None when it is not spelled like one."""
    return digest.from_hex(name.rsplit("/", 1)[-1].removesuffix(MANIFEST_SUFFIX))


def quarantine_name(capture: Digest, host: str) -> str:
    """Where a host says that it does not use a capture. Host names are not paths, so odd ones are fingerprinted."""
    plain = host if _PLAIN_HOST.fullmatch(host) else digest.fingerprint(host.encode("utf-8", "backslashreplace"))
    return f"{QUARANTINE}{digest.hex_of(capture)}/{plain}.json"


def entry_name(entry: str, key: Key) -> str:
    """The hint that an engine's entry is in an artifact."""
    return f"entries/{entry}/{folder(key)}"


def pin_name(key: Key) -> str:
    """The pin that keeps an artifact."""
    return f"pins/{folder(key)}.json"


def launch_name(date: str, launch: str) -> str:
    """Where a launch record lies; `date` is `YYYY-MM-DD`."""
    return f"{LAUNCHES}{date}/{launch}.json"


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
        raise CorruptError(
            f"{store} is no cachemgr store: its {_LAYOUT_NAME} cannot be read", hint="set CACHEMGR_STORE to another"
        ) from None
    if layout.layout != LAYOUT:
        raise CorruptError(
            f"{store} has layout {layout.layout}, this cachemgr reads layout {LAYOUT}", hint="upgrade cachemgr"
        )
    return layout


def ensure_layout(store: Store) -> Layout:
    """The layout of a store, made if it is new. Of two makers one wins, and both use its salt."""
    found = read_layout(store)
    if found is not None:
        return found
    store.put(_LAYOUT_NAME, msgspec.json.encode(Layout(LAYOUT, secrets.token_hex(16)), order="sorted"))
    store.put(_TAG_NAME, _TAG)
    made = read_layout(store)
    if made is None:
        raise CorruptError(f"{store} does not keep what is written to it")
    return made
