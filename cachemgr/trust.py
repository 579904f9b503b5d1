"""Trust: whose captures a launch may use.

An engine executes what is restored, so whoever can write a store that is read runs code here. What is asked of a
capture follows where it lies and where it was taken from, whichever asks for more: `require` a mark that counts, `warn`
and use it all the same, or `off`.

Two marks count, and both lie beside the manifest as objects of their own. The MAC of this machine (`cachemgr.machine`)
says that it was made here, of nothing but what was trusted itself. A signature (`cachemgr.signature`) says that the
holder of a trusted key answers for it. A key that is revoked or has expired vouches for nothing, whenever it is said to
have signed: a thief writes any time that he likes. What such a key had signed rightly is signed again with another.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

import msgspec

from cachemgr.capture import Where
from cachemgr.clock import epoch, written
from cachemgr.digest import Digest, hex_of, is_digest
from cachemgr.errors import CacheError, CorruptError, DeniedError, NotFoundError, UntrustedError, UsageError
from cachemgr.key import Key
from cachemgr.machine import Machine
from cachemgr.signature import MAX_BYTES, PublicKey, Report, is_key_id, public_key, verified, verified_report
from cachemgr.store import Store, layout
from cachemgr.store.captures import UNASKED, Capture, Marks, Standing, no_marks

Policy = Literal["require", "warn", "off"]
"""What is asked of a capture before it is used: a mark that counts; the same, but only saying so; nothing."""

_STRICTEST: tuple[Policy, ...] = ("require", "warn", "off")
_LEVELS: tuple[Where, ...] = get_args(Where)
_SKEW_SECONDS = 300.0
"""How far the clock of a signer may be ahead of ours."""
_LIST_LIMIT = 1 << 20
_MOST_TRIED = 16
"""Signatures of trusted keys that are looked at for one capture: who writes a bucket can fill it with forged ones."""
HERE = "this machine"


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a capture of the local store was taken from, or what it was made of was."""

    where: Where
    store: str
    """For people."""
    since: str
    """RFC 3339, UTC."""
    also: tuple[Where, ...] = ()
    """Where else, of one that was made of several."""

    def encoded(self) -> bytes:
        """As it lies in a store."""
        return msgspec.json.encode(self, order="sorted")


class TrustedKey(msgspec.Struct, frozen=True):
    """A public key whose signatures count, until `expires` (seconds since the epoch)."""

    public: PublicKey
    expires: float | None = None


