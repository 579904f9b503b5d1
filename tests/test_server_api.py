"""The API on SQLite with a directory and on PostgreSQL with a bucket: two replicas at once, which say the same."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from cachemgr.capture import Launch
from cachemgr.errors import StoreError
from cachemgr.key import Difference, Key, derive
from cachemgr.process import this_process
from cachemgr.server.reports import MOST, Reports
from cachemgr.store import Store, layout, records
from cachemgr.store.claims import InStore
from cachemgr.store.local import LocalStore
from cachemgr.store.s3.store import S3Store
from tests.databases import made
from tests.machines import wait_for
from tests.s3_server import S3Server
from tests.serving import SECRETS, Replica, let_in, local_replica, question, replica, report_of, started
from tests.stores import Faulty
from tests.test_catalogue import stocked
from tests.trees import FACTORS, changed


@dataclass
class Service:
    """Two replicas of one service, and its store with two artifacts."""

    one: Replica
    other: Replica
    store: Store
    first: Key
    second: Key


@pytest.fixture(params=["sqlite+directory", "postgresql+bucket"])
def service(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    settings = {"CACHEMGR_STORE": str(tmp_path / "store")}
    if request.param == "sqlite+directory":
        settings["CACHEMGR_DATABASE_URL"] = f"sqlite:///{tmp_path}/catalogue.db"
        store: Store = LocalStore(tmp_path / "store")
    else:
        settings["CACHEMGR_DATABASE_URL"] = made(request.getfixturevalue("postgres"))
        server: S3Server = request.getfixturevalue("s3")
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        bucket = server.fresh()
        store = S3Store(bucket, tmp_path / "scratch")
        settings["CACHEMGR_MIRROR"] = f"s3://{bucket.name}/{bucket.prefix}"
        settings["CACHEMGR_MIRROR_ENDPOINT"] = server.endpoint
        settings["CACHEMGR_MIRROR_REGION"] = "us-east-1"
    first, second = stocked(store, tmp_path / "trees", "4096", "8192")
    one = replica(tmp_path / "one", settings)
    let_in(one.backend)
    other = replica(tmp_path / "other", settings)
    yield Service(one, other, store, first, second)
    for each in (one, other):
        each.backend.catalogue.close()


def test_artifacts_are_listed_in_pages_filtered_and_shown(service: Service) -> None:
    for each in (service.one, service.other):
        listed = each.get("/v1/artifacts")
        assert [one["key"] for one in listed["artifacts"]] == [service.second, service.first]
        assert listed["after"] is None
    page = service.one.get("/v1/artifacts?limit=1")
    (rest,) = service.other.get("/v1/artifacts", params={"limit": 1, "after": page["after"]})["artifacts"]
    assert (page["artifacts"][0]["key"], rest["key"]) == (service.second, service.first)
    assert service.one.get("/v1/artifacts?model=ll*&complete=true")["artifacts"]
    assert not service.one.get("/v1/artifacts?engine_version=0.1*")["artifacts"]
    shown = service.one.get(f"/v1/artifacts/{service.first[:14]}")
    assert shown["artifact"]["key"] == service.first
    names = {factor["name"] for factor in shown["captures"][0]["manifest"]["factors"]}
    assert "vllm.max_model_len" in names
    problem = service.one.get("/v1/artifacts/k1:ffff", code=404)
    assert problem["detail"].startswith("no artifact `k1:ffff` in ")
    assert (problem["hint"], problem["exit_code"]) == ("cachemgr ls", 10)


def test_a_reported_launch_is_in_the_store_and_everywhere(service: Service) -> None:
    launch = started("one", artifact=service.first, result="exact", verdict="used", phases={"init_engine": 12.0})
    assert service.one.ask("POST", "/v1/launches", role="report", json=report_of(launch))["taken"] == 1
    assert [each.launch for each in records.launches(service.store)] == ["one"]
    for each in (service.one, service.other):
        (listed,) = each.get("/v1/launches")["launches"]
        assert msgspec.structs.replace(msgspec.convert(listed, type(launch)), factors=()) == launch
        total = each.get("/v1/stats?by=gpu")["total"]
        assert (total["starts"], total["hit_rate"], total["saved_seconds"]) == (1, 1.0, 45.0 - 12.25)
    again = msgspec.structs.replace(launch, verdict="inert", exit_code=0)
    service.other.ask("POST", "/v1/launches", json=report_of(launch, again))
    service.one.upkeep.once()
    assert service.one.get("/v1/stats")["total"]["starts"] == 1, "a launch counts once"
    assert service.one.get("/v1/launches/on")["launch"]["launch"] == "one"
    assert service.one.get("/v1/launches?verdict=cold")["launches"] == []


def test_what_the_store_gets_from_elsewhere_is_taken_in(service: Service) -> None:
    records.record(service.store, started("direct"))
    service.other.upkeep.once()
    service.one.upkeep.once()
    for each in (service.one, service.other):
        assert [one["launch"] for one in each.get("/v1/launches")["launches"]] == ["direct"]


def test_look_ups_say_what_a_start_would_find(service: Service) -> None:
    exact = service.one.ask("POST", "/v1/lookup", role="report", json=question(changed("vllm.max_model_len", "4096")))
    assert (exact["result"], exact["artifact"], exact["differs"]) == ("exact", service.first, [])
    near = service.other.ask("POST", "/v1/lookup", json=question(changed("vllm.max_model_len", "1")))
    assert near["result"] == "near"
    assert near["key"] == derive(changed("vllm.max_model_len", "1"))
    assert [each["factor"] for each in near["differs"]] == ["vllm.max_model_len"]
    guard = next(factor for factor in FACTORS if factor.role == "guard")
    none = service.one.ask("POST", "/v1/lookup", json=question(changed(guard.name, "another")))
    assert (none["result"], none["where"], none["differs"][0]["factor"]) == ("none", None, guard.name)
    why = service.one.ask("POST", "/v1/why", json=question(changed("vllm.max_model_len", "1")))["why"]
    assert (why["word"], why["differs"][0]["factor"]) == ("differs", "vllm.max_model_len")


def test_why_a_launch_missed(service: Service) -> None:
    factors = changed("vllm.max_model_len", "1")
    launch = started("cold", artifact=service.first, factors=factors, result="near", host="node-7", key=derive(factors))
    service.one.ask("POST", "/v1/launches", json=report_of(launch))
    for query in ("launch=cold", f"key={launch.key}", "host=node-7"):
        why = service.other.get(f"/v1/why?{query}")["why"]
        assert (why["launch"], why["differs"][0]["factor"]) == ("cold", "vllm.max_model_len")
    service.one.get("/v1/why?host=nobody", code=404)


def test_pins_and_removal_are_seen_by_the_other_replica(service: Service) -> None:
    path = f"/v1/artifacts/{service.first}"
    pinned = service.one.ask("PUT", f"{path}/pin", json={"reason": "release", "keep_days": 7})
    assert pinned["pin"]["by"] == "admin by the service"
    assert service.other.get(path)["pin"]["reason"] == "release"
    kept = service.other.get(f"{path}/removal", code=409)
    assert (kept["exit_code"], "release" in kept["detail"]) == (11, True)
    service.other.ask("DELETE", path, params={"plan": "0" * 32}, code=409)
    service.other.ask("DELETE", f"{path}/pin")
    service.other.ask("DELETE", f"{path}/pin", code=404)
    plan = service.one.get(f"{path}/removal")
    assert service.other.get(f"{path}/removal")["name"] == plan["name"]
    service.one.ask("DELETE", path, params={"plan": "0" * 32}, code=409)
    assert service.one.ask("DELETE", path, params={"plan": plan["name"]})["done"]
    service.other.get(path, code=404)
    changes = [(each["what"], each["who"], each["outcome"]) for each in service.other.get("/v1/audit")["changes"]]
    assert changes == [
        ("remove_artifact", "admin", "200"),
        ("remove_artifact", "admin", "409"),
        ("unpin_artifact", "admin", "404"),
        ("unpin_artifact", "admin", "200"),
        ("remove_artifact", "admin", "409"),
        ("pin_artifact", "admin", "200"),
    ]
    assert sum("remove_artifact" in line for line in service.one.lines) == 2


def test_a_prune_is_a_plan_and_its_deed(service: Service) -> None:
    plan = service.one.get("/v1/prune?keep_last=1")
    assert [each["key"] for each in plan["plan"]["artifacts"]] == [service.first]
    assert service.one.get("/v1/artifacts")["artifacts"][1]["key"] == service.first, "nothing has gone"
    service.other.ask("POST", "/v1/prune", json={"keep_last": 2, "plan": plan["name"]}, code=409)
    done = service.other.ask("POST", "/v1/prune", json={"keep_last": 1, "plan": plan["name"]})
    assert done["done"]
    service.one.get(f"/v1/artifacts/{service.first}", code=404)


def test_one_node_of_many_gets_a_claim(service: Service) -> None:
    owner = {"launch": "a", "host": "node-1", "process": msgspec.to_builtins(this_process())}
    path = f"/v1/claims/{service.first}"
    assert service.one.get(path)["number"] is None
    taken = service.one.ask("POST", path, role="report", json={"owner": owner})
    assert taken["number"] == 1
    service.one.ask("POST", path, role="report", json={"owner": {**owner, "host": "x" * 5000}}, code=400)
    other = {**owner, "launch": "b"}
    assert service.other.ask("POST", path, role="report", json={"owner": other})["number"] is None
    assert service.other.get(path)["owner"]["launch"] == "a"
    assert service.one.ask("PUT", f"{path}/1?launch=a", role="report")["held"]
    service.one.ask("DELETE", f"{path}/1?launch=b", role="report", code=409)
    assert service.other.ask("POST", path, role="report", json={"owner": other, "after": 1})["number"] == 2
    service.other.ask("DELETE", f"{path}/2?launch=b", role="report")
    assert InStore(service.store, service.first).newest() is None


def test_replicas_tell_prometheus_the_same(service: Service) -> None:
    phases = {"init_engine": 12.0, "publish": 2.0}
    warm = {"artifact": service.first, "result": "exact", "verdict": "used", "phases": phases}
    moved = {"pulled_bytes": 700, "published_bytes": 40, "pushed_bytes": None}
    service.one.ask("POST", "/v1/launches", json=report_of(started("one", **warm, **moved, gpus=8)))
    told = [_fleet(each) for each in (service.one, service.other)]
    assert told[0] == told[1]
    labels = 'engine_version="0.32.0",gpu="NVIDIA H200"'
    assert f'cachemgr_launches_total{{{labels},result="exact",verdict="used"}} 1.0' in told[0]
    assert f"cachemgr_saved_seconds{{{labels}}} 32.75" in told[0]
    assert f"cachemgr_saved_gpu_seconds{{{labels}}} {32.75 * 8}" in told[0]
    for way, size in (("pulled", 700.0), ("published", 40.0), ("pushed", 0.0)):
        assert f'cachemgr_moved_bytes_total{{{labels},way="{way}"}} {size}' in told[0]
    assert f'cachemgr_restore_seconds_bucket{{{labels},le="0.25"}} 1.0' in told[0]
    assert 'cachemgr_store_objects{kind="artifacts"} 2.0' in told[0]


def _fleet(each: Replica) -> list[str]:
    each.upkeep.once()
    text = each.client.get("/metrics", headers={"Authorization": f"Bearer {SECRETS['admin']}"}).text
    return [line for line in text.splitlines() if not line.startswith(("#", "cachemgr_request"))]


def test_a_report_that_the_store_does_not_take_is_not_acknowledged(service: Service) -> None:
    backend = service.one.backend
    broken = Reports(Faulty(service.store, fail_after=0), backend.catalogue, backend.source)
    with pytest.raises(StoreError):
        broken.keep([started("lost")])
    backend.catalogue.close()
    assert service.other.get("/v1/launches")["launches"] == []


def test_reports_that_fail_together_all_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it was: none of those who waited takes the failure of another one for success."""
    backend = local_replica(tmp_path).backend
    entered, go_on = threading.Event(), threading.Event()

    def broken(_store: object, launches: Sequence[Launch]) -> list[str]:
        if launches[0].launch == "first":
            entered.set()
            go_on.wait(60)
            return []
        raise MemoryError

    monkeypatch.setattr("cachemgr.server.reports.record_all", broken)
    one = Reports(backend.store, backend.catalogue, backend.source)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(one.keep, [started("first")])
        assert entered.wait(60)
        others = [pool.submit(one.keep, [started(f"other-{number}")]) for number in range(3)]
        wait_for(lambda: len(one._waiting) == 3)
        go_on.set()
        assert first.exception() is None
        assert [type(each.exception()) for each in others] == [MemoryError] * 3


