"""What a server is asked: kinds, shapes and models of requests, and what refusals become. The server is scripted."""

import base64
import json
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from cachemgr.prewarm.exercise import BATCHES, SAMPLING, Client, Step, dead, exercise, png, refusals
from cachemgr.prewarm.starting import Server

Answer = tuple[int, dict[str, Any]]
Script = Callable[[str, dict[str, Any]], Answer]
"""What is answered to a path and a body."""
BASE = {"id": "base", "max_model_len": 256}


class Scripted:
    """A server that answers by a script, and remembers what it was asked."""

    def __init__(self, port: int) -> None:
        self.server = Server(port, key="sk-1")
        self.client = Client(self.server, lambda: 30.0)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: set[str | None] = set()

    def of(self, model: str, path: str = "/v1/completions") -> list[dict[str, Any]]:
        return [body for where, body in self.asked if where == path and body.get("model") == model]


@contextmanager
def serving(script: Script, *models: dict[str, Any]) -> Iterator[Scripted]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = script(self.path, {}) if self.path != "/v1/models" else (200, {"data": list(models)})
            self.answer(status, body)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made.asked.append((self.path, body))
            made.keys.add(self.headers["Authorization"])
            self.answer(*script(self.path, body))

        def answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that it has
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made = Scripted(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


def all_well(_path: str, _body: dict[str, Any]) -> Answer:
    return 200, {}


def test_a_model_is_asked_in_every_way_within_its_length() -> None:
    with serving(all_well, BASE) as server:
        steps = exercise(server.client)
    assert server.keys == {"Bearer sk-1"}
    asked = server.of("base")
    assert [len(body["prompt"]) for body in asked[: len(BATCHES)]] == list(BATCHES)
    for body in asked[: len(BATCHES)]:
        assert len({prompt[0] for prompt in body["prompt"]}) == min(len(body["prompt"]), 16), "no prefix is shared"
    assert max(len(prompt) for body in asked for prompt in body["prompt"]) == 224, "as long as the model takes"
    assert all(len(prompt) + body["max_tokens"] <= 256 for body in asked for prompt in body["prompt"])
    options = [{name: body.get(name) for name in chosen} for chosen in SAMPLING.values() for body in asked]
    assert all(chosen in options for chosen in SAMPLING.values())
    assert [body["response_format"]["type"] for body in asked if "response_format" in body] == ["json_schema"]
    kinds = list(dict.fromkeys(step.kind for step in steps))
    assert kinds == ["batches", "a long prompt", "samplers", "structured output", "a chat", "a picture"]
    assert refusals(steps) == ()


def test_a_picture_is_one() -> None:
    with serving(all_well, BASE) as server:
        exercise(server.client)
    content = server.of("base", "/v1/chat/completions")[-1]["messages"][0]["content"]
    assert [part["type"] for part in content] == ["text", "image_url"]
    head, _comma, data = content[1]["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    picture = base64.b64decode(data)
    assert picture == png(64, 64)
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    at = picture.index(b"IDAT")
    size = int.from_bytes(picture[at - 4 : at], "big")
    assert len(zlib.decompress(picture[at + 4 : at + 4 + size])) == 64 * (1 + 3 * 64)


def test_adapters_are_asked_too_within_the_length_of_their_model() -> None:
    """vLLM lists an adapter as a model without a length (0.32 `entrypoints/openai/models/serving.py`)."""
    adapter = {"id": "ad", "parent": "base", "max_model_len": None}
    with serving(all_well, {**BASE, "max_model_len": 32}, adapter) as server:
        steps = exercise(server.client)
    asked = server.of("ad")
    assert [len(body["prompt"]) for body in asked[: len(BATCHES)]] == list(BATCHES)
    assert {len(prompt) + body["max_tokens"] for body in asked for prompt in body["prompt"]} == {16}
    kinds = {step.kind for step in steps if "adapter" in step.kind}
    assert kinds == {"batches, adapter ad", "samplers, adapter ad"}


def test_a_server_with_adapters_is_not_asked_what_its_engine_dies_of() -> None:
    with serving(all_well, BASE, {"id": "ad", "parent": "base"}) as server:
        exercise(server.client)
        plain = len(server.asked)
        exercise(Client(msgspec.structs.replace(server.server, adapters=True), lambda: 30.0))
    asked = server.asked[plain:]
    assert len(asked) == plain - 2, "one less of the model, one less of its adapter"
    assert not any("prompt_logprobs" in body for _path, body in asked)


def test_nothing_more_is_asked_of_an_engine_that_died() -> None:
    died: list[str] = []

    def dies(path: str, body: dict[str, Any]) -> Answer:
        if "logit_bias" in body:
            died.append("of bias")
        return (503, {}) if died and path == "/health" else (500, {"message": "dead"}) if died else (200, {})

    with serving(dies, BASE) as server:
        steps = exercise(server.client)
        assert dead(server.client)
    assert (steps[-1].name, steps[-1].status) == ("bias and minimum length", 500)
    assert all(step.answered for step in steps[:-1])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_a_model_that_pools_is_asked_for_that(path: str) -> None:
    def pools(where: str, _body: dict[str, Any]) -> Answer:
        return (200, {}) if where == path else (404, {"message": "not here"})

    with serving(pools, BASE) as server:
        steps = exercise(server.client)
    assert [len(body["input"]) for body in server.of("base", path)] == list(BATCHES)
    assert [step.answered for step in steps] == [False, *[True] * len(BATCHES)]
    assert refusals(steps) == ("batches (404 not here)",)


def test_a_refusal_is_told_for_its_kind_with_what_the_server_said() -> None:
    def picky(path: str, body: dict[str, Any]) -> Answer:
        if path.endswith("/chat/completions"):
            return 400, {"error": {"message": "no template"}}
        if "response_format" in body:
            return 500, {"error": {"message": "cannot spell JSON"}}
        return (422, {"message": "at most 8"}) if len(body.get("prompt", ())) > 8 else (200, {})

    with serving(picky, BASE) as server:
        steps = exercise(server.client)
    assert refusals(steps) == (
        "batches (3 of 8, first a batch of 16: 422 at most 8)",
        "structured output (500 cannot spell JSON)",
        "a chat (400 no template)",
        "a picture (400 no template)",
    )


@pytest.mark.parametrize(("status", "said"), [(200, ""), (503, "503 engine dead"), (500, "500 engine dead")])
def test_a_server_says_whether_its_engine_lives(status: int, said: str) -> None:
    with serving(lambda _path, _body: (status, {"message": "engine dead"}), BASE) as server:
        assert dead(server.client) == said
    assert dead(server.client).startswith("no answer")


def test_a_server_that_lists_nothing_was_asked_nothing() -> None:
    with serving(all_well) as server:
        assert exercise(server.client) == ()
    (step,) = exercise(server.client)
    assert (step.kind, step.answered, step.status) == ("models", False, 0)
    assert refusals([step])[0].startswith("models (no answer")


def test_one_of_its_kind_is_not_counted() -> None:
    assert refusals([Step("a chat", "a chat", 0)]) == ("a chat (no answer)",)
