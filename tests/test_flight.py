"""Single flight: of many cold starts one compiles, whoever is killed and whatever the clocks say."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from cachemgr import flight, process
from cachemgr.errors import StoreError
from cachemgr.flight import POLL_SECONDS, SILENT_SECONDS, TELL_SECONDS, Turn, wait_for
from cachemgr.key import Key, from_folder
from cachemgr.process import this_process
from cachemgr.store import Store, layout
from cachemgr.store.captures import captures, keys
from cachemgr.store.claims import Claims, InStore, Mark, Owner
from cachemgr.store.local import LocalStore
from tests.engines import Engines
from tests.machines import Fleet
from tests.stores import Faulty, contents

KEY = Key("k1:" + "ab" * 16)
ARTIFACT = "artifacts/k1-" + "ab" * 16 + "/capture.json.zst"
HERE = this_process()
ELSEWHERE = msgspec.structs.replace(HERE, boot="another boot", pid=1)


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.1)


@dataclass
class Simulated:
    """A clock that passes when somebody sleeps; `meanwhile` happens then, as on another machine."""

    seconds: float = 0.0
    meanwhile: Callable[[float], None] = lambda _now: None

    def now_ns(self) -> int:
        return int(self.seconds * 1e9)

    def monotonic(self) -> float:
        return self.seconds

    def text(self) -> str:
        raise NotImplementedError

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.meanwhile(self.seconds)


@dataclass
class Waiter:
    """A launch that waits for the artifact of KEY."""

    store: Store
    clock: Simulated = field(default_factory=Simulated)
    said: list[str] = field(default_factory=list)
    looked: int = 0

    def look(self) -> str | None:
        self.looked += 1
        return "artifact" if self.store.has(ARTIFACT) else None

    def wait(self, seconds: float = 600.0, claims: Claims | None = None) -> Turn[str]:
        owner = Owner("me", "my-host", HERE)
        claims = claims or InStore(self.store, KEY)
        return wait_for(
            claims, self.store, KEY, owner, self.look, seconds=seconds, clock=self.clock, tell=self.said.append
        )


def newest(store: Store) -> Mark | None:
    return InStore(store, KEY).newest()


def give_up(store: Store, name: str) -> None:
    InStore(store, KEY).give_up(layout.claim_number(name) or 0)


def claimed(store: Store, *, host: str = "node-7", process: object = ELSEWHERE) -> str:
    owner = msgspec.convert({"launch": host, "host": host, "process": process}, Owner, from_attributes=True)
    after = newest(store)
    number = InStore(store, KEY).take(owner, after=0 if after is None else after.number)
    assert number is not None
    return layout.claim_name(KEY, number)


def publish(store: Store) -> None:
    store.put(ARTIFACT, b"")


def test_who_comes_first_compiles_and_leaves_nothing_behind(store: Store) -> None:
    turn = Waiter(store).wait()
    assert turn.flight is not None
    taken = newest(store)
    assert taken is not None
    assert InStore(store, KEY).owner_of(taken.number) == Owner("me", "my-host", HERE)
    turn.flight.land()
    turn.flight.land()
    assert set(contents(store)) == {"layout.json", "CACHEDIR.TAG"}


def test_who_comes_later_waits_for_what_is_published(store: Store) -> None:
    name = claimed(store)
    waiter = Waiter(store)

    def owner(now: float) -> None:
        InStore(store, KEY).beat(1)
        os.utime(f"{store}/{name}", (now, now))
        if now == 45.0:
            publish(store)
            give_up(store, name)

    waiter.clock.meanwhile = owner
    turn = waiter.wait()
    assert (turn.found, turn.flight, waiter.clock.seconds) == ("artifact", None, 45.0)
    assert waiter.looked == 1, "looking may cost much, and is for when something has changed"
    assert waiter.said == [
        f"waiting for node-7 to compile k1:ababababa · {seconds} s of 600 s" for seconds in (0, 10, 20, 30, 40)
    ]
    assert newest(store) is None, "who finds it takes no claim"


def test_something_that_is_published_on_the_way_is_looked_at(store: Store) -> None:
    claimed(store)
    waiter = Waiter(store)
    waiter.clock.meanwhile = lambda now: publish(store) if now == 5.0 else None
    turn = waiter.wait()
    assert turn.found == "artifact"
    assert 5.0 <= waiter.clock.seconds <= 7.0


@pytest.mark.parametrize("skew", [-1e9, -3600.0, 0.0, 3600.0, 1e9])
def test_an_owner_that_went_silent_is_succeeded_whatever_its_clock_said(store: Store, skew: float) -> None:
    name = claimed(store)
    modified = max(0.0, time.time() + skew)
    os.utime(f"{store}/{name}", (modified, modified))
    waiter = Waiter(store)
    turn = waiter.wait()
    assert turn.flight is not None
    assert waiter.clock.seconds == SILENT_SECONDS
    assert turn.waited_for == "node-7"
    taken = newest(store)
    assert taken is not None
    assert layout.claim_name(KEY, taken.number) > name
    turn.flight.land()
    assert newest(store) is None, "the claim of the dead goes with ours"


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_an_owner_that_beats_is_waited_for_whatever_its_clock_says(store: Store, skew: float) -> None:
    name = claimed(store)
    waiter = Waiter(store)

    def beat(now: float) -> None:
        if now % 5 == 0:
            modified = 1_800_000_000 + now + skew
            os.utime(f"{store}/{name}", (modified, modified))

    waiter.clock.meanwhile = beat
    turn = waiter.wait(seconds=300.0)
    assert (turn.found, turn.flight, turn.waited_for, waiter.clock.seconds) == (None, None, "node-7", 300.0)
    assert waiter.looked == 0
    assert len(waiter.said) == 300 / TELL_SECONDS


class Untaken(InStore):
    """Claims that can be read, and whose keeper does not answer who wants one."""

    def take(self, owner: Owner, *, after: int) -> int | None:
        raise StoreError(f"no answer to {owner.launch} after {after}")


@pytest.mark.parametrize("left", [True, False])
def test_who_can_take_no_claim_finds_what_an_owner_left_before_it_went(store: Store, left: bool) -> None:
    claimed(store, process=msgspec.structs.replace(HERE, started="1"))
    if left:
        publish(store)
        assert Waiter(store).wait(claims=Untaken(store, KEY)).found == "artifact"
    else:
        with pytest.raises(StoreError, match="no answer to me"):
            Waiter(store).wait(claims=Untaken(store, KEY))


class Beaten(InStore):
    """Claims that others always take a moment earlier, and give up at once."""

    def take(self, owner: Owner, *, after: int) -> int | None:
        return None


def test_nobody_is_said_to_be_waited_for_who_was_never_seen(store: Store) -> None:
    waiter = Waiter(store)
    assert waiter.wait(seconds=30.0, claims=Beaten(store, KEY)).flight is None
    assert waiter.said == []


def test_an_owner_that_is_dead_on_this_host_is_succeeded_at_once(store: Store) -> None:
    claimed(store, process=msgspec.structs.replace(HERE, started="1"))
    waiter = Waiter(store)
    turn = waiter.wait()
    assert turn.flight is not None
    assert waiter.clock.seconds == 0
    turn.flight.land()


def test_the_next_owner_is_not_taken_for_the_dead_one_before_it(store: Store) -> None:
    """Numbers begin again when a claim is given up, here between two looks of the one who waits."""
    with subprocess.Popen(["sleep", "600"]) as running:
        started = process.start_time(running.pid) or ""
        first = claimed(store, host="node-1", process=msgspec.structs.replace(HERE, pid=running.pid, started=started))
        waiter = Waiter(store)

        def meanwhile(now: float) -> None:
            if now == 1.0:
                give_up(store, first)
                claimed(store, host="node-2")
                running.kill()
                running.wait()
            if now == 9.0:
                publish(store)

        waiter.clock.meanwhile = meanwhile
        turn = waiter.wait()
    assert (turn.found, turn.waited_for, waiter.clock.seconds) == ("artifact", "node-2", 9.0)


def test_an_owner_that_landed_without_anything_is_succeeded(store: Store) -> None:
    name = claimed(store)
    waiter = Waiter(store)
    waiter.clock.meanwhile = lambda now: give_up(store, name) if now == 3.0 else None
    turn = waiter.wait()
    assert turn.flight is not None
    assert waiter.clock.seconds == 3.0
    turn.flight.land()


def test_who_waited_for_three_that_brought_nothing_waits_no_more_and_keeps_nobody_waiting(store: Store) -> None:
    waiter = Waiter(store)
    names = [claimed(store)]

    def next_owner(now: float) -> None:
        give_up(store, names.pop())
        names.append(claimed(store, host=f"node-{now:.0f}"))

    waiter.clock.meanwhile = next_owner
    turn = waiter.wait()
    assert (turn.found, turn.flight, waiter.clock.seconds) == (None, None, 3 * POLL_SECONDS)
    assert waiter.looked == 3


def test_who_is_slower_waits_for_who_was_faster(store: Store) -> None:
    class Faster(Faulty):
        """Somebody takes the claim right before us."""

        def put(self, name: str, data: bytes) -> bool:
            if name.startswith("claims/"):
                claimed(self.inner, host="node-8")
            return super().put(name, data)

    waiter = Waiter(Faster(store, fail_after=100))
    waiter.clock.meanwhile = lambda now: publish(store) if now == 2.0 else None
    turn = waiter.wait()
    assert (turn.found, turn.waited_for) == ("artifact", "node-8")


def test_what_was_published_right_before_our_claim_is_found(store: Store) -> None:
    class Late(Faulty):
        """Somebody publishes and lands between our look and our claim."""

        def put(self, name: str, data: bytes) -> bool:
            if name.startswith("claims/"):
                publish(self.inner)
            return super().put(name, data)

    turn = Waiter(Late(store, fail_after=100)).wait()
    assert (turn.found, turn.flight) == ("artifact", None)
    assert newest(store) is None


def test_a_claim_that_nobody_can_read_is_waited_for_and_succeeded(store: Store) -> None:
    store.put(f"claims/k1-{'ab' * 16}/00000004.json", b"{torn")
    store.put(f"claims/k1-{'ab' * 16}/notes.txt", b"")
    waiter = Waiter(store)
    turn = waiter.wait()
    assert turn.flight is not None
    assert (waiter.clock.seconds, turn.waited_for) == (SILENT_SECONDS, "an unknown host")
    turn.flight.land()


def test_a_store_that_takes_no_claim_is_an_error(store: Store) -> None:
    with pytest.raises(StoreError, match="cannot write `claims/"):
        Waiter(Faulty(store, fail_after=2)).wait()


def test_a_flight_beats_until_it_lands(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "BEAT_SECONDS", 0.01)
    turn = Waiter(store).wait()
    assert turn.flight is not None
    assert newest(store) is not None
    seen = set()
    for _attempt in range(1000):
        seen.add(newest(store))
        if len(seen) > 2:
            break
        time.sleep(0.01)
    assert len(seen) > 2
    turn.flight.land()
    assert newest(store) is None


def test_what_is_published_on_the_way_shows_in_the_claim_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "BEAT_SECONDS", 3600.0)
    turn = Waiter(store).wait()
    assert turn.flight is not None
    before = newest(store)
    turn.flight.published()
    until(lambda: newest(store) != before)
    turn.flight.land()
    assert turn.flight.landed
    assert newest(store) is None


class Herd:
    """Machines with their own homes that start the same program on one store at the same moment."""

    def __init__(self, fleet: Fleet, size: int, *graphs: str, wait: str = "120") -> None:
        words = ("run", "--single-flight", wait, "--", *fleet.command(*graphs))
        self.processes = [fleet.machine(f"m{number}", NOISE="1").start(*words) for number in range(size)]

    def ends(self) -> list[str]:
        """What each said on stderr."""
        return [process.communicate(timeout=180)[1] for process in self.processes]


def owner_in(store: Path) -> Owner:
    """Who compiles what the store has the one claim of, once there is one."""
    found = list[Owner]()

    def look() -> bool:
        for path in store.glob("claims/*/*.json"):
            key = from_folder(path.parent.name)
            owner = None if key is None else InStore(LocalStore(store), key).owner_of(int(path.stem))
            found.extend(() if owner is None else [owner])
        return bool(found)

    until(look)
    return found[0]


@pytest.mark.slow
def test_a_herd_compiles_once(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    said = Herd(fleet, 6, "sleep=2", "f", "g").ends()
    assert sum("compiled f" in each for each in said) == 1, said
    assert sum("cachemgr: exact" in each for each in said) == 5
    assert list((tmp_path / "store").glob("claims/*/*")) == []


@pytest.mark.slow
def test_a_herd_whose_owner_is_killed_compiles_twice(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    herd = Herd(fleet, 4, "f", "sleep=4", "g")
    os.kill(owner_in(tmp_path / "store").process.pid, signal.SIGKILL)
    said = herd.ends()
    killed = [process for process in herd.processes if process.returncode == -signal.SIGKILL]
    assert len(killed) == 1
    assert sum("compiled g" in each for each in said) <= 2
    assert sum("cachemgr: exact" in each for each in said) == 2
    assert sum("compiled f" in each for each in said) <= 2
    assert list((tmp_path / "store").glob("claims/*/*")) == []


def test_where_nothing_may_be_written_it_is_off_and_says_so(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.machine("one").run(*fleet.command("f"))
    report = fleet.machine("two").run(*fleet.command("g"), options=("--single-flight", "60", "--read-only"))
    assert "cachemgr: single flight is off: publishing is off" in report["stderr"]
    (tmp_path / "store" / "claims").write_text("no directory")
    report = fleet.machine("three").run(*fleet.command("h"), CACHEMGR_SINGLE_FLIGHT="60")
    assert "cachemgr: single flight failed: cannot write `claims/" in report["stderr"]
    assert "cachemgr: single flight is off for this start" in report["stderr"]
    assert report["errors"] == {"single flight": 1}
    assert report["published"] is not None


def test_who_has_waited_long_enough_starts_cold_and_says_for_whom(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    store = LocalStore(tmp_path / "store")
    key = Key(fleet.machine("one").json("lookup", "--", *fleet.command("f"), code=1)["key"])
    InStore(store, key).take(Owner("other", "node-7", ELSEWHERE), after=0)
    report = fleet.machine("two").run(*fleet.command("f"), options=("--single-flight", "2"))
    assert "waited 2 s for node-7, and starts without what it compiles" in report["stderr"]
    assert (report["verdict"], report["published"] is not None) == ("cold", True)
    assert report["key"] == key


@pytest.mark.slow
def test_an_owner_publishes_an_entry_as_it_appears_and_the_rest_when_it_is_ready(tmp_path: Path) -> None:
    engines = Engines.install(tmp_path)
    store = LocalStore(tmp_path / "store")
    warmed_up = tmp_path / "warmed up"
    server = engines.machine("one", WARMS_UP_UNTIL=str(warmed_up), SERVE_SECONDS="60").start(
        "run", "--single-flight", "60", "--", *engines.serve()
    )

    def sections() -> list[tuple[bool, set[str]]]:
        held = [capture for key in keys(store) for capture in captures(store, key, [])]
        return [
            (each.manifest.complete, {section.domain for _layer, section in each.manifest.sections()}) for each in held
        ]

    until(sections)
    assert sections() == [(False, {"torch_compile", "modelinfos"})], "before it is ready, without what it has not made"
    (key,) = keys(store)
    assert InStore(store, key).newest() is not None, "who needs all of it waits still"
    warmed_up.touch()
    until(lambda: InStore(store, key).newest() is None)
    assert sorted(sections(), key=str)[1:] == [(True, {"torch_compile", "modelinfos", "triton"})]
    server.terminate()
    server.communicate(timeout=60)
    warm = engines.machine("two").run(*engines.serve())
    assert (warm["result"], warm["verdict"]) == ("exact", "used")
