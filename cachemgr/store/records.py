"""Launch records: who used what, when and how well, for a fleet without a database.

A store keeps one small object per start; a mirror gets what a host has gathered as one object a day, and whoever comes
by merges the objects of a day into one. All of it is safe to do at any time, by any number at once, and to be killed
in, because the records of a day are a set: each is known by its launch, one that is stored twice counts once, and an
object is deleted only after another one that has all of its records was stored.
"""

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import zstandard

from cachemgr import digest
from cachemgr.capture import Launch, decode_launch, encode_launch
from cachemgr.digest import Digest
from cachemgr.errors import CorruptError, DeniedError, NotFoundError, StoreError
from cachemgr.parallel import side_by_side
from cachemgr.places import write_private
from cachemgr.store import Entry, Store, layout

_ONE_LIMIT = 4 << 20
"""Bytes of the record of one launch."""
_DAY_LIMIT = 64 << 20
"""Bytes of the records in one object, before they are compressed."""
_MOST_MERGED = 512
"""Objects of a day that are merged at once."""
_MERGED_BYTES = 4 << 20
"""How many bytes of them, as they are stored: an object of a day that has become large is left alone."""
_THREADS = 16
_ROUNDS = 5
_MOST_KEPT = 1000
"""Records that a host gathers which may not send them; the oldest go."""
_BATCH = 16
_BATCH_SECONDS = 600.0
_ONE_IN = 16
"""Of so many who store records, one rolls them up: no more objects remain than about that many a day."""

Rows = dict[str, bytes]
"""Encoded records by launch."""


def record(store: Store, launch: Launch) -> None:
    """Keep the record of a launch; one that has ended replaces that of when it was ready.

    Raises:
        StoreError: it could not be written.
        CorruptError: the store is not one of ours, or of a newer layout; it is left alone.
    """
    layout.ensure_layout(store)
    data = encode_launch(launch)
    store.put(layout.launch_name(launch.started[:10], _name(launch)), data)
    _perhaps_roll_up(store, digest.of_bytes(data))


def keep(directory: Path, launch: Launch) -> None:
    """Gather a record on this host until somebody sends what is in `directory`.

    Raises:
        OSError: it cannot be written.
    """
    write_private(directory / f"{_name(launch)}.json", encode_launch(launch))
    for path in kept(directory)[:-_MOST_KEPT]:  # names of launches sort by time
        path.unlink(missing_ok=True)


def due(directory: Path, *, now: float) -> bool:
    """Whether what waits is worth a request: many records, or one that is old."""
    gathered = kept(directory)
    ages = (now - status.st_mtime for path in gathered if (status := _status(path)) is not None)
    return len(gathered) >= _BATCH or max(ages, default=0.0) >= _BATCH_SECONDS


def send(store: Store, directory: Path) -> int:
    """Store what `keep` has gathered, one object a day, and forget it. How many records that were.

    A kill in between sends some twice, which counts as once.

    Raises:
        StoreError, CorruptError: as `record`. What was not sent waits still.
    """
    by_day: dict[str, Rows] = defaultdict(dict)
    files: dict[str, list[Path]] = defaultdict(list)
    for path in kept(directory):
        with suppress(FileNotFoundError, CorruptError):
            data = path.read_bytes()
            launch = decode_launch(data)
            _add(by_day[launch.started[:10]], launch.launch, data)
            files[launch.started[:10]].append(path)
    if by_day:
        layout.ensure_layout(store)
    for day, rows in by_day.items():
        stored = _store(store, day, rows)
        for path in files[day]:
            path.unlink(missing_ok=True)
        _perhaps_roll_up(store, stored)
    return sum(map(len, by_day.values()))


def record_all(store: Store, told: Sequence[Launch]) -> list[str]:
    """Keep the records of many launches, one object a day; the names of these objects. Nothing is rolled up.

    Raises:
        StoreError, CorruptError: as `record`. Some may have been kept.
    """
    by_day: dict[str, Rows] = defaultdict(dict)
    for launch in told:
        _add(by_day[launch.started[:10]], launch.launch, encode_launch(launch))
    layout.ensure_layout(store)
    return [layout.batch_name(day, _store(store, day, rows)) for day, rows in sorted(by_day.items())]


