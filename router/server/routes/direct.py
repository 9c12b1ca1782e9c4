"""Endpoints that no gate judges: bare prompts, embeddings, and what the cloud alone has."""

from __future__ import annotations

from ....protocol.embeddings import EmbeddingList, EmbeddingRequest
from ....protocol.http.wire import WireResponse
from ....protocol.requests import CompletionRequest
from ....protocol.responses import TextCompletion
from ...responses.direct import DirectHandler
from ...responses.embeddings import embed
from ...responses.passed_on import passed_on, read_any_model
from ...responses.text_completion import complete
from .route import Handler, RequestContext, Route


def _answered_by(handler: DirectHandler) -> Handler:
    async def create(context: RequestContext) -> WireResponse:
        return await context.router.direct(context.request, handler)

    return create


def _to_cloud(path: str, what: str) -> Handler:
    handler = passed_on(path, what)

    async def create(context: RequestContext) -> WireResponse:
        return await context.router.direct(context.request, handler, read_any_model)

    return create


_PASSED_ON = "passed on to a cloud that has it; refused for `local` and private requests"
ROUTES = (
    Route(
        "POST",
        "/v1/completions",
        _answered_by(complete),
        "a bare prompt; not judged: the cloud's where there is one, `local`: the device's",
        CompletionRequest,
        TextCompletion,
        streams=True,
    ),
    Route(
        "POST",
        "/v1/embeddings",
        _answered_by(embed),
        "the cloud's where there is one; `local`: the device's (the last token's hidden state, at length 1)",
        EmbeddingRequest,
        EmbeddingList,
    ),
    *(
        Route("POST", f"/v1/{path}", _to_cloud(path, what), _PASSED_ON)
        for path, what in (
            ("moderations", "moderations"),
            ("rerank", "rankings"),
            ("audio/speech", "voices"),
            ("audio/transcriptions", "transcriptions"),
            ("audio/translations", "translations"),
            ("images/generations", "images"),
        )
    ),
)
