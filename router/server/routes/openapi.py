"""`/openapi.json`, generated from the request and response structs; `/v1/models`, `/health` and `/metrics`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ....protocol.http import prometheus
from ....protocol.http.wire import WireResponse
from ....protocol.responses import ModelCard, ModelList
from .route import RequestContext, Route

_REF = "#/components/schemas/{name}"
_TEXT: dict[str, Any] = {"type": "string"}
#: Schemas of the query parameters that are not plain strings.
_QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1},
    "order": {"enum": ["asc", "desc"]},
    "starting_after": {"type": "integer", "minimum": 0},
    "stream": {"type": "boolean"},
    "days": {"type": "integer", "minimum": 1},
    "metadata": {"type": "object", "additionalProperties": _TEXT},
}


async def list_models(context: RequestContext) -> WireResponse:
    return WireResponse.json(ModelList((await context.router.names()).cards()))


async def retrieve(context: RequestContext) -> WireResponse:
    return WireResponse.json((await context.router.names()).card(context.parameters["model"]))


async def health(context: RequestContext) -> WireResponse:
    await context.router.start()
    missing = context.router.health()
    if missing is not None:
        return WireResponse.json({"status": "no tier can answer", **missing.to_body()}, status=503)
    unusable = context.router.tiers.local_missing
    local = {} if unusable is None else {"local": "unavailable", "code": unusable.code}
    ledger = {} if context.router.ledger_problem is None else {"ledger": "unavailable"}  # only the log has the reason
    return WireResponse.json({"status": "ok", **local, **ledger})


async def metrics(context: RequestContext) -> WireResponse:
    return WireResponse(200, {"content-type": prometheus.CONTENT_TYPE}, context.router.metrics().encode())


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


_CODE = {"type": ["string", "integer", "null"]}
_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code=_CODE))
_OLLAMA_ERROR = _object(error=_TEXT)
_FILE: dict[str, Any] = {"type": "string", "contentMediaType": "application/octet-stream"}
_FORM = {**_object(file=_FILE), "additionalProperties": _TEXT}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document of `routes`."""
    kinds = [kind for route in routes for kind in (route.request_type, route.response_type) if kind is not None]
    schemas, components = msgspec.json.schema_components(list(dict.fromkeys(kinds)), ref_template=_REF)
    schema_of = dict(zip(dict.fromkeys(kinds), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operations = paths.setdefault(route.path.replace(":path", ""), {})
        operations[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Updraft", "version": "1"},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR, "OllamaError": _OLLAMA_ERROR}},
    }


def _operation(route: Route, schema_of: dict[type, dict[str, Any]]) -> dict[str, Any]:
    ollamas = route.path.startswith("/api/")
    answer: dict[str, Any] = {"*/*": {}}
    if route.response_type is not None:
        answer = {"application/json": {"schema": schema_of[route.response_type]}}
    streamed: dict[str, Any] = {"application/x-ndjson" if ollamas else "text/event-stream": {}} if route.streams else {}
    error = {"schema": {"$ref": _REF.format(name="OllamaError" if ollamas else "Error")}}
    failure = {"description": "refused", "content": {"application/json": error}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": r"^\w"}}
            for name in re.findall(r"\{(\w+)", route.path)
        ]
        + [_query_parameter(name) for name in route.query],
        "responses": {
            "200": {"description": "the answer", "content": {**answer, **streamed}},
            "4XX": failure,
            "5XX": failure,
        },
    }
    if route.form or route.request_type is not None:
        schema = _FORM if route.request_type is None else schema_of[route.request_type]
        kind = "multipart/form-data" if route.form else "application/json"
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
    return operation


def _query_parameter(name: str) -> dict[str, Any]:
    style = {"style": "deepObject", "explode": True} if name == "metadata" else {}
    return {"name": name, "in": "query", "schema": _QUERY.get(name, _TEXT), **style}


async def describe(context: RequestContext) -> WireResponse:
    return WireResponse.json(document(context.routes))


ROUTES = (
    Route(
        "GET /v1/models",
        list_models,
        "`auto`, `local`, `cloud`, and their models; the device's model with `max_model_len`",
        response_type=ModelList,
    ),
    Route("GET /v1/models/{model:path}", retrieve, "one model", response_type=ModelCard),
    Route("GET /health", health, "200 while a tier can answer; needs no key"),
    Route("GET /metrics", metrics, "see [metrics](metrics.md)"),
    Route("GET /openapi.json", describe, "OpenAPI document of these endpoints"),
)
