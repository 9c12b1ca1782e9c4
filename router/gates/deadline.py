"""Measured latencies of the tiers, and the choice of tiers under a deadline."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

_REMEMBERED = 64

PlannedTiers = Literal["both", "one", "local", "cloud"]


class LatencyEstimates:
    """Recent durations of each kind of work, in seconds."""

    def __init__(self) -> None:
        self._durations: dict[str, deque[float]] = {}

    def observe(self, work: str, seconds: float) -> None:
        self._durations.setdefault(work, deque(maxlen=_REMEMBERED)).append(seconds)

    def expected_s(self, work: str) -> float | None:
        """Return the 90th percentile of the recent durations of `work`, or None before the first measurement."""
        durations = sorted(self._durations.get(work, ()))
        return durations[min(len(durations) - 1, int(0.9 * len(durations)))] if durations else None


@dataclass(frozen=True, slots=True)
class DeadlinePlan:
    """Tiers whose expected time fits a deadline. "one": either tier fits, but not both in sequence."""

    tiers: PlannedTiers
    reason: str = ""


def plan(remaining_s: float, local_s: float | None, cloud_s: float | None) -> DeadlinePlan:
    """Plan both tiers if their times fit in sequence or are unknown, "one" if each fits alone, else the faster tier."""
    if local_s is None or cloud_s is None or local_s + cloud_s <= remaining_s:
        return DeadlinePlan("both")
    why = f"deadline: {remaining_s:.1f} s left, the device takes {local_s:.1f} s and the cloud {cloud_s:.1f} s"
    if local_s <= remaining_s and cloud_s <= remaining_s:
        return DeadlinePlan("one", f"{why}: there is time for only one tier")
    if local_s <= remaining_s or (cloud_s > remaining_s and local_s <= cloud_s):
        return DeadlinePlan("local", f"{why}: the device is faster")
    return DeadlinePlan("cloud", f"{why}: the cloud is faster")
