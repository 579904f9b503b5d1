"""Answers of a server, of which nothing is believed that can be checked.

What answers may be no S3 server at all: a wrong port or a captive portal says 200 to everything, and its page reads as
an empty listing. So each answer must have what only a real one has.
"""

import re
from collections.abc import Mapping
from contextlib import closing
from typing import BinaryIO

from cachemgr.store.s3.connect import Client, Got, Listing
from cachemgr.store.s3.faults import ErrorBodyError, GarbledAnswerError, ShortAnswerError, code_of
from cachemgr.store.s3.pieces import Piece

_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_ERROR_BODY = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?<Error>.*?<Code>([A-Za-z0-9._-]{1,60})</Code>", re.DOTALL)
_LISTED = frozenset({"Key", "Size", "LastModified"})
_NOTHING_THERE = frozenset({"InvalidRange", "416"})
"""The range begins at the end of the object or behind it; every range of an empty object does."""


def get(client: Client, start: int, size: int, **place: object) -> Piece:
    """At most `size` bytes from `start` of the object at `place`, fewer only where it ends.

    Raises:
        Exception: what botocore raises, or one of the errors of `faults`.
    """
    try:
        answer = client.get_object(**place, Range=f"bytes={start}-{start + size - 1}")
    except Exception as error:
        if code_of(error) in _NOTHING_THERE:
            return Piece(b"", 0)
        raise
    with closing(answer["Body"]) as body:
        piece = _whole(answer, body, size) if "ContentRange" not in answer else _ranged(answer, body, start, size)
    if "ETag" not in answer:  # every object has one
        found = _ERROR_BODY.match(piece.data)
        raise ErrorBodyError(found[1].decode()) if found else GarbledAnswerError("no object")
    return piece


def page(client: Client, **request: object) -> Listing:
    """A page of a listing. Raises as `get`."""
    answer = client.list_objects_v2(**request)
    if "IsTruncated" not in answer or not all(each.keys() >= _LISTED for each in answer.get("Contents", [])):
        raise GarbledAnswerError("no listing")
    return answer


def proof(answer: Mapping[str, object], name: str = "ETag") -> str:
    """What a write's answer says about what was made.

    Raises:
        GarbledAnswerError: nothing, so nothing was made.
    """
    said = answer.get(name)
    if not isinstance(said, str) or not said:
        raise GarbledAnswerError(f"no {name}")
    return said


def _ranged(answer: Got, body: BinaryIO, start: int, size: int) -> Piece:
    found = _RANGE.fullmatch(answer["ContentRange"])
    if found is None:
        raise GarbledAnswerError("an unreadable range")
    first, last, total = map(int, found.groups())
    length = last - first + 1
    if first != start or length != min(size, total - start) or answer.get("ContentLength", length) != length:
        raise GarbledAnswerError("another range than the one that was asked for")
    return Piece(_exactly(body, length), total)


def _whole(answer: Got, body: BinaryIO, size: int) -> Piece:
    """An answer without a range: an error where there should be none, or a server that has no ranges."""
    total = answer.get("ContentLength")
    if total is None or total > size:
        raise GarbledAnswerError("another range than the one that was asked for")
    return Piece(_exactly(body, total), total)


def _exactly(body: BinaryIO, length: int) -> bytes:
    """All of a body, which must have this length. One byte more is asked for, because a body may have no end; by
    itself, because a client that is asked for what it has anyway hands it over without a copy."""
    parts, missing = [], length
    while missing and (part := body.read(missing)):
        parts.append(part)
        missing -= len(part)
    if missing or body.read(1):
        raise ShortAnswerError("another length than was announced")
    return b"".join(parts)
