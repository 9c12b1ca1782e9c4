"""`/updraft/requests/{id}`: why a request went where it went, and whether its answer was good."""

from __future__ import annotations

from typing import Literal

import msgspec

from ....protocol.decoding import decode, prepare_types
from ....protocol.errors import NotFoundError
from ....protocol.http.wire import WireResponse
from .route import RequestContext, Route


class Feedback(msgspec.Struct, forbid_unknown_fields=True):
    """Whether an answer was good."""

    rating: Literal["up", "down"]


prepare_types(Feedback)


async def why(context: RequestContext) -> WireResponse:
    request_id = context.parameters["id"]
    row = await context.router.read_ledger(lambda ledger: ledger.get(request_id))
    if row is None:
        raise NotFoundError(f"No request {request_id[:100]!r} is in the ledger.")
    return WireResponse.json({**msgspec.to_builtins(row), "decisions": msgspec.Raw(row.decisions.encode())})


async def feedback(context: RequestContext) -> WireResponse:
    given = decode(context.request.body, Feedback)
    await context.router.feedback(context.parameters["id"], up=given.rating == "up")
    return WireResponse.json(given)


ROUTES = (
    Route("GET", "/updraft/requests/{id}", why, "its row in the ledger, with every decision"),
    Route("POST", "/updraft/requests/{id}/feedback", feedback, "whether its answer was good", Feedback, Feedback),
)
