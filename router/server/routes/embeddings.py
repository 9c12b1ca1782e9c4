"""`/v1/embeddings`: the cloud's."""

from __future__ import annotations

from ....protocol.embeddings import EmbeddingList, EmbeddingRequest
from ....protocol.http.wire import WireResponse
from .route import RequestContext, Route


async def create(context: RequestContext) -> WireResponse:
    return await context.router.embeddings(context.request)


ROUTES = (
    Route(
        "POST",
        "/v1/embeddings",
        create,
        "answered by the cloud; refused for `local` and private requests",
        EmbeddingRequest,
        EmbeddingList,
    ),
)
