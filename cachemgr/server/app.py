"""The application: routes from the table of operations, with access, limits, audit and metrics around each."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from cachemgr.errors import CacheError
from cachemgr.server import metrics as metric_text
from cachemgr.server import operations, page, pages
from cachemgr.server.access import READ, Access, Visitor
from cachemgr.server.api.table import OPERATIONS
from cachemgr.server.audit import Audit
from cachemgr.server.backend import Backend
from cachemgr.server.contract import Document, Health, Problem
from cachemgr.server.limits import HEADERS, REQUEST_ID, Bounded, Bounds, body_of, request_id
from cachemgr.server.metrics import Metrics
from cachemgr.server.openapi import openapi
from cachemgr.server.operations import Operation
from cachemgr.server.problems import RefusedError, answer, hint_of, problem_of
from cachemgr.server.upkeep import Upkeep

T = TypeVar("T")

Endpoint = Callable[[Request], Awaitable[Response]]
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class _Desk:
    """What every endpoint needs."""

    backend: Backend
    access: Access
    audit: Audit
    metrics: Metrics
    bounds: Bounds
    threads: ThreadPoolExecutor

    async def work(self, step: Callable[[], T]) -> T:
        """What `step` returns, in a thread. One that is not waited for any more keeps its place until it ends."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, step)

    async def admit(self, request: Request, operation: Operation) -> Visitor:
        """Who asks, if that one may."""
        return await self.work(partial(self.access.admit, request.headers, operation.roles, basic=False))


def application(
    backend: Backend, access: Access, *, upkeep: Upkeep | None, say: Callable[[str], None], bounds: Bounds
) -> Starlette:
    """The ASGI application. `upkeep` is started and stopped with it."""

    @asynccontextmanager
    async def life(_app: Starlette) -> AsyncIterator[None]:
        if upkeep is not None:
            upkeep.start()
        yield
        if upkeep is not None:
            await asyncio.to_thread(upkeep.stop, _STOP_SECONDS)

    threads = ThreadPoolExecutor(bounds.threads, "cachemgr-request")
    desk = _Desk(backend, access, Audit(backend, say), Metrics(backend), bounds, threads)
    app = Starlette(
        routes=_routes(desk),
        middleware=[Middleware(Bounded, bounds=bounds)],
        exception_handlers={HTTPException: _http_problem, Exception: partial(_bug, say)},
        lifespan=life,
    )
    # A redirect would name the host and scheme that the request had, which behind a proxy are not those of the client.
    app.router.redirect_slashes = False
    return app


def _routes(desk: _Desk) -> list[BaseRoute]:
    document = msgspec.json.encode(openapi(OPERATIONS), order="sorted")

    async def described(_request: Request) -> Response:
        return Response(document, media_type="application/json")

    return [
        Route("/healthz", _healthz),
        Route("/readyz", partial(_readyz, desk)),
        Route("/metrics", partial(_metrics, desk)),
        Route("/v1/openapi.json", described),
        *(Route(each.path, _endpoint(desk, each), methods=[each.method]) for each in OPERATIONS),
        *(Route(each.path, _page(desk, each), methods=["GET"]) for each in pages.PAGES),
        Mount("/static", StaticFiles(directory=page.STATIC)),
    ]


async def _healthz(_request: Request) -> Response:
    return _json(Health(status="ok"), 200)


async def _readyz(desk: _Desk, _request: Request) -> Response:
    """Everybody may ask, so it names nothing; the page about health and the log say why."""
    condition = desk.backend.condition
    if not condition.ready:
        return _json(Health(status="starting", detail="the store was not read yet"), 503)
    try:
        await desk.work(desk.access.check)
    except CacheError:
        return _json(Health(status="failing", detail="the database does not answer"), 503)
    if condition.trouble:
        return _json(Health(status="failing", detail="the store could not be read the last time"), 503)
    return _json(Health(status="ok"), 200)


