"""Terminal plot of the cost-quality curve for `updraft bench router`."""

from __future__ import annotations

import numpy as np

from ...classifier.evaluation.cost_quality import CostQualityCurve

_WIDTH, _HEIGHT = 60, 16


def terminal_plot(curve: CostQualityCurve, oracle: CostQualityCurve) -> str:
    """Plot accuracy against the share of calls to the strong model: `*` router, `o` oracle, `.` random router."""
    chance = CostQualityCurve(np.array([0.0, 1.0]), np.array([curve.weak, curve.strong]), curve.weak, curve.strong)
    low = min(curve.accuracy.min(), curve.weak)
    high = max(oracle.accuracy.max(), low + 1e-9)
    canvas = [[" "] * (_WIDTH + 1) for _ in range(_HEIGHT + 1)]
    for points, mark in ((chance, "."), (oracle, "o"), (curve, "*")):
        for column, accuracy in enumerate(np.interp(np.linspace(0, 1, _WIDTH + 1), points.share, points.accuracy)):
            canvas[_HEIGHT - round(_HEIGHT * (accuracy - low) / (high - low))][column] = mark
    lines = [f"{high:7.1%} |", *(" " * 8 + "|" for _ in range(_HEIGHT - 1)), f"{low:7.1%} |"]
    plot = [label + "".join(row).rstrip() for label, row in zip(lines, canvas, strict=True)]
    axis = " " * 8 + "+" + "-" * (_WIDTH + 1)
    legend = " " * 9 + "0 %  strong calls  100 %     * router   o oracle   . random"
    return "\n".join((*plot, axis, legend))
