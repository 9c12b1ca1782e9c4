"""Tiers, target, policy, charts (drawn by matplotlib, extra `ui`) and traces of decisions for the web page."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ....classifier.calibration.drift_report import DriftReport
from ....classifier.optional_imports import load_module
from ....classifier.target import Target
from ....protocol.decoding import decode
from ....protocol.errors import ConfigurationError, InvalidRequestError, NotFoundError
from ....protocol.http.wire import WireResponse
from ....protocol.requests import ChatRequest
from ...config import TARGETS
from ...forecast import RouteForecast
from ...gates.exploration import ExplorationGates
from ...gates.gates import GateDecision
from ...router import Router
from ..routes.route import RequestContext, Route, query_of, switch_of
from . import savings

if TYPE_CHECKING:
    from ....classifier.policy.policy import Policy


log = logging.getLogger("updraft.router")

_QUALITIES = (0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0)
_BINS = 10
_COLOURS = {False: ("#0b57d0", "#b3261e", "#1b1b1f"), True: ("#a8c7fa", "#f2b8b5", "#e6e1e5")}
_DAYS = 30


class Status(msgspec.Struct):
    """Tiers and target of this router."""

    # Model names; None if the tier is missing.
    local: str | None
    cloud: str | None
    # Reason why the local tier is missing; empty if the tier is available.
    local_missing: str
    # Target as text.
    target: str
    calibrated: bool
    offline: bool
    # Whether requests are recorded in a ledger.
    ledger: bool


class TargetRequest(msgspec.Struct, forbid_unknown_fields=True):
    """New quality target of all requests, until the settings are reloaded."""

    quality: Annotated[float, msgspec.Meta(gt=0, le=1)]


class CurvePoint(msgspec.Struct):
    """Cloud share and quality of the policy on the calibration rows, for one quality target."""

    target: float
    cloud_share: float
    quality: float
    threshold_before: float | None
    threshold_after: float | None


class CalibrationBin(msgspec.Struct):
    """Calibration rows with similar P(gain)."""

    predicted: float
    observed: float
    rows: int


class PolicyReport(msgspec.Struct):
    """Report on the policy in use."""

    models: dict[str, str]
    date: str
    # Calibrated promise, in sentences.
    promise: list[str]
    # Quality target; None for other kinds of target.
    quality: float | None
    curve: list[CurvePoint]
    # Predicted and observed gain of the last gate, in bins.
    reliability: list[CalibrationBin]
    # Drift since calibration; None without a drift monitor.
    drift: DriftReport | None


async def status(context: RequestContext) -> WireResponse:
    router = context.router
    await router.start()
    tiers, config = router.tiers, router.config
    return WireResponse.json(
        Status(
            local=None if tiers.local is None else tiers.local.model_id,
            cloud=None if tiers.cloud is None else config.cloud_model,
            local_missing="" if tiers.local_missing is None else tiers.local_missing.message,
            target=f"confidence {config.confidence:g}" if config.confidence is not None else str(config.target),
            calibrated=policy_of(router) is not None,
            offline=config.offline,
            ledger=config.ledger is not None and router.ledger_problem is None,
        )
    )


async def set_target(context: RequestContext) -> WireResponse:
    wanted = decode(context.request.body, TargetRequest).quality
    await context.router.start()
    other_targets = dict.fromkeys(name for name in TARGETS if name != "quality")
    try:
        await context.router.reconfigure(replace(context.router.config, quality=wanted, **other_targets))
    except ConfigurationError as error:
        raise InvalidRequestError(error.message, param="quality", code="invalid_value") from error
    log.warning("the web page set the target to quality %g", wanted)
    return await status(context)


async def policy(context: RequestContext) -> WireResponse:
    await context.router.start()
    return WireResponse.json(await asyncio.to_thread(report, context.router))


def policy_of(router: Router) -> tuple[Policy, Target] | None:
    """Return the calibrated policy and its target, or None if the gates use no calibrated policy."""
    gates = router.tiers.gates
    calibrated = gates.calibrated if isinstance(gates, ExplorationGates) else None
    return None if calibrated is None else (calibrated.policy, calibrated.target)


def report(router: Router) -> PolicyReport:
    """Report on the policy in use. Raises NotFoundError without a policy."""
    from ....classifier.policy.summary import sentences

    calibrated = policy_of(router)
    if calibrated is None:
        raise NotFoundError("No policy is calibrated for this pair of models. Run `updraft calibrate`.")
    policy, target = calibrated
    gates = router.tiers.gates
    monitor = gates.monitor if isinstance(gates, ExplorationGates) else None
    return PolicyReport(
        models=policy.models,
        date=policy.card.date,
        promise=sentences(policy, target),
        quality=target.value if target.name == "quality" else None,
        curve=[_point(policy, replace(target, name="quality", value=quality)) for quality in _QUALITIES],
        reliability=_reliability(policy),
        drift=None if monitor is None else monitor.report(),
    )


def _point(policy: Policy, target: Target) -> CurvePoint:
    point = policy.operating_point(target)
    before, after = point.thresholds.before, point.thresholds.after
    return CurvePoint(target.value, point.cloud_share, point.quality, _finite(before), _finite(after))


def _finite(threshold: float) -> float | None:
    return threshold if math.isfinite(threshold) else None


def _reliability(policy: Policy) -> list[CalibrationBin]:
    import numpy as np

    rows = policy.calibration
    parts = np.array_split(np.argsort(rows.judged), min(_BINS, len(rows.judged)))
    return [CalibrationBin(float(rows.judged[part].mean()), float(rows.gain[part].mean()), len(part)) for part in parts]


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


async def forecast(context: RequestContext) -> WireResponse:
    return WireResponse.json(await context.router.forecast(context.request))


async def chart(context: RequestContext) -> WireResponse:
    plot, router = _CHARTS.get(context.parameters["chart"]), context.router
    if plot is None:
        raise NotFoundError(f"Unknown chart. Known charts: {', '.join(_CHARTS)}.")
    await router.start()
    dark = switch_of(query_of(context.request.query, ("dark",)), "dark")
    if plot is _savings_plot:
        data = await router.read_ledger(lambda ledger: savings.summed(ledger, _DAYS))
    else:
        data = await asyncio.to_thread(report, router)
    return WireResponse(200, {"content-type": "image/svg+xml"}, await asyncio.to_thread(_drawn, plot, data, dark))


def _savings_plot(axes: Any, totals: savings.Savings, first: str, second: str) -> None:
    days = [day.group[5:] for day in totals.by_day]
    spent = [day.cost_usd or 0.0 for day in totals.by_day]
    axes.bar(days, spent, color=first, label="spent")
    axes.bar(days, [day.saved_usd or 0.0 for day in totals.by_day], bottom=spent, color=second, label="saved")
    axes.set(xlabel="day", ylabel="US dollars")


def _curve_plot(axes: Any, report: PolicyReport, first: str, second: str) -> None:
    shares = [point.cloud_share for point in report.curve]
    axes.plot(shares, [point.quality for point in report.curve], "o-", color=first, label="observed")
    axes.plot(shares, [point.target for point in report.curve], "s--", color=second, label="target")
    axes.set(xlabel="share sent to the cloud", ylabel="quality kept")


def _reliability_plot(axes: Any, report: PolicyReport, first: str, second: str) -> None:
    predicted = [each.predicted for each in report.reliability]
    observed = [each.observed for each in report.reliability]
    axes.plot(predicted, observed, "o-", color=first, label="observed")
    axes.plot((0, 1), (0, 1), "--", color=second, label="exact")
    axes.set(xlabel="P(gain) of the last gate", ylabel="share on which the cloud gains")


def _drawn(plot: Callable[[Any, Any, str, str], None], data: object, dark: bool) -> bytes:
    """Return the plot of `data` as SVG. Raises MissingDependencyError without matplotlib."""
    first, second, ink = _COLOURS[dark]
    figure = load_module("matplotlib.figure", "ui").Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    plot(axes, data, first, second)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(ink)
    axes.tick_params(colors=ink)
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_color(ink)
    axes.grid(alpha=0.3)
    axes.legend(labelcolor=ink, framealpha=0)
    picture = BytesIO()
    figure.savefig(picture, format="svg", transparent=True)
    return picture.getvalue()


_CHARTS: dict[str, Callable[[Any, Any, str, str], None]] = {
    "savings": _savings_plot,
    "curve": _curve_plot,
    "reliability": _reliability_plot,
}


ROUTES = (
    Route("GET /updraft/status", status, "the tiers and the target", response_type=Status),
    Route(
        "POST /updraft/target",
        set_target,
        "set the target `quality` until the settings are reloaded",
        TargetRequest,
        Status,
    ),
    Route(
        "GET /updraft/policy",
        policy,
        "the calibrated policy: promise, curve, reliability, drift",
        response_type=PolicyReport,
    ),
    Route(
        "POST /updraft/trace",
        trace,
        "gate verdicts on a chat request, without asking a cloud or writing a ledger row",
        ChatRequest,
        Trace,
    ),
    Route(
        "POST /updraft/route",
        forecast,
        "the decision on a chat request before any answer, with the expected cost and quality",
        ChatRequest,
        RouteForecast,
    ),
    Route(
        "GET /updraft/charts/{chart}",
        chart,
        "`savings`, `curve` or `reliability` as SVG; `?dark` for a dark page",
        query=("dark",),
    ),
)
