"""`/updraft/charts/{chart}`: the page's charts as SVG, for light and dark, drawn by pygal (the extra `ui`)."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

from ....protocol.errors import MissingDependencyError, NotFoundError
from ....protocol.http.wire import WireResponse
from ...router import Router
from ..routes.route import RequestContext, Route
from . import overview, savings

_COLOURS = {False: ("#0b57d0", "#b3261e", "#1c1b1f"), True: ("#a8c7fa", "#f2b8b5", "#e6e1e5")}
_DAYS = 30


async def chart(context: RequestContext) -> WireResponse:
    draw = _CHARTS.get(context.parameters["chart"])
    if draw is None:
        raise NotFoundError(f"There is no such chart. There are: {', '.join(_CHARTS)}.")
    await context.router.start()
    svg = await draw(context.router, "dark" in context.request.query)
    return WireResponse(200, {"content-type": "image/svg+xml"}, svg)


async def _savings(router: Router, dark: bool) -> bytes:
    found = await router.read_ledger(lambda ledger: savings.summed(ledger, _DAYS))

    def draw() -> bytes:
        figure = _figure("StackedBar", dark, "US dollars", "day")
        figure.x_labels = [day.group[5:] for day in found.by_day]
        figure.add("spent", [day.cost_usd for day in found.by_day])
        figure.add("saved", [day.saved_usd for day in found.by_day])
        return figure.render()

    return await asyncio.to_thread(draw)


async def _policy(router: Router, dark: bool, draw: Callable[[overview.PolicyReport, bool], bytes]) -> bytes:
    return await asyncio.to_thread(lambda: draw(overview.report(router), dark))


def _curve(report: overview.PolicyReport, dark: bool) -> bytes:
    figure = _figure("XY", dark, "quality kept", "share sent to the cloud")
    figure.add("observed", [(point.cloud_share, point.quality) for point in report.curve])
    figure.add("target", [(point.cloud_share, point.target) for point in report.curve])
    return figure.render()


def _reliability(report: overview.PolicyReport, dark: bool) -> bytes:
    figure = _figure("XY", dark, "share on which the cloud gains", "P(gain) of the last gate")
    figure.add("observed", [(each.predicted, each.observed) for each in report.reliability])
    figure.add("exact", [(0, 0), (1, 1)])
    return figure.render()


def _figure(kind: str, dark: bool, y_title: str, x_title: str) -> Any:
    """Raises MissingDependencyError without pygal."""
    try:
        pygal: Any = importlib.import_module("pygal")  # of the extra `ui`
    except ImportError as error:
        raise MissingDependencyError("Charts need pygal: pip install 'updraft-llm[ui]'.") from error
    first, second, ink = _COLOURS[dark]
    style = pygal.style.Style(
        background="transparent",
        plot_background="transparent",
        foreground=ink,
        foreground_strong=ink,
        foreground_subtle=ink,
        colors=(first, second),
        font_family="sans-serif",
    )
    return getattr(pygal, kind)(
        style=style, js=[], width=720, height=360, legend_at_bottom=True, x_title=x_title, y_title=y_title
    )


_CHARTS: dict[str, Callable[[Router, bool], Any]] = {
    "savings": _savings,
    "curve": lambda router, dark: _policy(router, dark, _curve),
    "reliability": lambda router, dark: _policy(router, dark, _reliability),
}
ROUTES = (
    Route("GET", "/updraft/charts/{chart}", chart, "`savings`, `curve` or `reliability` as SVG; `?dark`: on dark"),
)
