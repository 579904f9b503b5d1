"""Old launches become totals of their days: what they add up to stays what it was, once each, whatever happens."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Connection, event, func, select

from cachemgr.capture import Launch
from cachemgr.catalogue import past, schema
from cachemgr.catalogue.artifacts import artifacts
from cachemgr.catalogue.ingest import enter, forget, refresh
from cachemgr.catalogue.launches import Asked, count, launches
from cachemgr.catalogue.measures import measures
from cachemgr.catalogue.opened import Catalogue
from cachemgr.catalogue.past import day_before, roll_up
from cachemgr.catalogue.statistics import ROLLED_UP, By, statistics
from cachemgr.store import Store, records
from tests.machines import Machine
from tests.test_capture import launch_named
from tests.test_catalogue import launch_names, stocked

pytestmark = pytest.mark.full

BEFORE = "2026-01-05"
WAYS: tuple[By | None, ...] = (None, "model", "gpu", "day")


def stored(store: Store, root: Path) -> list[Launch]:
    """Launches of eight days, of many kinds, of artifacts that took a minute to make."""
    first, second = stocked(store, root, "1", "2")
    kinds: Sequence[dict[str, object]] = (
        {"artifact": first, "result": "exact", "verdict": "used", "phases": {"init_engine": 12.0, "publish": 0.7}},
        {"artifact": first, "result": "near", "verdict": "partly used", "phases": {"run": 30.0}, "gpus": 8},
        {"artifact": second, "result": "exact", "verdict": "inert", "errors": {"mirror denied": 2}},
        {"artifact": None, "result": "none", "verdict": "cold", "published": f"sha256:{'ab' * 32}", "phases": {}},
        {"artifact": second, "result": "none", "verdict": "cold", "model": "other", "pulled_bytes": 7},
    )
    made = [
        msgspec.structs.replace(
            launch_named(f"l{day}{number}", day=f"2026-01-0{day}"), **{"restored_bytes": day * 100, **kind}
        )
        for day in range(1, 9)
        for number, kind in enumerate(kinds)
    ]
    for launch in made:
        records.record(store, launch)
    return made


def adds_up(catalogue: Catalogue, source: int, asked: Asked) -> list[object]:
    """All that is said of launches by their sums."""
    told = [statistics(catalogue, source, asked, by=by) for by in WAYS]
    return [*told, measures(catalogue, source, most=20), artifacts(catalogue, source), count(catalogue, source)]


def test_what_launches_add_up_to_stays_what_it_was(catalogue: Catalogue, store: Store, tmp_path: Path) -> None:
    stored(store, tmp_path)
    source = refresh(catalogue, store, "one", [])
    questions = [
        Asked(),
        Asked(model="l*"),
        Asked(model="other"),
        Asked(device="nothing*"),
        Asked(since="2026-01-03T00:00:00Z"),
        Asked(since="2026-01-07T00:00:00Z"),
    ]
    expected = [adds_up(catalogue, source, asked) for asked in questions]
    hosts = statistics(catalogue, source, by="host").groups
    assert statistics(catalogue, source).total.saved_seconds, "the test tests something"
    assert roll_up(catalogue, source, BEFORE) == 20
    assert [adds_up(catalogue, source, asked) for asked in questions] == expected
    assert len(launch_names(catalogue, source)) == 20
    rolled = {group.name: group.starts.starts for group in statistics(catalogue, source, by="host").groups}
    assert rolled[ROLLED_UP] == 20
    assert sum(rolled.values()) == sum(group.starts.starts for group in hosts)
    assert statistics(catalogue, source, Asked(host=hosts[0].name)).total.starts == 20, "nobody knows the others' hosts"
    assert roll_up(catalogue, source, BEFORE) == 0


def test_none_comes_back_when_records_are_read_again(catalogue: Catalogue, store: Store, tmp_path: Path) -> None:
    made = stored(store, tmp_path)
    source = refresh(catalogue, store, "one", [])
    roll_up(catalogue, source, BEFORE)
    expected = adds_up(catalogue, source, Asked())
    records.roll_up(store)  # all of them are in other objects now
    assert refresh(catalogue, store, "one", []) == source
    catalogue.write(lambda connection: enter(connection, source, made))
    assert adds_up(catalogue, source, Asked()) == expected
    records.record(store, launch_named("late", day="2026-01-02"))
    records.record(store, launch_named("new", day="2026-01-05"))
    refresh(catalogue, store, "one", [])
    assert count(catalogue, source) == 41, "the late one is too late"
    roll_up(catalogue, source, "2026-01-01")
    refresh(catalogue, store, "one", [])
    assert count(catalogue, source) == 41, "a shorter past takes none back"
    forget(catalogue, "one")
    again = refresh(catalogue, store, "one", [])
    assert count(catalogue, again) == 42, "reindex counts anew"
    assert len(launches(catalogue, again, limit=1000).launches) == 42


def test_two_stores_that_tell_of_one_launch_each_count_it_once(
    catalogue: Catalogue, store: Store, tmp_path: Path
) -> None:
    stored(store, tmp_path)
    one, other = (refresh(catalogue, store, name, []) for name in ("one", "other"))
    expected = adds_up(catalogue, other, Asked())
    roll_up(catalogue, one, BEFORE)
    assert len(launch_names(catalogue, other)) == 40, "the other one is not read to its end, for all we know"
    assert adds_up(catalogue, other, Asked()) == expected
    roll_up(catalogue, other, BEFORE)
    assert adds_up(catalogue, other, Asked()) == expected
    rows = catalogue.read(
        lambda connection: connection.execute(select(func.count()).select_from(schema.launch)).scalar()
    )
    assert rows == 20


def test_factors_that_nothing_has_any_more_go(catalogue: Catalogue, store: Store, tmp_path: Path) -> None:
    made = stored(store, tmp_path)
    source = refresh(catalogue, store, "one", [])

    def keys(connection: Connection) -> set[str]:
        return set(connection.execute(select(schema.factor_set.c.key)).scalars())

    before = catalogue.read(keys)
    assert len(before) > 1
    roll_up(catalogue, source, "2027-01-01")
    assert catalogue.read(keys) == {summary.key for summary in artifacts(catalogue, source).artifacts}
    assert count(catalogue, source) == len(made)


@contextmanager
def dying(catalogue: Catalogue, after: int) -> Iterator[list[int]]:
    """A catalogue whose connection is lost after so many statements."""
    ran = [0]

    def fail(*_: object) -> None:
        ran[0] += 1
        if ran[0] > after:
            raise ConnectionResetError("the test said so")

    event.listen(catalogue.engine, "before_cursor_execute", fail)
    try:
        yield ran
    finally:
        event.remove(catalogue.engine, "before_cursor_execute", fail)


def test_whoever_is_killed_meanwhile_has_done_whole_days_or_none(
    catalogue: Catalogue, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(store, tmp_path)
    source = refresh(catalogue, store, "one", [])
    expected = adds_up(catalogue, source, Asked())
    monkeypatch.setattr(past, "_TOGETHER", 3)
    left = set[int]()
    after = 0
    while True:
        try:
            with dying(catalogue, after):
                roll_up(catalogue, source, BEFORE)
            break
        except ConnectionResetError:
            left.add(len(launch_names(catalogue, source)))
            assert adds_up(catalogue, source, Asked()) == expected
            refresh(catalogue, store, "one", [])
            after += 1
    assert left <= {40, 35, 30, 25, 20}
    assert len(left) > 1
    assert len(launch_names(catalogue, source)) == 20
    assert adds_up(catalogue, source, Asked()) == expected


def test_who_adds_launches_meanwhile_adds_them_once(catalogue: Catalogue, store: Store, tmp_path: Path) -> None:
    made = stored(store, tmp_path)
    source = refresh(catalogue, store, "one", [])
    expected = adds_up(catalogue, source, Asked())

    def add(together: threading.Barrier) -> None:
        together.wait()
        catalogue.write(lambda connection: enter(connection, source, made))

    with ThreadPoolExecutor(2) as pool:
        for day in range(2, 9):
            together = threading.Barrier(3)
            adding = [pool.submit(add, together) for _number in range(2)]
            together.wait()
            roll_up(catalogue, source, f"2026-01-0{day}")
            for each in adding:
                each.result()
    assert adds_up(catalogue, source, Asked()) == expected
    assert len(launch_names(catalogue, source)) == 5


def test_days_are_counted_from_now() -> None:
    assert day_before(1_767_225_600.0 + 180 * 86400, 180 * 86400.0) == "2026-01-01"
    assert day_before(1_767_225_600.0, 1e12) == "1970-01-01"


@pytest.mark.slow
def test_the_command_line_adds_up_what_is_older_than_the_setting(store: Store, tmp_path: Path) -> None:
    for name in ("a", "b"):
        records.record(store, launch_named(name))
    machine = Machine(tmp_path / "machine", Path(str(store)))
    kept = machine.json("stats", CACHEMGR_LAUNCH_AGE="36500d")
    assert machine.json("stats") == kept, "180 days by default"
    assert kept["total"]["starts"] == 2
    assert "no store tells of a launch `a`" in machine.cachemgr("why", "--launch", "a", code=10).stderr
