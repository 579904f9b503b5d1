"""A bucket as a store, with few requests.

* A read is one ranged GET, whose length is checked. What is read is verified by the caller, who knows its digest.
* Whether an object is there is asked with a listing of its own name. Unlike HEAD that works with policies that allow
  listing below a prefix only, and it tells a missing object from a missing bucket, and an absent one from a denied one.
* Creating is a conditional write (`If-None-Match: *`) where the server has it. Where it has not, the last writer wins;
  that is safe for objects that are named by their bytes, and `conditional` says so to those who need more.
* `modified` is the server's time.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

from cachemgr import digest
from cachemgr.errors import CorruptError, MirrorDeniedError, MirrorError, NotFoundError, StoreError
from cachemgr.store import Entry, Source
from cachemgr.store.names import is_name, is_prefix
from cachemgr.store.s3.answers import get, page, proof
from cachemgr.store.s3.bucket import Bucket
from cachemgr.store.s3.connect import Client, Listing
from cachemgr.store.s3.pieces import PIECE_BYTES, Piece, Reader, in_flight, pieces
from cachemgr.store.s3.requests import Answered, Link, Requests
from cachemgr.store.scratch import prepare

_MAX_KEY_BYTES = 1024
_PROBE_BYTES = 64 << 10
"""Up to so many bytes are written twice to find out whether the server keeps to a condition."""
_ABSENT = frozenset({"NoSuchKey"})
_TAKEN = frozenset({"PreconditionFailed", "412"})
_ENDED = frozenset({"NoSuchUpload"})
_UNKNOWN_CONDITION = frozenset({"NotImplemented", "501"})
"""What servers answer that do not know conditional writes and say so; others ignore the condition."""


class S3Store:
    """Objects in a bucket, below its prefix. Nothing is asked before the first use."""

    def __init__(self, bucket: Bucket, scratch: Path) -> None:
        self._scratch = scratch
        self._link = Link(bucket)
        self._requests = Requests(self._link)

    def __str__(self) -> str:
        return str(self._link.bucket)

    def until(self, deadline: float) -> "S3Store":
        """The same store for a caller who has time until `deadline` (`time.monotonic()`): no request lasts longer, and
        none is made after it. Everything may raise DeadlineError then."""
        limited = S3Store(self._link.bucket, self._scratch)
        limited._link, limited._requests = self._link, Requests(self._link, deadline)
        return limited

    def conditional(self) -> bool:
        """Whether the first writer of a name wins, as far as is known; it is found out by the first small `put`."""
        return self._link.conditional is not False

    def read(self, name: str, *, limit: int) -> bytes:
        data = self._piece(name, 0, limit + 1).data
        if len(data) > limit:
            raise CorruptError(f"`{name}` in {self} has more than {limit} bytes")
        return data

    def slice(self, name: str, start: int, size: int) -> bytes:
        return self._piece(name, start, size).data

    def open(self, name: str) -> BinaryIO:
        first = self._piece(name, 0, PIECE_BYTES)
        return cast("BinaryIO", Reader(first, partial(self._rest, name, first.total), f"reading `{name}`"))

    def has(self, name: str) -> bool:
        return self._listed(name, self._key(name))

    def put(self, name: str, data: bytes) -> bool:
        key = self._key(name)
        if self._link.conditional is False:
            return self._put_unless_listed(name, key, data)
        unknown = self._link.conditional is None
        probes = unknown and len(data) <= _PROBE_BYTES
        if unknown and not probes and self._listed(name, key):
            return False  # a server that ignores conditions would take all of it again
        try:
            self._put(name, key, data, expected=_TAKEN | _UNKNOWN_CONDITION, IfNoneMatch="*")
        except Answered as answer:
            self._link.conditional = answer.code in _TAKEN
            if self._link.conditional:
                return answer.repeated and self._is(name, data)
            return self._put_unless_listed(name, key, data)
        if probes:
            self._link.conditional = self._condition_holds(name, key, data)
        return True

    def put_file(self, name: str, path: Path) -> bool:
        self._key(name)
        try:
            with path.open("rb") as source:
                created = self.put_stream(name, source)
            path.unlink()
        except OSError as error:
            raise StoreError(f"cannot write `{name}` in {self}: {path}: {error.strerror or error}") from None
        return created

    def put_stream(self, name: str, source: Source) -> bool:
        key = self._key(name)
        parts = pieces(source)
        first = next(parts)
        second = next(parts, None)
        if second is None:
            return self.put(name, first)
        if self._listed(name, key):
            return False
        return self._put_parts(name, key, chain((first, second), parts))

    def refresh(self, name: str) -> bool:
        key = self._key(name)
        bucket = self._link.bucket

        def step(client: Client) -> None:
            # An object may be copied onto itself only if something about it changes; its metadata is replaced by none.
            answer = client.copy_object(
                Bucket=bucket.name,
                Key=key,
                CopySource={"Bucket": bucket.name, "Key": key},
                MetadataDirective="REPLACE",
                **_payer(bucket),
                **_encryption(bucket),
            )
            proof(answer.get("CopyObjectResult", {}))

        try:
            self._requests.make("refresh", name, step, expected=_ABSENT)
        except Answered:
            return False
        except MirrorDeniedError:
            if self._listed(name, key):
                raise
            return False
        return True

    def delete(self, name: str) -> bool:
        key = self._key(name)
        if not self._listed(name, key):
            return False
        bucket = self._link.bucket
        self._requests.make(
            "delete", name, lambda client: client.delete_object(Bucket=bucket.name, Key=key, **_payer(bucket))
        )
        return True

    def scan(self, prefix: str) -> Iterator[Entry]:
        if not is_prefix(prefix):
            raise StoreError(f"`{prefix}` is no directory of {self}")
        root = self._link.bucket.key("")
        token = ""
        while True:
            listing = self._page(prefix, self._link.bucket.key(prefix), 1000, token)
            for each in listing.get("Contents", []):
                name = each["Key"].removeprefix(root)
                if each["Key"].startswith(root + prefix) and is_name(name):
                    yield Entry(name, each["Size"], each["LastModified"].timestamp())
            if not listing.get("IsTruncated"):
                return
            following = listing.get("NextContinuationToken", "")
            if following in ("", token):
                raise MirrorError(f"cannot list `{prefix}` in {self}: the listing does not end", word="garbled")
            token = following

    def scratch(self) -> Path:
        try:
            prepare(self._scratch)
        except OSError as error:
            raise StoreError(f"cannot write below {self._scratch}: {error.strerror or error}") from None
        return self._scratch

    def _key(self, name: str) -> str:
        key = self._link.bucket.key(name)
        if not is_name(name) or len(key.encode()) > _MAX_KEY_BYTES:
            raise StoreError(f"`{name}` cannot be an object of {self}")
        return key

    def _piece(self, name: str, start: int, size: int) -> Piece:
        """Raises NotFoundError, once that is certain: without permission to list everywhere an absent object is
        answered with a denial, and by some gateways without saying what is missing."""
        key = self._key(name)
        bucket = self._link.bucket
        try:
            return self._requests.make(
                "read",
                name,
                lambda client: get(client, start, size, Bucket=bucket.name, Key=key, **_payer(bucket)),
                expected=_ABSENT | {"404"},
                size=min(size, PIECE_BYTES),
            )
        except Answered as answer:
            if answer.code in _ABSENT or not self._listed(name, key):
                raise NotFoundError(f"no `{name}` in {self}") from None
            raise MirrorError(f"cannot read `{name}` in {self}: it is listed and not found", word="garbled") from None
        except MirrorDeniedError:
            if self._listed(name, key):
                raise
            raise NotFoundError(f"no `{name}` in {self}") from None

    def _rest(self, name: str, total: int, start: int) -> Piece:
        piece = self._piece(name, start, PIECE_BYTES)
        if piece.total != total or not piece.data:
            raise CorruptError(f"`{name}` in {self} changed while it was read")
        return piece

    def _listed(self, name: str, key: str) -> bool:
        """Whether there is an object with this key: it comes first of those that begin like it."""
        listing = self._page(name, key, 1)
        return any(each["Key"] == key for each in listing.get("Contents", []))

    def _page(self, name: str, prefix: str, most: int, token: str = "") -> Listing:
        bucket = self._link.bucket
        more = {"ContinuationToken": token} if token else {}

        def step(client: Client) -> Listing:
            return page(client, Bucket=bucket.name, Prefix=prefix, MaxKeys=most, **more, **_payer(bucket))

        return self._requests.make("list", name, step)

    def _put(self, name: str, key: str, data: bytes, *, expected: frozenset[str], **condition: str) -> None:
        bucket = self._link.bucket

        def step(client: Client) -> None:
            more = {**condition, **_payer(bucket), **_encryption(bucket), **_checked(data)}
            proof(client.put_object(Bucket=bucket.name, Key=key, Body=data, **more))

        self._requests.make("write", name, step, expected=expected, size=len(data))

    def _put_unless_listed(self, name: str, key: str, data: bytes) -> bool:
        if self._listed(name, key):
            return False
        self._put(name, key, data, expected=frozenset())
        return True

    def _is(self, name: str, data: bytes) -> bool:
        """Whether an object has these bytes: an attempt whose answer got lost may have made it."""
        return self._piece(name, 0, len(data) + 1).data == data

    def _condition_holds(self, name: str, key: str, data: bytes) -> bool | None:
        """Whether the server keeps to the condition: an object that was just made cannot be made again, and if it can,
        it has the same bytes. None when this does not come out; the object is there in any case."""
        try:
            self._put(name, key, data, expected=_TAKEN, IfNoneMatch="*")
        except Answered:
            return True
        except MirrorError:
            return None
        return False

    def _put_parts(self, name: str, key: str, parts: Iterator[bytes]) -> bool:
        bucket = self._link.bucket
        place = {"Bucket": bucket.name, "Key": key, **_payer(bucket)}
        upload = self._requests.make(
            "write",
            name,
            lambda client: proof(client.create_multipart_upload(**place, **_encryption(bucket)), "UploadId"),
        )

        def part(number: int, data: bytes) -> str:
            def step(client: Client) -> str:
                more = {**place, **_checked(data)}
                return proof(client.upload_part(**more, UploadId=upload, PartNumber=number, Body=data))

            return self._requests.make("write", name, step, size=len(data))

        created = False
        try:
            work = (partial(part, number, data) for number, data in enumerate(parts, start=1))
            tags = in_flight(work, f"writing `{name}`")
            listed = [{"ETag": tag, "PartNumber": number} for number, tag in enumerate(tags, start=1)]
            created = self._completed(name, {**place, "UploadId": upload, "MultipartUpload": {"Parts": listed}})
        finally:
            if not created:  # parts of an upload that nobody ends are paid for ever
                with suppress(Exception):
                    self._link.client().abort_multipart_upload(**place, UploadId=upload)
        return created

    def _completed(self, name: str, request: Mapping[str, object]) -> bool:
        condition = {} if self._link.conditional is False else {"IfNoneMatch": "*"}
        try:
            self._requests.make(
                "write",
                name,
                lambda client: proof(client.complete_multipart_upload(**request, **condition)),
                expected=_TAKEN | _UNKNOWN_CONDITION | _ENDED,
            )
        except Answered as answer:
            if answer.code in _UNKNOWN_CONDITION and condition:
                self._link.conditional = False
                return self._completed(name, request)
            if answer.code in _ENDED and not answer.repeated:
                raise MirrorError(f"cannot write `{name}` in {self}: the upload was ended", word="conflict") from None
            return answer.code in _ENDED  # by an attempt whose answer got lost
        return True


def _checked(data: bytes) -> dict[str, str]:
    """By its length alone not every server knows a body that was cut off: SeaweedFS 4.48 stores an empty object when a
    client dies between headers and body, whatever length and signature they gave. AWS and its kin know this header."""
    return {"ContentMD5": digest.content_md5(data)}


def _payer(bucket: Bucket) -> dict[str, str]:
    return {"RequestPayer": "requester"} if bucket.requester_pays else {}


def _encryption(bucket: Bucket) -> dict[str, str]:
    wanted = {"ServerSideEncryption": bucket.sse, "SSEKMSKeyId": bucket.kms_key}
    return {name: value for name, value in wanted.items() if value is not None}
