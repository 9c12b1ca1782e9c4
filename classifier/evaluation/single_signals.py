"""Single token signals that need no training: baselines for a trained gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays import Array, Floats
from ..features.gate_inputs import RunView

MEAN_LOGPROB = "mean_logprob"


def _reduce(values: Array, reduce: Callable[[Array], Any]) -> float:
    return float(reduce(values)) if len(values) else float("nan")


# Every signal is oriented so that higher means "more likely wrong".
SINGLE_SIGNALS: dict[str, Callable[[RunView], float]] = {
    MEAN_LOGPROB: lambda v: -_reduce(v.logprobs, np.mean),
    "sum_logprob": lambda v: -_reduce(v.logprobs, np.sum),
    "min_logprob": lambda v: -_reduce(v.logprobs, np.min),
    "q10_logprob": lambda v: -_reduce(v.logprobs, lambda x: np.quantile(x, 0.1)),
    "first_logprob": lambda v: -_reduce(v.logprobs, lambda x: x[0]),
    "last_logprob": lambda v: -_reduce(v.logprobs, lambda x: x[-1]),
    "mean_entropy": lambda v: _reduce(v.entropies, np.mean),
    "max_entropy": lambda v: _reduce(v.entropies, np.max),
    "first_entropy": lambda v: _reduce(v.entropies, lambda x: x[0]),
    "mean_margin": lambda v: -_reduce(v.margins, np.mean),
    "min_margin": lambda v: -_reduce(v.margins, np.min),
    "first_margin": lambda v: -_reduce(v.margins, lambda x: x[0]),
    "prompt_mean_logprob": lambda v: -_reduce(v.prompt_logprobs, np.mean),
    "prompt_min_logprob": lambda v: -_reduce(v.prompt_logprobs, np.min),
}


def single_signal(name: str, views: Sequence[RunView]) -> Floats:
    """Compute the signal `name` of each run, (n,); a run without the signal ranks as the most likely to be wrong."""
    values = np.array([SINGLE_SIGNALS[name](view) for view in views], np.float64)
    return np.nan_to_num(values, nan=1e9, posinf=1e9, neginf=-1e9)
