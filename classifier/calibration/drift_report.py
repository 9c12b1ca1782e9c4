"""The drift monitor's knowledge, for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Figures of the newest requests."""

    # How many gate 1 judged, of the newest 500.
    requests: int
    # Kolmogorov-Smirnov distance of their P(gain) from the calibration's; None without requests.
    distance: float | None
    # How many answers were graded, of the newest 500.
    graded: int
    # The share of them that gate 3 expects the cloud to gain on; None without any.
    expected_gain: float | None
    # The share that it did gain on.
    observed_gain: float | None
    # The drift in a few words.
    alarm: str | None
