"""Features of a run's token signals, and of the log-probabilities that the local model gives the question.

Each series is oriented (higher means more certain), clipped to a fixed range, and summarised by the same statistics.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array
from .gate_inputs import RunView

Series = NDArray[np.float64]

_WINDOW = 4
_LEVELS = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75)
_SERIES = ("logprob", "certainty", "margin")
_CUTOFFS: dict[str, tuple[float, ...]] = {
    "logprob": (-0.1, -0.5, -1.0, -2.0),
    "certainty": (-0.2, -0.5, -1.0),
    "margin": (0.5, 1.0, 2.0, 4.0),
}
_PROMPT_CUTOFFS = (-2.0, -5.0, -8.0)
_PROMPT_TAIL = 6
# Limits of the signals. The rows are log-probabilities, entropies and margins.
_LOWEST, _HIGHEST = np.array([[-30.0], [0.0], [0.0]]), np.array([[0.0], [15.0], [30.0]])
_UNKNOWN = np.array([[-30.0], [15.0], [0.0]])  # replacement for NaN in each row: the least certain value
_ROW_OF_CUTOFF = np.array([row for row, name in enumerate(_SERIES) for _ in _CUTOFFS[name]])
_ALL_CUTOFFS = np.array([[cut] for name in _SERIES for cut in _CUTOFFS[name]])
_ALL_PROMPT_CUTOFFS = np.array([[cut] for cut in _PROMPT_CUTOFFS])
for _table in (_LOWEST, _HIGHEST, _UNKNOWN, _ROW_OF_CUTOFF, _ALL_CUTOFFS, _ALL_PROMPT_CUTOFFS):
    _table.setflags(write=False)


def signals(view: RunView, first: int | None = None) -> Array:
    """Return features of the generated tokens' signals, (len(SIGNAL_NAMES),) float32. `first`: number of tokens used.

    Raises ValueError if the three signal arrays differ in length.
    """
    if not len(view.logprobs) == len(view.entropies) == len(view.margins):
        raise ValueError("logprobs, entropies and margins must have one entry per token")
    raw = np.array((view.logprobs[:first], view.entropies[:first], view.margins[:first]), np.float64)
    series = _clean(raw, _LOWEST, _HIGHEST, _UNKNOWN)
    series[1] = -series[1]
    n = series.shape[1]
    below = (series[_ROW_OF_CUTOFF] < _ALL_CUTOFFS).sum(axis=1)
    parts = ((np.log1p(n),), _statistics(series).ravel(), (series[0].sum(),), np.log1p(below), below / max(n, 1))
    return np.concatenate(parts).astype(np.float32)


def prompt_signals(logprobs: Array) -> Array:
    """Return features of the prompt tokens' log-probabilities, named in PROMPT_SIGNAL_NAMES. Rare words score low."""
    raw = np.asarray(logprobs, np.float64)[None]
    series = _clean(raw, _LOWEST[:1], _HIGHEST[:1], _UNKNOWN[:1])
    below = (series < _ALL_PROMPT_CUTOFFS).sum(axis=1)
    tail = np.zeros(_PROMPT_TAIL)
    last = series[0, ::-1][:_PROMPT_TAIL]
    tail[: len(last)] = last
    parts = ((np.log1p(series.shape[1]),), _statistics(series)[0], np.log1p(below), tail)
    return np.concatenate(parts).astype(np.float32)


def _clean(values: Series, lowest: Series, highest: Series, unknown: Series) -> Series:
    """Clip each row of `values`, (rows, n), to the row's limits, (rows, 1); NaN becomes the row's `unknown`."""
    return np.minimum(np.maximum(np.where(np.isnan(values), unknown, values), lowest), highest)


def _statistics(series: Series) -> Series:
    """Summarise each row of `series`, (rows, n), by its statistics, (rows, len(_STATISTICS)); zeros if n is 0."""
    rows, n = series.shape
    if n == 0:
        return np.zeros((rows, len(_STATISTICS)))
    return np.stack([*_summaries(series).values()], axis=1)


def _summaries(series: Series) -> dict[str, Series]:
    """Return the statistics of each row of `series`, by name; each statistic has one value per row, (rows,)."""
    rows, n = series.shape
    window = min(_WINDOW, n)
    ordered = np.sort(series, axis=1)
    exact = np.array(_LEVELS) * (n - 1)
    below = exact.astype(np.intp)
    low = ordered[:, below]
    quantiles = low + (exact - below) * (ordered[:, np.minimum(below + 1, n - 1)] - low)
    time = np.linspace(-0.5, 0.5, n) if n > 1 else np.zeros(1)
    sums = np.zeros((rows, n + 1))
    series.cumsum(axis=1, out=sums[:, 1:])
    windows = (sums[:, window:] - sums[:, :-window]) / window
    mean = series.sum(axis=1) / n
    centred = series - mean[:, None]
    return {
        "mean": mean,
        "std": np.sqrt((centred * centred).sum(axis=1) / n),
        "min": ordered[:, 0],
        "max": ordered[:, -1],
        "first": series[:, 0],
        "second": series[:, min(1, n - 1)],
        "last": series[:, -1],
        "head": series[:, :window].sum(axis=1) / window,
        "tail": series[:, -window:].sum(axis=1) / window,
        "worst_window": windows.min(axis=1),
        "worst_at": series.argmin(axis=1) / n,
        "slope": centred @ time / max(float(time @ time), 1e-9),
        **{f"q{int(100 * level):02d}": quantiles[:, i] for i, level in enumerate(_LEVELS)},
    }


_STATISTICS = (*_summaries(np.zeros((1, 1))),)
SIGNAL_NAMES = (
    "tokens",
    *(f"{series}_{name}" for series in _SERIES for name in _STATISTICS),
    "logprob_sum",
    *(f"{series}_below_{cut:g}" for series in _SERIES for cut in _CUTOFFS[series]),
    *(f"{series}_share_below_{cut:g}" for series in _SERIES for cut in _CUTOFFS[series]),
)
PROMPT_SIGNAL_NAMES = (
    "prompt_tokens",
    *(f"prompt_{name}" for name in _STATISTICS),
    *(f"prompt_below_{-cut:g}" for cut in _PROMPT_CUTOFFS),
    *(f"prompt_last_{i}" for i in range(1, _PROMPT_TAIL + 1)),
)
