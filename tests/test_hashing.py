"""Digests found beside what is done with the bytes."""

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from cachemgr.digest import Digest, of_bytes
from cachemgr.errors import CorruptError, StoreError
from cachemgr.hashing import Found, Hashes
from tests.trees import noise

SIZES = (0, 1, 70_000, 256 << 10, 3, 1 << 20, 2_000_000, 7)


def refuse(name: str, _found: Digest) -> None:
    raise CorruptError(f"{name} is wrong")


def hashed(found: Found, size: int, then: Callable[[Hashes], None] = lambda _hashes: None) -> None:
    """A block with one file, and what is done after it was handed over."""
    with Hashes() as hashes:
        hashes.whole(bytes(size), found)
        then(hashes)


def streamed(found: Found) -> None:
    """A block with one file in two pieces."""
    with Hashes() as hashes:
        stream = hashes.stream(found)
        stream.update(b"one")
        stream.update(b"two")
        stream.end()


def failing(error: BaseException) -> Callable[[Hashes], None]:
    """A block that ends with `error`."""

    def fail(_hashes: Hashes) -> None:
        raise error

    return fail


def wait_until_told(hashes: Hashes) -> None:
    """Go on handing over until the failure of a thread is raised here."""
    while True:
        hashes.whole(bytes(300 << 10), lambda _found: None)


@pytest.mark.parametrize("piece", [100_000, 1 << 20])
def test_every_digest_is_known_when_the_block_has_ended(piece: int) -> None:
    files = {number: noise(f"{number}", size) for number, size in enumerate(SIZES * 5)}
    found: dict[int, Digest] = {}
    with Hashes() as hashes:
        for number, data in files.items():
            if number % 3:
                hashes.whole(memoryview(data), partial(found.__setitem__, number))
            else:
                stream = hashes.stream(partial(found.__setitem__, number))
                for start in range(0, len(data), piece):
                    stream.update(data[start : start + piece])
                stream.end()
    assert found == {number: of_bytes(data) for number, data in files.items()}


def test_one_small_file_is_hashed_as_well() -> None:
    found: list[Digest] = []
    hashed(found.append, 5)
    assert found == [of_bytes(bytes(5))]


def test_empty_files_do_not_all_wait_for_the_end() -> None:
    found: list[Digest] = []
    with Hashes() as hashes:
        for _each in range(1000):
            hashes.whole(b"", found.append)
        deadline = time.monotonic() + 30
        while not found and time.monotonic() < deadline:
            time.sleep(0.001)
        early = len(found)
    assert early
    assert found == [of_bytes(b"")] * 1000


def test_nothing_to_hash_starts_no_thread() -> None:
    before = threading.active_count()
    with Hashes():
        assert threading.active_count() == before


def test_threads_end_with_the_block() -> None:
    before = set(threading.enumerate())
    with Hashes() as hashes:
        hashes.stream(lambda _found: None).update(b"never ended")
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_what_was_refused_ends_the_block(size: int) -> None:
    with pytest.raises(CorruptError, match="a file is wrong"):
        hashed(partial(refuse, "a file"), size)


def test_what_was_refused_of_a_stream_ends_the_block() -> None:
    with pytest.raises(CorruptError, match="a stream is wrong"):
        streamed(partial(refuse, "a stream"))


def test_who_goes_on_is_told_soon() -> None:
    with pytest.raises(CorruptError, match="first is wrong"):
        hashed(partial(refuse, "first"), 1 << 20, wait_until_told)


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_wrong_bytes_explain_what_went_wrong_after_them(size: int) -> None:
    with pytest.raises(CorruptError, match="bytes is wrong"):
        hashed(partial(refuse, "bytes"), size, failing(StoreError("these bytes cannot be placed")))


def test_right_bytes_leave_the_error_that_there_was() -> None:
    with pytest.raises(StoreError, match="full"):
        hashed(lambda _found: None, 1, failing(StoreError("the disk is full")))


def test_an_interrupt_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        hashed(partial(refuse, "large"), 1 << 20, failing(KeyboardInterrupt()))
