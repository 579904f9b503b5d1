"""The OpenAPI document of the operations, made from their table: msgspec writes the schemas of their types."""

import re
from collections.abc import Iterable, Sequence

import msgspec

from cachemgr import __version__
from cachemgr.server.contract import Health, Nothing, Problem
from cachemgr.server.operations import Operation

Json = dict[str, object]
_REF = "#/components/schemas/{name}"
_STATUSES = {
    "400": "it cannot be meant",
    "401": "no token, or none that counts",
    "403": "the role does not allow it, or this server changes nothing",
    "404": "there is no such thing",
    "405": "another method",
    "409": "somebody else was first, or something else would be done by now",
    "413": "the body is too large",
    "415": "the body is not JSON",
    "422": "stored bytes are damaged or untrusted",
    "503": "store or database do not answer, or too much is asked at once",
}


def openapi(operations: Sequence[Operation]) -> Json:
    """The document (OpenAPI 3.1)."""
    types = _types(operations)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Json]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, by_type)
    for path in ("/healthz", "/readyz"):
        ok = {"description": "it does", "content": {"application/json": {"schema": by_type[Health]}}}
        not_yet = {"description": "not now", "content": {"application/json": {"schema": by_type[Health]}}}
        answers = {"200": ok, "503": not_yet}
        summary = "Whether this process answers." if path == "/healthz" else "Whether store and database answer."
        paths[path] = {"get": {"operationId": path[1:], "summary": summary, "security": [], "responses": answers}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "cachemgr", "version": __version__, "description": "Compile caches of a fleet."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _types(operations: Iterable[Operation]) -> list[type]:
    found: list[type] = [Problem, Health]
    for each in operations:
        found += [each.query, each.body, each.answer]
    return list(dict.fromkeys(found))


def _operation(each: Operation, by_type: dict[type, Json]) -> Json:
    problem = {"application/problem+json": {"schema": by_type[Problem]}}
    done = {"application/json": {"schema": by_type[each.answer]}}
    responses: Json = {"200": {"description": "done", "content": done}}
    responses |= {status: {"description": said, "content": problem} for status, said in _STATUSES.items()}
    found: Json = {
        "operationId": each.name,
        "summary": each.summary,
        "description": f"For roles: {', '.join(sorted(each.roles))}.",
        "parameters": [*_path_parameters(each.path), *_query_parameters(each.query)],
        "responses": responses,
    }
    if each.body is not Nothing:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": by_type[each.body]}}}
    return found


def _path_parameters(path: str) -> list[Json]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]


def _query_parameters(kind: type[msgspec.Struct]) -> list[Json]:
    if kind is Nothing:
        return []
    _refs, components = msgspec.json.schema_components([kind], ref_template=_REF)
    schema = components[kind.__name__]
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _without_null(each)}
        for name, each in schema["properties"].items()
    ]


def _without_null(schema: Json) -> Json:
    """A parameter that is not given is left out; there is no null in a URL."""
    choices = schema.get("anyOf")
    if not isinstance(choices, list):
        return {name: value for name, value in schema.items() if value is not None}
    (only,) = (each for each in choices if each != {"type": "null"})
    return dict(only)
