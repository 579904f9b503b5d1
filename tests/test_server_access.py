"""Who may ask the service for what, how much it takes on, and that no request makes it fail."""

import asyncio
import base64
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cachemgr.catalogue import tokens
from cachemgr.catalogue.service import Change, note
from cachemgr.catalogue.tokens import Role, Token
from cachemgr.clock import written
from cachemgr.errors import UsageError
from cachemgr.server import upkeep
from cachemgr.server.access import ADMIN, ANY, READ, REPORT
from cachemgr.server.api.table import OPERATIONS
from cachemgr.server.limits import Bounded, Bounds
from cachemgr.server.pages import PAGES
from tests.machines import wait_for
from tests.serving import SECRETS, Replica, local_replica, question, report_of, started, store_of
from tests.test_catalogue import stocked
from tests.trees import FACTORS

ROLES: tuple[Role, ...] = ("read", "report", "admin")
ASKED = [each for each in OPERATIONS if each.name != "doctor"]
PUBLIC = {"/healthz", "/readyz", "/v1/openapi.json", "/static"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    root = tmp_path_factory.mktemp("service")
    stocked(store_of(root), root / "trees", "1", "2")
    made = local_replica(root)
    yield made
    made.backend.catalogue.close()


def routes(each: Replica) -> list[tuple[str, str]]:
    """Every method and path that the application answers."""
    app: Any = each.client.app
    return [(method, route.path) for route in app.routes for method in getattr(route, "methods", {"GET"}) - {"HEAD"}]


def test_every_route_is_public_or_has_roles(shared: Replica) -> None:
    known = {(each.method, each.path) for each in OPERATIONS}
    known |= {("GET", each.path) for each in PAGES} | {("GET", "/metrics")}
    assert {route for route in routes(shared) if route[1] not in PUBLIC} == known
    assert {each.roles for each in OPERATIONS} <= {READ, REPORT, ANY, ADMIN}
    assert not [each.name for each in OPERATIONS if each.changes and "read" in each.roles]
    assert all(each.summary.endswith(".") for each in OPERATIONS)
    asked = {kind for each in OPERATIONS for kind in (each.query, each.body)}
    assert {kind.__name__ for kind in asked if not kind.__struct_config__.forbid_unknown_fields} == set()


@pytest.mark.parametrize("role", [None, *ROLES])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.name)
def test_each_role_may_what_the_table_says(shared: Replica, operation: Any, role: Role | None) -> None:
    path = re.sub(r"\{\w+\}", "none", operation.path)
    headers = {} if role is None else {"Authorization": f"Bearer {SECRETS[role]}"}
    # A body of another type, so that whoever is let in is turned away behind the door.
    headers["Content-Type"] = "text/plain"
    status = shared.client.request(operation.method, path, headers=headers, content=b"x").status_code
    assert status == (401 if role is None else 415 if role in operation.roles else 403)


@pytest.mark.parametrize("role", [None, *ROLES])
@pytest.mark.parametrize("path", ["/metrics", *(re.sub(r"\{\w+\}", "none", each.path) for each in PAGES)])
def test_pages_and_metrics_are_for_readers(shared: Replica, path: str, role: Role | None) -> None:
    headers = {} if role is None else {"Authorization": f"Bearer {SECRETS[role]}"}
    status = shared.client.get(path, headers=headers).status_code
    assert status in ({401} if role is None else {403} if role == "report" else {200, 404})


def test_a_browser_may_give_the_token_as_its_password_to_pages_only(shared: Replica) -> None:
    given = {"Authorization": "Basic " + base64.b64encode(f"me:{SECRETS['read']}".encode()).decode()}
    assert shared.client.get("/", headers=given).status_code == 200
    assert shared.client.get("/v1/artifacts", headers=given).status_code == 401
    assert "Basic" in shared.client.get("/").headers["WWW-Authenticate"]


@pytest.mark.parametrize(
    "header",
    ["Bearer", "Bearer ", "Bearer nonsense", "Basic !!", "Digest x", f"Bearer {SECRETS['admin'][:-1]}", "Bearer \xe9"],
)
def test_what_is_no_token_opens_nothing(shared: Replica, header: str) -> None:
    given = {b"Authorization": header.encode("latin-1")}
    assert shared.client.get("/v1/artifacts", headers=given).status_code == 401


def test_without_a_token_the_loopback_may_read_under_its_own_name(tmp_path: Path) -> None:
    one = local_replica(tmp_path, open_to_loopback=True)
    assert one.get("/v1/artifacts", role=None)["artifacts"] == []
    one.ask("POST", "/v1/launches", role=None, json=report_of(started("one")), code=403)
    rebound = one.client.get("/v1/artifacts", headers={"Host": "rebound.example"})
    assert rebound.status_code == 401, "a name of somebody else that leads here"
    for header in ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via"):
        assert one.client.get("/", headers={header: "198.51.100.7"}).status_code == 401, "a proxy asks for somebody"


