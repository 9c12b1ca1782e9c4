"""`/updraft/charts/{chart}`: charts of the page as light or dark SVG, drawn by matplotlib (extra `ui`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from io import BytesIO
from typing import Any

from ....classifier.optional_imports import load_module
from ....protocol.errors import NotFoundError
from ....protocol.http.wire import WireResponse
from ...router import Router
from ..routes.openai.pagination import query_of, switch_of
from ..routes.route import RequestContext, Route
from . import overview, savings

_COLOURS = {False: ("#0b57d0", "#b3261e", "#1b1b1f"), True: ("#a8c7fa", "#f2b8b5", "#e6e1e5")}
_DAYS = 30


async def chart(context: RequestContext) -> WireResponse:
    draw = _CHARTS.get(context.parameters["chart"])
    if draw is None:
        raise NotFoundError(f"Unknown chart. Known charts: {', '.join(_CHARTS)}.")
    await context.router.start()
    dark = switch_of(query_of(context.request.query, ("dark",)), "dark")
    return WireResponse(200, {"content-type": "image/svg+xml"}, await draw(context.router, dark))


async def _savings(router: Router, dark: bool) -> bytes:
    totals = await router.read_ledger(lambda ledger: savings.summed(ledger, _DAYS))
    days = [day.group[5:] for day in totals.by_day]
    spent = [day.cost_usd or 0.0 for day in totals.by_day]
    saved = [day.saved_usd or 0.0 for day in totals.by_day]

    def plot(axes: Any, first: str, second: str) -> None:
        axes.bar(days, spent, color=first, label="spent")
        axes.bar(days, saved, bottom=spent, color=second, label="saved")

    return await asyncio.to_thread(_drawn, plot, ("day", "US dollars"), dark)


async def _curve(router: Router, dark: bool) -> bytes:
    curve = (await asyncio.to_thread(overview.report, router)).curve
    shares = [point.cloud_share for point in curve]

    def plot(axes: Any, first: str, second: str) -> None:
        axes.plot(shares, [point.quality for point in curve], "o-", color=first, label="observed")
        axes.plot(shares, [point.target for point in curve], "s--", color=second, label="target")

    return await asyncio.to_thread(_drawn, plot, ("share sent to the cloud", "quality kept"), dark)


async def _reliability(router: Router, dark: bool) -> bytes:
    bins = (await asyncio.to_thread(overview.report, router)).reliability

    def plot(axes: Any, first: str, second: str) -> None:
        axes.plot(
            [each.predicted for each in bins], [each.observed for each in bins], "o-", color=first, label="observed"
        )
        axes.plot((0, 1), (0, 1), "--", color=second, label="exact")

    return await asyncio.to_thread(_drawn, plot, ("P(gain) of the last gate", "share on which the cloud gains"), dark)


def _drawn(plot: Callable[[Any, str, str], None], titles: tuple[str, str], dark: bool) -> bytes:
    """Return the drawing of `plot` as SVG, with axis `titles`. Raises MissingDependencyError without matplotlib."""
    first, second, ink = _COLOURS[dark]
    figure = load_module("matplotlib.figure", "ui").Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    plot(axes, first, second)
    for text, name in zip((axes.set_xlabel, axes.set_ylabel), titles, strict=True):
        text(name, color=ink)
    axes.tick_params(colors=ink)
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_color(ink)
    axes.grid(alpha=0.3)
    axes.legend(labelcolor=ink, framealpha=0)
    picture = BytesIO()
    figure.savefig(picture, format="svg", transparent=True)
    return picture.getvalue()


_CHARTS: dict[str, Callable[[Router, bool], Awaitable[bytes]]] = {
    "savings": _savings,
    "curve": _curve,
    "reliability": _reliability,
}
ROUTES = (
    Route(
        "GET",
        "/updraft/charts/{chart}",
        chart,
        "`savings`, `curve` or `reliability` as SVG; `?dark` for a dark page",
        query=("dark",),
    ),
)
