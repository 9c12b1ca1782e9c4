"""Drift detection: whether requests and their outcomes still resemble the calibration rows.

P(gain) is the predicted probability that the cloud's answer is better. Two tests run over a sliding window of requests.
The first compares gate 1's P(gain) with its distribution in the calibration rows (two-sample Kolmogorov-Smirnov). The
second checks whether the cloud's graded answers are better as often as gate 3 predicts; each is weighted by the inverse
of its probability of being graded. The thresholds are strict because the tests repeat: the first test raises one false
alarm in about ten thousand independent windows, and the second needs a deviation of four standard errors.
"""

from __future__ import annotations

import threading
from collections import deque
from math import log, sqrt

import numpy as np

from ..arrays import Floats
from .drift_report import DriftReport

_WINDOW, _LEAST, _EVERY = 500, 100, 25
_CRITICAL = sqrt(-log(1e-4 / 2) / 2)
_ERRORS = 4.0


def stricter(quality: float) -> float:
    """Return the stricter quality target to use after a drift alarm: half the quality loss is allowed."""
    return 1.0 - (1.0 - quality) / 2


def ks_distance(one: Floats, other: Floats) -> float:
    """Return the Kolmogorov-Smirnov distance of two samples, (n,) and (m,)."""
    places = np.concatenate((one, other))
    shares = (np.searchsorted(np.sort(sample), places, side="right") / len(sample) for sample in (one, other))
    return float(np.abs(next(shares) - next(shares)).max())


class DriftMonitor:
    """Compares live requests with the calibration rows. Thread-safe.

    `typical_p_gain`: gate 1's P(gain) on the calibration rows, (n,).
    """

    def __init__(self, typical_p_gain: Floats) -> None:
        self._typical = typical_p_gain
        self._requests: deque[float] = deque(maxlen=_WINDOW)
        self._labelled: deque[tuple[float, float, float]] = deque(maxlen=_WINDOW)
        self._lock = threading.Lock()
        self._events = 0
        self._alarm: str | None = None

    @property
    def alarm(self) -> str | None:
        """Short description of the drift; None without drift, or with too few requests to tell."""
        return self._alarm

    def has_calibration_of(self, other: DriftMonitor) -> bool:
        return np.array_equal(self._typical, other._typical)

    def report(self) -> DriftReport:
        """Return the drift statistics of the newest requests."""
        with self._lock:
            requests, labelled = np.array(self._requests), np.array(self._labelled).reshape(-1, 3)
            alarm = self._alarm
        distance = ks_distance(requests, self._typical) if len(requests) else None
        if not len(labelled):
            return DriftReport(len(requests), distance, 0, None, None, alarm)
        p_gain, gain, weight = labelled.T
        expected, gained = (float(np.average(values, weights=weight)) for values in (p_gain, gain))
        return DriftReport(len(requests), distance, len(labelled), expected, gained, alarm)

    def observe(self, p_gain: float) -> None:
        """Record gate 1's prediction for a request: the probability that the cloud's answer is better."""
        with self._lock:
            self._requests.append(p_gain)
            self._update()

    def labelled(self, p_gain: float, gain: bool, propensity: float) -> None:
        """Record a graded answer. `gain`: the cloud was better; `propensity`: probability, above 0, of being graded."""
        with self._lock:
            self._labelled.append((p_gain, float(gain), 1.0 / propensity))
            self._update()

    def _update(self) -> None:
        self._events += 1
        if self._events % _EVERY == 0:
            self._alarm = self._shifted() or self._calibration_alarm()

    def _shifted(self) -> str | None:
        if len(self._requests) < _LEAST:
            return None
        n, m = len(self._requests), len(self._typical)
        distance = ks_distance(np.array(self._requests), self._typical)
        if distance <= _CRITICAL * sqrt((n + m) / (n * m)):
            return None
        return f"requests are unlike those of the calibration (distance {distance:.2f})"

    def _calibration_alarm(self) -> str | None:
        if len(self._labelled) < _LEAST:
            return None
        p_gain, gain, weight = np.array(self._labelled).T
        error = float(np.sqrt((weight**2 * np.maximum(p_gain * (1 - p_gain), 1e-3)).sum()))
        surplus = float((weight * (gain - p_gain)).sum())
        if surplus <= _ERRORS * error:  # fewer gains than predicted cost no quality, so they raise no alarm
            return None
        more = surplus / float(weight.sum())
        return f"the cloud is better more often than predicted (by {more:.0%} of the graded answers)"
