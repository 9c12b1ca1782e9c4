"""`/v1/models`: model names for requests."""

from __future__ import annotations

from ....protocol.http.wire import WireResponse
from ....protocol.responses import ModelCard, ModelList
from .route import RequestContext, Route


async def list_models(context: RequestContext) -> WireResponse:
    return WireResponse.json(ModelList((await context.router.names()).cards()))


async def retrieve(context: RequestContext) -> WireResponse:
    return WireResponse.json((await context.router.names()).card(context.parameters["model"]))


ROUTES = (
    Route(
        "GET",
        "/v1/models",
        list_models,
        "`auto`, `local`, `cloud`, and their models; the device's model with `max_model_len`",
        response_type=ModelList,
    ),
    Route("GET", "/v1/models/{model:path}", retrieve, "one model", response_type=ModelCard),
)
