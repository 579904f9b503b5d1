"""Asking a server what its users will ask, so that what is compiled at first use is compiled now.

A start compiles its graphs; kernels of samplers, of structured output, of adapters and of encoders come with the first
request that needs them. The weights may mean nothing, so nothing is expected of the answers but that they come. What a
server refuses is told, kind by kind, and is no fault of the start: what it does not offer it refuses with a status
below 500, and a tokenizer that cannot spell JSON, or weights that mean nothing, make it fail at what it offers. An
engine that died of a question is a fault.
"""

import base64
import http.client
import json
import ssl
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

import msgspec

from cachemgr.clock import Clock
from cachemgr.prewarm.starting import Server

BATCHES = (1, 2, 3, 4, 8, 16, 32, 64)
"""Requests that are sent together. Kernels are specialised by 1, by multiples of 16 and by the rest."""
_TOKENS = 16
"""How long an answer is."""
_LONG = 600
"""Tokens of a long prompt, where the model takes so many: several blocks of a cache, another shape of attention."""
_FIRST_TOKEN = 5
_POLL_SECONDS = 0.25
_MOST_BYTES = 8 << 20
_SEED = 7
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "top-p, top-k, min-p": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": _SEED},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2, "seed": _SEED},
    "log probabilities": {"temperature": 0, "logprobs": 2},
    "bias and minimum length": {"logit_bias": {str(_FIRST_TOKEN): 1.0}, "min_tokens": 2, "seed": _SEED},
    "two answers": {"n": 2, "temperature": 0.8, "seed": _SEED},
    "log probabilities of a prompt": {"temperature": 0, "prompt_logprobs": 1},
}
"""Options that samplers have kernels of their own for (vLLM 0.26-0.33 `entrypoints/openai/completion/protocol.py`)."""
_NOT_WITH_ADAPTERS = "log probabilities of a prompt"
"""The adapters of an engine know the tokens that are sampled, and not those of the prompt: it dies of the question on a
CPU, and reads past what it knows elsewhere (vLLM 0.32 `lora/punica_wrapper`, add_lora_logits)."""


class Step(msgspec.Struct, frozen=True):
    """One thing that was asked."""

    kind: str
    """What people know it by: `batches`, `a chat`, …"""
    name: str
    status: int
    """Of HTTP; 0 where no answer came."""
    said: str = ""
    """Why it was refused, in the server's words."""

    @property
    def answered(self) -> bool:
        return self.status == 200


def refusals(steps: Sequence[Step]) -> tuple[str, ...]:
    """For each kind of question of which one was refused: which kind, how many of it, and what was said first."""
    kinds: dict[str, list[Step]] = {}
    for step in steps:
        kinds.setdefault(step.kind, []).append(step)
    return tuple(
        f"{kind} ({_some(refused, asked)}{refused[0].status or 'no answer'}{_colon(refused[0].said)})"
        for kind, asked in kinds.items()
        if (refused := [step for step in asked if not step.answered])
    )


def _some(refused: Sequence[Step], asked: Sequence[Step]) -> str:
    return "" if len(asked) == 1 else f"{len(refused)} of {len(asked)}, first {refused[0].name}: "


def _colon(said: str) -> str:
    return f" {said}" if said else ""


class _Answer(msgspec.Struct, frozen=True):
    status: int
    body: bytes

    def json(self) -> Mapping[str, Any]:
        with suppress(ValueError):
            found = json.loads(self.body)
            if isinstance(found, dict):
                return found
        return {}

    @property
    def said(self) -> str:
        """What a refusal says, short."""
        error = self.json().get("error")
        message = error.get("message") if isinstance(error, dict) else self.json().get("message")
        return str(message or self.body[:200].decode("utf-8", "replace"))[:200]


class Client:
    """Asks one server. `left` says how many seconds there are, for everything."""

    def __init__(self, server: Server, left: Callable[[], float]) -> None:
        self._server, self._left = server, left

    @property
    def adapters(self) -> bool:
        """Whether the server takes adapters."""
        return self._server.adapters

    def ask(self, path: str, body: Mapping[str, object] | None = None) -> _Answer:
        """One request; status 0 where no answer came. Never raises."""
        seconds = max(self._left(), 0.1)
        try:
            with closing(self._connection(seconds)) as connection:
                headers = {"Content-Type": "application/json"}
                if self._server.key is not None:
                    headers["Authorization"] = f"Bearer {self._server.key}"
                data = None if body is None else json.dumps(body).encode()
                connection.request("GET" if body is None else "POST", path, data, headers)
                answer = connection.getresponse()
                return _Answer(answer.status, answer.read(_MOST_BYTES))
        except (OSError, http.client.HTTPException) as error:
            return _Answer(0, (str(error) or type(error).__name__).encode())

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        if not self._server.tls:
            return http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=seconds)
        context = ssl.create_default_context()
        context.check_hostname = False  # of this very machine, by its address
        context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection("127.0.0.1", self._server.port, timeout=seconds, context=context)


