"""The few statistics the measurements rest on, each in its textbook form."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z_95 = 1.959963984540054


def wilson(hits: int, n: int) -> tuple[float, float]:
    """95 % Wilson score interval of the proportion `hits / n`; (0, 1) where `n` is 0."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = hits / n, Z_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def percentile(values: Sequence[float], q: float) -> float | None:
    """The `q`-th percentile (0 to 100), linearly interpolated; None where there are no values."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), q)) if len(values) else None


def auroc(scores: Sequence[float], labels: Sequence[bool]) -> float | None:
    """Area under the ROC curve: the chance that a positive scores above a negative, ties counting half.

    None where one of the two classes is empty.
    """
    positive = np.asarray(labels, dtype=bool)
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if n_positive == 0 or n_negative == 0:
        return None
    _, inverse, counts = np.unique(np.asarray(scores, dtype=np.float64), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[positive].sum() - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative))


def calibration_error(probabilities: Sequence[float], labels: Sequence[bool], bins: int = 10) -> float | None:
    """Expected calibration error over `bins` bins of equal width; None where there are no values."""
    p, hit = np.asarray(probabilities, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    if p.size == 0:
        return None
    which = np.minimum((p * bins).astype(np.int64), bins - 1)
    gaps = [abs(p[which == b].mean() - hit[which == b].mean()) * (which == b).sum() for b in np.unique(which)]
    return float(sum(gaps) / p.size)
