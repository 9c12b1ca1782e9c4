"""`/v1/completions`: a bare prompt, without a chat template."""

from __future__ import annotations

from ....protocol.http.wire import WireResponse
from ....protocol.requests import CompletionRequest
from ....protocol.responses import TextCompletion
from ...responses.text_completion import complete
from .route import RequestContext, Route


async def create(context: RequestContext) -> WireResponse:
    return await context.router.direct(context.request, complete)


ROUTES = (
    Route(
        "POST",
        "/v1/completions",
        create,
        "a bare prompt; not judged: the cloud's where there is one, `local`: the device's",
        CompletionRequest,
        TextCompletion,
        streams=True,
    ),
)