@dataclass(frozen=True)
class Trust:
    """Who is trusted, and with what."""

    policies: Mapping[Where, Policy]
    machine: Machine | None = None
    """None where this machine cannot keep a key."""
    now: Callable[[], float] = time.time
    """Seconds since the epoch."""
    keys: Mapping[str, TrustedKey] = field(default_factory=dict)
    """By key id."""
    revoked: frozenset[str] = frozenset()
    """Ids of keys, and digests of captures."""
    max_age: float | None = None
    """Seconds after which a signature has to be renewed."""
    faults: tuple[str, ...] = ()
    """What could not be read of what the settings name, for people."""

    def closed(self, where: Where, policy: Policy) -> str | None:
        """Why a level is not read at all, or None. The local store has what this machine made."""
        if where == "local" or policy != "require" or any(map(self._counts, self.keys.values())):
            return None
        return (
            f"no trusted key; set CACHEMGR_TRUSTED_KEYS, or, accepting that whoever can write it runs code here, "
            f"CACHEMGR_TRUST={where}=off"
        )

    def standing(
        self,
        policy: Policy,
        store: Store,
        key: Key,
        capture: Digest,
        beside: Collection[str],
        /,
        *,
        origins: bool = True,
    ) -> Standing:
        """What a capture is worth in a level that asks for `policy`. `origins`: whether the store notes where captures
        come from; a mirror does not, and asking would cost a request for each.

        Raises:
            UntrustedError: it must not be used.
        """
        if capture in self.revoked:
            raise UntrustedError(f"capture {hex_of(capture)[:12]} is revoked")
        report = self.report(store, capture, beside)
        if report is not None:
            said = f"capture {hex_of(capture)[:12]} is in quarantine: {report.reason} (key {report.signer})"
            raise UntrustedError(said, hint="cachemgr unquarantine")
        if policy != "require" and origins:
            asked = (self.policies[where] for where in _origins(store, key, capture))
            policy = min((policy, *asked), key=_STRICTEST.index)
        if policy == "off":
            return UNASKED
        if self.machine is not None and self.machine.made(store, key, capture, beside):
            return Standing(HERE)
        try:
            return Standing(self._signer(store, key, capture, beside))
        except UntrustedError as error:
            if policy == "require":
                raise
            return Standing("", str(error))

    def report(self, store: Store, capture: Digest, names: Collection[str]) -> Report | None:
        """What the holder of a trusted key reports against a capture, among the objects `names`; None for nothing.
        A report that nobody trusted has signed would let anybody who can write there take captures from a fleet."""
        told = [(name, layout.reporter_of(name)) for name in sorted(names, reverse=True)]
        trusted = [(name, signer) for name, signer in told if signer is not None and self.heeds(signer)]
        for name, signer in trusted[:_MOST_TRIED]:
            with suppress(UntrustedError, CorruptError, DeniedError, NotFoundError):
                return verified_report(store.read(name, limit=MAX_BYTES), capture, self.keys[signer].public)
        return None

    def heeds(self, signer: str) -> bool:
        """Whether what this key says is looked at."""
        return self._dismissed(signer) is None

    def opinion(self, store: Store, key: Key, capture: Digest, beside: Collection[str], /) -> Standing:
        """What a capture is worth where nothing is asked of it, for people: who answers for it, or why nobody does."""
        try:
            return self.standing("require", store, key, capture, beside)
        except UntrustedError as error:
            return Standing("", str(error))

    def is_signed(self, store: Store, key: Key, capture: Digest, beside: Collection[str]) -> bool:
        """Whether a trusted key answers for a capture, so that it may go where only such are read."""
        try:
            self._signer(store, key, capture, beside)
        except CacheError:
            return False
        return capture not in self.revoked

    def marks(self, sources: Iterable[Capture], where: Where | None, store: Store | None) -> Marks:
        """What is put beside a capture that is made here, partly of `sources` that were found in `store`.

        With our own mark we answer for all that is in it. Where something came from captures that nobody answers for,
        it gets their origin instead, so that a policy that asks for more later asks that of it as well.
        """
        doubted = [] if store is None else [each for each in sources if not self._believes(store, each)]
        if store is None or where is None or not doubted:
            return no_marks if self.machine is None else self.machine.mark
        origins = [_origins(store, each.manifest.key, each.digest) or {where} for each in doubted]
        first, *others = sorted(set[Where]().union(*origins))
        origin = Origin(first, str(store), written(self.now()), tuple(others)).encoded()
        return lambda key, capture: {layout.origin_name(key, capture): origin}

    def _believes(self, store: Store, source: Capture) -> bool:
        if source.standing is not None and source.standing.by:
            return True
        key = source.manifest.key
        try:
            names = [entry.name for entry in store.scan(layout.artifact_prefix(key))]
            beside = [name for name in names if layout.beside(name) == source.digest]
            return bool(self.standing("require", store, key, source.digest, beside).by)
        except CacheError:
            return False

    def _signer(self, store: Store, key: Key, capture: Digest, beside: Collection[str]) -> str:
        """Who of those that are trusted answers for a capture."""
        signatures = [(name, layout.signer_of(name)) for name in sorted(beside, reverse=True)]  # the newest first
        about = [(name, signer) for name, signer in signatures if signer and layout.beside(name) == capture]
        refusals = list(dict.fromkeys(filter(None, (self._dismissed(signer) for _name, signer in about))))
        promising = [(name, signer) for name, signer in about if self._dismissed(signer) is None]
        for name, signer in promising[:_MOST_TRIED]:
            try:
                return self._signed(store, name, capture, key, signer)
            except (UntrustedError, CorruptError, DeniedError) as error:  # one bad signature hides no good one
                refusals.append(str(error))
            except NotFoundError:
                continue
        said = "; ".join(refusals[:3]) or "nobody has signed it"
        raise UntrustedError(f"capture {hex_of(capture)[:12]} is not trusted: {said}", hint="cachemgr sign")

    def _dismissed(self, signer: str) -> str | None:
        """Why what this key has signed is not even looked at, or None."""
        trusted = self.keys.get(signer)
        if trusted is None:
            return f"key {signer[:32]} is not a trusted one"
        if signer in self.revoked:
            return f"key {signer} is revoked"
        return None if self._counts(trusted) else f"key {signer} has expired"

    def _signed(self, store: Store, name: str, capture: Digest, key: Key, signer: str) -> str:
        said = verified(store.read(name, limit=MAX_BYTES), capture, key, self.keys[signer].public)
        signed, now = epoch(said.signed), self.now()
        if signed > now + _SKEW_SECONDS:
            raise UntrustedError(f"the signature of key {signer} is from the future: {said.signed}")
        if said.expires is not None and epoch(said.expires) <= now:
            raise UntrustedError(f"the signature of key {signer} has expired on {said.expires}")
        if self.max_age is not None and now - signed > self.max_age:
            raise UntrustedError(f"the signature of key {signer} is too old: {said.signed}")
        return f"key {signer}"

    def _counts(self, trusted: TrustedKey) -> bool:
        live = trusted.expires is None or self.now() < trusted.expires
        return live and trusted.public.id not in self.revoked


