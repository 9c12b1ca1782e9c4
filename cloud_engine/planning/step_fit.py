"""Fitting of a step time model to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace

import numpy as np

from .step_time import MAX_ROW_COSTS, StepContent, StepTimeModel

_CONTEXT, _ROWS = 3, 6  # index of the column `context_tokens`, and of the first column of `rows()`
_SMALLEST_CACHE = 9  # log2 of the smallest processor cache to try, in tokens
_HELD_UP = 8.0  # steps that take longer than this multiple of the first estimate are outliers
_ROUNDS = 5


def fit(steps: Sequence[tuple[StepContent, float]]) -> StepTimeModel:
    """Fit non-negative costs by least squares of relative errors, without slow outliers.

    Errors are relative to the estimated time. Relative to the measured time, steps that were fast by chance would weigh
    more than others.
    """
    contents = np.zeros((len(steps), _ROWS + MAX_ROW_COSTS))
    for filled, (content, _) in zip(contents, steps, strict=True):
        rows = content.rows()
        filled[:_ROWS], filled[_ROWS : _ROWS + len(rows)] = astuple(content), rows
    contents[:, np.flatnonzero(contents.any(axis=0))[-1]] = 0  # drop the last column: `prompt_tokens` includes its cost
    seconds = np.array([taken for _, taken in steps])
    near = seconds <= _HELD_UP * (contents @ _non_negative(contents, seconds, seconds))
    contents, seconds = contents[near], seconds[near]
    looked_back = contents[:, _CONTEXT]
    sizes = [0.0, *(2.0**power for power in range(_SMALLEST_CACHE, int(looked_back.max()).bit_length()))]
    return min((_fit(contents, seconds, size) for size in sizes), key=lambda fitted: fitted[0])[1]


def _fit(contents: np.ndarray, seconds: np.ndarray, cached: float) -> tuple[float, StepTimeModel]:
    """Return the squared error and the model, assuming that the processor's caches hold `cached` tokens."""
    over_context = np.maximum(0.0, contents[:, _CONTEXT] - cached) * (cached > 0)
    columns, scale = np.column_stack([contents, over_context]), seconds
    costs = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        costs = _non_negative(columns, seconds, scale)
        scale = columns @ costs
    sums, rows, uncached = costs[:_ROWS], tuple(map(float, costs[_ROWS:-1])), float(costs[-1])
    model = StepTimeModel(*map(float, sums), cached_tokens=cached, uncached_tokens=uncached)
    model = replace(model, rows=rows, largest_batch=int(contents[:, 1].max()))
    return float(np.square(seconds / scale - 1).sum()), model


def _non_negative(contents: np.ndarray, seconds: np.ndarray, scale: np.ndarray) -> np.ndarray:
    weighted = contents / scale[:, None]
    sizes = np.linalg.norm(weighted, axis=0)
    kept = list(np.flatnonzero(sizes))
    costs = np.zeros(len(sizes))
    while kept:
        solved, *_ = np.linalg.lstsq(weighted[:, kept] / sizes[kept], seconds / scale, rcond=None)
        if (solved >= 0).all():
            costs[kept] = solved / sizes[kept]
            break
        kept.pop(int(solved.argmin()))
    return costs
