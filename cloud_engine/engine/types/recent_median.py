"""The median of a few recent measurements."""

from __future__ import annotations

from collections import deque

_REMEMBERED = 5  # measurements kept


class RecentMedian:
    """The lower median of the last few measurements, so that single outliers do not count.

    It is reliable from the second measurement on. Measurements of cold steps (`StepCosts.observe`) are dropped as soon
    as a warm one arrives.
    """

    __slots__ = ("_cold", "_values", "median")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_REMEMBERED)
        self._cold = True
        self.median = 0.0

    def add(self, value: float, *, cold: bool = False) -> None:
        if cold and not self._cold:
            return
        if self._cold and not cold:
            self._values.clear()
        self._cold = cold
        self._values.append(value)
        self.median = sorted(self._values)[(len(self._values) - 1) // 2]

    @property
    def is_reliable(self) -> bool:
        return len(self._values) > 1