def test_revoked_and_expired_tokens_open_nothing(tmp_path: Path) -> None:
    one = local_replica(tmp_path)
    old = tokens.secret_of(b"o" * 32)
    tokens.create(one.backend.catalogue, Token("old", "read", "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"), old)
    tokens.revoke(one.backend.catalogue, "report", "2026-01-01T00:00:00Z")
    one = local_replica(tmp_path)
    assert one.client.get("/v1/artifacts", headers={"Authorization": f"Bearer {old}"}).status_code == 401
    one.ask("POST", "/v1/lookup", role="report", json=question(FACTORS), code=401)
    kept = (tmp_path / "catalogue.db").read_bytes() + (tmp_path / "catalogue.db-wal").read_bytes()
    assert not [secret for secret in (*SECRETS.values(), old) if secret.encode() in kept]


def test_a_server_that_changes_nothing_refuses_every_change(tmp_path: Path) -> None:
    one = local_replica(tmp_path, read_only=True)
    for operation in OPERATIONS:
        if operation.changes:
            path = re.sub(r"\{\w+\}", "none", operation.path)
            assert one.ask(operation.method, path, code=403)["detail"] == "this server changes nothing"


def test_answers_allow_browsers_nothing(shared: Replica) -> None:
    for path in ("/", "/v1/artifacts", "/nowhere", "/static/page.css"):
        headers = shared.client.get(path, headers={"Origin": "https://elsewhere.example"}).headers
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'self'")
        assert "script-src" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers


def test_no_answer_sends_a_client_elsewhere(shared: Replica) -> None:
    for path in ("/v1/artifacts/", "/launches/", "/metrics/", "/static"):
        answer = shared.client.get(path, headers={"Host": "elsewhere.example"}, follow_redirects=False)
        assert (answer.status_code, answer.headers["Content-Type"]) == (404, "application/problem+json")


@pytest.mark.parametrize(
    ("method", "path", "more", "code"),
    [
        ("GET", "/v1/artifacts?limit=0", {}, 400),
        ("GET", "/v1/artifacts?nothing=1", {}, 400),
        ("GET", "/v1/artifacts?after=x", {}, 400),
        ("GET", "/v1/artifacts?model=%00", {}, 400),
        ("GET", "/v1/launches?since=monday", {}, 400),
        ("GET", "/v1/launches/%00", {}, 404),
        ("GET", "/v1/why?key=k1:1", {}, 400),
        ("GET", "/v1/prune?max_size=-1", {}, 400),
        ("GET", "/v1/artifacts/k1:ffff", {}, 404),
        ("POST", "/v1/prune", {"json": {"plan": "another"}}, 409),
        ("POST", "/v1/prune", {"content": b"{"}, 400),
        ("POST", "/v1/prune", {"content": b"a=b", "headers": {"Content-Type": "text/plain"}}, 415),
        ("POST", "/v1/prune", {"content": b"{}", "headers": {"Content-Length": "9" * 5000}}, 413),
        ("POST", "/v1/launches", {"json": {"launches": []}}, 400),
        ("POST", "/v1/lookup", {"json": {"factors": []}}, 400),
        ("GET", "/v1/claims/k1:1", {}, 400),
        ("PUT", f"/v1/claims/k1:{'a' * 32}/none?launch=x", {}, 404),
        ("PUT", f"/v1/claims/k1:{'a' * 32}/{'9' * 4301}?launch=x", {}, 404),
        ("PUT", f"/v1/claims/k1:{'a' * 32}/0?launch=x", {}, 400),
        ("GET", "/nowhere", {}, 404),
        ("PATCH", "/v1/artifacts", {}, 405),
    ],
)
def test_every_refusal_says_what_to_do_and_has_a_name(
    shared: Replica, method: str, path: str, more: dict[str, Any], code: int
) -> None:
    headers = {"Authorization": f"Bearer {SECRETS['admin']}", "X-Request-Id": "theirs", **more.pop("headers", {})}
    answers = [shared.client.request(method, path, headers=headers, **more) for _time in range(2)]
    for answer in answers:
        told = answer.json()
        assert (answer.status_code, told["status"]) == (code, code), answer.text
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert told["detail"]
        assert told["hint"]
    named = {answer.headers["X-Request-Id"] for answer in answers}
    assert len(named) == 2
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in named)


def test_a_path_with_anything_in_it_is_one_line_of_the_audit(tmp_path: Path) -> None:
    one = local_replica(tmp_path)
    one.ask("DELETE", "/v1/artifacts/k1%00%0a%3fplan?plan=x", code=404)
    (change,) = one.get("/v1/audit")["changes"]
    assert change["about"] == "/v1/artifacts/k1\ufffd\ufffd?plan"
    assert [line.count("\n") for line in one.lines] == [0]


