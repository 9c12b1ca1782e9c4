"""Plot of the cost-quality curve as a PNG, drawn by matplotlib."""

from __future__ import annotations

from io import BytesIO

from ...classifier.evaluation.cost_quality import CostQualityCurve
from ...classifier.optional_imports import load_module


def check_plotting() -> None:
    """Raise MissingDependencyError without matplotlib; call it before rows are paid for."""
    load_module("matplotlib.figure", "ui")


def curve_png(router: CostQualityCurve, oracle: CostQualityCurve, point: tuple[float, float]) -> bytes:
    """Return a PNG of the score against the cloud share, for `router`, the best possible router and a random router.
    `point` is the target's cloud share and score.
    """
    figure = load_module("matplotlib.figure", "ui").Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.add_subplot(xlabel="share to the cloud", ylabel="score")
    axes.plot(oracle.share, oracle.accuracy, color="tab:green", label="best possible")
    axes.plot(router.share, router.accuracy, color="tab:blue", label="router")
    axes.plot((0, 1), (router.weak, router.strong), color="tab:gray", label="random")
    axes.plot(*point, "s", color="tab:red", label="target")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3)
    axes.legend()
    picture = BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
