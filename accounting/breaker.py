"""Circuit breaker of a cloud or a node: closed, open after failures, half-open after a recovery period."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["closed", "half-open", "open"]
#: `pass`: the breaker is closed. `trial`: this request decides whether the breaker closes.
Admission = Literal["pass", "trial", "refused"]

_MAX_REMEMBERED = 64  # failed requests to remember, by digest


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """The parameters of a circuit breaker."""

    # Consecutive distinct failed requests that open the breaker.
    failures_to_open: int
    # First recovery period: seconds, or a number of good probes if `by_probes`. Each consecutive trip doubles the
    # period.
    recovery: float
    # Longest recovery period, in the unit of `recovery`.
    max_recovery: float
    # Whether a recovery ends after a number of good health probes instead of after a time.
    by_probes: bool = False
    # Time after which a failure no longer counts, in seconds.
    window_s: float = float("inf")


class Breaker:
    """A circuit breaker without I/O. Requests are identified by digest; no prompt is stored.

    A closed breaker passes every request, an open breaker none. A half-open breaker passes one request as a trial.
    `trips`: how often the breaker opened. `clock`: a monotonic clock, in seconds.
    """

    def __init__(self, rules: BreakerRules, clock: Callable[[], float] = time.monotonic) -> None:
        self.state: State = "closed"
        self.reason = ""
        self.trips = 0
        self._rules = rules
        self._clock = clock
        self._trips_in_a_row = 0  # trips since the last good answer
        self._failures: dict[object, float] = {}  # times of failures since the last good answer
        self._recovery = 0.0
        self._opened_at = 0.0
        self._on_trial = False

    @classmethod
    def unproven(cls, rules: BreakerRules) -> Breaker:
        """Return an open breaker that the first good probe closes."""
        breaker = cls(rules)
        breaker.state, breaker.reason, breaker._recovery = "open", "no probe has succeeded yet", 1
        return breaker

    @property
    def needs_trial(self) -> bool:
        return self.state == "half-open"

    @property
    def seconds_left(self) -> float:
        """Seconds until the next trial, if recoveries are timed."""
        return max(0.0, self._opened_at + self._recovery - self._clock())

    def admit(self) -> Admission:
        """Return whether a request may be sent now. End a trial with `succeeded`, `failed` or `leave_trial`."""
        if self.state == "open" and not self._rules.by_probes and self.seconds_left <= 0:
            self.state = "half-open"
        if self.state == "closed":
            return "pass"
        if self.state == "open" or self._on_trial:
            return "refused"
        self._on_trial = True
        return "trial"

    def leave_trial(self) -> None:
        """End a trial without a result, so that the next request becomes the trial."""
        self._on_trial = False

    def succeeded(self) -> None:
        """Count a request that was answered."""
        self._failures.clear()
        self._trips_in_a_row, self._on_trial = 0, False
        if self.state == "half-open" or not self._rules.by_probes:
            self.state, self.reason = "closed", ""

    def failed(self, reason: str, request: bytes | None = None, *, answered: bool = False) -> bool:
        """Count a request that failed after its retries. Return whether the failure opened the breaker.

        `request`: the request's digest; None if the failure does not depend on the request. Repeats of a failed request
        do not count and do not reopen a half-open breaker. `answered`: whether the server itself answered with an
        error. In this case there is no recovery period, and the next request is a trial.
        """
        self._on_trial = False
        now, key = self._clock(), object() if request is None else request
        if self.state == "open" or key in self._failures:
            return False
        if len(self._failures) >= _MAX_REMEMBERED:
            del self._failures[next(iter(self._failures))]
        self._failures[key] = now
        recent = sum(at > now - self._rules.window_s for at in self._failures.values())
        opened = (self.needs_trial or recent >= self._rules.failures_to_open) and self.trip(reason)
        if opened and answered:
            self._recovery = 0.0
        return opened

    def trip(self, reason: str) -> bool:
        """Open the breaker at once, or restart the recovery. Return False if the breaker was already open."""
        opened = self.state != "open"
        if opened:
            self.trips += 1
            self._trips_in_a_row += 1
        self.state, self.reason, self._on_trial = "open", reason, False
        doublings = min(max(0, self._trips_in_a_row - 1), 32)
        self._recovery = min(self._rules.max_recovery, self._rules.recovery * 2**doublings)
        self._opened_at = self._clock()
        return opened

    def probed(self) -> bool:
        """Count a good probe. Return whether it ended the recovery."""
        if self.state != "open":
            return False
        self._recovery -= 1
        if self._recovery > 0:
            return False
        self.state, self.reason = ("half-open" if self.trips else "closed"), ""
        return True
