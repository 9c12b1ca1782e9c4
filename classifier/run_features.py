"""Features of how a run went: its token signals, and how surprising the local model found the question.

Every series is turned so that higher means more certain, clipped to a fixed range, summarised by the same statistics.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .views import Array, RunView

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

_STATISTICS = (
    "mean",
    "std",
    "min",
    "max",
    "first",
    "second",
    "last",
    "head",
    "tail",
    "worst_window",
    "worst_at",
    "slope",
    *(f"q{int(100 * level):02d}" for level in _LEVELS),
)
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


def signals(view: RunView, first: int | None = None) -> Array:
    """(len(SIGNAL_NAMES),) float32 over the generated tokens, or over the `first` of them only.

    Raises ValueError if the three signal arrays differ in length.
    """
    if not len(view.logprobs) == len(view.entropies) == len(view.margins):
        raise ValueError("logprobs, entropies and margins must have one entry per token each")
    series = np.stack(
        (
            _clean(view.logprobs[:first], -30.0, 0.0, unknown=-30.0),
            -_clean(view.entropies[:first], 0.0, 15.0, unknown=15.0),
            _clean(view.margins[:first], 0.0, 30.0, unknown=0.0),
        )
    )
    n = series.shape[1]
    below = np.array(
        [(row < cut).sum() for row, name in zip(series, _SERIES, strict=True) for cut in _CUTOFFS[name]], float
    )
    parts = ([np.log1p(n)], _statistics(series).ravel(), [series[0].sum()], np.log1p(below), below / max(n, 1))
    return np.concatenate(parts).astype(np.float32)


def prompt_signals(view: RunView) -> Array:
    """(len(PROMPT_SIGNAL_NAMES),) float32: a phrasing the local model rarely saw shows as low log-probabilities."""
    series = _clean(view.prompt_logprobs, -30.0, 0.0, unknown=-30.0)
    below = np.array([(series < cut).sum() for cut in _PROMPT_CUTOFFS], float)
    tail = np.zeros(_PROMPT_TAIL)
    last = series[::-1][:_PROMPT_TAIL]
    tail[: len(last)] = last
    parts = ([np.log1p(len(series))], _statistics(series[None])[0], np.log1p(below), tail)
    return np.concatenate(parts).astype(np.float32)


def _clean(values: Array, low: float, high: float, *, unknown: float) -> NDArray[np.float64]:
    """`values` as float64 within [low, high]; not-a-number counts as `unknown`."""
    wide = np.asarray(values, np.float64)
    return np.clip(np.where(np.isnan(wide), unknown, wide), low, high)


def _statistics(series: NDArray[np.float64]) -> NDArray[np.float64]:
    """(rows, len(_STATISTICS)) summaries of (rows, n) series; zeros where n is 0."""
    rows, n = series.shape
    if n == 0:
        return np.zeros((rows, len(_STATISTICS)))
    ordered = np.sort(series, axis=1)
    places = np.array(_LEVELS) * (n - 1)
    below = places.astype(int)
    above = np.minimum(below + 1, n - 1)
    quantiles = ordered[:, below] + (places - below) * (ordered[:, above] - ordered[:, below])
    window = min(_WINDOW, n)
    sums = np.concatenate((np.zeros((rows, 1)), np.cumsum(series, axis=1)), axis=1)
    windows = (sums[:, window:] - sums[:, :-window]) / window
    time = np.linspace(-0.5, 0.5, n) if n > 1 else np.zeros(1)
    mean = series.mean(axis=1)
    columns = (
        mean,
        series.std(axis=1),
        ordered[:, 0],
        ordered[:, -1],
        series[:, 0],
        series[:, min(1, n - 1)],
        series[:, -1],
        series[:, :window].mean(axis=1),
        series[:, -window:].mean(axis=1),
        windows.min(axis=1),
        series.argmin(axis=1) / n,
        (series - mean[:, None]) @ time / max(float(time @ time), 1e-9),
    )
    return np.concatenate((np.stack(columns, axis=1), quantiles), axis=1)