def test_the_audit_is_bounded_by_age_and_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = local_replica(tmp_path)

    def told() -> list[str]:
        one.upkeep._rounds = 0
        one.upkeep.once()
        return [each["about"] for each in one.get("/v1/audit")["changes"]]

    times = [one.backend.now - age * 86400 for age in (400, 366, 364, 2, 1)]
    for number, time in enumerate(times):
        note(one.backend.catalogue, Change(written(time), "ann", "10.0.0.1", "prune", f"/{number}", "200"))
    assert told() == ["/4", "/3", "/2"], "a year"
    monkeypatch.setattr(upkeep, "MOST_AUDITED", 2)
    assert told() == ["/4", "/3"]
    assert told() == ["/4", "/3"]


def test_a_bug_tells_nothing_and_leaves_its_line_in_the_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = local_replica(tmp_path)

    def broken(*_arguments: object, **_more: object) -> None:
        raise ZeroDivisionError("of our own making")

    monkeypatch.setattr("cachemgr.server.api.operating.planned", broken)
    headers = {"Authorization": f"Bearer {SECRETS['admin']}"}
    answer = one.client.post("/v1/prune", headers=headers, json={"plan": "x"})
    assert (answer.status_code, answer.json()["title"]) == (500, "A bug")
    assert "making" not in answer.text
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    (said,) = [line for line in one.lines if line.startswith("error: ")]
    assert f"request {answer.headers['X-Request-Id']}: POST '/v1/prune' failed" in said
    (change,) = one.get("/v1/audit")["changes"]
    assert (change["what"], change["outcome"]) == ("prune", "500")


def test_a_change_that_takes_longer_than_its_request_is_in_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = local_replica(tmp_path, bounds=Bounds(seconds=0.5, threads=2))
    go_on, before = threading.Event(), set(threading.enumerate())

    def slow(*_arguments: object, **_more: object) -> None:
        go_on.wait(60)
        raise UsageError("it came to an end")

    monkeypatch.setattr("cachemgr.server.api.operating.planned", slow)
    headers = {"Authorization": f"Bearer {SECRETS['admin']}"}
    with one.client:
        statuses = [one.client.post("/v1/prune", headers=headers, json={"plan": "x"}).status_code for _ in range(3)]
        working = [each for each in set(threading.enumerate()) - before if each.name.startswith("cachemgr-request")]
        go_on.set()
        assert statuses == [503] * 3
        assert len(working) == 2, "threads that nobody waits for any more count still"
        wait_for(lambda: sum('"outcome":"400"' in line for line in one.lines) == 2)


def test_a_body_has_an_end(tmp_path: Path) -> None:
    one = local_replica(tmp_path, bounds=Bounds(body_bytes=1000))
    one.ask("POST", "/v1/lookup", content=b" " * 1001, code=413)

    def pieces() -> Iterator[bytes]:
        yield from (b" " * 100 for _piece in range(20))

    one.ask("POST", "/v1/lookup", content=pieces(), code=413)


def test_a_request_has_its_time_and_there_is_an_end_to_many() -> None:
    """Whoever waits too long is told, and so is whoever comes when enough are being answered."""
    told: list[int] = []
    let_go = threading.Event()

    async def slow(_scope: Any, _receive: Any, _send: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(None, let_go.wait)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            told.append(message["status"])

    async def both() -> None:
        app = Bounded(slow, Bounds(seconds=0.2, requests=1))
        scope = {"type": "http", "path": "/v1/artifacts", "method": "GET", "headers": []}
        first = asyncio.create_task(app(scope, None, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await app(scope, None, send)  # type: ignore[arg-type]
        assert told == [503], "the second is not kept waiting"
        await first
        let_go.set()

    asyncio.run(both())
    assert told == [503, 503]


def test_a_database_that_fails_is_told_as_such(tmp_path: Path) -> None:
    one = local_replica(tmp_path)
    assert one.client.get("/readyz").status_code == 200
    one.backend.catalogue.close()
    (tmp_path / "catalogue.db").write_bytes(b"not a database" * 1000)
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"catalogue.db{suffix}").unlink(missing_ok=True)
    ready = one.client.get("/readyz")
    assert ready.status_code == 503
    assert str(tmp_path) not in ready.text, "whoever may ask"
    assert one.client.get("/healthz").status_code == 200
    problem = one.get("/v1/stats", code=503)
    assert (problem["exit_code"], problem["status"]) == (13, 503)


@pytest.fixture(scope="module")
def schema(shared: Replica) -> Any:
    return schemathesis.openapi.from_asgi("/v1/openapi.json", shared.client.app)


@pytest.mark.parametrize(
    "operation", [each for each in OPERATIONS if each.name != "doctor"], ids=lambda each: each.name
)
def test_no_request_makes_it_fail(schema: Any, operation: Any) -> None:
    """The doctor takes nothing from a request, and seconds for each."""

    @given(case=schema[operation.path][operation.method].as_strategy())
    @settings(max_examples=8, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        answer = case.call(headers={"Authorization": f"Bearer {SECRETS['admin']}"})
        assert answer.status_code < 500, answer.text
        conformance = [response_schema_conformance, status_code_conformance, content_type_conformance]
        case.validate_response(answer, checks=conformance)

    ask()