def test_reports_that_come_together_are_read_again_however_large(tmp_path: Path) -> None:
    backend = local_replica(tmp_path).backend
    one = Reports(backend.store, backend.catalogue, backend.source)
    with one._writing, ThreadPoolExecutor(10) as pool:
        large = [started(f"l{number}", reasons=("x" * (7 << 20),)) for number in range(10)]
        done = [pool.submit(one.keep, [launch]) for launch in large]
        wait_for(lambda: len(one._waiting) == 10)
        one._writing.release()
        assert [each.exception() for each in done] == [None] * 10
        one._writing.acquire()
    assert {launch.launch for launch in records.launches(backend.store)} == {launch.launch for launch in large}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"launch": "../etc"}, "its name"),
        ({"key": "k1:short"}, "its key"),
        ({"started": "yesterday"}, "`started` must be"),
        ({"started": "9999-01-02T03:04:05Z"}, "has not come"),
        ({"restored_bytes": -1}, "`restored_bytes` is negative"),
        ({"phases": {"run": 1e12}}, "a duration"),
        ({"restored_bytes": 1 << 53}, "`restored_bytes`"),
        ({"pulled_bytes": -1}, "`pulled_bytes`"),
        ({"pushed_bytes": 1 << 53}, "`pushed_bytes`"),
        ({"gpus": -1}, "GPUs"),
        ({"gpus": 1 << 31}, "GPUs"),
        ({"added": {"triton": 400_000, "inductor": 400_000}}, "a number of files"),
        ({"errors": {"mirror": 1 << 31}}, "a count"),
        ({"model": "a\0b"}, "cannot be printed"),
        ({"phases": {"\x1b[2J": 1.0}}, "cannot be printed"),
        ({"differs": (Difference("a\0b", "1", "2", "match"),)}, "cannot be printed"),
        ({"published": "sha256:"}, "no digest"),
        ({"phases": {f"p{number}": 1.0 for number in range(1001)}}, "more than 1000"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    one = local_replica(tmp_path)
    problem = one.ask("POST", "/v1/launches", json=report_of(started("one", **changes)), code=400)
    assert said in problem["detail"]
    assert list(one.backend.store.scan(layout.LAUNCHES)) == []


def test_a_report_has_an_end(tmp_path: Path) -> None:
    one = local_replica(tmp_path)
    many = report_of(*(started(f"l{number}") for number in range(MOST + 1)))
    one.ask("POST", "/v1/launches", json=many, code=400)
    one.ask("POST", "/v1/launches", json={"launches": []}, code=400)