def wait_until_ready(client: Client, clock: Clock, gone: Callable[[], bool]) -> bool:
    """Until the server answers that it is well; False when `gone` says that it will not any more."""
    while not gone():
        if client.ask("/health").status == 200:
            return True
        clock.sleep(_POLL_SECONDS)
    return False


def exercise(client: Client) -> tuple[Step, ...]:
    """Ask everything of every model that the server has: its adapters are models, too. The last step is what its engine
    died of, if it did."""
    models = client.ask("/v1/models")
    listed = models.json().get("data")
    if models.status != 200 or not isinstance(listed, list):
        return (Step("models", "models", models.status if models.status != 200 else 0, models.said),)
    steps: list[Step] = []
    for kind, name, path, body in _questions(
        [each for each in listed if isinstance(each, dict)], adapters=client.adapters
    ):
        answer = client.ask(path, body)
        steps.append(_step(kind, name, answer))
        if name == _FIRST and answer.status in {400, 404, 405}:  # no generation: a model that pools
            return (*steps, *_pooled(client, str(body["model"])))
        if (answer.status == 0 or answer.status >= 500) and dead(client):
            break
    return tuple(steps)


def _questions(
    models: Sequence[Mapping[str, Any]], *, adapters: bool
) -> Iterator[tuple[str, str, str, dict[str, object]]]:
    """Kind, name, path and body of each request to these models, the first of which is no adapter."""
    room: int | None = None
    for number, model in enumerate(models):
        told = model.get("max_model_len")
        room = told if isinstance(told, int) else room  # an adapter has that of its model, and does not tell
        for question in _asked(str(model.get("id")), room, adapter=number > 0):
            if not (adapters and question[1].startswith(_NOT_WITH_ADAPTERS)):
                yield question


def dead(client: Client) -> str:
    """Whether an engine died of what it was asked: what its server says then; empty for one that lives."""
    health = client.ask("/health")
    return "" if health.status == 200 else f"{health.status or 'no answer'}{_colon(health.said)}"


def _step(kind: str, name: str, answer: _Answer) -> Step:
    return Step(kind, name, answer.status, "" if answer.status == 200 else answer.said)


_FIRST = "a batch of 1"


def _asked(model: str, room: int | None, *, adapter: bool) -> Iterator[tuple[str, str, str, dict[str, object]]]:
    """Kind, name, path and body of each request. `room` is how many tokens a sequence may have; None for unknown."""
    suffix = f", adapter {model}" if adapter else ""
    tokens = _TOKENS if room is None else max(1, min(_TOKENS, room // 4))
    short = [_FIRST_TOKEN + at for at in range(tokens)]
    base = {"model": model, "max_tokens": tokens, "ignore_eos": True}
    for size in BATCHES:
        name = _FIRST if size == 1 else f"a batch of {size}"
        body = {**base, "prompt": _batch(short, size), "temperature": 0}
        yield "batches" + suffix, name + suffix, "/v1/completions", body
    if room is not None and room > 4 * _TOKENS:
        name = "a long prompt" + suffix
        long = [_FIRST_TOKEN + at % _TOKENS for at in range(min(_LONG, room - 2 * _TOKENS))]
        yield name, name, "/v1/completions", {**base, "prompt": [long], "temperature": 0}
    for name, options in SAMPLING.items():
        yield "samplers" + suffix, name + suffix, "/v1/completions", {**base, "prompt": _batch(short, 2), **options}
    if adapter:
        return
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}
    structured = {**base, "ignore_eos": False, "response_format": form}
    alone: dict[str, tuple[str, dict[str, object]]] = {
        "structured output": ("/v1/completions", {**structured, "prompt": _batch(short, 2)}),
        "a chat": ("/v1/chat/completions", {**base, "messages": [{"role": "user", "content": "a b c"}]}),
        "a picture": ("/v1/chat/completions", {**base, "messages": [{"role": "user", "content": picture()}]}),
    }
    for name, (path, asked) in alone.items():
        yield name, name, path, asked


def _batch(prompt: Sequence[int], size: int) -> list[list[int]]:
    """Prompts that differ from the first token on, so that no cache of prefixes answers for another one."""
    return [[_FIRST_TOKEN + at % _TOKENS, *prompt[1:]] for at in range(size)]


def _pooled(client: Client, model: str) -> tuple[Step, ...]:
    """What models answer that embed, classify or score."""
    steps = []
    for size in BATCHES:
        answer = client.ask("/v1/embeddings", {"model": model, "input": ["a b c"] * size})
        if answer.status != 200:
            answer = client.ask("/pooling", {"model": model, "input": ["a b c"] * size})
        steps.append(_step("pooling", f"pooling, a batch of {size}", answer))
        if answer.status != 200:
            break
    return tuple(steps)


def picture() -> list[dict[str, object]]:
    """What a message about a picture says."""
    url = "data:image/png;base64," + base64.b64encode(png(64, 64)).decode()
    return [{"type": "text", "text": "a b c"}, {"type": "image_url", "image_url": {"url": url}}]


def png(width: int, height: int) -> bytes:
    """A grey picture of this size in pixels (PNG specification, second edition, chapters 5 and 11)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\0" + b"\x80" * 3 * width) * height
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
