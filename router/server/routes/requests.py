"""`/updraft/requests/{id}`: the explanation of a request, and feedback on its answer."""

from __future__ import annotations

from typing import Literal

import msgspec

from ....protocol.decoding import decode, prepare_types
from ....protocol.http.wire import WireResponse
from ...accounting.explanation import Explanation, FeedbackNote, explanation_of
from .route import RequestContext, Route


class Feedback(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a feedback request."""

    thumb: Literal["up", "down"]


prepare_types(Feedback)


async def why(context: RequestContext) -> WireResponse:
    return WireResponse.json(explanation_of(await context.router.request(context.parameters["id"])))


async def give_feedback(context: RequestContext) -> WireResponse:
    await context.router.start()
    request_id, thumb = context.parameters["id"], decode(context.request.body, Feedback).thumb
    learned = await context.router.feedback(request_id, up=thumb == "up")
    return WireResponse.json(FeedbackNote(request_id=request_id, feedback=thumb, learned=learned))


ROUTES = (
    Route("GET", "/updraft/requests/{id}", why, "one request, as in `updraft why`", response_type=Explanation),
    Route(
        "POST",
        "/updraft/requests/{id}/feedback",
        give_feedback,
        "record the `thumb` (`up` or `down`) in the ledger and, if experience is kept, for `updraft learn`",
        Feedback,
        FeedbackNote,
    ),
)
