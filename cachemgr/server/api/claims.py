"""Claims on keys, for nodes that may not write to the bucket: single flight by `cachemgr.store.claims`, over HTTP."""

import msgspec

from cachemgr.errors import NotFoundError, UsageError
from cachemgr.key import Key, is_key
from cachemgr.server import contract as doc
from cachemgr.server.backend import Backend
from cachemgr.server.operations import Call
from cachemgr.server.problems import RefusedError
from cachemgr.store.claims import InStore

_MOST = 10**8 - 2
"""The next one has eight digits still."""
_MOST_DIGITS = 8
_MOST_OWNER = 4096
"""Bytes of a claim that is written; who watches it could not read a large one."""


def show_claim(backend: Backend, call: Call[doc.Nothing, doc.Nothing]) -> doc.Claim:
    """Say who compiles a key."""
    key = _key(call.path["key"])
    kept = InStore(backend.store, key)
    newest = kept.newest()
    if newest is None:
        return doc.Claim(key=key, number=None, owner=None, modified=None)
    return doc.Claim(key=key, number=newest.number, owner=kept.owner_of(newest.number), modified=newest.modified)


def take_claim(backend: Backend, call: Call[doc.Nothing, doc.ClaimWanted]) -> doc.ClaimTaken:
    """Take the claim on a key that comes after the one that the launch has seen."""
    kept, wanted = InStore(backend.store, _key(call.path["key"])), call.body
    if len(msgspec.json.encode(wanted.owner)) > _MOST_OWNER:
        raise UsageError(f"the owner of a claim has more than {_MOST_OWNER} bytes", hint="shorten its launch or host")
    after = 0 if wanted.after is None else _number(wanted.after)
    kept.open()
    return doc.ClaimTaken(number=kept.take(wanted.owner, after=after))


def beat_claim(backend: Backend, call: Call[doc.Claimant, doc.Nothing]) -> doc.ClaimHeld:
    """Show that the owner of a claim lives."""
    kept = InStore(backend.store, _key(call.path["key"]))
    number = _held(kept, call)
    return doc.ClaimHeld(held=number is not None and kept.beat(number))


def give_up_claim(backend: Backend, call: Call[doc.Claimant, doc.Nothing]) -> doc.ClaimHeld:
    """Let others have the key: what was compiled is published, or will not be."""
    kept = InStore(backend.store, _key(call.path["key"]))
    number = _held(kept, call)
    if number is not None:
        kept.give_up(number)
    return doc.ClaimHeld(held=False)


def _held(kept: InStore, call: Call[doc.Claimant, doc.Nothing]) -> int | None:
    """The number of the claim, if it is there.

    Raises:
        RefusedError: another launch has it.
    """
    text = call.path["number"]
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise NotFoundError(f"`{text[:20]}` is no number of a claim", hint="GET /v1/claims/KEY says the number")
    number = _number(int(text))
    owner = kept.owner_of(number)
    if owner is not None and owner.launch != call.query.launch:
        raise RefusedError(
            409, f"launch `{owner.launch}` on {owner.host} has this claim", hint="GET /v1/claims/KEY says who compiles"
        )
    return None if owner is None else number


def _key(text: str) -> Key:
    if not is_key(text):
        raise UsageError(f"`{text}` is no whole key", hint="a claim is on a whole key: k1: and 32 digits")
    return Key(text)


def _number(number: int) -> int:
    if not 0 < number <= _MOST:
        raise UsageError(f"{number} is no number of a claim", hint="GET /v1/claims/KEY says the number")
    return number
