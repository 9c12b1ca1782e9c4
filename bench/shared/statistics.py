"""Statistics for benchmarks, in their textbook forms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z_95 = 1.959963984540054


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of the proportion `hits / n`; (0, 1) if `n` is 0."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = hits / n, Z_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def percentile(values: Sequence[float], q: float) -> float | None:
    """Return the `q`-th percentile (0 to 100), linearly interpolated; None without values."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), q)) if len(values) else None
