"""Printed result of a calibration: the cost-quality curve, the promise, and the data that it rests on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...classifier.policy.policy import Policy
    from ...router.config import RouterConfig


def show(policy: Policy, config: RouterConfig, picture: Path | None) -> list[str]:
    """Return the lines to print; also write the curve to `picture` if it is given."""
    from ...bench.router.plot import terminal_plot
    from ...classifier.evaluation import cost_quality as curve
    from ...classifier.policy.summary import sentences

    rows = policy.calibration
    routed = curve.fine_curve(rows.judged, rows.local, rows.cloud)
    oracle = curve.fine_curve(curve.oracle_scores(rows.local, rows.cloud), rows.local, rows.cloud)
    lines = [terminal_plot(routed, oracle), *sentences(policy, config.target)]
    if picture is not None:
        from .plot import curve_png

        point = policy.operating_point(config.target)
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(curve_png(routed, oracle, (point.cloud_share, point.quality * routed.strong)))
        lines.append(f"The curve is in {picture}.")
    return lines
