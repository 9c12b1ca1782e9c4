"""Statistics that the drift monitor reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Statistics of the newest requests, compared with the calibration rows."""

    # Number of requests that gate 1 judged, at most the newest 500.
    requests: int
    # Kolmogorov-Smirnov distance between the requests' P(gain) and the calibration's; None without requests.
    distance: float | None
    # Number of graded answers, at most the newest 500.
    graded: int
    # Share of graded answers on which the cloud is better, as predicted by gate 3; None without graded answers.
    expected_gain: float | None
    # Share of graded answers on which the cloud was in fact better; None without graded answers.
    observed_gain: float | None
    # Short description of the drift; None without drift.
    alarm: str | None
