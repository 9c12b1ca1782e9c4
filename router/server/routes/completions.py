"""`/v1/completions`: no tier of the router takes a bare prompt."""

from __future__ import annotations

from ....protocol.errors import UnsupportedFeatureError
from ....protocol.http.wire import WireResponse
from .route import RequestContext, Route


async def create(_: RequestContext) -> WireResponse:
    raise UnsupportedFeatureError("The router serves chat: send this to /v1/chat/completions.")


ROUTES = (Route("POST", "/v1/completions", create, "refused: the router serves chat"),)
