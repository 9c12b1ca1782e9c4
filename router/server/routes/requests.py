"""`/updraft/requests/{id}`: why an answer came from where it came, and whether it was good."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Literal

import msgspec

from ....protocol.decoding import decode, prepare_types
from ....protocol.errors import NotFoundError
from ....protocol.http.wire import WireResponse
from .route import RequestContext, Route


class Feedback(msgspec.Struct, forbid_unknown_fields=True):
    """Whether an answer was good."""

    thumb: Literal["up", "down"]


prepare_types(Feedback)


async def why(context: RequestContext) -> WireResponse:
    request_id = context.parameters["id"]
    row = await context.router.read_ledger(lambda ledger: ledger.get(request_id))
    if row is None:
        raise NotFoundError(f"No request {request_id[:100]!r} is in the ledger.")
    decisions = msgspec.Raw(row.decisions.encode())
    return WireResponse.json({"request": {**msgspec.to_builtins(row), "decisions": decisions}})


async def give_feedback(context: RequestContext) -> WireResponse:
    given, request_id = decode(context.request.body, Feedback), context.parameters["id"]
    path = context.router.config.experience
    if path is None or not path.exists() or not await asyncio.to_thread(_keep, path, request_id, given.thumb == "up"):
        raise NotFoundError(
            f"No judged answer {request_id[:100]!r} is kept: only answers that the local model wrote to their end are, "
            "and of those the newest."
        )
    return WireResponse.json(given)


def _keep(path: Path, request_id: str, up: bool) -> bool:
    from ....classifier.online.experience import Experience

    with closing(Experience(path)) as experience:
        return experience.feedback(request_id, up=up)


ROUTES = (
    Route("GET", "/updraft/requests/{id}", why, "its row in the ledger, with every decision"),
    Route(
        "POST",
        "/updraft/requests/{id}/feedback",
        give_feedback,
        "`thumb`: `up` or `down`, for `updraft learn`",
        Feedback,
        Feedback,
    ),
)
