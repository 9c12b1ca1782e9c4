"""Plot of a plan as a PNG, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

from ...classifier.optional_imports import load_module
from ...cloud_engine.planning.plan import FleetFigures


def fleets_png(tried: Sequence[FleetFigures], share: float) -> bytes:
    """Return a PNG of the share of requests within the objective, and of TTFT p99, against the number of nodes."""
    figure = load_module("matplotlib.figure", "ui").Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.add_subplot(xlabel="nodes", ylabel="requests within the objective")
    nodes = [each.nodes for each in tried]
    axes.plot(nodes, [each.share for each in tried], "o-", color="tab:blue")
    axes.axhline(share, color="tab:red", linestyle="--", label="objective")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3)
    axes.legend()
    beside = axes.twinx()
    beside.plot(nodes, [each.ttft_p99_s for each in tried], "s-", color="tab:gray")
    beside.set_ylabel("TTFT p99, seconds (gray)")
    beside.set_yscale("log")
    picture = BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
