"""`/v1/models`: model names for requests. `/health`: 200 if a tier can answer. `/metrics`: for Prometheus."""

from __future__ import annotations

from ....protocol.http import prometheus
from ....protocol.http.wire import WireResponse
from ....protocol.responses import ModelCard, ModelList
from .route import RequestContext, Route


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
)
