"""`/updraft/trace`: the routing decision for a chat request, without an answer."""

from __future__ import annotations

import msgspec

from ....protocol.http.wire import WireResponse
from ....protocol.requests import ChatRequest
from ...gates.gates import GateDecision
from ..routes.route import RequestContext, Route


class Trace(msgspec.Struct):
    """Routing decision for a request."""

    # `local` or `cloud`.
    tier: str
    reason: str
    decisions: list[GateDecision]
    # Local text generated before the gates decided.
    local_text: str
    latency_ms: float


async def trace(context: RequestContext) -> WireResponse:
    record, local_text = await context.router.preview(context.request)
    return WireResponse.json(Trace(record.tier, record.reason, record.decisions, local_text, record.latency_ms))


ROUTES = (
    Route(
        "POST",
        "/updraft/trace",
        trace,
        "gate verdicts on a chat request, without asking a cloud or writing a ledger row",
        ChatRequest,
        Trace,
    ),
)
