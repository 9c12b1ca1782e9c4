"""`/v1/embeddings`: the cloud's where there is one, else the device's."""

from __future__ import annotations

from ....protocol.embeddings import EmbeddingList, EmbeddingRequest
from ....protocol.http.wire import WireResponse
from ...responses.embeddings import embed
from .route import RequestContext, Route


async def create(context: RequestContext) -> WireResponse:
    return await context.router.direct(context.request, embed)


ROUTES = (
    Route(
        "POST",
        "/v1/embeddings",
        create,
        "the cloud's where there is one; `local`: the device's (the last token's hidden state, at length 1)",
        EmbeddingRequest,
        EmbeddingList,
    ),
)