async def _metrics(desk: _Desk, request: Request) -> Response:
    try:
        await desk.work(partial(desk.access.admit, request.headers, READ, basic=False))
        text = await desk.work(desk.metrics.text)
    except CacheError as error:
        return answer(problem_of(error))
    return Response(text, headers={"Content-Type": metric_text.MEDIA_TYPE})


def _json(document: Document, status: int) -> Response:
    return Response(msgspec.json.encode(document, order="sorted"), status, media_type="application/json")


def _endpoint(desk: _Desk, operation: Operation) -> Endpoint:
    async def answered(request: Request) -> Response:
        begun = time.monotonic()
        response = await _answered(desk, operation, request)
        desk.metrics.answered(operation.name, response.status_code, time.monotonic() - begun)
        return response

    return answered


async def _answered(desk: _Desk, operation: Operation, request: Request) -> Response:
    try:
        visitor = await desk.admit(request, operation)
    except CacheError as error:
        return answer(problem_of(error))
    refusal, body = None, b""
    try:
        body = await body_of(request, desk.bounds.body_bytes)
    except RefusedError as error:
        refusal = error
    except ClientDisconnect:  # nobody reads this
        return answer(problem_of(RefusedError(400, "the client left before all of its request was there")))
    given = operations.Request(request.path_params, request.query_params, body, visitor)

    def done() -> Response:
        try:
            if refusal is not None:
                raise refusal
            return _json(operation.run(desk.backend, given), 200)
        except CacheError as error:
            return answer(problem_of(error))

    return await desk.work(partial(_audited, desk, operation, request, visitor, done))


def _audited(
    desk: _Desk, operation: Operation, request: Request, visitor: Visitor, done: Callable[[], Response]
) -> Response:
    """What `done` answers. The line about it is written in the same thread: a change that takes longer than its request
    may is made all the same, and so is one that meets a bug, in part."""
    status = 500
    try:
        response = done()
        status = response.status_code
        return response
    finally:
        if operation.audited:
            address = request.client.host if request.client else "unknown"
            desk.audit.note(visitor, address=address, what=operation.name, about=request.scope["path"], status=status)


def _page(desk: _Desk, each: pages.Page) -> Endpoint:
    async def shown(request: Request) -> Response:
        begun = time.monotonic()
        response = await _shown(desk, each, request)
        desk.metrics.answered(f"page {each.name}", response.status_code, time.monotonic() - begun)
        return response

    return shown


async def _shown(desk: _Desk, each: pages.Page, request: Request) -> Response:
    try:
        visitor = await desk.work(partial(desk.access.admit, request.headers, READ, basic=True))
        asked = pages.Asked(request.path_params, request.query_params, visitor)
        html = await desk.work(lambda: each.show(desk.backend, asked))
    except CacheError as error:
        problem = problem_of(error)
        headers = {"WWW-Authenticate": 'Basic realm="cachemgr: the token is the password"'}
        html = page.problem(problem)
        return Response(
            html, problem.status, headers=headers if problem.status == 401 else None, media_type="text/html"
        )
    return Response(html, media_type="text/html")


async def _http_problem(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is registered for this"
    if error.status_code in {404, 405}:
        return answer(problem_of(RefusedError(error.status_code, "there is nothing here by this method and path")))
    return answer(problem_of(RefusedError(error.status_code, error.detail)))


async def _bug(say: Callable[[str], None], request: Request, error: Exception) -> Response:
    """Nothing of the error is told to whoever asked; the log has it."""
    name, path = request_id(request.scope), ascii(request.scope["path"][:1000])  # which may have lines of its own
    say(f"error: request {name}: {request.method} {path} failed: {type(error).__name__}: {error}")
    detail = "this request met a bug of cachemgr; its log has more"
    response = answer(Problem(title="A bug", status=500, detail=detail, hint=hint_of(500)))
    response.headers.update(HEADERS)  # nothing else of ours is around this handler
    response.headers[REQUEST_ID] = name
    return response
