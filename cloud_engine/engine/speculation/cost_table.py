"""The seconds of engine steps, by sequences and draft tokens: profiled at warm-up, interpolated, corrected by steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..scheduling.step_budget import RecentMedian

Floats = NDArray[np.float64]

_RATE = 1 / 16  # weight of an observed step in the moving averages
_PROFILE_STEPS = 4  # weight of the profile in the average of steps without drafts, in steps
_MAX_FIXED_ROWS = 1e6  # where more rows take no measurable time
_MAX_EXCESS = 0.25  # largest excess of a step with drafts over its estimate that counts; the rest is a disturbance


def fixed_rows(profile: Mapping[tuple[int, int], float]) -> float:
    """Return how many rows take as long to compute as the fixed part of a step, which mostly reads the weights.

    `profile`: as for `CostTable`; only its smallest and largest step count."""
    seconds = {sequences * (1 + drafts): taken for (sequences, drafts), taken in profile.items()}
    few, many = min(seconds), max(seconds)
    row_s = (seconds[many] - seconds[few]) / (many - few)
    fixed_s = max(0.0, seconds[few] - few * row_s)
    return min(fixed_s / row_s, _MAX_FIXED_ROWS) if row_s > 0 else _MAX_FIXED_ROWS


class DraftingCosts:
    """Seconds of a draft model's passes, by sequences: of the first pass in a step, and of each further pass."""

    def __init__(self, first_s: Mapping[int, float], further_s: Mapping[int, float], token_s: float) -> None:
        """`token_s`: seconds per known token that the draft model must compute before it drafts."""
        self._first_s, self._further_s, self.token_s = first_s, further_s, token_s

    def seconds(self, sequences: Floats, passes: Floats) -> Floats:
        first_s, further_s = (
            np.interp(sequences, list(measured), list(measured.values()))
            for measured in (self._first_s, self._further_s)
        )
        return np.where(passes > 0, first_s + (passes - 1) * further_s, 0.0)


class CostTable:
    """Step seconds over a grid of (sequences, draft tokens per sequence).

    A step costs a base for its sequences and an extra for its drafts. Observed steps correct the nearest grid points.
    """

    def __init__(self, profile: Mapping[tuple[int, int], float]) -> None:
        """Take the measured seconds by (sequences, draft tokens per sequence), with points without drafts.

        Drafts never make a step faster, and k drafts per sequence cost at most k steps: measurements that say
        otherwise are noise.
        """
        self._sizes = sorted({size for size, _ in profile})
        lengths = sorted({length for _, length in profile})
        self._lengths = np.array(lengths, float)
        self._base = np.array([profile[size, 0] for size in self._sizes])
        self._recent = [RecentMedian() for _ in self._sizes]  # observed seconds without drafts
        self._steps = [0] * len(self._sizes)  # number of observed steps without drafts
        self._extra = np.zeros((len(self._sizes), len(lengths)))
        for row, size in enumerate(self._sizes):
            known = [length for length in lengths if (size, length) in profile]
            extra = np.array([profile[size, length] - profile[size, 0] for length in known])
            extra = np.maximum.accumulate(np.clip(extra, 0, self._base[row] * np.array(known)))
            self._extra[row] = _extended(self._lengths, np.array(known, float), extra)

    def base_s(self, sequences: int) -> float:
        """Return the seconds of a step that computes one token per sequence."""
        return self._near(sequences)[0]

    def extra_s(self, sequences: int, rows: Floats) -> Floats:
        """Return the seconds that `rows` more tokens than one per sequence add to a step."""
        _, below, weight = self._near(sequences)
        lengths = rows / sequences
        extra = self._at(below, lengths)
        return extra if weight == 0 else (1 - weight) * extra + weight * self._at(below + 1, lengths)

    def observe(self, sequences: int, rows: int, seconds: float) -> None:
        """Move the table towards a finished step that computed `rows` draft tokens and no prompt tokens."""
        base, below, weight = self._near(sequences)
        expected = base + float(self.extra_s(sequences, np.array([float(rows)]))[0])
        error = seconds - expected
        for row, share in ((below, 1 - weight), (below + 1, weight)):
            if share and rows:
                self._observe_drafts(row, rows / sequences, share * _RATE * min(error, _MAX_EXCESS * expected))
            elif share:
                self._recent[row].add(self._base[row] + error)
                self._steps[row] += 1
                rate = max(_RATE, 1 / (_PROFILE_STEPS + self._steps[row]))
                self._base[row] += share * rate * (self._recent[row].median - self._base[row])

    def _observe_drafts(self, row: int, length: float, change: float) -> None:
        """Add `change` to the extra of the two grid points around `length`, and to the base what drafts cannot save."""
        above = min(max(1, int(np.searchsorted(self._lengths, length))), len(self._lengths) - 1)
        start, end = self._lengths[above - 1], self._lengths[above]
        part = min(1.0, (length - start) / (end - start))
        extra = self._extra[row]
        self._base[row] += min(0.0, extra[above] + change)
        extra[above] = max(0.0, extra[above] + part * change)
        if above > 1:
            extra[above - 1] = max(0.0, extra[above - 1] + (1 - part) * change)

    def _near(self, sequences: int) -> tuple[float, int, float]:
        """Return the base seconds, the grid row at or below `sequences`, and the weight of the next grid row."""
        below = max(0, bisect_right(self._sizes, sequences) - 1)
        if below + 1 == len(self._sizes):
            return float(self._base[below]), below, 0.0
        low, high = self._sizes[below], self._sizes[below + 1]
        weight = max(0.0, (sequences - low) / (high - low))
        return float((1 - weight) * self._base[below] + weight * self._base[below + 1]), below, weight

    def _at(self, row: int, lengths: Floats) -> Floats:
        return _extended(lengths, self._lengths, self._extra[row])


def _extended(at: Floats, known: Floats, values: Floats) -> Floats:
    """Interpolate `values` linearly, and extrapolate them with the last slope."""
    slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
    return np.interp(at, known, values) + np.maximum(0, at - known[-1]) * max(0.0, slope)
