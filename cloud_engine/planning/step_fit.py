"""The costs of a step, fitted to steps that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import numpy as np

from .step_time import MAX_ROW_COSTS, StepContent, StepTimeModel

_CONTEXT, _ROWS = 3, 6  # the column of `context_tokens`, and the first of `StepContent.rows`
_SMALLEST_CACHE = 9  # as a power of two tokens
_HELD_UP = 8.0  # times what a step should take
_ROUNDS = 5
_MAX_CHANGES = 60  # of the costs that are not zero
_LEAST_GAIN = 1e-9


def fit(steps: Sequence[tuple[StepContent, float]]) -> StepTimeModel:
    """Least squares of relative errors, none of the costs negative, without the steps that something held up.

    Errors are relative to the estimate: relative to what was measured, short steps would count for more than long ones.
    """
    contents = np.zeros((len(steps), _ROWS + MAX_ROW_COSTS))
    for filled, (content, _) in zip(contents, steps, strict=True):
        rows = content.rows()
        filled[:_ROWS], filled[_ROWS : _ROWS + len(rows)] = astuple(content), rows
    seconds = np.array([taken for _, taken in steps])
    near = seconds <= _HELD_UP * (contents @ _non_negative(contents, seconds, seconds))
    contents, seconds = contents[near], seconds[near]
    looked_back = contents[:, _CONTEXT]
    sizes = [0.0, *(2.0**power for power in range(_SMALLEST_CACHE, int(looked_back.max()).bit_length()))]
    return min((_fit(contents, seconds, size) for size in sizes), key=lambda found: found[0])[1]


def _fit(contents: np.ndarray, seconds: np.ndarray, cached: float) -> tuple[float, StepTimeModel]:
    """With so many tokens in the caches: the squared error, and the costs."""
    beyond = np.maximum(0.0, contents[:, _CONTEXT] - cached) * (cached > 0)
    columns, scale = np.column_stack([contents, beyond]), seconds
    costs = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        costs = _non_negative(columns, seconds, scale)
        scale = columns @ costs
    *sums, uncached = map(float, costs)
    largest, rows = int(contents[:, 1].max()), tuple(sums[_ROWS:])
    found = StepTimeModel(*sums[:_ROWS], cached, uncached, largest_batch=largest, rows=rows)
    return float(np.square(seconds / scale - 1).sum()), found


def _non_negative(contents: np.ndarray, seconds: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Least squares with the active set of Lawson and Hanson."""
    triangle = np.linalg.qr(
        np.column_stack([contents, seconds]) / scale[:, None], mode="r"
    )  # the same errors, in few rows
    weighted, wanted = triangle[:, :-1], triangle[:, -1]
    sizes = np.linalg.norm(weighted, axis=0)
    weighted /= (sizes := np.where(sizes, sizes, 1.0))
    costs, free = np.zeros(len(sizes)), np.zeros(len(sizes), bool)
    for _ in range(_MAX_CHANGES):
        gains = np.where(free, 0.0, weighted.T @ (wanted - weighted @ costs))
        if gains.max() <= _LEAST_GAIN * np.linalg.norm(wanted):
            break
        free[gains.argmax()] = True
        while (solved := _solved(weighted, wanted, free)).min() < 0:
            below = solved < 0
            costs += (costs[below] / (costs - solved)[below]).min() * (solved - costs)
            free &= costs > _LEAST_GAIN
            costs *= free
        costs = solved
    return costs / sizes


def _solved(weighted: np.ndarray, wanted: np.ndarray, free: np.ndarray) -> np.ndarray:
    found = np.zeros(len(free))
    found[free], *_ = np.linalg.lstsq(weighted[:, free], wanted, rcond=None)
    return found