def launches(store: Store, *, begin: str = "") -> Iterator[Launch]:
    """All readable launch records of the days (`YYYY-MM-DD`) from `begin` on, in no order, each launch once."""
    for day, entries in _days(store).items():
        if day >= begin:
            rows, _read = _rows_of(store, day, entries, frozenset())
            yield from map(decode_launch, rows.values())


class News(NamedTuple):
    """What objects of one day hold."""

    launches: tuple[Launch, ...]
    read: tuple[str, ...]
    """The objects that need not be read again: they never change."""
    listed: tuple[str, ...]
    """All objects of that day."""


def since(store: Store, known: Collection[str]) -> Iterator[News]:
    """What the store has beside the objects `known`, day by day, each launch once a day."""
    for day, entries in _days(store).items():
        rows, read = _rows_of(store, day, entries, known)
        yield News(tuple(map(decode_launch, rows.values())), tuple(read), tuple(entry.name for entry in entries))


def days(store: Store) -> list[str]:
    """The days (`YYYY-MM-DD`) of which there are launch records, sorted. One listing; nothing is read."""
    return sorted(_days(store))


def roll_up(store: Store) -> None:
    """Merge the records of each day that lie in several objects into one.

    Raises:
        StoreError: the store failed. Nothing is lost.
    """
    for day, entries in _days(store).items():
        if len(entries) < 2:
            continue
        small = sorted(entries, key=lambda entry: entry.size)[:_MOST_MERGED]
        sizes = accumulate(entry.size for entry in small)
        _merge(store, day, [entry for entry, size in zip(small, sizes, strict=True) if size <= _MERGED_BYTES])


def _perhaps_roll_up(store: Store, stored: Digest) -> None:
    """Chosen by the digest of what was stored, so that a herd that ends at once does not do it a hundred times.

    One that may not, or cannot now, leaves it to the others.
    """
    if int(digest.hex_of(stored)[:8], 16) % _ONE_IN == 0:
        with suppress(StoreError, CorruptError):
            roll_up(store)


def _name(launch: Launch) -> str:
    return launch.launch if launch.exit_code is not None else f"{launch.launch}.ready"


def kept(directory: Path) -> list[Path]:
    """The files that `keep` has gathered and nobody has sent, the oldest launch first."""
    return sorted(path for path in directory.glob("*.json") if not path.name.startswith("."))


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # sent meanwhile
        return None


def _days(store: Store) -> Mapping[str, list[Entry]]:
    days: dict[str, list[Entry]] = defaultdict(list)
    for entry in store.scan(layout.LAUNCHES):
        days[entry.name.split("/")[1]].append(entry)
    return days


def _rows_of(store: Store, day: str, entries: list[Entry], known: Collection[str]) -> tuple[Rows, list[str]]:
    """The records of a day in objects that are not `known`, and the names of those. What vanishes meanwhile was merged
    into something that a second listing shows."""
    rows: Rows = {}
    read: list[str] = []
    seen = set(known)
    for _round in range(_ROUNDS):
        names = [entry.name for entry in entries if entry.name not in seen]
        seen.update(names)
        found = side_by_side(lambda name: _read(store, name), names, threads=_THREADS)
        for each in found:
            _unite(rows, each.rows)
        read += [each.name for each in found if each.final]
        if not any(each.vanished for each in found):
            break
        entries = list(store.scan(f"{layout.LAUNCHES}{day}/"))
    return rows, read


class _Read(NamedTuple):
    """One object as it was read: without records where it could not be, since a record is a statistic and one that is
    torn must not hide the others."""

    name: str
    rows: Rows
    final: bool = True
    """Whether it would be read the same the next time."""
    vanished: bool = False


