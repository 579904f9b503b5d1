"""What a bucket, its server and the network before it can do to us: told apart, bounded, and never an absent object."""

import io
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from cachemgr.errors import CacheError, CorruptError, DeadlineError, MirrorDeniedError, MirrorError, NotFoundError
from cachemgr.store.s3 import S3Store, requests
from cachemgr.store.s3.pieces import PIECE_BYTES
from tests import s3_faults
from tests.s3_faults import Fault, FaultyServer, error
from tests.s3_server import S3Server, s3_client

pytestmark = pytest.mark.full

LIMIT = 1 << 20


@pytest.fixture(scope="module")
def between(running_s3: S3Server) -> Iterator[tuple[FaultyServer, S3Server]]:
    """One server for all tests of this module, so that they share a client."""
    with s3_faults.faulty(running_s3.endpoint) as server:
        yield server, S3Server(server.endpoint, running_s3.bucket, running_s3.environ)


@pytest.fixture
def server(between: tuple[FaultyServer, S3Server], s3: S3Server) -> FaultyServer:
    between[0].clear()
    return between[0]


@pytest.fixture
def store(between: tuple[FaultyServer, S3Server], server: FaultyServer, tmp_path: Path) -> S3Store:
    made = between[1].store(tmp_path)
    made.put("a", b"0123456789")
    server.clear()
    return made


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses; the rest is as it is."""
    monkeypatch.setattr(requests, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(requests, "_LONGEST_PAUSE", 0.02)


def failure(step: Callable[[], object]) -> MirrorError:
    with pytest.raises(MirrorError) as caught:
        step()
    return caught.value


def operations(store: S3Store) -> dict[str, Callable[[], object]]:
    """Every way to ask for something, and the request that it begins with."""
    return {
        "GET": lambda: store.read("a", limit=LIMIT),
        "LIST": lambda: store.has("a"),
        "LIST ": lambda: list(store.scan("b/")),
        "PUT": lambda: store.put("b/c", b"1"),
        "COPY": lambda: store.refresh("a"),
        "DELETE": lambda: store.delete("a"),
    }


SAID = [
    (error(403, "AccessDenied"), "denied", "allow s3:"),
    (error(400, "ExpiredToken"), "expired", "renew"),
    (error(503, "SlowDown"), "throttled", "later"),
    (error(403, "RequestTimeTooSkewed"), "clock skew", "clock"),
    (error(404, "NoSuchBucket"), "no bucket", "`mirror`"),
    (error(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1"), "wrong region", 'mirror_region = "eu-west-1"'),
    (error(400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>"), "wrong region", '"eu-west-1"'),
    (error(500, "InternalError"), "server error", "later"),
    (error(400, "InvalidRequest"), "refused", ""),
    (error(409, "OperationAborted"), "conflict", "later"),
    (error(200, "SlowDown"), "throttled", "later"),
    (s3_faults.dropped, "truncated", "later"),
]


@pytest.mark.parametrize(("fault", "word", "hint"), SAID)
def test_every_failure_has_its_word_whatever_is_asked(
    store: S3Store, server: FaultyServer, fault: Fault, word: str, hint: str
) -> None:
    for request, ask in operations(store).items():
        server.clear()
        server.fail(request.strip(), fault)
        told = failure(ask)
        assert told.word == word, request
        assert str(store) in str(told)
        assert hint in (told.hint or "")
        assert told.exit_code == 13
        assert isinstance(told, MirrorDeniedError) == (word == "denied")
    server.clear()
    assert store.read("a", limit=LIMIT) == b"0123456789"


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        (error(403, "InvalidAccessKeyId"), "denied"),
        (error(503, "ServiceUnavailable"), "throttled"),
        (error(429, "TooManyRequests"), "throttled"),
        (error(502, "502"), "server error"),
        (error(400, "RequestTimeout"), "stalled"),
        (error(400, "TokenRefreshRequired"), "expired"),
        (error(403, "QuotaExceeded"), "full"),
        (error(507, "XMinioStorageFull"), "full"),
        (error(307, "TemporaryRedirect", Location="http://127.0.0.1:1/"), "wrong region"),
        (partial(s3_faults.page, status=403), "denied"),
        (partial(s3_faults.page, status=407), "refused"),
        (partial(s3_faults.page, status=502), "server error"),
    ],
)
def test_other_codes_have_the_same_words(store: S3Store, server: FaultyServer, fault: Fault, word: str) -> None:
    server.fail("GET", fault)
    assert failure(lambda: store.read("a", limit=LIMIT)).word == word


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        (s3_faults.truncated, "truncated"),
        (s3_faults.shortened, "garbled"),
        (s3_faults.lengthened, "garbled"),
        (s3_faults.endless, "garbled"),
        (s3_faults.page, "garbled"),
    ],
)
def test_bodies_that_lie_are_not_taken(store: S3Store, server: FaultyServer, fault: Fault, word: str) -> None:
    server.fail("GET", fault)
    assert failure(lambda: store.read("a", limit=LIMIT)).word == word
    assert failure(lambda: store.open("a")).word == word
    assert failure(lambda: store.slice("a", 2, 3)).word == word


@pytest.mark.parametrize("status", [301, 302, 403, 407])
def test_a_page_with_an_error_is_said_to_be_no_answer_of_s3(store: S3Store, server: FaultyServer, status: int) -> None:
    for request, ask in operations(store).items():
        server.clear()
        server.fail(request.strip(), partial(s3_faults.page, status=status))
        told = failure(ask)
        assert f"({status})" in str(told)
        assert told.hint == "what answered is no S3 server: check `mirror_endpoint`, and HTTPS_PROXY where it is set"


@pytest.mark.parametrize(
    ("found", "instead"),
    [
        (rb"<Size>.*?</Size>", b""),
        (rb"<Size>.*?</Size>", b"<Size>many</Size>"),
        (rb"<Key>.*?</Key>", b""),
        (rb"<LastModified>.*?</LastModified>", b""),
        (rb"<LastModified>.*?</LastModified>", b"<LastModified>lately</LastModified>"),
    ],
)
def test_a_listing_without_what_is_listed_is_none(
    store: S3Store, server: FaultyServer, found: bytes, instead: bytes
) -> None:
    def other(handler: s3_faults.Handler) -> None:
        answer = handler.forwarded()
        handler.reply(s3_faults.Answer(answer.status, answer.headers, re.sub(found, instead, answer.body)))

    server.fail("LIST", other)
    assert failure(lambda: list(store.scan(""))).word == "garbled"
    assert failure(lambda: store.has("a")).word == "garbled"


@pytest.mark.parametrize("fault", [s3_faults.truncated, s3_faults.page])
def test_listings_that_lie_are_not_taken(store: S3Store, server: FaultyServer, fault: Fault) -> None:
    server.fail("LIST", fault)
    words = ("truncated", "garbled", "server error")  # a broken page reads as an error that came too late
    assert failure(lambda: store.has("a")).word in words
    assert failure(lambda: list(store.scan(""))).word in words


def test_no_answer_fills_the_memory(store: S3Store, server: FaultyServer) -> None:
    sent = server.sent_endlessly
    for request, ask in operations(store).items():
        server.clear()
        server.fail(request.strip(), s3_faults.endless)
        assert failure(ask).word == "garbled"
    server.clear()
    server.fail("GET", partial(s3_faults.endless, status=403))
    assert failure(lambda: store.read("a", limit=LIMIT)).word == "garbled"
    asked, most = 2 * 7, 64 << 20
    assert server.sent_endlessly - sent < asked * most


def test_whoever_says_yes_to_everything_has_written_nothing(store: S3Store, server: FaultyServer) -> None:
    big = bytes(PIECE_BYTES + 1)
    for request, write in {
        "PUT": lambda: store.put("b", b"1"),
        "COPY": lambda: store.refresh("a"),
        "?uploads": lambda: store.put_stream("b", io.BytesIO(big)),
        "partNumber": lambda: store.put_stream("b", io.BytesIO(big)),
        "POST": lambda: store.put_stream("b", io.BytesIO(big)),
    }.items():
        server.clear()
        server.fail(request, s3_faults.page)
        assert failure(write).word in ("garbled", "server error"), request
    server.clear()
    assert not store.has("b")


SILENT = [s3_faults.silent, s3_faults.dripping_headers]
HALF_SILENT = [s3_faults.stalled, s3_faults.dripping]


@pytest.mark.parametrize(
    ("request_", "fault"),
    [(verb, fault) for verb in ("GET", "LIST") for fault in SILENT + HALF_SILENT]
    + [("PUT", fault) for fault in SILENT],
)
def test_whoever_stops_answering_is_left(
    store: S3Store, server: FaultyServer, monkeypatch: pytest.MonkeyPatch, request_: str, fault: Fault
) -> None:
    monkeypatch.setattr(requests, "_ATTEMPT_SECONDS", 0.15)
    monkeypatch.setattr(requests, "_SLOWEST", 1 << 40)
    server.fail(request_, fault)
    told = failure(operations(store)[request_])
    assert told.word == "stalled"
    # On a busy machine an attempt may be over before the server has read it.
    assert 1 <= sum(request_ in asked for asked in server.asked) <= 3


@pytest.mark.parametrize(
    "fault", [s3_faults.silent, s3_faults.dripping, s3_faults.dripping_headers, error(503, "SlowDown")]
)
def test_a_caller_in_a_hurry_is_answered_in_time(store: S3Store, server: FaultyServer, fault: Fault) -> None:
    server.fail("GET", fault)
    begun = time.monotonic()
    with pytest.raises((DeadlineError, MirrorError)):
        store.until(begun + 0.3).read("a", limit=LIMIT)
    assert time.monotonic() - begun < 5, "far from the 20 s of an attempt and from the pauses between them"
    with pytest.raises(DeadlineError, match="no time is left"):
        store.until(begun).has("a")
    server.clear()
    assert store.until(time.monotonic() + 60).read("a", limit=LIMIT) == b"0123456789"


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        # One less than what is borne: a real server that is busy may fail once by itself.
        (error(503, "SlowDown"), 6),
        (error(500, "InternalError"), 3),
        (error(200, "InternalError"), 3),
        (error(409, "ConditionalRequestConflict"), 4),
        (s3_faults.dropped, 2),
    ],
)
def test_what_passes_is_waited_for(store: S3Store, server: FaultyServer, fault: Fault, times: int) -> None:
    for request, ask in operations(store).items():
        server.clear()
        server.fail(request.strip(), fault, times=times)
        ask()
    server.fail("GET", s3_faults.truncated, times=2)
    store.put("a", b"0123456789")
    assert store.read("a", limit=LIMIT) == b"0123456789"


def test_what_does_not_pass_is_not_asked_twice(store: S3Store, server: FaultyServer) -> None:
    server.fail("LIST", error(403, "AccessDenied"))
    failure(lambda: store.has("a"))
    assert len(server.asked) == 1


@pytest.mark.parametrize("size", [700, PIECE_BYTES + 1])
def test_a_writer_that_dies_after_the_head_of_its_request_leaves_nothing(
    store: S3Store, server: FaultyServer, size: int
) -> None:
    """Seen with SeaweedFS 4.48: without a checksum it keeps an empty object, whose name is taken for ever."""
    server.fail("PUT", s3_faults.cut_off)
    assert failure(lambda: store.put_stream("b", io.BytesIO(bytes(size)))).word == "truncated"
    server.clear()
    assert not store.has("b")
    assert store.put_stream("b", io.BytesIO(bytes(size))) is True
    assert store.read("b", limit=size) == bytes(size)


def test_an_object_whose_creation_was_not_answered_is_known_as_ours(store: S3Store, server: FaultyServer) -> None:
    server.fail("PUT", s3_faults.unanswered, times=1)
    assert store.put("claim", b"mine") is True
    server.fail("PUT", s3_faults.unanswered, times=1)
    assert store.put("claim", b"somebody else's") is False
    assert store.read("claim", limit=LIMIT) == b"mine"


@pytest.mark.parametrize("says_so", [True, False])
def test_a_server_without_conditional_writes_is_found_out(store: S3Store, server: FaultyServer, says_so: bool) -> None:
    fresh = S3Store(store._link.bucket, store.scratch())
    if says_so:
        server.fail("PUT", error(501, "NotImplemented"), times=1)
    else:
        server.unknown_headers = {"if-none-match"}
    assert fresh.conditional() is True
    assert fresh.put("b", b"first") is True
    assert fresh.conditional() is False
    assert fresh.put("b", b"second") is False
    big = bytes(PIECE_BYTES + 1)
    assert fresh.put_stream("b", io.BytesIO(big)) is False
    assert fresh.put_stream("big", io.BytesIO(big)) is True
    assert fresh.read("b", limit=LIMIT) == b"first"
    assert fresh.read("big", limit=len(big)) == big


def test_a_listing_right_for_the_prefix_alone_is_enough(store: S3Store, server: FaultyServer) -> None:
    """Such a policy makes AWS answer a denial for an absent object, because it may not say that it is absent."""
    server.fail("GET", error(403, "AccessDenied"))
    server.fail("COPY", error(403, "AccessDenied"))
    with pytest.raises(NotFoundError):
        store.read("absent", limit=LIMIT)
    with pytest.raises(NotFoundError):
        store.open("absent")
    assert store.refresh("absent") is False
    assert failure(lambda: store.read("a", limit=LIMIT)).word == "denied"
    assert all(asked.startswith(("GET", "COPY", f"LIST {store._link.bucket.prefix}/")) for asked in server.asked)
    server.fail("LIST", error(403, "AccessDenied"))
    assert failure(lambda: store.read("absent", limit=LIMIT)).word == "denied"


def test_a_missing_object_without_a_reason_is_asked_for_again(store: S3Store, server: FaultyServer) -> None:
    """Gateways answer 404 for a wrong path as well."""
    server.fail("GET", error(404, "404"))
    with pytest.raises(NotFoundError):
        store.read("absent", limit=LIMIT)
    assert failure(lambda: store.read("a", limit=LIMIT)).word == "garbled"
    server.fail("LIST", error(404, "NoSuchBucket"))
    assert failure(lambda: store.read("absent", limit=LIMIT)).word == "no bucket"


def listing(*keys: str, token: str | None = None) -> Fault:
    """A page of a listing with these keys, and the token of the next page if there is one."""
    entries = "".join(
        f"<Contents><Key>{key}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
        for key in keys
    )
    more = f"<NextContinuationToken>{token}</NextContinuationToken>"
    more += f"<IsTruncated>{str(token is not None).lower()}</IsTruncated>"
    body = f"<ListBucketResult>{more}{entries}</ListBucketResult>".encode()
    return lambda handler: handler.reply(s3_faults.Answer(200, [("Content-Type", "application/xml")], body))


def test_only_names_of_ours_are_listed(store: S3Store, server: FaultyServer) -> None:
    prefix = store._link.bucket.prefix
    foreign = ["b/.hidden", "b/", "b", "tmp/b", "b//c", "../b", "b/../c", "b/\x7f"]
    keys = [f"{prefix}/{name}" for name in ("b/good", *foreign)] + ["b/elsewhere", f"{prefix}2/b/c"]
    server.fail("LIST", listing(*keys))
    assert [entry.name for entry in store.scan("b/")] == ["b/good"]


@pytest.mark.parametrize("token", ["same", ""])
def test_a_listing_that_does_not_go_on_is_no_listing(store: S3Store, server: FaultyServer, token: str) -> None:
    server.fail("LIST", listing(f"{store._link.bucket.prefix}/b/c", token=token))
    told = failure(lambda: list(store.scan("b/")))
    assert told.word == "garbled"
    assert "does not end" in str(told)


def test_a_large_object_is_read_in_pieces_that_are_repeated_by_themselves(store: S3Store, server: FaultyServer) -> None:
    data = bytes(range(251)) * (4 * PIECE_BYTES // 251) + b"the end"
    assert store.put_stream("big", io.BytesIO(data)) is True
    server.clear()
    with store.open("big") as stream:
        assert stream.read(1000) == data[:1000]
        for fault in (s3_faults.truncated, error(503, "SlowDown"), s3_faults.dropped):
            server.fail("GET", fault, times=1)
        assert stream.read() == data[1000:]
        stream.seek(len(data) - 7)
        assert stream.read() == b"the end"
    pieces = -(-len(data) // PIECE_BYTES)
    assert len(server.asked) == pieces + 3
    assert store.slice("big", PIECE_BYTES - 3, 6) == data[PIECE_BYTES - 3 : PIECE_BYTES + 3]
    assert store.slice("big", len(data), 6) == b""
    assert store.slice("big", len(data) - 2, 6) == b"nd"


def test_an_object_that_changes_while_it_is_read_is_damaged(store: S3Store) -> None:
    store.put_stream("big", io.BytesIO(bytes(PIECE_BYTES + 10)))
    with store.open("big") as stream:
        assert store.delete("big")
        store.put_stream("big", io.BytesIO(bytes(PIECE_BYTES + 11)))
        with pytest.raises(CorruptError, match="changed while it was read"):
            stream.read()


def test_closing_early_stops_the_fetching(store: S3Store, server: FaultyServer) -> None:
    store.put_stream("big", io.BytesIO(bytes(8 * PIECE_BYTES)))
    server.clear()
    with store.open("big") as stream:
        stream.read(PIECE_BYTES + 1)
    time.sleep(0.5)
    assert len(server.asked) <= 5


def test_an_upload_that_fails_leaves_no_parts(store: S3Store, server: FaultyServer, s3: S3Server) -> None:
    class Source(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > PIECE_BYTES:
                raise CorruptError("other bytes than its name says")
            return super().read(size)

    with pytest.raises(CorruptError):
        store.put_stream("big", Source(bytes(3 * PIECE_BYTES)))
    server.fail("partNumber=2", error(403, "AccessDenied"))
    assert failure(lambda: store.put_stream("big", io.BytesIO(bytes(3 * PIECE_BYTES)))).word == "denied"
    assert not store.has("big")
    bucket = store._link.bucket
    left = s3_client(s3).list_multipart_uploads(Bucket=bucket.name, Prefix=bucket.prefix)
    assert left.get("Uploads", []) == []


@pytest.mark.parametrize("part", ["?uploads", "partNumber=1", "partNumber=2", "POST"])
def test_an_upload_survives_what_passes(store: S3Store, server: FaultyServer, part: str) -> None:
    data = bytes(PIECE_BYTES) + b"the end"
    server.fail(part, error(503, "SlowDown"), times=2)
    server.fail(part, error(200, "InternalError") if part == "POST" else s3_faults.dropped, times=1)
    assert store.put_stream("big", io.BytesIO(data)) is True
    assert store.read("big", limit=len(data)) == data


def test_an_upload_whose_end_was_not_answered_is_there(store: S3Store, server: FaultyServer) -> None:
    data = bytes(PIECE_BYTES) + b"the end"
    server.fail("uploadId", s3_faults.unanswered, times=1)
    server.fail("POST", s3_faults.unanswered, times=1)
    assert store.put_stream("big", io.BytesIO(data)) is True
    assert store.read("big", limit=len(data)) == data
    assert store.put_stream("big", io.BytesIO(data)) is False


def test_many_threads_share_one_client(between: tuple[FaultyServer, S3Server], store: S3Store, tmp_path: Path) -> None:
    fresh = S3Store(store._link.bucket, tmp_path / "tmp")
    seen: list[bytes] = []
    threads = [threading.Thread(target=lambda: seen.append(fresh.read("a", limit=LIMIT))) for _number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [b"0123456789"] * 24


def test_the_texts_of_a_server_do_not_reach_a_terminal(store: S3Store, server: FaultyServer) -> None:
    server.fail("GET", error(400, "&#27;[2Jcode"))
    told = failure(lambda: store.read("a", limit=LIMIT))
    assert str(told).isprintable()
    assert isinstance(told, CacheError)
