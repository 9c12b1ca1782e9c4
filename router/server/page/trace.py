"""`/updraft/trace`: where a chat request would go, and why, without an answer."""

from __future__ import annotations

import msgspec

from ....protocol.http.wire import WireResponse
from ....protocol.requests import ChatRequest
from ...gates.gates import GateDecision
from ..routes.route import RequestContext, Route


class Trace(msgspec.Struct):
    """The way of a request through the gates."""

    # `local` or `cloud`.
    tier: str
    reason: str
    decisions: list[GateDecision]
    # What the device wrote until the gates had seen enough.
    local_text: str
    latency_ms: float


async def trace(context: RequestContext) -> WireResponse:
    preview = await context.router.preview(context.request)
    record = preview.record
    return WireResponse.json(Trace(record.tier, record.reason, record.decisions, preview.local_text, record.latency_ms))


ROUTES = (
    Route(
        "POST",
        "/updraft/trace",
        trace,
        "the gates' verdicts on a chat request: no cloud is asked, and no row is written",
        ChatRequest,
        Trace,
    ),
)