def _read(store: Store, name: str) -> _Read:
    """What can be read of an object: of a day that hosts with several releases share, the records that we know."""
    try:
        return _Read(name, _rows(store, name, whole=False))
    except NotFoundError:
        return _Read(name, {}, final=False, vanished=True)
    except CorruptError:
        return _Read(name, {})
    except DeniedError:
        return _Read(name, {}, final=False)


def _merge(store: Store, day: str, entries: Sequence[Entry]) -> None:
    names = [entry.name for entry in entries]
    found = zip(side_by_side(lambda name: _readable(store, name), names, threads=_THREADS), names, strict=True)
    # Largest first, so that of two objects with the same records everybody keeps the same one.
    whole = sorted(
        ((rows, name) for rows, name in found if rows), key=lambda each: (len(each[0]), each[1]), reverse=True
    )
    rows: Rows = {}
    kept: list[str] = []
    covered: list[str] = []
    for more, name in whole:
        news = any(_rank(rows.get(launch, b"")) < _rank(data) for launch, data in more.items())
        (kept if news else covered).append(name)
        _unite(rows, more)
    # These go first: who may not delete must find out before it stores a day a second time.
    for name in covered:
        store.delete(name)
    if len(kept) < 2 or sum(map(len, rows.values())) > _DAY_LIMIT // 2:
        return
    stored = layout.batch_name(day, _store(store, day, rows))
    for name in kept:
        if name != stored:
            store.delete(name)


def _readable(store: Store, name: str) -> Rows | None:
    """The records in an object; None when it vanished or cannot be read, so that it is left alone."""
    try:
        return _rows(store, name)
    except (NotFoundError, CorruptError, DeniedError):
        return None


def _store(store: Store, day: str, rows: Rows) -> Digest:
    """Store these records as one object, which has their digest as its name."""
    data = b"".join(rows[launch] + b"\n" for launch in sorted(rows))
    name = digest.of_bytes(data)
    packed = zstandard.ZstdCompressor(level=10, write_content_size=True).compress(data)
    if not store.put(layout.batch_name(day, name), packed):
        _rows(store, layout.batch_name(day, name))  # nothing may be deleted for the sake of one that is damaged
    return name


def _rows(store: Store, name: str, *, whole: bool = True) -> Rows:
    """The records in an object, or those of them that can be read where it need not be the `whole`.

    Raises:
        NotFoundError, CorruptError, DeniedError: it vanished, is torn, or may not be read.
    """
    rows: Rows = {}
    batch = layout.batch_of(name)
    if batch is None:
        lines = [store.read(name, limit=_ONE_LIMIT)]
    else:
        lines = _unpacked(store.read(name, limit=_DAY_LIMIT), batch, name).split(b"\n")[:-1]
    for line in lines:
        try:
            launch = decode_launch(line)
        except CorruptError:
            if whole:
                raise
            continue
        # A line of another release may have more fields than we know, and keeps them; only its form must be one line.
        _add(rows, launch.launch, line if b"\n" not in line else encode_launch(launch))
    return rows


def _unpacked(packed: bytes, batch: Digest, name: str) -> bytes:
    try:
        if zstandard.get_frame_parameters(packed).content_size > _DAY_LIMIT:
            raise CorruptError(f"`{name}` claims to be larger than records may be")
        data = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError(f"`{name}` cannot be decompressed: {error}") from None
    if digest.of_bytes(data) != batch:
        raise CorruptError(f"`{name}` has other bytes than its name says")
    return data


def _unite(rows: Rows, more: Rows) -> None:
    for launch, data in more.items():
        _add(rows, launch, data)


def _add(rows: Rows, launch: str, data: bytes) -> None:
    held = rows.get(launch)
    if held is None or (held != data and _rank(held) < _rank(data)):
        rows[launch] = data


def _rank(data: bytes) -> tuple[bool, bytes]:
    """Of two records of one launch the one that tells its end counts; everybody must choose the same."""
    return bool(data) and decode_launch(data).exit_code is not None, data