def _origins(store: Store, key: Key, capture: Digest) -> set[Where]:
    """Where a capture was taken from; all levels for one whose origin cannot be made out. A store that fails is none.

    It is not looked for in a listing: one that was begun before the origin was written may show the manifest.
    """
    try:
        data = store.read(layout.origin_name(key, capture), limit=MAX_BYTES)
        found = msgspec.json.decode(data, type=Origin)
    except NotFoundError:
        return set()
    except (CorruptError, DeniedError, msgspec.MsgspecError, UnicodeDecodeError):
        return set(_LEVELS)
    return {found.where, *found.also}


def policies_of(words: Sequence[str], *, private: bool) -> dict[Where, Policy]:
    """The policy of each level that the setting `trust` asks for: one policy for all, or some as `seed=require`; what
    comes later counts.

    Without a word, the local store is off where only we can write it (`private`), and everything else is `require`.
    """
    found: dict[Where, Policy] = dict.fromkeys(_LEVELS, "require")
    if private:
        found["local"] = "off"
    for word in words:
        where, equals, policy = word.rpartition("=")
        named = [each for each in found if each == where or not equals]
        found.update(dict.fromkeys(named, cast("Policy", policy)))
    return found


def open_trust(
    keys: Sequence[str],
    revoked: Sequence[str],
    policies: Mapping[Where, Policy],
    *,
    machine: Machine,
    max_age: float | None,
    now: Callable[[], float],
) -> Trust:
    """Trust as the settings describe it. Where it cannot be known what else is revoked, no key is trusted."""
    faults: list[str] = []
    known = trusted_keys(keys, faults)
    before = len(faults)
    names = revoked_names(revoked, faults)
    if len(faults) > before:
        faults.append("it cannot be known what is revoked, so no key is trusted")
        known = {}
    return Trust(policies, machine, now, known, names, max_age, tuple(faults))


def trusted_keys(words: Sequence[str], faults: list[str]) -> dict[str, TrustedKey]:
    """The keys that `words` name: `ed25519:…`, followed by `expires=…` where it has an end, or files of such lines.

    What cannot be read is no trusted key, and is said in `faults`.
    """
    found: dict[str, TrustedKey] = {}
    last = ""
    for word in _expanded(words, faults):
        try:
            if word.startswith("expires="):
                found[last] = msgspec.structs.replace(found[last], expires=epoch(word.removeprefix("expires=")))
            else:
                public = public_key(word)
                last = public.id
                found[last] = TrustedKey(public)
        except (KeyError, ValueError, UsageError):
            if word.startswith("expires="):  # a key whose end cannot be read has ended
                found.pop(last, None)
            last = ""  # an end that follows is not that of the key before
            faults.append(f"`{word[:80]}` is no trusted key, and nothing is trusted because of it")
    return found


def revoked_names(words: Sequence[str], faults: list[str]) -> frozenset[str]:
    """The key ids and capture digests that `words` and the files among them name; `faults` gets what cannot be read."""
    names = _expanded(words, faults)
    strange = [name for name in names if not is_key_id(name) and not is_digest(name)]
    faults.extend(f"`{name[:80]}` in `revoked` is neither the id of a key nor a capture" for name in strange)
    return frozenset(names).difference(strange)


def _expanded(words: Sequence[str], faults: list[str]) -> list[str]:
    """The words, with those of files in the place of files; a line of a file ends at `#`."""
    found: list[str] = []
    for word in (part for text in words for part in text.split()):
        if not word.startswith(("/", "~")):  # never from the working directory
            found.append(word)
            continue
        try:
            with Path(word).expanduser().open("rb") as file:
                text = file.read(_LIST_LIMIT).decode()
        except (OSError, ValueError, RuntimeError) as error:  # a name that no file has, a home that nobody has
            faults.append(f"{word} cannot be read: {getattr(error, 'strerror', None) or error}")
            continue
        found.extend(part for line in text.splitlines() for part in line.partition("#")[0].split())
    return found
