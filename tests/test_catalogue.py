"""The catalogue, on SQLite and on a real PostgreSQL: an index that says what the store says, exactly once."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, event, func, select

from cachemgr.capture import Launch
from cachemgr.catalogue import schema, sources
from cachemgr.catalogue.artifacts import Wanted, artifacts, history
from cachemgr.catalogue.ingest import enter, forget, refresh
from cachemgr.catalogue.launches import Asked, last, launches, named
from cachemgr.catalogue.measures import measures
from cachemgr.catalogue.opened import Catalogue, in_memory, open_catalogue
from cachemgr.catalogue.sources import source_name
from cachemgr.catalogue.statistics import Sent, statistics
from cachemgr.clock import epoch
from cachemgr.errors import NotFoundError, UsageError
from cachemgr.history import NO_HISTORY, fold
from cachemgr.inventory import Summary, summaries
from cachemgr.key import Key
from cachemgr.store import Store, layout, records
from cachemgr.store.captures import Damaged
from cachemgr.store.local import LocalStore
from cachemgr.store.removal import plan_removal, remove
from tests.databases import made
from tests.stores import Recording
from tests.test_capture import LAUNCH, launch_named
from tests.test_records import plant
from tests.trees import FACTORS, build, changed, draft, publish_trees

KEYS = [Key(f"k1:{number:032x}") for number in range(3)]


def stocked(store: Store, root: Path, *lengths: str) -> list[Key]:
    """Publish an artifact for each of these lengths of a model; their keys."""
    trees = build(root / "live", ["triton", "modelinfos"])
    found: list[Key] = []
    for length in lengths:
        manifest = msgspec.structs.replace(
            draft(factors=changed("vllm.max_model_len", length)),
            created=f"2026-01-02T03:04:{len(found):02}Z",
            timings={"run": 60.0, "init_engine": 45.0},
        )
        publish_trees(store, trees, manifest)
        found.append(manifest.key)
    return found


def known(catalogue: Catalogue, source: int) -> list[Summary]:
    return list(artifacts(catalogue, source).artifacts)


def launch_names(catalogue: Catalogue, source: int) -> list[str]:
    return sorted(launch.launch for launch in launches(catalogue, source, limit=1000).launches)


def taken(catalogue: Catalogue, store: Store, name: str = "one") -> int:
    return refresh(catalogue, store, name, [])


@contextmanager
def counted(catalogue: Catalogue) -> Iterator[list[str]]:
    """The statements that the catalogue runs meanwhile."""
    found: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        found.append(statement)

    event.listen(catalogue.engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(catalogue.engine, "before_cursor_execute", note)


def test_it_says_what_the_store_says(catalogue: Catalogue, store: Store, tmp_path: Path) -> None:
    first, second = stocked(store, tmp_path, "1", "2")
    store.put(layout.pin_name(second, "2026-01-01T00:00:00Z"), b"{}")
    usual = {"artifact": first, "result": "exact", "verdict": "used", "engine": "vllm"}
    for name, more in (
        ("a", {"phases": {"init_engine": 12.0, "run": 9.0}}),
        ("b", {"phases": {"init_engine": 13.5, "run": 7.0}}),
        ("c", {"verdict": "inert"}),
        ("d", {"engine": "torch", "phases": {"run": 20.0}, "verdict": "partly used", "result": "near"}),
        ("e", {"result": "none"}),
        ("f", {"artifact": second}),
    ):
        records.record(store, msgspec.structs.replace(launch_named(name), **(usual | more)))
    source = taken(catalogue, store)
    expected = summaries(store, [])
    assert known(catalogue, source) == expected
    assert [each.uses for each in expected] == [1, 4], "the test tests something"
    told, cold = history(catalogue, source, first)
    assert (told.uses, cold) == (4, {"run": 60.0, "init_engine": 45.0})
    assert history(catalogue, source, KEYS[0])[0].uses == 0


usual_launches = st.builds(
    lambda number, **changes: msgspec.structs.replace(launch_named(f"l{number}"), **changes),
    number=st.integers(0, 40),
    artifact=st.sampled_from([*KEYS, None]),
    result=st.sampled_from(["exact", "near", "none"]),
    verdict=st.sampled_from(["used", "partly used", "inert", "cold", "unknown"]),
    engine=st.sampled_from(["vllm", "torch"]),
    phases=st.dictionaries(st.sampled_from(["run", "init_engine"]), st.integers(1, 99).map(float)),
    exit_code=st.sampled_from([0, 1, None]),
    started=st.integers(10, 28).map(lambda day: f"2026-01-{day}T00:00:00Z"),
)


def test_histories_are_those_of_the_records() -> None:
    catalogue = in_memory()
    store = LocalStore(Path("/nowhere/at/all"))

    @settings(max_examples=60)
    @given(st.lists(usual_launches, max_size=12, unique_by=lambda launch: launch.launch))
    def check(found: list[Launch]) -> None:
        source = taken(catalogue, store)
        catalogue.write(lambda connection: enter(connection, source, sorted(found, key=lambda launch: launch.launch)))
        expected = fold(found)
        for key in KEYS:
            assert history(catalogue, source, key)[0] == expected.get(key, NO_HISTORY)
        forget(catalogue, "one")
        assert launch_names(catalogue, source) == []

    check()
    catalogue.close()


def test_what_is_known_is_not_read_again(catalogue: Catalogue, store: Store, tmp_path: Path) -> None:
    stocked(store, tmp_path, "1", "2")
    plant(store, "a", "b", "c")
    source = taken(catalogue, store)
    noted = Recording(store)
    assert taken(catalogue, noted) == source
    assert noted.opened() == []
    plant(store, "d")
    (third,) = stocked(store, tmp_path, "3")
    assert taken(catalogue, noted) == source
    opened = noted.opened()
    assert sorted(name.split("/")[0] for name in opened) == ["artifacts", "launches"]
    assert third.replace(":", "-") in " ".join(opened)


@pytest.mark.parametrize("more", [0, 10])
def test_statements_do_not_grow_with_what_is_known(
    catalogue: Catalogue, store: Store, tmp_path: Path, more: int
) -> None:
    stocked(store, tmp_path, *map(str, range(2 + more)))
    plant(store, *(f"l{number}" for number in range(3 + more * 5)))
    source = taken(catalogue, store)
    for bound, work in (
        (3, lambda: taken(catalogue, store)),
        (2, lambda: artifacts(catalogue, source)),
        (3, lambda: history(catalogue, source, KEYS[0])),
        (1, lambda: launches(catalogue, source, limit=10)),
        (1, lambda: named(catalogue, source, "l1")),
        (6, lambda: statistics(catalogue, source)),
        (8, lambda: statistics(catalogue, source, by="model")),
    ):
        with counted(catalogue) as statements:
            work()
        asked = [each for each in statements if not each.startswith(("BEGIN", "SELECT set_config"))]
        assert len(asked) <= bound + 1, asked


def test_records_that_are_rolled_up_count_once(catalogue: Catalogue, store: Store) -> None:
    names = plant(store, "a", "b", "c")
    source = taken(catalogue, store)
    records.roll_up(store)
    plant(store, "d")
    for _time in range(2):
        taken(catalogue, store)
        assert set(launch_names(catalogue, source)) == names | {"d"}
    remembered = catalogue.read(lambda connection: connection.execute(select(schema.listed.c.name)).scalars().all())
    assert sorted(remembered) == sorted(entry.name for entry in store.scan("launches/")), "what is gone is forgotten"


def test_the_end_of_a_launch_replaces_its_beginning_whoever_tells_first(catalogue: Catalogue, tmp_path: Path) -> None:
    ready, ended = launch_named("one", exit_code=None), launch_named("one", exit_code=137)
    first, second = LocalStore(tmp_path / "first"), LocalStore(tmp_path / "second")
    records.record(first, ended)
    records.record(second, ready)
    for store, name in ((first, "first"), (second, "second"), (first, "first")):
        source = taken(catalogue, store, name)
        assert launches(catalogue, source, limit=9).launches == (ended,)


def test_stores_are_told_apart(catalogue: Catalogue, tmp_path: Path) -> None:
    first, second = LocalStore(tmp_path / "first"), LocalStore(tmp_path / "second")
    (key,) = stocked(first, tmp_path, "1")
    plant(first, "a", "both")
    plant(second, "b", "both")
    one, two = taken(catalogue, first, "first"), taken(catalogue, second, "second")
    assert launch_names(catalogue, one) == ["a", "both"]
    assert launch_names(catalogue, two) == ["b", "both"]
    assert [summary.key for summary in known(catalogue, one)] == [key]
    assert known(catalogue, two) == []
    forget(catalogue, "first")
    assert launch_names(catalogue, two) == ["b", "both"]
    again = taken(catalogue, first, "first")
    assert launch_names(catalogue, again) == ["a", "both"]
    assert known(catalogue, again) == summaries(first, [])


def test_hosts_that_share_a_home_read_its_store_once(tmp_path: Path) -> None:
    """Each pod of a deployment has another name, and the volume with their home outlives them all."""
    store = LocalStore(tmp_path / "home" / "store")
    plant(store, "a")
    with closing(open_catalogue(None, tmp_path / "home")) as catalogue:
        names = {source_name(catalogue, store, host) for host in ("pod-1", "pod-2")}
        assert names == {"./store"}
        taken(catalogue, store, names.pop())
    os.rename(tmp_path / "home", tmp_path / "elsewhere")
    moved = Recording(LocalStore(tmp_path / "elsewhere" / "store"))
    with closing(open_catalogue(None, tmp_path / "elsewhere")) as catalogue:
        assert launch_names(catalogue, taken(catalogue, moved, source_name(catalogue, moved, "pod-3"))) == ["a"]
    assert moved.opened() == [], "mounted elsewhere it is the same"


def test_stores_that_may_be_others_have_other_names(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "home" / "store")
    with closing(open_catalogue(made(postgres), tmp_path / "home")) as shared:
        assert source_name(shared, store, "one") == f"one:{store}", "it is beside no file of the catalogue"
        monkeypatch.setattr(sources, "exported_place", lambda place: f"server:/export{place}")
        assert {source_name(shared, store, host) for host in ("one", "two")} == {f"server:/export{store}"}
        monkeypatch.undo()
    apart = LocalStore(tmp_path / "home-of-another")
    with closing(open_catalogue(None, tmp_path / "home")) as catalogue:
        assert source_name(catalogue, apart, "one") == f"one:{apart}"
    memory = in_memory()
    assert source_name(memory, store, "one") == f"one:{store}"
    memory.close()


def test_what_goes_and_what_is_pinned_is_noticed(catalogue: Catalogue, store: Store, tmp_path: Path) -> None:
    first, second = stocked(store, tmp_path, "1", "2")
    source = taken(catalogue, store)
    store.put(layout.pin_name(first, "2026-01-01T00:00:00Z"), b"{}")
    taken(catalogue, store)
    assert [summary.pinned for summary in known(catalogue, source)] == [False, True]
    store.delete(layout.pin_name(first, "2026-01-01T00:00:00Z"))
    remove(store, plan_removal(store, [second], now=0.0))
    taken(catalogue, store)
    assert [(summary.key, summary.pinned) for summary in known(catalogue, source)] == [(first, False)]


def test_a_damaged_capture_is_said_each_time_and_hides_no_other(
    catalogue: Catalogue, store: Store, tmp_path: Path
) -> None:
    first, second = stocked(store, tmp_path, "1", "2")
    (name,) = [entry.name for entry in store.scan(layout.artifact_prefix(first)) if entry.name.endswith(".json.zst")]
    data = store.read(name, limit=1 << 20)
    store.delete(name)
    store.put(name, data[:-9])
    for _time in range(2):
        damaged: list[Damaged] = []
        source = refresh(catalogue, store, "one", damaged)
        assert [each.key for each in damaged] == [first]
        assert [summary.key for summary in known(catalogue, source)] == [second]


def test_pages_have_everything_once(catalogue: Catalogue, store: Store, tmp_path: Path) -> None:
    stocked(store, tmp_path, *"12345")
    plant(store, *"abcdefg")
    source = taken(catalogue, store)
    seen: list[Summary] = []
    after = None
    while True:
        page = artifacts(catalogue, source, limit=2, after=after)
        seen += page.artifacts
        after = page.after
        if after is None:
            break
    assert seen == summaries(store, [])
    found: list[str] = []
    while True:
        some = launches(catalogue, source, limit=3, after=after)
        found += [launch.launch for launch in some.launches]
        after = some.after
        if after is None:
            break
    assert found == sorted("abcdefg", reverse=True)


def test_what_is_asked_for_is_found(catalogue: Catalogue, store: Store, tmp_path: Path) -> None:
    first, _second = stocked(store, tmp_path, "1", "2")
    for name, model in (("a", "acme/100%_real"), ("b", "acme/100xxreal"), ("c", "other")):
        records.record(store, msgspec.structs.replace(launch_named(name), model=model, host=f"host-{name}"))
    source = taken(catalogue, store)
    for asked, names in (
        (Asked(model="acme/*"), "ab"),
        (Asked(model="acme/100%_*"), "a"),
        (Asked(model="ACME/*"), ""),
        (Asked(host="host-c", model="o*"), "c"),
        (Asked(since="2026-01-02T03:04:06Z"), ""),
        (Asked(key=KEYS[0]), ""),
        (Asked(key=LAUNCH.key), "abc"),
        (Asked(key=LAUNCH.artifact), ""),
        (Asked(about=LAUNCH.artifact), "abc"),
    ):
        found = launches(catalogue, source, asked, limit=9).launches
        assert sorted(launch.launch for launch in found) == list(names), asked
    (summary,) = artifacts(catalogue, source, Wanted(key=first)).artifacts
    assert summary.key == first
    assert artifacts(catalogue, source, Wanted(model=f"{summary.model}*", complete=True)).artifacts
    assert not artifacts(catalogue, source, Wanted(complete=False)).artifacts
    assert named(catalogue, source, "a").model == "acme/100%_real"
    with pytest.raises(NotFoundError, match="no store tells of a launch `zz`"):
        named(catalogue, source, "zz")


def test_a_launch_is_named_by_any_unambiguous_beginning(catalogue: Catalogue, store: Store) -> None:
    plant(store, "20260102-aa", "20260102-ab", "20260102")
    source = taken(catalogue, store)
    assert named(catalogue, source, "20260102-aa").launch == "20260102-aa"
    assert named(catalogue, source, "20260102").launch == "20260102", "a whole name is one"
    with pytest.raises(UsageError, match="beginning of several"):
        named(catalogue, source, "20260102-a")


def test_a_launch_comes_back_with_its_factors(catalogue: Catalogue, store: Store) -> None:
    told = msgspec.structs.replace(LAUNCH, factors=FACTORS)
    for name in ("a", "b"):
        records.record(store, msgspec.structs.replace(told, launch=name))
    source = taken(catalogue, store)
    assert named(catalogue, source, "a") == msgspec.structs.replace(told, launch="a")
    sets = catalogue.read(lambda connection: connection.execute(select(schema.factor_set.c.key)).scalars().all())
    assert sets == [LAUNCH.key], "once a key, not once a launch"


def test_a_record_that_no_column_can_hold_keeps_no_other_out(catalogue: Catalogue, store: Store) -> None:
    """A mirror may have anything in its records."""
    huge = {"restored_bytes": 1 << 70, "exit_code": 1 << 40, "errors": {"x": 1 << 40}, "added": {"triton": 1 << 63}}
    huge |= {"gpus": 1 << 70, "pushed_bytes": 1 << 70}
    endless = {"phases": {"init_engine": 1e308, "run": -1e308, "publish": 1e308}, "restore_seconds": 1e308}
    warm = {"engine": "vllm", "verdict": "used", "published": LAUNCH.key}
    odd = {"model": "acme/\0", "host": "h" * 9000, "device": "\0" * 9}
    for name in ("endless", "endless-too"):
        records.record(store, msgspec.structs.replace(launch_named(name), **endless, **warm))
    records.record(store, msgspec.structs.replace(launch_named("huge"), **huge))
    records.record(store, msgspec.structs.replace(launch_named("odd"), **odd))
    plant(store, "usual")
    source = taken(catalogue, store)
    assert launch_names(catalogue, source) == ["endless", "endless-too", "huge", "odd", "usual"]
    assert statistics(catalogue, source).total.starts == 5
    assert sum(each.starts for each in measures(catalogue, source, most=9).launches) == 5
    assert artifacts(catalogue, source).artifacts == ()


def test_names_that_no_index_takes_are_told_apart(catalogue: Catalogue, store: Store, tmp_path: Path) -> None:
    """A store may lie deeper than an index has letters, and a manifest may say anything of its time."""
    trees = build(tmp_path / "live", ["triton"])
    publish_trees(store, trees, msgspec.structs.replace(draft(), created="2026-" + os.urandom(4500).hex()))
    plant(store, "a")
    deep = "host:" + "/deep" * 90
    sources_of = [taken(catalogue, store, f"{deep}/{name}") for name in ("one", "two", "one")]
    assert sources_of[0] == sources_of[2] != sources_of[1]
    assert launch_names(catalogue, sources_of[1]) == ["a"]
    assert len(known(catalogue, sources_of[0])) == 1
    forget(catalogue, f"{deep}/one")
    assert launch_names(catalogue, sources_of[0]) == []
    assert launch_names(catalogue, sources_of[1]) == ["a"]


def test_a_clock_that_was_ahead_once_does_not_hide_what_came_after(catalogue: Catalogue, store: Store) -> None:
    for name, day in (("before", "2026-01-02"), ("after", "2026-01-03"), ("ahead", "2036-01-01")):
        records.record(store, launch_named(name, day=day))
    source = taken(catalogue, store)

    def found(now: str, **asked: str) -> str | None:
        launch = last(catalogue, source, Asked(**asked), now=epoch(now))
        return None if launch is None else launch.launch

    assert found("2026-02-01T00:00:00Z") == "after"
    assert found("2026-01-02T12:00:00Z") == "before"
    assert found("2026-01-03T03:04:00Z") == "after", "clocks of two hosts are never quite equal"
    assert found("2025-01-01T00:00:00Z") == "ahead", "nothing else is known"
    assert found("2026-02-01T00:00:00Z", host="nobody") is None


def test_what_records_do_not_say_is_not_counted_as_nothing(catalogue: Catalogue, store: Store, tmp_path: Path) -> None:
    """Seconds of GPUs are those of a start once for each GPU; records from before they were told are told apart."""
    (key,) = stocked(store, tmp_path, "1")
    warm = {"artifact": key, "result": "exact", "verdict": "used", "engine": "vllm", "phases": {"init_engine": 12.0}}
    moved = {"pulled_bytes": 700, "published_bytes": 0, "pushed_bytes": None}
    for name, more in (
        ("head", {"gpus": 8, **moved}),
        ("headless", {"gpus": 0, "published_bytes": 50, "pushed_bytes": 60, "pulled_bytes": None}),
        ("old", {}),
        ("untimed", {"gpus": 4, "phases": {}}),
    ):
        records.record(store, msgspec.structs.replace(launch_named(name), **(warm | more)))
    source = taken(catalogue, store)
    total = statistics(catalogue, source).total
    each = 45.0 - 12.0 - LAUNCH.restore_seconds
    assert (total.saved_seconds, total.timed) == (3 * each, 3)
    assert (total.saved_gpu_seconds, total.gpu_timed) == (8 * each, 2)
    assert (total.pulled, total.published, total.pushed) == (Sent(700, 1), Sent(50, 2), Sent(60, 1))
    (group,) = statistics(catalogue, source, by="model").groups
    assert group.starts == total
    (measure,) = measures(catalogue, source, most=9).launches
    assert (measure.saved_seconds, measure.saved_gpu_seconds) == (3 * each, 8 * each)
    assert (measure.pulled_bytes, measure.published_bytes, measure.pushed_bytes) == (700, 50, 60)
    nothing = statistics(catalogue, source, Asked(host="nobody")).total
    assert (nothing.saved_gpu_seconds, nothing.gpu_timed, nothing.pushed) == (None, 0, Sent())


def test_factors_that_came_with_another_key_explain_nothing(catalogue: Catalogue, store: Store) -> None:
    told = msgspec.structs.replace(LAUNCH, factors=FACTORS)
    records.record(store, msgspec.structs.replace(told, launch="a", factors=changed("vllm.max_model_len", "1")))
    source = taken(catalogue, store)
    records.record(store, msgspec.structs.replace(told, launch="c", factors=(*FACTORS, FACTORS[0])))
    taken(catalogue, store)
    assert named(catalogue, source, "a").factors == ()
    for name, factors in (("b", FACTORS), ("bb", changed("vllm.max_model_len", "2"))):  # which come together
        records.record(store, msgspec.structs.replace(told, launch=name, factors=factors))
    taken(catalogue, store)
    assert named(catalogue, source, "a").factors == FACTORS


def test_a_reader_sees_one_state(database: str, tmp_path: Path, store: Store) -> None:
    plant(store, "a")
    catalogue, other = (open_catalogue(database, tmp_path / "home") for _time in range(2))
    source = taken(catalogue, store)

    def work(connection: Connection) -> list[int]:
        seen = []
        for name in ("b", "c"):
            seen.append(connection.execute(select(func.count()).select_from(schema.launch)).scalar_one())
            plant(store, name)
            taken(other, store)
        return seen

    assert catalogue.read(work) == [1, 1]
    assert launch_names(catalogue, source) == ["a", "b", "c"]
    other.close()
    catalogue.close()


def _children(work: Callable[[int], None], count: int) -> list[int]:
    """Run `work` in so many processes at once; their exit codes."""
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                work(number)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_sixteen_writers_at_once_lose_and_double_nothing(database: str, tmp_path: Path) -> None:
    """Also the first use of a database that is still empty."""
    shared = LocalStore(tmp_path / "shared")
    stocked(shared, tmp_path, "1", "2", "3")
    names = plant(shared, *(f"s{number}" for number in range(30)))

    def work(number: int) -> None:
        own = LocalStore(tmp_path / f"own-{number}")
        plant(own, f"own-{number}", "everybodys")
        catalogue = open_catalogue(database, tmp_path / "home")
        for store, name in ((shared, "shared"), (own, f"own-{number}")) * 2:
            taken(catalogue, store, name)
        catalogue.close()

    assert _children(work, 16) == [0] * 16
    catalogue = open_catalogue(database, tmp_path / "home")
    assert catalogue.note == ""
    source = taken(catalogue, shared, "shared")
    assert set(launch_names(catalogue, source)) == names
    assert known(catalogue, source) == summaries(shared, [])
    every = catalogue.read(lambda connection: connection.execute(select(schema.launch.c.launch)).scalars().all())
    assert sorted(every) == sorted([*names, "everybodys", *(f"own-{number}" for number in range(16))])
    catalogue.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_before_any_statement_it_loses_and_doubles_nothing(database: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    stocked(store, tmp_path, "1")
    names = plant(store, "a", "b", "c")
    records.roll_up(store)
    names |= plant(store, "d", "e")

    def work(step: int) -> None:
        catalogue = open_catalogue(database, tmp_path / "home")
        left = [step]

        def die(*arguments: object) -> None:
            left[0] -= len(arguments) < 3 or not str(arguments[2]).startswith(("SELECT", "BEGIN"))
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        event.listen(catalogue.engine, "before_cursor_execute", die)  # whatever changes something
        event.listen(catalogue.engine, "commit", die)
        forget(catalogue, "one")
        taken(catalogue, store)

    step, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        (code,) = _children(lambda _number, step=step: work(step), 1)  # type: ignore[misc]
        catalogue = open_catalogue(database, tmp_path / "home")
        source = taken(catalogue, store)
        assert set(launch_names(catalogue, source)) == names, step
        assert known(catalogue, source) == summaries(store, []), step
        catalogue.close()
        step += 1
    assert code == 0
    assert step > 15, "it was killed at every step"
