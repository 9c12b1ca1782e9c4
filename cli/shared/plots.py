"""Plots as PNGs, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from ...classifier.optional_imports import load_module

if TYPE_CHECKING:
    from ...classifier.evaluation.cost_quality import CostQualityCurve
    from ...cloud_engine.planning.plan import FleetFigures


def check_plotting() -> None:
    """Raise MissingDependencyError without matplotlib. Call this function before requests that cost money."""
    load_module("matplotlib.figure", "ui")


def curve_png(router: CostQualityCurve, oracle: CostQualityCurve, point: tuple[float, float]) -> bytes:
    """Return a PNG of the score against the cloud share, for `router`, the best possible router and a random router.
    `point` is the target's cloud share and score.
    """
    figure, axes = _axes(xlabel="share to the cloud", ylabel="score")
    axes.plot(oracle.share, oracle.accuracy, color="tab:green", label="best possible")
    axes.plot(router.share, router.accuracy, color="tab:blue", label="router")
    axes.plot((0, 1), (router.weak, router.strong), color="tab:gray", label="random")
    axes.plot(*point, "s", color="tab:red", label="target")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.legend()
    return _png(figure)


def fleets_png(tried: Sequence[FleetFigures], share: float) -> bytes:
    """Return a PNG of the share of requests within the objective, and of TTFT p99, against the number of nodes."""
    figure, axes = _axes(xlabel="nodes", ylabel="requests within the objective")
    nodes = [candidate.nodes for candidate in tried]
    axes.plot(nodes, [candidate.share for candidate in tried], "o-", color="tab:blue")
    axes.axhline(share, color="tab:red", linestyle="--", label="objective")
    axes.legend()
    beside = axes.twinx()
    beside.plot(nodes, [candidate.ttft_p99_s for candidate in tried], "s-", color="tab:gray")
    beside.set_ylabel("TTFT p99, seconds (gray)")
    beside.set_yscale("log")
    return _png(figure)


def _axes(**labels: str) -> tuple[Any, Any]:
    """Return a figure, and its axes with a grid and a vertical axis in percent."""
    figure = load_module("matplotlib.figure", "ui").Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.add_subplot(**labels)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3)
    return figure, axes


def _png(figure: Any) -> bytes:
    picture = BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
