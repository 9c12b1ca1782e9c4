"""`/updraft/savings` and `/updraft/requests`: totals and rows of the ledger, explanations, and feedback on answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from ....accounting.budget import DAY_S
from ....protocol.decoding import decode
from ....protocol.errors import InvalidRequestError
from ....protocol.http.wire import WireResponse
from ...accounting.explanation import Explanation, FeedbackNote, explanation_of
from ...accounting.ledger import Ledger, LedgerRow, LedgerTotals
from ..routes.route import RequestContext, Route, query_of

_RECENT, _MAX_ROWS, _MAX_DAYS = 1000, 1000, 365
_ABANDONED = 499
_FILTERS = ("limit", "tier")
_TIERS = ("local", "cloud", "none")


class Latency(msgspec.Struct):
    """Percentiles of the time to the complete answer, over the recent requests of one tier, in milliseconds."""

    tier: str
    requests: int
    p50_ms: float
    p95_ms: float


class Savings(msgspec.Struct):
    """Ledger totals of the last `days`."""

    days: int
    total: LedgerTotals
    by_day: list[LedgerTotals]
    # Counts over the newest 1,000 requests: all, escalated after a local draft, abandoned by the client, and fallbacks.
    recent: int
    escalated: int
    abandoned: int
    fallbacks: int
    latency: list[Latency]


class RequestSummary(msgspec.Struct):
    """One ledger row, without digests."""

    id: str
    started_at: float
    # Former name of `started_at`, with the same value.
    ts: float
    model: str
    route: str
    tier: str
    gate: int
    reason: str
    p_gain: float | None
    threshold: float | None
    local_tokens: int
    cloud_tokens: int
    cost_usd: float | None
    saved_usd: float | None
    latency_ms: float
    status: int
    cloud_model: str
    failure: str
    # Decisions of the gates, in order.
    decisions: msgspec.Raw


class RequestList(msgspec.Struct):
    """Ledger rows, newest first."""

    requests: list[RequestSummary]


async def savings(context: RequestContext) -> WireResponse:
    days = _number(query_of(context.request.query, ("days",)), "days", 30, _MAX_DAYS)
    return WireResponse.json(await context.router.read_ledger(lambda ledger: summed(ledger, days)))


async def requests(context: RequestContext) -> WireResponse:
    query = query_of(context.request.query, _FILTERS)
    limit = _number(query, "limit", 100, _MAX_ROWS)
    tier = query.get("tier")
    if tier is not None and tier not in _TIERS:
        raise InvalidRequestError(f"tier must be one of {', '.join(_TIERS)}.", param="tier", code="invalid_value")
    rows = await context.router.read_ledger(lambda ledger: ledger.rows(limit=limit, tier=tier))
    return WireResponse.json(RequestList([_summary(row) for row in rows]))


def summed(ledger: Ledger, days: int) -> Savings:
    since = (time.time() // DAY_S - days + 1) * DAY_S
    recent = ledger.rows(limit=_RECENT)
    return Savings(
        days=days,
        total=ledger.totals(since=since)[0],
        by_day=ledger.totals("day", since=since),
        recent=len(recent),
        escalated=sum(bool(row.local_tokens and row.tier == "cloud") for row in recent),
        abandoned=sum(row.status == _ABANDONED for row in recent),
        fallbacks=sum(row.route == "fallback" for row in recent),
        latency=[latency for tier in ("local", "cloud") if (latency := _latency(tier, recent)) is not None],
    )


def _latency(tier: str, rows: Sequence[LedgerRow]) -> Latency | None:
    times = sorted(row.latency_ms for row in rows if row.tier == tier and row.status == 200 and row.route != "cache")
    if not times:
        return None
    p50, p95 = (times[min(len(times) - 1, int(len(times) * part))] for part in (0.5, 0.95))
    return Latency(tier, len(times), p50, p95)


def _summary(row: LedgerRow) -> RequestSummary:
    kept = {name: getattr(row, name) for name in RequestSummary.__struct_fields__ if name not in ("ts", "decisions")}
    return RequestSummary(**kept, ts=row.started_at, decisions=msgspec.Raw(row.decisions.encode()))


def _number(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise InvalidRequestError(f"{name} must be from 1 to {most}.", param=name, code="invalid_value")
    return int(text)


class Feedback(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a feedback request."""

    thumb: Literal["up", "down"]


async def why(context: RequestContext) -> WireResponse:
    return WireResponse.json(explanation_of(await context.router.request(context.parameters["id"])))


async def give_feedback(context: RequestContext) -> WireResponse:
    await context.router.start()
    request_id, thumb = context.parameters["id"], decode(context.request.body, Feedback).thumb
    learned = await context.router.feedback(request_id, up=thumb == "up")
    return WireResponse.json(FeedbackNote(request_id=request_id, feedback=thumb, learned=learned))


ROUTES = (
    Route(
        "GET /updraft/savings",
        savings,
        "ledger totals of the last `days` (default 30)",
        response_type=Savings,
        query=("days",),
    ),
    Route(
        "GET /updraft/requests",
        requests,
        "newest `limit` ledger rows (default 100), optionally of one `tier`",
        response_type=RequestList,
        query=_FILTERS,
    ),
    Route("GET /updraft/requests/{id}", why, "one request, as in `updraft why`", response_type=Explanation),
    Route(
        "POST /updraft/requests/{id}/feedback",
        give_feedback,
        "record the `thumb` (`up` or `down`) in the ledger and, if experience is kept, for `updraft learn`",
        Feedback,
        FeedbackNote,
    ),
)
