"""`/updraft/charts/{chart}`: charts of the page as light or dark SVG, drawn by matplotlib (extra `ui`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from io import BytesIO
from typing import Any

from ....classifier.optional_imports import load_module
from ....protocol.errors import NotFoundError
from ....protocol.http.wire import WireResponse
from ..routes.route import RequestContext, Route, query_of, switch_of
from . import overview, savings

_COLOURS = {False: ("#0b57d0", "#b3261e", "#1b1b1f"), True: ("#a8c7fa", "#f2b8b5", "#e6e1e5")}
_DAYS = 30


async def chart(context: RequestContext) -> WireResponse:
    plot, router = _CHARTS.get(context.parameters["chart"]), context.router
    if plot is None:
        raise NotFoundError(f"Unknown chart. Known charts: {', '.join(_CHARTS)}.")
    await router.start()
    dark = switch_of(query_of(context.request.query, ("dark",)), "dark")
    if plot is _savings:
        data = await router.read_ledger(lambda ledger: savings.summed(ledger, _DAYS))
    else:
        data = await asyncio.to_thread(overview.report, router)
    return WireResponse(200, {"content-type": "image/svg+xml"}, await asyncio.to_thread(_drawn, plot, data, dark))


def _savings(axes: Any, totals: savings.Savings, first: str, second: str) -> None:
    days = [day.group[5:] for day in totals.by_day]
    spent = [day.cost_usd or 0.0 for day in totals.by_day]
    axes.bar(days, spent, color=first, label="spent")
    axes.bar(days, [day.saved_usd or 0.0 for day in totals.by_day], bottom=spent, color=second, label="saved")
    axes.set(xlabel="day", ylabel="US dollars")


def _curve(axes: Any, report: overview.PolicyReport, first: str, second: str) -> None:
    shares = [point.cloud_share for point in report.curve]
    axes.plot(shares, [point.quality for point in report.curve], "o-", color=first, label="observed")
    axes.plot(shares, [point.target for point in report.curve], "s--", color=second, label="target")
    axes.set(xlabel="share sent to the cloud", ylabel="quality kept")


def _reliability(axes: Any, report: overview.PolicyReport, first: str, second: str) -> None:
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
    "savings": _savings,
    "curve": _curve,
    "reliability": _reliability,
}
ROUTES = (
    Route(
        "GET /updraft/charts/{chart}",
        chart,
        "`savings`, `curve` or `reliability` as SVG; `?dark` for a dark page",
        query=("dark",),
    ),
)
