"""Signatures of captures: keys, statements and their two forms, on paper and in a store. The only importer of
`cryptography`.

What is signed is a statement: which capture, under which key, by whom, when and until when. A capture's digest is that
of its canonical manifest, which has the digests of all layers and files, so nothing below it can be exchanged. The
bytes that go into Ed25519 (RFC 8032) begin with what they are for and a version, so that no signature for another
purpose, nor one of an older or newer form, can be taken for one of these.
"""

import base64
import re

import msgspec

from cachemgr import digest
from cachemgr.clock import epoch
from cachemgr.digest import Digest
from cachemgr.errors import UntrustedError, UsageError
from cachemgr.key import Key

VERSION = 1
MAX_BYTES = 4096
"""What a signature in a store may have; real ones have less than 500."""

_DOMAIN = b"cachemgr capture signature 1\n"
_REPORT_DOMAIN = b"cachemgr quarantine report 1\n"
_KEY_DOMAIN = b"cachemgr ed25519 key 1\n"
MAX_REASON = 500
"""Letters of a reason in a report."""
_RAW_BYTES = 32
_SIGNATURE_BYTES = 64
_PREFIX = "ed25519:"
_KEY_ID = re.compile(r"[0-9a-f]{32}")


class PublicKey(msgspec.Struct, frozen=True):
    """An Ed25519 public key."""

    raw: bytes

    @property
    def id(self) -> str:
        """Its name: 32 hex digits."""
        return digest.hex_of(digest.of_bytes(_KEY_DOMAIN + self.raw))[:32]

    def __str__(self) -> str:
        return _PREFIX + base64.b64encode(self.raw).decode()


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a signer says. Times are RFC 3339, UTC, in whole seconds."""

    capture: Digest
    expires: str | None
    key: Key
    signed: str
    signer: str
    """The id of the signer's key."""
    version: int = VERSION


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A statement with its signature: the object beside a manifest."""

    signature: str
    """64 bytes as base64."""
    statement: Statement


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """That nobody in a fleet should use a capture, and who says so. `signed` is RFC 3339, UTC."""

    capture: Digest
    key: Key
    reason: str
    signed: str
    signer: str
    version: int = VERSION


class SignedReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A report with its signature, as it lies in a store."""

    report: Report
    signature: str
    """64 bytes as base64."""


def is_key_id(text: str) -> bool:
    """Whether `text` is spelled like the id of a key."""
    return _KEY_ID.fullmatch(text) is not None


def public_key(text: str) -> PublicKey:
    """The public key that is written `ed25519:` and base64.

    Raises:
        UsageError: it is written otherwise.
    """
    try:
        raw = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except ValueError:
        raw = b""
    key = PublicKey(raw)
    if len(raw) != _RAW_BYTES or str(key) != text:
        raise UsageError(f"`{text[:80]}` is no public key", hint=f"one is written {_PREFIX} and 44 letters of base64")
    return key


class Signer:
    """A private key. It is kept as PEM (PKCS#8, RFC 5958), which other tools make and keep as well."""

    def __init__(self, pem: bytes, *, where: str) -> None:
        """The key that is in `pem`; `where` says whose it is in an error, which never has a part of the key.

        Raises:
            UsageError: it is no Ed25519 private key, or one that needs a password.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            private = load_pem_private_key(pem, None)
        except TypeError:
            raise UsageError(f"the signing key in {where} needs a password", hint="store it without one") from None
        except (ValueError, UnsupportedAlgorithm):
            private = None
        if not isinstance(private, Ed25519PrivateKey):
            raise UsageError(f"there is no Ed25519 private key in {where}", hint="cachemgr keygen makes one")
        self._private = private
        self.public = PublicKey(private.public_key().public_bytes_raw())

    def sign(self, capture: Digest, key: Key, *, signed: str, expires: str | None = None) -> bytes:
        """The signature of a capture, as it lies in a store."""
        statement = Statement(capture, expires, key, signed, self.public.id)
        return _encoded(Signature(base64.b64encode(self._private.sign(_signed_bytes(statement))).decode(), statement))

    def report(self, capture: Digest, key: Key, *, reason: str, signed: str) -> bytes:
        """The report that nobody should use a capture, as it lies in a store."""
        said = Report(capture, key, reason[:MAX_REASON], signed, self.public.id)
        made = base64.b64encode(self._private.sign(_reported_bytes(said))).decode()
        return msgspec.json.encode(SignedReport(said, made), order="sorted")


def new_private_key() -> bytes:
    """A new private key, as PEM."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def verified(data: bytes, capture: Digest, key: Key, signer: PublicKey) -> Statement:
    """What `signer` says about the capture, if `data` is its signature.

    Raises:
        UntrustedError: it is not, or is written in any but the one canonical form. Times are the caller's to judge.
    """
    found = _decoded(data)
    said = found.statement
    if (said.capture, said.key, said.signer) != (capture, key, signer.id):
        raise UntrustedError(f"a signature of key {signer.id} is about something else")
    _require(signer, base64.b64decode(found.signature), _signed_bytes(said), f"a signature of key {signer.id}")
    return said


def verified_report(data: bytes, capture: Digest, signer: PublicKey) -> Report:
    """What `signer` reports about the capture, if `data` is its report.

    Raises:
        UntrustedError: it is not.
    """
    try:
        found = msgspec.json.decode(data, type=SignedReport)
        signature = base64.b64decode(found.signature, validate=True)
        epoch(found.report.signed)
    except (msgspec.MsgspecError, ValueError):
        raise UntrustedError("a report cannot be read") from None
    said = found.report
    if (said.capture, said.signer, said.version) != (capture, signer.id, VERSION):
        raise UntrustedError(f"a report of key {signer.id} is about something else")
    _require(signer, signature, _reported_bytes(said), f"a report of key {signer.id}")
    return said


def _require(signer: PublicKey, signature: bytes, signed: bytes, what: str) -> None:
    """Raises UntrustedError unless this is the signature of these bytes."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(signer.raw).verify(signature, signed)
    except (InvalidSignature, ValueError):
        raise UntrustedError(f"{what} is forged or damaged") from None


def _reported_bytes(report: Report) -> bytes:
    return _REPORT_DOMAIN + msgspec.json.encode(report, order="sorted")


def _decoded(data: bytes) -> Signature:
    try:
        found = msgspec.json.decode(data, type=Signature)
        canonical = (
            _encoded(found) == data and len(base64.b64decode(found.signature, validate=True)) == _SIGNATURE_BYTES
        )
        for text in (found.statement.signed, found.statement.expires):
            if text is not None:
                epoch(text)
    except (msgspec.MsgspecError, ValueError):
        raise UntrustedError("a signature cannot be read") from None
    if found.statement.version != VERSION:
        raise UntrustedError(f"a signature has version {found.statement.version}, this cachemgr knows {VERSION}")
    if not canonical:
        raise UntrustedError("a signature is not in canonical form")
    return found


def _encoded(signature: Signature) -> bytes:
    return msgspec.json.encode(signature, order="sorted")


def _signed_bytes(statement: Statement) -> bytes:
    return _DOMAIN + msgspec.json.encode(statement, order="sorted")
