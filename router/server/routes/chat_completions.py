"""`/v1/chat/completions`: the cascade."""

from __future__ import annotations

from ....protocol.http.wire import WireResponse
from ....protocol.requests import ChatRequest
from ....protocol.responses import ChatCompletion
from .route import RequestContext, Route


async def create(context: RequestContext) -> WireResponse:
    return await context.router.chat(context.request)


ROUTES = (Route("POST", "/v1/chat/completions", create, "routed", ChatRequest, ChatCompletion, streams=True),)
