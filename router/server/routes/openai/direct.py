"""Endpoints that skip the gates: bare prompts, embeddings, and cloud-only endpoints."""

from __future__ import annotations

from .....protocol.embeddings import EmbeddingList, EmbeddingRequest
from .....protocol.http.wire import WireResponse
from .....protocol.requests import CompletionRequest
from .....protocol.responses import TextCompletion
from ....responses.direct import DirectHandler, forwarder, read_any_model
from ....responses.embeddings import embed
from ....responses.text_completion import complete
from ....router import BodyReader, read_json
from ..route import Handler, RequestContext, Route


def _direct(handler: DirectHandler, read: BodyReader = read_json) -> Handler:
    async def create(context: RequestContext) -> WireResponse:
        return await context.router.direct(context.request, handler, read=read)

    return create


COMPLETIONS = Route(
    "POST /v1/completions",
    _direct(complete),
    "answer to a bare prompt, without gates: from the cloud if there is one; with `local`, from the device",
    CompletionRequest,
    TextCompletion,
    streams=True,
)
EMBEDDINGS = Route(
    "POST /v1/embeddings",
    _direct(embed),
    "embeddings from the cloud if there is one; with `local`, the normalized hidden state of the last token",
    EmbeddingRequest,
    EmbeddingList,
)
_SUMMARY = "forwarded to a cloud that supports this endpoint; refused for `local` and private requests"
PASSED_ON = tuple(
    Route(f"POST /v1/{path}", _direct(forwarder(path, what), read_any_model), _SUMMARY, kind, form=kind is None)
    for path, what, kind in (
        ("moderations", "moderations", dict),
        ("rerank", "rankings", dict),
        ("audio/speech", "voices", dict),
        ("audio/transcriptions", "transcriptions", None),
        ("audio/translations", "translations", None),
        ("images/generations", "images", dict),
    )
)
