"""Endpoints of the cloud alone: what they are asked goes there as it came."""

from __future__ import annotations

from .....protocol.http.wire import WireResponse
from ....responses.passed_on import passed_on, read_any_model
from ..route import Handler, RequestContext, Route


def _to_cloud(path: str, what: str) -> Handler:
    handler = passed_on(path, what)

    async def create(context: RequestContext) -> WireResponse:
        return await context.router.direct(context.request, handler, read_any_model)

    return create


_SUMMARY = "passed on to a cloud that has it; refused for `local` and private requests"
ROUTES = tuple(
    Route("POST", f"/v1/{path}", _to_cloud(path, what), _SUMMARY, None if form else dict, form=form)
    for path, what, form in (
        ("moderations", "moderations", False),
        ("rerank", "rankings", False),
        ("audio/speech", "voices", False),
        ("audio/transcriptions", "transcriptions", True),
        ("audio/translations", "translations", True),
        ("images/generations", "images", False),
    )
)
