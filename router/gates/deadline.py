"""The tiers' measured latencies, by which a deadline is judged."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

_REMEMBERED = 64

PlannedTiers = Literal["both", "one", "local", "cloud"]


class LatencyEstimates:
    """The last durations of each kind of work, in seconds."""

    def __init__(self) -> None:
        self._durations: dict[str, deque[float]] = {}

    def observe(self, work: str, seconds: float) -> None:
        self._durations.setdefault(work, deque(maxlen=_REMEMBERED)).append(seconds)

    def expected_s(self, work: str) -> float | None:
        """The 90th percentile; None before the first measurement."""
        durations = sorted(self._durations.get(work, ()))
        return durations[min(len(durations) - 1, int(0.9 * len(durations)))] if durations else None


@dataclass(frozen=True, slots=True)
class DeadlinePlan:
    """The tiers that a deadline leaves time for; "one": either, but not one after the other."""

    tiers: PlannedTiers
    reason: str = ""


def plan(remaining_s: float, local_s: float | None, cloud_s: float | None) -> DeadlinePlan:
    """Both tiers if there is time for both, or nobody knows; else the one that fits, or the quicker if none does."""
    if local_s is None or cloud_s is None or local_s + cloud_s <= remaining_s:
        return DeadlinePlan("both")
    why = f"deadline: {remaining_s:.1f} s left, the device takes {local_s:.1f} s and the cloud {cloud_s:.1f} s"
    if local_s <= remaining_s and cloud_s <= remaining_s:
        return DeadlinePlan("one", f"{why}: time for one of them")
    if local_s <= remaining_s or (cloud_s > remaining_s and local_s <= cloud_s):
        return DeadlinePlan("local", f"{why}: the device is the quicker")
    return DeadlinePlan("cloud", f"{why}: the cloud is the quicker")
